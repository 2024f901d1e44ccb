//! Unreliable datagrams.
//!
//! A datagram is posted, read and completed like any other message, except that nothing answers it:
//! its own device is done with it once its bytes are read. The receiver's device keeps it until it
//! is stored in a receive, one after another, so that receives complete in order. Neither program
//! waits for the memory of the other.

use std::net::IpAddr;

use rdma_backend::{Completed, CompletionStatus, Immediate, SendOp};

use super::completions::{Detail, Entry, Source, success};
use super::freight::Held;
use super::queue_pair::{Path, QueuePair};
use super::requester::{self, Answer};
use super::responder::Arrival;
use super::{Model, PairId};
use crate::Error;
use crate::request::Destination;

/// The most bytes of a datagram.
pub(super) const MTU: usize = 4096;
/// The bytes in front of those of a datagram, in its receive: the network header (GRH).
const HEADER: usize = 40;
/// The most datagrams that wait at a queue pair until an earlier one is stored.
const MOST_WAITING: usize = 64;

/// The destination of a datagram, looked up.
#[derive(Clone, Copy)]
pub(super) struct Addressed {
    pub(super) path: Path,
    pub(super) key: u32,
}

/// A datagram at the device of its receiver.
pub(super) struct Datagram {
    /// The header and the sent bytes, until they are moved.
    pub(super) bytes: Vec<u8>,
    len: u32,
    source: Source,
    immediate: Option<Immediate>,
    solicited: bool,
    _held: Held,
}

