//! Conversions between the wire's types and the model's.

use rdma_backend::{
    Access, AsyncEvent, CmEventKind, Completed, Completion, ConnectParams, ErrorKind, Failure as _,
    Immediate, RemoteAddress, RnrTimer, SendOp,
};
use rdma_softsim::{
    About, Atomic, Connection, Destination, Detail, Error, Op, PairState, Rights, Service, SoftSim, Source,
    Transition,
};
use rustix::io::Errno;
use softrdma_wire as wire;

/// Converts an error to the `errno(3)` that verbs would return.
pub(super) fn errno(error: &Error) -> i32 {
    let errno = match error {
        Error::AddressInUse(_) => Errno::ADDRINUSE,
        Error::NotLocal(_) | Error::NoFreePort => Errno::ADDRNOTAVAIL,
        Error::Overrun { .. } => Errno::IO,
        Error::Descriptor(errno) => *errno,
        Error::Gone(_) => Errno::NODEV,
        Error::Landing => Errno::BUSY,
        other => match other.kind() {
            ErrorKind::Memory | ErrorKind::QueueFull => Errno::NOMEM,
            _ => Errno::INVAL,
        },
    };
    errno.raw_os_error()
}

/// Converts `enum ibv_access_flags` of a region. To write from afar requires local write access
/// (`ibv_reg_mr(3)`).
pub(super) fn access(access: wire::Access) -> Option<Rights> {
    let writes = access.remote_write || access.remote_atomic;
    (access.local_write || !writes).then(|| rights(access))
}

/// Converts `enum ibv_access_flags`.
pub(super) fn rights(access: wire::Access) -> Rights {
    let when = |set: bool, right: Access| if set { right } else { Access::NONE };
    let local = when(access.local_write, Access::LOCAL_WRITE);
    let remote = when(access.remote_write, Access::REMOTE_WRITE);
    let read = when(access.remote_read, Access::REMOTE_READ);
    Rights { access: local.and(remote).and(read), atomics: access.remote_atomic }
}

pub(super) fn transition(transition: wire::Transition) -> Option<Transition> {
    Some(match transition {
        wire::Transition::Reset => Transition::Reset,
        wire::Transition::Initialise => Transition::Initialise,
        wire::Transition::Receive { local, remote, number, timer } => {
            Transition::Receive { local, remote, number, timer: RnrTimer::from_code(timer)? }
        }
        wire::Transition::ReceiveDatagrams => Transition::ReceiveDatagrams,
        wire::Transition::Send { retry, rnr_retry, read_depth } => {
            Transition::Send { retry, rnr_retry, read_depth }
        }
        wire::Transition::Drain { notify } => Transition::Drain { notify },
        wire::Transition::Fail => Transition::Fail,
        wire::Transition::Timer(_) => return None,
    })
}

/// Converts a state to `enum ibv_qp_state`.
pub(super) const fn state(state: PairState) -> u8 {
    match state {
        PairState::Reset => 0,
        PairState::Init => 1,
        PairState::Receiving => 2,
        PairState::Ready => 3,
        PairState::Draining => 4,
        PairState::Error => 6,
    }
}

pub(super) const fn service(service: wire::Service) -> Service {
    match service {
        wire::Service::Connected => Service::Connected,
        wire::Service::Datagram => Service::Datagram,
    }
}

pub(super) fn op(op: wire::Op) -> Op {
    let op = match op {
        wire::Op::Send => SendOp::Send,
        wire::Op::SendImmediate(immediate) => SendOp::SendImmediate(Immediate(immediate)),
        wire::Op::Write { address, rkey } => SendOp::Write(RemoteAddress { address, rkey }),
        wire::Op::WriteImmediate { address, rkey, immediate } => {
            SendOp::WriteImmediate(RemoteAddress { address, rkey }, Immediate(immediate))
        }
        wire::Op::Read { address, rkey } => SendOp::Read(RemoteAddress { address, rkey }),
        wire::Op::FetchAdd { address, rkey, add } => {
            return Op::Atomic(RemoteAddress { address, rkey }, Atomic::FetchAdd(add));
        }
        wire::Op::CompareSwap { address, rkey, compare, swap } => {
            return Op::Atomic(RemoteAddress { address, rkey }, Atomic::CompareSwap { compare, swap });
        }
        wire::Op::Datagram { to: wire::Destination { local, remote, number, key }, immediate } => {
            let to = Destination { local, remote, number, key };
            return Op::Datagram(to, immediate.map(Immediate));
        }
    };
    op.into()
}

