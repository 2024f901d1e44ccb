//! Links two binaries as shared objects, with the names and symbol versions of rdma-core's
//! libraries: `librdmacm-softrdma`, and `libibverbs-softrdma`, above which a real librdmacm runs.
//!
//! A `cdylib` cannot have them: rustc passes the linker a version script of its own for it, and
//! linkers take no second one. A binary has no such script, and one argument makes it a shared
//! object.

use std::path::Path;

/// Ends each line of the map that only `libibverbs-softrdma` has.
const OF_THE_FILE: &str = "/* the file */";

fn main() {
    let variable = |name| std::env::var(name).expect("Cargo sets it");
    let map = Path::new(&variable("CARGO_MANIFEST_DIR")).join("versions.map");
    println!("cargo:rerun-if-changed={}", map.display());
    let text = std::fs::read_to_string(&map).expect("versions.map is part of the package");
    let whole: Vec<_> = text.lines().filter(|line| !line.ends_with(OF_THE_FILE)).collect();
    link("librdmacm-softrdma", "librdmacm.so.1", &variable("OUT_DIR"), &whole);
    let mut within = false;
    let verbs: Vec<_> = text
        .lines()
        .map(|line| line.trim_end_matches(OF_THE_FILE))
        .filter(|line| {
            let before = within;
            within = line.starts_with("RDMACM_") || within && !line.starts_with('}');
            !before && !within
        })
        .collect();
    link("libibverbs-softrdma", "libibverbs-softrdma.so", &variable("OUT_DIR"), &verbs);
}

fn link(library: &str, name: &str, directory: &str, map: &[&str]) {
    let argument = |argument: &str| println!("cargo:rustc-link-arg-bin={library}={argument}");
    let script = Path::new(directory).join(format!("{library}.map"));
    std::fs::write(&script, map.join("\n")).expect("the script of versions");
    argument("-shared");
    argument(&format!("-Wl,-soname,{name}"));
    argument(&format!("-Wl,--version-script={}", script.display()));
    // The binary's code refers to none of the functions, so each is named to link it from its
    // library.
    for line in map {
        let name = line.trim().strip_suffix(';').unwrap_or_default();
        if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            argument(&format!("-Wl,-u,{name}"));
        }
    }
}
