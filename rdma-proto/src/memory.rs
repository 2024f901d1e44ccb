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

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

const WORD: usize = size_of::<u64>();

/// Words that are copied in one step of a loop, which halves the instructions: 64 bytes, as the lines of caches.
const WORDS: usize = 8;
const LINE: usize = WORDS * WORD;

/// Memory of a program that exists, for [`Domain::register_memory`](crate::backend::Domain::register_memory): a buffer of the program's
/// own, a mapping, an object of another language's runtime.
///
/// A region keeps the value until the memory is deregistered, and drops it then; if it cannot be deregistered, it is never
/// dropped. Until then the device may read the bytes, and write them if the region's rights allow it, the peer by its key included:
/// at any time, also after an error, and until the end of every connection in the region's protection domain. So whoever
/// implements this gives the memory back to others when the value is dropped, not before.
pub trait CallerMemory: Send + Sync + 'static {
    /// Returns the bytes. Each call returns those of the first one, which stay where they are for as long as the value exists.
    fn shared(&self) -> SharedMemory<'_>;
}

/// Bytes shared with a device or a peer, viewed as words in native byte order.
///
/// Memory of a program ([`SharedMemory::with_edges`]) need not begin or end with a whole word: the bytes before the first and
/// behind the last are each their own.
#[derive(Clone, Copy)]
pub struct SharedMemory<'a> {
    words: &'a [AtomicU64],
    /// Bytes of the words.
    len: usize,
    before: &'a [AtomicU8],
    behind: &'a [AtomicU8],
}

impl<'a> SharedMemory<'a> {
    /// Returns the first `len` bytes of `words`; fewer if `words` is shorter.
    #[inline]
    pub fn new(words: &'a [AtomicU64], len: usize) -> Self {
        Self { words, len: len.min(words.len().saturating_mul(WORD)), before: &[], behind: &[] }
    }

    /// Returns all bytes of `before`, `words` and `behind`; `None` if these do not lie one directly behind the other.
    pub fn with_edges(
        before: &'a [AtomicU8],
        words: &'a [AtomicU64],
        behind: &'a [AtomicU8],
    ) -> Option<Self> {
        let parts = [before.as_ptr_range(), bytes_of(words), behind.as_ptr_range()];
        let mut parts = parts.iter().filter(|part| !part.is_empty());
        let mut end = parts.next().map(|part| part.end);
        for part in parts {
            end = end.filter(|end| *end == part.start).map(|_| part.end);
            end?;
        }
        Some(Self { words, len: words.len().saturating_mul(WORD), before, behind })
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.before.len().saturating_add(self.len).saturating_add(self.behind.len())
    }

    /// Returns whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte, for a device.
    pub fn address(&self) -> usize {
        if !self.before.is_empty() {
            self.before.as_ptr().expose_provenance()
        } else if !self.words.is_empty() {
            self.words.as_ptr().expose_provenance()
        } else {
            self.behind.as_ptr().expose_provenance()
        }
    }

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if they are not all inside.
    #[must_use]
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let at = offset.wrapping_sub(self.before.len());
        let Some(words) = self.locate(at, into.len()) else { return self.read_edges(offset, into) };
        let skip = at % WORD;
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
        let at = offset.wrapping_sub(self.before.len());
        let Some(words) = self.locate(at, from.len()) else { return self.write_edges(offset, from) };
        let skip = at % WORD;
        if skip == 0 {
            write_words(words, from);
        } else {
            let (head, rest) = from.split_at(from.len().min(WORD.wrapping_sub(skip)));
            write_words(write_part(words, skip, head), rest);
        }
        true
    }

    /// Returns the words from the one that holds byte `at` of them on, if `len` bytes from there on are in words.
    #[inline]
    fn locate(&self, at: usize, len: usize) -> Option<&'a [AtomicU64]> {
        let inside = len <= self.len && at <= self.len.wrapping_sub(len);
        if inside { self.words.get(at / WORD..) } else { None }
    }

    /// Reads bytes that are not all in words.
    #[cold]
    fn read_edges(&self, offset: usize, into: &mut [u8]) -> bool {
        let Some(Cut { before, in_words, behind, lens: [first, second] }) = self.cut(offset, into.len())
        else {
            return false;
        };
        let (head, rest) = into.split_at_mut(first);
        let (middle, tail) = rest.split_at_mut(second);
        for (to, from) in head.iter_mut().zip(before).chain(tail.iter_mut().zip(behind)) {
            *to = from.load(Relaxed);
        }
        middle.is_empty() || Self::new(self.words, self.len).read(in_words, middle)
    }

    /// Writes bytes that are not all in words.
    #[cold]
    fn write_edges(&self, offset: usize, from: &[u8]) -> bool {
        let Some(Cut { before, in_words, behind, lens: [first, second] }) = self.cut(offset, from.len())
        else {
            return false;
        };
        let (head, rest) = from.split_at(first);
        let (middle, tail) = rest.split_at(second);
        for (from, to) in head.iter().zip(before).chain(tail.iter().zip(behind)) {
            to.store(*from, Relaxed);
        }
        middle.is_empty() || Self::new(self.words, self.len).write(in_words, middle)
    }

    /// Returns where `len` bytes from `offset` on lie; `None` if they are not all inside.
    fn cut(&self, offset: usize, len: usize) -> Option<Cut<'a>> {
        offset.checked_add(len).filter(|end| *end <= self.len())?;
        let before = self.before.get(offset..).unwrap_or_default();
        let first = before.len().min(len);
        // Where the rest begins, counted from the first word.
        let at = offset.saturating_sub(self.before.len());
        let rest = len.saturating_sub(first);
        let second = self.len.saturating_sub(at).min(rest);
        let behind = self.behind.get(at.saturating_sub(self.len)..).unwrap_or_default();
        Some(Cut { before, in_words: at, behind, lens: [first, second] })
    }
}

/// Returns where the bytes of words lie.
fn bytes_of(words: &[AtomicU64]) -> core::ops::Range<*const AtomicU8> {
    let words = words.as_ptr_range();
    words.start.cast()..words.end.cast()
}

/// A part of memory, cut at the first and the last word: where each of the three pieces begins, and the lengths of the first two.
struct Cut<'a> {
    before: &'a [AtomicU8],
    in_words: usize,
    behind: &'a [AtomicU8],
    lens: [usize; 2],
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
