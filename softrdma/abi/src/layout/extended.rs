//! The extended structures that the headers' inline functions use: `struct verbs_context`, `struct
//! ibv_qp_ex`, `struct ibv_cq_ex` and their attributes.

use core::ffi::{c_int, c_uint, c_void};

use super::{
    Plain, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_pd, ibv_qp, ibv_qp_cap, ibv_sge,
    ibv_srq,
};

/// `struct verbs_context` of rdma-core 44. Later versions add fields in front, and compare `sz` to
/// find out whether they exist.
#[repr(C)]
pub(crate) struct VerbsContext {
    /// From `query_port` to `query_rt_values`: not implemented.
    pub(crate) before: [Option<unsafe extern "C" fn()>; 25],
    pub(crate) create_cq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut QueueAttributes) -> *mut QueueEx>,
    pub(crate) private: *mut c_void,
    pub(crate) query_device_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut DeviceEx, usize) -> c_int>,
    /// From `ibv_destroy_flow` to `open_qp`: not implemented.
    pub(crate) between: [Option<unsafe extern "C" fn()>; 5],
    pub(crate) create_qp_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut PairAttributes) -> *mut ibv_qp>,
    pub(crate) get_srq_num: Option<unsafe extern "C" fn()>,
    pub(crate) create_srq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut SharedAttributesEx) -> *mut ibv_srq>,
    /// `open_xrcd`, `close_xrcd` and a placeholder.
    pub(crate) behind: [usize; 3],
    pub(crate) sz: usize,
    pub(crate) context: ibv_context,
}

/// `__VERBS_ABI_IS_EXTENDED`, of `ibv_context::abi_compat`.
pub(crate) const EXTENDED: *mut c_void = core::ptr::without_provenance_mut(usize::MAX);

/// `struct ibv_cq_init_attr_ex`.
#[repr(C)]
pub(crate) struct QueueAttributes {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) wc_flags: u64,
    pub(crate) comp_mask: u32,
    pub(crate) flags: u32,
    pub(crate) parent_domain: *mut ibv_pd,
}

/// `struct ibv_cq_ex`.
#[repr(C)]
pub(crate) struct QueueEx {
    /// The header repeats the fields of `struct ibv_cq` here.
    pub(crate) cq: ibv_cq,
    pub(crate) comp_mask: u32,
    pub(crate) status: c_uint,
    pub(crate) wr_id: u64,
    pub(crate) start_poll: Option<unsafe extern "C" fn(*mut Self, *mut c_void) -> c_int>,
    pub(crate) next_poll: Option<unsafe extern "C" fn(*mut Self) -> c_int>,
    pub(crate) end_poll: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) read_opcode: Option<unsafe extern "C" fn(*mut Self) -> c_uint>,
    pub(crate) read_vendor_err: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_byte_len: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_imm_data: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_qp_num: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_src_qp: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_wc_flags: Option<unsafe extern "C" fn(*mut Self) -> c_uint>,
    pub(crate) read_slid: Option<unsafe extern "C" fn(*mut Self) -> u32>,
    pub(crate) read_sl: Option<unsafe extern "C" fn(*mut Self) -> u8>,
    pub(crate) read_dlid_path_bits: Option<unsafe extern "C" fn(*mut Self) -> u8>,
    /// Time stamps, VLANs, flow tags and tag matching: not implemented.
    pub(crate) behind: [Option<unsafe extern "C" fn()>; 5],
}

/// `struct ibv_qp_init_attr_ex`, which begins with the fields of `ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct PairAttributes {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
    pub(crate) comp_mask: u32,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) xrcd: *mut c_void,
    pub(crate) create_flags: u32,
    pub(crate) max_tso_header: u16,
    pub(crate) rwq_ind_tbl: *mut c_void,
    pub(crate) rx_hash_conf: [u64; 3],
    pub(crate) source_qpn: u32,
    pub(crate) send_ops_flags: u64,
}

/// A function of `struct ibv_qp_ex` that is not implemented.
type Absent = Option<unsafe extern "C" fn(*mut PairEx)>;

/// `struct ibv_qp_ex`.
#[repr(C)]
pub(crate) struct PairEx {
    pub(crate) qp_base: ibv_qp,
    pub(crate) comp_mask: u64,
    pub(crate) wr_id: u64,
    pub(crate) wr_flags: c_uint,
    pub(crate) wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut Self, u32, u64, u64, u64)>,
    pub(crate) wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut Self, u32, u64, u64)>,
    /// Windows and local invalidation.
    pub(crate) before: [Absent; 2],
    pub(crate) wr_rdma_read: Option<unsafe extern "C" fn(*mut Self, u32, u64)>,
    pub(crate) wr_rdma_write: Option<unsafe extern "C" fn(*mut Self, u32, u64)>,
    pub(crate) wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut Self, u32, u64, u32)>,
    pub(crate) wr_send: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) wr_send_imm: Option<unsafe extern "C" fn(*mut Self, u32)>,
    /// Invalidation and segmentation.
    pub(crate) between: [Absent; 2],
    pub(crate) wr_set_ud_addr: Option<unsafe extern "C" fn(*mut Self, *mut AddressHandle, u32, u32)>,
    pub(crate) wr_set_xrc_srqn: Absent,
    pub(crate) wr_set_inline_data: Option<unsafe extern "C" fn(*mut Self, *mut c_void, usize)>,
    pub(crate) wr_set_inline_data_list: Option<unsafe extern "C" fn(*mut Self, usize, *const Buffer)>,
    pub(crate) wr_set_sge: Option<unsafe extern "C" fn(*mut Self, u32, u64, u32)>,
    pub(crate) wr_set_sge_list: Option<unsafe extern "C" fn(*mut Self, usize, *const ibv_sge)>,
    pub(crate) wr_start: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) wr_complete: Option<unsafe extern "C" fn(*mut Self) -> c_int>,
    pub(crate) wr_abort: Option<unsafe extern "C" fn(*mut Self)>,
    pub(crate) wr_atomic_write: Absent,
}

/// `struct ibv_ah`.
#[repr(C)]
pub(crate) struct AddressHandle {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) handle: u32,
}

/// `struct ibv_data_buf`.
#[repr(C)]
pub(crate) struct Buffer {
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
}

/// `struct ibv_srq`.
#[repr(C)]
pub(crate) struct SharedQueue {
    pub(crate) context: *mut ibv_context,
    pub(crate) srq_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) handle: u32,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
}

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SharedLimits {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SharedAttributes {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SharedLimits,
}

/// `struct ibv_srq_init_attr_ex`, as far as its type and domain.
#[repr(C)]
pub(crate) struct SharedAttributesEx {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SharedLimits,
    pub(crate) comp_mask: u32,
    pub(crate) srq_type: c_uint,
    pub(crate) pd: *mut ibv_pd,
}

/// `struct ibv_device_attr_ex`: the older structure, and the capabilities of many extensions that
/// are not implemented.
#[repr(C)]
pub(crate) struct DeviceEx {
    pub(crate) orig_attr: ibv_device_attr,
    pub(crate) comp_mask: u32,
    pub(crate) extensions: [u64; 19],
    pub(crate) xrc_odp_caps: u32,
    pub(crate) phys_port_cnt_ex: u32,
}

macro_rules! plain {
    ($($name:ident)*) => {
        $(
            // SAFETY: a plain C structure of integers, pointers, and optional functions, as its
            // declaration shows.
            unsafe impl Plain for $name {}
        )*
    };
}

plain! { VerbsContext QueueEx PairEx SharedQueue DeviceEx }
