//! Who is awake: whether whatever comes wakes somebody, or the endpoint looks again by itself, and the order of a turn that never
//! sleeps on work (VR-FLOW-013).

use std::time::Duration;

use rdma_backend::time::Instant;

use super::spin::Spin;

#[cfg(all(test, shuttle))]
mod tests;

/// Times that a turn looks at its queues before it lets the event loop have one.
const ROUNDS: u32 = 64;

/// Turns that take completions without a wake-up for which the kernel is asked once.
const UNASKED: u32 = 16;

/// The result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    /// Nothing had come.
    Nothing,
    /// All that had come was taken: a poll that takes fewer completions than it could has emptied its queue, `ibv_poll_cq(3)`.
    All,
    /// There may be more.
    More,
}

/// What an endpoint is about between its turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// All was done, and all queues are armed: whatever comes makes the descriptor readable.
    Armed,
    /// All was done, and no queue is armed: it looks again rather than to be woken.
    Spinning,
    /// The last turn ended before all was done.
    Unfinished,
}

/// What comes after a look of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Another look.
    Look,
    /// Another look, when the kernel was asked what has come.
    Ask,
    /// Another look, when all is armed: nothing was left.
    Arm,
    /// The end: the next turn looks again.
    Spin,
    /// The end: whatever comes makes the descriptor readable.
    Rest,
}

/// Whether an endpoint is armed, spins, or has more to do, and what it knows of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awake {
    phase: Phase,
    spin: Spin,
    /// Turns since the kernel was asked last.
    unasked: u32,
    /// Whether the event channel may have something.
    events_wait: bool,
    /// The time of the last look.
    seen: Instant,
}

impl Awake {
    pub(super) fn new() -> Self {
        let (spin, seen) = (Spin::never(), Instant::default());
        Self { phase: Phase::Armed, spin, unasked: 0, events_wait: false, seen }
    }

    /// Goes on looking for at most `most` before it arms.
    pub(super) fn raise_spin(&mut self, most: Duration) {
        self.spin.raise(most);
    }

    /// Returns whether there is something to do though nothing comes, events apart
    /// ([`Awake::events_wait`]).
    pub(super) const fn is_unfinished(&self) -> bool {
        !matches!(self.phase, Phase::Armed)
    }

    /// There is more to do: a queue is new, and not armed yet.
    pub(super) fn has_more(&mut self) {
        self.phase = Phase::Unfinished;
    }

    /// Returns whether the event channel may have something.
    #[inline]
    pub(super) const fn events_wait(&self) -> bool {
        self.events_wait
    }

    pub(super) fn set_events_wait(&mut self, wait: bool) {
        self.events_wait = wait;
    }

    /// It looks at this time.
    #[inline]
    pub(super) fn looks(&mut self, now: Instant) {
        self.seen = now;
    }

    /// The kernel is asked what has come.
    pub(super) fn asks(&mut self) {
        self.unasked = 0;
    }

    /// Begins a turn. Returns whether the kernel is to be asked before the first look: not while it spins, when no queue is armed that
    /// could have woken anybody, so that only other events are in the kernel.
    #[inline]
    fn begin(&mut self) -> bool {
        self.unasked = self.unasked.saturating_add(1);
        let spins = self.phase == Phase::Spinning;
        if spins {
            self.phase = Phase::Unfinished;
        }
        !spins || self.events_wait || self.is_long_unasked()
    }

    const fn is_long_unasked(&self) -> bool {
        self.unasked >= UNASKED
    }

    /// Decides what comes after a look, before which all was `armed` or not.
    #[inline]
    fn after_look(&mut self, found: Found, armed: bool) -> Next {
        if found == Found::More {
            return Next::Look;
        }
        if !armed && self.spin.goes_on(found == Found::All, self.seen) {
            self.phase = Phase::Spinning;
            return Next::Spin;
        }
        // A spin that ends here asked nothing of the kernel: an event may wait there whose edge is over.
        if self.unasked > 0 {
            return Next::Ask;
        }
        if !armed {
            return Next::Arm;
        }
        self.phase = Phase::Armed;
        Next::Rest
    }
}

