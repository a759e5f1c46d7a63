# Steps of hosts with soft-RoCE.

# Addresses of the two devices that `roce_pair` makes.
export SEALANE_VERBS_HERE=10.9.0.1 SEALANE_VERBS_THERE=10.9.0.2

# roce_pair MTU [NETEM…]: two devices of this guest, whose packets take a link between them. Both
# ends are of one namespace, as soft-RoCE wants: rules send packets of one to the other over the
# link although both addresses are local.
roce_pair() {
    modprobe rdma_rxe
    modprobe veth
    ip link add roce0 type veth peer name roce1
    sysctl -qw net.ipv4.conf.{all,default,roce0,roce1}.rp_filter=0
    local end other table=100
    for end in 0 1; do
        other=$((1 - end))
        sysctl -qw "net.ipv4.conf.roce$end.accept_local=1"
        ip link set "roce$end" mtu "$1" up
        ip address add "10.9.0.$((end + 1))/24" dev "roce$end" noprefixroute
        if [ $# -gt 1 ]; then
            modprobe sch_netem
            tc qdisc add dev "roce$end" root netem "${@:2}"
        fi
    done
    for end in 0 1; do
        other=$((1 - end))
        table=$((100 + end))
        ip route add "10.9.0.$((other + 1))" dev "roce$end" src "10.9.0.$((end + 1))" table "$table"
        ip rule add pref "$((10 + end))" iif lo from "10.9.0.$((end + 1))" \
            to "10.9.0.$((other + 1))" lookup "$table"
        ip neigh replace "10.9.0.$((other + 1))" dev "roce$end" \
            lladdr "$(cat "/sys/class/net/roce$other/address")" nud permanent
    done
    ip rule add pref 100 lookup local
    ip rule del pref 0
    for end in 0 1; do
        rdma link add "rxe$end" type rxe netdev "roce$end"
    done
}

# installed: the package's files, which are on the first disk
installed() {
    mkdir -p /usr/lib/sealane /mnt/package
    mount -o ro /dev/lab/disk0 /mnt/package
    mount --bind /mnt/package/usr/lib/sealane /usr/lib/sealane
    # Emulated, each of the three daemons needs seconds to start.
    ip link set lo up
}

# sessions SCENARIO MODE: of verbs_sessions.py
sessions() {
    PYTHONPATH=. /usr/lib/sealane/bin/python3 -B verbs_sessions.py "$@" | tee "/out/$1.json"
}

# roce_card NUMBER: this guest's card on the link to another guest, with the address 10.9.0.NUMBER
roce_card() {
    modprobe rdma_rxe
    ip link set eth1 mtu 4200 up
    ip address add "10.9.0.$1/24" dev eth1
    rdma link add rxe0 type rxe netdev eth1
}

# machine NEAR_OR_FAR: of verbs_machines.py
machine() {
    PYTHONPATH=. /usr/lib/sealane/bin/python3 -B verbs_machines.py "$1" | tee "/out/$1.json"
}
