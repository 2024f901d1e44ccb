//! Memory of the program, lent for values.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use rdma_conn::{CallerMemory, DmaBuf, SharedMemory};

/// Memory of the program: a `Vec<u8>` or a `Box<[u8]>`; or, by [`Memory::from_raw_parts`], a
/// mapping, an object of another language's runtime, an arena.
///
/// Its clones are handles on the same memory. A buffer that
/// [`Client::register`](crate::Client::register) creates from it keeps a handle until the memory is
/// deregistered. The memory is freed, or its owner dropped, with the last handle; never, if a
/// device refuses to deregister it.
///
/// # Who may write
/// While a buffer of it exists, or a connection still uses a dropped one, the server can write to
/// all of it at any time, by its key. A server that obeys the protocol writes only requested
/// values, also after an error: the windows of a value's rest stay the server's until the
/// connection has ended. So there is no `&[u8]` of it: copy values out before deciding on them
/// ([`Buffer::read`](crate::Buffer::read)).
#[derive(Clone)]
pub struct Memory {
    bytes: Arc<Bytes>,
    slice: usize,
}

struct Slice {
    bytes: Arc<Bytes>,
    range: Range<usize>,
}

struct Bytes {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// A `Vec<u8>` of this capacity.
    Vec { capacity: usize },
    /// Keeps the memory until it is dropped.
    Other { exported: Option<Exported>, _keep: Box<dyn Any + Send + Sync> },
}

struct Exported {
    descriptor: OwnedFd,
    offset: u64,
}

// SAFETY: the bytes are owned or, by the contract of `from_raw_parts`, reached by others in ways
// that atomics allow; `shared` reaches them through atomics only. Owners are `Send` and `Sync`
// themselves.
unsafe impl Send for Bytes {}
// SAFETY: as for `Send`.
unsafe impl Sync for Bytes {}

impl Memory {
    /// Returns the memory of `len` bytes from `base` on. `keep` is dropped with the last handle,
    /// when nothing uses the memory any more.
    ///
    /// # Safety
    /// Until `keep` is dropped,
    /// * the bytes belong to one allocation or mapping, and stay where they are, readable and
    ///   writable;
    /// * no reference to any of them is used in this process, shared or not, except to atomics.
    ///   Code that is not Rust may read them, and finds some of them old and some new while a value
    ///   arrives. It may write them while nothing is received there and nothing sent from there;
    /// * no other [`Memory`] that overlaps this one is used at the same time.
    ///
    /// The server can write to all of the bytes while a buffer of the memory exists, and after an
    /// error until the connection has ended. Do not rely on their contents.
    ///
    /// # Panics
    /// `base` is null, or `len` is more than `isize::MAX`.
    pub unsafe fn from_raw_parts(base: *mut u8, len: usize, keep: impl Send + Sync + 'static) -> Self {
        Self::kept(base, len, Owner::Other { exported: None, _keep: Box::new(keep) })
    }

    /// Returns the memory of `len` bytes from `base` on, which map a dma-buf from `offset` on:
    /// memory of another device, for example a GPU. An RDMA device reaches it by
    /// `ibv_reg_dmabuf_mr(3)`. Bytes that do not land, and all bytes over TCP, are copied through
    /// the mapping. The descriptor is closed with the last handle, then `keep` is dropped.
    ///
    /// **Untested on a device**: every tested device refuses dma-bufs, as the embedded fabric does.
    ///
    /// # Safety
    /// The requirements of [`Memory::from_raw_parts`]. In addition, until `keep` is dropped,
    /// `descriptor`, `offset` and the bytes meet the requirements of [`DmaBuf::new`].
    ///
    /// # Panics
    /// `base` is null, or `len` is more than `isize::MAX`.
    pub unsafe fn from_dma_buf(
        base: *mut u8,
        len: usize,
        descriptor: OwnedFd,
        offset: u64,
        keep: impl Send + Sync + 'static,
    ) -> Self {
        let exported = Some(Exported { descriptor, offset });
        Self::kept(base, len, Owner::Other { exported, _keep: Box::new(keep) })
    }

    fn kept(base: *mut u8, len: usize, owner: Owner) -> Self {
        let Some(base) = NonNull::new(base).filter(|_| isize::try_from(len).is_ok()) else {
            panic!("no memory of {len} bytes is at {base:p}");
        };
        Self::whole(Bytes { base, len, owner })
    }

    fn whole(bytes: Bytes) -> Self {
        Self { bytes: Arc::new(bytes), slice: usize::MAX }
    }

    /// Registers the memory in slices of `len` bytes, the last of which may be shorter. Values may
    /// lie across cuts.
    ///
    /// Some cards are slow with one registration of many GiB. Others have few registrations: take
    /// slices of hundreds of MiB, or of GiB. A window lies inside one slice, so up to two windows
    /// of a value are copied for each slice it touches, and nothing lands in a slice shorter than a
    /// window. Over TCP cuts have no effect.
    ///
    /// # Panics
    /// `len` is zero.
    #[must_use]
    pub fn in_slices(self, len: usize) -> Self {
        assert!(len > 0, "slices of no bytes");
        Self { slice: len, ..self }
    }

