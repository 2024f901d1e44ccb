//! The memory that this machine and the control groups of this process have left.

use std::fs::read_to_string;
use std::path::Path;

/// Returns the most bytes that a publisher takes by default. Registered memory cannot be swapped
/// out, so a part is left to other programs. `None` if the system does not say.
pub(crate) fn most_by_default() -> Option<u64> {
    let machine = available(&read_to_string("/proc/meminfo").ok()?)?;
    let groups = read_to_string("/proc/self/cgroup").ok();
    let groups = groups.and_then(|groups| left_to_groups(&groups, Path::new("/sys/fs/cgroup")));
    Some(groups.map_or(machine, |left| left.min(machine)) / 4 * 3)
}

/// Returns the bytes that programs can take without swapping, of the system's account.
fn available(account: &str) -> Option<u64> {
    let value = account.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the bytes that the limits of control groups (version 2) leave, the file cache that they
/// would drop included. `None` without a limit.
fn left_to_groups(groups: &str, root: &Path) -> Option<u64> {
    let own = root.join(groups.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let left = |group: &Path| {
        // `max` is no limit.
        let most: u64 = read_to_string(group.join("memory.max")).ok()?.trim().parse().ok()?;
        let used: u64 = read_to_string(group.join("memory.current")).ok()?.trim().parse().ok()?;
        let account = read_to_string(group.join("memory.stat")).ok()?;
        let cache = account.lines().find_map(|line| line.strip_prefix("inactive_file "))?;
        Some(most.saturating_sub(used.saturating_sub(cache.trim().parse().ok()?)))
    };
    own.ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_found() {
        let account = "MemTotal:       16384 kB\nMemFree:  100 kB\nMemAvailable:   12000 kB\n";
        assert_eq!(available(account), Some(12_000 << 10));
        assert_eq!(available("MemTotal: 16384 kB\n"), None);
        assert_eq!(available("MemAvailable: 99999999999999999999 kB\n"), None);
        assert!(most_by_default().is_some(), "Linux says so");
    }

    /// The group's own limit holds, and those of the groups around it.
    #[test]
    fn the_least_limit_of_all_groups_holds() {
        let root = std::env::temp_dir().join(format!("rdma-snapshot-groups-{}", std::process::id()));
        let group = |path: &str, most: &str, used: u64| {
            let group = root.join(path);
            std::fs::create_dir_all(&group).expect("a folder");
            let write = |name, what: String| std::fs::write(group.join(name), what).expect("a file");
            write("memory.max", format!("{most}\n"));
            write("memory.current", format!("{used}\n"));
            write("memory.stat", "anon 5\ninactive_file 100\n".into());
        };
        let left = || left_to_groups("1:name=systemd:/x\n0::/outer/inner\n", &root);
        assert_eq!(left(), None, "there are no groups");
        group("outer/inner", "max", 300);
        assert_eq!(left(), None);
        group("outer", "1000", 300);
        assert_eq!(left(), Some(800));
        group("outer/inner", "500", 300);
        assert_eq!(left(), Some(300));
        group("outer/inner", "100", 300);
        assert_eq!(left(), Some(0));
        assert_eq!(left_to_groups("4:memory:/outer\n", &root), None);
        std::fs::remove_dir_all(root).expect("removed");
    }
}
