//! What passes between queue pairs, for whoever records it.

use core::ops::ControlFlow;
use std::net::IpAddr;

use rdma_backend::time::Instant;
use rdma_backend::{CompletionStatus, RnrTimer, SendOp};

/// Sees what passes on a fabric, as a port of a switch that mirrors the others would.
///
/// The functions are called under the fabric's lock: they must not call the fabric, and everybody waits for them.
pub trait Capture: Send {
    /// A message, or the answer to one, passes. After [`ControlFlow::Break`] the capture is dropped, under the lock: it sees nothing more.
    fn pass(&mut self, transfer: &Transfer<'_>) -> ControlFlow<()>;

    /// The queue pair that sent this connection's messages is gone or begins anew: their sequence numbers mean nothing any more.
    fn end(&mut self, connection: u64);
}

/// A message or its answer on its way.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// When it arrives.
    pub at: Instant,
    /// Names the queue pair that sent the message, also in an answer. No later queue pair is called so.
    pub connection: u64,
    /// The message, counted from 0 in its connection. A message that is repeated keeps its number.
    pub sequence: u64,
    /// The address that this comes from.
    pub from: IpAddr,
    /// The address that it goes to.
    pub to: IpAddr,
    /// The number of the queue pair that it goes to; 0 if that is gone.
    pub pair: u32,
    /// The traffic class of its packets.
    pub traffic_class: u8,
    /// Which of them it is.
    pub content: Content<'a>,
}

/// The content of a message or of its answer.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// A message, with its bytes; a READ has none of its own.
    Message {
        /// The operation.
        op: SendOp,
        /// Bytes that the operation moves.
        len: usize,
        /// Those that travel with it, as far as they are known.
        bytes: &'a [u8],
    },
    /// The bytes of a READ, which acknowledge it.
    Bytes {
        /// As far as they are known, ...
        bytes: &'a [u8],
        /// ... and how many there are.
        len: usize,
    },
    /// Executed.
    Acknowledged,
    /// No receive was posted.
    NotReady(RnrTimer),
    /// Refused; the requester's work ends so.
    Refused(CompletionStatus),
}
