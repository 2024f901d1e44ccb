//! The commands of `/dev/infiniband/rdma_cm`, as Linux has them (`rdma/rdma_user_cm.h`): each is
//! one `write(2)`, and the fabric does what Linux would do.
//!
//! A command states its own length, and where in the program's memory its answer goes. Those for
//! addresses of any family (`QUERY`, `BIND`, `RESOLVE_ADDR`) are not there. librdmacm tries one
//! when it starts, and uses the older ones then.

mod forms;

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

use softrdma_wire::{Connected, Event, Name, Params, Reply, Request, gid, guid};

use self::forms::{
    Accept, Attributes, Bind, Connect, Create, Destroy, GetEvent, Header, Listen, Made, Migrate, Notify,
    PairAttributes, Parameters, Path, PathTo, QueryRoute, Reject, Reported, Resolve, ResolveRoute, Route,
    SetOption, Told, answer, taken, whole,
};
use crate::address;
use crate::cm::{option, own};
use crate::connecting::fill_attributes;
use crate::device::{PORT, device_at};
use crate::device_file::{Files, Held, files};
use crate::event::wait;
use crate::layout::{
    IBV_EVENT_COMM_EST, IBV_QP_TIMEOUT, IBV_QPT_RC, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_OPTION_ID,
    RDMA_PS_IB, RDMA_PS_TCP, ibv_ah_attr, ibv_qp_attr, zeroed,
};
use crate::link::{ask, call, link, make};
use crate::pair::{MOST_TIMEOUT, bytes};

/// A socket address of at most this length, that of `sockaddr_in6`.
type Place = [u8; 28];

/// Carries out a command that the program has written to the file.
///
/// # Safety
/// Where the command names memory for its answer, the program has that memory.
pub(crate) unsafe fn carry_out(file: RawFd, written: &[u8]) -> Result<(), c_int> {
    let header: Header = whole(written)?;
    let body = written.get(size_of::<Header>()..).and_then(|rest| rest.get(..usize::from(header.len)));
    let command = Command { file, body: body.ok_or(libc::EINVAL)?, room: header.room };
    // SAFETY: the caller vouches for the command's memory.
    unsafe {
        match header.command {
            0 => command.create(),
            1 => command.destroy(),
            2 => command.bind(),
            3 => command.resolve(),
            4 => command.resolve_route(),
            5 => command.query_route(),
            6 => command.connect(),
            7 => command.listen(),
            8 => command.accept(),
            9 => command.reject(),
            10 => command.disconnect(),
            11 => command.attributes(),
            12 => command.event(),
            14 => command.set_option(),
            15 => command.notify(),
            18 => command.migrate(),
            _ => Err(libc::ENOSYS),
        }
    }
}

struct Command<'a> {
    file: RawFd,
    body: &'a [u8],
    /// How many bytes the program has for the answer.
    room: u16,
}

