//! The protection domain and its registered regions.

use core::ffi::c_int;
use core::fmt;
use core::ptr::{self, NonNull};
use core::sync::atomic::AtomicU8;
use std::sync::Arc;

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{Access, Slice};

use crate::Verbs;
use crate::device::Device;
use crate::error::{Error, Stage, errno};
use crate::sys::{generated as c, ibv_mr, ibv_pd, ibv_sge};

/// A protection domain, `ibv_alloc_pd(3)`.
#[derive(Debug)]
pub struct Domain {
    pub(crate) inner: Arc<Pd>,
}

/// The domain proper; regions and queue pairs hold it, because `ibv_dealloc_pd(3)` fails while there are any.
#[derive(Debug)]
pub(crate) struct Pd {
    raw: NonNull<ibv_pd>,
    device: Device,
}

// SAFETY: a protection domain may be used by any number of threads at once: all verbs objects are safe for multi-threaded
// access (ibv_alloc_td(3)). It is deallocated by the last reference.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(crate) const fn as_ptr(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }

    pub(crate) const fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: ibv_dealloc_pd(3): what was made in the domain held it and is destroyed. Should a region have failed to be
        // deregistered, this fails with EBUSY and the domain stays, as it must.
        let _busy = unsafe { (self.device.api.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

impl Domain {
    pub(crate) fn create(device: Device) -> Result<Self, Error> {
        // SAFETY: ibv_alloc_pd(3): the device's context is open, and stays so while the device is held.
        let raw = unsafe { (device.api.ibv_alloc_pd)(device.context()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_pd", Stage::Create))?;
        Ok(Self { inner: Arc::new(Pd { raw, device }) })
    }
}

impl rdma_backend::Domain<Verbs> for Domain {
    fn register(&self, len: usize, access: Access) -> Result<Region, Error> {
        let mapping = Mapping::new(len)?;
        let address = mapping.base.as_ptr().expose_provenance();
        Region::register(&self.inner, Bytes::Own(mapping), (address, len), None, access)
    }

    fn register_memory<M: CallerMemory>(&self, memory: M, access: Access) -> Result<Region, Error> {
        // On the heap, so that what it shares stays where it is while the region moves.
        let memory: Arc<dyn CallerMemory> = Arc::new(memory);
        // Asked once: what is registered is one borrow's bytes, whatever another call would return.
        let shared = memory.shared();
        let (address, len) = (shared.address(), shared.len());
        if len == 0 {
            return Err(Error::Argument("a region has at least one byte"));
        }
        let buffer = memory.dma_buf();
        if buffer.is_some_and(|buffer| !is_inside_a_file(&buffer, len)) {
            return Err(Error::Argument(
                "a part of a dma-buf has a descriptor, and an end that a file can have",
            ));
        }
        Region::register(&self.inner, Bytes::Caller(memory), (address, len), buffer, access)
    }
}

/// No more rights than asked for: what a region does not need for its purpose, a peer shall not have.
fn access_flags(access: Access) -> c_int {
    let mut flags = 0;
    if access.allows(Access::LOCAL_WRITE) {
        flags |= c::IBV_ACCESS_LOCAL_WRITE;
    }
    if access.allows(Access::REMOTE_WRITE) {
        flags |= c::IBV_ACCESS_REMOTE_WRITE;
    }
    if access.allows(Access::REMOTE_READ) {
        flags |= c::IBV_ACCESS_REMOTE_READ;
    }
    flags as c_int
}

/// A registered region, on pages of its own or in memory of a program, `ibv_reg_mr(3)`.
pub struct Region {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    address: usize,
    len: usize,
    /// What the `len` bytes at `address` are; `None` only in `drop`.
    bytes: Option<Bytes>,
    domain: Arc<Pd>,
}

/// The memory of a region, kept until it is deregistered.
enum Bytes {
    Own(#[expect(dead_code, reason = "it is unmapped when it is dropped")] Mapping),
    Caller(#[expect(dead_code, reason = "as above")] Arc<dyn CallerMemory>),
}

// SAFETY: the bytes are reached through atomics only, and `raw` only for deregistration, by the owner.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Registers the `len` bytes at `address`, which are those of `bytes`; through `buffer`, if they are a mapping of it.
    fn register(
        domain: &Arc<Pd>,
        bytes: Bytes,
        (address, len): (usize, usize),
        buffer: Option<DmaBuf>,
        access: Access,
    ) -> Result<Self, Error> {
        let (api, access) = (domain.device.api, access_flags(access));
        // SAFETY: ibv_reg_mr(3): a live domain and `len` mapped bytes that outlive the registration: `bytes` stays in the region,
        // which drops it last. A caller's memory was borrowed once, for both numbers, from the value behind its `Arc`, which is neither
        // moved nor dropped before that, so that borrow could have lasted as long. Its bytes are atomics, for which it is sound that
        // the device writes them. ibv_reg_dmabuf_mr(3): the same bytes, by the contract of `DmaBuf::new`, which the device names by the address
        // that they have here; the descriptor is open for as long as `bytes` exists, and is not used after the call.
        let raw = unsafe {
            match buffer {
                None => {
                    let first = ptr::with_exposed_provenance_mut(address);
                    (api.ibv_reg_mr)(domain.as_ptr(), first, len, access)
                }
                Some(buffer) => {
                    let (fd, offset) = (buffer.descriptor(), buffer.offset());
                    (api.ibv_reg_dmabuf_mr)(domain.as_ptr(), offset, len, address as u64, fd, access)
                }
            }
        };
        let Some(raw) = NonNull::new(raw) else {
            return Err(match buffer {
                None => Error::register(len, errno()),
                Some(_) => Error::last("ibv_reg_dmabuf_mr", Stage::Register),
            });
        };
        // SAFETY: just registered; the keys never change.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self { raw, lkey, rkey, address, len, bytes: Some(bytes), domain: Arc::clone(domain) })
    }

    /// Returns the scatter/gather element for a slice of this region, if the slice is inside and `domain` is the region's.
    #[inline]
    pub(crate) fn element(slice: &Slice<'_, Self>, domain: &Arc<Pd>) -> Result<ibv_sge, Error> {
        let Slice { region, offset, len } = *slice;
        if !Arc::ptr_eq(&region.domain, domain) {
            return Err(Self::fault(slice, true));
        }
        let Some(length) = inside(offset, len, region.len) else { return Err(Self::fault(slice, false)) };
        Ok(ibv_sge {
            addr: rdma_backend::Region::address(region).wrapping_add(offset as u64),
            length,
            lkey: region.lkey,
        })
    }

    #[cold]
    const fn fault(slice: &Slice<'_, Self>, foreign: bool) -> Error {
        let Slice { region, offset, len } = *slice;
        Error::Slice { offset, len, region: region.len, foreign }
    }
}

/// Returns whether `len` bytes of a dma-buf from its offset on can be there: the kernel's offsets are signed.
fn is_inside_a_file(buffer: &DmaBuf, len: usize) -> bool {
    let end = buffer.offset().checked_add(len as u64);
    buffer.descriptor() >= 0 && end.is_some_and(|end| i64::try_from(end).is_ok())
}

/// The length as C takes it, if `len` bytes from `offset` are inside of `all`.
#[inline]
fn inside(offset: usize, len: usize, all: usize) -> Option<u32> {
    if offset.checked_add(len)? > all {
        return None;
    }
    u32::try_from(len).ok()
}

impl rdma_backend::Region for Region {
    #[inline]
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn address(&self) -> u64 {
        self.address as u64
    }

    #[inline]
    fn rkey(&self) -> u32 {
        self.rkey
    }

    #[inline]
    fn memory(&self) -> SharedMemory<'_> {
        // SAFETY: the bytes that were registered, whose provenance was exposed for that. `bytes` keeps them until the region is dropped,
        // which the borrow of `self` prevents. They are a mapping of this library's, reached in this process as atomics only, or what a
        // caller's memory lent as atomics, from behind its `Arc`, which is neither moved nor dropped before that.
        SharedMemory::new(unsafe {
            core::slice::from_raw_parts(ptr::with_exposed_provenance::<AtomicU8>(self.address), self.len)
        })
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("rkey", &format_args!("{:#x}", self.rkey))
            .finish_non_exhaustive()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: ibv_dereg_mr(3): registered by us and deregistered once. Work requests that still name the region fail with
        // a protection error from here on; the device does not touch the pages any more.
        let result = unsafe { (self.domain.device.api.ibv_dereg_mr)(self.raw.as_ptr()) };
        if result != 0 {
            // The device may still write there, so the memory must never serve another purpose: it is never given back.
            core::mem::forget(self.bytes.take());
        }
    }
}

/// Anonymous pages.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    /// Whole pages.
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Argument("a region has at least one byte"));
        }
        // SAFETY: sysconf(3) has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(4096);
        let len = len
            .checked_next_multiple_of(page)
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or(Error::Argument("a region of this length does not fit into the address space"))?;
        // SAFETY: mmap(2): fresh anonymous pages at an address of the kernel's choice affect no other memory.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(first) if base != libc::MAP_FAILED => Ok(Self { base: first, len }),
            _ => Err(Error::last("mmap", Stage::Create)),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: munmap(2): exactly what was mapped; every borrow of it ended with `self`, and it is not registered any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_checked_without_overflow() {
        assert_eq!(inside(0, 0, 0), Some(0));
        assert_eq!(inside(0, 16, 16), Some(16));
        assert_eq!(inside(16, 0, 16), Some(0));
        assert_eq!(inside(10, 6, 16), Some(6));
        assert_eq!(inside(10, 7, 16), None);
        assert_eq!(inside(17, 0, 16), None);
        assert_eq!(inside(usize::MAX, 1, 16), None);
        assert_eq!(inside(1, usize::MAX, usize::MAX), None);
        assert_eq!(inside(0, 1 << 32, usize::MAX), None);
        assert_eq!(inside(0, u32::MAX as usize, usize::MAX), Some(u32::MAX));
    }

    #[test]
    fn rights_are_exactly_those_asked_for() {
        assert_eq!(access_flags(Access::NONE), 0);
        assert_eq!(access_flags(Access::LOCAL_WRITE), 1);
        assert_eq!(access_flags(Access::REMOTE_WRITE), 1 | 2);
        assert_eq!(access_flags(Access::REMOTE_READ), 4);
        assert_eq!(access_flags(Access::REMOTE_WRITE.and(Access::REMOTE_READ)), 1 | 2 | 4);
    }

    #[test]
    fn a_part_of_a_dma_buf_has_a_descriptor_and_an_end() {
        let fits = |descriptor, offset, len| {
            // SAFETY: nothing is done with it but these checks.
            is_inside_a_file(&unsafe { DmaBuf::new(descriptor, offset) }, len)
        };
        assert!(fits(0, 0, 1) && fits(7, 4096, 1 << 40) && fits(3, i64::MAX as u64 - 1, 1));
        assert!(!fits(-1, 0, 1) && !fits(3, i64::MAX as u64, 1) && !fits(3, u64::MAX, 1));
        assert!(!fits(3, 1, usize::MAX));
    }

    #[test]
    fn mappings_are_whole_zeroed_pages() {
        let mapping = Mapping::new(1).unwrap();
        assert!(mapping.len >= 4096 && (mapping.base.as_ptr() as usize).is_multiple_of(4096));
        // SAFETY: a page that nobody else has, mapped until the end of the test, and reached as atomics only.
        let bytes = unsafe { core::slice::from_raw_parts(mapping.base.as_ptr().cast::<AtomicU8>(), 100) };
        let memory = SharedMemory::new(bytes);
        let mut bytes = [1; 100];
        assert!(memory.read(0, &mut bytes) && bytes == [0; 100]);
        assert!(memory.write(99, &[7]) && !memory.write(100, &[7]));
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for len in [0, usize::MAX, usize::MAX / 2 + 1] {
            assert!(matches!(Mapping::new(len), Err(Error::Argument(_))), "{len}");
        }
        // Possible, but never granted.
        assert!(matches!(Mapping::new(1 << 55), Err(Error::Call { call: "mmap", .. })));
    }
}
