//! Connections for the tests, made as an application makes them: asleep in poll(2) until something
//! is ready. Under `--cfg shuttle` only the scheduler may put threads to sleep, so they poll
//! instead.

use core::time::Duration;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
#[cfg(not(shuttle))]
use std::thread;

use rdma_backend::{
    Access, Backend as _, CmEventKind, Completion, CompletionQueue as _, ConnectParams, Domain as _,
    EventChannel as _, Identifier as _, QueuePair as _, QueuePairLimits, RecvRequest, SendOp, SendRequest,
    Slice,
};
use rdma_softsim::{CompletionQueue, Domain, EventChannel, Identifier, QueuePair, Region, SoftSim};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
#[cfg(shuttle)]
use shuttle::thread;

pub(crate) fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

pub(crate) const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };

/// Returns whether `fd` becomes readable in time.
pub(crate) fn readable(fd: impl AsFd, within: Duration) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let timeout = Timespec::try_from(within).unwrap();
    poll(&mut fds, Some(&timeout)).unwrap() == 1
}

/// Sleeps until `fd` is readable. No test waits longer than this.
#[cfg(not(shuttle))]
pub(crate) fn wait(fd: impl AsFd, what: &str) {
    assert!(readable(fd, Duration::from_secs(20)), "timed out: {what}");
}

/// Lets other threads run until `fd` is readable. No test waits for more turns than this.
#[cfg(shuttle)]
pub(crate) fn wait(fd: impl AsFd, what: &str) {
    for _ in 0..10_000 {
        if readable(&fd, Duration::ZERO) {
            return;
        }
        thread::yield_now();
    }
    panic!("never woken: {what}");
}

/// The next event of a channel.
pub(crate) fn events(channel: &EventChannel, what: &str) -> CmEventKind<SoftSim> {
    loop {
        if let Some(event) = channel.next_event().unwrap() {
            return event.kind;
        }
        wait(channel, what);
    }
}

/// One end of a connection. Fields drop in this order; any order would do.
pub(crate) struct Peer {
    pub(crate) channel: EventChannel,
    pub(crate) id: Identifier,
    pub(crate) pair: QueuePair,
    pub(crate) completions: CompletionQueue,
    pub(crate) domain: Domain,
    /// The memory of the posted receives, [`SLOTS`] of them, of [`SLOT`] bytes each.
    pub(crate) slots: Region,
    polled: VecDeque<Completion>,
}

pub(crate) const SLOTS: u64 = 32;
pub(crate) const SLOT: usize = 16;

impl Peer {
    fn new(channel: EventChannel, id: Identifier) -> Self {
        let domain = id.create_domain().unwrap();
        let completions = id.create_completion_queue(256, 0).unwrap();
        let limits = QueuePairLimits { send_depth: 64, recv_depth: 64, inline: 64 };
        let pair = id.create_queue_pair(&domain, &completions, limits).unwrap();
        let slots = domain.register(SLOTS as usize * SLOT, Access::LOCAL_WRITE).unwrap();
        let peer = Self { channel, id, pair, completions, domain, slots, polled: VecDeque::new() };
        (0..SLOTS).for_each(|slot| peer.receive(slot));
        peer
    }

    pub(crate) fn send(&self, id: u64, op: SendOp, local: Slice<'_, Region>) {
        self.pair.post_send(&[SendRequest { id, op, local, signaled: true, inline: false }]).unwrap();
    }

    /// Posts the receive of a slot.
    pub(crate) fn receive(&self, slot: u64) {
        let local = Slice { region: &self.slots, offset: slot as usize * SLOT, len: SLOT };
        self.pair.post_recv(&[RecvRequest { id: slot, local }]).unwrap();
    }

    fn poll(&mut self) -> Option<Completion> {
        if self.polled.is_empty() {
            let mut into = [Completion::EMPTY; 16];
            let count = self.completions.poll(&mut into).unwrap();
            self.polled.extend(into.iter().take(count));
        }
        self.polled.pop_front()
    }

    /// The next completion: poll, arm, poll again, sleep.
    pub(crate) fn next(&mut self, what: &str) -> Completion {
        loop {
            if let Some(completion) = self.poll() {
                return completion;
            }
            self.completions.arm().unwrap();
            if let Some(completion) = self.poll() {
                return completion;
            }
            wait(&self.completions, what);
            self.completions.take_events().unwrap();
        }
    }
}

/// A connection from `a` to `b`, which listens on a port of its own.
pub(crate) fn pair(a: &SoftSim, b: &SoftSim, to: IpAddr) -> (Peer, Peer) {
    let listening = b.event_channel().unwrap();
    let listener = listening.listen(SocketAddr::new(to, 0), 0).unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let passive = scope.spawn(|| accept(listening));
        let active = connect(a, address);
        (active, passive.join().unwrap())
    })
}

/// Connects to `remote`.
pub(crate) fn connect(host: &SoftSim, remote: SocketAddr) -> Peer {
    let channel = host.event_channel().unwrap();
    let id = channel.create_id().unwrap();
    id.resolve_address(None, remote, Duration::from_secs(1)).unwrap();
    assert!(matches!(events(&channel, "address"), CmEventKind::AddressResolved));
    id.resolve_route(Duration::from_secs(1)).unwrap();
    assert!(matches!(events(&channel, "route"), CmEventKind::RouteResolved));
    let peer = Peer::new(channel, id);
    peer.id.connect(&PARAMS, &[]).unwrap();
    let established = events(&peer.channel, "established");
    assert!(matches!(established, CmEventKind::Established { .. }), "{established:?}");
    peer
}

/// Accepts one connection on a listener's channel.
pub(crate) fn accept(channel: EventChannel) -> Peer {
    let CmEventKind::ConnectRequest { id, .. } = events(&channel, "request") else { panic!("no request") };
    let peer = Peer::new(channel, id);
    peer.id.accept(&PARAMS, &[]).unwrap();
    let established = events(&peer.channel, "established");
    assert!(matches!(established, CmEventKind::Established { .. }), "{established:?}");
    peer
}
