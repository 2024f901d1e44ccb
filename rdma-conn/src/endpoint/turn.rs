//! The turns of an endpoint, which take what has arrived out of queues and channels.

use std::mem::MaybeUninit;
use std::time::Duration;

use arrayvec::ArrayVec;
use rdma_backend::time::Instant;
use rdma_backend::{CmEvent, CmEventKind, CompletionError};

use super::awake::{Awake, Found, Turns};
use super::queues::{Lost, UNNAMED};
use super::watch::{MANY, Sources, Woken};
use super::{ACCEPTS, ConnectionId, Descriptors, EVENTS, Endpoint};
use crate::connection::{BATCH, Run};
use crate::error::Error;

/// How long a busy endpoint delays recording due times, since more work nearly always moves them.
const NOTING: Duration = Duration::from_millis(1);

/// Failures to read events in a row that end an endpoint. One may concern one request (VR-SEC-004).
const FAILURES: u32 = 10;

/// How long no event is read after a shortage of memory or descriptors.
const REST: Duration = Duration::from_millis(20);

impl<B: Descriptors> Turns for Endpoint<B> {
    type Error = Error;

    #[inline(always)]
    fn awake(&mut self) -> &mut Awake {
        &mut self.awake
    }

    #[inline(always)]
    fn ask(&mut self, limit: Option<Duration>) -> Result<bool, Error> {
        (self.accepts, self.events_left) = (ACCEPTS, EVENTS);
        self.usage.sleeps += 1;
        self.awake.asks();
        let (mut limit, mut waker) = (limit, false);
        let mut buffer: Sources = [const { MaybeUninit::uninit() }; MANY];
        loop {
            let Some(sources) = self.watch.sleep(limit, &mut buffer)? else {
                self.ask_each();
                break;
            };
            for source in sources {
                match Woken::from(source) {
                    Woken::Events => self.awake.set_events_wait(true),
                    Woken::Waker => {
                        // Level-triggered: it would end the next sleep, too.
                        self.watch.clear_waker();
                        waker = true;
                    }
                    Woken::Queue(at) => {
                        if let Err(lost) = self.queues.take_wakeups(at) {
                            self.lose(*lost);
                        }
                    }
                }
            }
            if sources.len() < MANY {
                break;
            }
            limit = Some(Duration::ZERO);
        }
        if !self.touched.is_empty() {
            self.note_times();
        }
        Ok(waker)
    }

    #[inline(always)]
    fn look(&mut self, arms: bool) -> Result<Found, Error> {
        let now = self.backend.now();
        self.awake.looks(now);
        let mut found = Found::Nothing;
        let mut nth = 0;
        while let Some(at) = self.queues.awake(nth) {
            found = found.max(self.take_batch(at, now, arms));
            nth += 1;
        }
        self.look_beyond(found, now)
    }

    fn any_armed(&self) -> bool {
        self.queues.iter().any(|queue| !queue.is_deaf())
    }

    fn any_deaf(&self) -> bool {
        self.queues.any_deaf()
    }

    fn idle_for(&self) -> Option<Duration> {
        self.next_timeout().map(|at| at.since(self.now()))
    }
}

impl<B: Descriptors> Endpoint<B> {
    /// Takes what has arrived for any connection, handles timers, and posts what can be posted.
    ///
    /// A call is bounded (VR-RES-007). If some work is left, [`Endpoint::next_timeout`] returns the
    /// current time.
    ///
    /// # Errors
    /// Returns an error if the event channel is lost: connection-manager events repeatedly cannot
    /// be read. Also returns an error if `epoll_wait(2)` fails. A failure of one connection ends
    /// only that connection. A failure of a completion queue ends only the connections that share
    /// it.
    // An event loop calls it in one place. As a function of its own, a turn costs 24 instructions
    // more (`benches/counts`).
    #[inline(always)]
    pub fn progress(&mut self) -> Result<(), Error> {
        Error::unless_forked()?;
        self.usage.turns += 1;
        self.turn()
    }

