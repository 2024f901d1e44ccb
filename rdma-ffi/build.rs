//! Gives the shared library its name for the run-time linker: programs that are linked with it look
//! for that.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvkrdma.so.0");
}
