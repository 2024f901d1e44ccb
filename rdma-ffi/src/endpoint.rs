//! Endpoints, each with a lock, and the turns of an event loop.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::time::Duration;

use any_backend::{AnyBackend, either, one_of};
use parking_lot::Mutex;
use rdma_backend::time::Instant;
use rdma_conn::{ConnectionId, ConnectionMap, ListenerId, Receiving, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::device::{Device, release};
use crate::error::{Code, Failed, Failure, Told, call, coded, guarded, tell};
use crate::options::{self, Limits};

/// Connections and listeners that share one descriptor, for one event loop.
///
/// The loop: wait until the descriptor is readable or the time-out has passed, call
/// `vkrdma_progress`, handle the events that it returns, and ask for the next time-out. Any thread
/// may make any call, because the endpoint has a lock. A call of another thread that gives a
/// sleeping loop something to do makes the descriptor readable.
pub struct Endpoint {
    descriptor: RawFd,
    /// Whether the descriptor is readable when there is something to do, and not only when woken.
    watches: bool,
    waker: Waker,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) kind: Kind,
    pub(crate) names: Names,
    sleep: Sleep,
    /// Whether a call has panicked.
    broken: bool,
}

one_of!(pub(crate) enum Kind(Side));

pub(crate) struct Side<B: rdma_conn::Descriptors> {
    pub(crate) endpoint: rdma_conn::Endpoint<B>,
    /// Incomplete receives into registered memory.
    pub(crate) receiving: HashMap<ConnectionId, Part<B>>,
}

pub(crate) struct Part<B: rdma_conn::Descriptors> {
    /// The buffer's address, and the program's offset and length.
    pub(crate) what: (usize, usize, usize),
    pub(crate) receiving: Receiving<B>,
}

#[derive(Default)]
pub(crate) struct Names {
    data: ConnectionMap<usize>,
    listeners: Vec<(u64, ListenerId)>,
    last_listener: u64,
}

/// Whether the event loop may be sleeping, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    /// It has not asked for the next time-out since its last turn, but will.
    Awake,
    /// It was told to come back then, if at all.
    Until(Option<Instant>),
}

impl Names {
    pub(crate) fn enter(&mut self, listener: ListenerId) -> u64 {
        self.last_listener += 1;
        self.listeners.push((self.last_listener, listener));
        self.last_listener
    }

    pub(crate) fn listener(&self, number: u64) -> Result<ListenerId, Failure> {
        let found = self.listeners.iter().find(|(other, _)| *other == number);
        found.map(|(_, listener)| *listener).ok_or_else(|| {
            Failure::Here(Code::VKRDMA_NO_SUCH_LISTENER, "there is no such listener: it was closed".into())
        })
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<ListenerId> {
        let at = self.listeners.iter().position(|(other, _)| *other == number)?;
        Some(self.listeners.swap_remove(at).1)
    }

    /// Returns 0 if the program has closed the listener.
    pub(crate) fn number(&self, listener: ListenerId) -> u64 {
        self.listeners.iter().find(|(_, other)| *other == listener).map_or(0, |(number, _)| *number)
    }

    pub(crate) fn set_data(&mut self, id: ConnectionId, data: *mut c_void) {
        if data.is_null() {
            self.data.remove(id);
        } else {
            self.data.insert(id, data.expose_provenance());
        }
    }

    pub(crate) fn data(&self, id: ConnectionId) -> *mut c_void {
        self.data.get(id).map_or(ptr::null_mut(), |address| ptr::with_exposed_provenance_mut(*address))
    }
}

impl State {
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        self.names.data.remove(id);
        either!(&mut self.kind, Kind(side) => drop(side.receiving.remove(&id)));
    }

    /// The event loop makes a turn.
    #[inline(always)]
    pub(crate) const fn wakes(&mut self) {
        self.sleep = Sleep::Awake;
    }

    fn next_timeout(&self) -> Option<Instant> {
        either!(&self.kind, Kind(side) => side.endpoint.next_timeout())
    }
}

pub(crate) fn connection(number: u64) -> Result<ConnectionId, Failure> {
    ConnectionId::from_u64(number).ok_or_else(|| rdma_conn::Error::NoSuchConnection.into())
}

/// Never 0.
pub(crate) fn number_of(id: ConnectionId) -> u64 {
    id.as_u64()
}

/// Marks the state if a call does not return but panics.
struct Breaks<'a>(&'a mut State);

