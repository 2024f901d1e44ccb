//! What is known of connections and endpoints.

use std::mem::{MaybeUninit, size_of};

use rdma_conn::Error;
use rdma_proto::State;

use crate::endpoint::{Endpoint, either, on, on_connection, place};
use crate::error::{Code, Failed};
use crate::sized::{self, Grows};

/// What a connection is like now. Fields that are yes or no are 1 or 0. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Status {
    /// Whether bytes can flow, or could before it ended.
    pub open: u64,
    /// Whether it has ended: in order, or by the error of `vkrdma_check`.
    pub ended: u64,
    /// Whether `vkrdma_read` has an answer now: bytes, the end, or an error.
    pub readable: u64,
    /// Whether `vkrdma_write` has an answer now: it would take a byte, or fail.
    pub writable: u64,
    /// Bytes that have arrived and were not read.
    pub unread: u64,
    /// Bytes that were written and are not known to have arrived.
    pub unconfirmed: u64,
    /// Whether everything that was written was handed to the device.
    pub flushed: u64,
    /// Bytes of memory registered for it, its buffers included.
    pub registered_bytes: u64,
    /// The number of its queue pair, by which devices and traces know it.
    pub queue_pair: u64,
}

// SAFETY: numbers of one size, so nothing is between them.
unsafe impl Grows for Status {
    const FIRST: usize = 9 * 8;
}

/// Counts of what a connection has said and heard, and asked of the device. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Counters {
    /// Bytes handed to the device.
    pub bytes_sent: u64,
    /// Bytes that have arrived.
    pub bytes_received: u64,
    /// Notifications of bytes sent.
    pub data_notifications_sent: u64,
    /// WRITEs without immediate sent.
    pub plain_writes_sent: u64,
    /// Notifications of bytes received.
    pub data_notifications_received: u64,
    /// Control messages sent.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Keepalives received.
    pub keepalives_received: u64,
    /// Windows that the peer has registered.
    pub windows_received: u64,
    /// The most notifications and messages that were under way at once.
    pub most_in_flight: u64,
    /// Chains of send requests posted.
    pub doorbells: u64,
    /// Send requests in them.
    pub requests: u64,
    /// Chains of receives posted.
    pub receive_doorbells: u64,
    /// Completions taken.
    pub completions: u64,
    /// Writes that found no room at all, and buffers that could not be lent.
    pub stalls: u64,
    /// Bytes sent from where the program had them.
    pub lent: u64,
    /// Times that a lent part of a buffer came back.
    pub returned: u64,
}

// SAFETY: as above.
unsafe impl Grows for Counters {
    const FIRST: usize = 17 * 8;
}

/// Counts of what an endpoint holds and has done. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Usage {
    /// Connections there are now, those included that are being made or on their way to their end.
    pub connections: u64,
    /// Bytes registered now, by all endpoints that share its limits.
    pub registered_bytes: u64,
    /// Completion queues now, each with a descriptor.
    pub completion_queues: u64,
    /// Requests for a connection that were accepted.
    pub accepted: u64,
    /// Requests that were rejected, because of a limit or for want of resources.
    pub rejected: u64,
    /// Times that the endpoint looked for what had come.
    pub turns: u64,
    /// Times that a completion queue was polled.
    pub polls: u64,
    /// Times that a completion queue was armed.
    pub arms: u64,
    /// Times that the kernel was asked what had come.
    pub sleeps: u64,
}

// SAFETY: as above.
unsafe impl Grows for Usage {
    const FIRST: usize = 9 * 8;
}

const _: () = assert!(size_of::<Status>() == Status::FIRST);
const _: () = assert!(size_of::<Counters>() == Counters::FIRST);
const _: () = assert!(size_of::<Usage>() == Usage::FIRST);

/// Tells what a connection is like now. `size` is `sizeof(vkrdma_status)`. One that is still being made has no answer but
/// VKRDMA_OK with `open` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_status_of(
    endpoint: Option<&Endpoint>,
    connection: u64,
    status: *mut Status,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => {
            if side.endpoint.peer_addr(id).is_none() {
                return Err(Error::NoSuchConnection.into());
            }
            let open = side.endpoint.is_open(id);
            match side.endpoint.connection(id) {
                Some(one) => Status {
                    open: open.into(),
                    ended: matches!(one.state(), State::Closed | State::Failed(_)).into(),
                    readable: one.is_readable().into(),
                    writable: one.is_writable().into(),
                    unread: one.unread(),
                    unconfirmed: one.unconfirmed(),
                    flushed: one.is_flushed().into(),
                    registered_bytes: one.registered_bytes() as u64,
                    queue_pair: one.queue_pair_number().into(),
                },
                None => Status { ended: side.endpoint.check(id).is_err().into(), ..Status::default() },
            }
        });
        // SAFETY: the caller's promise.
        unsafe { sized::write(status, size, &found) }
    })
}

/// Tells the counts of a connection. `size` is `sizeof(vkrdma_counters)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_counters_of(
    endpoint: Option<&Endpoint>,
    connection: u64,
    counters: *mut Counters,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (said, asked) = either!(&state.kind, side => {
            let connection = side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
            (connection.counters(), connection.work())
        });
        let found = Counters {
            bytes_sent: said.bytes_sent,
            bytes_received: said.bytes_received,
            data_notifications_sent: said.data_notifications_sent,
            plain_writes_sent: said.plain_writes_sent,
            data_notifications_received: said.data_notifications_received,
            messages_sent: said.messages_sent,
            messages_received: said.messages_received,
            keepalives_received: said.keepalives_received,
            windows_received: said.windows_received,
            most_in_flight: said.most_in_flight,
            doorbells: asked.doorbells,
            requests: asked.requests,
            receive_doorbells: asked.receive_doorbells,
            completions: asked.completions,
            stalls: asked.stalls,
            lent: asked.lent,
            returned: asked.returned,
        };
        // SAFETY: the caller's promise.
        unsafe { sized::write(counters, size, &found) }
    })
}

/// Tells the counts of an endpoint. `size` is `sizeof(vkrdma_usage)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_usage_of(
    endpoint: Option<&Endpoint>,
    usage: *mut Usage,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let found = either!(&state.kind, side => side.endpoint.usage());
        let found = Usage {
            connections: found.connections as u64,
            registered_bytes: found.registered_bytes,
            completion_queues: found.completion_queues as u64,
            accepted: found.accepted,
            rejected: found.rejected,
            turns: found.turns,
            polls: found.polls,
            arms: found.arms,
            sleeps: found.sleeps,
        };
        // SAFETY: the caller's promise.
        unsafe { sized::write(usage, size, &found) }
    })
}

/// Tells whether the peer is on this machine's device, 1 or 0: whether the path of the queue pair leads back to where it leaves from.
/// Addresses prove nothing of the kind, since a request carries what its sender wrote. It asks the device.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_is_local(
    endpoint: Option<&Endpoint>,
    connection: u64,
    local: Option<&mut MaybeUninit<u32>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, side => side.endpoint.connection(id).map(|one| one.is_local()));
        place(local)?.write(found.ok_or(Error::NoSuchConnection)?.into());
        Ok(())
    })
}
