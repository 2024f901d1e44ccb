//! Writes the C header of `rdma-ffi` to the standard output, made from its source.
//!
//! It looks at the source alone: nothing is built.

use std::path::Path;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [package] = arguments.as_slice() else {
        eprintln!("usage: ffi-header FOLDER-OF-RDMA-FFI");
        std::process::exit(2);
    };
    let package = Path::new(package);
    let config = cbindgen::Config::from_file(package.join("cbindgen.toml"));
    let made = config.and_then(|config| {
        let builder = cbindgen::Builder::new().with_config(config).with_src(package.join("src/lib.rs"));
        builder.generate().map_err(|error| error.to_string())
    });
    match made {
        Ok(bindings) => bindings.write(std::io::stdout()),
        Err(error) => {
            eprintln!("ffi-header: {error}");
            std::process::exit(1);
        }
    }
}
