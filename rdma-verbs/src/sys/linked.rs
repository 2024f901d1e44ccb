//! The declarations of the rdma-sys crate under the names that this crate uses.

use core::ffi::c_int;

use libc::sockaddr_storage;

// That crate has the kinds of events as a Rust enum, but newer libraries add values.
pub(crate) use super::generated::ibv_async_event;

pub(crate) use rdma_sys::{
    _compat_ibv_port_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc, rdma_cm_event,
    rdma_cm_id, rdma_conn_param, rdma_event_channel,
};

/// The functions of that crate, but for two that it lacks and those with the kind of an event.
pub(crate) mod functions {
    pub(crate) use rdma_sys::*;

    use super::super::generated::{ibv_async_event, ibv_event_type};
    use super::{ibv_mr, ibv_pd};

    unsafe extern "C" {
        pub(crate) fn ibv_get_async_event(
            context: *mut ibv_context,
            event: *mut ibv_async_event,
        ) -> super::c_int;
        pub(crate) fn ibv_reg_mr_iova2(
            pd: *mut ibv_pd,
            addr: *mut core::ffi::c_void,
            len: usize,
            iova: u64,
            access: core::ffi::c_uint,
        ) -> *mut ibv_mr;
        pub(crate) fn ibv_reg_dmabuf_mr(
            pd: *mut ibv_pd,
            offset: u64,
            len: usize,
            iova: u64,
            fd: super::c_int,
            access: super::c_int,
        ) -> *mut ibv_mr;
        pub(crate) fn ibv_ack_async_event(event: *mut ibv_async_event);
        pub(crate) fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> super::c_int;
    }
}

/// # Safety
/// `wr` is a live structure, maybe uninitialised. The immediate is in network byte order.
pub(crate) const unsafe fn send_wr_immediate(wr: *mut ibv_send_wr) -> *mut u32 {
    // SAFETY: a place in a live structure; nothing is read. Both arms are 32-bit integers.
    unsafe { &raw mut (*wr).imm_data_invalidated_rkey_union }.cast()
}

/// # Safety
/// `wc` is a live structure, maybe uninitialised. The immediate is in network byte order.
pub(crate) const unsafe fn wc_immediate(wc: *const ibv_wc) -> *const u32 {
    // SAFETY: a place in a live structure; nothing is read. Both arms are 32-bit integers.
    unsafe { &raw const (*wc).imm_data_invalidated_rkey_union }.cast()
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
    // SAFETY: a place in a live identifier; nothing is read.
    unsafe { &raw const (*id).route.addr.src_addr_union }.cast()
}

/// # Safety
/// `id` is a live identifier.
pub(crate) unsafe fn destination(id: *const rdma_cm_id) -> *const sockaddr_storage {
    // SAFETY: a place in a live identifier; nothing is read.
    unsafe { &raw const (*id).route.addr.dst_addr_union }.cast()
}
