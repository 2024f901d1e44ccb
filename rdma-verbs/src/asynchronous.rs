//! Asynchronous events, `ibv_get_async_event(3)`, and which channels receive them.
//!
//! librdmacm opens a device once for the process: its identifiers share a context and `async_fd`,
//! which is made non-blocking here. Every [`Channel`] with an identifier on it watches it. The
//! first one asked takes the events, hands each to the channels concerned, and acknowledges it
//! under the same lock, so destroying a queue does not wait. No other code may read these events.

use core::ptr::NonNull;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rdma_backend::{AsyncEvent, IdentifierKey};

use crate::channel::Channel;
use crate::error::errno;
use crate::locked;
use crate::sys::{self, Api, generated as c, ibv_async_event, ibv_context, ibv_cq, ibv_qp};

const BUDGET: usize = 64;

/// The channel of an identifier's events, shared with the identifier, which can migrate to another.
pub(crate) type CurrentChannel = Arc<Mutex<Arc<Channel>>>;

static REGISTRY: Mutex<Registry<CurrentChannel>> = Mutex::new(Registry(BTreeMap::new()));

/// Identifiers with a device, whose events go to a `C` each.
struct Registry<C>(BTreeMap<IdentifierKey, Entry<C>>);

struct Entry<C> {
    current_channel: C,
    context: usize,
    uses: Uses,
}

/// The objects that an identifier uses, by address, only to be compared.
struct Uses {
    port: u8,
    pair: usize,
    queue: usize,
}

pub(crate) fn enter(
    key: IdentifierKey,
    current_channel: &CurrentChannel,
    context: NonNull<ibv_context>,
    port: u8,
) {
    let former = locked(&REGISTRY).enter(key, Arc::clone(current_channel), context.as_ptr() as usize, port);
    // Possibly the last handle to its channel: dropped outside the lock, as in `leave`.
    drop(former);
}

pub(crate) fn set_pair(key: IdentifierKey, pair: *const ibv_qp, queue: *const ibv_cq) {
    locked(&REGISTRY).set_pair(key, pair as usize, queue as usize);
}

pub(crate) fn leave(key: IdentifierKey) {
    let entry = locked(&REGISTRY).0.remove(&key);
    drop(entry);
}

/// Hands out a device's waiting events. False if the device is gone.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn collect(api: &Api, context: NonNull<ibv_context>) -> bool {
    let registry = locked(&REGISTRY);
    for _ in 0..BUDGET {
        let mut event: ibv_async_event = sys::zeroed();
        // SAFETY: ibv_get_async_event(3): an open context with a non-blocking descriptor.
        if unsafe { (api.ibv_get_async_event)(context.as_ptr(), &raw mut event) } != 0 {
            match errno() {
                libc::EINTR => continue,
                cause => return cause == libc::EAGAIN,
            }
        }
        for (key, current_channel) in registry.concerned(context.as_ptr() as usize, &event) {
            locked(current_channel).tell(key, AsyncEvent::from_number(event.event_type));
        }
        // SAFETY: ibv_ack_async_event(3): once per event; destroying its object waits for this.
        unsafe { (api.ibv_ack_async_event)(&raw mut event) };
    }
    true
}

impl<C> Registry<C> {
    /// Keeps the queue pair: an identifier is entered again before a second is refused.
    fn enter(
        &mut self,
        key: IdentifierKey,
        current_channel: C,
        context: usize,
        port: u8,
    ) -> Option<Entry<C>> {
        let (pair, queue) = self.0.get(&key).map_or((0, 0), |entry| (entry.uses.pair, entry.uses.queue));
        self.0.insert(key, Entry { current_channel, context, uses: Uses { port, pair, queue } })
    }

    fn set_pair(&mut self, key: IdentifierKey, pair: usize, queue: usize) {
        if let Some(entry) = self.0.get_mut(&key) {
            (entry.uses.pair, entry.uses.queue) = (pair, queue);
        }
    }

    fn concerned(
        &self,
        context: usize,
        event: &ibv_async_event,
    ) -> impl Iterator<Item = (IdentifierKey, &C)> {
        self.0
            .iter()
            .filter(move |(_, entry)| entry.context == context && entry.uses.concerned(event))
            .map(|(key, entry)| (*key, &entry.current_channel))
    }
}