impl Drop for Breaks<'_> {
    fn drop(&mut self) {
        self.0.broken = true;
    }
}

impl Endpoint {
    fn of(kind: Kind) -> Result<Self, Failure> {
        Self::with(kind, true)
    }

    /// Wraps an endpoint whose completions the program watches.
    pub(crate) fn outside(kind: Kind) -> Result<Self, Failure> {
        Self::with(kind, false)
    }

    fn with(mut kind: Kind, watches: bool) -> Result<Self, Failure> {
        let waker = either!(&mut kind, Kind(side) => side.endpoint.waker())?;
        let descriptor = either!(&kind, Kind(side) => side.endpoint.as_fd().as_raw_fd());
        let state = Mutex::new(State { kind, names: Names::default(), sleep: Sleep::Awake, broken: false });
        Ok(Self { descriptor, watches, waker, state })
    }

    /// Runs `does` under the lock. Returns `None` after a call that panicked, which closes the
    /// endpoint.
    #[inline(always)]
    fn alone<T>(&self, does: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut state = self.state.lock();
        if state.broken {
            return None;
        }
        let breaks = Breaks(&mut state);
        let result = does(&mut *breaks.0);
        std::mem::forget(breaks);
        Some(result)
    }

    /// Wakes a sleeping event loop if there is something to do before its time-out.
    #[inline(always)]
    fn rouse(&self, state: &mut State) {
        if let Sleep::Until(by) = state.sleep {
            self.rouse_before(state, by);
        }
    }

    #[inline(never)]
    fn rouse_before(&self, state: &mut State, by: Option<Instant>) {
        if state.next_timeout().is_some_and(|due| by.is_none_or(|by| due < by)) {
            state.sleep = Sleep::Awake;
            // An eventfd can always take one more.
            self.waker.wake();
        }
    }
}

impl<B: rdma_conn::Descriptors> Side<B> {
    pub(crate) fn new(endpoint: rdma_conn::Endpoint<B>) -> Self {
        Self { endpoint, receiving: HashMap::new() }
    }
}

#[cold]
fn closed() -> Failure {
    let text = "an earlier call panicked in this endpoint: free it";
    Failure::Here(Code::VKRDMA_PANIC, text.into())
}

#[cold]
fn null_endpoint() -> Failure {
    Failure::argument("the endpoint is null")
}

/// Asks under the lock, for a call that goes on without it.
pub(crate) fn ask<T>(
    endpoint: Option<&Endpoint>,
    does: impl FnOnce(&mut State) -> Result<T, Failure>,
) -> Result<T, Failure> {
    endpoint.ok_or_else(null_endpoint)?.alone(does).ok_or_else(closed)?
}

#[inline(always)]
pub(crate) fn on(
    endpoint: Option<&Endpoint>,
    told: Told<'_>,
    does: impl FnOnce(&mut State) -> Result<(), Failure>,
) -> Code {
    guarded(told, |told| {
        let Some(endpoint) = endpoint else { return tell(told, null_endpoint()) };
        let code = endpoint.alone(|state| {
            let code = coded(told, does(state));
            endpoint.rouse(state);
            code
        });
        code.unwrap_or_else(|| tell(told, closed()))
    })
}

#[inline(always)]
pub(crate) fn on_connection(
    endpoint: Option<&Endpoint>,
    number: u64,
    told: Told<'_>,
    does: impl FnOnce(&mut State, ConnectionId) -> Result<(), Failure>,
) -> Code {
    on(endpoint, told, |state| does(state, connection(number)?))
}

#[inline(always)]
pub(crate) fn place<T>(place: Option<&mut MaybeUninit<T>>) -> Result<&mut MaybeUninit<T>, Failure> {
    place.ok_or(Failure::argument("the place for the result is null"))
}

fn give(place: Option<&mut MaybeUninit<*mut Endpoint>>, kind: Kind) -> Result<(), Failure> {
    let endpoint = Endpoint::of(kind)?;
    self::place(place)?.write(Box::into_raw(Box::new(endpoint)));
    Ok(())
}

/// Creates an endpoint without connections. `limits` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_endpoint_new(
    device: Option<&Device>,
    limits: *const Limits,
    endpoint: Option<&mut MaybeUninit<*mut Endpoint>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        let device = device.ok_or(Failure::argument("the device is null"))?;
        // SAFETY: the caller's promise.
        let limits = unsafe { options::limits(limits) }?;
        let kind = either!(&device.0, AnyBackend(backend) -> Kind => {
            Side::new(rdma_conn::Endpoint::new(backend, limits)?)
        });
        give(endpoint, kind)
    })
}

