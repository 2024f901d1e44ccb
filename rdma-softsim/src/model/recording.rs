//! Messages and answers as a [`Capture`] sees them.

use rdma_backend::SendOp;

use super::pairs::datagram::sent_immediate;
use super::pairs::path::Addressed;
use super::pairs::requester::{Answer, SendWork, Source};
use super::{Model, PairId};
use crate::capture::{Capture, Content, Transfer};

impl Model {
    /// Starts a capture. Returns false if there is one already.
    pub(crate) fn capture(&mut self, capture: Box<dyn Capture>) -> bool {
        if self.capture.is_some() {
            return false;
        }
        self.capture = Some(capture);
        true
    }

    pub(crate) fn stop_capture(&mut self) -> Option<Box<dyn Capture>> {
        self.capture.take()
    }

    pub(super) fn capture_message(&mut self, from: PairId, epoch: u32, sequence: u64, seen: Option<&[u8]>) {
        // Taken out while it is called: what it sees borrows from the model.
        let Some(mut capture) = self.capture.take() else { return };
        if let Some(pair) = self.pairs.get(from)
            && let Some(work) = pair.requester.flight(epoch, sequence)
            && let Some(path) = pair.path_of(work)
        {
            let read = if seen.is_none() { self.bytes_of(work) } else { Vec::new() };
            let bytes = seen.unwrap_or(&read);
            let seen = capture.pass(&Transfer {
                at: self.env.now(),
                connection: from.to_bits(),
                sequence,
                from: path.local,
                to: path.remote,
                pair: self.pairs.number(path.peer),
                traffic_class: self.manager.traffic_class(&self.pairs, from),
                content: match (work.to, work.atomic, work.op) {
                    (Some(Addressed { key, .. }), ..) => {
                        let (source, immediate) = (pair.number, sent_immediate(work.op));
                        Content::Datagram { source, key, immediate, bytes }
                    }
                    (None, Some(atomic), SendOp::Read(remote)) => Content::Atomic { remote, atomic },
                    _ => Content::Message { op: work.op, len: work.len, bytes },
                },
            });
            // Not put back, so that it is dropped under the lock.
            if seen.is_break() {
                return;
            }
        }
        self.capture = Some(capture);
    }

    /// Returns the bytes that travel with a message; none for a READ.
    fn bytes_of(&self, work: &SendWork) -> Vec<u8> {
        match &work.source {
            _ if matches!(work.op, SendOp::Read(_)) => Vec::new(),
            Source::Inline(bytes) => bytes.clone(),
            Source::Memory(parts) => {
                // Not accessed under the lock. If they were moved, `Arrival::seen` has them.
                if self.regions.is_any_foreign(parts) {
                    return Vec::new();
                }
                let mut bytes = vec![0; work.len];
                // Memory that is gone by now reads as zeros: what the peer got is unknown.
                let _read = self.regions.gather(parts, &mut bytes);
                bytes
            }
        }
    }

    /// Records the answer to message `sequence`, the oldest of its connection.
    pub(super) fn capture_answer(&mut self, to: PairId, sequence: u64, answer: Answer) {
        let Some(mut capture) = self.capture.take() else { return };
        if let Some(pair) = self.pairs.get(to)
            && let Some(path) = pair.path
        {
            let read = pair.requester.oldest().filter(|work| matches!(work.op, SendOp::Read(_)));
            let len = read.map_or(0, |work| work.len);
            let bytes = match read {
                Some(SendWork { brought: Some(Ok(brought)), .. }) => brought.clone(),
                Some(SendWork { source: Source::Memory(parts), .. }) => {
                    let mut bytes = vec![0; len];
                    let _read = self.regions.gather(parts, &mut bytes);
                    bytes
                }
                _ => Vec::new(),
            };
            let is_atomic = read.is_some_and(|read| read.atomic.is_some());
            let content = match answer {
                Answer::Ack if is_atomic => {
                    Some(Content::Found(bytes.first_chunk().copied().map_or(0, u64::from_ne_bytes)))
                }
                Answer::Ack if read.is_some() => Some(Content::Bytes { bytes: &bytes, len }),
                Answer::Ack => Some(Content::Acknowledged),
                Answer::RnrNak(timer) => Some(Content::NotReady(timer)),
                Answer::Nak(status) => Some(Content::Refused(status)),
                // Nothing crossed the wire.
                Answer::Fault(_) => None,
            };
            if let Some(content) = content {
                let (at, connection) = (self.env.now(), to.to_bits());
                let (from, to, pair) = (path.remote, path.local, pair.number);
                let traffic_class = self.manager.traffic_class(&self.pairs, path.peer);
                let seen = capture.pass(&Transfer {
                    at,
                    connection,
                    sequence,
                    from,
                    to,
                    pair,
                    traffic_class,
                    content,
                });
                if seen.is_break() {
                    return;
                }
            }
        }
        self.capture = Some(capture);
    }

    pub(super) fn capture_end(&mut self, pair: PairId) {
        if let Some(capture) = &mut self.capture {
            capture.end(pair.to_bits());
        }
    }
}
