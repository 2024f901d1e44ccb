//! Two ends of a connection on this machine's RDMA device.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdma_backend::{
    Access, Backend, CmEventKind, Completed, Completion, CompletionQueue as _, ConnectParams, Domain as _,
    ErrorKind, EventChannel as _, Failure, Identifier as _, QueuePair as _, QueuePairLimits, RecvRequest,
    Region as _, RemoteAddress, SendOp, SendRequest, Slice,
};
use rdma_verbs::{CompletionQueue, Domain, Error, EventChannel, Identifier, QueuePair, Region, Verbs};

pub(crate) type Event = rdma_backend::CmEvent<Verbs>;

/// Soft-RoCE in an emulated machine is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 4, initiator_depth: 3, retry_count: 6, rnr_retry_count: 7 };

const LEN: usize = 64 * 1024;

const RECEIVES: usize = 16;

const SLOT: usize = 64;

pub(crate) struct Lab {
    pub(crate) verbs: Verbs,
    pub(crate) ip: IpAddr,
    /// Tests run one at a time: some count what the whole process has open.
    _alone: MutexGuard<'static, ()>,
}

/// The lab, with its IPv4 address; `None` (and a reason, printed) if there is none.
pub(crate) fn lab() -> Option<Lab> {
    lab_at("LAB_IP4")
}

pub(crate) fn lab_at(name: &str) -> Option<Lab> {
    static ALONE: Mutex<()> = Mutex::new(());
    let skip = |reason: String| {
        assert!(std::env::var_os("REQUIRE_RDMA").is_none_or(|value| value != "1"), "{reason}");
        println!("skipped: {reason}");
        None
    };
    let verbs = match Verbs::load().and_then(|verbs| verbs.event_channel().map(|_| verbs)) {
        Ok(verbs) => verbs,
        Err(error) if error.kind() == ErrorKind::NoDevice => {
            return skip(format!("no RDMA device ({error})"));
        }
        Err(error) => panic!("{error}"),
    };
    let Ok(ip) = std::env::var(name) else { return skip(format!("{name} is not set")) };
    let ip = ip.parse().expect("an address");
    Some(Lab { verbs, ip, _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) })
}

/// Fields are dropped in this order.
pub(crate) struct End {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    /// The peer may do anything here. The bytes are 0, 1, 2, …
    pub(crate) region: Region,
    /// Receives land here, 64 bytes each.
    _inbox: Region,
    pub(crate) domain: Domain,
    pub(crate) id: Identifier,
}

impl End {
    pub(crate) fn new(id: Identifier) -> Self {
        Self::try_new(id).unwrap()
    }

    pub(crate) fn try_new(id: Identifier) -> Result<Self, Error> {
        Self::with_room(id, 1024)
    }

    /// Makes an end with room for so many completions.
    fn with_room(id: Identifier, completions: u32) -> Result<Self, Error> {
        let domain = id.create_domain()?;
        let cq = id.create_completion_queue(completions, 1)?;
        let limits = QueuePairLimits { send_depth: 128, recv_depth: 128, inline: 64 };
        let qp = id.create_queue_pair(&domain, &cq, limits)?;
        let region = domain.register(LEN, Access::REMOTE_WRITE.and(Access::REMOTE_READ))?;
        let pattern: Vec<u8> = (0..LEN).map(|index| index as u8).collect();
        assert!(region.memory().write(0, &pattern));
        let inbox = domain.register(RECEIVES * SLOT, Access::LOCAL_WRITE)?;
        let slot = |number| Slice { region: &inbox, offset: number * SLOT, len: SLOT };
        let receives: Vec<_> =
            (0..RECEIVES).map(|number| RecvRequest { id: number as u64, local: slot(number) }).collect();
        qp.post_recv(&receives).map_err(|error| error.error)?;
        Ok(Self { qp, cq, region, _inbox: inbox, domain, id })
    }

    pub(crate) fn post(&self, op: SendOp, offset: usize, len: usize) {
        let local = Slice { region: &self.region, offset, len };
        self.qp.post_send(&[SendRequest { id: 1000, op, local, signaled: true, inline: false }]).unwrap();
    }

    pub(crate) fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress { address: self.region.address() + offset as u64, rkey: self.region.rkey() }
    }

    pub(crate) fn bytes(&self, offset: usize) -> [u8; 32] {
        let mut bytes = [0; 32];
        assert!(self.region.memory().read(offset, &mut bytes));
        bytes
    }

    pub(crate) fn completed(&self) -> Completed {
        let mut one = [Completion::EMPTY];
        await_some("a completion", || (self.cq.poll(&mut one).unwrap() == 1).then_some(()));
        assert_eq!(one[0].queue_pair, self.qp.number());
        one[0].result.expect("a success")
    }
}

pub(crate) fn await_some<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_micros(200));
    }
}

pub(crate) fn readable(of: &impl AsFd, patience: Duration) -> bool {
    let mut poll = libc::pollfd { fd: of.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: poll(2): one live structure.
    let count = unsafe { libc::poll(&raw mut poll, 1, patience.as_millis() as libc::c_int) };
    assert!(count >= 0);
    count == 1
}

pub(crate) fn event(channel: &EventChannel) -> Event {
    await_some("an event", || {
        let event = channel.next_event().unwrap();
        if event.is_none() {
            readable(channel, Duration::from_secs(1));
        }
        event
    })
}

/// A client's identifier, up to where it may create its queue pair.
pub(crate) fn resolved(channel: &EventChannel, local: Option<SocketAddr>, remote: SocketAddr) -> Identifier {
    let id = channel.create_id().unwrap();
    id.resolve_address(local, remote, PATIENCE).unwrap();
    expect(channel, &id, |kind| matches!(kind, CmEventKind::AddressResolved));
    id.resolve_route(PATIENCE).unwrap();
    expect(channel, &id, |kind| matches!(kind, CmEventKind::RouteResolved));
    id
}

fn expect(channel: &EventChannel, id: &Identifier, right: impl FnOnce(&CmEventKind<Verbs>) -> bool) {
    let event = event(channel);
    assert_eq!(event.id, id.key());
    assert!(right(&event.kind), "{:?}", event.kind);
}

pub(crate) struct Pair {
    pub(crate) server: End,
    pub(crate) client: End,
    pub(crate) listener: Identifier,
    pub(crate) servers: EventChannel,
    pub(crate) clients: EventChannel,
}

impl Lab {
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.ip, 0)
    }

    pub(crate) fn pair(&self) -> Pair {
        self.pair_with_room(1024)
    }

    /// Makes a pair whose client has room for so many completions.
    pub(crate) fn pair_with_room(&self, completions: u32) -> Pair {
        let servers = self.verbs.event_channel().unwrap();
        let clients = self.verbs.event_channel().unwrap();
        let listener = servers.listen(self.address(), 8).unwrap();
        let id = resolved(&clients, None, listener.local_addr().unwrap());
        let client = End::with_room(id, completions).unwrap();
        client.id.connect(&PARAMS, &[]).unwrap();
        let requested = event(&servers);
        assert_eq!(requested.id, listener.key());
        let CmEventKind::ConnectRequest { id, .. } = requested.kind else { panic!("{:?}", requested.kind) };
        let server = End::new(id);
        server.id.accept(&PARAMS, &[]).unwrap();
        expect(&clients, &client.id, |kind| matches!(kind, CmEventKind::Established { .. }));
        expect(&servers, &server.id, |kind| matches!(kind, CmEventKind::Established { .. }));
        Pair { server, client, listener, servers, clients }
    }
}