/// Each may write an answer to the place that its structure names.
///
/// # Safety
/// That of [`carry_out`].
impl Command<'_> {
    /// Shows `look` the identifier with this handle.
    fn on<T>(&self, handle: u32, look: impl FnOnce(&mut Held) -> Result<T, c_int>) -> Result<T, c_int> {
        let mut files = files();
        let channel = files.channel(self.file)?;
        let held = files.held(handle)?;
        if held.channel == channel { look(held) } else { Err(libc::EINVAL) }
    }

    /// Sends a request about the identifier with this handle.
    fn tell(&self, handle: u32, request: impl FnOnce(Name) -> Request<'static>) -> Result<(), c_int> {
        self.on(handle, |held| ask(&request(held.name)))
    }

    unsafe fn create(&self) -> Result<(), c_int> {
        let Create { uid, response, space, kind, .. } = whole(self.body)?;
        let connected = u32::from(space) == RDMA_PS_TCP
            || u32::from(space) == RDMA_PS_IB && u32::from(kind) == IBV_QPT_RC;
        if !connected {
            // Datagrams are not supported.
            return Err(libc::EOPNOTSUPP);
        }
        let mut files = files();
        let channel = files.channel(self.file)?;
        let name = make(&Request::CreateIdentifier { channel })?;
        let handle = files.hold(Held::new(name, channel, uid))?;
        // SAFETY: the caller vouches for the place.
        unsafe { answer(response, self.room, size_of::<Made>(), &Made { handle }) }.inspect_err(|_| {
            // The program does not know it.
            files.release(handle);
            let _gone = ask(&Request::DestroyIdentifier(name));
        })
    }

    unsafe fn destroy(&self) -> Result<(), c_int> {
        let Destroy { response, handle, .. } = whole(self.body)?;
        let events =
            self.on(handle, |held| ask(&Request::DestroyIdentifier(held.name)).map(|()| held.reported))?;
        files().release(handle);
        // SAFETY: the caller vouches for the place.
        unsafe { answer(response, self.room, size_of::<Reported>(), &Reported { events }) }
    }

    fn bind(&self) -> Result<(), c_int> {
        let Bind { address, handle, .. } = whole(self.body)?;
        let address = own(read(&address).ok_or(libc::EAFNOSUPPORT)?)?;
        self.bound(handle, |id| Request::Bind { id, address })
    }

    fn listen(&self) -> Result<(), c_int> {
        let Listen { handle, backlog } = whole(self.body)?;
        self.bound(handle, |id| Request::Listen { id, backlog })
    }

    /// Sends a request that binds the identifier.
    fn bound(&self, handle: u32, request: impl FnOnce(Name) -> Request<'static>) -> Result<(), c_int> {
        self.on(handle, |held| match call(&request(held.name))? {
            Reply::Bound(local) => {
                held.local = Some(local);
                Ok(())
            }
            _ => Err(libc::EPROTO),
        })
    }

    fn resolve(&self) -> Result<(), c_int> {
        let Resolve { source, destination, handle, milliseconds } = whole(self.body)?;
        let source = read(&source).map(own).transpose()?;
        let destination = own(read(&destination).ok_or(libc::EAFNOSUPPORT)?)?;
        self.tell(handle, |id| Request::ResolveAddress { id, source, destination, milliseconds })
    }

    fn resolve_route(&self) -> Result<(), c_int> {
        let ResolveRoute { handle, .. } = whole(self.body)?;
        self.tell(handle, Request::ResolveRoute)
    }

    unsafe fn query_route(&self) -> Result<(), c_int> {
        let QueryRoute { response, handle, .. } = whole(self.body)?;
        let route = self.on(handle, |held| route(held))?;
        // SAFETY: the caller vouches for the place.
        unsafe { answer(response, self.room, offset_of!(Route, device), &route) }
    }

    fn connect(&self) -> Result<(), c_int> {
        let Connect { parameters, handle, .. } = taken(self.body, offset_of!(Connect, extension))?;
        if parameters.valid == 0 {
            return Err(libc::EINVAL);
        }
        self.on(handle, |held| {
            let (pair, params, data) = offered(&parameters);
            ask(&Request::Connect { id: held.name, pair, params, data })
        })
    }

    fn accept(&self) -> Result<(), c_int> {
        let Accept { uid, parameters, handle, .. } = taken(self.body, offset_of!(Accept, extension))?;
        self.on(handle, |held| {
            if parameters.valid == 0 {
                // The end of the active side's handshake.
                return ask(&Request::Establish(held.name));
            }
            let (pair, params, data) = offered(&parameters);
            ask(&Request::Accept { id: held.name, pair, params, data })?;
            held.uid = uid;
            Ok(())
        })
    }

    fn reject(&self) -> Result<(), c_int> {
        let Reject { handle, len, data, .. } = whole(self.body)?;
        let data = data.get(..len.into()).unwrap_or_default();
        self.on(handle, |held| ask(&Request::Reject { id: held.name, data }))
    }

    fn disconnect(&self) -> Result<(), c_int> {
        let Made { handle } = whole(self.body)?;
        self.tell(handle, Request::Disconnect)
    }

    unsafe fn attributes(&self) -> Result<(), c_int> {
        let Attributes { response, handle, state } = whole(self.body)?;
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        let mask = self.on(handle, |held| {
            let mask = fill_attributes(held.name, &mut attributes)?;
            if let Some(timeout) = held.timeout.filter(|_| mask & IBV_QP_TIMEOUT != 0) {
                attributes.timeout = timeout;
            }
            Ok(mask)
        })?;
        let told = of_pair(mask, &attributes);
        // SAFETY: the caller vouches for the place.
        unsafe { answer(response, self.room, size_of::<PairAttributes>(), &told) }
    }

    unsafe fn event(&self) -> Result<(), c_int> {
        let GetEvent { response } = whole(self.body)?;
        let least = offset_of!(Told, reserved);
        // Before an event is taken.
        if usize::from(self.room) < least {
            return Err(libc::ENOSPC);
        } else if response == 0 {
            return Err(libc::EFAULT);
        }
        let channel = files().channel(self.file)?;
        loop {
            let event = wait(self.file, || match call(&Request::TakeEvent(channel))? {
                Reply::Event(event) => Ok(event),
                _ => Err(libc::EPROTO),
            })?;
            if let Some(told) = tell(&mut files(), channel, *event) {
                // SAFETY: the caller vouches for the place.
                return unsafe { answer(response, self.room, least, &told) };
            }
        }
    }

    unsafe fn set_option(&self) -> Result<(), c_int> {
        let SetOption { value, handle, level, name, len } = whole(self.body)?;
        let name = name.cast_signed();
        let expected = match name {
            _ if level != RDMA_OPTION_ID => return Err(libc::ENOSYS),
            option::TOS | option::ACK_TIMEOUT => size_of::<u8>(),
            option::REUSEADDR | option::AFONLY => size_of::<c_int>(),
            _ => return Err(libc::ENOSYS),
        };
        let value = ptr::with_exposed_provenance::<u8>(usize::try_from(value).map_err(|_| libc::EFAULT)?);
        if usize::try_from(len) != Ok(expected) || value.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller vouches for the option's value, of at least one byte.
        let value = unsafe { value.read() };
        self.on(handle, |held| match name {
            option::TOS => ask(&Request::SetTrafficClass { id: held.name, class: value }),
            option::ACK_TIMEOUT if value > MOST_TIMEOUT => Err(libc::EINVAL),
            option::ACK_TIMEOUT => {
                held.timeout = Some(value);
                Ok(())
            }
            // Accepted without effect: the fabric always reuses addresses and separates the
            // families.
            _ => Ok(()),
        })
    }

    fn notify(&self) -> Result<(), c_int> {
        let Notify { handle, event } = whole(self.body)?;
        if event != IBV_EVENT_COMM_EST {
            return Err(libc::EINVAL);
        }
        self.tell(handle, Request::Notify)
    }

    /// Moves an identifier, which may be of any file of the process, to this one.
    unsafe fn migrate(&self) -> Result<(), c_int> {
        let Migrate { response, handle, .. } = whole(self.body)?;
        let mut files = files();
        let channel = files.channel(self.file)?;
        let held = files.held(handle)?;
        ask(&Request::Migrate { id: held.name, channel })?;
        held.channel = channel;
        let events = held.reported;
        // SAFETY: the caller vouches for the place.
        unsafe { answer(response, self.room, size_of::<Reported>(), &Reported { events }) }
    }
}

