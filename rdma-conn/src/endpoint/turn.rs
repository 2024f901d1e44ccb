//! The turns of an endpoint: what has come is taken out of queues and channels, in the order that never sleeps on work.

use std::time::Duration;

use arrayvec::ArrayVec;
use rdma_backend::time::Instant;
use rdma_backend::{CmEvent, CmEventKind, CompletionError, EventChannel};

use super::awake::{Awake, Found, Turns};
use super::queues::{Lost, UNNAMED};
use super::watch::Woken;
use super::{ACCEPTS, ConnectionId, Descriptors, Endpoint};
use crate::connection::BATCH;
use crate::error::Error;

/// How long an endpoint that is never idle puts off looking for when its connections want to be handled: what they do meanwhile
/// nearly always puts that off too.
const NOTING: Duration = Duration::from_millis(1);

/// Failures to read events, one after another, with which an endpoint is lost. One may be that of a
/// single request (VR-SEC-004).
const FAILURES: u32 = 10;

/// How long no event is read after a failure for want of memory or descriptors.
const REST: Duration = Duration::from_millis(20);

#[cold]
fn note_loss(losses: &mut Option<Vec<Lost>>, lost: Lost) {
    losses.get_or_insert_default().push(lost);
}

/// The order of [`Turns::turn`] and [`Turns::sleep`] never sleeps on work.
impl<B: Descriptors> Turns for Endpoint<B> {
    type Error = Error;

    #[inline(always)]
    fn awake(&mut self) -> &mut Awake {
        &mut self.awake
    }

    #[inline(always)]
    fn ask(&mut self, limit: Option<Duration>) -> Result<bool, Error> {
        self.accepts = ACCEPTS;
        self.usage.sleeps += 1;
        self.awake.asks();
        let (mut limit, mut waker) = (limit, false);
        loop {
            let (queues, awake) = (&mut self.queues, &mut self.awake);
            let mut losses: Option<Vec<Lost>> = None;
            let all = self.watch.sleep(limit, |woken| match woken {
                Woken::Events => awake.set_events_wait(true),
                Woken::Waker => waker = true,
                Woken::Queue(at) => {
                    if let Err(lost) = queues.take_wakeups(at) {
                        note_loss(&mut losses, *lost);
                    }
                }
            })?;
            if let Some(losses) = losses {
                self.lose_all(losses);
            }
            if all {
                if !self.touched.is_empty() {
                    self.note_times();
                }
                return Ok(waker);
            }
            limit = Some(Duration::ZERO);
        }
    }

    #[inline(always)]
    fn look(&mut self) -> Result<Found, Error> {
        let now = self.backend.now();
        self.awake.looks(now);
        let mut found = Found::Nothing;
        let mut nth = 0;
        while let Some(at) = self.queues.awake(nth) {
            found = found.max(self.take_batch(at, now));
            nth += 1;
        }
        self.look_beyond(found, now)
    }

    #[inline(always)]
    fn arm(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut nth = 0;
        while let Some(at) = self.queues.awake(nth) {
            nth += 1;
            any |= self.arm_queue(at);
        }
        Ok(any)
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
    /// Takes what has come for any connection, handles time, and posts what can be posted, within
    /// bounds (VR-RES-007): what is left makes [`Endpoint::next_timeout`] say now.
    ///
    /// # Errors
    /// The event channel is lost: connection-manager events cannot be read, time and again. What a
    /// single connection does wrong ends only that one, and what befalls a completion queue ends
    /// those that share it.
    pub fn progress(&mut self) -> Result<(), Error> {
        self.usage.turns += 1;
        self.turn()
    }

    /// Sleeps until there is something to do, at most for `limit`, and does it.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        self.usage.turns += 1;
        // A face's one connection has no other events to wait for: when it ends, no more completions come.
        self.sleep(limit, !self.quiet)
    }

    /// Arms the queue at `at` if it has had its wake-up. Returns whether it was armed now, or is lost.
    #[inline]
    fn arm_queue(&mut self, at: usize) -> bool {
        let Some(queue) = self.queues.get_mut(at) else { return false };
        match queue.rearm() {
            Ok(armed) => {
                self.usage.arms += u64::from(armed);
                armed
            }
            Err(lost) => {
                self.lose(*lost);
                true
            }
        }
    }

    /// Takes what has come for one connection and those that share its queue, before anybody was woken by it: what this costs does
    /// not depend on how many queues there are.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    #[inline]
    pub(crate) fn look_at(&mut self, id: ConnectionId) -> Result<(), Error> {
        let now = self.backend.now();
        if let Some(at) = self.members.get(id.0).and_then(|member| member.queue) {
            self.take_batch(at, now);
        }
        self.look_beyond(Found::Nothing, now).map(drop)
    }

    /// Takes events and handles time, when the queues were looked at.
    #[inline]
    fn look_beyond(&mut self, mut found: Found, now: Instant) -> Result<Found, Error> {
        if self.awake.events_wait() || !self.suspects.is_empty() {
            found = found.max(self.look_at_events(now)?);
        }
        if self.has_due(now) {
            found = found.max(self.handle_times(now));
        }
        Ok(found)
    }

