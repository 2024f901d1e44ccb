//! The fuzz targets as tests, on their committed seeds. The test `all` has generated inputs.

mod bodies;
mod pair;

use std::path::Path;

fn on_seeds(target: &str, body: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no seeds", folder.display());
    for file in files {
        println!("{}", file.display());
        body(&std::fs::read(&file).expect("a readable seed"));
    }
}

#[test]
fn control_messages() {
    on_seeds("control_messages", bodies::control_messages::run);
}

#[test]
fn connection() {
    on_seeds("connection", bodies::connection::run);
}

#[test]
fn pair() {
    on_seeds("pair", bodies::pair::run);
}
