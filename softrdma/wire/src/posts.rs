//! The ring of memory in which a program posts work requests without a system call.
//!
//! The program writes posts there in order, and the fabric's thread of the session takes them. The
//! fabric copies each post once, before it looks at it. It keeps its positions to itself, and
//! trusts nothing in the ring.
//!
//! A post is a word with its length, and the words of its encoding. Positions count words from the
//! beginning, and wrap.
//!
//! No post is left beside a sleeping fabric. Each side writes its word, passes a fence, and only
//! then reads the other's: the program says that it has posted ([`Writer::put`]) and then looks
//! whether the fabric sleeps ([`Posts::needs_doorbell`]); the fabric says that it sleeps
//! ([`Posts::fall_asleep`]) and then looks for posts. Sequentially consistent fences have one
//! order, so the side whose fence is the later one reads what the other has written.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, fence};

use serde::{Deserialize, Serialize};

use crate::{Error, MAX_MESSAGE, Name, PAGE, Receive, Request, Send};

/// The words of the ring; a power of two. The longest post finds room in an empty one.
pub const WORDS: u32 = if cfg!(miri) { 1 << 6 } else { 1 << 14 };
/// Where the ring begins in the memory that a program shares with the fabric. The pages of its
/// completion queues are before.
pub const POSTS_AT: usize = PAGE << 14;

const WORD: usize = size_of::<u64>();

const _: () = assert!(cfg!(miri) || MAX_MESSAGE / WORD < WORDS as usize);

/// Work requests that certainly find room, at most [`MAX_WORK`](crate::MAX_WORK). If the fabric
/// refuses one, the queue pair enters the error state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the call of its name, with that call's arguments")]
pub enum Post<'a> {
    Send {
        pair: Name,
        #[serde(borrow)]
        work: Vec<Send<'a>>,
    },
    Receive {
        pair: Name,
        work: Vec<Receive>,
    },
}

impl<'a> Post<'a> {
    /// Returns the request that posts the same, and has an answer. `room` is that of
    /// [`Request::PostSend`].
    #[must_use]
    pub fn answered(self, room: u32) -> Request<'a> {
        match self {
            Self::Send { pair, work } => Request::PostSend { pair, room, work },
            Self::Receive { pair, work } => Request::PostReceive { pair, work },
        }
    }
}

/// A word on a cache line of its own, as one side writes it often.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct Line(AtomicU32);

/// The ring. Any of its bytes may change to anything at any time.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Posts {
    /// Written by the program: the position after the last post.
    tail: Line,
    /// Written by the fabric: the position of the first post that it has not copied.
    head: Line,
    /// Set by the fabric before it sleeps. The first post resets it.
    asleep: Line,
    words: [AtomicU64; WORDS as usize],
}

impl Default for Posts {
    fn default() -> Self {
        let words = core::array::from_fn(|_| AtomicU64::new(0));
        Self { tail: Line::default(), head: Line::default(), asleep: Line::default(), words }
    }
}

impl Posts {
    /// Returns the words from a position on, once around.
    fn from(&self, position: u32) -> impl Iterator<Item = &AtomicU64> {
        let (before, from) = self.words.split_at((position % WORDS) as usize);
        from.iter().chain(before)
    }

    /// Whether the program must ring the doorbell ([`Request::Doorbell`]) after the posts that it
    /// has put here. Says so once each time that the fabric sleeps.
    #[must_use]
    pub fn needs_doorbell(&self) -> bool {
        // Pairs with the one in `fall_asleep`: see the module's page.
        fence(SeqCst);
        self.asleep.0.load(Relaxed) != 0 && self.asleep.0.swap(0, Relaxed) != 0
    }

    /// Says that the fabric sleeps. It looks for posts once more before it does.
    pub fn fall_asleep(&self) {
        self.asleep.0.store(1, Relaxed);
        // Pairs with the one in `needs_doorbell`: see the module's page.
        fence(SeqCst);
    }

