//! The connection-manager identifier.

use core::ffi::{c_int, c_void};
use core::net::SocketAddr;
use core::ptr::{self, NonNull};
use core::time::Duration;
use std::sync::{Arc, Mutex};

use rdma_backend::{Capabilities, ConnectParams, DeviceKey, IdentifierKey, QueuePairLimits};

use crate::asynchronous::{self, CurrentChannel};
use crate::channel::{Channel, Context, EventChannel, opaque};
use crate::completion::CompletionQueue;
use crate::device::Device;
use crate::error::{Error, Stage};
use crate::queue_pair::QueuePair;
use crate::region::Domain;
use crate::sockaddr::{self, CAddress};
use crate::sys::{self, Api, generated as c, ibv_context, rdma_cm_id, rdma_conn_param};
use crate::{Verbs, locked};

/// Private data that fits into a request: 92 bytes less 36 of addresses (rdma_connect(3)).
const CONNECT_DATA: usize = 56;
/// Private data that fits into an acceptance (rdma_accept(3)).
const ACCEPT_DATA: usize = 196;
/// Private data that fits into a refusal (rdma_reject(3)).
const REJECT_DATA: usize = 148;
/// The largest retry counts: both are fields of three bits (rdma_connect(3)).
const MAX_RETRIES: u8 = 7;
/// The largest time-out of acknowledgements: a field of five bits (ibv_modify_qp(3)).
const MAX_ACK_TIMEOUT: u8 = 31;

/// A connection-manager identifier, `rdma_create_id(3)`. Destroyed with the last of this handle and
/// its queue pair. Dropping that of an unanswered connect request refuses the request.
#[derive(Debug)]
pub struct Identifier {
    inner: Arc<CmId>,
}

/// The identifier proper; its queue pair holds it too.
#[derive(Debug)]
pub(crate) struct CmId {
    api: &'static Api,
    raw: NonNull<rdma_cm_id>,
    /// The target of the C `context`. Freed after the identifier is destroyed.
    context: NonNull<Context>,
    /// The channel of its events. Changed only under the locks of both channels.
    current_channel: CurrentChannel,
}

// SAFETY: `raw` is used only under the lock of its channel (`CmId::with`), which excludes the event
// loop. rdma_destroy_id(3) is the exception: it has the last reference, and waits for an event that
// is being read. What `context` points to never changes and is freed after that.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

impl CmId {
    pub(crate) fn create(channel: &Arc<Channel>) -> Result<Arc<Self>, Error> {
        let context = Context::allocate(None);
        let mut raw = ptr::null_mut();
        // SAFETY: rdma_create_id(3): an open channel, held by the identifier from here on, and a
        // live pointer; the context is passed through.
        let result = unsafe {
            (channel.api.rdma_create_id)(channel.as_ptr(), &raw mut raw, opaque(context), c::RDMA_PS_TCP)
        };
        match NonNull::new(raw).filter(|_| result == 0) {
            Some(raw) => {
                let current_channel = Arc::new(Mutex::new(Arc::clone(channel)));
                Ok(Arc::new(Self { api: channel.api, raw, context, current_channel }))
            }
            None => {
                let error = Error::last("rdma_create_id", Stage::Connection);
                // SAFETY: allocated above by `Box::leak`; no identifier holds it.
                drop(unsafe { Box::from_raw(context.as_ptr()) });
                Err(error)
            }
        }
    }

    /// # Safety
    /// `raw` is the `id` of an unacknowledged RDMA_CM_EVENT_CONNECT_REQUEST of `channel` that
    /// offered `request`, taken over once; the channel's lock is held.
    pub(crate) unsafe fn adopt(
        channel: &Arc<Channel>,
        raw: *mut rdma_cm_id,
        request: ConnectParams,
    ) -> Arc<Self> {
        let context = Context::allocate(Some(request));
        // SAFETY: a live identifier that no other code knows. The library copied the listener's
        // context into it (rdma_get_cm_event(3)); under the lock no event is read through that.
        unsafe { (*raw).context = opaque(context) };
        // SAFETY: by contract an identifier, so not null.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        let current_channel = Arc::new(Mutex::new(Arc::clone(channel)));
        Arc::new(Self { api: channel.api, raw, context, current_channel })
    }

    /// # Safety
    /// `raw` is a live identifier made by this module and stays alive for `'a`.
    pub(crate) unsafe fn context<'a>(raw: *const rdma_cm_id) -> &'a Context {
        // SAFETY: the identifier is alive, and its context is freed after it and never changed.
        unsafe { &*(*raw).context.cast::<Context>() }
    }

    pub(crate) fn key(&self) -> IdentifierKey {
        // SAFETY: the context lives as long as `self` and is never changed.
        unsafe { self.context.as_ref() }.key
    }

