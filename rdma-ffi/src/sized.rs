//! Structures that may grow: each side says how much of one it knows.

use std::mem::size_of;
use std::ptr;

use crate::error::{Code, Failure};

/// The most that a structure will ever have.
const MOST: usize = 4096;

/// A structure of C that later versions may append fields to. All its fields are numbers, and there is nothing between them, so that any
/// bytes are one.
///
/// # Safety
/// That is so.
pub(crate) unsafe trait Grows: Copy {
    /// The size that it had in the first version.
    const FIRST: usize;
}

/// Returns what the caller has put into a structure whose first field is its size; what the caller's version does not have is as in
/// `otherwise`.
///
/// # Safety
/// `from` points to an initialised `usize`, and that many bytes are there if they are [`Grows::FIRST`] to [`MOST`].
pub(crate) unsafe fn read<T: Grows>(from: *const T, otherwise: T) -> Result<T, Failure> {
    // SAFETY: the caller's promise.
    let size = unsafe { from.cast::<usize>().read() };
    if !(T::FIRST..=MOST).contains(&size) {
        return Err(wrong_size(size));
    }
    let mut value = otherwise;
    // SAFETY: as many bytes are in both, which do not overlap, and any bytes are a `T`.
    unsafe {
        ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut value).cast::<u8>(), size.min(size_of::<T>()));
    }
    // A caller of a later version may want what this one does not have: zero is what wants nothing.
    for at in size_of::<T>()..size {
        // SAFETY: within the caller's structure.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            let text = "options have a field that this version of the library does not know: use a later one";
            return Err(Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into()));
        }
    }
    Ok(value)
}

/// Puts as much of `value` as the caller knows to `to`, and zeros behind it if the caller knows more.
///
/// # Safety
/// `to` points to `size` bytes that can be written, unless that is out of bounds.
pub(crate) unsafe fn write<T: Grows>(to: *mut T, size: usize, value: &T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument("the structure to fill is null"));
    }
    if !(T::FIRST..=MOST).contains(&size) {
        return Err(wrong_size(size));
    }
    let known = size.min(size_of::<T>());
    // SAFETY: as many bytes are in both, which do not overlap; the rest is the caller's, too.
    unsafe {
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast::<u8>(), known);
        ptr::write_bytes(to.cast::<u8>().add(known), 0, size - known);
    }
    Ok(())
}

#[cold]
fn wrong_size(size: usize) -> Failure {
    let text = format!("{size} is no size of this structure: let vkrdma_..._options() or sizeof() say it");
    Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into())
}