/// Reads an address; `None` if it is of another family than IPv4 and IPv6.
fn read(place: &Place) -> Option<SocketAddr> {
    // SAFETY: zero is a valid value of a structure of integers.
    let mut storage: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    // SAFETY: the storage is larger than any address of these families.
    unsafe { ptr::copy_nonoverlapping(place.as_ptr(), (&raw mut storage).cast(), place.len()) };
    // SAFETY: an address of the family that it states, or of one that is not read.
    unsafe { address::read((&raw const storage).cast()) }
}

/// Returns an address as C has it; zeros if there is none.
fn written(address: Option<SocketAddr>) -> Place {
    // SAFETY: zero is a valid value of a structure of integers.
    let mut storage: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    if let Some(address) = address {
        // SAFETY: a place for any address.
        unsafe { address::write(address, &raw mut storage) };
    }
    let mut place = Place::default();
    // SAFETY: the storage is larger, and all of it is initialised.
    unsafe { ptr::copy_nonoverlapping((&raw const storage).cast(), place.as_mut_ptr(), place.len()) };
    place
}

/// Returns the identifier's addresses and the device that has the local one, if any.
fn route(held: &Held) -> Result<Route, c_int> {
    let mut route: Route = taken(&[], 0)?;
    (route.source, route.destination) = (written(held.local), written(held.remote));
    let gid_of = |address: Option<SocketAddr>| address.map_or([0; 16], |address| gid(address.ip()));
    let key = u16::MAX.to_be_bytes();
    let [path, _] = &mut route.paths;
    *path = Path { source: gid_of(held.local), destination: gid_of(held.remote), key, ..*path };
    if let Some(ip) = held.local.as_ref().map(SocketAddr::ip).filter(|ip: &IpAddr| !ip.is_unspecified()) {
        let number = device_at(ip)?;
        let device = link()?.devices.get(number as usize).ok_or(libc::ENODEV)?;
        (route.guid, route.port, route.device) = (guid(&device.addresses), PORT, number);
    }
    Ok(route)
}

