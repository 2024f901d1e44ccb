//! The extended way to poll (`ibv_create_cq_ex(3)`): functions read the fields of one completion
//! after the other.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use std::sync::{Condvar, Mutex, PoisonError};

use softrdma_wire::Completion;

use crate::completion::{Queue, create_queue, flags, level, next_completion};
use crate::layout::{QueueAttributes, QueueEx, ibv_context, ibv_cq, zeroed};
use crate::link::{pointer, set_errno};

/// `IBV_WC_STANDARD_FLAGS`: the fields of completions besides id and status. Time stamps and
/// similar ones are not supported.
const STANDARD: u64 = 0x7f;
/// `IBV_CQ_INIT_ATTR_MASK_FLAGS`, with `IBV_CREATE_CQ_ATTR_SINGLE_THREADED`, which has no effect
/// here.
const MASK_FLAGS: u32 = 1;
const SINGLE_THREADED: u32 = 1;

/// The right to poll, which one thread has from `ibv_start_poll` to `ibv_end_poll`; others wait.
#[derive(Default)]
pub(crate) struct Turn {
    taken: Mutex<bool>,
    free: Condvar,
    /// The completion whose fields are read.
    current: Mutex<Option<Completion>>,
}

impl Turn {
    fn begin(&self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            taken = self.free.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken = true;
    }

    fn end(&self) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.free.notify_one();
    }
}

pub(crate) fn functions(cq: ibv_cq) -> QueueEx {
    QueueEx {
        cq,
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_byte_len: Some(read_byte_len),
        read_imm_data: Some(read_imm_data),
        read_qp_num: Some(read_qp_num),
        read_src_qp: Some(read_src_qp),
        read_wc_flags: Some(read_wc_flags),
        read_slid: Some(read_slid),
        read_sl: Some(read_sl),
        read_dlid_path_bits: Some(read_dlid_path_bits),
        ..zeroed()
    }
}

/// `ibv_create_cq_ex(3)`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attributes: *mut QueueAttributes,
) -> *mut QueueEx {
    // SAFETY: ibv_create_cq_ex(3): attributes that are read during the call.
    let attributes = unsafe { &*attributes };
    let flags = if attributes.comp_mask & MASK_FLAGS == 0 { 0 } else { attributes.flags };
    if attributes.comp_mask & !MASK_FLAGS != 0
        || flags & !SINGLE_THREADED != 0
        || attributes.wc_flags & !STANDARD != 0
    {
        set_errno(libc::EOPNOTSUPP);
        return ptr::null_mut();
    }
    let (depth, vector) = (c_int::try_from(attributes.cqe), c_int::try_from(attributes.comp_vector));
    pointer(match (depth, vector) {
        (Ok(depth), Ok(vector)) => {
            // SAFETY: ibv_create_cq_ex(3): a device's context, and null or a live channel.
            unsafe { create_queue(context, depth, attributes.cq_context, attributes.channel, vector) }
                .map(<*mut ibv_cq>::cast)
        }
        _ => Err(libc::EINVAL),
    })
}

/// Takes the next completion.
///
/// # Safety
/// `cq` is alive, and it is this thread's turn.
unsafe fn take(cq: *mut QueueEx) -> c_int {
    // SAFETY: the caller vouches for `cq`.
    let found = match unsafe { next_completion(cq.cast()) } {
        Ok(Some(found)) => found,
        Ok(None) => return libc::ENOENT,
        Err(errno) => return errno,
    };
    // SAFETY: the caller vouches for `cq`, which was made as a `Queue`. The program reads the two
    // fields only during its turn, which this thread has.
    let current = unsafe {
        (&raw mut (*cq).status).write(found.status);
        (&raw mut (*cq).wr_id).write(found.id);
        &(*cq.cast::<Queue>()).turn.current
    };
    *current.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
    0
}

unsafe extern "C" fn start_poll(cq: *mut QueueEx, _attributes: *mut c_void) -> c_int {
    // SAFETY: ibv_start_poll(3): a live completion queue, here and below, made as a `Queue`.
    unsafe { &(*cq.cast::<Queue>()).turn }.begin();
    // SAFETY: as above; it is this thread's turn.
    let taken = unsafe { take(cq) };
    if taken != 0 {
        // SAFETY: as above. Without a completion the program does not call `ibv_end_poll`
        // (ibv_start_poll(3)).
        unsafe { &(*cq.cast::<Queue>()).turn }.end();
    }
    taken
}

unsafe extern "C" fn next_poll(cq: *mut QueueEx) -> c_int {
    // SAFETY: as above.
    unsafe { take(cq) }
}

unsafe extern "C" fn end_poll(cq: *mut QueueEx) {
    // SAFETY: as above.
    unsafe { &(*cq.cast::<Queue>()).turn }.end();
}

/// Returns a field of the current completion.
///
/// # Safety
/// `cq` is alive.
unsafe fn field<T: Default>(cq: *mut QueueEx, of: impl FnOnce(&Completion) -> T) -> T {
    // SAFETY: the caller vouches for `cq`, which was made as a `Queue`.
    let current = unsafe { &(*cq.cast::<Queue>()).turn.current };
    current.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(of).unwrap_or_default()
}

macro_rules! fields {
    ($($name:ident -> $type:ty = $of:expr;)*) => {
        $(
            unsafe extern "C" fn $name(cq: *mut QueueEx) -> $type {
                // SAFETY: ibv_create_cq_ex(3): a live completion queue.
                unsafe { field(cq, $of) }
            }
        )*
    };
}

fields! {
    read_opcode -> c_uint = |completion| completion.opcode;
    read_vendor_err -> u32 = |completion| completion.vendor;
    read_byte_len -> u32 = |completion| completion.len;
    read_imm_data -> u32 = |completion| completion.immediate.unwrap_or(0).to_be();
    read_qp_num -> u32 = |completion| completion.pair;
    read_src_qp -> u32 = |completion| completion.source.map_or(0, |source| source.number);
    read_wc_flags -> c_uint = flags;
    read_slid -> u32 = |_of_infiniband| 0;
    read_sl -> u8 = level;
    read_dlid_path_bits -> u8 = |_of_infiniband| 0;
}
