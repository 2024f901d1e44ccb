//! The generated declarations under the names that the crate uses.

use libc::sockaddr_storage;

pub(crate) use super::generated::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_gid,
    ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc,
    rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel,
};

/// # Safety
/// `wr` is a live structure, maybe uninitialised. The immediate is in network byte order.
pub(crate) const unsafe fn send_wr_immediate(wr: *mut ibv_send_wr) -> *mut u32 {
    // SAFETY: a place in a live structure; nothing is read. Both arms are 32-bit integers.
    unsafe { &raw mut (*wr).__bindgen_anon_1 }.cast()
}

/// # Safety
/// `wc` is a live structure, maybe uninitialised. The immediate is in network byte order.
pub(crate) const unsafe fn wc_immediate(wc: *const ibv_wc) -> *const u32 {
    // SAFETY: a place in a live structure; nothing is read. Both arms are 32-bit integers.
    unsafe { &raw const (*wc).__bindgen_anon_1 }.cast()
}

/// # Safety
/// `event` came from `rdma_get_cm_event` and has not been acknowledged.
pub(crate) unsafe fn event_conn(event: *const rdma_cm_event) -> rdma_conn_param {
    // SAFETY: the caller vouches for `event`. The library zeroes it and fills in this arm for
    // RDMA_PS_TCP (rdma_get_cm_event(3)): integers and a pointer, always valid.
    unsafe { (*event).param.conn }
}

/// # Safety
/// `id` is a live identifier.
pub(crate) unsafe fn source(id: *const rdma_cm_id) -> *const sockaddr_storage {
    // SAFETY: a place expression inside a live identifier; nothing is read.
    unsafe { &raw const (*id).route.addr.__bindgen_anon_1 }.cast()
}

/// # Safety
/// `id` is a live identifier.
pub(crate) unsafe fn destination(id: *const rdma_cm_id) -> *const sockaddr_storage {
    // SAFETY: a place expression inside a live identifier; nothing is read.
    unsafe { &raw const (*id).route.addr.__bindgen_anon_2 }.cast()
}
