//! The turns of an event loop, and the events that they return.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use any_backend::either;
use rdma_conn::Descriptors;

use crate::endpoint::{Endpoint, Kind, Names, number_of, on, place};
use crate::error::{Code, Failed, Failure};
use crate::sized::{self, Grows};

/// What an event reports, as bits. Later versions may have more: ignore those that you do not know.
#[repr(u32)]
#[allow(non_camel_case_types, reason = "the header's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A connection is established: one that the program asked for, or a new one of `listener`.
    VKRDMA_EVENT_OPENED = 1,
    /// Bytes have arrived. Read until VKRDMA_AGAIN, or until a read returns fewer than it may.
    VKRDMA_EVENT_READABLE = 2,
    /// A write, lend or flush that could not complete can go on.
    VKRDMA_EVENT_WRITABLE = 4,
    /// Some lent memory was returned.
    VKRDMA_EVENT_RETURNED = 8,
    /// The connection has ended, or could not be established. Arrived bytes can still be read.
    /// `vkrdma_check` returns the reason; then `vkrdma_abort` frees it.
    VKRDMA_EVENT_ENDED = 16,
    /// A listener cannot accept, for a reason on this side. `vkrdma_accept_error` returns it.
    VKRDMA_EVENT_ACCEPT_FAILED = 32,
}

/// What has happened to a connection or a listener since its last event. It may be spurious. Later
/// versions append fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Event {
    /// Bits of vkrdma_event_kind.
    pub kinds: u32,
    /// 0.
    pub reserved: u32,
    /// The connection; 0 if the event concerns only a listener.
    pub connection: u64,
    /// The listener that accepted or cannot accept; 0 in other events, and if it was closed.
    pub listener: u64,
    /// The value of `vkrdma_set_data` for the connection, or NULL.
    pub data: *mut c_void,
}

// SAFETY: two numbers of half a word, and numbers and an address of a word: there is no padding.
unsafe impl Grows for Event {
    const FIRST: usize = 2 * 4 + 3 * 8;
}

const _: () = {
    use rdma_conn::Events;
    assert!(EventKind::VKRDMA_EVENT_OPENED as u32 == Events::OPENED);
    assert!(EventKind::VKRDMA_EVENT_READABLE as u32 == Events::READABLE);
    assert!(EventKind::VKRDMA_EVENT_WRITABLE as u32 == Events::WRITABLE);
    assert!(EventKind::VKRDMA_EVENT_RETURNED as u32 == Events::RETURNED);
    assert!(EventKind::VKRDMA_EVENT_ENDED as u32 == Events::ENDED);
    assert!(EventKind::VKRDMA_EVENT_ACCEPT_FAILED as u32 == Events::ACCEPT_FAILED);
};

/// The array of a caller, whose events may be those of a later version, and longer.
struct Room {
    events: *mut u8,
    capacity: usize,
    size: usize,
}

impl Room {
    /// # Safety
    /// `events` is null or points to `capacity` structures of `size` bytes.
    unsafe fn new(events: *mut Event, capacity: usize, size: usize) -> Result<Self, Failure> {
        if events.is_null() {
            return Err(Failure::argument("the array of events is null"));
        }
        if capacity == 0 {
            return Err(Failure::argument("the array of events has no room"));
        }
        if capacity > sized::MANY {
            return Err(Failure::argument("the array of events is longer than memory"));
        }
        sized::check::<Event>(size)?;
        Ok(Self { events: events.cast(), capacity, size })
    }

    /// Fills the array with events, one for each connection, and returns how many there are.
    #[inline(always)]
    fn fill<B: Descriptors>(&self, endpoint: &mut rdma_conn::Endpoint<B>, names: &Names) -> usize {
        let mut count = 0;
        while count < self.capacity {
            let Some(told) = endpoint.next_events() else { break };
            let event = Event {
                kinds: told.kinds,
                reserved: 0,
                connection: told.id.map_or(0, number_of),
                listener: told.listener.map_or(0, |listener| names.number(listener)),
                data: told.id.map_or(ptr::null_mut(), |id| names.data(id)),
            };
            // SAFETY: the caller has so many places, each of a size that was checked.
            unsafe { sized::put(self.events.add(count * self.size).cast(), self.size, &event) };
            count += 1;
        }
        count
    }
}

/// Makes a turn: takes completions and events of all connections, and does what is due, without
/// waiting. Returns what has happened in `events`, an array of `capacity` structures of `size`
/// bytes, which is `sizeof(vkrdma_event)`, and how many it has filled in `*count`, which may be 0.
///
/// A connection has one event in the array, for all that has happened to it. Events that find no
/// room are kept: if `*count` is `capacity`, call again. Until then, and while bounded work is
/// left, `vkrdma_next_timeout` returns 0.
///
/// While the program handles an event, it may free the connection of a later one: what `data`
/// points to must be valid until the whole array is handled.
///
/// A failure of a connection ends only that. An error of this call concerns the endpoint: free it.
/// VKRDMA_INVALID_ARGUMENT, VKRDMA_INVALID_OPTIONS: the array is null or empty, or `size` is wrong;
/// nothing was done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_progress(
    endpoint: Option<&Endpoint>,
    events: *mut Event,
    capacity: usize,
    size: usize,
    count: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(endpoint, error, |state| {
        // SAFETY: the caller's promise.
        let room = unsafe { Room::new(events, capacity, size) }?;
        let count = place(count)?;
        state.wakes();
        let (kind, names) = (&mut state.kind, &state.names);
        either!(kind, Kind(side) => {
            side.endpoint.progress()?;
            count.write(room.fill(&mut side.endpoint, names));
        });
        Ok(())
    })
}
