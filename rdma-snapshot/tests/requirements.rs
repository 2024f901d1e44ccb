//! `spec/snapshot.toml`: every requirement stands beside code and beside a test, and every vector is what this crate does.

use std::collections::BTreeMap;
use std::path::Path;

use rdma_snapshot::wire::Frame;

#[path = "support/spec.rs"]
mod spec;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every id in the sources below `folder`: how often code and how often tests name it.
fn mentions(folder: &Path, found: &mut BTreeMap<String, (u32, u32)>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            mentions(&path, found);
            continue;
        }
        let is_test = path.components().any(|part| part.as_os_str() == "tests");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for at in text.match_indices("VS-").map(|(at, _)| at) {
            let id: String = text[at..]
                .chars()
                .take_while(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '-')
                .collect();
            // This file has the letters without being about one.
            if id.len() > 6 {
                let (code, tests) = found.entry(id).or_default();
                *if is_test { tests } else { code } += 1;
            }
        }
    }
}

#[test]
fn every_requirement_stands_beside_code_and_a_test() {
    let mut found = BTreeMap::new();
    mentions(&root().join("src"), &mut found);
    mentions(&root().join("tests"), &mut found);
    let spec = spec::read();
    for requirement in &spec.requirement {
        assert!(["must", "should", "may"].contains(&requirement.level.as_str()), "{}", requirement.id);
        assert!(!requirement.text.is_empty());
        let (code, tests) = found.remove(&requirement.id).unwrap_or_default();
        assert!(code > 0, "no code names {}", requirement.id);
        assert!(tests > 0, "no test names {}", requirement.id);
    }
    assert!(found.is_empty(), "ids that do not exist: {found:?}");
}

/// VS-WIRE-001, VS-WIRE-002: the frames of the vectors are read and written, or refused.
#[test]
fn the_vectors_hold() {
    for vector in spec::read().vector {
        let bytes = vector.bytes();
        match (Frame::decode(&bytes), vector.error) {
            (Ok(Some((frame, taken))), None) => {
                assert_eq!(taken, bytes.len(), "{}", vector.name);
                let kind = vector.kind.expect("a kind");
                assert!(format!("{frame:?}").starts_with(&kind), "{}: {frame:?}", vector.name);
                let mut again = Vec::new();
                frame.encode(&mut again);
                assert_eq!(again != bytes, vector.unlike, "{}", vector.name);
                for short in 0..bytes.len() {
                    assert_eq!(Frame::decode(&bytes[..short]), Ok(None), "{}", vector.name);
                }
            }
            (Err(error), Some(expected)) => assert_eq!(error.to_string(), expected, "{}", vector.name),
            (other, _) => panic!("{}: {other:?}", vector.name),
        }
    }
}
