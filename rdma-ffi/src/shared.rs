//! Connection-manager events that endpoints share.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use any_backend::{AnyBackend, either, one_of};
use rdma_conn::Error;

use crate::device::{Device, release};
use crate::endpoint::{Endpoint, Kind, Side, on_connection, place};
use crate::error::{Code, Failed, Failure, call};
use crate::options::{self, Limits};

/// One channel of connection-manager events, for many endpoints. Created by
/// `vkrdma_shared_events_new`.
pub struct SharedEvents(Shared);

type Channel<B> = Arc<rdma_conn::SharedEvents<B>>;

one_of!(enum Shared(Channel));

/// Creates a channel of events, which no endpoint uses yet.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_shared_events_new(
    device: Option<&Device>,
    events: Option<&mut MaybeUninit<*mut SharedEvents>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        let device = device.ok_or(Failure::argument("the device is null"))?;
        let events = place(events)?;
        let shared =
            either!(&device.0, AnyBackend(backend) -> Shared => rdma_conn::SharedEvents::new(backend)?);
        events.write(Box::into_raw(Box::new(SharedEvents(shared))));
        Ok(())
    })
}

/// Frees a channel of events. It closes with the last of its endpoints. NULL is ignored. In a
/// forked child it has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_shared_events_free(events: Option<Box<SharedEvents>>) {
    release(events);
}

/// Returns the channel's descriptor; -1 for NULL, and in a forked child. When it is readable, call
/// `vkrdma_shared_events_dispatch`.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_shared_events_descriptor(events: Option<&SharedEvents>) -> c_int {
    match events {
        Some(SharedEvents(shared)) if !rdma_process::is_child() => {
            either!(shared, Shared(events) => events.as_fd().as_raw_fd())
        }
        _ => -1,
    }
}

/// Hands events to their endpoints, and wakes these. A call is bounded: while events are left, the
/// descriptor stays readable. It takes no lock of an endpoint.
///
/// It does not wait for an event. It waits while another thread hands events out. On a device it
/// also waits, for at most a second, for an asynchronous event that another thread is taking.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_shared_events_dispatch(
    events: Option<&SharedEvents>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || Ok(either!(&events.ok_or_else(null)?.0, Shared(events) => events.dispatch())?))
}

/// Creates an endpoint that takes its events from `events` and connects, but does not listen. It
/// costs a descriptor for each connection, and `waker`. `limits` may be NULL.
///
/// A wake-up writes eight bytes to `waker`, without blocking and without SIGPIPE: a non-blocking
/// eventfd, or one end of a socket pair, whose other end is then readable. The program takes the
/// bytes out. It calls `vkrdma_progress` when they come, when a `vkrdma_completions_descriptor` is
/// readable, and after `vkrdma_next_timeout`. `vkrdma_descriptor` returns `waker`, which the
/// endpoint closes when it is freed. `vkrdma_wait` returns VKRDMA_MISUSE. If the call fails, also
/// in a forked child, `waker` is closed. VKRDMA_INVALID_ARGUMENT: also if it is a pipe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_endpoint_new_with_events(
    events: Option<&SharedEvents>,
    limits: *const Limits,
    waker: c_int,
    endpoint: Option<&mut MaybeUninit<*mut Endpoint>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    // Outside `call`, which does nothing in a forked child.
    // SAFETY: the caller gives the descriptor away, also if the call fails.
    let waker = (waker >= 0).then(|| unsafe { OwnedFd::from_raw_fd(waker) });
    call(error, || {
        let waker = waker.ok_or(Failure::argument("the waker is no descriptor"))?;
        let events = events.ok_or_else(null)?;
        // SAFETY: the caller's promise.
        let limits = unsafe { options::limits(limits) }?;
        let endpoint = place(endpoint)?;
        let kind = either!(&events.0, Shared(events) -> Kind => {
            Side::new(rdma_conn::Endpoint::with_events(events, limits, waker)?)
        });
        endpoint.write(Box::into_raw(Box::new(Endpoint::outside(kind)?)));
        Ok(())
    })
}

/// Returns the descriptor of a connection's completions in `*descriptor`: when it is readable, call
/// `vkrdma_progress`. It is open until the connection is freed. Programs need it only for
/// endpoints of `vkrdma_endpoint_new_with_events`.
///
/// VKRDMA_NO_SUCH_CONNECTION: also while there is none yet, because the route is being resolved.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_completions_descriptor(
    endpoint: Option<&Endpoint>,
    connection: u64,
    descriptor: Option<&mut MaybeUninit<c_int>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let found =
            either!(&state.kind, Kind(side) => side.endpoint.completions_fd(id).map(|fd| fd.as_raw_fd()));
        place(descriptor)?.write(found.ok_or(Error::NoSuchConnection)?);
        Ok(())
    })
}

fn null() -> Failure {
    Failure::argument("the shared events are null")
}
