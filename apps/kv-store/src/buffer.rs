//! Bytes of one client, whose memory is freed when they are.

use bytes::BytesMut;

/// The most memory that a client keeps without bytes.
const KEPT: usize = 16 << 10;

#[derive(Debug, Default)]
pub(crate) struct Buffer {
    pub(crate) bytes: BytesMut,
    /// The most memory seen: `BytesMut` lowers its capacity by what was taken from the front.
    memory: usize,
}

impl Buffer {
    /// Records how much memory the bytes use. Call it before anything is taken from the front.
    pub(crate) fn grown(&mut self) {
        self.memory = self.memory.max(self.bytes.capacity());
    }

    /// Frees memory that its bytes do not need. Call it after bytes were taken from the front.
    pub(crate) fn settle(&mut self) {
        self.grown();
        if self.memory > KEPT && self.bytes.len() < self.memory / 4 {
            self.bytes = BytesMut::from(self.bytes.as_ref());
            self.memory = self.bytes.capacity();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf;

    use super::*;

    #[test]
    fn memory_follows_the_bytes_that_are_left() {
        let mut buffer = Buffer::default();
        for take in [1, 1000, 1 << 20, 5 << 20] {
            buffer.bytes.extend_from_slice(&vec![b'x'; 16 << 20]);
            buffer.grown();
            while !buffer.bytes.is_empty() {
                let left = buffer.bytes.len();
                buffer.bytes.advance(left.div_ceil(2).max(take).min(left));
                buffer.settle();
                let most = KEPT.max(4 * buffer.bytes.len());
                // No more than that is free behind it.
                assert!(!buffer.bytes.try_reclaim(most + 1), "{buffer:?}");
            }
        }
    }
}
