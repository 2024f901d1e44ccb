//! Received bytes where the device put them.

use rdma_backend::memory::SharedMemory;

/// Bytes that have arrived and were not consumed, in the window where the peer wrote them: a read without a copy.
///
/// The peer can write to its window whenever it likes, also to bytes that it has notified, so there is no `&[u8]` of them.
/// Every look at them is sound, but two looks may differ if the peer breaks the protocol: copy what you decide on, and decide on
/// the copy (VR-SEC-005).
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    memory: SharedMemory<'a>,
    offset: usize,
    len: usize,
}

impl<'a> Arrived<'a> {
    /// Returns the `len` bytes from `offset` on, as far as there are so many.
    pub(crate) fn new(memory: SharedMemory<'a>, offset: usize, len: usize) -> Self {
        let offset = offset.min(memory.len());
        Self { memory, offset, len: len.min(memory.len() - offset) }
    }

    /// Returns the number of bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes as memory that the peer may change, for who hands on where they lie.
    pub fn memory(&self) -> SharedMemory<'a> {
        self.memory.slice(self.offset, self.len).unwrap_or(SharedMemory::new(&[]))
    }

    /// Copies `into.len()` bytes from the byte at `at` on. False, and nothing copied, if there are not so many.
    pub fn copy(&self, at: usize, into: &mut [u8]) -> bool {
        let within = at.checked_add(into.len()).is_some_and(|end| end <= self.len);
        within && self.memory.read(self.offset + at, into)
    }

    /// Returns where the first `byte` lies, at or after `from`.
    pub fn find(&self, byte: u8, from: usize) -> Option<usize> {
        let mut chunk = [0; 64];
        let mut at = from;
        while at < self.len {
            let chunk = chunk.get_mut(..(self.len - at).min(64))?;
            if !self.copy(at, chunk) {
                return None;
            }
            if let Some(place) = chunk.iter().position(|there| *there == byte) {
                return Some(at + place);
            }
            at += chunk.len();
        }
        None
    }
}
