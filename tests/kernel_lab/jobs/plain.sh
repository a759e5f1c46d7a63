# Steps of a stock Linux host with a target's plain subsystems.

# kept_out NQN PORT [OPTION…]: the host has no right secret
kept_out() {
    load_driver
    if nvme connect -t tcp -a "$LAB_HOST" -s "$2" -n "$1" "${@:3}"; then
        fail "connected without the right secret"
    fi
}

# sees NSID…: exactly these namespaces, soon
sees() {
    wait_for 10 is_seeing "$@"
}

is_seeing() {
    local entry found=""
    for entry in /sys/block/nvme*; do
        case ${entry##*/} in nvme*c*n*) continue ;; esac
        [ "$(cat "$entry/device/subsysnqn" 2>/dev/null)" = "$nqn" ] || continue
        found="$found$(cat "$entry/nsid") "
    done
    [ "$(printf '%s\n' $found | sort -n | xargs)" = "$*" ]
}

# access NSID STATE: what the host knows of the path, soon
access() {
    wait_for 10 has_access "$@"
}

has_access() {
    local entry
    for entry in /sys/class/nvme/"${controller##*/}"/nvme*c*n*; do
        if [ "$(cat "$entry/nsid")" = "$1" ] && [ "$(cat "$entry/ana_state")" = "$2" ]; then
            return 0
        fi
    done
    return 1
}

# The namespace can be reserved, and says so.
reserve() {
    local nsid
    nsid=$(cat "/sys/block/${device##*/}/nsid")
    nvme resv-register "$device" -n "$nsid" --nrkey=0x1234 --rrega=0
    nvme resv-acquire "$device" -n "$nsid" --crkey=0x1234 --rtype=1 --racqa=0
    nvme resv-report "$device" -n "$nsid" -e -o json >/out/reservation.json
    nvme resv-release "$device" -n "$nsid" --crkey=0x1234 --rtype=1 --rrela=0
}

# Log pages that only subsystems with several namespaces and paths have.
inspect_logs() {
    nvme ana-log "$controller" -o json >/out/ana-log.json
    nvme supported-log-pages "$controller"
    nvme effects-log "$controller"
    nvme smart-log "$controller" -o json >/out/smart-log.json
}
