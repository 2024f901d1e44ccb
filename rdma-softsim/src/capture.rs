//! Recording of messages between queue pairs.

use core::ops::ControlFlow;
use std::net::IpAddr;

use rdma_backend::time::Instant;
use rdma_backend::{CompletionStatus, Immediate, RemoteAddress, RnrTimer, SendOp};

use crate::request::Atomic;

/// Records the messages on a fabric, like a mirror port of a switch.
///
/// The functions are called under the fabric's lock. They must not call the fabric, and every other
/// call waits for them.
pub trait Capture: Send {
    /// Called for each message or answer. After [`ControlFlow::Break`] the capture is dropped,
    /// under the lock, and sees nothing more.
    fn pass(&mut self, transfer: &Transfer<'_>) -> ControlFlow<()>;

    /// Called when the queue pair that sent this connection's messages is gone or reset. Their
    /// sequence numbers have no meaning any more.
    fn end(&mut self, connection: u64);
}

/// A message or its answer in flight.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// When it arrives.
    pub at: Instant,
    /// Identifies the queue pair that sent the message, also in an answer. Never reused.
    pub connection: u64,
    /// The message's number in its connection, from 0. A retransmission keeps the number.
    pub sequence: u64,
    /// The source address.
    pub from: IpAddr,
    /// The destination address.
    pub to: IpAddr,
    /// The number of the destination queue pair; 0 if it is gone.
    pub pair: u32,
    /// The traffic class of its packets.
    pub traffic_class: u8,
    /// The message or answer.
    pub content: Content<'a>,
}

/// The content of a message or of its answer.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// A message with its bytes. A READ carries none.
    Message {
        /// The operation.
        op: SendOp,
        /// Number of bytes that the operation moves.
        len: usize,
        /// The bytes it carries, as far as they are known.
        bytes: &'a [u8],
    },
    /// A datagram with its bytes.
    Datagram {
        /// The number of the queue pair that sent it.
        source: u32,
        /// Its Q_Key.
        key: u32,
        /// Its immediate, if it has one.
        immediate: Option<Immediate>,
        /// Its bytes.
        bytes: &'a [u8],
    },
    /// An atomic operation.
    Atomic {
        /// Where.
        remote: RemoteAddress,
        /// The operation.
        atomic: Atomic,
    },
    /// What an atomic operation found, which acknowledges it.
    Found(u64),
    /// The bytes of a READ, which acknowledge it.
    Bytes {
        /// The known bytes.
        bytes: &'a [u8],
        /// The total number of bytes.
        len: usize,
    },
    /// Executed.
    Acknowledged,
    /// No receive was posted.
    NotReady(RnrTimer),
    /// Refused, with the status of the requester's work.
    Refused(CompletionStatus),
}
