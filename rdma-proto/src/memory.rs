//! Memory that somebody else may change at any time.
//!
//! While a peer holds the rkey of a region it can write there, whatever the protocol says; a device reads our send
//! buffers behind the processor's back. In Rust's memory model the only safe window on such memory is one of atomics, so
//! this module reads and writes it as relaxed 64-bit words: a torn or changing value is just a value. The price is one
//! word at a time, where a plain copy may use wider registers; the `memory` bench shows both. There is no `&[u8]` into a
//! region anywhere in this workspace (VR-SEC-005).
//!
//! The ordering that makes bytes visible is the completion's (`ibv_poll_cq(3)` returns after the data has landed), never
//! this module's.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// Words that are copied in one step of a loop, which halves the instructions: 64 bytes, as the lines of caches.
const LINE: usize = 8;

/// Bytes shared with a device or a peer, viewed as words in native byte order.
#[derive(Clone, Copy)]
pub struct SharedMemory<'a> {
    words: &'a [AtomicU64],
    len: usize,
}

impl<'a> SharedMemory<'a> {
    /// Returns the first `len` bytes of `words`; fewer if `words` is shorter.
    pub fn new(words: &'a [AtomicU64], len: usize) -> Self {
        Self { words, len: len.min(words.len().saturating_mul(WORD)) }
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if they are not all inside.
    #[must_use]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some((words, skip)) = self.locate(offset, into.len()) else { return false };
        let (head, rest) = into.split_at_mut(into.len().min(skip.wrapping_neg() % WORD));
        let (whole, tail) = rest.as_chunks_mut::<WORD>();
        let words = if head.is_empty() { words } else { read_part(words, skip, head) };
        let (lines, others) = whole.as_chunks_mut::<LINE>();
        for ([a, b, c, d, e, f, g, h], bytes) in words.as_chunks().0.iter().zip(lines.iter_mut()) {
            *bytes = [a, b, c, d, e, f, g, h].map(|word| word.load(Relaxed).to_ne_bytes());
        }
        for (word, bytes) in words.iter().skip(lines.len().saturating_mul(LINE)).zip(others) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
        read_part(words.get(whole.len()..).unwrap_or_default(), 0, tail);
        true
    }

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not all fit.
    #[must_use]
    pub fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some((words, skip)) = self.locate(offset, from.len()) else { return false };
        let (head, rest) = from.split_at(from.len().min(skip.wrapping_neg() % WORD));
        let (whole, tail) = rest.as_chunks::<WORD>();
        let words = if head.is_empty() { words } else { write_part(words, skip, head) };
        let (lines, others) = whole.as_chunks::<LINE>();
        for ([a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, p]) in words.as_chunks().0.iter().zip(lines) {
            for (word, bytes) in [(a, i), (b, j), (c, k), (d, l), (e, m), (f, n), (g, o), (h, p)] {
                word.store(u64::from_ne_bytes(*bytes), Relaxed);
            }
        }
        for (word, bytes) in words.iter().skip(lines.len().saturating_mul(LINE)).zip(others) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        write_part(words.get(whole.len()..).unwrap_or_default(), 0, tail);
        true
    }

    /// Returns the words from the one that holds byte `offset` on, and that byte's place in it, if `len` bytes from `offset` on
    /// are inside.
    fn locate(&self, offset: usize, len: usize) -> Option<(&'a [AtomicU64], usize)> {
        let inside = offset.checked_add(len)? <= self.len;
        inside.then(|| (self.words.get(offset / WORD..).unwrap_or_default(), offset % WORD))
    }
}

/// Reads a part of the first word; the rest is returned.
fn read_part<'a>(words: &'a [AtomicU64], skip: usize, into: &mut [u8]) -> &'a [AtomicU64] {
    let Some((word, rest)) = words.split_first() else { return words };
    for (to, from) in into.iter_mut().zip(word.load(Relaxed).to_ne_bytes().iter().skip(skip)) {
        *to = *from;
    }
    rest
}

/// Replaces a part of the first word and leaves its other bytes to whoever else writes them; the rest is returned.
fn write_part<'a>(words: &'a [AtomicU64], skip: usize, part: &[u8]) -> &'a [AtomicU64] {
    let Some((word, rest)) = words.split_first() else { return words };
    let replace = |old: u64| {
        let mut bytes = old.to_ne_bytes();
        for (to, from) in bytes.iter_mut().skip(skip).zip(part) {
            *to = *from;
        }
        Some(u64::from_ne_bytes(bytes))
    };
    if !part.is_empty() {
        let _previous = word.fetch_update(Relaxed, Relaxed, replace);
    }
    rest
}

impl core::fmt::Debug for SharedMemory<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}
