//! Converts a recording into packets of RoCE v2, in a file for Wireshark.
//!
//! A posted request counts as sent, a completion as an acknowledgement. Queue pair numbers,
//! addresses and times are the recording's. Packet sequence numbers are invented, and so is all of
//! the peer but its notifications. The connection manager's packets are omitted. Zeros stand for
//! bytes that were not recorded, with a comment: Wireshark treats truncated packets as malformed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::time::Duration;

use rdma_backend::CompletionStatus;
use roce::{Kind, Message, Packet, SEQUENCES, count};

use super::ends::{self, ConnectionEnd};
use super::recording::{EntryKind, Op, Outcome, Recording, Request};

/// The first number for queue pairs whose numbers are not recorded.
const UNKNOWN_PAIR: u32 = 0xf0_0000;

/// A frame, and its time.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its time since the clock's start.
    pub at: Duration,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// How many of them were not recorded.
    pub unknown: usize,
}

/// Writes a recording into a pcapng file. Returns the number of packets.
///
/// # Errors
/// The file's, with its name.
pub fn save(recording: &Recording, file: &Path) -> io::Result<usize> {
    let write = || write(recording, BufWriter::new(File::create(file)?));
    write().map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))
}

/// Writes a recording as a pcapng file. Returns the number of packets.
///
/// # Errors
/// The writer's.
pub fn write(recording: &Recording, to: impl Write) -> io::Result<usize> {
    let frames = frames(recording);
    let mut file = roce::File::new(to)?;
    for Frame { at, bytes, unknown } in &frames {
        let comment = format!("the last {unknown} bytes of the payload were not recorded");
        file.write(*at, bytes, (*unknown > 0).then_some(&comment))?;
    }
    file.flush()?;
    Ok(frames.len())
}

/// Returns the packets of a recording.
#[must_use]
pub fn frames(recording: &Recording) -> Vec<Frame> {
    let ends = ends::of(recording);
    let unsent = unsent(recording);
    let mut wire = Wire { ends: &ends, sequences: HashMap::new(), last: HashMap::new(), frames: Vec::new() };
    for (position, entry) in recording.entries.iter().enumerate() {
        if let EntryKind::Dropped { .. } = entry.what {
            wire.last.clear();
        }
        let Some(end) = ends.get(&entry.end) else { continue };
        let at = Duration::from_nanos(entry.at);
        match &entry.what {
            EntryKind::Posted(request) if !unsent.contains(&position) => {
                wire.request(at, entry.end, true, request);
            }
            EntryKind::Completed { id, outcome } => {
                wire.acknowledged(at, entry.end, *id, outcome);
                if let (None, Some(request)) = (end.other, outcome.arrived(*id)) {
                    wire.request(at, entry.end, false, &request);
                }
            }
            _ => {}
        }
    }
    wire.frames
}

/// Returns requests that were refused, or flushed before they left.
fn unsent(recording: &Recording) -> HashSet<usize> {
    let (mut flushed, mut refused) = (HashSet::new(), HashMap::new());
    let mut unsent = HashSet::new();
    for (position, entry) in recording.entries.iter().enumerate().rev() {
        match &entry.what {
            EntryKind::Completed { id, outcome: Outcome::Failed { status, .. } }
                if *status == CompletionStatus::WR_FLUSH_ERR.0 =>
            {
                flushed.insert((entry.end, *id));
            }
            EntryKind::Refused { requests, .. } => *refused.entry(entry.end).or_insert(0) = *requests,
            EntryKind::Posted(request) => {
                let left = refused.entry(entry.end).or_default();
                if *left > 0 || flushed.remove(&(entry.end, request.id)) {
                    unsent.insert(position);
                }
                *left = left.saturating_sub(1);
            }
            // The next entries may be about missing requests.
            EntryKind::Dropped { .. } => {
                flushed.clear();
                refused.clear();
            }
            _ => {}
        }
    }
    unsent
}

