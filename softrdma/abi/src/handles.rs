//! Address handles: where datagrams go.
//!
//! The fabric does not know them. Each datagram brings the addresses of its handle, which the
//! fabric checks.

use core::ffi::c_int;
use std::net::IpAddr;

use softrdma_wire::Destination;

use crate::device::{PORT, address_of, attached_in};
use crate::layout::{AddressHandle, IBV_WC_GRH, ibv_ah_attr, ibv_context, ibv_pd, ibv_wc, zeroed};
use crate::link::{concluded, pointer};
use crate::pair::{bytes, set_path};

/// The bytes of `struct ibv_grh`.
const HEADER: usize = 40;

/// An address handle.
#[repr(C)]
pub(crate) struct Handle {
    ah: AddressHandle,
    local: IpAddr,
    remote: IpAddr,
}

/// Returns where a work request's datagram goes.
///
/// # Safety
/// `ah` is null or alive.
pub(crate) unsafe fn destination(
    ah: *const AddressHandle,
    pd: *const ibv_pd,
    number: u32,
    key: u32,
) -> Result<Destination, c_int> {
    // SAFETY: the caller vouches for `ah`, which `create` made as a `Handle`.
    match unsafe { ah.cast::<Handle>().as_ref() } {
        Some(handle) if handle.ah.pd.cast_const() == pd => {
            Ok(Destination { local: handle.local, remote: handle.remote, number, key })
        }
        // None, or one of another domain.
        _ => Err(libc::EINVAL),
    }
}

/// Returns the addresses that attributes name: the device's own, and the other one.
///
/// # Safety
/// `context` is a device's.
pub(crate) unsafe fn path(
    context: *const ibv_context,
    attributes: &ibv_ah_attr,
) -> Result<(IpAddr, IpAddr), c_int> {
    // SAFETY: the caller vouches for `context`.
    let addresses = &unsafe { attached_in(context) }?.addresses;
    // RoCE addresses its peers by GID.
    if attributes.is_global == 0 || attributes.port_num != PORT {
        return Err(libc::EINVAL);
    }
    let local = addresses.get(usize::from(attributes.grh.sgid_index)).ok_or(libc::EINVAL)?;
    Ok((*local, address_of(bytes(attributes.grh.dgid))))
}

/// Makes an address handle.
///
/// # Safety
/// `pd` is alive.
unsafe fn create(pd: *mut ibv_pd, attributes: &ibv_ah_attr) -> Result<*mut AddressHandle, c_int> {
    // SAFETY: the caller vouches for `pd`, whose context is a device's.
    let (context, (local, remote)) = unsafe { ((*pd).context, path((*pd).context, attributes)?) };
    let ah = AddressHandle { context, pd, handle: 0 };
    Ok(Box::into_raw(Box::new(Handle { ah, local, remote })).cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attributes: *mut ibv_ah_attr) -> *mut AddressHandle {
    // SAFETY: ibv_create_ah(3): a live domain, and attributes that are read during the call.
    pointer(unsafe { create(pd, &*attributes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut AddressHandle) -> c_int {
    // SAFETY: ibv_destroy_ah(3): made by `create`, in a box of a `Handle`; the caller gives it up.
    drop(unsafe { Box::from_raw(ah.cast::<Handle>()) });
    0
}

/// Returns the addresses in a datagram's header: the sender's, and the receiver's.
fn ends(header: &[u8; HEADER]) -> Option<(IpAddr, IpAddr)> {
    let [version, ..] = header;
    let v6 =
        |at: usize| header.get(at..)?.first_chunk::<16>().map(|bytes| IpAddr::from(*bytes).to_canonical());
    let v4 = |at: usize| header.get(at..)?.first_chunk::<4>().map(|bytes| IpAddr::from(*bytes));
    match (version >> 4, header.get(20).map(|version| version >> 4)) {
        (6, _) => Some((v6(8)?, v6(24)?)),
        (_, Some(4)) => Some((v4(32)?, v4(36)?)),
        _ => None,
    }
}

/// Fills in the attributes of a handle that leads back to where a datagram came from.
///
/// # Safety
/// `context` is a device's, and `grh` has a header if the completion says so.
unsafe fn initialise(
    context: *const ibv_context,
    port: u8,
    wc: &ibv_wc,
    grh: *const [u8; HEADER],
) -> Result<ibv_ah_attr, c_int> {
    // SAFETY: the caller vouches for `context`.
    let addresses = &unsafe { attached_in(context) }?.addresses;
    if port != PORT || wc.wc_flags & IBV_WC_GRH == 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for `grh`.
    let (from, to) = ends(unsafe { &*grh }).ok_or(libc::EPROTONOSUPPORT)?;
    let own = addresses.iter().position(|own| *own == to).ok_or(libc::EINVAL)?;
    let mut attributes: ibv_ah_attr = zeroed();
    set_path(&mut attributes, from);
    attributes.grh.sgid_index = u8::try_from(own).map_err(|_| libc::EINVAL)?;
    attributes.grh.hop_limit = u8::MAX;
    Ok(attributes)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut [u8; HEADER],
    into: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: ibv_init_ah_from_wc(3): a device's context, a completion and its header.
    let made = unsafe { initialise(context, port, &*wc, grh) };
    // SAFETY: ibv_init_ah_from_wc(3): a place for the attributes.
    concluded(made.map(|attributes| unsafe { into.write(attributes) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut [u8; HEADER],
    port: u8,
) -> *mut AddressHandle {
    // SAFETY: ibv_create_ah_from_wc(3): a live domain, a completion and its header.
    pointer(unsafe {
        initialise((*pd).context, port, &*wc, grh).and_then(|attributes| create(pd, &attributes))
    })
}