pub(super) fn connection(connection: &Connection) -> wire::Pair {
    let &Connection { pair: number, ref host, state: of, local, remote, peer } = connection;
    wire::Pair { number, machine: host.first().copied(), state: state(of), local, remote, peer }
}

/// Converts a completion to `struct ibv_wc`; opcodes are those of `enum ibv_wc_opcode`.
pub(super) fn completion(completion: &Completion, detail: Detail) -> wire::Completion {
    let Detail { bytes: len, source, atomic } = detail;
    let &Completion { id, queue_pair: pair, result } = completion;
    let (mut status, mut vendor, mut opcode, mut immediate) = (0, 0, 0, None);
    match result {
        Ok(Completed::Send) => {}
        Ok(Completed::Write) => opcode = 1,
        Ok(Completed::Read) => {
            opcode = match atomic {
                None => 2,
                Some(Atomic::CompareSwap { .. }) => 3,
                Some(Atomic::FetchAdd(_)) => 4,
            };
        }
        Ok(Completed::Recv { immediate: number, .. }) => {
            (opcode, immediate) = (128, number.map(|immediate| immediate.0));
        }
        Ok(Completed::RecvWrite { immediate: Immediate(number) }) => {
            (opcode, immediate) = (129, Some(number));
        }
        Err(error) => (status, vendor) = (error.status.0, error.vendor),
    }
    wire::Completion {
        id,
        pair,
        status,
        vendor,
        opcode,
        len,
        immediate,
        source: source.map(|Source { number, ip4 }| wire::Source { number, ip4 }),
    }
}

pub(super) const fn params(params: wire::Params) -> ConnectParams {
    let wire::Params { responder_resources, initiator_depth, retry_count, rnr_retry_count } = params;
    ConnectParams { responder_resources, initiator_depth, retry_count, rnr_retry_count }
}

pub(super) const fn offered(params: ConnectParams) -> wire::Params {
    let ConnectParams { responder_resources, initiator_depth, retry_count, rnr_retry_count } = params;
    wire::Params { responder_resources, initiator_depth, retry_count, rnr_retry_count }
}

/// Returns an event's kind (`enum rdma_cm_event_type`), its status, and what the peer offered.
pub(super) fn event(kind: &CmEventKind<SoftSim>) -> (u32, i32, Option<wire::Params>) {
    match kind {
        CmEventKind::AddressResolved => (0, 0, None),
        CmEventKind::AddressError { status } => (1, *status, None),
        CmEventKind::RouteResolved => (2, 0, None),
        CmEventKind::RouteError { status } => (3, *status, None),
        CmEventKind::ConnectRequest { peer, .. } => (4, 0, Some(offered(*peer))),
        CmEventKind::ConnectError { status } => (6, *status, None),
        CmEventKind::Unreachable { status } => (7, *status, None),
        CmEventKind::Rejected { reason } => (8, *reason, None),
        CmEventKind::Established { peer } => (9, 0, Some(offered(*peer))),
        CmEventKind::Disconnected => (10, 0, None),
        CmEventKind::DeviceRemoval => (11, 0, None),
        CmEventKind::AddressChange => (14, 0, None),
        CmEventKind::TimewaitExit => (15, 0, None),
        CmEventKind::Other(number) => (*number, 0, None),
        // Programs read asynchronous events from their device; no other kinds exist.
        CmEventKind::Async(_) | _ => (15, 0, None),
    }
}

/// Converts an asynchronous event to `enum ibv_event_type`, with its object.
pub(super) fn async_event((event, about): (AsyncEvent, About)) -> wire::AsyncEvent {
    let kind = match event {
        AsyncEvent::CqErr => 0,
        AsyncEvent::QpFatal => 1,
        AsyncEvent::QpReqErr => 2,
        AsyncEvent::QpAccessErr => 3,
        AsyncEvent::CommEst => 4,
        AsyncEvent::PortActive => 9,
        AsyncEvent::PortErr => 10,
        AsyncEvent::Other(number) => number,
        AsyncEvent::DeviceFatal | _ => 8,
    };
    // The session gave its objects names of 32 bits, so this does not truncate.
    let about = match about {
        About::Pair(name) => wire::About::Pair(name as wire::Name),
        About::Queue(name) => wire::About::Queue(name as wire::Name),
        About::Shared(name) => wire::About::Shared(name as wire::Name),
        About::Device => wire::About::Device,
    };
    wire::AsyncEvent { kind, about }
}
