//! The state of the send side: bytes, work requests and notifications, as counts that only grow.
//!
//! The id of a work request holds all three counts as they are *after* it. Completions of a send
//! queue arrive in order, and that of a signalled request covers the unsignalled ones before it.

use crate::error::{ApiMisuse, Error};

/// Bits per count in an id: 16 for requests, 16 for notifications, 31 for bytes: more than can be
/// in flight (see [`Config`](crate::Config)), so they determine the whole count.
const BYTE_BITS: u32 = 31;
const NOTICE_BITS: u32 = 16;
const BYTES: u64 = 0x7fff_ffff;
const NOTICES: u64 = 0xffff;
const SLOTS: u64 = 0xffff;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Progress {
    pub(crate) slots: u64,
    pub(crate) notices: u64,
    pub(crate) bytes: u64,
}

impl Progress {
    #[inline]
    const fn to_id(self) -> u64 {
        // 63 bits: drivers tell the ids of receives by the highest one.
        ((self.slots & SLOTS) << NOTICE_BITS | (self.notices & NOTICES)) << BYTE_BITS | (self.bytes & BYTES)
    }

    const fn advanced_to(self, id: u64) -> Self {
        let upper = id >> BYTE_BITS;
        Self {
            slots: catch_up(self.slots, upper >> NOTICE_BITS, SLOTS),
            notices: catch_up(self.notices, upper, NOTICES),
            bytes: catch_up(self.bytes, id, BYTES),
        }
    }
}

/// Returns the smallest count not below `from` whose bits under `mask` equal those of `value`.
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
    /// In the memory of the last [`Machine::lend`](crate::Machine::lend).
    Lent(Span),
}

impl Source {
    /// No bytes.
    pub(crate) const NONE: Self = Self::Buffer(Span { offset: 0, len: 0 });

    /// Returns the number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "no bytes are as good as any other number")]
    pub const fn len(self) -> u32 {
        match self {
            Self::Buffer(span) | Self::Lent(span) => span.len,
        }
    }
}

/// Most bytes in flight when some are lent. With a full send buffer, of at most 2^30 bytes, behind
/// them, an id still determines the whole count.
const LENT_LIMIT: u64 = BYTES - (1 << 30);

/// The part of the stream in lent memory, as byte counts. It has no place in the send buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lent {
    /// Where the loans begin that follow each other without a byte of the send buffer between them.
    run: u64,
    /// The last loan: only it can be not completely posted.
    begin: u64,
    end: u64,
}

impl Lent {
    /// Returns how many of the bytes from `position` on belong to the last run of loans.
    #[inline]
    const fn bytes_from(self, position: u64) -> u64 {
        // Nearly always true: a small request is not lent.
        if position >= self.end { 0 } else { self.bytes_of_run_from(position) }
    }

