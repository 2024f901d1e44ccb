//! The C side: declarations, and the table of functions by which this crate calls C.
//!
//! * [`generated`]: what bindgen made of the headers, checked in. All constants are from here.
//! * [`bindings`]: names of types, and the few places that enter a C union; under the feature
//!   `rdma-sys` with that crate's types.
//! * [`Api`]: the functions, found by `dlopen`, or under `rdma-sys` at link time.

mod api;

#[cfg(not(feature = "rdma-sys"))]
#[path = "ours.rs"]
mod bindings;

#[cfg(feature = "rdma-sys")]
#[path = "linked.rs"]
mod bindings;

#[cfg(all(test, feature = "rdma-sys"))]
mod crosscheck;

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
#[cfg_attr(
    feature = "rdma-sys",
    allow(
        clashing_extern_declarations,
        reason = "the declarations of the crate rdma-sys are of types of its own, which unit tests compare with these"
    )
)]
pub(crate) mod generated;

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!(
    "rdma-verbs has bindings for Linux on x86_64 and aarch64; see bindings.sh to add another target"
);

use core::ffi::c_int;

pub(crate) use self::api::{Api, RegisterOptionally};
pub(crate) use self::bindings::*;

pub(crate) struct Work {
    pub(crate) id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    /// The immediate, in network byte order.
    pub(crate) immediate: u32,
    pub(crate) remote: (u64, u32),
}

/// Writes what `ibv_post_send(3)` defines for operations of a reliable connection, with no
/// successor. The rest, half of the structure, stays as it is.
///
/// # Safety
/// `to` points to a live structure, which need not be initialised.
#[inline]
pub(crate) unsafe fn write_send_wr(to: *mut ibv_send_wr, work: &Work, sg_list: *mut ibv_sge, num_sge: c_int) {
    // SAFETY: places inside a live structure; nothing is read.
    unsafe {
        (&raw mut (*to).wr_id).write(work.id);
        (&raw mut (*to).next).write(core::ptr::null_mut());
        (&raw mut (*to).sg_list).write(sg_list);
        (&raw mut (*to).num_sge).write(num_sge);
        (&raw mut (*to).opcode).write(work.opcode);
        (&raw mut (*to).send_flags).write(work.flags);
        send_wr_immediate(to).write(work.immediate);
        // Providers also read fields that an operation lacks. rxe, erdma and ibv_cmd_post_send
        // (hfi1, ipath) read any immediate, siw any address and key. Of a SEND, rxe reads the
        // address, and before pull request 1033 of rdma-core this field, too: padding below.
        (&raw mut (*to).wr.ud.remote_qkey).write(0);
        (&raw mut (*to).wr.rdma.remote_addr).write(work.remote.0);
        (&raw mut (*to).wr.rdma.rkey).write(work.remote.1);
    }
}

pub(crate) const fn zeroed<T: Plain>() -> T {
    // SAFETY: zeros are valid for `Plain` types.
    unsafe { core::mem::zeroed() }
}

/// C structures for which zero bytes are a valid value.
///
/// # Safety
/// The type consists of integers, raw pointers, optional function pointers, and arrays or unions.
pub(crate) unsafe trait Plain {}

macro_rules! plain {
    ($($name:ident)*) => {
        $(
            // SAFETY: a plain C structure of integers and pointers, as its declaration shows.
            unsafe impl Plain for $name {}
        )*
    };
}

/// `struct _compat_ibv_port_attr`, which the headers only name: the 48 bytes that IBVERBS_1.1's
/// `ibv_query_port` writes; later fields come otherwise.
#[repr(C)]
pub(crate) struct PortAttributes {
    /// `state` to `qkey_viol_cntr`.
    _numbers: [u32; 8],
    _pkeys: u16,
    pub(crate) lid: u16,
    _after: [u8; 28],
}

const _: () = {
    // ibv_query_port(3): eight 32-bit fields and a 16-bit one come before `lid`.
    assert!(core::mem::offset_of!(PortAttributes, lid) == 34);
    assert!(size_of::<PortAttributes>() == 64);
};

plain! { PortAttributes ibv_async_event ibv_gid ibv_device_attr ibv_qp_attr ibv_qp_init_attr ibv_wc rdma_conn_param }
