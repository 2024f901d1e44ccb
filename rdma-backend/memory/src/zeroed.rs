//! Allocated memory.
#![allow(unsafe_code)]

use alloc::alloc::{Layout, alloc_zeroed, dealloc};
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::AtomicU8;

use crate::{CallerMemory, SharedMemory};

/// The length of a cache line, to which the bytes are aligned.
const LINE: usize = 64;

/// Allocated bytes, initially zero. The kernel zeroes the pages of large ones on first touch.
#[derive(Debug)]
pub struct Zeroed {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the bytes belong to this value, and are accessed through atomics only.
unsafe impl Send for Zeroed {}
// SAFETY: the bytes belong to this value, and are accessed through atomics only.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Allocates `len` bytes. Returns `None` if `len` is zero, or there is not enough memory.
    pub fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, LINE).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }
}

impl CallerMemory for Zeroed {
    fn shared(&self) -> SharedMemory<'_> {
        // SAFETY: so many initialised bytes, allocated while `self` lives, accessed as atomics.
        SharedMemory::new(unsafe {
            slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU8>(), self.layout.size())
        })
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: `new` allocated this with the same layout; every borrow has ended with `self`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
