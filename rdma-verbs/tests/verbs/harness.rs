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

pub(crate) const LEN: usize = 64 * 1024;

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

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) limits: QueuePairLimits,
    pub(crate) receives: usize,
    pub(crate) params: ConnectParams,
}

impl Default for Shape {
    fn default() -> Self {
        let limits = QueuePairLimits { send_depth: 128, recv_depth: 128, inline: 64 };
        Self { limits, receives: 16, params: PARAMS }
    }
}

/// Fields are dropped in this order.
pub(crate) struct End {
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    /// The peer may do anything here; the first bytes are 0, 1, 2, …
    pub(crate) region: Region,
    /// Receives land here, 64 bytes each.
    pub(crate) inbox: Region,
    pub(crate) domain: Domain,
    pub(crate) id: Identifier,
}

impl End {
    pub(crate) fn new(id: Identifier, shape: Shape) -> Self {
        Self::try_new(id, shape).unwrap()
    }

    pub(crate) fn try_new(id: Identifier, shape: Shape) -> Result<Self, Error> {
        let domain = id.create_domain()?;
        let cq = id.create_completion_queue(1024, 1)?;
        let qp = id.create_queue_pair(&domain, &cq, shape.limits)?;
        let all = Access::REMOTE_WRITE.and(Access::REMOTE_READ);
        let region = domain.register(LEN, all)?;
        let pattern: Vec<u8> = (0..LEN).map(|index| index as u8).collect();
        assert!(region.memory().write(0, &pattern));
        let inbox = domain.register(LEN, Access::LOCAL_WRITE)?;
        let end = Self { qp, cq, region, inbox, domain, id };
        end.receive(0..shape.receives);
        Ok(end)
    }

    pub(crate) fn receive(&self, numbers: std::ops::Range<usize>) {
        let requests: Vec<_> = numbers
            .map(|number| RecvRequest {
                id: number as u64,
                local: Slice { region: &self.inbox, offset: number % 1024 * 64, len: 64 },
            })
            .collect();
        self.qp.post_recv(&requests).unwrap();
    }

    pub(crate) const fn request(
        &self,
        id: u64,
        op: SendOp,
        offset: usize,
        len: usize,
    ) -> SendRequest<'_, Region> {
        let local = Slice { region: &self.region, offset, len };
        SendRequest { id, op, local, signaled: true, inline: false }
    }

    pub(crate) fn post(&self, op: SendOp, offset: usize, len: usize) {
        self.qp.post_send(&[self.request(1000, op, offset, len)]).unwrap();
    }

    pub(crate) fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress { address: self.region.address() + offset as u64, rkey: self.region.rkey() }
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        read(&self.region, offset, len)
    }

    pub(crate) fn completion(&self) -> Completion {
        let mut one = [Completion::EMPTY];
        await_some("a completion", || (self.cq.poll(&mut one).unwrap() == 1).then_some(()));
        assert_eq!(one[0].queue_pair, self.qp.number());
        one[0]
    }

    pub(crate) fn completed(&self) -> (u64, Completed) {
        let completion = self.completion();
        (completion.id, completion.result.expect("a success"))
    }

    pub(crate) fn quiet(&self) {
        let mut one = [Completion::EMPTY];
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(self.cq.poll(&mut one).unwrap(), 0, "{one:?}");
    }
}

pub(crate) fn read(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert!(region.memory().read(offset, &mut bytes));
    bytes
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

pub(crate) fn expect(
    channel: &EventChannel,
    id: &Identifier,
    right: impl FnOnce(&CmEventKind<Verbs>) -> bool,
) {
    let event = event(channel);
    assert_eq!(event.id, id.key());
    assert!(right(&event.kind), "{:?}", event.kind);
}

pub(crate) fn request(channel: &EventChannel, listener: &Identifier) -> (Identifier, ConnectParams) {
    let event = event(channel);
    assert_eq!(event.id, listener.key());
    match event.kind {
        CmEventKind::ConnectRequest { id, peer } => (id, peer),
        other => panic!("{other:?}"),
    }
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
        self.pair_of(Shape::default(), Shape::default())
    }

    pub(crate) fn pair_of(&self, server: Shape, client: Shape) -> Pair {
        let servers = self.verbs.event_channel().unwrap();
        let clients = self.verbs.event_channel().unwrap();
        let listener = servers.listen(self.address(), 8).unwrap();
        let id = resolved(&clients, None, listener.local_addr().unwrap());
        let end = End::new(id, client);
        end.id.connect(&client.params, &[]).unwrap();
        let (id, _) = request(&servers, &listener);
        let accepted = End::new(id, server);
        accepted.id.accept(&server.params, &[]).unwrap();
        expect(&clients, &end.id, |kind| matches!(kind, CmEventKind::Established { .. }));
        expect(&servers, &accepted.id, |kind| matches!(kind, CmEventKind::Established { .. }));
        Pair { server: accepted, client: end, listener, servers, clients }
    }
}
