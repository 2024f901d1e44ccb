//! Asynchronous events, `ibv_get_async_event(3)`, and which channels receive them.
//!
//! librdmacm opens a device once for the process: all identifiers share a context and `async_fd`.
//! One thread for each device in use takes the events, hands each to the channels concerned, and
//! acknowledges it under the same lock, so destroying a queue does not wait.
//!
//! Channels do not watch `async_fd` themselves: Linux lets few epoll instances watch one
//! descriptor, from 1000 down to 100 if they are watched by others in turn (`path_limits` in
//! fs/eventpoll.c). Nor is it made non-blocking, as other code of the process may read it, too.

use core::ptr::NonNull;
use core::time::Duration;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use rdma_backend::{AsyncEvent, IdentifierKey};

use crate::channel::Channel;
use crate::device::Device;
use crate::error::{Error, Stage, errno};
use crate::locked;
use crate::sys::{self, Api, generated as c, ibv_async_event, ibv_context, ibv_cq, ibv_qp};

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

/// Devices whose events a thread takes. Their contexts stay open for the rest of the process.
static TAKEN: Mutex<Vec<&'static Taken>> = Mutex::new(Vec::new());

struct Taken {
    api: &'static Api,
    context: NonNull<ibv_context>,
    fd: RawFd,
    state: Mutex<State>,
    changed: Condvar,
}

// SAFETY: of the context, which is never closed, only events are read, by calls allowed from any
// thread (ibv_get_async_event(3)).
unsafe impl Send for Taken {}
// SAFETY: as above.
unsafe impl Sync for Taken {}

enum State {
    /// Events may wait at the descriptor. None is between there and its channels.
    Asleep,
    /// Since then an event may have been taken that is not on its channels yet.
    Taking(Instant),
    /// The device is gone.
    Gone,
}

/// How long an event takes from its device to its channels, unless the machine stands still.
const HANDED_OUT: Duration = Duration::from_millis(100);

/// How long a thread may take to wake up.
const AWAKE: Duration = Duration::from_secs(1);

/// Has the events of a device taken from now on. Does nothing if the device may be closed.
pub(crate) fn take_from(api: &'static Api, context: NonNull<ibv_context>) -> Result<(), Error> {
    let Some(context) = Device::held_for_ever(api, context) else { return Ok(()) };
    let mut devices = locked(&TAKEN);
    if devices.iter().any(|device| device.context == context) {
        return Ok(());
    }
    // SAFETY: the context is open; the field is never written after opening.
    let fd = unsafe { (*context.as_ptr()).async_fd };
    let (state, changed) = (Mutex::new(State::Asleep), Condvar::new());
    let device: &Taken = Box::leak(Box::new(Taken { api, context, fd, state, changed }));
    // Its name as `ps -L` shows it has at most 15 bytes.
    rdma_process::spawn("rdma-events", || device.serve()).map_err(|error| Error::Call {
        call: "starting the thread for the device's events",
        errno: error.raw_os_error().unwrap_or(0),
        stage: Stage::Create,
    })?;
    devices.push(device);
    Ok(())
}

/// Returns once every event that waits at a device now is on its channels.
pub(crate) fn catch_up() {
    let mut nth = 0;
    // Not under the lock, which others need to make objects.
    while let Some(device) = { locked(&TAKEN).get(nth).copied() } {
        device.catch_up();
        nth += 1;
    }
}

impl Taken {
    fn serve(&self) {
        while let Some(readable) = self.wait(-1) {
            self.set(State::Taking(Instant::now()));
            match self.take() {
                Ok(()) | Err(libc::EINTR) => {}
                // Other code has read it, or there is only an end.
                Err(libc::EAGAIN) if readable => {}
                Err(_) => break,
            }
            self.set(State::Asleep);
        }
        self.set(State::Gone);
    }

    fn set(&self, state: State) {
        *locked(&self.state) = state;
        self.changed.notify_all();
    }

    /// Waits for so many milliseconds, -1 for ever, until the descriptor has something. Returns
    /// whether it is an event, rather than the end of the device; `None` for nothing.
    fn wait(&self, milliseconds: i32) -> Option<bool> {
        let mut polled = libc::pollfd { fd: self.fd, events: libc::POLLIN, revents: 0 };
        loop {
            // SAFETY: poll(2): one live entry.
            match unsafe { libc::poll(&raw mut polled, 1, milliseconds) } {
                0 => return None,
                1.. => return Some(polled.revents & libc::POLLIN != 0),
                _ if errno() != libc::EINTR => return None,
                _ => {}
            }
        }
    }

    /// Takes an event and hands it to its channels, or returns an error number. Waits for the next
    /// if it was discarded, or read by other code, unless the descriptor is non-blocking.
    fn take(&self) -> Result<(), i32> {
        let mut event: ibv_async_event = sys::zeroed();
        // SAFETY: ibv_get_async_event(3): an open context, and a live structure.
        if unsafe { (self.api.ibv_get_async_event)(self.context.as_ptr(), &raw mut event) } != 0 {
            return Err(errno());
        }
        let registry = locked(&REGISTRY);
        for (key, current_channel) in registry.concerned(self.context.as_ptr() as usize, &event) {
            locked(current_channel).tell(key, AsyncEvent::from_number(event.event_type));
        }
        // SAFETY: ibv_ack_async_event(3): once per event; destroying its object waits for this.
        unsafe { (self.api.ibv_ack_async_event)(&raw mut event) };
        Ok(())
    }

    /// Waits for the thread if an event is on the way to its channels: it may explain what they
    /// are told otherwise.
    ///
    /// The wait has a bound, because what made the descriptor readable may be gone before the
    /// thread takes it: destroying an object discards its events.
    fn catch_up(&self) {
        let begun = Instant::now();
        let mut state = locked(&self.state);
        loop {
            let left = match *state {
                State::Gone => return,
                State::Taking(since) if since.elapsed() < HANDED_OUT => {
                    HANDED_OUT.saturating_sub(since.elapsed())
                }
                _ if self.wait(0) == Some(true) => AWAKE.saturating_sub(begun.elapsed()),
                _ => return,
            };
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
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
