//! Identifiers of the connection manager.
//!
//! An identifier is *synchronous* if it was made without an event channel (`rdma_create_id(3)`). It
//! then has a channel of its own, and each call waits for the event that reports its result.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;

use libc::sockaddr;
use softrdma_wire::{Name, Request};

use crate::acknowledged::Unacknowledged;
use crate::completion::{create_channel, create_queue, ibv_destroy_comp_channel, ibv_destroy_cq};
use crate::device::{PORT, attached_in, context_of, device_at};
use crate::event::{self, ack, create_event_channel, destroy_event_channel};
use crate::layout::{
    IBV_QPT_RC, RDMA_OPTION_ID, RDMA_PS_IB, RDMA_PS_TCP, ibv_context, ibv_pd, ibv_qp_init_attr, rdma_cm_id,
    rdma_event_channel, zeroed,
};
use crate::link::{ask, call, concluded, link, make};
use crate::{address, names, pair, region};

/// An identifier, with this library's fields behind it.
#[repr(C)]
pub(crate) struct Identifier {
    pub(crate) id: rdma_cm_id,
    pub(crate) name: Name,
    /// Whether the event channel belongs to the identifier itself.
    pub(crate) synchronous: bool,
    /// For a synchronous listener of `rdma_create_ep(3)`: the attributes and the domain of the
    /// queue pairs that its connections get.
    pub(crate) endpoint: Option<(ibv_qp_init_attr, *mut ibv_pd)>,
    /// The acknowledgement timeout of its queue pair, encoded as in `ibv_modify_qp(3)`, if the
    /// program has set one.
    pub(crate) timeout: Option<u8>,
    pub(crate) events: Unacknowledged,
}

impl Identifier {
    pub(crate) fn allocate(name: Name, channel: *mut rdma_event_channel, user: *mut c_void) -> *mut Self {
        let mut id: rdma_cm_id = zeroed();
        (id.channel, id.context, id.ps, id.qp_type) = (channel, user, RDMA_PS_TCP, IBV_QPT_RC);
        let events = Unacknowledged::default();
        let made = Self { id, name, synchronous: false, endpoint: None, timeout: None, events };
        let made = Box::into_raw(Box::new(made));
        names::enter(name, made);
        made
    }

    /// Attaches the identifier to the device that has its local address.
    pub(crate) fn attach(&mut self) -> Result<(), c_int> {
        if self.id.verbs.is_null() {
            let local = self.local().ok_or(libc::ENODEV)?;
            let context = context_of(device_at(local.ip())?)?;
            self.id.pd = default_domain(context)?;
            self.id.verbs = context;
            self.id.port_num = PORT;
        }
        Ok(())
    }

    pub(crate) fn set_addresses(&mut self, local: Option<SocketAddr>, remote: Option<SocketAddr>) {
        let places = &mut self.id.route.addr;
        if let Some(local) = local {
            // SAFETY: the union has room for any address.
            unsafe { address::write(local, (&raw mut places.__bindgen_anon_1).cast()) };
        }
        if let Some(remote) = remote {
            // SAFETY: as above.
            unsafe { address::write(remote, (&raw mut places.__bindgen_anon_2).cast()) };
        }
    }

    fn local(&self) -> Option<SocketAddr> {
        // SAFETY: the union holds zeros or an address.
        unsafe { address::read((&raw const self.id.route.addr.__bindgen_anon_1).cast()) }
    }

    fn remote(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { address::read((&raw const self.id.route.addr.__bindgen_anon_2).cast()) }
    }
}

/// Returns the protection domain for identifiers that were given none: one for each device of the
/// process.
fn default_domain(context: *mut ibv_context) -> Result<*mut ibv_pd, c_int> {
    // SAFETY: the only caller, `attach`, got the context from `context_of`.
    let device = unsafe { attached_in(context) }?;
    let mut domain = device.domain.lock().unwrap_or_else(PoisonError::into_inner);
    let address = match *domain {
        Some(address) => address,
        // SAFETY: as above.
        None => *domain.insert(unsafe { region::allocate_pd(context) }?.expose_provenance()),
    };
    Ok(ptr::with_exposed_provenance_mut(address))
}

