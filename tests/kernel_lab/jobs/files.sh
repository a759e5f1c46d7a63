# Steps that keep an ext4 file system on $device busy while other steps run.

# files_begin: mounts it, and has fio write files and check every byte of them, over and over
files_begin() {
    dmesg -C
    mkfs.ext4 -q -F "$device"
    mount "$device" /mnt
    files_forever &
    files=$!
    files_go_on
}

files_forever() {
    local status
    until [ -e /tmp/files-end ]; do
        status=0
        fio --name=files --directory=/mnt --size=8M --direct=1 --ioengine=libaio --iodepth=8 \
            --rw=randwrite --bsrange=4k-64k --fdatasync=16 --verify=crc32c --verify_fatal=1 \
            --verify_state_save=0 --eta=never --output=/tmp/files-fio || status=$?
        # fio 3.33 now and then frees its options twice and aborts (its issue 1598): no fault of the
        # disk, which it would have named.
        if [ "$status" -gt 128 ] && ! grep -E 'verify:|err= *[1-9]' /tmp/files-fio; then
            echo "lab: fio crashed by itself, status $status"
        elif [ "$status" -ne 0 ]; then
            fail "fio found a fault: $(head -c 600 /tmp/files-fio)"
        else
            echo round >>/tmp/files-rounds
        fi
    done
}

# files_go_on: the host writes, a while after the gateway was away
files_go_on() {
    wait_for 90 is_live
    local before
    before=$(writes_done)
    wait_for 90 wrote_since "$before"
    kill -0 "$files" || fail "the load has ended"
}

# files_end: everything was verified, the file system is sound, and the kernel has seen no error
files_end() {
    touch /tmp/files-end
    wait "$files" || fail "the load in the background failed"
    [ -s /tmp/files-rounds ] || fail "nothing was verified"
    umount /mnt
    fsck.ext4 -f -n "$device"
    dmesg >/tmp/dmesg
    if grep -E 'I/O error|EXT4-fs (error|warning)|Aborting journal|Remounting' /tmp/dmesg; then
        fail "the host has seen errors"
    fi
    echo "files: $(wc -l </tmp/files-rounds) rounds verified"
}