    /// Calls `f` with the identifier. Excludes other calls on it and its channel's events.
    pub(crate) fn with<T>(&self, f: impl FnOnce(*mut rdma_cm_id) -> Result<T, Error>) -> Result<T, Error> {
        Error::unless_forked()?;
        loop {
            let current_channel = Arc::clone(&locked(&self.current_channel));
            let _calls = current_channel.enter();
            // It may have moved before the lock was taken; now it cannot.
            if Arc::ptr_eq(&current_channel, &locked(&self.current_channel)) {
                return f(self.raw.as_ptr());
            }
        }
    }

    fn call(
        &self,
        name: &'static str,
        stage: Stage,
        f: impl FnOnce(*mut rdma_cm_id) -> c_int,
    ) -> Result<(), Error> {
        self.with(|raw| if f(raw) == 0 { Ok(()) } else { Err(Error::last(name, stage)) })
    }

    pub(crate) fn listen(&self, address: SocketAddr, backlog: u32) -> Result<(), Error> {
        // Otherwise an IPv6 wildcard also takes the IPv4 port of the same number.
        if address.is_ipv6() {
            self.set_flag(c::RDMA_OPTION_ID_AFONLY)?;
        }
        // As for a TCP listener: a port of former connections can be used again.
        self.set_flag(c::RDMA_OPTION_ID_REUSEADDR)?;
        let mut address = CAddress::new(address);
        self.call("rdma_bind_addr", Stage::Address, |id| {
            // SAFETY: rdma_bind_addr(3): a live identifier, a live address of a known family.
            unsafe { (self.api.rdma_bind_addr)(id, address.as_mut_ptr()) }
        })?;
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        self.call("rdma_listen", Stage::Address, |id| {
            // SAFETY: rdma_listen(3): a live, bound identifier.
            unsafe { (self.api.rdma_listen)(id, backlog) }
        })?;
        // A listener on a wildcard address has no device.
        self.hear_device().or_else(|error| if matches!(error, Error::State(_)) { Ok(()) } else { Err(error) })
    }

    /// Reports device events of this identifier on its channel from now on.
    pub(crate) fn hear_device(&self) -> Result<(), Error> {
        let (context, port) = self.with(|id| {
            // SAFETY: a live identifier whose lock is held.
            let context = unsafe { device_of(id) }?;
            // SAFETY: as above.
            Ok((context, unsafe { (*id).port_num }))
        })?;
        asynchronous::take_from(self.api, context)?;
        asynchronous::enter(self.key(), &self.current_channel, context, port);
        Ok(())
    }

    fn set_flag(&self, option: u32) -> Result<(), Error> {
        self.set_option(option, Stage::Address, c_int::from(true))
    }

    /// `value` has the option's type in C.
    fn set_option<T: Copy>(&self, option: u32, stage: Stage, mut value: T) -> Result<(), Error> {
        self.call("rdma_set_option", stage, |id| {
            // SAFETY: rdma_set_option(3): so many bytes, read in the call; a wrong number fails.
            unsafe {
                (self.api.rdma_set_option)(
                    id,
                    c::RDMA_OPTION_ID as c_int,
                    option as c_int,
                    (&raw mut value).cast(),
                    size_of::<T>(),
                )
            }
        })
    }

    fn verbs(&self) -> Result<NonNull<ibv_context>, Error> {
        self.with(|id| {
            // SAFETY: a live identifier whose lock is held.
            unsafe { device_of(id) }
        })
    }

    fn address(
        &self,
        place: unsafe fn(*const rdma_cm_id) -> *const libc::sockaddr_storage,
    ) -> Option<SocketAddr> {
        let address = self.with(|id| {
            // SAFETY: a live identifier; under the lock the library does not write the address.
            let storage = unsafe { &*place(id) };
            Ok(sockaddr::from_c(storage))
        });
        address.ok().flatten()
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        if rdma_process::is_child() {
            return;
        }
        asynchronous::leave(self.key());
        // Events of this identifier could no longer be attributed.
        drop(locked(&self.current_channel).withdraw(self.key()));
        // SAFETY: rdma_destroy_id(3): the last reference: the queue pair, which held one, is
        // destroyed, and no other call runs. The channel is still held. Readers acknowledge events
        // before they release its lock, so any wait is short.
        let result = unsafe { (self.api.rdma_destroy_id)(self.raw.as_ptr()) };
        if result == 0 {
            // SAFETY: allocated by `Box::leak` in `Context::allocate`; no event leads here now.
            drop(unsafe { Box::from_raw(self.context.as_ptr()) });
        }
        // Otherwise the kernel may still report its events, which need the context: it stays.
    }
}