struct Wire<'a> {
    ends: &'a BTreeMap<u32, ConnectionEnd>,
    /// The next sequence number of packets from an end (true) or to it (false).
    sequences: HashMap<(u32, bool), u32>,
    /// Where the latest request with this id ends: its last sequence number; a READ's length.
    last: HashMap<(u32, u64), (u32, Option<usize>)>,
    frames: Vec<Frame>,
}

impl Wire<'_> {
    /// Adds a packet from this end (`out`), or to it.
    fn send(&mut self, at: Duration, end: u32, out: bool, packet: Packet<'_>) {
        let known = self.ends.get(&end).copied().unwrap_or_default();
        let other = known.other.and_then(|other| self.ends.get(&other));
        let (local, peer) = known.addresses.map_or_else(
            || (IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)),
            |(local, peer)| (local.ip(), peer.ip()),
        );
        let (from, to, pair) = match out {
            true => {
                (local, peer, other.and_then(|other| other.pair).unwrap_or(UNKNOWN_PAIR.wrapping_add(end)))
            }
            false => (peer, local, known.pair.unwrap_or(UNKNOWN_PAIR)),
        };
        let packet = packet.between(from, to, pair);
        let unknown = packet.len.saturating_sub(packet.payload.len());
        self.frames.push(Frame { at, bytes: packet.frame(), unknown });
    }

    fn next(&mut self, end: u32, out: bool, count: u32) -> u32 {
        let next = self.sequences.entry((end, out)).or_default();
        let first = *next;
        *next = next.wrapping_add(count) % SEQUENCES;
        first
    }

    fn request(&mut self, at: Duration, end: u32, out: bool, request: &Request) {
        let Request { id, op, remote, immediate, len, .. } = *request;
        let address: Vec<u8> = remote
            .map(|remote| roce::remote(remote.address, remote.rkey, len))
            // Every WRITE has this header.
            .unwrap_or_else(|| if op == Op::Send { Vec::new() } else { vec![0; 16] });
        let packets = count(len);
        let sequence = self.next(end, out, packets);
        let last = sequence.wrapping_add(packets - 1) % SEQUENCES;
        if out {
            self.last.insert((end, id), (last, (op == Op::Read).then_some(len)));
        }
        match op {
            Op::Read => {
                let packet = Packet { headers: address, ..Packet::new(12, sequence) };
                self.send(at, end, out, Packet { acknowledge: true, ..packet });
            }
            Op::Send | Op::Write => {
                let kind = if op == Op::Send { Kind::Send } else { Kind::Write };
                let message = Message { kind, start: address, immediate, bytes: &request.bytes.0, len };
                self.message(at, end, out, sequence, &message);
            }
        }
    }

    fn message(&mut self, at: Duration, end: u32, out: bool, sequence: u32, message: &Message<'_>) {
        for packet in message.packets(sequence) {
            self.send(at, end, out, packet);
        }
    }

    /// Adds the answer of the peer's device, if the completion shows it.
    fn acknowledged(&mut self, at: Duration, end: u32, id: u64, outcome: &Outcome) {
        let Some(&(sequence, read)) = self.last.get(&(end, id)) else { return };
        let syndrome = match outcome {
            Outcome::Done { .. } => Some(roce::ACKNOWLEDGED),
            Outcome::Failed { status, .. } => roce::refused(CompletionStatus(*status)),
            Outcome::Received { .. } | Outcome::Notified { .. } => None,
        };
        let Some(syndrome) = syndrome else { return };
        let header = roce::answer(syndrome, 0);
        match (outcome, read) {
            (Outcome::Done { .. }, Some(len)) => {
                let packets = count(len);
                let first = sequence.wrapping_sub(packets - 1) % SEQUENCES;
                let message =
                    Message { kind: Kind::ReadResponse, start: header, immediate: None, bytes: &[], len };
                self.message(at, end, false, first, &message);
            }
            _ => self.send(at, end, false, Packet { headers: header, ..Packet::new(17, sequence) }),
        }
    }
}
