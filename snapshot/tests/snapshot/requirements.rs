//! `spec/snapshot.toml`: this crate matches every vector. A test of `snapshot-suite` checks that
//! each requirement is shown.

use std::path::Path;

use rdma_snapshot::digest::{self, Whole};
use rdma_snapshot::wire::Frame;

use crate::spec;

/// VS-WIRE-001, VS-WIRE-002: the frames of the vectors are decoded and encoded, or refused.
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

/// VS-READ-004: this crate computes the digests in the text's table.
#[test]
fn the_digests_of_the_text_hold() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/snapshot.md");
    let text = std::fs::read_to_string(path).expect("the text");
    let rows =
        text.split("| digest of the snapshot |").nth(1).expect("a table").split("\n\n").next().expect("rows");
    let mut held = 0;
    for row in rows.lines().skip(2) {
        let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(String::from).collect::<Vec<_>>();
        let cells: Vec<_> = row.split('|').skip(1).map(quoted).collect();
        let [chunks, digests, whole, ..] = cells.as_slice() else { panic!("{row}") };
        let made: Vec<_> = chunks.iter().map(|chunk| digest::of(&spec::bytes(chunk))).collect();
        assert_eq!(made.iter().map(hex).collect::<Vec<_>>(), *digests);
        let mut of_all = Whole::default();
        made.iter().for_each(|one| of_all.add(one));
        assert_eq!([hex(&of_all.digest())], whole.as_slice());
        held += 1;
    }
    assert_eq!(held, 2);
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
