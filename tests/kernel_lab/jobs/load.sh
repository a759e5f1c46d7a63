# Steps that put load on $device and check every byte.

# verify ENGINE BLOCK_SIZES DEPTH SIZE_MB [FIO_OPTION…]: random writes, each read back and checked.
# fio's map of what it wrote keeps writes in flight from overlapping (blockalign would turn it off).
verify() {
    local engine=$1 sizes=$2 depth=$3 size=$4
    shift 4
    fio --name=verify --filename="$device" --direct=1 --ioengine="$engine" --iodepth="$depth" \
        --rw=randwrite --bsrange="$sizes" --size="${size}M" --verify=crc32c \
        --verify_fatal=1 --verify_state_save=0 --eta=never --output-format=json \
        --output=/tmp/fio.json "$@" || { head -3 /tmp/fio.json; fail "fio found a fault"; }
    python3 - <<'END'
import json
with open("/tmp/fio.json") as file:
    text = file.read()
job = json.loads(text[text.index("{"):])["jobs"][0]
assert job["error"] == 0, job["error"]
for way in ("write", "read"):
    print(f"fio {way}: {job[way]['io_bytes'] >> 20} MiB, {job[way]['bw'] >> 10} MiB/s")
    assert job[way]["io_bytes"] > 0
END
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
