//! The turns of an endpoint: what has come is taken out of queues and channels, in the order that never sleeps on work.

use std::cmp::Reverse;
use std::time::Duration;

use arrayvec::ArrayVec;
use rdma_proto::backend::{CmEvent, CmEventKind, EventChannel};
use rdma_proto::time::Instant;

use super::queues::Lost;
use super::watch::Woken;
use super::{ACCEPTS, ConnectionId, Descriptors, Endpoint};
use crate::connection::BATCH;
use crate::error::Error;

/// Times that [`Endpoint::progress`] looks at its queues before it lets the event loop have a turn.
const ROUNDS: u32 = 64;

/// How long an endpoint that is never idle puts off looking for when its connections want to be handled: what they do meanwhile
/// nearly always puts that off too.
const NOTING: Duration = Duration::from_millis(1);

impl<B: Descriptors> Endpoint<B> {
    /// Takes what has come for any connection, handles time, and posts what can be posted, within bounds (VR-RES-007): what is
    /// left makes [`Endpoint::next_timeout`] say now.
    ///
    /// # Errors
    /// The event channel is lost. What a single connection does wrong ends only that one, and what befalls a completion queue
    /// ends those that share it.
    pub fn progress(&mut self) -> Result<(), Error> {
        self.begin_turn(Some(Duration::ZERO))?;
        for _ in 0..ROUNDS {
            if !self.round()? {
                self.unfinished = false;
                return Ok(());
            }
        }
        self.unfinished = true;
        Ok(())
    }

