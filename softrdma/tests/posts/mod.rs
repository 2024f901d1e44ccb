//! The ring of posts from the program's side: reads and writes it (`softrdma_wire::Posts`) through
//! the memory's descriptor.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use softrdma_wire::{POSTS_AT, Post, WORDS};

/// Offsets of the words that both sides write, and of the ring's words.
pub(crate) const TAIL: u64 = 0;
pub(crate) const HEAD: u64 = 64;
pub(crate) const ASLEEP: u64 = 128;
pub(crate) const FIRST: u64 = 192;

/// Writes bytes at an offset of the ring.
pub(crate) fn write(memory: &OwnedFd, at: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(memory, bytes, POSTS_AT as u64 + at), Ok(bytes.len()));
}

/// Reads a number of the ring.
pub(crate) fn number(memory: &OwnedFd, at: u64) -> u32 {
    let mut bytes = [0; 4];
    assert_eq!(rustix::io::pread(memory, &mut bytes, POSTS_AT as u64 + at), Ok(4));
    u32::from_le_bytes(bytes)
}

/// The program's position.
#[derive(Default)]
pub(crate) struct Poster {
    pub(crate) tail: u32,
}

impl Poster {
    /// Puts a post into the ring. Returns whether the fabric sleeps, and so needs the doorbell.
    pub(crate) fn put(&mut self, memory: &OwnedFd, post: &Post<'_>) -> bool {
        self.put_bytes(memory, &postcard::to_stdvec(post).expect("encodes"))
    }

    /// Puts these bytes where a post should be.
    pub(crate) fn put_bytes(&mut self, memory: &OwnedFd, bytes: &[u8]) -> bool {
        let mut all = (bytes.len() as u64).to_le_bytes().to_vec();
        all.extend(bytes);
        for word in all.chunks(8) {
            write(memory, FIRST + u64::from(self.tail % WORDS) * 8, word);
            self.tail = self.tail.wrapping_add(1);
        }
        write(memory, TAIL, &self.tail.to_le_bytes());
        fence(Ordering::SeqCst);
        number(memory, ASLEEP) != 0
    }
}
