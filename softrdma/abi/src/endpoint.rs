//! `rdma_create_ep(3)`: resolves an address and a route and makes a queue pair in one call.

use core::ffi::c_int;
use core::ptr;

use crate::cm::{self, identifier};
use crate::layout::{AddressInfo, ibv_pd, ibv_qp_init_attr, rdma_cm_id};
use crate::link::{concluded, set_errno};

/// `RAI_PASSIVE`.
pub(crate) const PASSIVE: c_int = 1;
/// How many milliseconds the resolution of an address or a route may take.
const PATIENCE: c_int = 2000;

/// Converts a call's result to the `errno` that it has left.
fn left(result: c_int) -> Result<(), c_int> {
    if result == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Binds or resolves the identifier, and makes its queue pair or keeps the attributes for later
/// ones.
///
/// # Safety
/// The arguments are as rdma_create_ep(3) demands.
unsafe fn make(
    id: *mut rdma_cm_id,
    info: &AddressInfo,
    pd: *mut ibv_pd,
    attributes: *mut ibv_qp_init_attr,
) -> Result<(), c_int> {
    // SAFETY: null, or attributes that are read and written during the call.
    if let Some(attributes) = unsafe { attributes.as_mut() } {
        attributes.qp_type = info.qp_type.cast_unsigned();
    }
    // SAFETY: the identifier was just made; the addresses are those of `info`, and of the families
    // that they state.
    unsafe {
        if info.flags & PASSIVE != 0 {
            left(cm::rdma_bind_addr(id, info.src_addr))?;
            // SAFETY: null, or attributes that are copied.
            if let Some(attributes) = attributes.as_ref() {
                identifier(id).endpoint = Some((ptr::from_ref(attributes).read(), pd));
            }
            return Ok(());
        }
        left(cm::rdma_resolve_addr(id, info.src_addr, info.dst_addr, PATIENCE))?;
        left(cm::rdma_resolve_route(id, PATIENCE))?;
        match attributes.as_mut() {
            Some(attributes) => cm::create_pair(id, pd, attributes),
            None => Ok(()),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_ep(
    into: *mut *mut rdma_cm_id,
    info: *mut AddressInfo,
    pd: *mut ibv_pd,
    attributes: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: rdma_create_ep(3): no channel makes a synchronous identifier.
    let id = match unsafe { cm::create(ptr::null_mut(), ptr::null_mut()) } {
        Ok(id) => id,
        Err(errno) => return concluded(Err(errno)),
    };
    // SAFETY: rdma_create_ep(3): what `rdma_getaddrinfo` gave, and attributes or null.
    match unsafe { make(id, &*info, pd, attributes) } {
        Ok(()) => {
            // SAFETY: rdma_create_ep(3): a place for the identifier.
            unsafe { into.write(id) };
            0
        }
        Err(errno) => {
            // SAFETY: made above, and not given to the program.
            unsafe { cm::rdma_destroy_id(id) };
            set_errno(errno);
            -1
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: rdma_destroy_ep(3): an identifier from `rdma_create_ep` or `rdma_get_request`, which
    // the caller gives up.
    unsafe {
        cm::rdma_destroy_qp(id);
        cm::rdma_destroy_id(id);
    }
}