/// Returns the identifier behind a pointer from C.
///
/// # Safety
/// `id` came from this library, is alive, and no other reference to it is used during `'a`.
pub(crate) unsafe fn identifier<'a>(id: *mut rdma_cm_id) -> &'a mut Identifier {
    // SAFETY: every identifier is allocated as an `Identifier`; the caller vouches for the rest.
    unsafe { &mut *id.cast::<Identifier>() }
}

/// Waits for the event that reports the result of a call on a synchronous identifier.
///
/// # Safety
/// `id` is alive.
pub(crate) unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), c_int> {
    // SAFETY: the caller vouches for `id`.
    if !unsafe { (*id.cast::<Identifier>()).synchronous } {
        return Ok(());
    }
    // SAFETY: as above; the event, if any, was read by this library for the identifier itself.
    unsafe {
        if !(*id).event.is_null() {
            ack((*id).event);
            (*id).event = ptr::null_mut();
        }
        let event = event::next((*id).channel)?;
        (*id).event = event;
        match (*event).status {
            0 => Ok(()),
            // The status of a rejection is the peer's reason (rdma_get_cm_event(3)), not an
            // `errno`.
            status if status > 0 => Err(libc::ECONNREFUSED),
            status => Err(-status),
        }
    }
}

/// Makes an identifier; a synchronous one if `channel` is null.
///
/// # Safety
/// `channel` is null or alive.
pub(crate) unsafe fn create(
    channel: *mut rdma_event_channel,
    user: *mut c_void,
) -> Result<*mut rdma_cm_id, c_int> {
    let synchronous = channel.is_null();
    let channel = if synchronous { create_event_channel()? } else { channel };
    // SAFETY: alive, as the caller vouches or because it was just made.
    let request = Request::CreateIdentifier { channel: unsafe { event::name(channel) } };
    match make(&request) {
        Ok(name) => {
            let made = Identifier::allocate(name, channel, user);
            // SAFETY: just made.
            unsafe { (*made).synchronous = synchronous };
            Ok(made.cast())
        }
        Err(errno) => {
            if synchronous {
                // SAFETY: made above, and not given to the program.
                unsafe { destroy_event_channel(channel) };
            }
            Err(errno)
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    into: *mut *mut rdma_cm_id,
    user: *mut c_void,
    space: u32,
) -> c_int {
    if space != RDMA_PS_TCP && space != RDMA_PS_IB {
        // Datagrams are not supported.
        return concluded(Err(libc::EOPNOTSUPP));
    }
    // SAFETY: rdma_create_id(3): a live channel or null.
    concluded(unsafe { create(channel, user) }.map(|id| {
        // SAFETY: rdma_create_id(3): a place for the identifier.
        unsafe { into.write(id) };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: rdma_destroy_id(3): a live identifier that the caller gives up.
    let (own, synchronous) = unsafe { (identifier(id).name, identifier(id).synchronous) };
    // SAFETY: as above; its event, if any, was read by this library.
    unsafe {
        if synchronous && !(*id).event.is_null() {
            ack((*id).event);
        }
    }
    let freed = ask(&Request::DestroyIdentifier(own));
    if freed.is_ok() {
        names::leave(own);
        // SAFETY: alive until it is freed below.
        unsafe { identifier(id) }.events.wait();
        // SAFETY: as above.
        let channel = unsafe { (*id).channel };
        // SAFETY: allocated as an `Identifier`, in a box; its name is out of the table, so no other
        // thread finds it.
        drop(unsafe { Box::from_raw(id.cast::<Identifier>()) });
        if synchronous {
            // SAFETY: the identifier's own channel.
            unsafe { destroy_event_channel(channel) };
        }
    }
    concluded(freed)
}

/// Moves an identifier to another event channel, or to one of its own if `to` is null.
///
/// # Safety
/// `id` and `channel` are alive, or `channel` is null.
pub(crate) unsafe fn migrate(id: *mut rdma_cm_id, to: *mut rdma_event_channel) -> Result<(), c_int> {
    // SAFETY: the caller vouches for `id`.
    let (name, synchronous, from) =
        unsafe { (identifier(id).name, identifier(id).synchronous, (*id).channel) };
    let own = to.is_null();
    if own && synchronous {
        return Err(libc::EINVAL);
    }
    let to = if own { create_event_channel()? } else { to };
    // SAFETY: alive, as the caller vouches or because it was just made.
    ask(&Request::Migrate { id: name, channel: unsafe { event::name(to) } })?;
    // SAFETY: the caller vouches for `id`.
    let identifier = unsafe { identifier(id) };
    identifier.synchronous = own;
    identifier.id.channel = to;
    if synchronous {
        // SAFETY: until now the identifier's own channel; this library read the event.
        unsafe {
            if !(*id).event.is_null() {
                ack((*id).event);
                (*id).event = ptr::null_mut();
            }
            destroy_event_channel(from);
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: rdma_migrate_id(3): a live identifier, and a live channel or null.
    concluded(unsafe { migrate(id, channel) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    if level.cast_unsigned() != RDMA_OPTION_ID {
        return concluded(Err(libc::ENOSYS));
    }
    let expected = match name {
        option::TOS | option::ACK_TIMEOUT => size_of::<u8>(),
        option::REUSEADDR | option::AFONLY => size_of::<c_int>(),
        _ => return concluded(Err(libc::ENOSYS)),
    };
    if len != expected {
        return concluded(Err(libc::EINVAL));
    }
    // SAFETY: rdma_set_option(3): a live identifier.
    let identifier = unsafe { identifier(id) };
    // SAFETY: rdma_set_option(3): `value` has as many bytes as its length says, at least one.
    let byte = unsafe { value.cast::<u8>().read() };
    concluded(match name {
        option::TOS => ask(&Request::SetTrafficClass { id: identifier.name, class: byte }),
        option::ACK_TIMEOUT => set_ack_timeout(identifier, byte),
        // Accepted without effect: the fabric always reuses addresses and separates the families.
        _ => Ok(()),
    })
}

/// The options of [`RDMA_OPTION_ID`] that Linux knows.
pub(crate) mod option {
    use core::ffi::c_int;

    pub(crate) const TOS: c_int = 0;
    pub(crate) const REUSEADDR: c_int = 1;
    pub(crate) const AFONLY: c_int = 2;
    pub(crate) const ACK_TIMEOUT: c_int = 3;
}

fn set_ack_timeout(identifier: &mut Identifier, timeout: u8) -> Result<(), c_int> {
    // Linux reports this later, when it applies the timeout to the queue pair.
    if timeout > pair::MOST_TIMEOUT {
        return Err(libc::EINVAL);
    }
    identifier.timeout = Some(timeout);
    if identifier.id.qp.is_null() {
        return Ok(());
    }
    // SAFETY: the identifier's own queue pair, which is alive.
    unsafe { pair::set_timeout(identifier.id.qp, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, place: *mut sockaddr) -> c_int {
    // SAFETY: rdma_bind_addr(3): a live identifier, and an address of the family that it states.
    let (identifier, wanted) = unsafe { (identifier(id), address::read(place)) };
    concluded(bind(identifier, wanted))
}

fn bind(identifier: &mut Identifier, wanted: Option<SocketAddr>) -> Result<(), c_int> {
    let address = own(wanted.ok_or(libc::EAFNOSUPPORT)?)?;
    take_bound(identifier, &Request::Bind { id: identifier.name, address })
}

/// Replaces a loopback address by the first address of its family that a device of this machine
/// has.
///
/// Other addresses are returned unchanged. libfabric binds to loopback to find out whether there is
/// a device.
pub(crate) fn own(address: SocketAddr) -> Result<SocketAddr, c_int> {
    if !address.ip().is_loopback() {
        return Ok(address);
    }
    let of_family = |ip: &&IpAddr| ip.is_ipv4() == address.is_ipv4();
    let mut addresses = link()?.devices.iter().flat_map(|device| &device.addresses);
    let ip = addresses.find(of_family).ok_or(libc::ENODEV)?;
    Ok(SocketAddr::new(*ip, address.port()))
}

/// Sends a request that binds the identifier, and stores the address.
fn take_bound(identifier: &mut Identifier, request: &Request<'_>) -> Result<(), c_int> {
    let softrdma_wire::Reply::Bound(local) = call(request)? else { return Err(libc::EPROTO) };
    identifier.set_addresses(Some(local), None);
    if local.ip().is_unspecified() { Ok(()) } else { identifier.attach() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: rdma_listen(3): a live identifier.
    let identifier = unsafe { identifier(id) };
    let request = Request::Listen { id: identifier.name, backlog: u32::try_from(backlog).unwrap_or(0) };
    concluded(take_bound(identifier, &request))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    destination: *mut sockaddr,
    timeout: c_int,
) -> c_int {
    // SAFETY: rdma_resolve_addr(3): a live identifier, and addresses of the families that they
    // state.
    let (name, source, destination) =
        unsafe { (identifier(id).name, address::read(source), address::read(destination)) };
    let Some(destination) = destination else { return concluded(Err(libc::EAFNOSUPPORT)) };
    let milliseconds = u32::try_from(timeout).unwrap_or(0);
    let resolve = || {
        let (source, destination) = (source.map(own).transpose()?, own(destination)?);
        ask(&Request::ResolveAddress { id: name, source, destination, milliseconds })
    };
    let asked = resolve();
    // SAFETY: as above.
    concluded(asked.and_then(|()| unsafe { complete(id) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout: c_int) -> c_int {
    // SAFETY: rdma_resolve_route(3): a live identifier.
    let asked = ask(&Request::ResolveRoute(unsafe { identifier(id) }.name));
    // SAFETY: as above.
    concluded(asked.and_then(|()| unsafe { complete(id) }))
}

/// Makes completion queues and channels for a queue pair whose attributes name none.
fn create_queues(id: &mut rdma_cm_id, attributes: &mut ibv_qp_init_attr) -> Result<(), c_int> {
    let (user, context) = (ptr::from_mut(id).cast(), id.verbs);
    let make = |depth: u32, channel| {
        let depth = c_int::try_from(depth).unwrap_or(c_int::MAX).max(1);
        // SAFETY: the context is that of the identifier's device, and the channel was just made.
        unsafe { create_queue(context, depth, user, channel, 0) }
    };
    if attributes.send_cq.is_null() {
        id.send_cq_channel = create_channel(id.verbs)?;
        id.send_cq = make(attributes.cap.max_send_wr, id.send_cq_channel)?;
        attributes.send_cq = id.send_cq;
    }
    if attributes.recv_cq.is_null() {
        id.recv_cq_channel = create_channel(id.verbs)?;
        id.recv_cq = make(attributes.cap.max_recv_wr, id.recv_cq_channel)?;
        attributes.recv_cq = id.recv_cq;
    }
    Ok(())
}

/// Destroys the queues that `create_queues` made for an identifier.
///
/// # Safety
/// The identifier's queue pair is destroyed.
unsafe fn destroy_queues(id: &mut rdma_cm_id) {
    for queue in [&mut id.send_cq, &mut id.recv_cq] {
        if !queue.is_null() {
            // SAFETY: made by `create_queues`, and no queue pair reports to it any more.
            unsafe { ibv_destroy_cq(*queue) };
            *queue = ptr::null_mut();
        }
    }
    for channel in [&mut id.send_cq_channel, &mut id.recv_cq_channel] {
        if !channel.is_null() {
            // SAFETY: made by `create_queues`, and its queue is destroyed.
            unsafe { ibv_destroy_comp_channel(*channel) };
            *channel = ptr::null_mut();
        }
    }
}

/// Makes the identifier's queue pair, in INIT.
///
/// # Safety
/// `id`, `pd` if it is not null, and the objects that the attributes name are alive.
pub(crate) unsafe fn create_pair(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attributes: &mut ibv_qp_init_attr,
) -> Result<(), c_int> {
    // SAFETY: the caller vouches for `id`.
    let (id, timeout) = unsafe { (&mut identifier(id).id, identifier(id).timeout) };
    if id.verbs.is_null() || !id.qp.is_null() {
        return Err(libc::EINVAL);
    }
    let pd = if pd.is_null() { id.pd } else { pd };
    // SAFETY: the identifier's domain, or one that the caller vouches for.
    if unsafe { (*pd).context } != id.verbs {
        return Err(libc::EINVAL);
    }
    if attributes.srq.is_null() {
        // rdma_create_srq(3): the identifier's queue pairs take their receives from its shared
        // queue.
        attributes.srq = id.srq;
    }
    let made = create_queues(id, attributes).and_then(|()| {
        // SAFETY: the domain and the queues are alive, and so is the new queue pair.
        unsafe {
            let qp = pair::create(pd, attributes)?;
            let set = || timeout.map_or(Ok(()), |timeout| pair::set_timeout(qp, timeout));
            let ready = pair::initialise(qp).and_then(|()| set());
            if ready.is_err() {
                // The program has not seen this queue pair.
                pair::ibv_destroy_qp(qp);
            }
            ready.map(|()| qp)
        }
    });
    match made {
        Ok(qp) => {
            (id.qp, id.pd) = (qp, pd);
            Ok(())
        }
        Err(errno) => {
            // SAFETY: the queue pair does not exist.
            unsafe { destroy_queues(id) };
            Err(errno)
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attributes: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: rdma_create_qp(3): a live identifier, a live domain or null, attributes that are read
    // and written.
    concluded(unsafe { create_pair(id, pd, &mut *attributes) })
}

/// The attributes of `rdma_create_qp_ex` (`rdma_cma.h`): those of `rdma_create_qp`, and more behind
/// them.
///
/// The domain is valid if the mask says so.
#[repr(C)]
pub struct ExtendedAttributes {
    base: ibv_qp_init_attr,
    mask: u32,
    pd: *mut ibv_pd,
}

/// `IBV_QP_INIT_ATTR_PD`.
const HAS_DOMAIN: u32 = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    attributes: *mut ExtendedAttributes,
) -> c_int {
    // SAFETY: rdma_create_qp(3): attributes that are read and written.
    let attributes = unsafe { &mut *attributes };
    if attributes.mask & !HAS_DOMAIN != 0 {
        return concluded(Err(libc::EOPNOTSUPP));
    }
    let pd = if attributes.mask & HAS_DOMAIN == 0 { ptr::null_mut() } else { attributes.pd };
    // SAFETY: as above: a live identifier, a live domain or null.
    concluded(unsafe { create_pair(id, pd, &mut attributes.base) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: rdma_destroy_qp(3): a live identifier.
    let id = unsafe { &mut identifier(id).id };
    if !id.qp.is_null() {
        // SAFETY: the identifier's own queue pair, which the caller gives up.
        unsafe { pair::ibv_destroy_qp(id.qp) };
        id.qp = ptr::null_mut();
    }
    // SAFETY: the queue pair is destroyed.
    unsafe { destroy_queues(id) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: rdma_get_src_port(3): a live identifier.
    unsafe { identifier(id) }.local().map_or(0, |address| address.port().to_be())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: rdma_get_dst_port(3): a live identifier.
    unsafe { identifier(id) }.remote().map_or(0, |address| address.port().to_be())
}