    /// Sleeps until there is something to do, at most for `limit`, and does it.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        if self.round()? {
            self.usage.turns += 1;
            self.unfinished = true;
            return Ok(());
        }
        self.unfinished = false;
        let due = self.next_timeout().map(|at| at.since(self.now()));
        let limit = match (due, limit) {
            (Some(due), Some(limit)) => Some(due.min(limit)),
            (due, limit) => due.or(limit),
        };
        self.begin_turn(limit)?;
        self.look()?;
        // Armed again when somebody wants to sleep, and not for whoever goes on at once.
        self.unfinished = self.queues.iter().any(|queue| queue.is_deaf());
        Ok(())
    }

    /// Takes what has come, and if that is nothing, arms what is not armed and looks again: what comes from then on makes the
    /// descriptor readable, and what came before is found now. True if anything came. This is the order that never sleeps on
    /// work (VR-FLOW-013).
    fn round(&mut self) -> Result<bool, Error> {
        Ok(self.look()? || self.arm_all() && self.look()?)
    }

    /// Sleeps, for at most `limit`, and takes wake-ups off the channels.
    fn begin_turn(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        self.usage.turns += 1;
        self.accepts = ACCEPTS;
        let mut limit = limit;
        loop {
            let all = self.watch.sleep(limit)?;
            while let Some(woken) = self.watch.woken() {
                match woken {
                    Woken::Events => self.events_wait = true,
                    Woken::Queue(at) => {
                        let taken = self.queues.get_mut(at).map_or(Ok(()), |queue| queue.take_wakeups());
                        self.unless_lost(taken);
                    }
                }
            }
            if all {
                self.note_times();
                return Ok(());
            }
            limit = Some(Duration::ZERO);
        }
    }

    /// Takes what has come, without asking the kernel and without arming anything; true if anything had.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    fn look(&mut self) -> Result<bool, Error> {
        let now = self.backend.now();
        let mut moved = false;
        for at in 0..self.queues.places() {
            let idle = self.queues.get_mut(at).is_none_or(|queue| queue.is_idle());
            moved |= !idle && self.take_batch(at, now);
        }
        self.look_beyond(moved, now)
    }

    /// Takes what has come for one connection and those that share its queue, before anybody was woken by it: what this costs does
    /// not depend on how many queues there are. True if anything had.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub(crate) fn look_at(&mut self, id: ConnectionId) -> Result<bool, Error> {
        let now = self.backend.now();
        let queue = self.members.get(id).and_then(|member| member.queue);
        let moved = queue.is_some_and(|at| self.take_batch(at, now));
        self.look_beyond(moved, now)
    }

    /// Takes events and handles time, when the queues were looked at.
    #[inline]
    fn look_beyond(&mut self, mut moved: bool, now: Instant) -> Result<bool, Error> {
        if self.events_wait || !self.suspects.is_empty() {
            moved |= self.take_events(now)?;
        }
        // An event that was not read yet may tell why they failed.
        if !self.events_wait {
            while let Some(id) = self.suspects.pop() {
                if let Some(connection) =
                    self.members.get_mut(id).and_then(|member| member.connection.as_mut())
                {
                    connection.conclude();
                }
                self.settle(id);
            }
        }
        Ok(moved | self.handle_times(now))
    }

    /// Arms every queue that has had its wake-up; true if there was any.
    fn arm_all(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.queues.places() {
            let armed = self.queues.get_mut(at).map_or(Ok(false), |queue| queue.rearm());
            any |= self.unless_lost(armed).unwrap_or(true);
        }
        any
    }

    /// Returns the value of a call on a queue. If the call failed, the queue is lost: that ends the connections whose completions it
    /// had, and no others.
    fn unless_lost<T>(&mut self, result: Result<T, Lost>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(Lost { error, owners }) => {
                tracing::warn!(connections = owners.len(), %error, "a completion queue is lost");
                for id in owners {
                    if let Some(member) = self.members.get_mut(id) {
                        member.fail(error.clone());
                    }
                    self.settle(id);
                }
                None
            }
        }
    }

    /// Takes a batch of completions from a queue; true if there were any.
    pub(super) fn take_batch(&mut self, at: usize, now: Instant) -> bool {
        let Some(queue) = self.queues.get_mut(at) else { return false };
        self.usage.polls += 1;
        let count = match queue.poll(&mut self.batch) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(lost) => {
                self.unless_lost::<()>(Err(lost));
                return true;
            }
        };
        let mut moved = ArrayVec::<ConnectionId, BATCH>::new();
        let batch = self.batch.get(..count).unwrap_or_default();
        for run in batch.chunk_by(|one, next| one.queue_pair == next.queue_pair) {
            // Nobody's: the last ones of a queue pair that is gone.
            let Some(id) = run.first().and_then(|completion| queue.owner(completion.queue_pair)) else {
                continue;
            };
            if let Some(connection) = self.members.get_mut(id).and_then(|member| member.connection.as_mut()) {
                connection.handle_completions(now, run);
                if connection.is_suspect() {
                    self.suspects.push(id);
                }
                // There are at most as many runs as completions in a batch.
                _ = moved.try_push(id);
            }
        }
        for id in moved {
            self.settle(id);
        }
        true
    }

    /// Takes connection-manager events, until as many requests for a connection were answered as may be; true if there were any.
    fn take_events(&mut self, now: Instant) -> Result<bool, Error> {
        let mut any = false;
        while self.accepts > 0 && self.requests.is_none() {
            let event = self.events.next_event().map_err(Error::backend("reading connection events"))?;
            let Some(CmEvent { id: key, kind }) = event else {
                self.events_wait = false;
                return Ok(any);
            };
            any = true;
            match (kind, self.identifiers.get(&key).copied()) {
                (CmEventKind::ConnectRequest { id, .. }, _) => {
                    self.accepts -= 1;
                    self.request(key, id);
                }
                (CmEventKind::DeviceRemoval, None) => self.accept_failed(key, Error::DeviceRemoved),
                (CmEventKind::Async(event), None) if event.is_fatal() => {
                    self.accept_failed(key, Error::Device { event });
                }
                (_, None) => {}
                (event, Some(id)) => {
                    // What the peer sent before counts as such (VR-CLOSE-002).
                    if let Some(queue) = self.members.get(id).and_then(|member| member.queue) {
                        for _ in 0..ROUNDS {
                            if !self.take_batch(queue, now) {
                                break;
                            }
                        }
                    }
                    let route = self.members.get_mut(id).and_then(|member| member.handle_event(event, now));
                    match route {
                        Some(identifier) => self.ask(id, identifier),
                        None => self.settle(id),
                    }
                }
            }
        }
        // The rest in the next turn.
        self.events_wait = true;
        Ok(any)
    }

    /// Notes when connections want to be handled whose times may have changed.
    fn note_times(&mut self) {
        while let Some(id) = self.touched.pop() {
            let Some(member) = self.members.get_mut(id) else { continue };
            member.touched = false;
            if let Some(at) = member.next_timeout()
                && member.due.is_none_or(|due| at < due)
            {
                member.due = Some(at);
                self.timers.push(Reverse((at, id)));
            }
        }
    }

    /// Handles the time of all whose time has come; true if there were any.
    fn handle_times(&mut self, now: Instant) -> bool {
        if now >= self.note_by {
            self.note_by = now.after(NOTING);
            self.note_times();
        }
        let mut any = false;
        while let Some(Reverse((at, id))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.timers.pop();
            if let Some(member) = self.members.get_mut(id).filter(|member| member.due == Some(at)) {
                member.due = None;
                member.handle_time(now);
                self.settle(id);
                any = true;
            }
        }
        any
    }
}