impl Model {
    /// Checks whether a queue pair sends such messages, from that address.
    pub(super) fn check_destination(&self, id: PairId, to: Option<Destination>) -> Result<(), Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        if pair.key.is_some() != to.is_some() {
            return Err(Error::Argument("queue pairs for datagrams send datagrams, and others do not"));
        }
        match to {
            Some(to) if !self.hosts.get(pair.host).is_some_and(|host| host.has(to.local)) => {
                Err(Error::NotLocal(to.local))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn addressed(&self, pair: &QueuePair, to: Destination) -> Addressed {
        const OWN: u32 = 1 << 31;
        let Destination { local, remote, number, key } = to;
        let peer = self.numbered(number, remote).unwrap_or(PairId::NONE);
        let loopback = self.pairs.get(peer).is_some_and(|peer| peer.host == pair.host);
        let key = pair.key.filter(|_| key & OWN != 0).unwrap_or(key);
        Addressed { path: Path { peer, local, remote, loopback }, key }
    }

    /// Passes a datagram that has arrived to the receiver's device. One too many is lost.
    pub(super) fn pass_datagram(
        &mut self,
        from: PairId,
        epoch: u32,
        sequence: u64,
        arrival: Arrival,
    ) -> Answer {
        let Some(pair) = self.pairs.get(from) else { return Answer::Ack };
        let Some(work) = pair.requester.flight(epoch, sequence) else { return Answer::Ack };
        let Some(Addressed { path, .. }) = work.to else { return Answer::Ack };
        let immediate = sent_immediate(work.op);
        let mut bytes = Vec::with_capacity(HEADER + work.len);
        bytes.extend(header(path, immediate.map_or(0, |_| 4) + work.len.next_multiple_of(4)));
        match (arrival.seen, &work.source) {
            (Some(seen), _) => bytes.extend(seen),
            (None, requester::Source::Inline(inline)) => bytes.extend(inline),
            (None, requester::Source::Memory(parts)) => {
                bytes.resize(HEADER + work.len, 0);
                if !bytes.get_mut(HEADER..).is_some_and(|payload| self.gather(parts, payload)) {
                    return Answer::Fault(CompletionStatus::LOC_PROT_ERR);
                }
            }
        }
        let source = Source { number: pair.number, ip4: path.local.is_ipv4() && path.remote.is_ipv4() };
        let (len, solicited) = (bytes.len() as u32, work.solicited);
        let mut held = Held::new(&self.store);
        let room = held.has_room();
        held.add(bytes.len());
        let Some(peer) = self.pairs.get_mut(path.peer) else { return Answer::Ack };
        if !peer.responder.storing || (room && peer.responder.arrived.len() < MOST_WAITING) {
            let datagram = Datagram { bytes, len, source, immediate, solicited, _held: held };
            peer.responder.arrived.push_back(datagram);
            self.store_datagrams(path.peer);
        }
        Answer::Ack
    }

    /// Stores datagrams that have arrived at a queue pair, one at a time. Those that find no
    /// receive are lost.
    pub(super) fn store_datagrams(&mut self, at: PairId) {
        while let Some(pair) = self.pairs.get_mut(at)
            && !pair.responder.storing
            && let Some(datagram) = pair.responder.arrived.pop_front()
        {
            let hidden = pair.responder.unready > 0;
            pair.responder.unready = pair.responder.unready.saturating_sub(1);
            let Some(receive) = self.next_receive(at).filter(|_| !hidden) else { continue };
            match self.check_receive(receive.clone(), datagram.bytes.len()) {
                Ok(Some(target)) if self.is_any_foreign(&target) => {
                    self.begin_storing(at, datagram, target);
                }
                Ok(target) => {
                    let stored = target.is_none_or(|target| self.scatter(&target, 0, &datagram.bytes));
                    self.end_storing(at, &datagram, stored);
                }
                Err(refusal) => self.refuse_receive(at, refusal.receive),
            }
        }
    }

    /// Handles a datagram whose bytes were stored, or could not be.
    pub(super) fn end_storing(&mut self, at: PairId, datagram: &Datagram, stored: bool) {
        let Some(pair) = self.pairs.get_mut(at) else { return };
        pair.responder.storing = false;
        let (number, queue) = (pair.number, pair.receive_queue);
        if !stored {
            return self.refuse_receive(at, CompletionStatus::LOC_PROT_ERR);
        }
        if let Some(receive) = self.consume_receive(at) {
            let &Datagram { len, source, immediate, solicited, .. } = datagram;
            let completion = success(receive.id, number, Completed::Recv { len, immediate });
            let detail = Detail { bytes: len, source: Some(source), atomic: None };
            self.report(queue, Entry { detail, solicited, ..Entry::new(completion, at) });
        }
    }
}

/// Returns the immediate of a SEND.
pub(super) const fn sent_immediate(op: SendOp) -> Option<Immediate> {
    match op {
        SendOp::SendImmediate(immediate) => Some(immediate),
        _ => None,
    }
}

/// Returns the network header of a datagram as receivers see it: that of IPv6, or in its last bytes
/// that of IPv4 (annex A17 of the InfiniBand architecture). `len` counts the immediate and padding.
fn header(path: Path, len: usize) -> [u8; HEADER] {
    /// UDP, the transport headers and the checksum.
    const AROUND: usize = 8 + 12 + 8 + 4;
    const UDP: u8 = 17;
    const HOPS: u8 = 64;
    let mut header = [0; HEADER];
    let length = |len: usize| u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes();
    match (path.local, path.remote) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = length(20 + AROUND + len);
            let start = [0x45, 0, high, low, 0, 0, 0x40, 0, HOPS, UDP, 0, 0];
            let (_undefined, ip) = header.split_at_mut(20);
            for (to, byte) in ip.iter_mut().zip(start.into_iter().chain(from.octets()).chain(to.octets())) {
                *to = byte;
            }
            let words =
                ip.chunks_exact(2).map(|pair| pair.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)));
            let sum: u32 = words.sum();
            let folded = (sum & 0xffff) + (sum >> 16);
            let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
            for (to, byte) in ip.iter_mut().skip(10).zip(checksum.to_be_bytes()) {
                *to = byte;
            }
        }
        (from, to) => {
            let [high, low] = length(AROUND + len);
            let v6 = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let start = [0x60, 0, 0, 0, high, low, UDP, HOPS];
            for (to, byte) in header.iter_mut().zip(start.into_iter().chain(v6(from)).chain(v6(to))) {
                *to = byte;
            }
        }
    }
    header
}
