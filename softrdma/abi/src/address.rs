//! Reads and writes socket addresses in C's form.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{AF_INET, AF_INET6, in_addr, in6_addr, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// Returns the address at `place`; `None` if it is null or of another family.
///
/// # Safety
/// `place` is null or points to a socket address of the family that it states.
pub(crate) unsafe fn read(place: *const sockaddr) -> Option<SocketAddr> {
    if place.is_null() {
        return None;
    }
    // SAFETY: not null, so the caller vouches for the family, which is the first field of every
    // address.
    match unsafe { i32::from((*place).sa_family) } {
        AF_INET => {
            // SAFETY: the caller vouches for an address of this family.
            let address = unsafe { place.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(address.sin_port)).into())
        }
        AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { place.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(address.sin6_port), 0, address.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Writes an address to `place`, and returns its length in bytes.
///
/// # Safety
/// `place` points to a `sockaddr_storage`.
pub(crate) unsafe fn write(address: SocketAddr, place: *mut sockaddr_storage) -> libc::socklen_t {
    match address {
        SocketAddr::V4(address) => {
            let value = sockaddr_in {
                sin_family: AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: in_addr { s_addr: address.ip().to_bits().to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the caller vouches for a place that has room for any address.
            unsafe { place.cast::<sockaddr_in>().write(value) };
            size_of::<sockaddr_in>() as libc::socklen_t
        }
        SocketAddr::V6(address) => {
            let value = sockaddr_in6 {
                sin6_family: AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<sockaddr_in6>().write(value) };
            size_of::<sockaddr_in6>() as libc::socklen_t
        }
    }
}
