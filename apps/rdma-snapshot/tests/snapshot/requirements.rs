//! `spec/snapshot.toml`: every vector is what this crate does. `valkey-rdma-trust reqs coverage` looks at its requirements.

use rdma_snapshot::wire::Frame;

use crate::spec;

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
