//! Digests of chunks by BLAKE3, and digests of snapshots from those of their chunks.
//!
//! The bytes are hashed once, while they are in the processor's cache. The chunks' digests suffice
//! for the digest of the whole.

use blake3::Hasher;

use crate::wire::Digest;

/// Separates a snapshot's digest from that of a chunk whose bytes are digests.
const OF_CHUNKS: &str = "valkey-rdma snapshot version 2: a snapshot by the digests of its chunks";

/// Returns the digest of a chunk.
#[must_use]
pub fn of(bytes: &[u8]) -> Digest {
    blake3::hash(bytes).into()
}

/// The digest of a chunk in pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Piecewise(Hasher);

impl Piecewise {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the digest so far, and begins another chunk.
    pub(crate) fn take(&mut self) -> Digest {
        let digest = self.0.finalize().into();
        self.0.reset();
        digest
    }
}

/// The digest of a snapshot, chunk by chunk (VS-READ-004).
#[derive(Clone, Debug)]
pub struct Whole(Hasher);

impl Default for Whole {
    fn default() -> Self {
        Self(Hasher::new_derive_key(OF_CHUNKS))
    }
}

impl Whole {
    /// Adds the next chunk, by its digest.
    pub fn add(&mut self, chunk: &Digest) {
        self.0.update(chunk);
    }

    /// Returns the digest of the snapshot of these chunks.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.0.finalize().into()
    }
}