    /// Sleeps until there is something to do, and does it. Sleeps for at most `limit`; `None` is
    /// without a limit.
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::progress`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        Error::unless_forked()?;
        self.usage.turns += 1;
        // A stream's single connection has no other events: when it ends, completions stop.
        self.sleep(limit, !self.quiet)
    }

    /// Polls the queue of one connection, without waiting for a wake-up. Other connections on that
    /// queue progress, too. The cost does not depend on the number of queues.
    #[inline]
    pub(crate) fn look_at(&mut self, id: ConnectionId) -> Result<(), Error> {
        let queue = self.members.get(id.0).and_then(|member| member.queue);
        let now = self.backend.now();
        if let Some(at) = queue {
            self.take_batch(at, now, false);
        }
        self.look_beyond(Found::Nothing, now).map(drop)
    }

    #[inline]
    fn look_beyond(&mut self, mut found: Found, now: Instant) -> Result<Found, Error> {
        if self.awake.events_wait() || !self.suspects.is_empty() {
            found = found.max(self.look_at_events(now)?);
        }
        if self.has_due(now) {
            found = found.max(self.handle_times(now));
        }
        if self.newcomers.due() <= now {
            self.see_to_newcomers(now);
        }
        Ok(found)
    }

    /// Takes connection-manager events, which may explain the failures of `suspects`.
    #[cold]
    fn look_at_events(&mut self, now: Instant) -> Result<Found, Error> {
        let any = self.take_events(now)?;
        // All events are read, so that none can explain these failures any more (VR-CLOSE-009).
        if !self.awake.events_wait() {
            while let Some(id) = self.suspects.pop() {
                if let Some(connection) =
                    self.members.get_mut(id.0).and_then(|member| member.connection.as_mut())
                {
                    connection.conclude();
                }
                self.settle(id);
            }
        }
        Ok(if any { Found::More } else { Found::Nothing })
    }

    /// Ends the connections of a queue on which a call failed, and no others.
    #[cold]
    fn lose(&mut self, Lost { error, owners }: Lost) {
        tracing::warn!(connections = owners.len(), %error, "a completion queue is lost");
        for id in owners {
            if let Some(member) = self.members.get_mut(id.0) {
                member.fail(error.clone());
            }
            self.settle(id);
        }
    }

    /// Hands a batch of completions from a queue to their connections. With `arms`, first arms it.
    pub(super) fn take_batch(&mut self, at: usize, now: Instant, arms: bool) -> Found {
        let Some(queue) = self.queues.get_mut(at).filter(|queue| !queue.is_lost()) else {
            return Found::Nothing;
        };
        if arms && queue.is_deaf() {
            self.usage.arms += 1;
            if let Err(lost) = queue.arm() {
                self.lose(*lost);
                return Found::More;
            }
        }
        self.usage.polls += 1;
        let mut lost = None;
        let Ok(mut polled) = queue.poll(&mut self.batch).map_err(|why| lost = Some(why)) else {
            if let Some(lost) = lost {
                self.lose(*lost);
            }
            return Found::More;
        };
        let count = polled.len();
        if count == 0 {
            return Found::Nothing;
        }
        let mut others = ArrayVec::<ConnectionId, BATCH>::new();
        let mut unnamed = None;
        // Consecutive completions of one queue pair are handled together.
        while let Some(run) = Run::next(&mut polled) {
            let Some(id) = queue.owner(run.queue_pair) else {
                // Leftovers of a destroyed queue pair, or failures without an owner.
                if run.queue_pair == UNNAMED {
                    unnamed = run.completions().find_map(|completion| completion.result.err()).or(unnamed);
                }
                continue;
            };
            let Some(member) = self.members.get_mut(id.0) else { continue };
            let Some(connection) = &mut member.connection else { continue };
            if connection.handle_completions(now, run) {
                if connection.is_suspect() {
                    self.suspects.push(id);
                }
                // A batch has at most as many runs as completions.
                _ = others.try_push(id);
            } else if !self.quiet && member.notice_bytes() {
                self.telling.push_back(id);
            }
        }
        drop(polled);
        // After the loop: this may destroy a connection, and with it a place in the queue.
        for id in &others {
            self.settle(*id);
        }
        if let Some(failure) = unnamed {
            self.find_failed(at, failure);
        }
        if count < BATCH { Found::All } else { Found::More }
    }

    /// Takes wake-ups out of the sources of an endpoint that has no epoll instance.
    fn ask_each(&mut self) {
        if self.events.is_filled() {
            self.awake.set_events_wait(true);
        }
        for at in 0..self.queues.places() {
            // A queue that is not armed has no wake-up, or none that must be taken now.
            if self.queues.get(at).is_some_and(|queue| !queue.is_deaf() && !queue.is_lost())
                && let Err(lost) = self.queues.take_wakeups(at)
            {
                self.lose(*lost);
            }
        }
    }

    /// Finds whose failure it is, if it names no queue pair: those in the error state have failed.
    #[cold]
    fn find_failed(&mut self, at: usize, failure: CompletionError) {
        let owners = self.queues.get_mut(at).map(|queue| queue.owners()).unwrap_or_default();
        for id in owners {
            let connection = self.members.get_mut(id.0).and_then(|member| member.connection.as_mut());
            if connection.is_some_and(|connection| connection.has_failed_by(failure)) {
                self.suspects.push(id);
            }
        }
    }

    /// Takes connection-manager events, up to the limits of a turn. Returns whether there were any.
    fn take_events(&mut self, now: Instant) -> Result<bool, Error> {
        let mut any = false;
        // A request that is handed over waits for its caller. The others wait in the channel.
        while self.accepts > 0 && self.events_left > 0 && self.requests.is_none() && now >= self.rests_until {
            let event = match self.events.next_event() {
                Ok(event) => event,
                Err(error) => {
                    self.events_failed(error, now)?;
                    break;
                }
            };
            self.failures = 0;
            let Some(CmEvent { id: key, kind, .. }) = event else {
                self.awake.set_events_wait(false);
                return Ok(any);
            };
            any = true;
            self.events_left -= 1;
            match (kind, self.identifiers.get(&key).copied()) {
                (CmEventKind::ConnectRequest { id, .. }, _) => self.request(key, id, now),
                (CmEventKind::DeviceRemoval, None) => self.accept_failed(key, Error::DeviceRemoved),
                (CmEventKind::Async(event), None) if event.is_fatal() => {
                    self.accept_failed(key, Error::Device { event });
                }
                // Of a connection that was forgotten, or a listener that goes on.
                (_, None) => {}
                (event, Some(id)) => {
                    // What the peer sent before counts as received (VR-CLOSE-002). It is here now.
                    if let Some(at) = self.members.get(id.0).and_then(|member| member.queue) {
                        // As many as a full queue has: completions that come later do not hold up
                        // the event.
                        for _ in 0..self.queues.batches(at) {
                            if self.take_batch(at, now, false) != Found::More {
                                break;
                            }
                        }
                    }
                    let route = self.members.get_mut(id.0).and_then(|member| member.handle_event(event, now));
                    match route {
                        Some(identifier) => self.ask(id, identifier),
                        None => self.settle(id),
                    }
                }
            }
        }
        // The rest is for the next turn.
        self.awake.set_events_wait(true);
        Ok(any)
    }

    /// Reports a failure to read an event to the listeners. Returns the error after too many in a
    /// row, or for a stream, whose own call returns it.
    #[cold]
    fn events_failed(&mut self, error: Error, now: Instant) -> Result<(), Error> {
        self.failures += u32::from(!error.is_shortage());
        if self.quiet || self.failures >= FAILURES {
            return Err(error);
        }
        tracing::warn!(%error, "connection events cannot be read now");
        // A program that takes requests itself retries at its own pace, and gets each error.
        if error.is_shortage() && !self.listeners.values().any(|listening| listening.hands_over) {
            self.rests_until = now.after(REST);
        }
        let listeners: Vec<_> = self.listeners.keys().copied().collect();
        for listener in listeners {
            self.accept_failed(listener, error.clone());
        }
        Ok(())
    }

    fn note_times(&mut self) {
        // Only nearer times are recorded. A recorded one that has moved away costs one visit.
        while let Some(id) = self.touched.pop() {
            let Some(member) = self.members.get_mut(id.0) else { continue };
            member.touched = false;
            if let Some(at) = member.next_timeout()
                && member.due.is_none_or(|due| at < due)
            {
                self.timers.set(id, &mut member.due, Some(at));
            }
        }
    }

    #[inline]
    fn has_due(&self, now: Instant) -> bool {
        now >= self.note_by && !self.touched.is_empty() || self.timers.nearest().is_some_and(|at| at <= now)
    }

    #[cold]
    fn handle_times(&mut self, now: Instant) -> Found {
        if now >= self.note_by {
            self.note_by = now.after(NOTING);
            self.note_times();
        }
        let mut found = Found::Nothing;
        while let Some(id) = self.timers.take(now) {
            if let Some(member) = self.members.get_mut(id.0) {
                member.due = None;
                member.handle_time(now, self.awake.events_wait());
                self.touch(id);
                self.settle(id);
                found = Found::More;
            }
        }
        found
    }
}
