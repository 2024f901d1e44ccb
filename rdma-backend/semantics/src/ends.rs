//! Two ends of a connection, and waits for their reports.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::Descriptors;
use rdma_backend::{
    Access, CmEvent, CmEventKind, Completed, Completion, CompletionQueue as _, CompletionStatus,
    ConnectParams, Domain as _, EventChannel as _, Identifier as _, QueuePair as _, QueuePairLimits,
    RNR_RETRY_INFINITE, RecvRequest, Region as _, RemoteAddress, RnrTimer, SendOp, SendRequest, Slice,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Setting;
use crate::Failure;

/// Soft-RoCE in an emulated machine is slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// How long nothing must happen before it counts as not happening.
pub(super) const QUIET: Duration = Duration::from_millis(60);

pub(super) const LEN: usize = 16 * 1024;

pub(super) const SLOT: usize = 64;

pub(super) const ONE: u64 = 1000;

pub(super) const PARAMS: ConnectParams = ConnectParams {
    responder_resources: 4,
    initiator_depth: 4,
    retry_count: 7,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// Parameters that make the *other* side retry a send without a receive this often.
pub(super) const fn rnr_retries(rnr_retry_count: u8) -> ConnectParams {
    ConnectParams { rnr_retry_count, ..PARAMS }
}

#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) limits: QueuePairLimits,
    pub(super) completions: u32,
    pub(super) receives: usize,
    pub(super) params: ConnectParams,
}

impl Shape {
    pub(super) const USUAL: Self = Self {
        limits: QueuePairLimits { send_depth: 64, recv_depth: 64, inline: SLOT as u32 },
        completions: 512,
        receives: 8,
        params: PARAMS,
    };
    pub(super) const WITHOUT_RECEIVES: Self = Self { receives: 0, ..Self::USUAL };
}

pub(super) trait Called<T> {
    fn called(self, call: &str) -> Result<T, Failure>;
}

impl<T, E: std::fmt::Display> Called<T> for Result<T, E> {
    fn called(self, call: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::wrong(format!("{call}: {error}")))
    }
}

/// One form of comparison: its message identifies a deviation.
pub(super) fn equal<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Result<(), Failure> {
    if found == expected {
        Ok(())
    } else {
        Err(Failure::wrong(format!("{what}: {found:?}, not {expected:?}")))
    }
}

pub(super) fn holds(what: &str, condition: bool) -> Result<(), Failure> {
    if condition { Ok(()) } else { Err(Failure::wrong(what)) }
}

pub(super) fn readable(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let timeout = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    };
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    // Interrupted: the caller checks its deadline and retries.
    poll(&mut polled, Some(&timeout)).is_ok_and(|count| count == 1)
}

/// On a thread of its own: without the tested rule `work` may never end.
pub(super) fn in_time<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let _late = sender.send(work());
    });
    receiver.recv_timeout(PATIENCE).map_err(|_| Failure::wrong(format!("{what} does not end")))
}

/// Fields drop in this order, not that of verbs: the backend must reorder.
pub(super) struct End<B: Descriptors> {
    pub(super) domain: Arc<B::Domain>,
    pub(super) cq: Arc<B::CompletionQueue>,
    pub(super) qp: B::QueuePair,
    /// The peer has all rights here. The bytes are 0, 1, 2, …
    pub(super) region: B::Region,
    /// Receives land here, [`SLOT`] bytes each.
    pub(super) inbox: B::Region,
    pub(super) id: B::Identifier,
}

impl<B: Descriptors> End<B> {
    pub(super) fn new(id: B::Identifier, shape: Shape) -> Result<Self, Failure> {
        let domain = id.create_domain().called("create_domain")?;
        let cq = id.create_completion_queue(shape.completions, 0).called("create_completion_queue")?;
        Self::with(id, &Arc::new(domain), &Arc::new(cq), shape)
    }

    pub(super) fn with(
        id: B::Identifier,
        domain: &Arc<B::Domain>,
        cq: &Arc<B::CompletionQueue>,
        shape: Shape,
    ) -> Result<Self, Failure> {
        let qp = id.create_queue_pair(domain, cq, shape.limits).called("create_queue_pair")?;
        let register = |access| domain.register(LEN, access).called("register");
        let region = register(Access::REMOTE_WRITE.and(Access::REMOTE_READ))?;
        let pattern: Vec<u8> = (0..LEN).map(|index| index as u8).collect();
        holds("the pattern does not fit", region.memory().write(0, &pattern))?;
        let inbox = register(Access::LOCAL_WRITE)?;
        let end = Self { domain: Arc::clone(domain), cq: Arc::clone(cq), qp, region, inbox, id };
        end.receive(0..shape.receives)?;
        Ok(end)
    }

