//! A machine's RDMA devices with their addresses and near processors, from sysfs.

use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// A device of the machine.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Near {
    device: String,
    /// The addresses of its first port, without link-local ones.
    addresses: Vec<IpAddr>,
    /// The near NUMA node and its processors; `None` if all memory is equally near.
    node: Option<(u32, String)>,
}

impl Near {
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address.to_canonical())
    }
}

impl fmt::Display for Near {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.addresses.iter().map(IpAddr::to_string).collect();
        let at = if addresses.is_empty() { "no address".into() } else { addresses.join(" and ") };
        write!(f, "{} at {at}", self.device)?;
        match &self.node {
            Some((node, processors)) => write!(f, " near processors {processors} (NUMA node {node})"),
            None => f.write_str(" near all processors alike"),
        }
    }
}

/// Returns the devices in the kernel's `folder`. `nodes` is the folder of its NUMA nodes.
pub(super) fn near(folder: &Path, nodes: &Path) -> Vec<Near> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<_> = entries
        .map(|entry| {
            let (path, device) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            Near { device, addresses: addresses(&path), node: node(&path, nodes) }
        })
        .collect();
    found.sort_by(|one, other| one.device.cmp(&other.device));
    found
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Returns the addresses of the first port, each once: each version of RoCE has an entry.
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

fn node(device: &Path, nodes: &Path) -> Option<(u32, String)> {
    // -1 if the firmware does not say.
    let node: u32 = read(&device.join("device/numa_node"))?.parse().ok()?;
    let processors = read(&nodes.join(format!("node{node}/cpulist")))?;
    Some((node, processors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_near_their_addresses_and_processors() {
        let folder = std::env::temp_dir().join(format!("conformance-nearness-{}", std::process::id()));
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
        let found = near(&folder.join("devices"), &folder.join("nodes"));
        let told: Vec<_> = found.iter().map(Near::to_string).collect();
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
}
