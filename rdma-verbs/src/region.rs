//! The protection domain and its registered regions.

use core::ffi::{c_int, c_void};
use core::fmt;
use core::ptr::{self, NonNull};
use core::sync::atomic::AtomicU8;
use std::sync::Arc;

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{Access, Pages, Slice};

use crate::Verbs;
use crate::device::Device;
use crate::error::{Error, Stage, errno};
use crate::mapping::Mapping;
use crate::sys::{RegisterOptionally, generated as c, ibv_mr, ibv_pd, ibv_sge};

/// A protection domain, `ibv_alloc_pd(3)`.
#[derive(Debug)]
pub struct Domain {
    pub(crate) inner: Arc<Pd>,
}

/// The domain proper, held by regions and queue pairs: `ibv_dealloc_pd(3)` fails while any exist.
#[derive(Debug)]
pub(crate) struct Pd {
    raw: NonNull<ibv_pd>,
    device: Device,
}

// SAFETY: verbs objects are safe for multi-threaded access (ibv_alloc_td(3)).
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
        if rdma_process::is_child() {
            return;
        }
        // SAFETY: ibv_dealloc_pd(3): what was made in the domain held it and is destroyed. If a
        // region could not be deregistered, this fails with EBUSY and the domain stays.
        let _busy = unsafe { (self.device.api.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

impl Domain {
    pub(crate) fn create(device: Device) -> Result<Self, Error> {
        // SAFETY: ibv_alloc_pd(3): the context is open while the device is held.
        let raw = unsafe { (device.api.ibv_alloc_pd)(device.context()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_pd", Stage::Create))?;
        Ok(Self { inner: Arc::new(Pd { raw, device }) })
    }
}

impl rdma_backend::Domain<Verbs> for Domain {
    fn register(&self, len: usize, access: Access) -> Result<Region, Error> {
        Region::own(&self.inner, Mapping::new(len)?, len, access)
    }

    fn register_huge(&self, len: usize, access: Access) -> Result<Region, Error> {
        Region::own(&self.inner, Mapping::huge(len)?, len, access)
    }

    fn register_memory<M: CallerMemory>(&self, memory: M, access: Access) -> Result<Region, Error> {
        // On the heap, so that what it shares does not move with the region.
        let memory: Arc<dyn CallerMemory> = Arc::new(memory);
        // Asked once: another call could return other bytes than the registered ones.
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

struct Functions {
    ibv_reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    ibv_reg_mr_iova2: Option<RegisterOptionally>,
}

impl Functions {
    /// Without the function for optional rights there are none.
    ///
    /// # Safety
    /// As for `ibv_reg_mr(3)`.
    unsafe fn register(
        &self,
        domain: *mut ibv_pd,
        address: usize,
        len: usize,
        access: Access,
    ) -> *mut ibv_mr {
        let first = ptr::with_exposed_provenance_mut(address);
        let flags = access_flags(access);
        match self.ibv_reg_mr_iova2.filter(|_| access.allows(Access::RELAXED_ORDERING)) {
            Some(optionally) => {
                let flags = flags.cast_unsigned() | c::IBV_ACCESS_RELAXED_ORDERING;
                // SAFETY: passed on from the caller; peers use the address of the bytes here.
                unsafe { optionally(domain, first, len, address as u64, flags) }
            }
            // SAFETY: passed on from the caller.
            None => unsafe { (self.ibv_reg_mr)(domain, first, len, flags) },
        }
    }
}

/// A registered region, on pages of its own or in memory of a program, `ibv_reg_mr(3)`.
pub struct Region {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    address: usize,
    len: usize,
    /// Keeps the `len` bytes at `address`; `None` only in `drop`.
    bytes: Option<Bytes>,
    domain: Arc<Pd>,
}

enum Bytes {
    Own(Mapping),
    Caller(#[expect(dead_code, reason = "it is kept until it is dropped")] Arc<dyn CallerMemory>),
}

// SAFETY: the bytes are reached as atomics only, and `raw` only by the owner's deregistration.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn own(domain: &Arc<Pd>, mapping: Mapping, len: usize, access: Access) -> Result<Self, Error> {
        let address = mapping.base().expose_provenance();
        Self::register(domain, Bytes::Own(mapping), (address, len), None, access)
    }

    /// Registers the `len` bytes at `address`, those of `bytes`; through `buffer` if they map it.
    fn register(
        domain: &Arc<Pd>,
        bytes: Bytes,
        (address, len): (usize, usize),
        buffer: Option<DmaBuf>,
        access: Access,
    ) -> Result<Self, Error> {
        Error::unless_forked()?;
        let api = domain.device.api;
        let functions = Functions { ibv_reg_mr: api.ibv_reg_mr, ibv_reg_mr_iova2: api.ibv_reg_mr_iova2 };
        // SAFETY: ibv_reg_mr(3): a live domain and `len` mapped bytes that outlive the
        // registration: the region drops `bytes` last. A caller's memory was borrowed once, for
        // both numbers, from behind its `Arc`, which neither moves nor drops it before, so the
        // borrow could last as long; its bytes are atomics, which the device may write.
        // ibv_reg_dmabuf_mr(3): the same bytes, by the contract of `DmaBuf::new`, under the address
        // they have here; its descriptor is open as long as `bytes` exists, and not used later.
        let raw = unsafe {
            match buffer {
                None => functions.register(domain.as_ptr(), address, len, access),
                Some(buffer) => {
                    let (fd, offset) = (buffer.descriptor(), buffer.offset());
                    let flags = access_flags(access);
                    (api.ibv_reg_dmabuf_mr)(domain.as_ptr(), offset, len, address as u64, fd, flags)
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

/// Whether a dma-buf can have `len` bytes from its offset on: kernel offsets are signed.
fn is_inside_a_file(buffer: &DmaBuf, len: usize) -> bool {
    let end = buffer.offset().checked_add(len as u64);
    buffer.descriptor() >= 0 && end.is_some_and(|end| i64::try_from(end).is_ok())
}

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
        // SAFETY: the registered bytes, whose provenance was exposed for that. `bytes` keeps them
        // until the region is dropped, after this borrow: a mapping, reached in this process as
        // atomics only, or what a caller's memory lent as atomics, which stays behind its `Arc`.
        SharedMemory::new(unsafe {
            core::slice::from_raw_parts(ptr::with_exposed_provenance::<AtomicU8>(self.address), self.len)
        })
    }

    fn pages(&self) -> Pages {
        match &self.bytes {
            Some(Bytes::Own(mapping)) => mapping.pages(),
            _ => Pages::Usual,
        }
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
        // The bytes are this process's own, also in a child.
        if rdma_process::is_child() {
            return;
        }
        // SAFETY: ibv_dereg_mr(3): registered and deregistered once. Work requests that name the
        // region now fail with a protection error; the device no longer touches the pages.
        let result = unsafe { (self.domain.device.api.ibv_dereg_mr)(self.raw.as_ptr()) };
        if result != 0 {
            // The device may still write there, so the memory is never given back.
            core::mem::forget(self.bytes.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use core::ffi::c_uint;
    use std::sync::Mutex;

    use super::*;
    use crate::locked;

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
        assert_eq!(access_flags(Access::REMOTE_WRITE.and(Access::RELAXED_ORDERING)), 1 | 2);
    }

    static CALLS: Mutex<Vec<(&str, usize, u64, u32)>> = Mutex::new(Vec::new());

    unsafe extern "C" fn plain(_: *mut ibv_pd, _: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
        locked(&CALLS).push(("ibv_reg_mr", len, 0, access.cast_unsigned()));
        ptr::null_mut()
    }

    unsafe extern "C" fn optionally(
        _: *mut ibv_pd,
        _: *mut c_void,
        len: usize,
        iova: u64,
        access: c_uint,
    ) -> *mut ibv_mr {
        locked(&CALLS).push(("ibv_reg_mr_iova2", len, iova, access));
        ptr::null_mut()
    }

    #[test]
    fn relaxed_ordering_is_asked_for_where_the_library_has_it() {
        let (strict, relaxed) = (Access::REMOTE_WRITE, Access::REMOTE_WRITE.and(Access::RELAXED_ORDERING));
        for (has, access) in [(true, strict), (true, relaxed), (false, relaxed)] {
            let functions = Functions { ibv_reg_mr: plain, ibv_reg_mr_iova2: has.then_some(optionally) };
            // SAFETY: the functions do not look behind the pointers.
            let region = unsafe { functions.register(ptr::null_mut(), 0x7000, 5, access) };
            assert!(region.is_null());
        }
        let relaxed = ("ibv_reg_mr_iova2", 5, 0x7000, 1 | 2 | 1 << 20);
        assert_eq!(*locked(&CALLS), [("ibv_reg_mr", 5, 0, 1 | 2), relaxed, ("ibv_reg_mr", 5, 0, 1 | 2)]);
    }

    #[test]
    fn a_part_of_a_dma_buf_has_a_descriptor_and_an_end() {
        let fits = |descriptor, offset, len| {
            // SAFETY: only these checks use it.
            is_inside_a_file(&unsafe { DmaBuf::new(descriptor, offset) }, len)
        };
        assert!(fits(0, 0, 1) && fits(7, 4096, 1 << 40) && fits(3, i64::MAX as u64 - 1, 1));
        assert!(!fits(-1, 0, 1) && !fits(3, i64::MAX as u64, 1) && !fits(3, u64::MAX, 1));
        assert!(!fits(3, 1, usize::MAX));
    }
}
