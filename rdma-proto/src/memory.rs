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
const WORDS: usize = 8;
const LINE: usize = WORDS * WORD;

/// Bytes shared with a device or a peer, viewed as words in native byte order.
#[derive(Clone, Copy)]
pub struct SharedMemory<'a> {
    words: &'a [AtomicU64],
    len: usize,
}

impl<'a> SharedMemory<'a> {
    /// Returns the first `len` bytes of `words`; fewer if `words` is shorter.
    #[inline]
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
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some(words) = self.locate(offset, into.len()) else { return false };
        let skip = offset % WORD;
        if skip == 0 {
            read_words(words, into);
        } else {
            let (head, rest) = into.split_at_mut(into.len().min(WORD.wrapping_sub(skip)));
            read_words(read_part(words, skip, head), rest);
        }
        true
    }

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not all fit.
    #[must_use]
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> bool {
        let Some(words) = self.locate(offset, from.len()) else { return false };
        let skip = offset % WORD;
        if skip == 0 {
            write_words(words, from);
        } else {
            let (head, rest) = from.split_at(from.len().min(WORD.wrapping_sub(skip)));
            write_words(write_part(words, skip, head), rest);
        }
        true
    }

    /// Returns the words from the one that holds byte `offset` on, if `len` bytes from `offset` on are inside.
    #[inline]
    fn locate(&self, offset: usize, len: usize) -> Option<&'a [AtomicU64]> {
        let inside = len <= self.len && offset <= self.len.wrapping_sub(len);
        if inside { self.words.get(offset / WORD..) } else { None }
    }
}

/// Reads from the first byte of the first word on.
#[inline]
fn read_words(words: &[AtomicU64], into: &mut [u8]) {
    let (lines, rest) = into.as_chunks_mut::<LINE>();
    let copied = lines.len().wrapping_mul(WORDS);
    for (words, bytes) in words.as_chunks::<WORDS>().0.iter().zip(lines) {
        for (word, bytes) in words.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
    }
    if !rest.is_empty() {
        read_rest(words.get(copied..).unwrap_or_default(), rest);
    }
}

fn read_rest(words: &[AtomicU64], into: &mut [u8]) {
    let (whole, tail) = into.as_chunks_mut::<WORD>();
    let last = words.get(whole.len()..).unwrap_or_default();
    for (word, bytes) in words.iter().zip(whole) {
        *bytes = word.load(Relaxed).to_ne_bytes();
    }
    read_part(last, 0, tail);
}

/// Writes from the first byte of the first word on.
#[inline]
fn write_words(words: &[AtomicU64], from: &[u8]) {
    let (lines, rest) = from.as_chunks::<LINE>();
    for (words, bytes) in words.as_chunks::<WORDS>().0.iter().zip(lines) {
        for (word, bytes) in words.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }
    if !rest.is_empty() {
        write_rest(words.get(lines.len().wrapping_mul(WORDS)..).unwrap_or_default(), rest);
    }
}

fn write_rest(words: &[AtomicU64], from: &[u8]) {
    let (whole, tail) = from.as_chunks::<WORD>();
    for (word, bytes) in words.iter().zip(whole) {
        word.store(u64::from_ne_bytes(*bytes), Relaxed);
    }
    write_part(words.get(whole.len()..).unwrap_or_default(), 0, tail);
}

/// Reads a part of the first word; the rest is returned.
#[inline(never)]
fn read_part<'a>(words: &'a [AtomicU64], skip: usize, into: &mut [u8]) -> &'a [AtomicU64] {
    let Some((word, rest)) = words.split_first() else { return words };
    for (to, from) in into.iter_mut().zip(word.load(Relaxed).to_ne_bytes().iter().skip(skip)) {
        *to = *from;
    }
    rest
}

/// Replaces a part of the first word and leaves its other bytes to whoever else writes them; the rest is returned.
#[inline(never)]
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
