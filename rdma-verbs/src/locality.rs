//! The RDMA devices of this machine with their addresses and near processors, as sysfs lists them.
//!
//! librdmacm chooses a device by address: `rdma_resolve_addr(3)` takes the one with the route, a
//! listener the one with its address. Software devices (rxe, softrdma) have no NUMA node.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// An RDMA device of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name, as in `rdma link`.
    pub name: String,
    /// The addresses of its first port, without link-local ones.
    pub addresses: Vec<IpAddr>,
    /// The NUMA node that it is attached to; `None` if the kernel does not say.
    pub node: Option<Node>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its processors, in the kernel's notation: `0-3,8`.
    pub processors: String,
}

impl Device {
    /// Returns whether the device has this address.
    #[must_use]
    pub fn has(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address.to_canonical())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.addresses.iter().map(IpAddr::to_string).collect();
        let at = if addresses.is_empty() { "no address".into() } else { addresses.join(" and ") };
        write!(f, "{} at {at}", self.name)?;
        match &self.node {
            Some(node) => write!(f, " near processors {} (NUMA node {})", node.processors, node.number),
            None => f.write_str(" near all processors alike"),
        }
    }
}

/// Returns the devices of this machine, by name. The list is empty if the kernel has none.
#[must_use]
pub fn devices() -> Vec<Device> {
    below(Path::new("/sys/class/infiniband"), Path::new("/sys/devices/system/node"))
}

/// Returns the node near all of these addresses. `None` if one belongs to no device of the list, if
/// a device has no node, or if nodes differ.
#[must_use]
pub fn common_node<'a>(devices: &'a [Device], addresses: &[IpAddr]) -> Option<&'a Node> {
    let node = |address: &IpAddr| devices.iter().find(|device| device.has(*address))?.node.as_ref();
    let (first, others) = addresses.split_first()?;
    let near = node(first)?;
    others.iter().all(|address| node(address) == Some(near)).then_some(near)
}

fn below(folder: &Path, nodes: &Path) -> Vec<Device> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<_> = entries
        .map(|entry| {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            Device { name, addresses: addresses(&path), node: node(&path, nodes) }
        })
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns the first port's addresses, each once: a device has an entry per version of RoCE.
fn addresses(device: &Path) -> Vec<IpAddr> {
    let entries = fs::read_dir(device.join("ports/1/gids")).into_iter().flatten().filter_map(Result::ok);
    let gids = entries.filter_map(|entry| read(&entry.path())?.parse::<Ipv6Addr>().ok());
    let mut addresses: Vec<_> = gids
        .filter(|gid| !gid.is_unspecified() && !gid.is_unicast_link_local())
        .map(|gid| IpAddr::V6(gid).to_canonical())
        .collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

fn node(device: &Path, nodes: &Path) -> Option<Node> {
    // -1 if the firmware does not say.
    let number: u32 = read(&device.join("device/numa_node"))?.parse().ok()?;
    let processors = read(&nodes.join(format!("node{number}/cpulist")))?;
    Some(Node { number, processors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_near_their_addresses_and_processors() {
        let folder = std::env::temp_dir().join(format!("rdma-verbs-locality-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let file = folder.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let gids = [
            "fe80:0000:0000:0000:0000:00ff:fe00:0001",
            "0000:0000:0000:0000:0000:ffff:c000:0201",
            "0000:0000:0000:0000:0000:ffff:c000:0201",
            "0000:0000:0000:0000:0000:0000:0000:0000",
        ];
        for (index, gid) in gids.iter().enumerate() {
            write(&format!("devices/mlx5_0/ports/1/gids/{index}"), &format!("{gid}\n"));
        }
        write("devices/mlx5_0/device/numa_node", "1\n");
        write("devices/mlx5_1/device/numa_node", "-1\n");
        write("devices/rxe0/ports/1/gids/0", "2001:0db8:0000:0000:0000:0000:0000:0002\n");
        write("nodes/node1/cpulist", "16-31,48-63\n");
        let found = below(&folder.join("devices"), &folder.join("nodes"));
        let told: Vec<_> = found.iter().map(Device::to_string).collect();
        assert_eq!(
            told,
            [
                "mlx5_0 at 192.0.2.1 near processors 16-31,48-63 (NUMA node 1)",
                "mlx5_1 at no address near all processors alike",
                "rxe0 at 2001:db8::2 near all processors alike",
            ]
        );
        for address in ["192.0.2.1", "::ffff:192.0.2.1"] {
            let address = address.parse().unwrap();
            let has: Vec<_> = found.iter().map(|device| device.has(address)).collect();
            assert_eq!(has, [true, false, false]);
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn addresses_have_a_common_node_only_if_all_their_devices_are_near_it() {
        let device = |name: &str, address: &str, node: Option<u32>| Device {
            name: name.into(),
            addresses: vec![address.parse().unwrap()],
            node: node.map(|number| Node { number, processors: format!("{number}-{number}") }),
        };
        let devices = [
            device("mlx5_0", "192.0.2.1", Some(1)),
            device("mlx5_1", "192.0.2.2", Some(1)),
            device("mlx5_2", "192.0.2.3", Some(0)),
            device("rxe0", "192.0.2.4", None),
        ];
        let common = |last: &[u8]| {
            let addresses: Vec<_> = last.iter().map(|last| IpAddr::from([192, 0, 2, *last])).collect();
            common_node(&devices, &addresses).map(|node| node.number)
        };
        assert_eq!([common(&[1]), common(&[3]), common(&[2, 1])], [Some(1), Some(0), Some(1)]);
        for without in [&[][..], &[1, 3], &[4], &[1, 4], &[9], &[1, 9]] {
            assert_eq!(common(without), None, "{without:?}");
        }
    }
}