    pub(crate) fn slice_len(&self) -> usize {
        self.slice.min(self.len())
    }

    pub(crate) fn slices(&self) -> impl Iterator<Item = impl CallerMemory> {
        let (len, slice) = (self.len(), self.slice_len());
        (0..len).step_by(slice.max(1)).map(move |start| Slice {
            bytes: Arc::clone(&self.bytes),
            range: start..len.min(start.saturating_add(slice)),
        })
    }

    /// Returns the bytes, if they were a `Vec<u8>` or a `Box<[u8]>` and nothing uses them: no
    /// buffer, and no connection on which an error left windows in it.
    ///
    /// # Errors
    /// Returns the memory unchanged.
    pub fn try_into_vec(self) -> Result<Vec<u8>, Self> {
        let Self { bytes, slice } = self;
        if !matches!(bytes.owner, Owner::Vec { .. }) {
            return Err(Self { bytes, slice });
        }
        let bytes = Arc::try_unwrap(bytes).map_err(|bytes| Self { bytes, slice })?;
        let bytes = ManuallyDrop::new(bytes);
        let Owner::Vec { capacity } = bytes.owner else { unreachable!("looked at above") };
        // SAFETY: the parts of a Vec, whose bytes were initialised when it came. This was the last
        // handle, and it is not dropped, so there is no other owner.
        Ok(unsafe { Vec::from_raw_parts(bytes.base.as_ptr(), bytes.len, capacity) })
    }

    /// Receives bytes until `range` is full, or the socket's time-out. Returns how many.
    pub(crate) fn receive_from(&self, socket: &impl AsRawFd, range: Range<usize>) -> io::Result<usize> {
        let (base, len) = self.part(range)?;
        // SAFETY: `part` has checked that these bytes are inside; they are writable for as long as
        // `self` is (the contract of `from_raw_parts`, or a Vec's own). The kernel writes them as
        // another thread would, and no reference to them exists: recv(2) takes their address.
        let received = unsafe { libc::recv(socket.as_raw_fd(), base.cast(), len, libc::MSG_WAITALL) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    pub(crate) fn send_to(
        &self,
        socket: &impl AsRawFd,
        range: Range<usize>,
        waits: bool,
    ) -> io::Result<usize> {
        let (base, len) = self.part(range)?;
        let flags = libc::MSG_NOSIGNAL | if waits { 0 } else { libc::MSG_DONTWAIT };
        // SAFETY: as in `receive_from`; the kernel only reads, send(2).
        let sent = unsafe { libc::send(socket.as_raw_fd(), base.cast(), len, flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    fn part(&self, range: Range<usize>) -> io::Result<(*mut u8, usize)> {
        if range.start > range.end || range.end > self.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok((self.bytes.base.as_ptr().wrapping_add(range.start), range.len()))
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> usize {
        self.bytes.base.addr().get()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.len == 0
    }
}

impl From<Vec<u8>> for Memory {
    fn from(bytes: Vec<u8>) -> Self {
        let mut bytes = ManuallyDrop::new(bytes);
        let (len, capacity) = (bytes.len(), bytes.capacity());
        let Some(base) = NonNull::new(bytes.as_mut_ptr()) else { unreachable!("a Vec has an address") };
        Self::whole(Bytes { base, len, owner: Owner::Vec { capacity } })
    }
}

impl From<Box<[u8]>> for Memory {
    fn from(bytes: Box<[u8]>) -> Self {
        bytes.into_vec().into()
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let Owner::Vec { capacity } = self.owner {
            // SAFETY: the parts of a Vec that was not taken back, dropped once.
            drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), self.len, capacity) });
        }
    }
}

impl Bytes {
    fn shared(&self) -> SharedMemory<'_> {
        // SAFETY: `len` initialised bytes that exist as long as `self` does, and are reached as
        // atomics only: a Vec's through this function, others' by the contract of `from_raw_parts`.
        // The device writes as another thread would, and an atomic may hold any value.
        SharedMemory::new(unsafe { slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU8>(), self.len) })
    }

    fn dma_buf(&self, start: usize) -> Option<DmaBuf> {
        let Owner::Other { exported: Some(Exported { descriptor, offset }), .. } = &self.owner else {
            return None;
        };
        let offset = offset.checked_add(start as u64)?;
        // SAFETY: the descriptor is open until the last handle is dropped; the rest is the contract
        // of `from_dma_buf`: the mapping has the byte `start` that far into the dma-buf, too.
        Some(unsafe { DmaBuf::new(descriptor.as_raw_fd(), offset) })
    }
}

impl CallerMemory for Memory {
    fn shared(&self) -> SharedMemory<'_> {
        self.bytes.shared()
    }

    fn dma_buf(&self) -> Option<DmaBuf> {
        self.bytes.dma_buf(0)
    }
}

