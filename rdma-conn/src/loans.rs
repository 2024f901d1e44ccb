//! The rule of lifetime of memory that is lent in the middle of a stream, as a type.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
#[cfg(not(all(test, shuttle)))]
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(all(test, shuttle))]
use shuttle::sync::atomic::{AtomicBool, Ordering};

#[cfg(test)]
mod tests;

/// Counts which bytes of a stream may be reported as written, when parts of the stream are lent
/// memory. The memory has an owner, which keeps it until its bytes are reported.
///
/// The rule: **a byte that is lent is not reported as written before it is released, and an owner
/// that goes ends its loans before its memory goes.**
///
/// A value of a server is such memory: a reference to it goes when the reply is reported as
/// written. [`Loans::report`] has the first half of the rule, and [`Loans::end`] the second. One
/// thread at a time uses this; each part is released by the drop of its [`Loan`], in any thread.
///
/// Positions are numbers of bytes in the stream. `H` is what the sender holds while it lends, for
/// example an `Arc` of a [`RegisteredBuffer`](crate::RegisteredBuffer). Connections that have lent
/// it hold clones.
#[derive(Debug)]
pub struct Loans<H> {
    accepted: u64,
    reported: u64,
    /// In the order of the stream. Those before are released, and accepted.
    in_flight: VecDeque<Part<H>>,
    ended: bool,
}

#[derive(Debug)]
struct Part<H> {
    range: Range<u64>,
    /// Dropped when all of it is accepted: then only connections use the memory.
    handle: Option<H>,
    released: Arc<AtomicBool>,
}

impl<H> Part<H> {
    fn is_released(&self) -> bool {
        // What the device and the thread that released it did is before what follows.
        self.handle.is_none() && self.released.load(Ordering::Acquire)
    }
}

/// Releases a part when it is dropped, in any thread and without a lock.
///
/// Keep it with the part's memory, where it is dropped after the memory was deregistered: in a
/// [`CallerMemory`](crate::CallerMemory). If the memory stays registered, forget it.
#[derive(Debug)]
#[must_use = "dropping it releases the part"]
pub struct Loan(Arc<AtomicBool>);

impl Drop for Loan {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl<H> Loans<H> {
    /// Creates the loans of a stream, at position 0 and without a part.
    pub const fn new() -> Self {
        Self { accepted: 0, reported: 0, in_flight: VecDeque::new(), ended: false }
    }

    /// Returns the position up to which a connection has taken the stream.
    pub const fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns the position up to which the owner knows the stream to be written.
    pub const fn reported(&self) -> u64 {
        self.reported
    }

    /// Returns how many parts are in flight: registered, and not known to be released.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Returns the part that is being lent, and its positions: some of its bytes are not accepted.
    pub fn open(&self) -> Option<(&H, Range<u64>)> {
        let part = self.in_flight.back()?;
        part.handle.as_ref().map(|handle| (handle, part.range.clone()))
    }

    /// Begins a part. `register` puts the loan into the memory that it registers. Returns false,
    /// and registers nothing, after the end, while another part is open, and if bytes at these
    /// positions were accepted.
    ///
    /// # Errors
    /// Returns the error of `register`. Then there is no such part.
    pub fn lend<E>(
        &mut self,
        at: Range<u64>,
        register: impl FnOnce(Loan) -> Result<H, E>,
    ) -> Result<bool, E> {
        if self.ended || self.open().is_some() || at.start < self.accepted || at.is_empty() {
            return Ok(false);
        }
        let released = Arc::new(AtomicBool::new(false));
        let handle = Some(register(Loan(Arc::clone(&released)))?);
        self.in_flight.push_back(Part { range: at, handle, released });
        Ok(true)
    }

    /// Counts bytes that a connection has taken: those at the positions of a part were lent, all
    /// others copied.
    pub fn accept(&mut self, bytes: u64) {
        self.accepted += bytes;
        if let Some(part) = self.in_flight.back_mut().filter(|part| part.range.end <= self.accepted) {
            part.handle = None;
        }
    }

    /// Returns how many further bytes the owner may be told to be written, at most `most`, and
    /// counts them as reported. None after the end.
    pub fn report(&mut self, most: u64) -> u64 {
        let news = (self.reportable() - self.reported).min(most);
        self.reported += news;
        news
    }

    fn reportable(&mut self) -> u64 {
        if self.ended {
            return self.reported;
        }
        while let Some(oldest) = self.in_flight.front() {
            if !oldest.is_released() {
                // It may begin behind bytes that no connection has taken so far.
                return oldest.range.start.min(self.accepted);
            }
            self.in_flight.pop_front();
        }
        self.accepted
    }

    /// Ends all loans, before the owner's memory goes. `let_go` ends the connections that use the
    /// memory; it is called if a part is in flight. Nothing is lent or reported from now on.
    /// Returns how many bytes are not released even so: the device keeps them registered.
    ///
    /// # Errors
    /// Returns the error of `let_go`. The parts are then still in flight, and so must the memory
    /// stay: call this again.
    pub fn end<E>(&mut self, let_go: impl FnOnce() -> Result<(), E>) -> Result<u64, E> {
        self.ended = true;
        for part in &mut self.in_flight {
            part.handle = None;
        }
        if !self.in_flight.is_empty() {
            let_go()?;
        }
        let kept = self.in_flight.drain(..).filter(|part| !part.is_released());
        Ok(kept.map(|part| part.range.end - part.range.start).sum())
    }
}

impl<H> Default for Loans<H> {
    fn default() -> Self {
        Self::new()
    }
}
