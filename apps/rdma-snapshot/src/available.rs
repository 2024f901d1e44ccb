//! The memory that this machine has left.

/// Returns the most bytes that a publisher takes by default. Registered memory cannot be swapped
/// out, so a part is left to other programs. `None` if the system does not say.
pub(crate) fn most_by_default() -> Option<u64> {
    available(&std::fs::read_to_string("/proc/meminfo").ok()?).map(|bytes| bytes / 4 * 3)
}

/// Returns the bytes that programs can take without swapping, of the system's account.
fn available(account: &str) -> Option<u64> {
    let value = account.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
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
        assert!(most_by_default().is_some_and(|bytes| bytes > 0), "Linux says so");
    }
}
