# Steps of a stock Linux host with several paths to $device, after `connect`.

# add_path PORT [OPTION…]: another controller of $nqn; options are those of nvme connect
add_path() {
    nvme connect -t tcp -a "$LAB_HOST" -s "$1" -n "$nqn" "${@:2}"
}

# path_is PORT STATE: what the host knows of the path to namespace 1 there, soon
path_is() {
    wait_for 60 path_has "$@"
}

path_has() {
    local entry path
    for entry in /sys/class/nvme/nvme*; do
        [ "$(cat "$entry/subsysnqn" 2>/dev/null)" = "$nqn" ] || continue
        grep -q "trsvcid=$1\b" "$entry/address" || continue
        [ "$(cat "$entry/state")" = live ] || continue
        for path in "$entry"/nvme*c*n*; do
            [ "$(cat "$path/ana_state" 2>/dev/null)" = "$2" ] && return 0
        done
    done
    return 1
}

# goes_on: the host writes, and no error was seen
goes_on() {
    local before
    before=$(writes_done)
    wait_for 60 wrote_since "$before"
    if dmesg | grep -E 'I/O error|Buffer I/O'; then
        fail "the host has seen errors"
    fi
}

# paths_live COUNT: so many controllers of $nqn have a live path, soon
paths_live() {
    wait_for 60 has_live_paths "$1"
}

has_live_paths() {
    local entry live=0
    for entry in /sys/class/nvme/nvme*; do
        [ "$(cat "$entry/subsysnqn" 2>/dev/null)" = "$nqn" ] || continue
        [ "$(cat "$entry/state")" = live ] && live=$((live + 1))
    done
    [ "$live" -eq "$1" ]
}
