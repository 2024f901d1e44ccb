//! The event channel, and what its events say.

use core::ffi::c_void;
use core::net::SocketAddr;
use core::ptr::{self, NonNull};
use core::slice;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use rdma_backend::{AsyncEvent, CmEvent, CmEventKind, ConnectParams, IdentifierKey};
use rdma_process::UnsharedFd;
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::asynchronous;
use crate::error::{Error, Stage, clear_errno, errno};
use crate::identifier::{CmId, Identifier};
use crate::sys::{self, Api, generated as c, rdma_cm_event, rdma_event_channel};
use crate::{Verbs, locked, set_nonblocking};

/// A channel of connection-manager events, `rdma_create_event_channel(3)`. Its descriptor is
/// readable when [`next_event`](rdma_backend::EventChannel::next_event) has an event.
#[derive(Debug)]
pub struct EventChannel {
    pub(crate) inner: Arc<Channel>,
}

/// The channel proper, which its identifiers hold: it must outlive them.
///
/// # The lock
///
/// `rdma_get_cm_event` writes to the identifier of its event, which is not known before: addresses,
/// device, and the state of its queue pair. So these exclude each other per channel: fetching an
/// event up to its acknowledgement, every call on an identifier, and the destruction of its queue
/// pair. None of them blocks: the descriptor is non-blocking, and no event is unacknowledged when
/// the lock is released. Posting and polling take no lock.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) api: &'static Api,
    raw: NonNull<rdma_event_channel>,
    calls: Mutex<()>,
    /// Asynchronous events of identifiers of this channel. Locked after an identifier's channel.
    told: Mutex<VecDeque<(IdentifierKey, AsyncEvent)>>,
    signal: UnsharedFd,
    /// Readable while the event channel or `signal` is.
    watch: UnsharedFd,
}

