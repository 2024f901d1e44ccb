//! Socket addresses of IPv4 and IPv6, between Rust and C (VR-CONN-010).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// An address as C functions take it.
pub(crate) union CAddress {
    v4: sockaddr_in,
    v6: sockaddr_in6,
    storage: sockaddr_storage,
}

impl CAddress {
    pub(crate) fn new(address: SocketAddr) -> Self {
        // SAFETY: sockaddr_storage is integers, valid as zeros, and the union's largest member.
        let mut this = Self { storage: unsafe { core::mem::zeroed() } };
        match address {
            SocketAddr::V4(address) => {
                this.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                    sin_zero: [0; 8],
                };
            }
            SocketAddr::V6(address) => {
                this.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: address.flowinfo().to_be(),
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
            }
        }
        this
    }

    /// For a C parameter: librdmacm declares it without `const`, but only reads it.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut sockaddr {
        (&raw mut *self).cast()
    }
}

/// Returns an address in Rust; `None` if it is neither IPv4 nor IPv6 (not set yet).
pub(crate) fn from_c(storage: &sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: sockaddr_storage fits any address, and holds one of this family.
            let address = unsafe { &*(&raw const *storage).cast::<sockaddr_in>() };
            let ip = Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(address.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for sockaddr_in6.
            let address = unsafe { &*(&raw const *storage).cast::<sockaddr_in6>() };
            let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
            let (port, flow) = (u16::from_be(address.sin6_port), u32::from_be(address.sin6_flowinfo));
            Some(SocketAddrV6::new(ip, port, flow, address.sin6_scope_id).into())
        }
        _ => None,
    }
}

pub(crate) const fn same_family(one: SocketAddr, other: SocketAddr) -> bool {
    matches!((one.ip(), other.ip()), (IpAddr::V4(_), IpAddr::V4(_)) | (IpAddr::V6(_), IpAddr::V6(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(address: SocketAddr) -> Option<SocketAddr> {
        let c = CAddress::new(address);
        // SAFETY: every byte of the union was initialised through its largest member.
        from_c(unsafe { &c.storage })
    }

    #[test]
    fn addresses_survive_the_round_trip() {
        for text in ["127.0.0.1:6379", "0.0.0.0:0", "255.1.2.3:65535", "[::]:0", "[2001:db8::1:2]:6379"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(round_trip(address), Some(address));
        }
        let scoped =
            SocketAddr::V6(SocketAddrV6::new("fe80::1:2:3:4".parse().unwrap(), 6379, 0x000a_bcde, 42));
        assert_eq!(round_trip(scoped), Some(scoped));
    }

    #[test]
    fn bytes_are_in_network_order() {
        let c = CAddress::new("1.2.3.4:258".parse().unwrap());
        // SAFETY: this member was written.
        let v4 = unsafe { c.v4 };
        assert_eq!(v4.sin_port.to_ne_bytes(), [1, 2]);
        assert_eq!(v4.sin_addr.s_addr.to_ne_bytes(), [1, 2, 3, 4]);
    }

    #[test]
    fn no_family_is_no_address() {
        // SAFETY: integers, for which zero is valid.
        let mut storage: sockaddr_storage = unsafe { core::mem::zeroed() };
        assert_eq!(from_c(&storage), None);
        storage.ss_family = libc::AF_UNIX as libc::sa_family_t;
        assert_eq!(from_c(&storage), None);
    }

    #[test]
    fn families_are_told_apart() {
        let (v4, v6) = ("1.2.3.4:5".parse().unwrap(), "[::1]:5".parse().unwrap());
        assert!(same_family(v4, v4) && same_family(v6, v6) && !same_family(v4, v6) && !same_family(v6, v4));
    }
}
