//! Events.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use crate::endpoint::{Endpoint, either, number_of, on, place};
use crate::error::{Code, Failed, Failure};

/// The kinds of events. Later versions may have more: ignore those that you do not know.
#[repr(u32)]
#[allow(non_camel_case_types, reason = "the header's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A connection is established: one that the program asked for, or a new one of `listener`.
    VKRDMA_EVENT_OPENED = 1,
    /// Bytes have arrived. Read until VKRDMA_AGAIN.
    VKRDMA_EVENT_READABLE = 2,
    /// A write, lend or flush that could not complete can go on.
    VKRDMA_EVENT_WRITABLE = 3,
    /// Some lent memory was returned.
    VKRDMA_EVENT_RETURNED = 4,
    /// The connection has ended, or could not be established. Arrived bytes can still be read.
    /// `vkrdma_check` returns the reason; then `vkrdma_abort` frees it.
    VKRDMA_EVENT_ENDED = 5,
    /// A listener cannot accept, for a reason on this side. `vkrdma_accept_error` returns it.
    VKRDMA_EVENT_ACCEPT_FAILED = 6,
}

/// An event, for all that has happened since the last of its kind. It may be spurious.
#[repr(C)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// 0.
    pub reserved: u32,
    /// The connection; 0 if the event concerns only a listener.
    pub connection: u64,
    /// The listener that accepted or cannot accept; 0 in other events, and if it was closed.
    pub listener: u64,
    /// The value of `vkrdma_set_data` for the connection, or NULL.
    pub data: *mut c_void,
}

/// Takes the next event. VKRDMA_AGAIN: there is none.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_next_event(
    endpoint: Option<&Endpoint>,
    event: Option<&mut MaybeUninit<Event>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        let event = place(event)?;
        loop {
            let told = either!(&mut state.kind, side => side.endpoint.next_event()).ok_or(Failure::Again)?;
            let (kind, id, listener) = match told {
                rdma_conn::Event::Opened { id, listener } => {
                    (EventKind::VKRDMA_EVENT_OPENED, Some(id), listener)
                }
                rdma_conn::Event::Readable(id) => (EventKind::VKRDMA_EVENT_READABLE, Some(id), None),
                rdma_conn::Event::Writable(id) => (EventKind::VKRDMA_EVENT_WRITABLE, Some(id), None),
                rdma_conn::Event::Returned(id) => (EventKind::VKRDMA_EVENT_RETURNED, Some(id), None),
                rdma_conn::Event::Ended(id) => (EventKind::VKRDMA_EVENT_ENDED, Some(id), None),
                rdma_conn::Event::AcceptFailed(listener) => {
                    (EventKind::VKRDMA_EVENT_ACCEPT_FAILED, None, Some(listener))
                }
                _ => continue,
            };
            event.write(Event {
                kind,
                reserved: 0,
                connection: id.map_or(0, number_of),
                listener: listener.map_or(0, |listener| state.names.number(listener)),
                data: id.map_or(ptr::null_mut(), |id| state.names.data(id)),
            });
            return Ok(());
        }
    })
}
