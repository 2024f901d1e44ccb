#![doc = include_str!("../README.md")]
#![no_std]
#![deny(
    unsafe_code,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(test)]
extern crate std;

#[cfg_attr(
    all(
        not(miri),
        any(
            all(target_arch = "x86_64", target_feature = "sse2", target_pointer_width = "64"),
            all(target_arch = "aarch64", target_feature = "neon", target_pointer_width = "64"),
        )
    ),
    path = "assembly.rs"
)]
mod copy;
#[cfg(feature = "alloc")]
mod zeroed;

use core::fmt;
use core::sync::atomic::AtomicU8;

#[cfg(feature = "alloc")]
pub use zeroed::Zeroed;

/// Existing memory of a program, to be registered in place: a buffer, a mapping, another runtime's.
///
/// A region keeps the value until the memory is deregistered, or for ever if that fails. Until then
/// the device and, with the key, the peer may at any time read the bytes, and write them if the
/// region's rights allow, also after an error, until every connection in its protection domain has
/// ended. Release the memory when the value is dropped, not before.
pub trait CallerMemory: Send + Sync + 'static {
    /// Returns the bytes: every call the same ones, which do not move while the value exists.
    fn shared(&self) -> SharedMemory<'_>;

    /// Returns the dma-buf that the bytes map, if the device is to access them through it.
    ///
    /// For memory of another device, such as a GPU, which has no pages to pin. `None`, the default,
    /// means pages of the program, `ibv_reg_mr(3)`.
    fn dma_buf(&self) -> Option<DmaBuf> {
        None
    }
}

/// A place in a dma-buf, memory that a device's driver exports, `ibv_reg_dmabuf_mr(3)`.
///
/// Registering one was never tried on a device: soft-RoCE and softrdma do not support it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaBuf {
    descriptor: i32,
    offset: u64,
}

impl DmaBuf {
    /// Returns the place `offset` bytes after the beginning of this descriptor's dma-buf.
    ///
    /// # Safety
    /// While the [`CallerMemory`] that returns the place exists:
    /// * the descriptor must be open, and be that of one dma-buf;
    /// * the bytes of [`CallerMemory::shared`] must be a mapping of as many bytes of this dma-buf
    ///   at `offset` (`mmap(2)` of the descriptor), or another mapping of the same memory, and stay
    ///   so. The program must see the device's writes there: the exporter's memory is coherent, or
    ///   the program performs `DMA_BUF_IOCTL_SYNC` around each access of its own.
    #[allow(unsafe_code, reason = "only a caller can know what a descriptor stands for")]
    pub const unsafe fn new(descriptor: i32, offset: u64) -> Self {
        Self { descriptor, offset }
    }

    /// Returns the file descriptor.
    pub const fn descriptor(&self) -> i32 {
        self.descriptor
    }

    /// Returns the offset of the first byte.
    pub const fn offset(&self) -> u64 {
        self.offset
    }
}

/// Bytes that a device or a peer may change.
#[derive(Clone, Copy)]
pub struct SharedMemory<'a> {
    bytes: &'a [AtomicU8],
}

impl<'a> SharedMemory<'a> {
    /// Returns `bytes` as shared memory.
    #[inline]
    pub const fn new(bytes: &'a [AtomicU8]) -> Self {
        Self { bytes }
    }

    /// Returns the length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether there are no bytes.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the address of the first byte, for a device.
    pub fn address(&self) -> usize {
        self.bytes.as_ptr().expose_provenance()
    }

    /// Copies `into.len()` bytes at `offset` out. Returns false, unchanged, if the memory is
    /// shorter.
    #[must_use]
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some(part) = self.part(offset, into.len()) else { return false };
        copy::out(part, into);
        true
    }

    /// Copies `from` to `offset`. Returns false, and copies nothing, if it does not fit.
    #[must_use]
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(part) = self.part(offset, from.len()) else { return false };
        copy::into(from, part);
        true
    }

    /// Returns the `len` bytes at `offset`, or `None` if the memory ends before.
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        self.part(offset, len).map(Self::new)
    }

    /// Copies as many first bytes of `from` as fit, and shrinks to what follows. Returns how many.
    #[inline]
    pub fn put(&mut self, from: &[u8]) -> usize {
        let (Some((now, rest)), Some(bytes)) = (
            self.bytes.split_at_checked(from.len().min(self.bytes.len())),
            from.get(..from.len().min(self.bytes.len())),
        ) else {
            return 0;
        };
        copy::into(bytes, now);
        self.bytes = rest;
        now.len()
    }

    /// Copies `len` bytes at `offset` to `at` of `to`. Returns false, and copies nothing, if either
    /// ends before. If the two overlap, the resulting bytes are unspecified.
    #[must_use]
    #[inline]
    pub fn copy_to(&self, offset: usize, to: SharedMemory<'_>, at: usize, len: usize) -> bool {
        let (Some(from), Some(to)) = (self.part(offset, len), to.part(at, len)) else { return false };
        copy::across(from, to);
        true
    }

    #[inline]
    fn part(&self, offset: usize, len: usize) -> Option<&'a [AtomicU8]> {
        self.bytes.get(offset..)?.get(..len)
    }
}

impl fmt::Debug for SharedMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len()).finish_non_exhaustive()
    }
}
