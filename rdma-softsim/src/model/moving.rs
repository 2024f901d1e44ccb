//! Messages with an end in another process, whose bytes are moved without the fabric's lock.
//!
//! How long an access to another process takes is up to that process: a page may come late, or
//! never. The model itself therefore never accesses it. It hands out a [`Freight`], which a driver
//! moves step by step. Each step accesses the memory of one end. The message is checked when it
//! arrives, and checked and executed when its bytes are there. Later messages of its queue pair
//! wait, so that the order stays.
//!
//! A message ends before its bytes are there if one of its queue pairs fails or is destroyed, if
//! its target memory is deregistered, or if no access to the memory that it waits for has ended for
//! [`Parameters::reach`](crate::Parameters::reach). Its sender then sees a device that does not
//! answer, or that cannot read its own memory. A mover may be inside the memory of one end at that
//! time. Until it has left, the queue pair at that end is not flushed, and the memory is not given
//! back.

use std::sync::Arc;

use rdma_backend::SendOp;
use rdma_backend::time::Instant;

use super::flights::bulk::Bulk;
use super::flights::carried::Carried;
use super::flights::freight::{End, Freight, Origin, Outcome};
use super::pairs::datagram::Datagram;
use super::pairs::queue_pair::QueuePairState;
use super::pairs::requester::Source;
use super::pairs::responder::Arrival;
use super::regions::memory::Unreachable;
use super::regions::parts::Parts;
use super::{Event, Model, PAUSE, PIECE, PairId, RegionId};
use crate::faults::Fault;

impl Model {
    /// Passes bytes to a driver from now on, which copies and moves them.
    pub(crate) const fn carry_bulks(&mut self) {
        self.flights.drive();
    }

    /// Returns bytes to copy. Call [`Model::end_bulk`] afterwards.
    pub(crate) fn next_bulk(&mut self) -> Option<Bulk> {
        self.flights.next_bulk()
    }

    /// Returns bytes that the caller must move from now on.
    pub(crate) fn next_freight(&mut self) -> Option<Freight> {
        self.flights.next_freight()
    }

    /// Returns whether a message of this queue pair may be being written to its owner's memory.
    pub(crate) fn lands_for(&self, pair: PairId) -> bool {
        self.flights.lands_for(pair)
    }

    /// Returns whether this deregistered region may be being written.
    pub(crate) fn lands_in(&self, region: RegionId) -> bool {
        self.flights.lands_in(region)
    }