impl Uses {
    fn concerned(&self, event: &ibv_async_event) -> bool {
        match event.event_type {
            // SAFETY: for this event the arm in use is the completion queue; not dereferenced.
            c::IBV_EVENT_CQ_ERR => self.queue == unsafe { event.element.cq } as usize,
            c::IBV_EVENT_QP_FATAL
            | c::IBV_EVENT_QP_REQ_ERR
            | c::IBV_EVENT_QP_ACCESS_ERR
            | c::IBV_EVENT_COMM_EST
            | c::IBV_EVENT_SQ_DRAINED
            | c::IBV_EVENT_PATH_MIG
            | c::IBV_EVENT_PATH_MIG_ERR
            | c::IBV_EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: for these events the arm in use is the queue pair; not dereferenced.
                self.pair == unsafe { event.element.qp } as usize
            }
            c::IBV_EVENT_DEVICE_FATAL => true,
            c::IBV_EVENT_PORT_ACTIVE | c::IBV_EVENT_PORT_ERR => {
                // SAFETY: for these events the arm in use is the port's number.
                i32::from(self.port) == unsafe { event.element.port_num }
            }
            // Shared receive queues and subnets, which this crate does not use, or unknown.
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(number: u32, address: usize) -> ibv_async_event {
        let qp = address as *mut c::ibv_qp;
        ibv_async_event { element: c::ibv_async_event__bindgen_ty_1 { qp }, event_type: number }
    }

    #[test]
    fn events_are_for_those_whom_they_concern() {
        let uses = Uses { port: 1, pair: 0x10, queue: 0x20 };
        let table = [
            (c::IBV_EVENT_QP_FATAL, 0x10, true),
            (c::IBV_EVENT_QP_FATAL, 0x20, false),
            (c::IBV_EVENT_CQ_ERR, 0x20, true),
            (c::IBV_EVENT_CQ_ERR, 0x10, false),
            (c::IBV_EVENT_DEVICE_FATAL, 0, true),
            (c::IBV_EVENT_PORT_ERR, 1, true),
            (c::IBV_EVENT_PORT_ERR, 2, false),
            (c::IBV_EVENT_SRQ_ERR, 0x10, false),
            (12345, 0x10, false),
        ];
        for (number, address, concerned) in table {
            assert_eq!(uses.concerned(&event(number, address)), concerned, "{number} {address:#x}");
        }
    }

    #[test]
    fn an_identifier_that_is_entered_again_keeps_its_queue_pair() {
        const DEVICE: usize = 0x1;
        let (first, second) = (IdentifierKey(1), IdentifierKey(2));
        let mut registry = Registry(BTreeMap::new());
        let told = |registry: &Registry<char>, event: &ibv_async_event| -> Vec<(IdentifierKey, char)> {
            registry.concerned(DEVICE, event).map(|(key, channel)| (key, *channel)).collect()
        };
        for (key, channel, pair) in [(first, 'a', 0x10), (second, 'b', 0x30)] {
            assert!(registry.enter(key, channel, DEVICE, 1).is_none());
            registry.set_pair(key, pair, pair + 1);
        }
        assert!(registry.enter(first, 'c', DEVICE, 1).is_some());
        assert_eq!(told(&registry, &event(c::IBV_EVENT_QP_FATAL, 0x10)), [(first, 'c')]);
        assert_eq!(told(&registry, &event(c::IBV_EVENT_CQ_ERR, 0x11)), [(first, 'c')]);
        assert_eq!(told(&registry, &event(c::IBV_EVENT_DEVICE_FATAL, 0)), [(first, 'c'), (second, 'b')]);
        registry.set_pair(first, 0, 0);
        assert_eq!(told(&registry, &event(c::IBV_EVENT_QP_FATAL, 0x10)), []);
        assert_eq!(registry.concerned(DEVICE + 1, &event(c::IBV_EVENT_DEVICE_FATAL, 0)).count(), 0);
    }

    #[test]
    fn the_event_numbers_are_those_of_the_header() {
        let table = [
            (AsyncEvent::CqErr, c::IBV_EVENT_CQ_ERR),
            (AsyncEvent::QpFatal, c::IBV_EVENT_QP_FATAL),
            (AsyncEvent::QpReqErr, c::IBV_EVENT_QP_REQ_ERR),
            (AsyncEvent::QpAccessErr, c::IBV_EVENT_QP_ACCESS_ERR),
            (AsyncEvent::CommEst, c::IBV_EVENT_COMM_EST),
            (AsyncEvent::DeviceFatal, c::IBV_EVENT_DEVICE_FATAL),
            (AsyncEvent::PortActive, c::IBV_EVENT_PORT_ACTIVE),
            (AsyncEvent::PortErr, c::IBV_EVENT_PORT_ERR),
            (AsyncEvent::Other(c::IBV_EVENT_GID_CHANGE), c::IBV_EVENT_GID_CHANGE),
        ];
        for (event, number) in table {
            assert_eq!(AsyncEvent::from_number(number), event);
        }
    }
}
