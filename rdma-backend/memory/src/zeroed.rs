//! Memory of its own.
#![allow(unsafe_code)]

use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::AtomicU8;

use crate::{CallerMemory, SharedMemory};

/// The length of the lines of caches, on which the bytes begin.
const LINE: usize = 64;

/// Bytes that are zero at first. The allocator takes what it can as pages that the kernel zeroes when they are touched.
#[derive(Debug)]
pub struct Zeroed {
    base: NonNull<u8>,
    /// At least one byte.
    layout: Layout,
}

// SAFETY: the bytes are its own, and reached through atomics only.
unsafe impl Send for Zeroed {}
// SAFETY: as above.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Returns `len` bytes; `None` if `len` is zero, or there is no memory for so many.
    pub fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, LINE).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }
}

impl CallerMemory for Zeroed {
    fn shared(&self) -> SharedMemory<'_> {
        // SAFETY: so many bytes, initialised, are allocated while `self` lives, and reached through this function only, so as atomics.
        SharedMemory::new(unsafe {
            slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU8>(), self.layout.size())
        })
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: what `new` has allocated, by that layout; every borrow has ended with `self`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