/// Creates another endpoint on the device of `of`, for another thread. The connections of both
/// count towards the same limits.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_endpoint_new_sharing(
    of: Option<&Endpoint>,
    endpoint: Option<&mut MaybeUninit<*mut Endpoint>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on(of, error, |state| {
        give(endpoint, either!(&state.kind, Kind(side) -> Kind => Side::new(side.endpoint.sharing_limits()?)))
    })
}

/// Frees an endpoint: closes its listeners, aborts its connections and closes its descriptor. Make
/// no other call on it meanwhile or later. NULL is ignored. In a forked child it has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_endpoint_free(endpoint: Option<Box<Endpoint>>) {
    release(endpoint);
}

/// Returns the endpoint's descriptor, which the endpoint closes when it is freed; -1 for NULL, and
/// in a forked child. When it is readable, level- or edge-triggered, call `vkrdma_progress`.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_descriptor(endpoint: Option<&Endpoint>) -> c_int {
    match endpoint {
        Some(endpoint) if !rdma_process::is_child() => endpoint.descriptor,
        _ => -1,
    }
}

/// Returns the microseconds, rounded up, after which `vkrdma_progress` must be called: 0 for now,
/// -1 for never. Ask before sleeping. If a later call makes the time shorter, it makes the
/// descriptor readable.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_next_timeout(
    endpoint: Option<&Endpoint>,
    microseconds: Option<&mut MaybeUninit<i64>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        let endpoint = endpoint.ok_or_else(null_endpoint)?;
        let microseconds = place(microseconds)?;
        microseconds.write(match endpoint.alone(fall_asleep).ok_or_else(closed)? {
            Some(left) => i64::try_from(left.as_nanos().div_ceil(1000)).unwrap_or(i64::MAX),
            None => -1,
        });
        Ok(())
    })
}

/// Returns how long the loop may sleep, and records that it sleeps.
fn fall_asleep(state: &mut State) -> Option<Duration> {
    let due = state.next_timeout();
    state.sleep = Sleep::Until(due);
    due.map(|due| due.since(either!(&state.kind, Kind(side) => side.endpoint.now())))
}

/// Sleeps until `vkrdma_progress` has something to do, for at most `microseconds` (-1 for no
/// limit), for programs without an event loop. Other threads may call the endpoint meanwhile. It
/// may return although nothing has happened.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_wait(
    endpoint: Option<&Endpoint>,
    microseconds: i64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        let endpoint = endpoint.ok_or_else(null_endpoint)?;
        if !endpoint.watches {
            let text = "this endpoint cannot wait: watch its descriptors";
            return Err(Failure::Here(Code::VKRDMA_MISUSE, text.into()));
        }
        let due = endpoint.alone(fall_asleep).ok_or_else(closed)?;
        let limit = u64::try_from(microseconds).ok().map(Duration::from_micros);
        let limit = match (due, limit) {
            (Some(due), Some(limit)) => Some(due.min(limit)),
            (due, limit) => due.or(limit),
        };
        if limit.is_some_and(|limit| limit.is_zero()) {
            return Ok(());
        }
        // SAFETY: the descriptor is open while the endpoint exists; no call frees it meanwhile.
        let descriptor = unsafe { BorrowedFd::borrow_raw(endpoint.descriptor) };
        // Longer than any program waits, and within the kernel's range.
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs().min(1 << 20).cast_signed(),
            tv_nsec: limit.subsec_nanos().into(),
        });
        match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(Failure::Here(Code::VKRDMA_WAIT, format!("poll: {errno}").into())),
        }
    })
}

/// Makes the descriptor readable, and ends the current or next `vkrdma_wait`. It takes no lock.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_wake(endpoint: Option<&Endpoint>, error: Option<&mut MaybeUninit<Failed>>) -> Code {
    call(error, || {
        endpoint.ok_or_else(null_endpoint)?.waker.wake();
        Ok(())
    })
}

/// Panics in an endpoint, for tests. Release builds do not have it.
///
/// cbindgen:ignore
#[cfg(debug_assertions)]
#[unsafe(no_mangle)]
extern "C" fn vkrdma_panic(endpoint: Option<&Endpoint>, error: Option<&mut MaybeUninit<Failed>>) -> Code {
    on(endpoint, error, |_| panic!("a test of panics"))
}
