//! A client's bytes, with memory only while there are some.

use bytes::BytesMut;

/// Most memory that an empty buffer passes on, in bytes.
const SPARE: usize = 256 << 10;
/// Below this much memory, copying the bytes into less is not worthwhile.
const SMALL: usize = 4 << 10;

/// Bytes, and how much memory they take: none for an idle client.
///
/// A loop lends one buffer to its clients in turn ([`Buffer::borrow_from`]). A client keeps it only
/// while bytes must wait ([`Buffer::settle`]), so a request costs no allocation.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    pub(crate) bytes: BytesMut,
    /// The most memory seen: `BytesMut` lowers its capacity by what was taken from the front.
    memory: usize,
}

impl Buffer {
    pub(crate) fn memory(&self) -> usize {
        self.memory.max(self.bytes.capacity())
    }

    pub(crate) fn borrow_from(&mut self, spare: &mut Self) {
        if self.memory() == 0 {
            std::mem::swap(self, spare);
        }
    }

    /// Releases unneeded memory, to `spare` if possible. At most about four times the length of
    /// the bytes stays, and each is copied less than once.
    pub(crate) fn settle(&mut self, spare: &mut Self) {
        self.memory = self.memory();
        if self.bytes.is_empty() || self.memory > SMALL && self.bytes.len() < self.memory / 4 {
            // Copied: `BytesMut` frees its memory only as a whole.
            let bytes = BytesMut::from(self.bytes.as_ref());
            let memory = bytes.capacity();
            let mut left = std::mem::replace(self, Self { bytes, memory });
            // The larger one serves more clients; a very large one would stay for ever.
            if left.memory <= SPARE && left.memory > spare.memory {
                left.bytes.clear();
                *spare = left;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf;

    use super::*;

    #[test]
    fn memory_follows_the_bytes_that_are_left() {
        let (mut buffer, mut spare) = (Buffer::default(), Buffer::default());
        buffer.bytes.extend_from_slice(&vec![b'x'; 16 << 20]);
        buffer.settle(&mut spare);
        while buffer.bytes.len() > 1 {
            buffer.bytes.advance(buffer.bytes.len().div_ceil(3));
            buffer.settle(&mut spare);
            assert!(buffer.memory() <= SMALL.max(4 * buffer.bytes.len()), "{buffer:?}");
            // No memory beyond the reported amount.
            assert!(!buffer.bytes.try_reclaim(buffer.memory() + 1));
        }
        buffer.bytes.advance(1);
        buffer.settle(&mut spare);
        assert_eq!(buffer.memory(), 0);
        assert!(spare.memory() <= SPARE);
    }

    #[test]
    fn one_memory_serves_all_in_turn() {
        let (mut one, mut other, mut spare) = (Buffer::default(), Buffer::default(), Buffer::default());
        one.bytes.extend_from_slice(&[b'x'; 1000]);
        let lent = one.bytes.as_ptr();
        one.bytes.advance(1000);
        one.settle(&mut spare);
        other.borrow_from(&mut spare);
        other.bytes.extend_from_slice(&[b'y'; 1000]);
        assert_eq!(other.bytes.as_ptr(), lent);
        other.borrow_from(&mut one);
        assert_eq!(&other.bytes[..], &[b'y'; 1000]);
    }

    #[test]
    fn a_rest_lets_go_of_what_was_cut_off() {
        let (mut buffer, mut spare) = (Buffer::default(), Buffer::default());
        buffer.bytes.extend_from_slice(&vec![b'x'; 1 << 20]);
        buffer.settle(&mut spare);
        let cut = buffer.bytes.split_to((1 << 20) - 3).freeze();
        buffer.settle(&mut spare);
        assert!(cut.is_unique());
        assert_eq!((&buffer.bytes[..], buffer.memory()), (&b"xxx"[..], 3));
    }
}
