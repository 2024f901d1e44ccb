//! Digests of chunks by BLAKE3, and that of a snapshot from those of its chunks.
//!
//! The bytes are hashed once, where they are in the processor's cache anyway. Who has the chunks' digests has the whole's.

use blake3::Hasher;

use crate::wire::Digest;

/// Sets a snapshot's digest apart from that of a chunk whose bytes are digests.
const OF_CHUNKS: &str = "valkey-rdma snapshot version 2: a snapshot by the digests of its chunks";

/// The digest of a chunk.
#[must_use]
pub fn of(bytes: &[u8]) -> Digest {
    blake3::hash(bytes).into()
}

/// The digest of a chunk whose bytes come in pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Piecewise(Hasher);

impl Piecewise {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest so far. What comes now is another chunk.
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

    /// The digest of the snapshot that has these chunks.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.0.finalize().into()
    }
}
