//! How much memory objects take: upper bounds, with everything that the objects may hold.
//!
//! A process that makes objects for others takes so much before it makes one. Then a queue that
//! fills up later finds its memory.

use rdma_backend::QueuePairLimits;

use crate::model::sizes::{COMPLETION, DATAGRAM, DATAGRAMS, HELD, NOTICE, NOTICES, PART, RECEIVE, SEND};
use crate::request::Service;

/// An object of any kind, without what it may hold.
pub const OBJECT: u64 = 2048;
/// An opened device, with asynchronous events that its program has not read.
pub const CONTEXT: u64 = OBJECT + queue(NOTICES as u32, NOTICE, 0);
/// A connect request that waits at a listener.
pub const CONNECT_REQUEST: u64 = 1024;

/// What an allocator adds to an allocation.
const ALLOCATION: usize = 16;

/// Returns the bytes of a queue, which doubles its room when that is full, and whose entries have
/// so many bytes elsewhere.
const fn queue(depth: u32, entry: usize, elsewhere: usize) -> u64 {
    /// The least room of a queue that is not empty.
    const LEAST: u64 = 4;
    let depth = depth as u64;
    let room = if depth > LEAST { depth.next_power_of_two() } else { LEAST };
    room * entry as u64 + depth * elsewhere as u64
}

/// Returns the bytes of a scatter-gather list. A single element lies in its request.
const fn list(elements: u8) -> usize {
    if elements > 1 { ALLOCATION + 2 * size_of::<usize>() + elements as usize * PART } else { 0 }
}

/// Returns the bytes of a completion queue.
#[must_use]
pub const fn completion_queue(depth: u32) -> u64 {
    // Some kinds of devices round the depth up, as this does.
    OBJECT + queue(depth, COMPLETION, 0)
}

/// Returns the bytes of a shared receive queue whose receives have at most so many elements.
#[must_use]
pub const fn shared_receives(depth: u32, elements: u8) -> u64 {
    OBJECT + queue(depth, RECEIVE, list(elements))
}

/// Returns the bytes of a queue pair whose sends and receives have at most so many elements.
#[must_use]
pub const fn queue_pair(
    service: Service,
    limits: &QueuePairLimits,
    [send_elements, receive_elements]: [u8; 2],
) -> u64 {
    let waiting = match service {
        Service::Connected => 0,
        Service::Datagram => queue(DATAGRAMS as u32, DATAGRAM, ALLOCATION),
    };
    let inline = if limits.inline > 0 { ALLOCATION + limits.inline as usize } else { 0 };
    // A completion of either queue may be held before it is reported.
    let sends = queue(limits.send_depth, SEND + COMPLETION, list(send_elements) + inline);
    let receives = queue(limits.recv_depth, RECEIVE + COMPLETION, list(receive_elements));
    OBJECT + HELD as u64 + waiting + sends + receives
}
