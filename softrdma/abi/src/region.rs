//! Protection domains and memory regions.

use core::ffi::{c_int, c_uint, c_void};

use softrdma_wire::{Access, Reply, Request};

use crate::device::number_in;
use crate::layout::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    ibv_context, ibv_mr, ibv_pd,
};
use crate::link::{ask, call, make, pointer, returned};
use crate::locked;
use crate::offer::open_memory;
use crate::reachable::{is_readable, is_writable};

/// The flags of `IBV_ACCESS_OPTIONAL_RANGE`, among them relaxed ordering, which have no effect
/// here. Zero-based addresses are not among them.
const IGNORED: c_uint = 0x3ff0_0000;

/// Allocates a protection domain on a device.
///
/// # Safety
/// `context` is a device's.
pub(crate) unsafe fn allocate_pd(context: *mut ibv_context) -> Result<*mut ibv_pd, c_int> {
    // SAFETY: the caller vouches for `context`.
    let handle = make(&Request::AllocateDomain(unsafe { number_in(context) }))?;
    Ok(Box::into_raw(Box::new(ibv_pd { context, handle })))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: ibv_alloc_pd(3): a device's context.
    pointer(unsafe { allocate_pd(context) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: ibv_dealloc_pd(3): a domain from `ibv_alloc_pd`, in a box.
    let handle = unsafe { (*pd).handle };
    let freed = ask(&Request::FreeDomain(handle));
    if freed.is_ok() {
        // SAFETY: as above; the fabric says that no object needs it, and the caller gives it up.
        drop(unsafe { Box::from_raw(pd) });
    }
    returned(freed)
}

/// Converts access flags.
pub(crate) const fn on_wire(access: c_uint) -> Access {
    Access {
        local_write: access & IBV_ACCESS_LOCAL_WRITE != 0,
        remote_write: access & IBV_ACCESS_REMOTE_WRITE != 0,
        remote_read: access & IBV_ACCESS_REMOTE_READ != 0,
        remote_atomic: access & IBV_ACCESS_REMOTE_ATOMIC != 0,
    }
}

/// Registers `len` bytes at `addr`, which peers address from `iova` on.
///
/// # Safety
/// `pd` is alive, and only the caller frees the region.
unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr, c_int> {
    let rights = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    let known = IBV_ACCESS_LOCAL_WRITE | rights | IGNORED;
    if access & !known != 0 {
        // As a device without memory windows and on-demand paging.
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the caller vouches for `pd`.
    let (context, domain) = unsafe { ((*pd).context, (*pd).handle) };
    let at = addr.expose_provenance() as u64;
    let request = Request::Register { domain, at, address: iova, len: len as u64, access: on_wire(access) };
    // A device finds a wrong address when the memory is pinned, at any of its pages. Both ends find
    // one that is no memory at all.
    let writes = access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    let reachable = if writes { is_writable } else { is_readable };
    if let Some(last) = len.checked_sub(1).and_then(|last| addr.addr().checked_add(last))
        && !(reachable(addr.addr()) && reachable(last))
    {
        return Err(libc::EFAULT);
    }
    locked::lock(at, len)?;
    let registered = match call(&request) {
        // The fabric has no access to this process's memory yet.
        Err(libc::EPERM) => open_memory().and_then(|()| call(&request)),
        other => other,
    };
    let refused = match registered {
        Ok(Reply::Region { name, key }) => {
            let mr = ibv_mr { context, pd, addr, length: len, handle: name, lkey: key, rkey: key };
            return Ok(Box::into_raw(Box::new(mr)));
        }
        Ok(_) => libc::EPROTO,
        Err(errno) => errno,
    };
    locked::unlock(at, len);
    Err(refused)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: ibv_reg_mr(3): a live protection domain.
    pointer(unsafe { register(pd, addr, len, addr.addr() as u64, access.cast_unsigned()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: ibv_reg_mr(3): a live protection domain.
    pointer(unsafe { register(pd, addr, len, iova, access.cast_unsigned()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: ibv_reg_mr(3): a live protection domain.
    pointer(unsafe { register(pd, addr, len, iova, access) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: ibv_dereg_mr(3): a region from a registration, in a box.
    let handle = unsafe { (*mr).handle };
    let freed = ask(&Request::Deregister(handle));
    if freed.is_ok() {
        // SAFETY: as above; the caller gives it up.
        let mr = unsafe { Box::from_raw(mr) };
        locked::unlock(mr.addr.addr() as u64, mr.length);
    }
    returned(freed)
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
