//! Structures that later versions may extend: each side states the size that it knows.

use std::mem::size_of;
use std::ptr;

use crate::error::{Code, Failure};

const MOST: usize = 4096;

/// An array of more structures would be longer than memory, if each had [`MOST`] bytes.
pub(crate) const MANY: usize = isize::MAX as usize / MOST;

/// A structure of C to which later versions may append fields.
///
/// # Safety
/// All fields are numbers or addresses without padding, so any bytes are valid.
pub(crate) unsafe trait Grows: Copy {
    /// The size that it had in the first version.
    const FIRST: usize;
}

/// Reads a caller's structure, whose first field is its size; fields it lacks are of `otherwise`.
///
/// # Safety
/// `from` points to an initialised `usize`, and if it is [`Grows::FIRST`] to [`MOST`], to so many
/// bytes.
pub(crate) unsafe fn read<T: Grows>(from: *const T, otherwise: T) -> Result<T, Failure> {
    // SAFETY: the caller's promise.
    let size = unsafe { from.cast::<usize>().read() };
    check::<T>(size)?;
    let mut value = otherwise;
    // SAFETY: both have that many bytes and do not overlap, and any bytes are a valid `T`.
    unsafe {
        ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut value).cast::<u8>(), size.min(size_of::<T>()));
    }
    // A later version's caller may ask for more; zero asks for nothing.
    for at in size_of::<T>()..size {
        // SAFETY: within the caller's structure.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            let text = "options have a field that this version of the library does not know: use a later one";
            return Err(Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into()));
        }
    }
    Ok(value)
}

/// Writes as much of `value` as the caller knows to `to`, and zeros after it.
///
/// # Safety
/// If `size` is within bounds, `to` is null or points to that many writable bytes.
pub(crate) unsafe fn write<T: Grows>(to: *mut T, size: usize, value: &T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument("the structure to fill is null"));
    }
    check::<T>(size)?;
    // SAFETY: the caller's promise, and the size is checked.
    unsafe { put(to, size, value) };
    Ok(())
}

/// Checks the size of a caller's structure.
#[inline(always)]
pub(crate) fn check<T: Grows>(size: usize) -> Result<(), Failure> {
    if (T::FIRST..=MOST).contains(&size) { Ok(()) } else { Err(wrong_size(size)) }
}

/// Like [`write()`], for a size that was checked.
///
/// # Safety
/// `to` points to `size` writable bytes, and `size` is at most [`MOST`] and at least
/// [`Grows::FIRST`].
#[inline(always)]
pub(crate) unsafe fn put<T: Grows>(to: *mut T, size: usize, value: &T) {
    // A constant while no version has appended a field.
    let known = size.clamp(T::FIRST, size_of::<T>());
    // SAFETY: both have that many bytes, `to` even `size`, and do not overlap.
    unsafe {
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast::<u8>(), known);
        if size > known {
            ptr::write_bytes(to.cast::<u8>().add(known), 0, size - known);
        }
    }
}

#[cold]
fn wrong_size(size: usize) -> Failure {
    let text = format!("{size} is no size of this structure: let vkrdma_..._options() or sizeof() say it");
    Failure::Here(Code::VKRDMA_INVALID_OPTIONS, text.into())
}
