//! The order of a turn: arm, look. No endpoint sleeps while there is work (VR-FLOW-013).

use std::time::Duration;

use rdma_backend::time::Instant;

use super::spin::Spin;

#[cfg(all(test, shuttle))]
mod tests;

/// Times a turn looks at its queues before it returns to the event loop.
const ROUNDS: u32 = 64;

/// Turns that may take completions without a wake-up before the kernel is asked once.
const UNASKED: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    Nothing,
    /// Everything was taken: a poll that is not full has emptied its queue, `ibv_poll_cq(3)`.
    All,
    More,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// All work is done and all queues are armed: an arrival makes the descriptor readable.
    Armed,
    /// All work is done and no queue is armed: the endpoint is busy-polling.
    Spinning,
    /// The last turn ended before all work was done.
    Unfinished,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Look,
    /// Ask the kernel, then look again.
    Ask,
    /// Nothing was left: arm, then look again.
    Arm,
    /// End the turn without arming: the next turn looks again.
    Spin,
    /// End the turn armed: any arrival makes the descriptor readable.
    Rest,
}

/// What an endpoint knows between turns: its phase, and whether the kernel may hold an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awake {
    phase: Phase,
    spin: Spin,
    unasked: u32,
    events_wait: bool,
    seen: Instant,
}

impl Awake {
    pub(super) fn new() -> Self {
        let (spin, seen) = (Spin::never(), Instant::default());
        Self { phase: Phase::Armed, spin, unasked: 0, events_wait: false, seen }
    }

    pub(super) fn raise_spin(&mut self, most: Duration) {
        self.spin.raise(most);
    }

    /// Returns whether there is work even if nothing arrives, other than [`Awake::events_wait`].
    pub(super) const fn is_unfinished(&self) -> bool {
        !matches!(self.phase, Phase::Armed)
    }

    pub(super) fn has_more(&mut self) {
        self.phase = Phase::Unfinished;
    }

    #[inline]
    pub(super) const fn events_wait(&self) -> bool {
        self.events_wait
    }

    pub(super) fn set_events_wait(&mut self, wait: bool) {
        self.events_wait = wait;
    }

    #[inline]
    pub(super) fn looks(&mut self, now: Instant) {
        self.seen = now;
    }

    pub(super) fn asks(&mut self) {
        self.unasked = 0;
    }

    /// Returns whether to ask the kernel before the first look. While busy-polling that is not
    /// needed: no queue is armed, so the kernel can hold only other events.
    #[inline]
    fn begin(&mut self) -> bool {
        if self.phase != Phase::Spinning {
            return true;
        }
        self.phase = Phase::Unfinished;
        self.unasked = self.unasked.saturating_add(1);
        // A steady flow of completions must not hide other events.
        self.events_wait || self.is_long_unasked()
    }

    const fn is_long_unasked(&self) -> bool {
        self.unasked >= UNASKED
    }

    /// Decides what follows a look. `armed` says whether all queues were armed before it.
    #[inline]
    fn after_look(&mut self, found: Found, armed: bool) -> Next {
        // Completions that are there already raise no wake-up (ibv_req_notify_cq(3)), so take them
        // first.
        if found == Found::More {
            return Next::Look;
        }
        // Not once armed: busy-polling is to save that call.
        if !armed && self.spin.goes_on(found == Found::All, self.seen) {
            self.phase = Phase::Spinning;
            return Next::Spin;
        }
        // Spinning skipped epoll, so an event may be pending there: ask once before the turn ends.
        if self.unasked > 0 {
            return Next::Ask;
        }
        // What arrived since the last look raises no wake-up either, so arming is followed by a
        // look.
        if !armed {
            return Next::Arm;
        }
        // Everything that came before arming is taken, and what comes later raises a wake-up.
        self.phase = Phase::Armed;
        Next::Rest
    }
}

/// The steps of a turn, and their order.
pub(super) trait Turns {
    type Error;