    /// Lets the message of copied, or inaccessible, bytes arrive.
    pub(crate) fn end_bulk(&mut self, bulk: &Bulk, copied: bool) {
        let Bulk { from, to, epoch, sequence, .. } = *bulk;
        // First, as in `end_freight`: what this fails is flushed only if no copy counts there.
        for end in [from, to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks -= 1;
            }
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            pair.requester.carrying = false;
        }
        // If it failed, `execute` copies again, and reports the end that cannot be accessed.
        let moved = copied.then_some(Ok(()));
        self.arrive_with(from, epoch, sequence, Arrival { moved, carried: true, ..Arrival::default() });
        if let Some(pair) = self.pairs.get_mut(from) {
            for (epoch, sequence) in pair.requester.behind.drain(..) {
                self.env.schedule(core::time::Duration::ZERO, Event::Arrive { from, epoch, sequence });
            }
        }
        for end in [from, to] {
            // `begin_flush` has waited for the end of the copy.
            if self.pairs.get(end).is_some_and(|pair| pair.state == QueuePairState::Error) {
                self.begin_flush(end);
            }
        }
    }

    /// Starts copying the bytes of an executable message. Returns false if it must be executed at
    /// once.
    pub(super) fn begin_bulk(&mut self, from: PairId, to: PairId, epoch: u32, sequence: u64) -> bool {
        // In a simulation or with a capture it is executed at once: it would pass `arrive_with`
        // twice, and be struck or seen there twice.
        if !self.flights.is_driven()
            || self.env.simulation().is_some()
            || self.capture.is_some()
            || !self.env.parameters().latency.is_zero()
        {
            return false;
        }
        let Some(bulk) = self.pairs.bulk(&self.regions, from, to, epoch, sequence) else { return false };
        for end in [from, to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks += 1;
            }
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            pair.requester.carrying = true;
        }
        self.flights.push_bulk(bulk);
        true
    }

    /// Starts moving the bytes of a message with an end in another process. Returns false if there
    /// are none to move.
    pub(super) fn begin_freight(
        &mut self,
        from: PairId,
        epoch: u32,
        sequence: u64,
        struck: Option<Fault>,
    ) -> bool {
        let Some((to, reads, source, target, len)) = self.pairs.route(
            &self.hosts,
            &self.regions,
            self.capture.is_some(),
            from,
            (epoch, sequence),
            struck,
        ) else {
            return false;
        };
        let Some(work) = self.pairs.flight(from, epoch, sequence) else {
            return false;
        };
        let origin = match (&source, &work.source) {
            (Some(parts), _) => Origin::Memory(self.regions.stretches(parts, len)),
            // Copied: a repetition sends them again.
            (None, Source::Inline(bytes)) => Origin::Inline(bytes.clone()),
            // Never: `Pairs::route` names the source of what is in memory.
            (None, Source::Memory(_)) => return false,
        };
        let onto = target.as_ref().map(|parts| self.regions.stretches(parts, len));
        let sends = matches!(work.op, SendOp::Send | SendOp::SendImmediate(_));
        let atomic = work.atomic;
        // Kept without a bound of memory: they are the datagram, or what an atomic operation found.
        let keeps = work.to.is_some() || atomic.is_some();
        let Some(pair) = self.pairs.get_mut(from) else { return false };
        let repeats = pair.requester.late;
        let patience = match repeats {
            false => self.env.parameters().reach,
            // Given up once: a repetition lasts no longer than the timer of a lost message.
            true => pair
                .requester
                .ack_timeout
                .unwrap_or(self.env.parameters().ack_timeout)
                .min(self.env.parameters().reach),
        };
        // From now on later messages of the queue pair wait in `arrive`.
        pair.requester.carrying = true;
        let reserves = sends && target.is_some();
        let mut freight = self.flights.load(reads, (origin, onto, len), [self.capture.is_some(), keeps]);
        freight.atomic = atomic;
        let changed = source.filter(|_| atomic.is_some());
        let (open, holds, track) = (true, [true; 2], Arc::clone(freight.track()));
        let (datagram, next_look, seen, idle) = (None, Instant::default(), None, 0);
        self.carry(
            freight,
            Carried {
                from,
                to,
                epoch,
                sequence,
                struck,
                reads,
                target,
                changed,
                reserves,
                datagram,
                track,
                open,
                holds,
                patience,
                next_look,
                seen,
                idle,
                repeats,
            },
        );
        true
    }

    /// Starts storing a datagram in the memory of its receiver.
    pub(super) fn begin_storing(&mut self, at: PairId, mut datagram: Datagram, target: Parts) {
        let bytes = core::mem::take(&mut datagram.bytes);
        let len = bytes.len();
        let onto = Some(self.regions.stretches(&target, len));
        if let Some(pair) = self.pairs.get_mut(at) {
            pair.responder.storing = true;
        }
        let freight = self.flights.load(false, (Origin::Inline(bytes), onto, len), [false; 2]);
        let track = Arc::clone(freight.track());
        self.carry(
            freight,
            Carried {
                from: at,
                to: at,
                // No flight of a send queue: `decide` goes by the datagram.
                epoch: 0,
                sequence: 0,
                struck: None,
                reads: false,
                target: Some(target),
                changed: None,
                reserves: true,
                datagram: Some(datagram),
                track,
                open: true,
                holds: [true; 2],
                patience: self.env.parameters().reach,
                next_look: Instant::default(),
                seen: None,
                idle: 0,
                repeats: false,
            },
        );
    }

    /// Moves the bytes, or passes them to the driver.
    fn carry(&mut self, mut freight: Freight, mut carried: Carried) {
        // While it counts, `begin_flush` waits. A datagram counts twice at its receiver.
        for end in [carried.from, carried.to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks += 1;
            }
        }
        if carried.reserves {
            self.pairs.reserve_receive(carried.to);
        }
        carried.look_after(self.env.now());
        let look = carried.next_look;
        self.flights.insert(freight.number(), carried);
        if self.flights.is_driven() {
            self.flights.push_freight(freight);
            self.flights.sweep_at(&mut self.env, look);
        } else {
            // Without a driver, in simulations and tests, the bytes are moved at once.
            while !freight.is_at_its_end() {
                freight.step();
            }
            self.end_freight(freight);
        }
    }

    /// Handles bytes that were moved, could not be, or need not be any more.
    pub(crate) fn end_freight(&mut self, freight: Freight) {
        // `None` if its time had passed.
        let Some(mut carried) = self.flights.remove(freight.number()) else { return };
        let Outcome { moved, seen } = freight.end();
        // First: what `decide` fails is flushed only if no message counts there.
        carried.free(&mut self.pairs, None);
        let struck = Some(carried.struck);
        self.decide(&mut carried, Some(Arrival { struck, moved, seen, carried: true }));
        self.flush_freed(&carried);
    }

    /// Lets the message arrive, or treats it as lost.
    fn decide(&mut self, carried: &mut Carried, mut arrival: Option<Arrival>) {
        let &mut Carried { from, to, epoch, sequence, .. } = carried;
        // Cut short before: its outcome is known, and only its mover was awaited.
        if !core::mem::take(&mut carried.open) {
            return;
        }
        if let Some(datagram) = carried.datagram.take() {
            if let Some(Arrival { moved, .. }) = arrival {
                self.end_storing(to, &datagram, moved == Some(Ok(())));
                self.store_datagrams(to);
            }
            return;
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            pair.requester.carrying = false;
            if let Some(Arrival { moved: Some(moved), seen, .. }) = &mut arrival
                && carried.reads
                && let Some(work) = pair.requester.with_sequence(sequence)
            {
                // Stored already: neither a READ nor an atomic operation is done again.
                work.brought = Some(moved.map(|()| seen.take().unwrap_or_default()));
            }
        }
        match arrival {
            Some(arrival) => self.arrive_with(from, epoch, sequence, arrival),
            None => self.pairs.unanswered(&mut self.env, &mut self.contexts, from, epoch),
        }
        if carried.reserves {
            self.pairs.return_receive(to);
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            // As events: one of them may be moved, too, and those behind it wait again.
            for (epoch, sequence) in pair.requester.behind.drain(..) {
                self.env.schedule(core::time::Duration::ZERO, Event::Arrive { from, epoch, sequence });
            }
        }
    }

    fn flush_freed(&mut self, carried: &Carried) {
        for end in [carried.from, carried.to] {
            if self.pairs.get(end).is_some_and(|pair| pair.state == QueuePairState::Error) {
                self.begin_flush(end);
            }
        }
    }

    /// Ends messages before their bytes are there.
    fn cut_short(&mut self, numbers: Vec<u64>, arrives: bool, gone: PairId) {
        for number in numbers {
            let Some(mut carried) = self.flights.remove(number) else { continue };
            let inside = carried.track.end();
            carried.free(&mut self.pairs, inside);
            // Its requester has failed or gone, and needs no answer.
            if carried.from == gone {
                carried.open = false;
                if carried.reserves {
                    self.pairs.return_receive(carried.to);
                }
            }
            let struck = Some(carried.struck);
            let arrival = Arrival { struck, moved: None, seen: None, carried: true };
            self.decide(&mut carried, arrives.then_some(arrival));
            self.flush_freed(&carried);
            // `lands_in` and `lands_for` must find it until its mover has left.
            if carried.holds.contains(&true) {
                self.flights.insert(number, carried);
            }
        }
    }

    /// Ends the messages from and to a queue pair that fails, is reset or is gone.
    pub(super) fn cut_short_of(&mut self, pair: PairId) {
        let numbers = self.flights.of(pair).map(|(number, _)| number).collect();
        self.cut_short(numbers, false, pair);
        if let Some(pair) = self.pairs.get_mut(pair) {
            // Not done by `decide`: its own messages have no outcome.
            pair.requester.carrying = false;
            pair.responder.storing = false;
            pair.responder.arrived.clear();
        }
    }

    /// Lets messages to a deregistered region arrive, where they find no memory.
    pub(super) fn cut_short_into(&mut self, region: RegionId) {
        let numbers = self.flights.writing_to(region).map(|(number, _)| number).collect();
        // They arrive: the answer of a device without that memory is a refusal, not silence.
        self.cut_short(numbers, true, PairId::NONE);
    }

    /// Looks at the messages whose time has come, and gives up those without progress.
    pub(super) fn sweep(&mut self) {
        let now = self.env.now();
        self.flights.begin_sweep();
        for _ in 0..PIECE {
            let Some((number, mut carried)) = self.flights.take_due(now) else { break };
            if carried.is_late() {
                self.end_late(number, carried);
            } else {
                carried.look_after(now);
                self.flights.insert(number, carried);
            }
        }
        if let Some(next) = self.flights.next_look() {
            // If more are due than one turn may look at, others get the lock in between.
            self.flights.sweep_at(&mut self.env, if next > now { next } else { now.after(PAUSE) });
        }
    }

    pub(crate) fn lose_freight(&mut self, freight: &Freight) {
        if let Some(carried) = self.flights.remove(freight.number()) {
            self.end_late(freight.number(), carried);
        }
    }

    /// Gives up a message with an end that cannot be accessed in time. If it is the requester's,
    /// its device cannot read or write its own memory. If it is the responder's, the requester gets
    /// no answer: its acknowledgement timer ends, and again for each repetition, which gets no more
    /// time than that.
    fn end_late(&mut self, number: u64, mut carried: Carried) {
        let inside = carried.track.end();
        carried.free(&mut self.pairs, inside);
        let arrival = match carried.track.at() {
            // A receiver whose memory is not reached.
            End::Responder if carried.datagram.is_some() => Some(Arrival::default()),
            // An atomic operation may have been done, and is not repeated. A repetition had too
            // little time to show that the requester's own memory is out of reach.
            at if carried.changed.is_some() || (at == End::Requester && !carried.repeats) => {
                let target = at == carried.target_end();
                let moved = Some(Err(if target { Unreachable::Target } else { Unreachable::Source }));
                Some(Arrival { struck: Some(carried.struck), moved, seen: None, carried: true })
            }
            End::Requester | End::Responder => {
                if let Some(pair) = self.pairs.get_mut(carried.from) {
                    pair.requester.late = true;
                }
                None
            }
        };
        self.decide(&mut carried, arrival);
        self.flush_freed(&carried);
        // A mover in the memory of an end may still write there.
        if carried.holds.contains(&true) {
            self.flights.insert(number, carried);
        }
    }
}
