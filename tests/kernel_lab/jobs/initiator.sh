# Steps of a stock Linux host. `connect` sets what the others use: $nqn, $port, $controller (its
# character device) and $device (the disk of namespace 1).

fail() {
    echo "lab: $*"
    return 1
}

# expect FOUND WANTED WHAT
expect() {
    [ "$1" = "$2" ] || fail "$3: found '$1', expected '$2'"
}

# wait_for SECONDS COMMAND…: until the command succeeds
wait_for() {
    local tries=$(($1 * 10))
    shift
    until "$@"; do
        [ $((tries -= 1)) -gt 0 ] || fail "waited in vain for: $*"
        sleep 0.1
    done
}

# Sets $controller to the first controller of $nqn, and succeeds if there is one.
find_controller() {
    local entry
    for entry in /sys/class/nvme/nvme*; do
        if [ "$(cat "$entry/subsysnqn" 2>/dev/null)" = "$nqn" ]; then
            controller=/dev/${entry##*/}
            return 0
        fi
    done
    return 1
}

# Sets $device to the disk of a namespace of $nqn. The number at the end of its name tells nothing.
find_namespace() {
    local entry subsystem
    for entry in /sys/block/nvme*; do
        case ${entry##*/} in nvme*c*n*) continue ;; esac # one path of a disk, not the disk
        subsystem=$(cat "$entry/device/subsysnqn" 2>/dev/null) || continue
        if [ "$subsystem" = "$nqn" ] && [ "$(cat "$entry/nsid")" = "$1" ]; then
            device=/dev/${entry##*/}
            return 0
        fi
    done
    return 1
}

# load_driver: loads NVMe/TCP with the retries that docs/operate/attachments.md asks for
load_driver() {
    modprobe nvme-tcp
    echo 100 >/sys/module/nvme_core/parameters/max_retries
}

# connect NQN PORT [OPTION…]: options are those of nvme connect
connect() {
    nqn=$1 port=$2
    shift 2
    load_driver
    nvme connect -t tcp -a "$LAB_HOST" -s "$port" -n "$nqn" "$@"
    find_controller || fail "no controller of $nqn"
    namespace 1
}

# discover PORT: what the discovery service there says, for the test to check
discover() {
    load_driver
    nvme discover -t tcp -a "$LAB_HOST" -s "$1" -o json >/out/discovery.json
}

# connect_all NQN PORT [OPTION…]: through discovery. Our daemons name their loopback addresses there.
connect_all() {
    nqn=$1 port=$2
    socat "TCP-LISTEN:$port,bind=127.0.0.1,fork,reuseaddr" "TCP:$LAB_HOST:$port" &
    load_driver
    nvme connect-all -t tcp -a "$LAB_HOST" -s "$port" "${@:3}"
    wait_for 10 find_controller
    namespace 1
}

# namespace NSID: the one that the following steps use
namespace() {
    wait_for 10 find_namespace "$1"
    wait_for 10 [ -b "$device" ]
}

disconnect() {
    nvme disconnect -n "$nqn" | tee /out/disconnect.txt
    ! find_controller || fail "a controller of $nqn is left"
}

# What the controller says of itself, for the test to check.
inspect() {
    nvme id-ctrl "$controller" -o json >/out/id-ctrl.json
    nvme id-ns "$device" -o json >/out/id-ns.json
    nvme list -o json >/out/list.json
    nvme list-subsys -o json >/out/list-subsys.json
    nvme smart-log "$controller" -o json >/out/smart-log.json
    nvme error-log "$controller" -e 4 -o json >/out/error-log.json
    nvme fw-log "$controller" -o json >/out/fw-log.json
    cat "/sys/class/nvme/${controller##*/}/queue_count" >/out/queue-count.txt
    cat "/sys/block/${device##*/}/queue/write_cache" >/out/write-cache.txt
    cat "/sys/block/${device##*/}/queue/logical_block_size" >/out/logical-block-size.txt
}

# The values of the features that a host can rely on, one line "0xFID VALUE" each.
features() {
    local feature said
    for feature in "$@"; do
        said=$(nvme get-feature "$controller" -f "$feature")
        echo "$feature ${said##*:}"
    done | tee /out/features.txt
}

# Data as the host can check it: whole blocks of one letter.
blocks_of() {
    head -c $(($2 * 4096)) /dev/zero | tr '\0' "$1"
}

# write_blocks LBA COUNT LETTER [OPTION…]: by one command, past the page cache
write_blocks() {
    local lba=$1 count=$2 letter=$3
    shift 3
    # From a file: of a pipe nvme takes what one read gives.
    blocks_of "$letter" "$count" >/tmp/blocks
    nvme write "$device" -s "$lba" -c $((count - 1)) -z $((count * 4096)) -d /tmp/blocks "$@"
}

# check_blocks LBA COUNT LETTER: what the namespace holds there, read past the page cache
check_blocks() {
    dd if="$device" iflag=direct bs=4096 skip="$1" count="$2" status=none |
        cmp - <(if [ "$3" = 0 ]; then head -c $(($2 * 4096)) /dev/zero; else blocks_of "$3" "$2"; fi)
}

# refused WORDS COMMAND…: the command must fail, and its output must have the words
refused() {
    local words=$1 output
    shift
    if output=$("$@" 2>&1); then
        fail "this succeeded: $*"
    fi
    [[ $output == *$words* ]] || fail "'$*' says '$output', expected '$words'"
}

# fill LETTER and check_fill LETTER: two places far apart
fill() {
    write_blocks 0 32 "$1"
    write_blocks 8000 32 "$1"
}

check_fill() {
    check_blocks 0 32 "$1"
    check_blocks 8000 32 "$1"
}

# The following fill sixteen blocks, and then change some of them: the others must stay.
read_write() {
    write_blocks 0 16 a
    check_blocks 0 16 a
    nvme flush "$device" -n 1
    write_blocks 2 2 b --force-unit-access
    check_blocks 2 2 b
    check_blocks 4 1 a
}

write_zeroes() {
    write_blocks 0 16 a
    nvme write-zeroes "$device" -n 1 -s 4 -c 1
    check_blocks 3 1 a
    check_blocks 4 2 0
    check_blocks 6 1 a
    nvme write-zeroes "$device" -n 1 -s 8 -c 1 --deac
    check_blocks 7 1 a
    check_blocks 8 2 0
}

deallocate() {
    write_blocks 0 16 a
    nvme dsm "$device" -n 1 -d -s 3,12 -b 2,4
    check_blocks 2 1 a
    check_blocks 3 2 0
    check_blocks 5 7 a
    check_blocks 12 4 0
    blkdiscard -o $((6 * 4096)) -l 4096 "$device"
    check_blocks 6 1 0
    check_blocks 7 1 a
}

compare() {
    write_blocks 0 4 a
    blocks_of a 4 >/tmp/same
    (blocks_of a 3; blocks_of b 1) >/tmp/other
    nvme compare "$device" -s 0 -c 3 -z 16384 -d /tmp/same
    refused "Compare Failure" nvme compare "$device" -s 0 -c 3 -z 16384 -d /tmp/other
    check_blocks 0 4 a
}

verify_command() {
    write_blocks 0 4 a
    nvme verify "$device" -n 1 -s 0 -c 3
}

out_of_range() {
    local blocks
    blocks=$(blockdev --getsz "$device")
    blocks=$((blocks / 8))
    refused "LBA Out of Range" nvme read "$device" -s "$blocks" -c 0 -z 4096
    refused "LBA Out of Range" nvme read "$device" -s $((blocks - 1)) -c 1 -z 8192
    refused "LBA Out of Range" nvme write "$device" -s "$blocks" -c 0 -z 4096 -d /dev/zero
    nvme read "$device" -s $((blocks - 1)) -c 0 -z 4096 -d /dev/null
}

# A controller reset, asked for by the host: what was written before is there after.
reset() {
    write_blocks 8 4 r
    nvme reset "$controller"
    wait_for 20 is_live
    check_blocks 8 4 r
}

is_live() {
    [ "$(cat "/sys/class/nvme/${controller##*/}/state")" = live ]
}

# The host has reconnected by itself.
recovered() {
    wait_for 60 is_live
}

# call WORD: the test does on its side what it has under this word
call() {
    lab-ready "$1" || fail "the test's '$1' failed"
}
