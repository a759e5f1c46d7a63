# Steps that put load on $device and check every byte.

# verify ENGINE BLOCK_SIZES DEPTH SIZE_MB [FIO_OPTION…]: random writes, each read back and checked.
# fio's map of what it wrote keeps writes in flight from overlapping (blockalign would turn it off).
verify() {
    local engine=$1 sizes=$2 depth=$3 size=$4
    shift 4
    fio --name=verify --filename="$device" --direct=1 --ioengine="$engine" --iodepth="$depth" \
        --rw=randwrite --bsrange="$sizes" --size="${size}M" --verify=crc32c --verify_fatal=1 \
        --verify_state_save=0 --eta=never --output-format=terse --terse-version=3 \
        --output=/tmp/fio "$@" || fail "fio found a fault: $(head -c 300 /tmp/fio)"
    # Terse: MiB and MiB/s are made of the KiB of fields 6 and 7 (read), 47 and 48 (written).
    awk -F';' '{ printf "fio: wrote %d MiB, %.1f MiB/s; read %d MiB, %.1f MiB/s\n",
        $47 / 1024, $48 / 1024, $6 / 1024, $7 / 1024; exit !($6 && $47) }' /tmp/fio
}

# measured NAME SIZE_MB: random writes of 4 KiB, 32 at a time, each read back and checked; what fio
# measured is in /out/NAME.json
measured() {
    fio --name=measured --filename="$device" --direct=1 --ioengine=libaio --iodepth=32 \
        --rw=randwrite --bs=4k --size="${2}M" --verify=crc32c --verify_fatal=1 \
        --verify_state_save=0 --eta=never --output-format=json --output="/out/$1.json" ||
        fail "fio found a fault: $(head -c 300 "/out/$1.json")"
}

# verify_begin with the arguments of verify, and verify_end: load while other steps run
verify_begin() {
    verify "$@" &
    load=$!
    local before
    before=$(writes_done)
    wait_for 30 wrote_since "$before"
}

verify_end() {
    wait "$load" || fail "the load in the background failed"
}

writes_done() {
    awk '{ print $5 }' "/sys/block/${device##*/}/stat"
}

wrote_since() {
    [ "$(writes_done)" -gt $(($1 + 50)) ]
}

# A file system with a tree of files that is still the same after a check and another mount.
filesystem() {
    mkfs.ext4 -q -F "$device"
    mount "$device" /mnt
    cp -r /usr/lib/python3.11/json /usr/lib/python3.11/asyncio /mnt/
    sync -f /mnt
    umount /mnt
    fsck.ext4 -f -n "$device"
    mount "$device" /mnt
    diff -r /usr/lib/python3.11/json /mnt/json
    diff -r /usr/lib/python3.11/asyncio /mnt/asyncio
    umount /mnt
}
