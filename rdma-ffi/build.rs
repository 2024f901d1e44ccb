//! Gives the shared library its soname, which programs linked with it look for.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvkrdma.so.0");
}
