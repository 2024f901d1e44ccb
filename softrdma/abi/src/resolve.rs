//! `rdma_getaddrinfo(3)`, by the machine's own `getaddrinfo(3)`. Only the resolution of an address
//! shows whether the fabric has it.

use core::ffi::{c_char, c_int};
use core::ptr;
use std::net::SocketAddr;

use libc::{addrinfo, sockaddr_storage};

use crate::address;
use crate::endpoint::PASSIVE;
use crate::layout::{AddressInfo, IBV_QPT_RC, RDMA_PS_TCP, zeroed};
use crate::link::{concluded, set_errno};

/// `RAI_NUMERICHOST`.
const NUMERIC: c_int = 2;
/// `RAI_FAMILY`.
const FAMILY: c_int = 8;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const AddressInfo,
    into: *mut *mut AddressInfo,
) -> c_int {
    if node.is_null() && service.is_null() && hints.is_null() {
        return concluded(Err(libc::EINVAL));
    }
    // SAFETY: rdma_getaddrinfo(3): null or hints.
    let hints = unsafe { hints.as_ref() };
    let flags = hints.map_or(0, |hints| hints.flags);
    let mut wanted = addrinfo {
        ai_flags: 0,
        ai_family: hints.filter(|_| flags & FAMILY != 0).map_or(0, |hints| hints.family),
        ai_socktype: libc::SOCK_STREAM,
        ai_protocol: 0,
        ai_addrlen: 0,
        ai_addr: ptr::null_mut(),
        ai_canonname: ptr::null_mut(),
        ai_next: ptr::null_mut(),
    };
    if flags & PASSIVE != 0 {
        wanted.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & NUMERIC != 0 {
        wanted.ai_flags |= libc::AI_NUMERICHOST;
    }
    let mut answer: AddressInfo = zeroed();
    (answer.flags, answer.qp_type, answer.port_space) = (flags, IBV_QPT_RC as c_int, RDMA_PS_TCP as c_int);
    // Without a name there is nothing to look up, so the answer has the addresses of the hints.
    if !node.is_null() || !service.is_null() {
        // SAFETY: rdma_getaddrinfo(3): strings or null.
        let named = match unsafe { looked_up(node, service, &wanted) } {
            Ok(named) => named,
            Err(error) => return error,
        };
        answer.set(flags & PASSIVE != 0, named);
    } else if let Some(hints) = hints {
        answer.family = hints.family;
        // SAFETY: rdma_getaddrinfo(3): null, or an address.
        if let Some(peer) = unsafe { address::read(hints.dst_addr) } {
            answer.set(false, peer);
        }
    }
    if let Some(hints) = hints.filter(|_| answer.src_addr.is_null()) {
        // SAFETY: rdma_getaddrinfo(3): null, or the source that the caller wants.
        if let Some(source) = unsafe { address::read(hints.src_addr) } {
            answer.set(true, source);
        }
    }
    // SAFETY: rdma_getaddrinfo(3): a place for the answer.
    unsafe { into.write(Box::into_raw(Box::new(answer))) };
    0
}

/// Returns the first address of a name.
///
/// # Safety
/// Both are strings or null.
unsafe fn looked_up(
    node: *const c_char,
    service: *const c_char,
    wanted: &addrinfo,
) -> Result<SocketAddr, c_int> {
    let mut found = ptr::null_mut();
    // SAFETY: getaddrinfo(3): strings or null, as the caller vouches, hints, and a place for the
    // answer.
    let result = unsafe { libc::getaddrinfo(node, service, wanted, &raw mut found) };
    if result != 0 {
        return Err(result);
    }
    // SAFETY: getaddrinfo(3) has succeeded: at least one entry, whose address is of the family that
    // it states.
    let known = unsafe { address::read((*found).ai_addr) };
    // SAFETY: freed once.
    unsafe { libc::freeaddrinfo(found) };
    known.ok_or_else(|| {
        set_errno(libc::EAFNOSUPPORT);
        libc::EAI_FAMILY
    })
}

impl AddressInfo {
    fn set(&mut self, source: bool, address: SocketAddr) {
        // SAFETY: zero is a valid value of a structure of integers.
        let storage: Box<sockaddr_storage> = Box::new(unsafe { core::mem::zeroed() });
        let storage = Box::into_raw(storage);
        // SAFETY: made above.
        let len = unsafe { address::write(address, storage) };
        let place = if source {
            (&mut self.src_addr, &mut self.src_len)
        } else {
            (&mut self.dst_addr, &mut self.dst_len)
        };
        (*place.0, *place.1) = (storage.cast(), len);
        self.family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_freeaddrinfo(info: *mut AddressInfo) {
    if info.is_null() {
        return;
    }
    // SAFETY: rdma_freeaddrinfo(3): an answer from `rdma_getaddrinfo`, in a box.
    let info = unsafe { Box::from_raw(info) };
    for address in [info.src_addr, info.dst_addr] {
        if !address.is_null() {
            // SAFETY: in a box of a `sockaddr_storage`, made by `set`.
            drop(unsafe { Box::from_raw(address.cast::<sockaddr_storage>()) });
        }
    }
}