    /// Takes connection-manager events, and judges the failures that they explain or not.
    #[cold]
    fn look_at_events(&mut self, now: Instant) -> Result<Found, Error> {
        let any = self.take_events(now)?;
        // An event that was not read yet may tell why they failed.
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

    #[cold]
    fn lose_all(&mut self, losses: Vec<Lost>) {
        for lost in losses {
            self.lose(lost);
        }
    }

    /// A call on a queue has failed: that ends the connections whose completions it had, and no others.
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

    /// Takes a batch of completions from a queue.
    #[inline(always)]
    pub(super) fn take_batch(&mut self, at: usize, now: Instant) -> Found {
        let Some(queue) = self.queues.get_mut(at) else { return Found::Nothing };
        self.usage.polls += 1;
        match queue.poll(&mut self.batch) {
            Ok(0) => Found::Nothing,
            Ok(count) => self.handle_batch(at, count, now),
            Err(lost) => {
                self.lose(*lost);
                Found::More
            }
        }
    }

    /// Hands the first `count` completions of the batch, which came from the queue at `at`, to their connections.
    fn handle_batch(&mut self, at: usize, count: usize, now: Instant) -> Found {
        let Some(queue) = self.queues.get_mut(at) else { return Found::Nothing };
        let mut others = ArrayVec::<ConnectionId, BATCH>::new();
        let mut unnamed = None;
        let mut rest = self.batch.get(..count).unwrap_or_default();
        while let Some(first) = rest.first() {
            // Those of one queue pair that come one behind the other.
            let len = rest.iter().take_while(|other| other.queue_pair == first.queue_pair).count();
            let (run, behind) = rest.split_at(len);
            rest = behind;
            let Some(id) = queue.owner(first.queue_pair) else {
                // The last ones of a queue pair that is gone, or failures that do not say whose they are.
                if first.queue_pair == UNNAMED {
                    unnamed = run.iter().find_map(|completion| completion.result.err()).or(unnamed);
                }
                continue;
            };
            let Some(member) = self.members.get_mut(id.0) else { continue };
            let Some(connection) = &mut member.connection else { continue };
            if connection.handle_completions(now, run) {
                if connection.is_suspect() {
                    self.suspects.push(id);
                }
                // There are at most as many runs as completions in a batch.
                _ = others.try_push(id);
            } else if !self.quiet && member.notice_bytes() {
                self.telling.push_back(id);
            }
        }
        for id in &others {
            self.settle(*id);
        }
        if let Some(failure) = unnamed {
            self.find_failed(at, failure);
        }
        if count < BATCH { Found::All } else { Found::More }
    }

    /// A failure has come out of the queue at `at` that does not say whose it is: those of its
    /// connections have failed whose queue pairs are in the error state.
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

    /// Takes connection-manager events, until as many requests for a connection were answered as may be; true if there were any.
    fn take_events(&mut self, now: Instant) -> Result<bool, Error> {
        let mut any = false;
        while self.accepts > 0 && self.requests.is_none() && now >= self.rests_until {
            let event = match self.events.next_event() {
                Ok(event) => event,
                Err(error) => {
                    self.events_failed(Error::backend("reading connection events")(error), now)?;
                    break;
                }
            };
            self.failures = 0;
            let Some(CmEvent { id: key, kind, .. }) = event else {
                self.awake.set_events_wait(false);
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
                    // What the peer sent before counts as such (VR-CLOSE-002): it is among the completions that are there now.
                    if let Some(at) = self.members.get(id.0).and_then(|member| member.queue) {
                        for _ in 0..self.queues.batches(at) {
                            if self.take_batch(at, now) != Found::More {
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
        // The rest in the next turn.
        self.awake.set_events_wait(true);
        Ok(any)
    }

    /// An event could not be read, which the listeners are told: a later attempt may do better. It
    /// does not where that has failed too often; and a face of one connection has its own call say
    /// so.
    #[cold]
    fn events_failed(&mut self, error: Error, now: Instant) -> Result<(), Error> {
        self.failures += u32::from(!error.is_shortage());
        if self.quiet || self.failures >= FAILURES {
            return Err(error);
        }
        tracing::warn!(%error, "connection events cannot be read now");
        // Who hands requests over asks again as it likes, and is told each time.
        if error.is_shortage() && !self.listeners.values().any(|listening| listening.hands_over) {
            self.rests_until = now.after(REST);
        }
        let listeners: Vec<_> = self.listeners.keys().copied().collect();
        for listener in listeners {
            self.accept_failed(listener, error.clone());
        }
        Ok(())
    }

    /// Notes when connections want to be handled whose times may have changed.
    fn note_times(&mut self) {
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

    /// Returns whether [`Endpoint::handle_times`] has anything to do.
    #[inline]
    fn has_due(&self, now: Instant) -> bool {
        now >= self.note_by && !self.touched.is_empty() || self.timers.nearest().is_some_and(|at| at <= now)
    }

    /// Handles the time of all whose time has come.
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
                member.handle_time(now);
                self.touch(id);
                self.settle(id);
                found = Found::More;
            }
        }
        found
    }
}