impl CallerMemory for Slice {
    fn shared(&self) -> SharedMemory<'_> {
        let inside = self.bytes.shared().slice(self.range.start, self.range.len());
        inside.unwrap_or_else(|| SharedMemory::new(&[]))
    }

    fn dma_buf(&self) -> Option<DmaBuf> {
        self.bytes.dma_buf(self.range.start)
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_vec_is_given_back_when_nothing_uses_it() {
        for len in [0, 1, 7, 8, 9, 100] {
            let mut bytes = Vec::with_capacity(len + 5);
            bytes.resize(len, 1);
            let (address, capacity) = (bytes.as_ptr().addr(), bytes.capacity());
            let memory = Memory::from(bytes);
            assert_eq!((memory.address(), memory.len(), memory.is_empty()), (address, len, len == 0));
            let user = memory.clone();
            let memory = memory.try_into_vec().expect_err("somebody uses it");
            assert!(user.shared().write(0, &vec![2; len]));
            drop(user);
            let bytes = memory.try_into_vec().expect("nothing else uses it");
            assert_eq!((bytes.as_ptr().addr(), bytes.capacity()), (address, capacity));
            assert!(bytes == vec![2; len]);
        }
        let memory = Memory::from(vec![3; 10].into_boxed_slice());
        assert_eq!(memory.try_into_vec().expect("nothing else uses it"), [3; 10]);
    }

    struct Owned(Arc<AtomicBool>);

    impl Drop for Owned {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_owner_is_dropped_with_the_last_handle() {
        let mut bytes = [0_u64; 8];
        for (offset, len) in [(0, 64), (3, 58), (1, 2), (0, 0)] {
            let dropped = Arc::new(AtomicBool::new(false));
            let base = bytes.as_mut_ptr().cast::<u8>();
            // SAFETY: the bytes outlive the memory, and are not accessed otherwise meanwhile.
            let memory =
                unsafe { Memory::from_raw_parts(base.add(offset), len, Owned(Arc::clone(&dropped))) };
            let other = memory.clone();
            let memory = memory.try_into_vec().expect_err("it is no Vec");
            assert!(memory.shared().write(0, &vec![9; len]));
            drop(memory);
            assert!(!dropped.load(Ordering::Relaxed), "somebody uses it");
            drop(other);
            assert!(dropped.load(Ordering::Relaxed));
        }
        let expected = [[9; 8]; 8].map(u64::from_ne_bytes);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_dma_buf_is_told_and_closed_with_the_last_handle() {
        let mut bytes = [1_u8; 8];
        let (mut other, one) = std::io::pipe().expect("a pipe");
        let descriptor = OwnedFd::from(one);
        let number = descriptor.as_raw_fd();
        // SAFETY: the bytes outlive the memory, and are not accessed otherwise meanwhile. No device
        // is given the descriptor.
        let memory = unsafe { Memory::from_dma_buf(bytes.as_mut_ptr(), 8, descriptor, 4096, ()) };
        let told = memory.clone().dma_buf().expect("it is one");
        assert_eq!((told.descriptor(), told.offset()), (number, 4096));
        let slices: Vec<_> = memory.clone().in_slices(3).slices().map(|slice| slice.dma_buf()).collect();
        let offsets: Vec<_> = slices.iter().flatten().map(DmaBuf::offset).collect();
        assert_eq!(offsets, [4096, 4099, 4102], "each slice is where it lies in the dma-buf");
        let memory = memory.try_into_vec().expect_err("it is no Vec");
        assert!(memory.shared().write(7, &[2]));
        drop(memory);
        assert_eq!(other.read(&mut [0]).expect("the end"), 0, "the descriptor is closed");
        assert_eq!(bytes, [1, 1, 1, 1, 1, 1, 1, 2]);
        assert_eq!(Memory::from(vec![1]).dma_buf(), None);
    }

    #[test]
    fn slices_are_the_whole_memory() {
        for (len, slice, expected) in [
            (10, 4, vec![4, 4, 2]),
            (8, 4, vec![4, 4]),
            (3, 4, vec![3]),
            (5, usize::MAX, vec![5]),
            (0, 4, vec![]),
        ] {
            let memory = Memory::from(vec![0; len]).in_slices(slice);
            assert_eq!(memory.slice_len(), slice.min(len));
            let lengths: Vec<_> = memory.slices().map(|slice| slice.shared().len()).collect();
            assert_eq!(lengths, expected, "{len} bytes in slices of {slice}");
            for (index, one) in memory.slices().enumerate() {
                assert!(one.shared().write(0, &vec![index as u8 + 1; one.shared().len()]));
            }
            let bytes = memory.try_into_vec().expect("nothing uses it");
            assert!(bytes.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at / slice + 1));
        }
    }

    #[test]
    #[should_panic(expected = "no memory of 5 bytes")]
    fn there_is_nothing_at_null() {
        // SAFETY: it panics before it uses them.
        drop(unsafe { Memory::from_raw_parts(std::ptr::null_mut(), 5, ()) });
    }
}