/// Returns the queue pair, the parameters and the private data that the program offers its peer.
fn offered(parameters: &Parameters) -> (Connected, Params, &[u8]) {
    let params = Params {
        responder_resources: parameters.responder_resources,
        initiator_depth: parameters.initiator_depth,
        // The fields have three bits.
        retry_count: parameters.retry_count.min(7),
        rnr_retry_count: parameters.rnr_retry_count.min(7),
    };
    let data = parameters.data.get(..parameters.len.into()).unwrap_or_default();
    (Connected::External(parameters.pair), params, data)
}

/// Returns what the program is told of an event; `None` if its identifier is gone, or is a new one
/// that the program has not accepted yet.
fn tell(files: &mut Files, channel: Name, event: Event) -> Option<Told> {
    let Event { id, listener, kind, status, params, data, local, remote } = event;
    let Some((mut handle, owner)) = files.named(listener.unwrap_or(id)).filter(|(_, owner)| owner.uid != 0)
    else {
        if listener.is_some() {
            // If the fabric is gone, so is the identifier.
            let _gone = ask(&Request::DestroyIdentifier(id));
        }
        return None;
    };
    owner.reported += 1;
    let uid = owner.uid;
    if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
        handle = files.hold(Held::new(id, channel, 0)).ok()?;
    }
    if let Ok(held) = files.held(handle) {
        (held.local, held.remote) = (local.or(held.local), remote.or(held.remote));
    }
    let mut told: Told = taken(&[], 0).ok()?;
    (told.uid, told.handle, told.kind, told.status) = (uid, handle, kind, status.cast_unsigned());
    let parameters = &mut told.parameters;
    if let Some(theirs) = params {
        parameters.responder_resources = theirs.responder_resources;
        parameters.initiator_depth = theirs.initiator_depth;
        parameters.retry_count = theirs.retry_count;
        parameters.rnr_retry_count = theirs.rnr_retry_count;
    }
    let len = u8::try_from(data.len()).unwrap_or(u8::MAX);
    for (to, from) in parameters.data.iter_mut().zip(data.iter().take(len.into())) {
        *to = *from;
    }
    parameters.len = len;
    Some(told)
}

fn of_path(path: &ibv_ah_attr) -> PathTo {
    PathTo {
        destination: bytes(path.grh.dgid),
        flow_label: path.grh.flow_label,
        index: path.grh.sgid_index,
        hop_limit: path.grh.hop_limit,
        class: path.grh.traffic_class,
        reserved: 0,
        before: [0; 5],
        is_global: path.is_global,
        port: path.port_num,
        after: 0,
    }
}

/// Returns a queue pair's attributes as the header has them.
fn of_pair(mask: u32, attributes: &ibv_qp_attr) -> PairAttributes {
    PairAttributes {
        mask,
        state: attributes.qp_state,
        current: attributes.cur_qp_state,
        path_mtu: attributes.path_mtu,
        migration: attributes.path_mig_state,
        qkey: attributes.qkey,
        rq_psn: attributes.rq_psn,
        sq_psn: attributes.sq_psn,
        dest_qp_num: attributes.dest_qp_num,
        access: attributes.qp_access_flags,
        path: of_path(&attributes.ah_attr),
        alternate: of_path(&attributes.alt_ah_attr),
        capacity: [0; 5],
        keys: [attributes.pkey_index, 0],
        drain: [0; 2],
        max_rd_atomic: attributes.max_rd_atomic,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        port: attributes.port_num,
        timeout: attributes.timeout,
        retry_cnt: attributes.retry_cnt,
        rnr_retry: attributes.rnr_retry,
        after: [0; 7],
    }
}
