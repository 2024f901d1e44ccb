//! Messages with an end in another process, whose bytes are moved without the fabric's lock.
//!
//! How long an access to another process takes is up to that process: a page may come late, or
//! never. The model itself therefore never accesses it. It hands out a [`Freight`], which a driver
//! moves step by step. Each step accesses the memory of one end. The message is checked when it
//! arrives, and checked and executed when its bytes are there. Later messages of its queue pair
//! wait, so that the order stays.
//!
//! A message ends before its bytes are there if one of its queue pairs fails or is destroyed, if
//! its target memory is deregistered, or when [`Parameters::reach`](crate::Parameters::reach) has
//! passed. Its sender then sees a device that does not answer, or that cannot read its own memory.
//! A mover may be inside the memory of one end at that time. Until it has left, the queue pair at
//! that end is not flushed, and a thread that takes the memory away waits.

use core::cmp::Ordering;
use std::sync::Arc;

use rdma_backend::time::Instant;
use rdma_backend::{Access, SendOp};

use super::datagrams::{Datagram, MTU};
use super::freight::{End, Freight, Origin, Outcome, Stretch, Track};
use super::memory::{Bytes, Unreachable};
use super::parts::{Part, Parts};
use super::queue_pair::{ATOMIC, QueuePairState};
use super::requester::{SendWork, Source};
use super::responder::Arrival;
use super::{Event, Model, PairId, RegionId};
use crate::faults::Fault;

const ENDS: [End; 2] = [End::Requester, End::Responder];

/// A message whose bytes are in flight, or one of whose ends waits for a last step.
pub(super) struct Carried {
    from: PairId,
    to: PairId,
    epoch: u32,
    sequence: u64,
    struck: Option<Fault>,
    reads: bool,
    target: Option<Parts>,
    /// What it changes at the responder, if it is an atomic operation.
    changed: Option<Parts>,
    /// Whether a receive was reserved for it.
    reserves: bool,
    /// The datagram, of one that is being stored at its receiver: both ends are the receiver's.
    datagram: Option<Datagram>,
    track: Arc<Track>,
    /// Whether the message has no outcome yet.
    open: bool,
    /// Which ends still count it, the requester first.
    holds: [bool; 2],
    deadline: Instant,
    /// Whether it was given up before, and gets less time.
    repeats: bool,
}

impl Carried {
    const fn pair(&self, end: End) -> PairId {
        match end {
            End::Requester => self.from,
            End::Responder => self.to,
        }
    }

    const fn target_end(&self) -> End {
        if self.reads { End::Requester } else { End::Responder }
    }

    /// Returns what it writes at this end.
    fn written(&self, end: End) -> Option<&Parts> {
        if end == self.target_end() { self.target.as_ref() } else { self.changed.as_ref() }
    }

    /// Returns whether it writes to a region at this end.
    fn writes_to(&self, end: End, region: RegionId) -> bool {
        self.written(end).is_some_and(|written| written.touch(region))
    }
}