// SAFETY: what `raw` points to is not written after creation. Calls on it are system calls on its
// descriptor; what they do to identifiers is under `calls`.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) const fn as_ptr(&self) -> *mut rdma_event_channel {
        self.raw.as_ptr()
    }

    pub(crate) fn enter(&self) -> MutexGuard<'_, ()> {
        locked(&self.calls)
    }

    const fn descriptor(&self) -> RawFd {
        // SAFETY: the channel is open; `fd` is its only member and never written.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Has `watch` look for events again. The kernel moves an identifier's events to another
    /// channel and does not wake its epoll instances, which look only when they are woken or asked.
    pub(crate) fn look_again(&self) -> Result<(), Error> {
        // SAFETY: the descriptor is open as long as the channel.
        let fd = unsafe { BorrowedFd::borrow_raw(self.descriptor()) };
        epoll::modify(&self.watch, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
            .map_err(failed("epoll_ctl"))
    }
    pub(crate) fn tell(&self, key: IdentifierKey, event: AsyncEvent) {
        let mut told = locked(&self.told);
        told.push_back((key, event));
        // Fails only if the counter is full, and then the descriptor is readable anyway.
        let _readable = rustix::io::write(&self.signal, &1_u64.to_ne_bytes());
    }

    pub(crate) fn withdraw(&self, key: IdentifierKey) -> Vec<AsyncEvent> {
        let mut told = locked(&self.told);
        let mut taken = Vec::new();
        told.retain(|(of, event)| {
            if *of == key {
                taken.push(*event);
            }
            *of != key
        });
        self.quieten(&told);
        taken
    }

    fn quieten(&self, told: &VecDeque<(IdentifierKey, AsyncEvent)>) {
        if told.is_empty() {
            let _cleared = rustix::io::read(&self.signal, &mut [0; 8]);
        }
    }

    fn next_told(&self) -> Option<(IdentifierKey, AsyncEvent)> {
        asynchronous::catch_up();
        let mut told = locked(&self.told);
        let next = told.pop_front();
        self.quieten(&told);
        next
    }
}

fn watch(watch: &UnsharedFd, source: &impl AsFd) -> Result<(), Error> {
    epoll::add(watch, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        .map_err(failed("epoll_ctl"))
}

fn failed(call: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::Call { call, errno: errno.raw_os_error(), stage: Stage::Open }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if rdma_process::is_child() {
            return;
        }
        rdma_process::forget(self.descriptor());
        // SAFETY: rdma_destroy_event_channel(3): every identifier held the channel and is
        // destroyed, every event is acknowledged, and no other pointer to it exists.
        unsafe { (self.api.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

impl EventChannel {
    pub(crate) fn open(api: &'static Api) -> Result<Self, Error> {
        Error::unless_forked()?;
        rdma_process::watch_forks();
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let signal = signal.map(UnsharedFd::new).map_err(failed("eventfd"))?;
        let sources = epoll::create(epoll::CreateFlags::CLOEXEC);
        let sources = sources.map(UnsharedFd::new).map_err(failed("epoll_create1"))?;
        // SAFETY: rdma_create_event_channel(3) has no preconditions.
        let raw = unsafe { (api.rdma_create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("rdma_create_event_channel", Stage::Open))?;
        let (calls, told) = (Mutex::default(), Mutex::default());
        let inner = Channel { api, raw, calls, told, signal, watch: sources };
        let fd = inner.descriptor();
        rdma_process::close_in_children(fd);
        set_nonblocking(fd)?;
        watch(&inner.watch, &inner.signal)?;
        // SAFETY: the descriptor is open as long as the channel, which goes with its watch.
        watch(&inner.watch, &unsafe { BorrowedFd::borrow_raw(fd) })?;
        Ok(Self { inner: Arc::new(inner) })
    }

    fn fetch(&self) -> Result<Option<CmEvent<Verbs>>, Error> {
        let channel = &self.inner;
        let _calls = channel.enter();
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        let result = loop {
            clear_errno();
            // SAFETY: rdma_get_cm_event(3): an open channel and a live pointer. Identifiers in its
            // events are alive: rdma_destroy_id(3) discards events of destroyed ones.
            let result = unsafe { (channel.api.rdma_get_cm_event)(channel.as_ptr(), &raw mut event) };
            if result == 0 || errno() != libc::EINTR {
                break result;
            }
        };
        let cause = errno();
        let Some(event) = NonNull::new(event).filter(|_| result == 0) else {
            return match cause {
                libc::EAGAIN => Ok(None),
                _ => Err(Error::Call { call: "rdma_get_cm_event", errno: cause, stage: Stage::Connection }),
            };
        };
        // SAFETY: the event was just returned, is not acknowledged, and `_calls` is held.
        let told = unsafe { read(channel, event, cause) };
        // SAFETY: rdma_ack_cm_event(3): once for each event, and nothing in `told` points into it.
        unsafe { (channel.api.rdma_ack_cm_event)(event.as_ptr()) };
        Ok(Some(told))
    }
}

/// # Safety
/// `event` came from `rdma_get_cm_event` on `channel`, unacknowledged; the channel's lock is held.
unsafe fn read(channel: &Arc<Channel>, event: NonNull<rdma_cm_event>, cause: i32) -> CmEvent<Verbs> {
    let event = event.as_ptr();
    // SAFETY: an unacknowledged event is a live structure (rdma_get_cm_event(3)).
    let (id, listener, number, status) =
        unsafe { ((*event).id, (*event).listen_id, (*event).event, (*event).status) };
    // A failure of the library's own work at an event: -1, with the cause in errno.
    let failed = if status == -1 && cause != 0 { -cause } else { status };
    let parameters = || {
        // SAFETY: the event is not acknowledged.
        let conn = unsafe { sys::event_conn(event) };
        ConnectParams {
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
            retry_count: conn.retry_count,
            rnr_retry_count: conn.rnr_retry_count,
        }
    };
    let private_data = || {
        // SAFETY: the event is not acknowledged.
        let conn = unsafe { sys::event_conn(event) };
        let data = conn.private_data.cast::<u8>();
        if data.is_null() {
            return Box::default();
        }
        // SAFETY: rdma_get_cm_event(3): so many bytes, valid until the acknowledgement.
        unsafe { slice::from_raw_parts(data, conn.private_data_len.into()) }.into()
    };
    if number == c::RDMA_CM_EVENT_CONNECT_REQUEST {
        let peer = parameters();
        // SAFETY: for a connect request `listen_id` is the listener, alive until the event is
        // acknowledged (rdma_destroy_id(3) waits), and `id` a new one that belongs to this caller.
        let (key, id) = unsafe { (CmId::context(listener).key, CmId::adopt(channel, id, peer)) };
        let kind = CmEventKind::ConnectRequest { id: Identifier::new(id), peer };
        return CmEvent { id: key, kind, private_data: private_data() };
    }
    // SAFETY: `id` is the event's identifier, alive until the acknowledgement.
    let context = unsafe { CmId::context(id) };
    let kind = match number {
        c::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
        c::RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddressError { status: failed },
        c::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
        c::RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError { status: failed },
        c::RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError { status: failed },
        c::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable { status: failed },
        c::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected { reason: status },
        // On the accepting side the parameters are zero: its request had them.
        c::RDMA_CM_EVENT_ESTABLISHED => {
            CmEventKind::Established { peer: context.request.unwrap_or_else(parameters) }
        }
        c::RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
        c::RDMA_CM_EVENT_TIMEWAIT_EXIT => CmEventKind::TimewaitExit,
        c::RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::DeviceRemoval,
        c::RDMA_CM_EVENT_ADDR_CHANGE => CmEventKind::AddressChange,
        // CONNECT_RESPONSE (if the queue pair was destroyed meanwhile), multicast, later kinds.
        other => CmEventKind::Other(other),
    };
    // Other events have no private data, or, as multicast, other parameters in its place.
    let has_data = matches!(kind, CmEventKind::Established { .. } | CmEventKind::Rejected { .. });
    let private_data = if has_data { private_data() } else { Box::default() };
    CmEvent { id: context.key, kind, private_data }
}

impl rdma_backend::EventChannel<Verbs> for EventChannel {
    fn create_id(&self) -> Result<Identifier, Error> {
        Error::unless_forked()?;
        Ok(Identifier::new(CmId::create(&self.inner)?))
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Identifier, Error> {
        Error::unless_forked()?;
        let id = CmId::create(&self.inner)?;
        id.listen(address, backlog)?;
        Ok(Identifier::new(id))
    }

    fn next_event(&self) -> Result<Option<CmEvent<Verbs>>, Error> {
        Error::unless_forked()?;
        match self.inner.next_told() {
            Some((id, event)) => {
                Ok(Some(CmEvent { id, kind: CmEventKind::Async(event), private_data: Box::default() }))
            }
            None => self.fetch(),
        }
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.watch.as_fd()
    }
}

/// The target of an identifier's C `context`.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) key: IdentifierKey,
    /// For an accepted identifier: what its connect request offered.
    pub(crate) request: Option<ConnectParams>,
}

impl Context {
    // On the heap: C keeps a pointer to it.
    pub(crate) fn allocate(request: Option<ConnectParams>) -> NonNull<Self> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let key = IdentifierKey(NEXT.fetch_add(1, Ordering::Relaxed));
        NonNull::from(Box::leak(Box::new(Self { key, request })))
    }
}

pub(crate) const fn opaque(context: NonNull<Context>) -> *mut c_void {
    context.as_ptr().cast()
}
