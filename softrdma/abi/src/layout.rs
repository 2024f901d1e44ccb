//! The structures of C: those that `rdma-verbs` was generated with, and a few more.
//!
//! The test `layouts` of `softrdma` compares sizes and offsets with the installed headers.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::use_self,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unused_imports
)]
#[path = "generated/mod.rs"]
mod generated;

mod extended;

pub(crate) use extended::*;
pub(crate) use generated::*;

/// `struct ibv_device`.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) ops: [*const c_void; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

/// `struct ibv_port_attr` as `ibv_query_port` of `IBVERBS_1.1` writes it, without later fields.
#[repr(C)]
pub(crate) struct PortAttributes {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    after: u16,
}

/// How many bytes of [`PortAttributes`] every caller has room for.
pub(crate) const PORT_ATTRIBUTES: usize = offset_of!(PortAttributes, after);

/// `struct ibv_gid_entry`.
#[repr(C)]
pub(crate) struct GidEntry {
    pub(crate) gid: [u64; 2],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

/// `struct rdma_addrinfo`.
#[repr(C)]
pub(crate) struct AddressInfo {
    pub(crate) flags: c_int,
    pub(crate) family: c_int,
    pub(crate) qp_type: c_int,
    pub(crate) port_space: c_int,
    pub(crate) src_len: libc::socklen_t,
    pub(crate) dst_len: libc::socklen_t,
    pub(crate) src_addr: *mut libc::sockaddr,
    pub(crate) dst_addr: *mut libc::sockaddr,
    pub(crate) src_canonname: *mut c_char,
    pub(crate) dst_canonname: *mut c_char,
    pub(crate) route_len: usize,
    pub(crate) route: *mut c_void,
    pub(crate) connect_len: usize,
    pub(crate) connect: *mut c_void,
    pub(crate) next: *mut Self,
}

const _: () = {
    assert!(size_of::<Device>() == size_of::<ibv_device>());
    assert!(offset_of!(PortAttributes, lid) == 34 && PORT_ATTRIBUTES == 48);
    assert!(size_of::<GidEntry>() == 32);
    assert!(size_of::<AddressInfo>() == 96);
};

/// C structures for which zero bytes are a valid value.
///
/// # Safety
/// The type consists of integers, raw pointers, `Option`s of function pointers, and arrays or
/// unions of these.
pub(crate) unsafe trait Plain {}

macro_rules! plain {
    ($($name:ident)*) => {
        $(
            // SAFETY: a plain C structure of integers and pointers, as its declaration shows.
            unsafe impl Plain for $name {}
        )*
    };
}

plain! {
    Device PortAttributes GidEntry AddressInfo ibv_ah_attr
    ibv_context ibv_context_ops ibv_pd ibv_mr ibv_cq ibv_qp ibv_wc ibv_comp_channel ibv_device_attr ibv_qp_attr
    ibv_qp_init_attr rdma_event_channel rdma_cm_id rdma_cm_event rdma_conn_param
}

/// A C structure with every byte zero.
pub(crate) const fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` says that zero is a valid value.
    unsafe { core::mem::zeroed() }
}

#[cfg(test)]
mod tests;
