//! Status and counters of connections and endpoints.

use std::mem::{MaybeUninit, size_of};

use any_backend::either;
use rdma_conn::Error;
use rdma_proto::State;

use crate::endpoint::{Endpoint, Kind, on, on_connection, place};
use crate::error::{Code, Failed};
use crate::sized::{self, Grows};

/// The state of a connection. Boolean fields are 1 or 0. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Status {
    /// Whether the connection was established.
    pub open: u64,
    /// Whether it has ended, in order or by the error that `vkrdma_check` returns.
    pub ended: u64,
    /// Whether `vkrdma_read` would return bytes, the end or an error now.
    pub readable: u64,
    /// Whether `vkrdma_write` would take a byte or fail now.
    pub writable: u64,
    /// Unread bytes that have arrived.
    pub unread: u64,
    /// Written bytes that the peer has not acknowledged.
    pub unconfirmed: u64,
    /// Whether the device has been given all written bytes.
    pub flushed: u64,
    /// Bytes of memory registered for it, its buffers included.
    pub registered_bytes: u64,
    /// Its queue pair number, which devices and traces show.
    pub queue_pair: u64,
}

// SAFETY: all fields are numbers of one size, so there is no padding.
unsafe impl Grows for Status {
    const FIRST: usize = 9 * 8;
}

/// Counters of a connection. Later versions append fields.
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
    /// The largest number of unacknowledged notifications and messages.
    pub most_in_flight: u64,
    /// Chains of send requests posted.
    pub doorbells: u64,
    /// Send requests in them.
    pub requests: u64,
    /// Chains of receives posted.
    pub receive_doorbells: u64,
    /// Completions taken.
    pub completions: u64,
    /// Writes that found no room, and buffers that could not be lent.
    pub stalls: u64,
    /// Bytes sent from memory of the program, without a copy.
    pub lent: u64,
    /// Times that a lent part of a buffer was returned.
    pub returned: u64,
}

// SAFETY: as above.
unsafe impl Grows for Counters {
    const FIRST: usize = 17 * 8;
}

/// Resources and counters of an endpoint. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Usage {
    /// Connections now, including those that are being established or closed.
    pub connections: u64,
    /// Bytes registered now, by all endpoints that share its limits.
    pub registered_bytes: u64,
    /// Completion queues now, each with a descriptor.
    pub completion_queues: u64,
    /// Requests for a connection that were accepted.
    pub accepted: u64,
    /// Requests that were rejected because of a limit or a shortage of resources. Also accepted
    /// ones whose connections were ended for that before the program used them: both counts have
    /// these.
    pub rejected: u64,
    /// Times that the endpoint looked for completions and events.
    pub turns: u64,
    /// Times that a completion queue was polled.
    pub polls: u64,
    /// Times that a completion queue was armed.
    pub arms: u64,
    /// Times that the endpoint asked the kernel for wake-ups.
    pub sleeps: u64,
}

// SAFETY: as above.
unsafe impl Grows for Usage {
    const FIRST: usize = 9 * 8;
}

const _: () = assert!(size_of::<Status>() == Status::FIRST);
const _: () = assert!(size_of::<Counters>() == Counters::FIRST);
const _: () = assert!(size_of::<Usage>() == Usage::FIRST);

/// Copies fields of the same names.
macro_rules! copied {
    ($to:ident { $($from:ident: $($field:ident)+,)+ }) => { $to { $($($field: $from.$field as u64,)+)+ } };
}

/// Fills in the state of a connection. `size` is `sizeof(vkrdma_status)`. While the connection is
/// being established, `open` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_status_of(
    endpoint: Option<&Endpoint>,
    connection: u64,
    status: *mut Status,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found = either!(&state.kind, Kind(side) => {
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

/// Fills in the counters of a connection. `size` is `sizeof(vkrdma_counters)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_counters_of(
    endpoint: Option<&Endpoint>,
    connection: u64,
    counters: *mut Counters,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (said, asked) = either!(&state.kind, Kind(side) => {
            let connection = side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
            (connection.counters(), connection.work())
        });
        let found = copied!(Counters {
            said: bytes_sent bytes_received data_notifications_sent plain_writes_sent data_notifications_received
                messages_sent messages_received keepalives_received windows_received most_in_flight,
            asked: doorbells requests receive_doorbells completions stalls lent returned,
        });
        // SAFETY: the caller's promise.
        unsafe { sized::write(counters, size, &found) }
    })
}

/// Fills in the counters of an endpoint. `size` is `sizeof(vkrdma_usage)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_usage_of(
    endpoint: Option<&Endpoint>,
    usage: *mut Usage,
    size: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let found = either!(&state.kind, Kind(side) => side.endpoint.usage());
        let found = copied!(Usage {
            found: connections registered_bytes completion_queues accepted rejected turns polls arms sleeps,
        });
        // SAFETY: the caller's promise.
        unsafe { sized::write(usage, size, &found) }
    })
}

/// Sets `*local` to 1 if the peer is on the same device of this machine, else to 0. It asks the
/// device for the queue pair's path: the address in a request may be forged.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_is_local(
    endpoint: Option<&Endpoint>,
    connection: u64,
    local: Option<&mut MaybeUninit<u32>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found =
            either!(&state.kind, Kind(side) => side.endpoint.connection(id).map(|one| one.is_local()));
        place(local)?.write(found.ok_or(Error::NoSuchConnection)?.into());
        Ok(())
    })
}
