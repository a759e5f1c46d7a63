# Steps of Linux's own NVMe/TCP target, set up through configfs alone.

NVMET=/sys/kernel/config/nvmet

# nvmet_disk SIZE_MB BLOCK_BYTES: a disk that keeps its data in memory, as /dev/nullb0
nvmet_disk() {
    modprobe -a configfs nvmet nvmet-tcp
    modprobe null_blk nr_devices=0
    mountpoint -q /sys/kernel/config || mount -t configfs config /sys/kernel/config
    # Newer kernels name the device after this directory, older ones after its index, 0.
    local disk=/sys/kernel/config/nullb/nullb0
    mkdir "$disk"
    echo 1 >"$disk/memory_backed"
    echo "$1" >"$disk/size"
    echo "$2" >"$disk/blocksize"
    echo 1 >"$disk/discard"
    echo 1 >"$disk/power"
}

# nvmet_subsystem NQN: any host may use it, unless nvmet_host names some
nvmet_subsystem() {
    local subsystem=$NVMET/subsystems/$1
    mkdir "$subsystem"
    echo 1 >"$subsystem/attr_allow_any_host"
    mkdir "$subsystem/namespaces/1"
    echo /dev/nullb0 >"$subsystem/namespaces/1/device_path"
    echo 1 >"$subsystem/namespaces/1/enable"
}

# nvmet_host NQN HOST_NQN SECRET [CONTROLLER_SECRET [HASH [GROUP]]]: only this one, authenticated
nvmet_host() {
    local subsystem=$NVMET/subsystems/$1 host=$NVMET/hosts/$2
    mkdir "$host"
    echo "$3" >"$host/dhchap_key"
    [ -z "${4:-}" ] || echo "$4" >"$host/dhchap_ctrl_key"
    echo "${5:-hmac(sha256)}" >"$host/dhchap_hash"
    echo "${6:-ffdhe2048}" >"$host/dhchap_dhgroup"
    echo 0 >"$subsystem/attr_allow_any_host"
    ln -s "$host" "$subsystem/allowed_hosts/"
}

# nvmet_listen NQN: at port 4420
nvmet_listen() {
    local port=$NVMET/ports/1
    mkdir "$port"
    echo tcp >"$port/addr_trtype"
    echo ipv4 >"$port/addr_adrfam"
    echo 0.0.0.0 >"$port/addr_traddr"
    echo 4420 >"$port/addr_trsvcid"
    ln -s "$NVMET/subsystems/$1" "$port/subsystems/"
}

# nvmet_drop NQN and nvmet_offer NQN: what an administrator's restart of the service does
nvmet_drop() {
    rm "$NVMET/ports/1/subsystems/$1"
}

nvmet_offer() {
    ln -s "$NVMET/subsystems/$1" "$NVMET/ports/1/subsystems/"
}
