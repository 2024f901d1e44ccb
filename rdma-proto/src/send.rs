//! What is under way on the send queue: bytes in the send buffer, work requests, and notifications.
//!
//! Three counters move together. A work request's id carries all three as they stand *after* it, so that one completion
//! tells how far each has come: completions of a send queue arrive in order, and that of a signalled request stands for
//! the unsignalled ones before it.

use crate::error::{ApiMisuse, Error};

/// The bits of each count in an id: 16 for requests, 16 for notifications, 31 for bytes. Each spans more than can be
/// under way (see the bounds in [`Config`](crate::Config)), so the low bits tell the whole count.
const BYTE_BITS: u32 = 31;
const NOTICE_BITS: u32 = 16;
const BYTES: u64 = 0x7fff_ffff;
const NOTICES: u64 = 0xffff;
const SLOTS: u64 = 0xffff;

/// How far something has come, as three counts since the connection began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Progress {
    /// Work requests.
    pub(crate) slots: u64,
    /// Notifications: requests that consume one of the peer's receives.
    pub(crate) notices: u64,
    /// Bytes out of the send buffer.
    pub(crate) bytes: u64,
}

impl Progress {
    const fn to_id(self) -> u64 {
        ((self.slots & SLOTS) << NOTICE_BITS | (self.notices & NOTICES)) << BYTE_BITS | (self.bytes & BYTES)
    }

    /// Returns the progress an id stands for, seen from `self`, which it cannot lie behind.
    const fn advanced_to(self, id: u64) -> Self {
        let upper = id >> BYTE_BITS;
        Self {
            slots: catch_up(self.slots, upper >> NOTICE_BITS, SLOTS),
            notices: catch_up(self.notices, upper, NOTICES),
            bytes: catch_up(self.bytes, id, BYTES),
        }
    }
}

/// Returns the smallest count not below `from` whose bits under `mask` are those of `value`.
const fn catch_up(from: u64, value: u64, mask: u64) -> u64 {
    from.saturating_add(value.wrapping_sub(from) & mask)
}

/// A part of the send buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Offset of its first byte.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
}

/// Where the bytes of a WRITE lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// In the send buffer.
    Buffer(Span),
    /// In the memory of the latest [`Machine::lend`](crate::Machine::lend).
    Lent(Span),
}

impl Source {
    /// Returns how many bytes.
    #[expect(clippy::len_without_is_empty, reason = "no bytes are as good as any other number")]
    pub const fn len(self) -> u32 {
        match self {
            Self::Buffer(span) | Self::Lent(span) => span.len,
        }
    }
}

/// Most bytes under way while some of them are lent, so that the bits of an id tell the whole count.
const LENT_LIMIT: u64 = 1 << 30;

/// The part of the stream that lies in lent memory instead of the send buffer, as counts of bytes. Its place in the buffer stays
/// unused, which costs nothing: what comes behind it waits until it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lent {
    begin: u64,
    end: u64,
}

/// The send side's books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SendBooks {
    depth: u64,
    notice_limit: u64,
    capacity: u64,
    /// Bytes the application has put into the buffer or lent.
    written: u64,
    /// What was lent last.
    lent: Lent,
    posted: Progress,
    /// Bytes up to the last request posted with a signal.
    signaled: u64,
    /// A request that reaches any of these counts is posted with a signal.
    signal_at: Progress,
    done: Progress,
}

impl SendBooks {
    pub(crate) fn new(depth: u16, notice_limit: u16, capacity: u32) -> Self {
        let zero = Progress { slots: 0, notices: 0, bytes: 0 };
        let mut books = Self {
            depth: depth as u64,
            notice_limit: notice_limit as u64,
            capacity: capacity as u64,
            written: 0,
            lent: Lent { begin: 0, end: 0 },
            posted: zero,
            signaled: 0,
            signal_at: zero,
            done: zero,
        };
        books.set_signal();
        books
    }

    pub(crate) const fn posted(&self) -> Progress {
        self.posted
    }

    pub(crate) const fn done(&self) -> Progress {
        self.done
    }

    /// Returns the free part of the buffer up to its end, none of which a request still reads (VR-XFER-011); the rest, if any,
    /// begins at offset 0.
    pub(crate) const fn space(&self) -> Span {
        let free = self.capacity.saturating_sub(self.written.saturating_sub(self.done.bytes));
        self.span(self.written, free)
    }

    pub(crate) fn commit(&mut self, bytes: usize) -> Result<(), ApiMisuse> {
        let space = self.space().len as usize;
        if bytes > space {
            return Err(ApiMisuse::CommitBeyondSpace { bytes, space });
        }
        self.written = self.written.saturating_add(bytes as u64);
        Ok(())
    }

    /// Returns how many bytes can be lent now at most: none while some of what was lent before are not posted.
    pub(crate) const fn lendable(&self) -> u32 {
        if self.posted.bytes < self.lent.end {
            return 0;
        }
        LENT_LIMIT.saturating_sub(self.unconfirmed()) as u32
    }

