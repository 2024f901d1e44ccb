//! Writes what a kernel would show of a machine's devices: their files in `/dev/infiniband` and
//! `/sys/class/infiniband`.
//!
//! Programs look there for more than verbs reports, and some use no device that they do not see
//! there. `softrdma run` writes a folder for the machine, and the library that programs load looks
//! in it for these two places.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::fs::{DirBuilder, create_dir_all, remove_dir_all, rename, write};
use std::hash::{Hash as _, Hasher as _};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use softrdma_wire::{gid, guid};

use crate::runtime::{Error, Place, system};

/// A file or a link, by its path in the folder.
#[derive(Hash)]
enum Entry {
    File(String, String),
    Link(String, String),
}

impl Place {
    /// Returns the folder of a machine with these devices, and makes it if there is none. It stays,
    /// for all programs on such a machine, until the fabric ends.
    pub fn show(&self, devices: &[Vec<IpAddr>]) -> Result<PathBuf, Error> {
        let entries = entries(devices);
        // The folder is named by its contents, so it never has to change.
        let mut hasher = DefaultHasher::new();
        entries.hash(&mut hasher);
        let folder = self.directory().join(format!("view-{:016x}", hasher.finish()));
        let _lock = self.lock()?;
        if !folder.is_dir() {
            let new = folder.with_extension("new");
            let _old = remove_dir_all(&new);
            made(&new, &entries)
                .and_then(|()| rename(&new, &folder))
                .map_err(system(folder.display().to_string()))?;
        }
        Ok(folder)
    }
}

/// Removes the folders that [`Place::show`] has made in the directory of a fabric without programs.
/// The caller holds the fabric's lock.
pub(crate) fn remove_all(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"view-")) {
        // One that cannot be removed does no harm: its name says what is in it.
        let _gone = remove_dir_all(entry.path());
    }
}

fn made(folder: &Path, entries: &[Entry]) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(folder)?;
    for entry in entries {
        let (Entry::File(path, _) | Entry::Link(path, _)) = entry;
        let path = folder.join(path);
        create_dir_all(path.parent().unwrap_or(folder))?;
        match entry {
            Entry::File(_, text) => write(path, format!("{text}\n"))?,
            Entry::Link(_, target) => symlink(target, path)?,
        }
    }
    Ok(())
}

/// Lists the files and links that Linux has for software devices
/// (`Documentation/ABI/stable/sysfs-class-infiniband`).
fn entries(devices: &[Vec<IpAddr>]) -> Vec<Entry> {
    let mut entries = vec![
        // Programs ask whether it is a device that they may open, but use it only through verbs.
        Entry::Link("dev/infiniband/rdma_cm".into(), "/dev/null".into()),
        Entry::File("sys/class/infiniband_verbs/abi_version".into(), "6".into()),
    ];
    for (number, addresses) in devices.iter().enumerate() {
        let (device, verbs) = (format!("softrdma{number}"), format!("uverbs{number}"));
        let of_device = format!("sys/devices/virtual/infiniband/{device}");
        let of_verbs = format!("sys/devices/virtual/infiniband_verbs/{verbs}");
        let link = |class: &str, name: &str| {
            Entry::Link(format!("sys/class/{class}/{name}"), format!("../../devices/virtual/{class}/{name}"))
        };
        entries.push(Entry::Link(format!("dev/infiniband/{verbs}"), "/dev/null".into()));
        entries.push(link("infiniband", &device));
        entries.push(link("infiniband_verbs", &verbs));
        let mut file = |path: String, text: &str| entries.push(Entry::File(path, text.into()));
        file(format!("{of_verbs}/ibdev"), &device);
        file(format!("{of_verbs}/abi_version"), "1");
        let own = grouped(&guid(addresses));
        for (name, text) in [
            ("node_type", "1: CA"),
            ("node_guid", &own),
            ("sys_image_guid", &own),
            ("node_desc", "softrdma"),
            ("fw_ver", "1.0"),
        ] {
            file(format!("{of_device}/{name}"), text);
        }
        let port = format!("{of_device}/ports/1");
        for (name, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("link_layer", "Ethernet"),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            ("cap_mask", "0x00010000"),
            ("pkeys/0", "0xffff"),
        ] {
            file(format!("{port}/{name}"), text);
        }
        for (index, address) in addresses.iter().enumerate() {
            file(format!("{port}/gids/{index}"), &grouped(&gid(*address)));
            file(format!("{port}/gid_attrs/types/{index}"), "RoCE v2");
            // An interface that every machine has.
            file(format!("{port}/gid_attrs/ndevs/{index}"), "lo");
        }
    }
    entries
}

/// Formats bytes in groups of two, as the kernel prints them.
fn grouped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (place, byte) in bytes.iter().enumerate() {
        let between = if place > 0 && place % 2 == 0 { ":" } else { "" };
        // Writing to a string does not fail.
        let _written = write!(text, "{between}{byte:02x}");
    }
    text
}
