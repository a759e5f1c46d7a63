# Steps of guests that run Sealane's Python: its wheel, with what that needs, is on the first disk.

# site: mounts it
site() {
    mkdir -p /mnt/site
    mount /dev/lab/disk0 /mnt/site
    export PYTHONPATH=/job:/mnt/site PYTHONSAFEPATH=1
}

# scratch: the second disk, empty, is where tests keep their files
scratch() {
    mkfs.ext4 -q -F /dev/lab/disk1
    mkdir -p /mnt/scratch
    mount /dev/lab/disk1 /mnt/scratch
    export TMPDIR=/mnt/scratch
}

# engine [OPTION…] FILTER…: the engine's tests
engine() {
    ./engine_tests --test-threads=2 "$@"
}

# both_addresses: those of a session's two ends
both_addresses() {
    ip address add "$SEALANE_VERBS_HERE/32" dev lo
    ip address add "$SEALANE_VERBS_THERE/32" dev lo
}

# plain_session: of verbs_sessions.py, without verbs
plain_session() {
    python3 verbs_sessions.py plain send | tee /out/plain.json
}

# relay PORT…: this machine's loopback ports are those of the machine that runs the guest
relay() {
    local each
    for each in "$@"; do
        socat "TCP-LISTEN:$each,bind=127.0.0.1,fork,reuseaddr" "TCP:$LAB_HOST:$each" &
    done
}

# gateway VOLUME: a gateway with the files in /job/site; its volume becomes a disk of this kernel
gateway() {
    chmod 600 site/*.pem
    python3 arm_gateway.py "$1" &
    gateway=$!
    wait_for 120 [ -e /tmp/attached ]
    local found secret
    read -r found port secret </tmp/attached
    LAB_HOST=127.0.0.1 connect "$found" "$port" "--dhchap-secret=$secret" -i 2
}

# gateway_ends: it flushes, and ends without a fault
gateway_ends() {
    disconnect
    touch /tmp/over
    wait "$gateway"
}