/// What an endpoint does in a turn, in whose order it never sleeps on work.
pub(super) trait Turns {
    type Error;

    fn awake(&mut self) -> &mut Awake;

    /// Asks the kernel what has come, or sleeps there, for at most `limit`. Returns whether a waker's call was among it.
    fn ask(&mut self, limit: Option<Duration>) -> Result<bool, Self::Error>;

    /// Takes what has come, without asking the kernel and without arming anything.
    fn look(&mut self) -> Result<Found, Self::Error>;

    /// Arms what is not armed: what comes from then on makes the descriptor readable, and what
    /// came before is found by a look now. Returns whether there is such a look to take.
    fn arm(&mut self) -> Result<bool, Self::Error>;

    /// Returns whether a completion would wake somebody.
    fn any_armed(&self) -> bool;

    /// Returns whether a completion would wake nobody.
    fn any_deaf(&self) -> bool;

    /// Returns how long there is nothing to do if nothing comes; `None` for ever.
    fn idle_for(&self) -> Option<Duration>;

    /// Takes what has come, within bounds, and arms for the rest. Who does not spin arms before it
    /// looks: it will in any case, and one look that takes all is enough then.
    #[inline(always)]
    fn turn(&mut self) -> Result<(), Self::Error> {
        let mut asks = self.awake().begin() || self.any_armed();
        let mut arms = self.awake().spin.is_off();
        for _ in 0..ROUNDS {
            if std::mem::take(&mut asks) {
                self.ask(Some(Duration::ZERO))?;
            }
            if arms {
                self.arm()?;
            }
            let found = self.look()?;
            match self.awake().after_look(found, arms) {
                Next::Look => {}
                Next::Ask => asks = true,
                Next::Arm => arms = true,
                Next::Spin | Next::Rest => return Ok(()),
            }
        }
        self.awake().has_more();
        Ok(())
    }

    /// Sleeps until there is something to do, at most for `limit`, and does it. Completions that are always there would keep other events
    /// from being seen: `asks` has the kernel asked now and then.
    fn sleep(&mut self, limit: Option<Duration>, asks: bool) -> Result<(), Self::Error> {
        self.awake().begin();
        let asks = asks && self.awake().is_long_unasked();
        if asks && self.ask(Some(Duration::ZERO))? || self.look_for(limit)? {
            self.awake().has_more();
            return Ok(());
        }
        if self.arm()? && self.look()? != Found::Nothing {
            self.awake().has_more();
            return Ok(());
        }
        self.awake().phase = Phase::Armed;
        let limit = match (self.idle_for(), limit) {
            (Some(idle), Some(limit)) => Some(idle.min(limit)),
            (idle, limit) => idle.or(limit),
        };
        self.ask(limit)?;
        let found = self.look()? != Found::Nothing;
        // Armed again when somebody wants to sleep, and not for whoever goes on at once.
        let deaf = self.any_deaf();
        let awake = self.awake();
        awake.spin.goes_on(found, awake.seen);
        awake.phase = if deaf { Phase::Unfinished } else { Phase::Armed };
        Ok(())
    }

    /// Looks until something has come, for as long as a spin goes on, and at most for `limit`. Returns whether anything had.
    fn look_for(&mut self, limit: Option<Duration>) -> Result<bool, Self::Error> {
        let mut begun = None;
        loop {
            let found = self.look()? != Found::Nothing;
            let deaf = self.any_deaf();
            let awake = self.awake();
            let by = begun.get_or_insert_with(|| limit.map(|limit| awake.seen.after(limit)));
            let goes_on = awake.spin.goes_on(found, awake.seen) && deaf;
            if found || !goes_on || by.is_some_and(|by| awake.seen >= by) {
                return Ok(found);
            }
            std::hint::spin_loop();
        }
    }
}