    pub(super) fn receive(&self, numbers: std::ops::Range<usize>) -> Result<(), Failure> {
        let requests: Vec<_> = numbers.map(|number| self.receive_request(number)).collect();
        self.qp.post_recv(&requests).map_err(|error| error.error).called("post_recv")
    }

    pub(super) fn receive_request(&self, number: usize) -> RecvRequest<'_, B::Region> {
        let local = Slice { region: &self.inbox, offset: number * SLOT % LEN, len: SLOT };
        RecvRequest { id: number as u64, local }
    }

    pub(super) fn request(
        &self,
        id: u64,
        op: SendOp,
        offset: usize,
        len: usize,
    ) -> SendRequest<'_, B::Region> {
        let local = Slice { region: &self.region, offset, len };
        SendRequest { id, op, local, signaled: true, inline: false }
    }

    pub(super) fn silent(
        &self,
        id: u64,
        op: SendOp,
        offset: usize,
        len: usize,
    ) -> SendRequest<'_, B::Region> {
        SendRequest { signaled: false, ..self.request(id, op, offset, len) }
    }

    pub(super) fn post(&self, requests: &[SendRequest<'_, B::Region>]) -> Result<(), Failure> {
        self.qp.post_send(requests).map_err(|error| error.error).called("post_send")
    }

    pub(super) fn post_one(&self, op: SendOp, offset: usize, len: usize) -> Result<(), Failure> {
        self.post(&[self.request(ONE, op, offset, len)])
    }

    pub(super) fn remote(&self, offset: usize) -> RemoteAddress {
        remote::<B>(&self.region, offset)
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>, Failure> {
        read::<B>(&self.region, offset, len)
    }

    pub(super) fn received(&self, number: usize, len: usize) -> Result<Vec<u8>, Failure> {
        read::<B>(&self.inbox, number * SLOT % LEN, len)
    }

    pub(super) fn next(&self, patience: Duration) -> Result<Option<Completion>, Failure> {
        let deadline = Instant::now() + patience;
        let mut one = [Completion::EMPTY];
        loop {
            if self.cq.poll(&mut one).called("poll")? == 1 {
                return Ok(Some(one[0]));
            }
            self.cq.arm().called("arm")?;
            if self.cq.poll(&mut one).called("poll")? == 1 {
                return Ok(Some(one[0]));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            readable(self.cq.as_fd(), left);
            self.cq.take_events().called("take_events")?;
        }
    }

    pub(super) fn completion(&self, what: &str) -> Result<Completion, Failure> {
        self.next(PATIENCE)?.ok_or_else(|| Failure::wrong(format!("{what}: no completion")))
    }

    pub(super) fn quiet(&self, what: &str) -> Result<(), Failure> {
        equal(what, self.next(QUIET)?, None)
    }

    pub(super) fn completes(&self, what: &str, id: u64, did: Completed) -> Result<(), Failure> {
        let Completion { id: found, result, .. } = self.completion(what)?;
        equal(what, (found, result.map_err(|error| error.status)), (id, Ok(did)))
    }

    pub(super) fn fails(&self, what: &str, id: u64, status: CompletionStatus) -> Result<(), Failure> {
        let Completion { id: found, result, .. } = self.completion(what)?;
        equal(what, (found, result.map_err(|error| error.status)), (id, Err(status)))
    }

    pub(super) fn flushes(&self, what: &str, ids: impl IntoIterator<Item = u64>) -> Result<(), Failure> {
        ids.into_iter().try_for_each(|id| self.fails(what, id, CompletionStatus::WR_FLUSH_ERR))
    }

    pub(super) fn set_timer(&self, timer: RnrTimer) -> Result<(), Failure> {
        self.qp.set_min_rnr_timer(timer).called("set_min_rnr_timer")
    }
}

pub(super) fn remote<B: Descriptors>(region: &B::Region, offset: usize) -> RemoteAddress {
    RemoteAddress { address: region.address() + offset as u64, rkey: region.rkey() }
}

pub(super) fn read<B: Descriptors>(
    region: &B::Region,
    offset: usize,
    len: usize,
) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; len];
    holds("bytes outside the region", region.memory().read(offset, &mut bytes))?;
    Ok(bytes)
}

pub(super) const fn took(len: u32) -> Completed {
    Completed::Recv { len, immediate: None }
}

pub(super) fn next_event<B: Descriptors>(
    channel: &B::EventChannel,
    patience: Duration,
) -> Result<Option<CmEvent<B>>, Failure> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(event) = channel.next_event().called("next_event")? {
            return Ok(Some(event));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        readable(channel.as_fd(), left);
    }
}