    /// Says that the fabric looks for posts by itself.
    pub fn wake_up(&self) {
        self.asleep.0.store(0, Relaxed);
    }
}

/// The program's end of a ring.
#[derive(Debug)]
pub struct Writer {
    tail: u32,
    /// The fabric's position, when the program last looked.
    head: u32,
    buffer: Vec<u8>,
}

impl Default for Writer {
    fn default() -> Self {
        Self { tail: 0, head: 0, buffer: vec![0; MAX_MESSAGE] }
    }
}

impl Writer {
    /// Puts a post into the ring. Returns false if there is no room for it.
    ///
    /// # Errors
    /// [`Error::TooLong`] if it is longer than a message may be.
    pub fn put(&mut self, posts: &Posts, post: &Post<'_>) -> Result<bool, Error> {
        let bytes = crate::socket::encode(post, &mut self.buffer)?;
        let len = bytes.len() as u64;
        let end = self.tail.wrapping_add(words(bytes.len()));
        if end.wrapping_sub(self.head) > WORDS {
            self.head = posts.head.0.load(Acquire);
            if end.wrapping_sub(self.head) > WORDS {
                return Ok(false);
            }
        }
        let (chunks, rest) = bytes.as_chunks();
        let mut last = [0; WORD];
        last.iter_mut().zip(rest).for_each(|(into, byte)| *into = *byte);
        let last = (!rest.is_empty()).then_some(last);
        let all = chunks.iter().copied().chain(last).map(u64::from_le_bytes);
        for (place, word) in posts.from(self.tail).zip(core::iter::once(len).chain(all)) {
            place.store(word, Relaxed);
        }
        self.tail = end;
        posts.tail.0.store(end, Release);
        Ok(true)
    }
}

/// The words of a post whose encoding has so many bytes, at most [`MAX_MESSAGE`].
const fn words(len: usize) -> u32 {
    1 + len.div_ceil(WORD) as u32
}

/// The fabric's end of a ring.
#[derive(Debug, Default)]
pub struct Reader {
    head: u32,
    /// The end of the posts that the fabric has seen.
    tail: u32,
    buffer: Vec<u8>,
}

impl Reader {
    /// Looks for posts. Returns whether there are any. The program's position is copied once.
    ///
    /// # Errors
    /// [`Error::Ring`] if the position cannot be true.
    pub fn look(&mut self, posts: &Posts) -> Result<bool, Error> {
        let tail = posts.tail.0.load(Acquire);
        let (seen, now) = (self.tail.wrapping_sub(self.head), tail.wrapping_sub(self.head));
        if !(seen..=WORDS).contains(&now) {
            return Err(Error::Ring);
        }
        self.tail = tail;
        Ok(now > 0)
    }

    /// Whether posts were seen that were not taken.
    #[must_use]
    pub const fn has_seen(&self) -> bool {
        self.head != self.tail
    }

    /// Copies the next of the posts that were seen, and decodes it.
    ///
    /// # Errors
    /// [`Error::Ring`], [`Error::TooLong`] or [`Error::Malformed`] if it is no post.
    pub fn take(&mut self, posts: &Posts) -> Result<Option<Post<'_>>, Error> {
        let seen = self.tail.wrapping_sub(self.head);
        let mut from = posts.from(self.head).map(|word| word.load(Relaxed));
        let Some(len) = from.next().filter(|_| self.has_seen()) else { return Ok(None) };
        let len = usize::try_from(len).ok().filter(|len| *len <= MAX_MESSAGE).ok_or(Error::TooLong)?;
        let words = words(len);
        if words > seen {
            return Err(Error::Ring);
        }
        self.buffer.clear();
        for word in from.take(words as usize - 1) {
            self.buffer.extend_from_slice(&word.to_le_bytes());
        }
        self.head = self.head.wrapping_add(words);
        posts.head.0.store(self.head, Release);
        let bytes = self.buffer.get(..len).unwrap_or_default();
        Ok(Some(postcard::from_bytes(bytes)?))
    }
}

#[cfg(test)]
mod tests;