    pub(crate) fn lend(&mut self, bytes: usize) -> Result<(), ApiMisuse> {
        let lendable = self.lendable() as usize;
        if bytes > lendable {
            return Err(ApiMisuse::LendBeyondLimit { bytes, lendable });
        }
        if bytes > 0 {
            let begin = self.written;
            self.written = begin.saturating_add(bytes as u64);
            self.lent = Lent { begin, end: self.written };
        }
        Ok(())
    }

    pub(crate) const fn unposted(&self) -> u64 {
        self.written.saturating_sub(self.posted.bytes)
    }

    /// Returns the number of bytes accepted from the application and not known to have arrived.
    pub(crate) const fn unconfirmed(&self) -> u64 {
        self.written.saturating_sub(self.done.bytes)
    }

    /// Returns the first `bytes` of what is to be posted, as far as they lie together.
    pub(crate) const fn next_source(&self, bytes: u64) -> Source {
        self.source(self.posted.bytes, bytes)
    }

    /// Returns how many of the next `bytes` can be posted with `requests`, each of which takes what lies together.
    pub(crate) const fn carried(&self, bytes: u64, requests: u64) -> u64 {
        // Nearly always all of it lies together.
        let mut carried = self.next_source(bytes).len() as u64;
        let mut left = requests.saturating_sub(1);
        while left > 0 && carried < bytes {
            let next = self.source(self.posted.bytes.saturating_add(carried), bytes.saturating_sub(carried));
            carried = carried.saturating_add(next.len() as u64);
            left = left.saturating_sub(1);
        }
        carried
    }

    const fn source(&self, position: u64, bytes: u64) -> Source {
        if position >= self.lent.end {
            return Source::Buffer(self.span(position, bytes));
        }
        if position < self.lent.begin {
            let before = self.lent.begin.saturating_sub(position);
            return Source::Buffer(self.span(position, if bytes < before { bytes } else { before }));
        }
        let rest = self.lent.end.saturating_sub(position);
        let len = if bytes < rest { bytes } else { rest };
        // Both are at most `LENT_LIMIT`.
        Source::Lent(Span { offset: position.saturating_sub(self.lent.begin) as u32, len: len as u32 })
    }

    const fn span(&self, position: u64, bytes: u64) -> Span {
        let offset = match position.checked_rem(self.capacity) {
            Some(offset) => offset,
            None => 0,
        };
        let to_end = self.capacity.saturating_sub(offset);
        let len = if bytes < to_end { bytes } else { to_end };
        // Both are at most the capacity, which came as a u32.
        Span { offset: offset as u32, len: len as u32 }
    }

    /// Returns how many requests can be posted before one completes (VR-FLOW-011).
    pub(crate) const fn free_slots(&self) -> u64 {
        self.depth.saturating_sub(self.posted.slots.saturating_sub(self.done.slots))
    }

    /// Returns the place of the next request in a table of `depth` slots: free as long as [`SendBooks::free_slots`] is not zero.
    pub(crate) const fn next_slot(&self) -> u16 {
        match self.posted.slots.checked_rem(self.depth) {
            Some(slot) => slot as u16,
            None => 0,
        }
    }

    /// Books one request of `bytes` and says its id and whether it must be signalled: whenever a quarter of any budget is used
    /// since the last signal, so that whoever waits for room always has a completion to wait for; and when it is the
    /// last of what was lent, for whoever waits to have that back.
    pub(crate) fn post(&mut self, bytes: u32, notifies: bool, force_signal: bool) -> (u64, bool) {
        self.posted.slots = self.posted.slots.saturating_add(1);
        self.posted.notices = self.posted.notices.saturating_add(notifies as u64);
        self.posted.bytes = self.posted.bytes.saturating_add(bytes as u64);
        let gives_back = bytes > 0 && self.posted.bytes == self.lent.end;
        let signal = force_signal
            || gives_back
            || self.posted.slots >= self.signal_at.slots
            || self.posted.notices >= self.signal_at.notices
            || self.posted.bytes >= self.signal_at.bytes;
        if signal {
            self.set_signal();
        }
        (self.posted.to_id(), signal)
    }

    /// Notes that all that is posted will be told of, and when to ask for that again: after a quarter of each budget.
    fn set_signal(&mut self) {
        let Progress { slots, notices, bytes } = self.posted;
        self.signaled = bytes;
        self.signal_at = Progress {
            slots: slots.saturating_add(self.depth.div_ceil(4)),
            notices: notices.saturating_add(self.notice_limit.div_ceil(4)),
            bytes: bytes.saturating_add(self.capacity.div_ceil(4)),
        };
    }

    /// Returns whether bytes were posted after the last signalled request, so that nothing will tell when they are done.
    pub(crate) const fn has_unsignaled(&self) -> bool {
        self.posted.bytes > self.signaled
    }

    /// Books the completion of the request `id` and of all before it.
    pub(crate) fn complete(&mut self, id: u64) -> Result<(), Error> {
        let done = self.done.advanced_to(id);
        if done.slots > self.posted.slots
            || done.notices > self.posted.notices
            || done.bytes > self.posted.bytes
        {
            return Err(Error::Bug("a send completion for a work request that was never posted"));
        }
        self.done = done;
        Ok(())
    }
}