impl Model {
    /// Starts moving the bytes of a message with an end in another process. Returns false if there
    /// are none to move.
    pub(super) fn begin_freight(
        &mut self,
        from: PairId,
        epoch: u32,
        sequence: u64,
        struck: Option<Fault>,
    ) -> bool {
        let Some((to, reads, source, target, len)) = self.route(from, epoch, sequence, struck) else {
            return false;
        };
        let Some(work) = self.pairs.get(from).and_then(|pair| pair.requester.flight(epoch, sequence)) else {
            return false;
        };
        let origin = match (&source, &work.source) {
            (Some(parts), _) => Origin::Memory(self.stretches(parts, len)),
            (None, Source::Inline(bytes)) => Origin::Inline(bytes.clone()),
            (None, Source::Memory(_)) => return false,
        };
        let onto = target.as_ref().map(|parts| self.stretches(parts, len));
        let sends = matches!(work.op, SendOp::Send | SendOp::SendImmediate(_));
        let atomic = work.atomic;
        let keeps = work.to.is_some() || atomic.is_some();
        let Some(pair) = self.pairs.get_mut(from) else { return false };
        let repeats = pair.requester.late;
        let reach = match repeats {
            false => self.parameters.reach,
            true => {
                pair.requester.ack_timeout.unwrap_or(self.parameters.ack_timeout).min(self.parameters.reach)
            }
        };
        pair.requester.carrying = true;
        let reserves = sends && target.is_some();
        let mut freight = self.load(reads, (origin, onto, len), [self.capture.is_some(), keeps]);
        freight.atomic = atomic;
        let changed = source.filter(|_| atomic.is_some());
        let deadline = self.event_queue.now().after(reach);
        let (open, holds, track) = (true, [true; 2], Arc::clone(freight.track()));
        let datagram = None;
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
                deadline,
                repeats,
            },
        );
        true
    }

    /// Starts storing a datagram in the memory of its receiver.
    pub(super) fn begin_storing(&mut self, at: PairId, mut datagram: Datagram, target: Parts) {
        let bytes = core::mem::take(&mut datagram.bytes);
        let len = bytes.len();
        let onto = Some(self.stretches(&target, len));
        if let Some(pair) = self.pairs.get_mut(at) {
            pair.responder.storing = true;
        }
        let freight = self.load(false, (Origin::Inline(bytes), onto, len), [false; 2]);
        let track = Arc::clone(freight.track());
        self.carry(
            freight,
            Carried {
                from: at,
                to: at,
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
                deadline: self.event_queue.now().after(self.parameters.reach),
                repeats: false,
            },
        );
    }

    fn load(
        &mut self,
        reads: bool,
        bytes: (Origin, Option<Vec<Stretch>>, usize),
        [captured, keeps]: [bool; 2],
    ) -> Freight {
        self.freight_count += 1;
        Freight::new(self.freight_count, reads, bytes, [captured, keeps], &self.store)
    }

    /// Moves the bytes, or passes them to the driver.
    fn carry(&mut self, mut freight: Freight, carried: Carried) {
        for end in [carried.from, carried.to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks += 1;
            }
        }
        if carried.reserves {
            self.reserve_receive(carried.to);
        }
        let deadline = carried.deadline;
        self.carried.insert(freight.number(), carried);
        if self.carries {
            self.freights.push_back(freight);
            self.sweep_at(deadline);
        } else {
            while !freight.is_at_its_end() {
                freight.step();
            }
            self.end_freight(freight);
        }
    }

    /// Returns the responder of a message with an end in another process, whether it is a READ, the
    /// source of its bytes if not the request, their target if it can be executed, and their
    /// number. Those of a datagram are only read: its own queue pair is at both ends.
    #[expect(clippy::type_complexity, reason = "taken apart at once")]
    fn route(
        &self,
        from: PairId,
        epoch: u32,
        sequence: u64,
        struck: Option<Fault>,
    ) -> Option<(PairId, bool, Option<Parts>, Option<Parts>, usize)> {
        let pair = self.pairs.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        let len = work.len;
        let to = match work.to {
            Some(_) if len > MTU => return None,
            Some(_) => from,
            None => pair.path?.peer,
        };
        let refused = matches!(
            struck,
            Some(Fault::KeyRefused | Fault::RequestRefused | Fault::ReceiveGone | Fault::Lose)
        );
        let heard = !refused && self.listening(from, epoch, sequence) == Some(Ordering::Equal);
        if len == 0 || (work.reads_memory() && (!self.readable(work) || struck == Some(Fault::SourceGone))) {
            return None;
        }
        let (reads, source, target) = match (work.op, &work.source) {
            (SendOp::Read(remote), Source::Memory(into)) => {
                let peer = self.pairs.get(to).filter(|_| heard)?;
                let (region, offset) = self.remote(peer, remote, len, work.wanted())?;
                let done = work.atomic.is_some() && work.brought.is_some();
                let aligned = work.atomic.is_none() || remote.address.is_multiple_of(ATOMIC as u64);
                if done || !aligned || !self.allows(into, len, Access::LOCAL_WRITE) {
                    return None;
                }
                (true, Some(Parts::One(Part { region, offset, len })), Some(into.clone()))
            }
            (_, Source::Memory(parts)) if work.to.is_some() => (false, Some(parts.clone()), None),
            (_, Source::Inline(_)) if work.to.is_some() => return None,
            (_, Source::Memory(parts)) => {
                (false, Some(parts.clone()), heard.then(|| self.landing_place(to, work)).flatten())
            }
            (_, Source::Inline(_)) => (false, None, heard.then(|| self.landing_place(to, work)).flatten()),
        };
        let foreign = |parts: &Parts| self.is_any_foreign(parts);
        let wanted = target.is_some() || self.capture.is_some() || work.to.is_some();
        let far = (wanted && source.as_ref().is_some_and(foreign))
            || target.as_ref().is_some_and(foreign)
            || work.atomic.is_some();
        far.then_some((to, reads, source, target, len))
    }

    /// Returns the target of a SEND or a WRITE, if it can be executed now.
    fn landing_place(&self, to: PairId, work: &SendWork) -> Option<Parts> {
        let receive = self.next_receive(to).filter(|_| self.is_ready_for_receives(to));
        match work.op {
            SendOp::Write(remote) | SendOp::WriteImmediate(remote, _) => {
                if matches!(work.op, SendOp::WriteImmediate(..)) {
                    receive?;
                }
                let peer = self.pairs.get(to)?;
                let (region, offset) = self.remote(peer, remote, work.len, work.wanted())?;
                Some(Parts::One(Part { region, offset, len: work.len }))
            }
            SendOp::Send | SendOp::SendImmediate(_) => {
                self.check_receive(receive?.clone(), work.len).ok().flatten()
            }
            SendOp::Read(_) => None,
        }
    }

    pub(super) fn is_any_foreign(&self, parts: &Parts) -> bool {
        parts.list().iter().any(|part| self.is_foreign(part.region))
    }

    fn is_foreign(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some_and(|region| matches!(region.memory, Bytes::Foreign { .. }))
    }

    fn stretches(&self, parts: &Parts, len: usize) -> Vec<Stretch> {
        let of = |Part { region, offset, len }| {
            let memory = self.regions.get(region)?.memory.clone();
            Some(Stretch { memory, offset, len })
        };
        parts.within(0, len).filter_map(of).collect()
    }

    /// Returns bytes that the caller must move from now on.
    pub(crate) fn next_freight(&mut self) -> Option<Freight> {
        self.freights.pop_front()
    }

    /// Handles bytes that were moved, could not be, or need not be any more.
    pub(crate) fn end_freight(&mut self, freight: Freight) {
        // `None` if its time had passed.
        let Some(mut carried) = self.carried.remove(&freight.number()) else { return };
        let Outcome { moved, seen } = freight.end();
        self.free(&mut carried, None);
        let struck = Some(carried.struck);
        self.decide(&mut carried, Some(Arrival { struck, moved, seen, carried: true }));
        self.flush_freed(&carried);
    }

    pub(crate) fn lose_freight(&mut self, freight: &Freight) {
        self.give_up(freight.number());
    }

    /// Lets the message arrive, or treats it as lost.
    fn decide(&mut self, carried: &mut Carried, mut arrival: Option<Arrival>) {
        let &mut Carried { from, to, epoch, sequence, .. } = carried;
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
                work.brought = Some(moved.map(|()| seen.take().unwrap_or_default()));
            }
        }
        match arrival {
            Some(arrival) => self.arrive_with(from, epoch, sequence, arrival),
            None => self.unanswered(from, epoch),
        }
        if carried.reserves {
            self.return_receive(to);
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            for (epoch, sequence) in pair.requester.behind.drain(..) {
                self.event_queue
                    .schedule(core::time::Duration::ZERO, Event::Arrive { from, epoch, sequence });
            }
        }
    }

    /// Stops counting the message at its ends, except at one whose memory is being accessed.
    fn free(&mut self, carried: &mut Carried, inside: Option<End>) {
        for end in ENDS {
            if inside != Some(end)
                && core::mem::take(&mut carried.holds[end as usize])
                && let Some(pair) = self.pairs.get_mut(carried.pair(end))
            {
                pair.bulks -= 1;
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
    fn cut_short(&mut self, cut: impl Fn(&Carried) -> bool, arrives: bool, gone: PairId) {
        let numbers: Vec<u64> =
            self.carried.iter().filter(|(_, carried)| cut(carried)).map(|(number, _)| *number).collect();
        for number in numbers {
            let Some(mut carried) = self.carried.remove(&number) else { continue };
            let inside = carried.track.end();
            self.free(&mut carried, inside);
            if carried.from == gone {
                carried.open = false;
                if carried.reserves {
                    self.return_receive(carried.to);
                }
            }
            let struck = Some(carried.struck);
            let arrival = Arrival { struck, moved: None, seen: None, carried: true };
            self.decide(&mut carried, arrives.then_some(arrival));
            self.flush_freed(&carried);
            if carried.holds.contains(&true) {
                self.carried.insert(number, carried);
            }
        }
    }

    /// Ends the messages from and to a queue pair that fails, is reset or is gone.
    pub(super) fn cut_short_of(&mut self, pair: PairId) {
        if !self.carried.is_empty() {
            self.cut_short(|carried| carried.from == pair || carried.to == pair, false, pair);
        }
        if let Some(pair) = self.pairs.get_mut(pair) {
            pair.requester.carrying = false;
            pair.responder.storing = false;
            pair.responder.arrived.clear();
        }
    }

    /// Lets messages to a deregistered region arrive, where they find no memory.
    pub(super) fn cut_short_into(&mut self, region: RegionId) {
        if !self.carried.is_empty() {
            let writes = |carried: &Carried| ENDS.iter().any(|end| carried.writes_to(*end, region));
            self.cut_short(writes, true, PairId::NONE);
        }
    }

    /// Returns whether a message of this queue pair may be being written to its owner's memory.
    pub(crate) fn lands_for(&self, pair: PairId) -> bool {
        self.lands(|carried, end| carried.pair(end) == pair && carried.written(end).is_some())
    }

    /// Returns whether this deregistered region may be being written.
    pub(crate) fn lands_in(&self, region: RegionId) -> bool {
        self.lands(|carried, end| carried.writes_to(end, region))
    }

    /// Returns whether such an end is being accessed.
    fn lands(&self, there: impl Fn(&Carried, End) -> bool) -> bool {
        let inside = |carried: &Carried, end| carried.track.is_inside(end) && there(carried, end);
        self.carried.values().any(|carried| ENDS.iter().any(|end| inside(carried, *end)))
    }

    /// Schedules a sweep for late messages at `at` or earlier.
    fn sweep_at(&mut self, at: Instant) {
        if self.sweep.is_none_or(|sweep| at < sweep) {
            self.sweep = Some(at);
            let now = self.event_queue.now();
            self.event_queue.schedule(at.since(now), Event::Sweep);
        }
    }

    /// Gives up messages whose time has passed.
    pub(super) fn sweep(&mut self) {
        let now = self.event_queue.now();
        if self.sweep.is_none_or(|at| at > now) {
            return;
        }
        self.sweep = None;
        let late: Vec<u64> =
            self.carried.iter().filter(|(_, c)| c.deadline <= now).map(|(n, _)| *n).collect();
        for number in late {
            self.give_up(number);
        }
        if let Some(next) = self.carried.values().map(|carried| carried.deadline).min() {
            self.sweep_at(next);
        }
    }

    /// Gives up a message with an end that cannot be accessed in time. If it is the requester's,
    /// its device cannot read or write its own memory. If it is the responder's, the requester gets
    /// no answer: its acknowledgement timer ends, and again for each repetition, which gets no more
    /// time than that.
    fn give_up(&mut self, number: u64) {
        let Some(mut carried) = self.carried.remove(&number) else { return };
        let _inside = carried.track.end();
        self.free(&mut carried, None);
        let arrival = match carried.track.at() {
            // A receiver whose memory is not reached.
            End::Responder if carried.datagram.is_some() => Some(Arrival::default()),
            // An atomic operation may have been done, and is not repeated.
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
    }
}
