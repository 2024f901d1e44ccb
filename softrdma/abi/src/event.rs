//! Event channels, events of the connection manager, and asynchronous events.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};

use softrdma_wire::{About, Event, Name, Reply, Request};

use crate::cm::{Identifier, identifier, migrate};
use crate::completion::Queue;
use crate::device::{PORT, attached_in, number_in};
use crate::layout::{
    IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED, IBV_QPS_RTS, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_ROUTE_RESOLVED, ibv_async_event, ibv_async_event__bindgen_ty_1,
    ibv_context, rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel, zeroed,
};
use crate::link::{ask, call, concluded, make_channel, pointer};
use crate::names;
use crate::pair::Pair;
use crate::shared::Shared;

/// An event channel, with its name in the fabric.
#[repr(C)]
struct Channel {
    channel: rdma_event_channel,
    name: Name,
}

/// An event, with the memory that it needs.
#[repr(C)]
struct Told {
    event: rdma_cm_event,
    /// The identifier whose destruction waits for the event's acknowledgement.
    identifier: *mut Identifier,
    data: Vec<u8>,
}

pub(crate) fn create_event_channel() -> Result<*mut rdma_event_channel, c_int> {
    let (name, descriptor) = make_channel(&Request::CreateEventChannel, Request::DestroyEventChannel)?;
    let channel = rdma_event_channel { fd: descriptor.into_raw_fd() };
    Ok(Box::into_raw(Box::new(Channel { channel, name })).cast())
}

/// Destroys an event channel.
///
/// # Safety
/// `channel` came from [`create_event_channel`], and the caller gives it up.
pub(crate) unsafe fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: made as a `Channel`, in a box.
    let channel = unsafe { Box::from_raw(channel.cast::<Channel>()) };
    // SAFETY: the descriptor that it was made with.
    drop(unsafe { OwnedFd::from_raw_fd(channel.channel.fd) });
    // If the fabric is gone, so is its channel.
    let _gone = ask(&Request::DestroyEventChannel(channel.name));
}

/// Returns the channel's name in the fabric.
///
/// # Safety
/// `channel` is alive.
pub(crate) unsafe fn name(channel: *mut rdma_event_channel) -> Name {
    // SAFETY: made as a `Channel`.
    unsafe { (*channel.cast::<Channel>()).name }
}

#[unsafe(no_mangle)]
pub extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(create_event_channel())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: rdma_destroy_event_channel(3): a channel from `rdma_create_event_channel`, which the
    // caller gives up.
    unsafe { destroy_event_channel(channel) };
}

/// Takes the next event by `take`. Sleeps on `descriptor` first if it blocks; otherwise returns
/// `EAGAIN` if there is no event.
///
/// The fabric is asked only when the descriptor is readable, so no call of another thread can come
/// between a request and the sleep. A program may destroy a channel while a thread sleeps on it;
/// that thread is never woken, as with the kernel's channels. `rping` ends this way.
pub(crate) fn wait<T>(
    descriptor: RawFd,
    mut take: impl FnMut() -> Result<Option<T>, c_int>,
) -> Result<T, c_int> {
    loop {
        // SAFETY: fcntl(2): reads the flags; a closed descriptor is refused.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        if flags == -1 {
            return Err(libc::EBADF);
        }
        let blocking = flags & libc::O_NONBLOCK == 0;
        if blocking {
            let mut entry = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
            // SAFETY: poll(2): one entry, which is written.
            if unsafe { libc::poll(&raw mut entry, 1, -1) } == -1 {
                return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
            }
        }
        match take() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) if !blocking => return Err(libc::EAGAIN),
            Ok(None) => {}
            // The channel was destroyed during the sleep.
            Err(libc::EBADF) if blocking => loop {
                std::thread::park();
            },
            Err(errno) => return Err(errno),
        }
    }
}

