//! The memory of this machine, as far as the control groups of this process let it take that.

use std::fs::read_to_string;
use std::path::Path;

/// Bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The physical memory, or the least limit of a control group if that is less.
    pub total: u64,
    /// The part of it that programs can take now without swapping.
    pub available: u64,
}

/// Returns the memory that this process may take. `None` if the system does not say.
#[must_use]
pub fn memory() -> Option<Memory> {
    let machine = of_machine(&read_to_string("/proc/meminfo").ok()?)?;
    let groups = read_to_string("/proc/self/cgroup").ok();
    let groups = groups.and_then(|groups| of_groups(&groups, Path::new("/sys/fs/cgroup")));
    Some(groups.map_or(machine, |groups| machine.least(groups)))
}

impl Memory {
    fn least(self, other: Self) -> Self {
        Self { total: self.total.min(other.total), available: self.available.min(other.available) }
    }
}

/// Returns the memory in the system's account.
fn of_machine(account: &str) -> Option<Memory> {
    let bytes = |name| {
        let value = account.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    Some(Memory { total: bytes("MemTotal:")?, available: bytes("MemAvailable:")? })
}

/// Returns the limits of control groups (version 2), and what they leave, the file cache that they
/// would drop included. `None` without a limit.
fn of_groups(groups: &str, root: &Path) -> Option<Memory> {
    let own = root.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let limit = |group: &Path| {
        // `max` is no limit.
        let most: u64 = read_to_string(group.join("memory.max")).ok()?.trim().parse().ok()?;
        let used: u64 = read_to_string(group.join("memory.current")).ok()?.trim().parse().ok()?;
        let account = read_to_string(group.join("memory.stat")).ok()?;
        let cache = account.lines().find_map(|line| line.strip_prefix("inactive_file "))?;
        let left = most.saturating_sub(used.saturating_sub(cache.trim().parse().ok()?));
        Some(Memory { total: most, available: left })
    };
    own.ancestors().take_while(|group| group.starts_with(root)).filter_map(limit).reduce(Memory::least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_machine_is_found() {
        let account = "MemTotal:       16384 kB\nMemFree:  100 kB\nMemAvailable:   12000 kB\n";
        assert_eq!(of_machine(account), Some(Memory { total: 16_384 << 10, available: 12_000 << 10 }));
        assert_eq!(of_machine("MemTotal: 16384 kB\n"), None);
        assert_eq!(of_machine("MemTotal: 16384 kB\nMemAvailable: 99999999999999999999 kB\n"), None);
        let here = memory().expect("Linux says so");
        assert!(here.available <= here.total, "{here:?}");
    }

    /// The group's own limit holds, and those of the groups around it.
    #[test]
    fn the_least_limit_of_all_groups_holds() {
        let root = std::env::temp_dir().join(format!("rdma-program-groups-{}", std::process::id()));
        let group = |path: &str, most: &str, used: u64| {
            let group = root.join(path);
            std::fs::create_dir_all(&group).expect("a folder");
            let write = |name, what: String| std::fs::write(group.join(name), what).expect("a file");
            write("memory.max", format!("{most}\n"));
            write("memory.current", format!("{used}\n"));
            write("memory.stat", "anon 5\ninactive_file 100\n".into());
        };
        let found = || of_groups("1:name=systemd:/x\n0::/outer/inner\n", &root);
        assert_eq!(found(), None, "there are no groups");
        group("outer/inner", "max", 300);
        assert_eq!(found(), None);
        group("outer", "1000", 300);
        assert_eq!(found(), Some(Memory { total: 1000, available: 800 }));
        group("outer/inner", "500", 300);
        assert_eq!(found(), Some(Memory { total: 500, available: 300 }));
        group("outer", "400", 350);
        assert_eq!(found(), Some(Memory { total: 400, available: 150 }));
        group("outer/inner", "100", 300);
        assert_eq!(found(), Some(Memory { total: 100, available: 0 }));
        assert_eq!(of_groups("4:memory:/outer\n", &root), None);
        std::fs::remove_dir_all(root).expect("removed");
    }
}