    fn awake(&mut self) -> &mut Awake;

    /// Asks the kernel for events, or sleeps until `limit`. Returns whether a waker was called.
    fn ask(&mut self, limit: Option<Duration>) -> Result<bool, Self::Error>;

    /// Takes what has arrived, without asking the kernel. With `arms`, arms each queue before
    /// polling it: the poll finds earlier arrivals, and later ones make the descriptor readable.
    fn look(&mut self, arms: bool) -> Result<Found, Self::Error>;

    fn any_armed(&self) -> bool;

    fn any_deaf(&self) -> bool;

    /// Returns how long there is no work if nothing arrives. `None` means for ever.
    fn idle_for(&self) -> Option<Duration>;

    /// Takes what has arrived, within bounds, and arms for the rest. Without busy-polling it arms
    /// first, so that one look is enough if it takes everything.
    #[inline(always)]
    fn turn(&mut self) -> Result<(), Self::Error> {
        // A queue that is armed may have raised its wake-up, which disarmed it. Only the kernel
        // knows.
        let mut asks = self.awake().begin() || self.any_armed();
        let mut arms = self.awake().spin.is_off();
        for _ in 0..ROUNDS {
            if std::mem::take(&mut asks) {
                self.ask(Some(Duration::ZERO))?;
            }
            let found = self.look(arms)?;
            match self.awake().after_look(found, arms) {
                Next::Look => {}
                Next::Ask => asks = true,
                Next::Arm => arms = true,
                Next::Spin | Next::Rest => return Ok(()),
            }
        }
        // Bounded, because an event loop has other work, too (VR-RES-007). The next turn goes on.
        self.awake().has_more();
        Ok(())
    }

    /// Sleeps until there is work, at most for `limit`, and does it. With `asks`, the kernel is
    /// asked after some turns that took completions, whose steady flow would hide other events.
    fn sleep(&mut self, limit: Option<Duration>, asks: bool) -> Result<(), Self::Error> {
        let awake = self.awake();
        awake.unasked = awake.unasked.saturating_add(1);
        let asks = asks && awake.is_long_unasked();
        // A waker ends the wait that finds its call, although nothing has arrived.
        if asks && self.ask(Some(Duration::ZERO))? || self.look_for(limit)? {
            self.awake().has_more();
            return Ok(());
        }
        // It found work: what is left behind that may raise no wake-up.
        if self.look(true)? != Found::Nothing {
            self.awake().has_more();
            return Ok(());
        }
        // Before `idle_for`, to which another phase means work.
        self.awake().phase = Phase::Armed;
        let limit = match (self.idle_for(), limit) {
            (Some(idle), Some(limit)) => Some(idle.min(limit)),
            (idle, limit) => idle.or(limit),
        };
        self.ask(limit)?;
        let found = self.look(false)? != Found::Nothing;
        // Arm only before sleeping, not for a caller that continues at once.
        let deaf = self.any_deaf();
        let awake = self.awake();
        awake.spin.goes_on(found, awake.seen);
        awake.phase = if deaf { Phase::Unfinished } else { Phase::Armed };
        Ok(())
    }

    /// Busy-polls for an arrival, within `limit` and the spin limit. Returns whether one came.
    fn look_for(&mut self, limit: Option<Duration>) -> Result<bool, Self::Error> {
        let mut begun = None;
        loop {
            let found = self.look(false)? != Found::Nothing;
            let deaf = self.any_deaf();
            let awake = self.awake();
            let by = begun.get_or_insert_with(|| limit.map(|limit| awake.seen.after(limit)));
            // If every queue is armed, sleeping costs no further call of the device.
            let goes_on = awake.spin.goes_on(found, awake.seen) && deaf;
            if found || !goes_on || by.is_some_and(|by| awake.seen >= by) {
                return Ok(found);
            }
            std::hint::spin_loop();
        }
    }
}