/// Takes the next event of a channel, and waits for it if the channel blocks.
///
/// # Safety
/// `channel` is alive.
pub(crate) unsafe fn next(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, c_int> {
    // SAFETY: the caller vouches for `channel`.
    let (descriptor, own) = unsafe { ((*channel).fd, name(channel)) };
    loop {
        let event = wait(descriptor, || match call(&Request::TakeEvent(own))? {
            Reply::Event(event) => Ok(event),
            _ => Err(libc::EPROTO),
        })?;
        // SAFETY: the caller vouches for `channel`.
        if let Some(told) = unsafe { tell(channel, *event) }? {
            return Ok(told);
        }
    }
}

/// Makes C's event from the fabric's; `None` if the identifier is gone.
///
/// # Safety
/// `channel` is alive.
unsafe fn tell(channel: *mut rdma_event_channel, event: Event) -> Result<Option<*mut rdma_cm_event>, c_int> {
    let told = event.listener.unwrap_or(event.id);
    // SAFETY: rdma_destroy_id(3): alive under the table's lock, and from here on until the event is
    // acknowledged.
    let count = |owner: *mut Identifier| unsafe { &(*owner).events }.read();
    let Some(owner) = names::find_with(told, count) else { return Ok(None) };
    // SAFETY: the caller vouches for `channel`; the counted event keeps `owner` alive.
    unsafe { tell_to(owner, channel, event) }.map(Some).inspect_err(|_| {
        // SAFETY: as above. The program does not get this event, so it cannot acknowledge it.
        unsafe { &(*owner).events }.acknowledge(1);
    })
}

/// Does what [`tell`] does, for an event whose identifier or listener is `owner`.
///
/// # Safety
/// `channel` is alive, and so is `owner`, because the event is counted.
unsafe fn tell_to(
    owner: *mut Identifier,
    channel: *mut rdma_event_channel,
    event: Event,
) -> Result<*mut rdma_cm_event, c_int> {
    let Event { id, listener, kind, status, params, data, local, remote } = event;
    let subject = match listener {
        // SAFETY: the caller vouches for `owner`. A new identifier has its listener's context
        // (rdma_get_cm_event(3)).
        Some(_) => Identifier::allocate(id, channel, unsafe { (*owner).id.context }),
        None => owner,
    };
    // SAFETY: as above, or just made.
    let about = unsafe { &mut *subject };
    about.set_addresses(local, remote);
    match kind {
        RDMA_CM_EVENT_ADDR_RESOLVED | RDMA_CM_EVENT_CONNECT_REQUEST => about.attach()?,
        RDMA_CM_EVENT_ESTABLISHED if !about.id.qp.is_null() => {
            // SAFETY: the identifier's own queue pair, which is alive.
            unsafe { (*about.id.qp).state = IBV_QPS_RTS };
        }
        RDMA_CM_EVENT_ROUTE_RESOLVED => about.id.route.num_paths = 0,
        _ => {}
    }
    let mut conn: rdma_conn_param = zeroed();
    if let Some(params) = params {
        conn.responder_resources = params.responder_resources;
        conn.initiator_depth = params.initiator_depth;
        conn.retry_count = params.retry_count;
        conn.rnr_retry_count = params.rnr_retry_count;
    }
    if !data.is_empty() {
        // The bytes stay where they are on the heap when the vector is moved.
        conn.private_data = data.as_ptr().cast::<c_void>();
        conn.private_data_len = u8::try_from(data.len()).unwrap_or(u8::MAX);
    }
    let mut event: rdma_cm_event = zeroed();
    event.id = subject.cast();
    event.listen_id = if listener.is_some() { owner.cast() } else { ptr::null_mut() };
    (event.event, event.status) = (kind, status);
    event.param.conn = conn;
    // SAFETY: as above. Identifiers that come to a synchronous listener are synchronous too.
    if listener.is_some() && unsafe { (*owner).synchronous } {
        // SAFETY: just made.
        unsafe { migrate(subject.cast(), ptr::null_mut()) }?;
    }
    Ok(Box::into_raw(Box::new(Told { event, identifier: owner, data })).cast())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: rdma_get_cm_event(3): a live channel.
    concluded(unsafe { next(channel) }.map(|event| {
        // SAFETY: rdma_get_cm_event(3): a place for the event.
        unsafe { into.write(event) };
    }))
}

/// Acknowledges and frees an event.
///
/// # Safety
/// `event` came from [`next`], and the caller gives it up.
pub(crate) unsafe fn ack(event: *mut rdma_cm_event) {
    // SAFETY: made as a `Told`, in a box.
    let told = unsafe { Box::from_raw(event.cast::<Told>()) };
    // SAFETY: alive, because its destruction waits for this (rdma_destroy_id(3)).
    unsafe { &(*told.identifier).events }.acknowledge(1);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return concluded(Err(libc::EINVAL));
    }
    // SAFETY: rdma_ack_cm_event(3): an event from `rdma_get_cm_event`, which the caller gives up.
    unsafe { ack(event) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_request(listener: *mut rdma_cm_id, into: *mut *mut rdma_cm_id) -> c_int {
    // SAFETY: rdma_get_request(3): a live listener.
    concluded(unsafe { next_request(listener) }.map(|id| {
        // SAFETY: rdma_get_request(3): a place for the identifier.
        unsafe { into.write(id) };
    }))
}

/// Takes the listener's next connect request, and makes the queue pair of its identifier if the
/// listener has attributes for one.
///
/// # Safety
/// `listener` is alive.
unsafe fn next_request(listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, c_int> {
    // SAFETY: the caller vouches for `listener`.
    let (channel, synchronous, endpoint) = unsafe {
        let listener = identifier(listener);
        (listener.id.channel, listener.synchronous, listener.endpoint)
    };
    if !synchronous {
        return Err(libc::EINVAL);
    }
    // SAFETY: the channel is alive as long as its identifier.
    let event = unsafe { next(channel) }?;
    // SAFETY: just read.
    let (kind, status, id) = unsafe { ((*event).event, (*event).status, (*event).id) };
    if status != 0 || kind != RDMA_CM_EVENT_CONNECT_REQUEST {
        // SAFETY: read above, and not given to the program.
        unsafe { ack(event) };
        return Err(if status == 0 { libc::EINVAL } else { status.abs() });
    }
    if let Some((mut attributes, pd)) = endpoint {
        // SAFETY: a new identifier, with a domain that its listener's owner keeps alive.
        if let Err(errno) = unsafe { crate::cm::create_pair(id, pd, &mut attributes) } {
            // SAFETY: read above, and not given to the program; nor is the identifier.
            unsafe {
                ack(event);
                crate::cm::rdma_destroy_id(id);
            }
            return Err(errno);
        }
    }
    // SAFETY: a new identifier, which holds the event until its next one.
    unsafe { (*id).event = event };
    Ok(id)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, into: *mut ibv_async_event) -> c_int {
    // SAFETY: ibv_get_async_event(3): a device's context.
    let (number, device) = unsafe { (number_in(context), attached_in(context)) };
    let take = || match call(&Request::TakeAsyncEvent(number))? {
        Reply::AsyncEvent(event) => Ok(event),
        _ => Err(libc::EPROTO),
    };
    let read = || loop {
        let event = wait(device?.events.as_raw_fd(), take)?;
        // Each object is alive under the table's lock, and from there on until the event is
        // acknowledged: ibv_destroy_qp(3), ibv_destroy_cq(3) and ibv_destroy_srq(3) wait for that.
        let found = match event.about {
            About::Pair(name) => {
                // SAFETY: as said above.
                let count = |pair: *mut Pair| unsafe { &(*pair).events }.read();
                names::find_with(name, count).map(|pair| ibv_async_event__bindgen_ty_1 { qp: pair.cast() })
            }
            About::Queue(name) => {
                // SAFETY: as said above.
                let count = |queue: *mut Queue| unsafe { &(*queue).asynchronous }.read();
                names::find_with(name, count).map(|queue| ibv_async_event__bindgen_ty_1 { cq: queue.cast() })
            }
            About::Shared(name) => {
                // SAFETY: as said above.
                let count = |shared: *mut Shared| unsafe { &(*shared).events }.read();
                names::find_with(name, count)
                    .map(|shared| ibv_async_event__bindgen_ty_1 { srq: shared.cast() })
            }
            About::Device => Some(ibv_async_event__bindgen_ty_1 { port_num: PORT.into() }),
        };
        // The object was destroyed, so its event is skipped.
        let Some(element) = found else { continue };
        return Ok(ibv_async_event { element, event_type: event.kind });
    };
    concluded(read().map(|event| {
        // SAFETY: ibv_get_async_event(3): a place for the event.
        unsafe { into.write(event) };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: ibv_ack_async_event(3): an event from `ibv_get_async_event`. Its object is alive,
    // because its destruction waits for this.
    let event = unsafe { &*event };
    // SAFETY: as above; the kind of the event determines the variant of the union.
    unsafe {
        match event.event_type {
            IBV_EVENT_CQ_ERR => (*event.element.cq.cast::<Queue>()).asynchronous.acknowledge(1),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                (*event.element.srq.cast::<Shared>()).events.acknowledge(1);
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                (*event.element.qp.cast::<Pair>()).events.acknowledge(1);
            }
            // An event of the device, which is never destroyed.
            _ => {}
        }
    }
}
