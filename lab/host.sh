# The RDMA device of this machine, for `lab/run host` and `lab/run check`; sourced after lib.sh.
# shellcheck shell=sh

# Prints what is missing for RDMA on this machine, a line each with what to do; nothing when all is there.
host_problems() {
    for lab_library in libibverbs.so.1 librdmacm.so.1; do
        PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep -c "$lab_library" >/dev/null ||
            echo "$lab_library is missing: apt-get install libibverbs1 librdmacm1 ibverbs-providers"
    done
    if ! ls /sys/class/infiniband/* >/dev/null 2>&1; then
        echo "no RDMA device in /sys/class/infiniband: fit a NIC, or: modprobe rdma_rxe &&" \
            "rdma link add rxe0 type rxe netdev INTERFACE; without either, use the guest: lab/run guest PROGRAM"
        return
    fi
    [ -e /dev/infiniband/rdma_cm ] || echo "/dev/infiniband/rdma_cm is missing: modprobe rdma_ucm"
    ls /dev/infiniband/uverbs* >/dev/null 2>&1 || echo "/dev/infiniband/uverbs* is missing: modprobe ib_uverbs"
    for lab_node in /dev/infiniband/rdma_cm /dev/infiniband/uverbs*; do
        [ ! -e "$lab_node" ] || { [ -r "$lab_node" ] && [ -w "$lab_node" ]; } ||
            echo "no access to $lab_node: join its group or run as root"
    done
}

# Exports LAB_DEV, LAB_IP4 and LAB_IP6 where the caller has not: the first device (or LAB_DEV), the first global addresses
# of its interface. Dies with every problem named.
find_host_device() {
    lab_problems=$(host_problems)
    [ -z "$lab_problems" ] || die "this machine is not ready for lab/run host:
$lab_problems"
    if [ -z "${LAB_DEV:-}" ]; then
        for lab_path in /sys/class/infiniband/*; do
            LAB_DEV=${lab_path##*/}
            break
        done
    fi
    lab_netdev=$(cat "/sys/class/infiniband/$LAB_DEV/ports/1/gid_attrs/ndevs/0" 2>/dev/null) ||
        die "RDMA device $LAB_DEV has no network interface on port 1; set LAB_DEV to one that has"
    lab_address() { ip -o "-$1" address show dev "$lab_netdev" scope global | sed 's/.* inet6* \([^/ ]*\).*/\1/;q'; }
    : "${LAB_IP4:=$(lab_address 4)}" "${LAB_IP6:=$(lab_address 6)}"
    [ -n "$LAB_IP4$LAB_IP6" ] || die "$lab_netdev, the interface of $LAB_DEV, has no address: ip address add … dev $lab_netdev"
    export LAB_DEV LAB_IP4 LAB_IP6
}
