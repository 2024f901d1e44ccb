//! `rdma_getaddrinfo(3)`, by the machine's own `getaddrinfo(3)`. Whether an address is one of the fabric's shows when it is
//! resolved.

use core::ffi::{c_char, c_int};
use core::ptr;

use libc::{addrinfo, sockaddr, sockaddr_storage};

use crate::address;
use crate::endpoint::PASSIVE;
use crate::layout::{AddressInfo, IBV_QPT_RC, RDMA_PS_TCP, zeroed};
use crate::link::set_errno;

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
    let mut found = ptr::null_mut();
    // SAFETY: getaddrinfo(3): strings or null as the caller has them, hints as above, a place for the answer.
    let result = unsafe { libc::getaddrinfo(node, service, &raw const wanted, &raw mut found) };
    if result != 0 {
        return result;
    }
    // SAFETY: getaddrinfo(3) has succeeded: at least one entry, whose address is of the family that it says.
    let (first, len) = unsafe { ((*found).ai_addr, (*found).ai_addrlen) };
    // SAFETY: as above.
    let known = unsafe { address::read(first) };
    // SAFETY: freed once.
    unsafe { libc::freeaddrinfo(found) };
    let Some(known) = known else {
        set_errno(libc::EAFNOSUPPORT);
        return libc::EAI_FAMILY;
    };
    let mut answer: AddressInfo = zeroed();
    (answer.flags, answer.qp_type, answer.port_space) = (flags, IBV_QPT_RC as c_int, RDMA_PS_TCP as c_int);
    answer.family = if known.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    if flags & PASSIVE != 0 {
        (answer.src_addr, answer.src_len) = (copy(known), len);
    } else {
        (answer.dst_addr, answer.dst_len) = (copy(known), len);
        if let Some(hints) = hints {
            // SAFETY: rdma_getaddrinfo(3): null, or the source that the caller wants.
            if let Some(source) = unsafe { address::read(hints.src_addr) } {
                (answer.src_addr, answer.src_len) = (copy(source), hints.src_len);
            }
        }
    }
    // SAFETY: rdma_getaddrinfo(3): a place for the answer.
    unsafe { into.write(Box::into_raw(Box::new(answer))) };
    0
}

fn copy(address: std::net::SocketAddr) -> *mut sockaddr {
    // SAFETY: zero is a valid value of a structure of integers.
    let storage: Box<sockaddr_storage> = Box::new(unsafe { core::mem::zeroed() });
    let storage = Box::into_raw(storage);
    // SAFETY: made above.
    unsafe { address::write(address, storage) };
    storage.cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_freeaddrinfo(info: *mut AddressInfo) {
    if info.is_null() {
        return;
    }
    // SAFETY: rdma_freeaddrinfo(3): what `rdma_getaddrinfo` gave, from a box.
    let info = unsafe { Box::from_raw(info) };
    for address in [info.src_addr, info.dst_addr] {
        if !address.is_null() {
            // SAFETY: from a box of a `sockaddr_storage`, made by `copy`.
            drop(unsafe { Box::from_raw(address.cast::<sockaddr_storage>()) });
        }
    }
}
