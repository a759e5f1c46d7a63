# Steps on an NVMe drive with 64 bytes of metadata, through its generic device.

# drive TEST [ANCHORED]: one of nvme_drive_tests.rs, with what its store was anchored with last
drive() {
    modprobe nvme
    until ls /dev/ng*n1 >/tmp/drive-name 2>/dev/null; do sleep 0.1; done
    SEALANE_NVME_DEVICE=$(cat /tmp/drive-name) SEALANE_NVME_TRANSFER_BLOCKS=8 \
        env ${2:+SEALANE_ANCHORED="$2"} ./engine_tests --ignored --exact --nocapture \
        "storage::stores::nvme::drive_tests::$1"
}

# drive_until_cut TEST ANCHORED: calls "cut" when the test has flushed and goes on writing
drive_until_cut() {
    drive "$@" >/tmp/drive &
    until grep -q FLUSHED /tmp/drive; do sleep 0.1; done
    cat /tmp/drive
    # Until the console has said all of it.
    sleep 1
    lab-ready cut
}
