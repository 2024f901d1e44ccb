//! Links the binary `librdmacm-softrdma` as a shared object, with the names and symbol versions of
//! rdma-core's libraries.
//!
//! A `cdylib` cannot have them: rustc passes the linker a version script of its own for it, and
//! linkers take no second one. A binary has no such script, and one argument makes it a shared
//! object.

use std::path::Path;

const LIBRARY: &str = "librdmacm-softrdma";

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("Cargo says where the package is");
    let map = Path::new(&here).join("versions.map");
    println!("cargo:rerun-if-changed={}", map.display());
    let text = std::fs::read_to_string(&map).expect("versions.map is part of the package");
    let argument = |argument: &str| println!("cargo:rustc-link-arg-bin={LIBRARY}={argument}");
    argument("-shared");
    argument("-Wl,-soname,librdmacm.so.1");
    argument(&format!("-Wl,--version-script={}", map.display()));
    // The binary's code refers to none of the functions, so each is named to link it from its
    // library.
    for line in text.lines() {
        let name = line.trim().strip_suffix(';').unwrap_or_default();
        if !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            argument(&format!("-Wl,-u,{name}"));
        }
    }
}
