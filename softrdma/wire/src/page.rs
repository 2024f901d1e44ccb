//! The page of memory that a completion queue shares between its program and the fabric.
//!
//! The fabric shows completions there, and the program takes them and arms the queue without a
//! system call. Each side writes its own words, and keeps its position to itself: the fabric reads
//! each of the program's words once, and trusts none of them.
//!
//! Positions count completions from the queue's beginning, and wrap.
//!
//! No program sleeps beside a completion that it did not find. Each side writes its word, passes a
//! fence, and only then reads the other's: the fabric shows a completion, or says that there is no
//! room for it ([`Page::set_calls`]), and then looks for an arming; the program arms
//! ([`Page::arm`]) and then looks for a completion and for what it must ask. Sequentially
//! consistent fences have one order, so the side whose fence is the later one reads what the other
//! has written.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use crate::{Completion, Source};

/// How many completions are shown at a time; a power of two.
pub const SHOWN: u32 = 64;

/// The bytes of a page.
pub const PAGE: usize = 4096;

const WORDS: usize = 5;
/// A bit of [`Page::set_calls`]: a poll that finds nothing must ask the fabric.
pub const POLLS: u32 = 1;
/// A bit of [`Page::set_calls`]: arming must ask the fabric.
pub const ARMS: u32 = 2;

/// The flags of an entry: whether it has an immediate and a source, and whether that is of IPv4.
const IMMEDIATE: u32 = 1;
const SOURCE: u32 = 2;
const IP4: u32 = 4;

/// The flags of an arming: for solicited events, or for all.
const SOLICITED: u64 = 1;
const ALL: u64 = 2;

/// A page. Any of its bytes may change to anything at any time.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Page {
    /// Written by the program: how many completions it has taken.
    taken: AtomicU32,
    _between: AtomicU32,
    /// Written by the program: how many completions it had taken when it armed the queue, in the
    /// upper half, and the arming's flags. The fabric resets it to 0.
    armed: AtomicU64,
    _rest: [AtomicU64; 6],
    /// Written by the fabric: how many completions it has shown.
    shown: AtomicU32,
    /// Written by the fabric: what the program must ask it for.
    calls: AtomicU32,
    _more: [AtomicU64; 7],
    entries: [[AtomicU64; WORDS]; SHOWN as usize],
}

const _: () = assert!(size_of::<Page>() == PAGE);

/// The first page of the memory, which belongs to no queue. Any of its bytes may change to anything
/// at any time.
#[repr(C, align(4096))]
#[derive(Debug, Default)]
pub struct Notice {
    /// Written by the fabric: whether each post must be answered.
    answers: AtomicU32,
}

const _: () = assert!(size_of::<Notice>() == PAGE);

impl Notice {
    /// Tells the program to post by requests that have an answer. A fault may refuse one from now
    /// on.
    pub fn demand_answers(&self) {
        self.answers.store(1, SeqCst);
    }

    /// Whether the fabric demands answered posts.
    #[must_use]
    pub fn demands_answers(&self) -> bool {
        self.answers.load(Relaxed) != 0
    }
}

impl Default for Page {
    fn default() -> Self {
        let zero = AtomicU64::default;
        Self {
            taken: AtomicU32::default(),
            _between: AtomicU32::default(),
            armed: zero(),
            _rest: Default::default(),
            shown: AtomicU32::default(),
            calls: AtomicU32::default(),
            _more: Default::default(),
            entries: core::array::from_fn(|_| core::array::from_fn(|_| zero())),
        }
    }
}

impl Page {
    /// Resets the page for a new queue.
    pub fn clear(&self) {
        self.taken.store(0, Relaxed);
        self.armed.store(0, Relaxed);
        self.calls.store(0, Relaxed);
        self.shown.store(0, Release);
    }

    fn entry(&self, position: u32) -> Option<&[AtomicU64; WORDS]> {
        self.entries.get((position % SHOWN) as usize)
    }

    /// Shows the completion at this position. Called by the fabric, which calls
    /// [`Page::set_calls`] after the last one.
    pub fn show(&self, position: u32, completion: &Completion) {
        let &Completion { id, pair, status, vendor, opcode, len, immediate, source } = completion;
        let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let has = |flag: u32, set: bool| if set { flag } else { 0 };
        let flags = has(IMMEDIATE, immediate.is_some())
            | has(SOURCE, source.is_some())
            | has(IP4, source.is_some_and(|source| source.ip4));
        let words = [
            id,
            both(pair, status),
            both(vendor, opcode),
            both(len, immediate.unwrap_or(0)),
            both(flags, source.map_or(0, |source| source.number)),
        ];
        for (place, word) in self.entry(position).into_iter().flatten().zip(words) {
            place.store(word, Relaxed);
        }
        self.shown.store(position.wrapping_add(1), Release);
    }

    /// Returns how many completions the program claims to have taken.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.taken.load(Acquire)
    }

    /// Returns how many completions the program claims to have taken when it armed the queue, and
    /// whether it armed for solicited events alone. Each arming is returned once.
    #[must_use]
    pub fn take_arming(&self) -> Option<(u32, bool)> {
        if self.armed.load(Relaxed) == 0 {
            return None;
        }
        let word = self.armed.swap(0, SeqCst);
        let solicited = match word & (SOLICITED | ALL) {
            0 => return None,
            which => which == SOLICITED,
        };
        Some(((word >> 32) as u32, solicited))
    }

    /// Tells the program what it must ask for: [`POLLS`], [`ARMS`]. An arming of a program that
    /// finds neither this nor what was shown is found afterwards.
    pub fn set_calls(&self, calls: u32) {
        if self.calls.load(Relaxed) != calls {
            self.calls.store(calls, Release);
        }
        // Pairs with the one in `arm`: see the module's page.
        fence(SeqCst);
    }

    /// Returns the completion at this position, for a program that has taken all before; `None` if
    /// it is not there yet.
    #[must_use]
    pub fn at(&self, position: u32) -> Option<Completion> {
        if self.shown() == position {
            return None;
        }
        let word = |place: &AtomicU64| place.load(Relaxed);
        let [id, second, third, fourth, flags] = self.entry(position)?.each_ref().map(word);
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let ((pair, status), (vendor, opcode)) = (halves(second), halves(third));
        let (len, immediate) = halves(fourth);
        let (flags, number) = halves(flags);
        let immediate = (flags & IMMEDIATE != 0).then_some(immediate);
        let source = (flags & SOURCE != 0).then_some(Source { number, ip4: flags & IP4 != 0 });
        Some(Completion { id, pair, status, vendor, opcode, len, immediate, source })
    }

    /// Returns how many completions the program was shown.
    #[must_use]
    pub fn shown(&self) -> u32 {
        self.shown.load(Acquire)
    }

    /// Tells the fabric how many completions the program has taken.
    pub fn give_back(&self, taken: u32) {
        self.taken.store(taken, Release);
    }

    /// Arms the queue for completions from now on, for a program that has taken `taken`. An arming
    /// for all events is never narrowed.
    pub fn arm(&self, taken: u32, solicited: bool) {
        let new = if solicited { SOLICITED } else { ALL };
        let merge = |old: u64| Some(u64::from(taken) << 32 | (old & ALL).max(new));
        let _old = self.armed.fetch_update(SeqCst, Relaxed, merge);
        // Pairs with the one in `set_calls`: see the module's page.
        fence(SeqCst);
    }

    /// Returns what the program must ask for.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.calls.load(Acquire)
    }
}
