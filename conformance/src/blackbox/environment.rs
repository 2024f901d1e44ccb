//! The machine of a run.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The kernel's folder of RDMA devices.
pub const DEVICES: &str = "/sys/class/infiniband";

/// Properties of a machine that can change a run's results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The kernel's version and the processor's architecture.
    pub kernel: String,
    /// Processors that this program may use.
    pub processors: usize,
    /// The load average of the last minute at the start of the run.
    pub load: f32,
    /// RDMA devices, each with its driver and the state of its ports.
    pub devices: Vec<String>,
    /// The loaded files of librdmacm and libibverbs. Their last number but one is the version of
    /// rdma-core. Empty on softsim.
    pub libraries: Vec<String>,
}

impl Environment {
    /// Examines this machine. Unknown properties are left empty.
    #[must_use]
    pub fn here() -> Self {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
        let load = read("/proc/loadavg").split_whitespace().next().and_then(|load| load.parse().ok());
        Self {
            kernel: format!("{} {}", read("/proc/sys/kernel/osrelease").trim(), std::env::consts::ARCH),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            load: load.unwrap_or_default(),
            devices: devices(Path::new(DEVICES)),
            libraries: libraries(&read("/proc/self/maps")),
        }
    }
}

/// Lists the devices in a folder of the kernel's, with drivers and the kernel's states of ports.
pub fn devices(folder: &Path) -> Vec<String> {
    let told = |device: &PathBuf| {
        let ports = entries(&device.join("ports"));
        let ports = ports.iter().map(|port| {
            let state = std::fs::read_to_string(port.join("state")).unwrap_or_default();
            format!("port {} {}", name(port), state.trim())
        });
        // A software device has no driver there.
        let driver = device.join("device/driver").read_link().ok();
        let driver = driver.as_deref().map_or_else(|| "software".into(), name);
        let told: Vec<String> = std::iter::once(driver).chain(ports).collect();
        format!("{} ({})", name(device), told.join(", "))
    };
    entries(folder).iter().map(told).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten();
    let mut found: Vec<_> = found.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.sort();
    found
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the RDMA libraries among a process's mappings, `proc_pid_maps(5)`.
fn libraries(maps: &str) -> Vec<String> {
    let files =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(|path| name(Path::new(path)));
    let mut files: Vec<_> =
        files.filter(|file| ["librdmacm.", "libibverbs."].iter().any(|one| file.starts_with(one))).collect();
    files.sort();
    files.dedup();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_says_what_it_is() {
        let here = Environment::here();
        assert!(here.kernel.ends_with(std::env::consts::ARCH) && here.processors > 0, "{here:?}");
        let json = serde_json::to_string(&here).unwrap();
        assert_eq!(serde_json::from_str::<Environment>(&json).unwrap(), here);
    }

    #[test]
    fn devices_are_named_with_their_ports() {
        let folder = std::env::temp_dir().join(format!("conformance-devices-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("rxe0/ports/1")).unwrap();
        std::fs::write(folder.join("rxe0/ports/1/state"), "4: ACTIVE\n").unwrap();
        std::fs::create_dir_all(folder.join("mlx5_0/device")).unwrap();
        std::os::unix::fs::symlink("../../drivers/mlx5_core", folder.join("mlx5_0/device/driver")).unwrap();
        assert_eq!(devices(&folder), ["mlx5_0 (mlx5_core)", "rxe0 (software, port 1 4: ACTIVE)"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn libraries_are_named_with_their_versions() {
        let maps = "7f00-7f01 r--p 00000000 08:01 42    /usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.44.0\n\
                    7f01-7f02 r-xp 00001000 08:01 42    /usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.44.0\n\
                    7f02-7f03 r--p 00000000 08:01 43    /usr/lib/x86_64-linux-gnu/libc.so.6\n\
                    7f03-7f04 rw-p 00000000 00:00 0\n\
                    7f04-7f05 r--p 00000000 08:01 44    /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n";
        assert_eq!(libraries(maps), ["libibverbs.so.1.14.44.0", "librdmacm.so.1.3.44.0"]);
    }
}
