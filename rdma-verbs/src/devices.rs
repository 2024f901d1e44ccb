//! The RDMA devices of this machine and their addresses, for a diagnosis, by the crate `ibverbs`.

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};
use std::ffi::CStr;
use std::io;

/// A device.
#[derive(Debug)]
#[non_exhaustive]
pub struct Device {
    /// Its name, as in `rdma link`.
    pub name: String,
    /// The identifiers of its first port, or why they are unknown (port down, no permission).
    pub gids: io::Result<Vec<Gid>>,
}

/// An entry of a port's table of global identifiers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gid {
    /// The port.
    pub port: u32,
    /// Its place in the table.
    pub index: u32,
    /// The kind of packets that it is for.
    pub kind: GidKind,
    /// The identifier itself; on RoCE an address of the interface, IPv4 ones mapped into IPv6.
    pub raw: Ipv6Addr,
    /// The network interface, on RoCE.
    pub interface: Option<String>,
}

impl Gid {
    /// Returns the identifier as an address; on RoCE it is one.
    pub fn ip_addr(&self) -> IpAddr {
        self.raw.to_canonical()
    }
}

/// The kind of packets that a global identifier is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE on Ethernet frames, which are not routed.
    RoceV1,
    /// RoCE on UDP: what the connection manager prefers.
    RoceV2,
    /// A kind added later, by its number in `ibv_gid_type`.
    Other(u32),
}

impl GidKind {
    const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::InfiniBand,
            1 => Self::RoceV1,
            2 => Self::RoceV2,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InfiniBand => f.write_str("InfiniBand"),
            Self::RoceV1 => f.write_str("RoCE v1"),
            Self::RoceV2 => f.write_str("RoCE v2"),
            Self::Other(number) => write!(f, "kind {number}"),
        }
    }
}

/// Returns the devices, in the system's order; none on a machine without RDMA.
///
/// # Errors
/// The list cannot be read.
pub fn devices() -> io::Result<Vec<Device>> {
    let list = match ibverbs::devices() {
        Ok(list) => list,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ENODEV | libc::ENOENT)) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    Ok(list.iter().map(|device| Device { name: name(&device), gids: gids(&device) }).collect())
}

fn name(device: &ibverbs::Device<'_>) -> String {
    device.name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn gids(device: &ibverbs::Device<'_>) -> io::Result<Vec<Gid>> {
    let context = device.open()?;
    let entries = context.gid_table().iter().map(|entry| {
        let [subnet, interface] = [entry.gid.subnet_prefix(), entry.gid.interface_id()].map(u128::from);
        Gid {
            port: entry.port_num,
            index: entry.gid_index,
            kind: GidKind::from_number(entry.gid_type),
            raw: Ipv6Addr::from_bits(subnet << 64 | interface),
            interface: interface_name(entry.ndev_ifindex),
        }
    });
    Ok(entries.collect())
}

fn interface_name(index: u32) -> Option<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: if_indextoname(3) writes at most IF_NAMESIZE bytes, or returns null.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null() {
        return None;
    }
    // SAFETY: it returned the buffer, which holds a terminated string.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Some(name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listing_works_with_and_without_devices() {
        let devices = devices().unwrap();
        println!("{devices:#?}");
        for device in devices {
            assert!(!device.name.is_empty());
        }
    }

    #[test]
    fn the_loopback_interface_has_its_name() {
        assert_eq!(interface_name(1).as_deref(), Some("lo"));
        assert_eq!(interface_name(0), None);
    }
}
