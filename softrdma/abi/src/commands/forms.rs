//! The structures of commands and of their answers, as `rdma/rdma_user_cm.h` has them.

use core::ffi::c_int;
use core::mem::{MaybeUninit, size_of};
use core::ptr;

use crate::reachable::{self, is_writable};

/// Structures of integers and arrays of these, without padding.
///
/// # Safety
/// Every pattern of bytes is a valid value, and every byte of a value is initialised.
pub(super) unsafe trait Words {}

/// Defines structures of the header, with their sizes there.
macro_rules! words {
    ($($(#[$meta:meta])* struct $name:ident: $size:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(super) struct $name {
                $(pub(super) $field: $type,)*
            }

            const _: () = {
                assert!(size_of::<$name>() == $size);
                // The fields take all of it: there is no padding.
                assert!(0 $(+ size_of::<$type>())* == $size);
            };

            // SAFETY: integers, arrays of these and other structures of this macro, and no padding,
            // as checked above.
            unsafe impl Words for $name {}
        )*
    };
}

words! {
    struct Header: 8 { command: u32, len: u16, room: u16, }
    struct Create: 24 { uid: u64, response: u64, space: u16, kind: u8, reserved: [u8; 5], }
    struct Made: 4 { handle: u32, }
    struct Destroy: 16 { response: u64, handle: u32, reserved: u32, }
    struct Reported: 4 { events: u32, }
    struct Bind: 40 { response: u64, address: [u8; 28], handle: u32, }
    struct Resolve: 64 { source: [u8; 28], destination: [u8; 28], handle: u32, milliseconds: u32, }
    struct ResolveRoute: 8 { handle: u32, milliseconds: u32, }
    struct QueryRoute: 16 { response: u64, handle: u32, option: u32, }
    struct Path: 64 { destination: [u8; 16], source: [u8; 16], before: [u8; 20], key: [u8; 2], after: [u8; 10], }
    struct Route: 208 {
        guid: [u8; 8],
        paths: [Path; 2],
        source: [u8; 28],
        destination: [u8; 28],
        count: u32,
        port: u8,
        reserved: [u8; 3],
        device: u32,
        after: u32,
    }
    struct Parameters: 272 {
        pair: u32,
        key: u32,
        data: [u8; 256],
        len: u8,
        shared: u8,
        responder_resources: u8,
        initiator_depth: u8,
        flow_control: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        valid: u8,
    }
    struct Connect: 288 { parameters: Parameters, handle: u32, reserved: u32, extension: [u32; 2], }
    struct Listen: 8 { handle: u32, backlog: u32, }
    struct Accept: 296 { uid: u64, parameters: Parameters, handle: u32, reserved: u32, extension: [u32; 2], }
    struct Reject: 264 { handle: u32, len: u8, reason: u8, reserved: [u8; 2], data: [u8; 256], }
    struct Disconnect: 4 { handle: u32, }
    struct Attributes: 16 { response: u64, handle: u32, state: u32, }
    struct GetEvent: 8 { response: u64, }
    struct Told: 336 {
        uid: u64,
        handle: u32,
        kind: u32,
        status: u32,
        parameters: Parameters,
        // The parameters share their place with those of datagrams, which are longer.
        rest: [u32; 8],
        reserved: u32,
        extension: [u32; 2],
    }
    struct SetOption: 24 { value: u64, handle: u32, level: u32, name: u32, len: u32, }
    struct Notify: 8 { handle: u32, event: u32, }
    struct Migrate: 16 { response: u64, handle: u32, file: u32, }
    struct PathTo: 32 {
        destination: [u8; 16],
        flow_label: u32,
        index: u8,
        hop_limit: u8,
        class: u8,
        reserved: u8,
        before: [u8; 5],
        is_global: u8,
        port: u8,
        after: u8,
    }
    /// `struct ib_uverbs_qp_attr`.
    struct PairAttributes: 144 {
        mask: u32,
        state: u32,
        current: u32,
        path_mtu: u32,
        migration: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        access: u32,
        path: PathTo,
        alternate: PathTo,
        capacity: [u32; 5],
        keys: [u16; 2],
        drain: [u8; 2],
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        after: [u8; 7],
    }
}

/// Reads a structure from the front of a command, which has at least so many bytes of it.
///
/// A shorter one is of an older header, and its later fields are 0.
pub(super) fn taken<T: Words>(from: &[u8], least: usize) -> Result<T, c_int> {
    if from.len() < least {
        return Err(libc::EINVAL);
    }
    let mut value = MaybeUninit::<T>::zeroed();
    let len = from.len().min(size_of::<T>());
    // SAFETY: both have this many bytes, and the value's are its own.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), value.as_mut_ptr().cast(), len) };
    // SAFETY: `Words`: any bytes are a value, and all of them were zeroed or copied.
    Ok(unsafe { value.assume_init() })
}

/// Reads a whole structure.
pub(super) fn whole<T: Words>(from: &[u8]) -> Result<T, c_int> {
    taken(from, size_of::<T>())
}

/// Writes an answer to `place`, where the program has `room` bytes for it. At least `least` bytes
/// of it have to fit.
///
/// # Safety
/// If there is memory, it is the program's, for the answer.
pub(super) unsafe fn answer<T: Words>(place: u64, room: u16, least: usize, value: &T) -> Result<(), c_int> {
    let room = usize::from(room).min(size_of::<T>());
    let place = usize::try_from(place).map_err(|_| libc::EFAULT)?;
    if room < least {
        return Err(libc::ENOSPC);
    }
    if !reachable::all(place, room, is_writable) {
        return Err(libc::EFAULT);
    }
    let place = ptr::with_exposed_provenance_mut::<u8>(place);
    // SAFETY: it can be written, and the caller vouches for it; `Words`: each byte of the value is
    // initialised.
    unsafe { ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), place, room) };
    Ok(())
}
