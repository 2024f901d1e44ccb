use rdma_backend::memory::SharedMemory;

/// Bytes that have arrived and are not consumed, in the window where the peer wrote them.
///
/// The peer can write to this side's window at any time, even over bytes that it has already
/// announced as arrived. So there is no `&[u8]` of them. If the peer breaks the protocol, two reads
/// may differ. Copy bytes before you check them, and use the copy (VR-SEC-005).
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    memory: SharedMemory<'a>,
    offset: usize,
    len: usize,
}

impl<'a> Arrived<'a> {
    pub(crate) fn new(memory: SharedMemory<'a>, offset: usize, len: usize) -> Self {
        // So that `offset + len` stays inside of the memory, and each read need not check it again.
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

    /// Returns the bytes as memory, so that you can pass them on without a copy. The peer may
    /// change them.
    pub fn memory(&self) -> SharedMemory<'a> {
        self.memory.slice(self.offset, self.len).unwrap_or(SharedMemory::new(&[]))
    }

    /// Copies `into.len()` bytes from `at`. If there are fewer, returns false and copies none.
    pub fn copy(&self, at: usize, into: &mut [u8]) -> bool {
        let within = at.checked_add(into.len()).is_some_and(|end| end <= self.len);
        within && self.memory.read(self.offset + at, into)
    }

    /// Returns the index of the first `byte` at or after `from`.
    pub fn find(&self, byte: u8, from: usize) -> Option<usize> {
        let mut chunk = [0; 64];
        let mut at = from;
        while at < self.len {
            // Searched in a copy: the peer may change the bytes meanwhile (VR-SEC-005).
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