/// Returns the device of an identifier, whose absence the library does not check.
///
/// # Safety
/// `id` is alive and its lock is held.
unsafe fn device_of(id: *mut rdma_cm_id) -> Result<NonNull<ibv_context>, Error> {
    // SAFETY: alive, and the lock excludes writers of this field.
    NonNull::new(unsafe { (*id).verbs })
        .ok_or(Error::State("the identifier has no device yet: it is not bound, resolved or requested"))
}

/// # Safety
/// `id` is alive and its lock is held.
unsafe fn ready(id: *mut rdma_cm_id) -> Result<(), Error> {
    // SAFETY: passed on from the caller.
    unsafe { device_of(id) }?;
    // SAFETY: alive, and the lock excludes writers of this field.
    if unsafe { (*id).qp }.is_null() {
        return Err(Error::State("the identifier has no queue pair yet"));
    }
    Ok(())
}

fn milliseconds(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX).max(1)
}

/// The result points to `private_data`.
fn conn_param(params: &ConnectParams, private_data: &[u8], room: usize) -> Result<rdma_conn_param, Error> {
    if params.retry_count > MAX_RETRIES || params.rnr_retry_count > MAX_RETRIES {
        return Err(Error::Argument("retry counts go from 0 to 7"));
    }
    let mut conn: rdma_conn_param = sys::zeroed();
    (conn.private_data, conn.private_data_len) = bytes(private_data, room)?;
    conn.responder_resources = params.responder_resources;
    conn.initiator_depth = params.initiator_depth;
    conn.retry_count = params.retry_count;
    conn.rnr_retry_count = params.rnr_retry_count;
    Ok(conn)
}

fn bytes(private_data: &[u8], room: usize) -> Result<(*const c_void, u8), Error> {
    match u8::try_from(private_data.len()) {
        Ok(len) if private_data.len() <= room => Ok((private_data.as_ptr().cast(), len)),
        _ => Err(Error::Argument(
            "private data is limited to 56 bytes in a request, 196 in an acceptance and 148 in a refusal",
        )),
    }
}

impl Identifier {
    pub(crate) const fn new(inner: Arc<CmId>) -> Self {
        Self { inner }
    }

    fn held_device(&self) -> Result<Device, Error> {
        Ok(Device::hold(self.inner.api, self.inner.verbs()?, &self.inner))
    }
}

impl rdma_backend::Identifier<Verbs> for Identifier {
    fn key(&self) -> IdentifierKey {
        self.inner.key()
    }

    fn set_traffic_class(&self, class: u8) -> Result<(), Error> {
        self.inner.set_option(c::RDMA_OPTION_ID_TOS, Stage::Connection, class)
    }

