//! Whether bytes of this process can be accessed, for addresses that callers pass.
//!
//! A wrong address is an error of a call (`EFAULT`), and does not end the program. So the kernel
//! accesses it first, which changes nothing.

use core::ffi::{c_char, c_int};
use core::ptr;

use crate::link::{last_errno, set_errno};

/// The bytes of a page, on every machine at least.
const PAGE: usize = 4096;

/// Returns whether the byte at an address can be read. Leaves `errno` as it is.
pub(crate) fn is_readable(at: usize) -> bool {
    /// No action of rt_sigprocmask(2).
    const NONE: c_int = -1;
    const SET: usize = size_of::<u64>();
    // Within the byte's page, as pages begin at a multiple of this.
    let set = ptr::with_exposed_provenance::<u64>(at & !(SET - 1));
    let before = last_errno();
    // SAFETY: rt_sigprocmask(2): the kernel copies the set first, and checks its address; without
    // an action, no mask changes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, NONE, set, ptr::null_mut::<u64>(), SET) };
    let readable = last_errno() != libc::EFAULT;
    set_errno(before);
    readable
}

/// Returns whether the byte at an address can be written. Leaves `errno` as it is.
pub(crate) fn is_writable(at: usize) -> bool {
    /// `FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0)`: adds zero to the word.
    const ADD_ZERO: c_int = 1 << 28;
    let own = 0_u32;
    let word = ptr::with_exposed_provenance_mut::<u32>(at & !(size_of::<u32>() - 1));
    let action = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let before = last_errno();
    // SAFETY: futex(2): the kernel checks the address of the word, and adds zero in one step, so
    // that no other thread sees a change. No thread waits for the word on this stack.
    let woken = unsafe { libc::syscall(libc::SYS_futex, &raw const own, action, 0, 0, word, ADD_ZERO) };
    let writable = woken != -1 || last_errno() != libc::EFAULT;
    set_errno(before);
    writable
}

/// Returns whether a check of a byte holds in each page of these bytes.
pub(crate) fn all(at: usize, len: usize, check: fn(usize) -> bool) -> bool {
    let Some(last) = len.checked_sub(1).map(|before| at.checked_add(before)) else { return true };
    last.is_some_and(|last| check(at) && (at / PAGE + 1..=last / PAGE).all(|page| check(page * PAGE)))
}

/// Copies the front of a string that a caller passed, as much as there is room for, without its
/// terminating null byte. Returns how many bytes these are; `None` if some cannot be read.
///
/// # Safety
/// A string of C is at `at`, or no memory before its end.
pub(crate) unsafe fn front(at: *const c_char, into: &mut [u8]) -> Option<usize> {
    for (len, byte) in into.iter_mut().enumerate() {
        let place = at.wrapping_add(len).cast::<u8>();
        // Each page once.
        if (len == 0 || place.addr().is_multiple_of(PAGE)) && !is_readable(place.expose_provenance()) {
            return None;
        }
        // SAFETY: the page is readable, and no byte before was the string's end.
        *byte = unsafe { place.read() };
        if *byte == 0 {
            return Some(len);
        }
    }
    Some(into.len())
}