pub(super) fn event<B: Descriptors>(
    channel: &B::EventChannel,
    id: &B::Identifier,
) -> Result<CmEventKind<B>, Failure> {
    let event = next_event::<B>(channel, PATIENCE)?.ok_or_else(|| Failure::wrong("an event did not come"))?;
    equal("the identifier of the event", event.id, id.key())?;
    Ok(event.kind)
}

/// Ignores the data of the event.
pub(super) fn expect<B: Descriptors>(
    channel: &B::EventChannel,
    id: &B::Identifier,
    kind: &str,
) -> Result<(), Failure> {
    let found = format!("{:?}", event::<B>(channel, id)?);
    holds(&format!("the event: {found}, not {kind}"), found.starts_with(kind))
}

pub(super) fn resolved<B: Descriptors>(
    channel: &B::EventChannel,
    to: SocketAddr,
) -> Result<B::Identifier, Failure> {
    let id = channel.create_id().called("create_id")?;
    id.resolve_address(None, to, PATIENCE).called("resolve_address")?;
    expect::<B>(channel, &id, "AddressResolved")?;
    id.resolve_route(PATIENCE).called("resolve_route")?;
    expect::<B>(channel, &id, "RouteResolved")?;
    Ok(id)
}

pub(super) fn requested<B: Descriptors>(
    channel: &B::EventChannel,
    listener: &B::Identifier,
) -> Result<(B::Identifier, ConnectParams), Failure> {
    match event::<B>(channel, listener)? {
        CmEventKind::ConnectRequest { id, peer } => Ok((id, peer)),
        other => Err(Failure::wrong(format!("the event: {other:?}, not ConnectRequest"))),
    }
}

pub(super) struct Requesting<B: Descriptors> {
    pub(super) client: End<B>,
    pub(super) listener: B::Identifier,
    pub(super) servers: B::EventChannel,
    pub(super) clients: B::EventChannel,
}

pub(super) struct Pair<B: Descriptors> {
    pub(super) server: End<B>,
    pub(super) client: End<B>,
    pub(super) listener: B::Identifier,
    pub(super) servers: B::EventChannel,
    pub(super) clients: B::EventChannel,
}

impl<B: Descriptors> Requesting<B> {
    pub(super) fn address(&self) -> Result<SocketAddr, Failure> {
        self.listener.local_addr().ok_or_else(|| Failure::wrong("the listener has no address"))
    }

    pub(super) fn accepted(self, shape: Shape) -> Result<Pair<B>, Failure> {
        let Self { client, listener, servers, clients } = self;
        let (id, _) = requested::<B>(&servers, &listener)?;
        let server = End::<B>::new(id, shape)?;
        server.id.accept(&shape.params, &[]).called("accept")?;
        Ok(Pair { server, client, listener, servers, clients })
    }
}

impl<B: Descriptors> Pair<B> {
    pub(super) fn established(self) -> Result<Self, Failure> {
        expect::<B>(&self.clients, &self.client.id, "Established")?;
        expect::<B>(&self.servers, &self.server.id, "Established")?;
        Ok(self)
    }

    pub(super) fn ends(&self) -> [(&End<B>, &End<B>); 2] {
        [(&self.client, &self.server), (&self.server, &self.client)]
    }
}

impl<B: Descriptors> Setting<B> {
    pub(super) fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    pub(super) fn requesting_at(&self, address: SocketAddr, shape: Shape) -> Result<Requesting<B>, Failure> {
        let servers = self.server.event_channel().called("event_channel")?;
        let clients = self.client.event_channel().called("event_channel")?;
        let listener = servers.listen(address, 8).called("listen")?;
        let to = listener.local_addr().ok_or_else(|| Failure::wrong("the listener has no address"))?;
        let client = End::<B>::new(resolved::<B>(&clients, to)?, shape)?;
        client.id.connect(&shape.params, &[]).called("connect")?;
        Ok(Requesting { client, listener, servers, clients })
    }

    pub(super) fn requesting(&self) -> Result<Requesting<B>, Failure> {
        self.requesting_at(self.address(), Shape::USUAL)
    }

    pub(super) fn pair_of(&self, server: Shape, client: Shape) -> Result<Pair<B>, Failure> {
        self.requesting_at(self.address(), client)?.accepted(server)?.established()
    }

    pub(super) fn pair(&self) -> Result<Pair<B>, Failure> {
        self.pair_of(Shape::USUAL, Shape::USUAL)
    }
}