    fn set_ack_timeout(&self, code: u8) -> Result<(), Error> {
        // Kernels check it only in the queue pair, and fail the connection without a reason.
        if code > MAX_ACK_TIMEOUT {
            return Err(Error::Argument("a time-out of acknowledgements goes from 0 to 31"));
        }
        self.inner.set_option(c::RDMA_OPTION_ID_ACK_TIMEOUT, Stage::Connection, code)
    }

    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        if local.is_some_and(|local| !sockaddr::same_family(local, remote)) {
            return Err(Error::Argument("the local and the remote address are not of one family"));
        }
        let mut source = local.map(CAddress::new);
        let mut destination = CAddress::new(remote);
        self.inner.call("rdma_resolve_addr", Stage::Address, |id| {
            let source = source.as_mut().map_or(ptr::null_mut(), CAddress::as_mut_ptr);
            // SAFETY: rdma_resolve_addr(3): a live identifier, live addresses, or null (no source).
            unsafe {
                (self.inner.api.rdma_resolve_addr)(
                    id,
                    source,
                    destination.as_mut_ptr(),
                    milliseconds(timeout),
                )
            }
        })
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        self.inner.with(|id| {
            // SAFETY: a live identifier whose lock is held.
            unsafe { device_of(id) }?;
            // SAFETY: rdma_resolve_route(3): a live identifier with a device, which is not checked.
            match unsafe { (self.inner.api.rdma_resolve_route)(id, milliseconds(timeout)) } {
                0 => Ok(()),
                _ => Err(Error::last("rdma_resolve_route", Stage::Address)),
            }
        })
    }

    fn device(&self) -> Result<DeviceKey, Error> {
        Ok(DeviceKey(self.inner.verbs()?.as_ptr() as u64))
    }

    fn capabilities(&self) -> Result<Capabilities, Error> {
        self.held_device()?.capabilities()
    }

    fn create_domain(&self) -> Result<Domain, Error> {
        Domain::create(self.held_device()?)
    }

    fn create_completion_queue(&self, depth: u32, vector: u32) -> Result<CompletionQueue, Error> {
        CompletionQueue::create(self.held_device()?, depth, vector)
    }

    fn create_queue_pair(
        &self,
        domain: &Domain,
        completions: &CompletionQueue,
        limits: QueuePairLimits,
    ) -> Result<QueuePair, Error> {
        QueuePair::create(&self.inner, domain, completions, limits)
    }

    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        let mut conn = conn_param(params, private_data, CONNECT_DATA)?;
        self.inner.with(|id| {
            // SAFETY: a live identifier whose lock is held.
            unsafe { ready(id) }?;
            // SAFETY: rdma_connect(3): a live identifier with a device and a queue pair; the
            // parameters and their private data are copied during the call.
            match unsafe { (self.inner.api.rdma_connect)(id, &raw mut conn) } {
                0 => Ok(()),
                _ => Err(Error::last("rdma_connect", Stage::Connection)),
            }
        })
    }

    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        let mut conn = conn_param(params, private_data, ACCEPT_DATA)?;
        self.inner.with(|id| {
            // SAFETY: a live identifier whose lock is held.
            unsafe { ready(id) }?;
            // SAFETY: rdma_accept(3): as for rdma_connect.
            match unsafe { (self.inner.api.rdma_accept)(id, &raw mut conn) } {
                0 => Ok(()),
                _ => Err(Error::last("rdma_accept", Stage::Connection)),
            }
        })
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        let (data, len) = bytes(private_data, REJECT_DATA)?;
        self.inner.call("rdma_reject", Stage::Connection, |id| {
            // SAFETY: rdma_reject(3): a live identifier; `len` bytes at `data` are copied.
            unsafe { (self.inner.api.rdma_reject)(id, data, len) }
        })
    }

    fn notify_established(&self) -> Result<(), Error> {
        self.inner.call("rdma_notify", Stage::Connection, |id| {
            // SAFETY: rdma_notify(3): a live identifier; the kernel checks that it waits for this.
            unsafe { (self.inner.api.rdma_notify)(id, c::IBV_EVENT_COMM_EST) }
        })
    }

    fn disconnect(&self) -> Result<(), Error> {
        self.inner.call("rdma_disconnect", Stage::Connection, |id| {
            // SAFETY: rdma_disconnect(3): a live identifier; one without device is refused.
            unsafe { (self.inner.api.rdma_disconnect)(id) }
        })
    }

    fn migrate(&self, to: &EventChannel) -> Result<(), Error> {
        Error::unless_forked()?;
        let (inner, to) = (&self.inner, &to.inner);
        loop {
            let from = Arc::clone(&locked(&inner.current_channel));
            if Arc::ptr_eq(&from, to) {
                return Ok(());
            }
            // Lock order: the channel at the lower address first.
            let (first, second) =
                if Arc::as_ptr(&from) < Arc::as_ptr(to) { (&from, to) } else { (to, &from) };
            let _first = first.enter();
            let _second = second.enter();
            if !Arc::ptr_eq(&from, &locked(&inner.current_channel)) {
                continue;
            }
            // SAFETY: rdma_migrate_id(3): a live identifier and an open channel. It would wait for
            // an unacknowledged event on the old channel; under that channel's lock there is none.
            let result = unsafe { (inner.api.rdma_migrate_id)(inner.raw.as_ptr(), to.as_ptr()) };
            if result != 0 {
                return Err(Error::last("rdma_migrate_id", Stage::Connection));
            }
            // Device events move along, under the lock: no more reach the old channel.
            let mut current_channel = locked(&inner.current_channel);
            *current_channel = Arc::clone(to);
            from.withdraw(inner.key()).into_iter().for_each(|event| to.tell(inner.key(), event));
            return to.look_again();
        }
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.address(sys::source)
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner.address(sys::destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: ConnectParams =
        ConnectParams { responder_resources: 1, initiator_depth: 2, retry_count: 3, rnr_retry_count: 7 };

    #[test]
    fn connection_parameters_keep_their_values() {
        let conn = conn_param(&PARAMS, b"hello", CONNECT_DATA).unwrap();
        assert_eq!((conn.responder_resources, conn.initiator_depth), (1, 2));
        assert_eq!((conn.retry_count, conn.rnr_retry_count), (3, 7));
        assert_eq!(conn.private_data_len, 5);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(conn_param(&PARAMS, &[0; 56], CONNECT_DATA).is_ok());
        assert!(conn_param(&PARAMS, &[0; 57], CONNECT_DATA).is_err());
        assert!(conn_param(&PARAMS, &[0; 300], ACCEPT_DATA).is_err());
        assert!(conn_param(&ConnectParams { retry_count: 8, ..PARAMS }, &[], CONNECT_DATA).is_err());
        assert!(conn_param(&ConnectParams { rnr_retry_count: 8, ..PARAMS }, &[], CONNECT_DATA).is_err());
    }

    #[test]
    fn timeouts_become_whole_milliseconds_of_at_least_one() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_millis(250)), 250);
        assert_eq!(milliseconds(Duration::MAX), c_int::MAX);
    }
}