    #[cold]
    const fn bytes_of_run_from(self, position: u64) -> u64 {
        self.end.saturating_sub(if position > self.run { position } else { self.run })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SendState {
    depth: u64,
    notice_limit: u64,
    capacity: u64,
    written: u64,
    /// The buffer place of the next byte to post: saves a division.
    posted_at: u64,
    lent: Lent,
    posted: Progress,
    /// Bytes up to the last signalled request.
    signaled: u64,
    /// A request that reaches any of these counts is signalled.
    signal_at: Progress,
    done: Progress,
}

impl SendState {
    pub(crate) fn new(depth: u16, notice_limit: u16, capacity: u32) -> Self {
        let zero = Progress { slots: 0, notices: 0, bytes: 0 };
        let mut state = Self {
            depth: depth as u64,
            notice_limit: notice_limit as u64,
            capacity: capacity as u64,
            written: 0,
            posted_at: 0,
            lent: Lent { run: 0, begin: 0, end: 0 },
            posted: zero,
            signaled: 0,
            signal_at: zero,
            done: zero,
        };
        state.set_signal();
        state
    }

    #[inline]
    pub(crate) const fn posted(&self) -> Progress {
        self.posted
    }

    #[inline]
    pub(crate) const fn done(&self) -> Progress {
        self.done
    }

    /// Returns whether no byte of the buffer waits to be posted, and those in flight have a signal
    /// that makes room. Lent bytes lie elsewhere.
    pub(crate) const fn can_replace_buffer(&self, capacity: u32) -> bool {
        let only_lent = self.posted.bytes >= self.lent.begin && self.written == self.lent.end;
        // In a shorter buffer, bytes in flight without a signal could take all room: nothing more
        // could be posted, and no completion would make room.
        (self.all_posted() || only_lent) && (capacity as u64 >= self.capacity || self.unconfirmed() == 0)
    }

    /// Continues with another buffer, from its beginning. Posted bytes stay where they are, and
    /// count as used room until they have arrived.
    pub(crate) fn replace_buffer(&mut self, capacity: u32) {
        self.capacity = capacity.into();
        self.posted_at = 0;
        // The next signal is due after a quarter of the new length.
        self.signal_bytes();
    }

    /// Returns the free part of the buffer up to its end, which no request still reads
    /// (VR-XFER-011). More may begin at offset 0.
    #[inline]
    pub(crate) const fn space(&self) -> Span {
        let free = self.capacity.saturating_sub(self.used());
        self.span(self.written_at(), free)
    }

    #[inline]
    pub(crate) const fn has_space(&self) -> bool {
        self.used() < self.capacity
    }

    /// Bytes that count as used room. The last run of loans takes none. Earlier ones count until
    /// they have arrived, as no number says where in the stream they are (docs/decisions.md, 12).
    #[inline]
    const fn used(&self) -> u64 {
        self.unconfirmed().saturating_sub(self.lent.bytes_from(self.done.bytes))
    }

    #[inline]
    pub(crate) fn commit(&mut self, bytes: usize) -> Result<(), ApiMisuse> {
        let space = self.space().len as usize;
        if bytes > space {
            return Err(ApiMisuse::CommitBeyondSpace { bytes, space });
        }
        self.write(bytes as u64);
        Ok(())
    }

    #[inline]
    pub(crate) fn write(&mut self, bytes: u64) {
        self.written = self.written.wrapping_add(bytes);
    }

    #[inline]
    const fn written_at(&self) -> u64 {
        let lent = self.lent.bytes_from(self.posted.bytes);
        self.place(self.posted_at.wrapping_add(self.unposted().saturating_sub(lent)))
    }

    #[inline]
    const fn place(&self, behind: u64) -> u64 {
        // Nearly always true, and saves the division.
        if behind < self.capacity {
            return behind;
        }
        // `Config::check` refuses a buffer of no bytes, so there always is a remainder.
        match behind.checked_rem(self.capacity) {
            Some(offset) => offset,
            None => 0,
        }
    }

    /// Returns the buffer place of the byte behind those of `source`, which begin at `at`.
    #[inline(always)]
    const fn place_after(&self, at: u64, source: Source) -> u64 {
        match source {
            Source::Buffer(span) => self.place(at.wrapping_add(span.len as u64)),
            Source::Lent(_) => at,
        }
    }

    /// None while an earlier loan is not completely posted.
    pub(crate) const fn lendable(&self) -> u32 {
        // `lent` describes one range, which is not needed any more once all of it is posted.
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
            self.write(bytes as u64);
            let run = if begin == self.lent.end { self.lent.run } else { begin };
            self.lent = Lent { run, begin, end: self.written };
            self.signal_at.bytes = self.signal_at.bytes.min(self.written);
        }
        Ok(())
    }

    #[inline]
    pub(crate) const fn unposted(&self) -> u64 {
        // `posted` never exceeds `written`.
        self.written.wrapping_sub(self.posted.bytes)
    }

    #[inline]
    pub(crate) const fn all_posted(&self) -> bool {
        self.written == self.posted.bytes
    }

    #[inline]
    pub(crate) const fn unconfirmed(&self) -> u64 {
        // `done` never exceeds `written`.
        self.written.wrapping_sub(self.done.bytes)
    }

    /// Returns where the next `bytes` to post lie, if they are contiguous in the buffer.
    #[inline]
    pub(crate) const fn next_span(&self, bytes: u32) -> Span {
        Span { offset: self.posted_at as u32, len: bytes }
    }

    #[inline]
    pub(crate) const fn next_source(&self, bytes: u64) -> Source {
        self.source(self.posted.bytes, self.posted_at, bytes)
    }

    /// Returns how many of the next `bytes` fit into `requests`, each for a contiguous part.
    #[inline]
    pub(crate) const fn carried(&self, bytes: u64, requests: u64) -> u64 {
        let first = self.next_source(bytes).len() as u64;
        if first == bytes { bytes } else { self.carried_in_parts(first, bytes, requests) }
    }

    #[cold]
    const fn carried_in_parts(&self, first: u64, bytes: u64, requests: u64) -> u64 {
        let mut carried = first;
        let mut at = self.place_after(self.posted_at, self.next_source(bytes));
        let mut left = requests.saturating_sub(1);
        while left > 0 && carried < bytes {
            let next =
                self.source(self.posted.bytes.saturating_add(carried), at, bytes.saturating_sub(carried));
            (carried, at) = (carried.saturating_add(next.len() as u64), self.place_after(at, next));
            left = left.saturating_sub(1);
        }
        carried
    }

    #[inline]
    const fn source(&self, position: u64, at: u64, bytes: u64) -> Source {
        if position >= self.lent.end {
            return Source::Buffer(self.span(at, bytes));
        }
        self.source_about_lent(position, at, bytes)
    }

    #[cold]
    const fn source_about_lent(&self, position: u64, at: u64, bytes: u64) -> Source {
        if position < self.lent.begin {
            let before = self.lent.begin.saturating_sub(position);
            return Source::Buffer(self.span(at, if bytes < before { bytes } else { before }));
        }
        let rest = self.lent.end.saturating_sub(position);
        let len = if bytes < rest { bytes } else { rest };
        // Both are at most `LENT_LIMIT`.
        Source::Lent(Span { offset: position.saturating_sub(self.lent.begin) as u32, len: len as u32 })
    }

    #[inline]
    const fn span(&self, at: u64, bytes: u64) -> Span {
        let to_end = self.capacity.saturating_sub(at);
        let len = if bytes < to_end { bytes } else { to_end };
        // Both are at most the capacity, which came as a u32.
        Span { offset: at as u32, len: len as u32 }
    }

    /// Requests that can be posted before one completes (VR-FLOW-011).
    #[inline]
    pub(crate) const fn free_slots(&self) -> u64 {
        self.depth.saturating_sub(self.posted.slots.saturating_sub(self.done.slots))
    }

    /// Returns the slot of the next request, free while [`SendState::free_slots`] is not zero.
    pub(crate) const fn next_slot(&self) -> u16 {
        match self.posted.slots.checked_rem(self.depth) {
            Some(slot) => slot as u16,
            None => 0,
        }
    }

    #[inline(always)]
    pub(crate) fn post(&mut self, from: Source, notifies: bool) -> u64 {
        self.posted = Progress {
            slots: self.posted.slots.wrapping_add(1),
            notices: self.posted.notices.wrapping_add(notifies as u64),
            bytes: self.posted.bytes.wrapping_add(from.len() as u64),
        };
        self.posted_at = self.place_after(self.posted_at, from);
        self.posted.to_id()
    }

    /// Returns whether the last request must be signalled: every quarter of a budget, to wake
    /// callers that wait for room, and at the end of a loan, to free the memory.
    #[inline]
    pub(crate) fn take_signal(&mut self, force: bool) -> bool {
        let signal = force
            || self.posted.slots >= self.signal_at.slots
            || self.posted.notices >= self.signal_at.notices
            || self.posted.bytes >= self.signal_at.bytes;
        if signal {
            self.set_signal();
        }
        signal
    }

    /// Returns the counts of notifications and bytes below which single WRITEs need no check: each
    /// finds a slot and space, is contiguous, and needs no signal.
    pub(crate) fn budget(&self, slots_kept_back: u64) -> (u64, u64) {
        let Progress { slots, notices, bytes } = self.posted;
        // The request that reaches the count is signalled, so the budget ends before it.
        let before_signal = |at: u64, now: u64| at.saturating_sub(now).saturating_sub(1);
        let requests = self
            .free_slots()
            .saturating_sub(slots_kept_back)
            .min(before_signal(self.signal_at.slots, slots))
            .min(before_signal(self.signal_at.notices, notices));
        let space = bytes.saturating_add(self.space().len.into());
        (notices.saturating_add(requests), space.min(self.signal_at.bytes))
    }

    #[cold]
    fn set_signal(&mut self) {
        let Progress { slots, notices, bytes } = self.posted;
        self.signaled = bytes;
        // A quarter: a full queue, or a used up limit, then has a signalled request in flight whose
        // completion makes room. Rounded up, so that a queue of one works.
        self.signal_at.slots = slots.saturating_add(self.depth.div_ceil(4));
        self.signal_at.notices = notices.saturating_add(self.notice_limit.div_ceil(4));
        self.signal_bytes();
    }

    fn signal_bytes(&mut self) {
        let lent = if self.lent.end > self.posted.bytes { self.lent.end } else { u64::MAX };
        self.signal_at.bytes = self.signaled.saturating_add(self.capacity.div_ceil(4)).min(lent);
    }

    /// Returns whether bytes follow the last signalled request: no completion will report them.
    pub(crate) const fn has_unsignaled(&self) -> bool {
        self.posted.bytes > self.signaled
    }

    pub(crate) fn complete(&mut self, id: u64) -> Result<(), Error> {
        let done = self.done.advanced_to(id);
        // A fault of the backend: no peer has a part in ids.
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
