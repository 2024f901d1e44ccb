//! Functions of the real libraries that are not implemented here: they fail as on a device without
//! the feature, and say so.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::link::{say, set_errno};

/// Reports once that a function is not implemented, and sets `errno`.
pub(crate) fn lacking(name: &str, told: &AtomicBool) {
    if !told.swap(true, Relaxed) {
        let of_rsockets = name.starts_with('r') && !name.starts_with("rdma_");
        let hint = if of_rsockets { "; `softrdma run --rsockets` has it" } else { "" };
        say(&format!("{name} is not there: it fails with EOPNOTSUPP{hint}"));
    }
    set_errno(libc::EOPNOTSUPP);
}

/// Defines functions that return `$result` and set `errno`.
///
/// Arguments are in registers or on the caller's stack, and the caller removes them: a function
/// that reads none may declare none (System V ABI, AAPCS64).
macro_rules! lacking {
    ($($type:ty, $result:expr => $($name:ident)*;)*) => {
        $($(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> $type {
                static TOLD: AtomicBool = AtomicBool::new(false);
                lacking(stringify!($name), &TOLD);
                $result
            }
        )*)*
    };
}

lacking! {
    *mut c_void, core::ptr::null_mut() =>
        ibv_import_device ibv_import_pd ibv_import_mr ibv_import_dm
        ibv_reg_dmabuf_mr;
    c_int, libc::EOPNOTSUPP =>
        ibv_resize_cq ibv_attach_mcast ibv_detach_mcast
        ibv_rereg_mr ibv_resolve_eth_l2_from_gid;
    c_int, -1 =>
        rdma_create_srq_ex rdma_join_multicast rdma_join_multicast_ex rdma_leave_multicast
        rdma_set_local_ece rdma_get_remote_ece rdma_reject_ece
        rsocket rbind rlisten raccept rconnect rshutdown rclose rrecv rrecvfrom rrecvmsg rsend rsendto rsendmsg rread rreadv
        rwrite rwritev rpoll rselect rgetpeername rgetsockname rsetsockopt rgetsockopt rfcntl riomap riounmap riowrite;
    (), () => ibv_unimport_pd ibv_unimport_mr ibv_unimport_dm;
}

/// Defines functions without which librdmacm does: they report nothing.
macro_rules! dispensable {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                libc::EOPNOTSUPP
            }
        )*
    };
}

dispensable! { ibv_set_ece ibv_query_ece }
