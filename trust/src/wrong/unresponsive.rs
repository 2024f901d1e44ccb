//! Unresponsive targets, which no case may pass.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::Descriptors;

use conformance::blackbox::target::{Exit, Running, TargetClients, TargetServer};
use conformance::client::Failure;
use conformance::tester::{Incoming, Listener, Peer, Shape};
use suite::resources::ProcessResources;

/// How a target does not respond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unresponsive {
    /// It accepts or connects, and then does nothing.
    Hung,
    /// It registers windows and receives data, and never sends.
    Silent,
    /// Its process was ended by a signal at once.
    Crashed,
}

impl Unresponsive {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Hung, Self::Silent, Self::Crashed];
}

const TURN: Duration = Duration::from_millis(10);

fn shape() -> Shape {
    Shape { patience: Duration::from_secs(2), ..Shape::small() }
}

/// Handles an event as a silent side does. Returns false when the connection has ended.
fn take<B: Descriptors>(peer: &mut Peer<B>) -> Result<bool, Failure> {
    while let Some(incoming) = peer.receive_within(Duration::ZERO)? {
        match incoming {
            Incoming::Gone(_) => return Ok(false),
            incoming => peer.absorb(incoming)?,
        }
        // Taken and not answered, so that its windows go on.
        let _unheard = peer.take_received();
    }
    Ok(true)
}

struct Background {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    fn start(work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let over = Arc::clone(&over);
            move || work(&over)
        });
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It has nothing to report.
            let _ended = thread.join();
        }
    }
}

pub(super) struct UnresponsiveServer {
    address: SocketAddr,
    how: Unresponsive,
    _background: Option<Background>,
}

impl UnresponsiveServer {
    pub(super) fn start<B: Descriptors>(
        backend: &B,
        address: SocketAddr,
        how: Unresponsive,
    ) -> Result<Self, Failure> {
        let listens = how != Unresponsive::Crashed;
        let listener = listens.then(|| Listener::new(backend, address)).transpose()?;
        let background = listener.map(|listener| Background::start(move |over| accept(&listener, how, over)));
        Ok(Self { address, how, _background: background })
    }
}

fn accept<B: Descriptors>(listener: &Listener<B>, how: Unresponsive, over: &AtomicBool) {
    let mut peers = Vec::new();
    while !over.load(Ordering::Relaxed) {
        if let Ok(Some((id, _))) = listener.request_within(TURN)
            && let Ok(mut peer) = listener.answer(id, shape())
            && (how == Unresponsive::Hung || peer.await_established().and_then(|()| peer.register()).is_ok())
        {
            peers.push(peer);
        }
        if how == Unresponsive::Silent {
            peers.retain_mut(|peer| take(peer).unwrap_or(false));
        }
    }
}

impl TargetServer for UnresponsiveServer {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn death(&self, _: Duration) -> Option<String> {
        // SIGSEGV, as `ExitStatus` shows it.
        (self.how == Unresponsive::Crashed).then(|| "signal: 11".into())
    }

    fn restart(&self) -> Result<bool, String> {
        Ok(false)
    }

    fn held(&self) -> Option<ProcessResources> {
        // With `None`, cases that need it would not apply, and so not be tested.
        Some(ProcessResources::default())
    }

    fn processor_time(&self) -> Option<Duration> {
        // As `held`.
        Some(Duration::ZERO)
    }
}

pub(super) struct UnresponsiveClients<B> {
    pub(super) backend: B,
    pub(super) how: Unresponsive,
}

impl<B: Descriptors> TargetClients for UnresponsiveClients<B> {
    fn start(&self, _: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let (backend, how) = (self.backend.clone(), self.how);
        let background = (how != Unresponsive::Crashed)
            .then(|| Background::start(move |over| dial(&backend, address, how, over)));
        Ok(Box::new(UnresponsiveClient { _background: background, how }))
    }
}

fn dial<B: Descriptors>(backend: &B, address: SocketAddr, how: Unresponsive, over: &AtomicBool) {
    let mut peer = Peer::dial(backend, address, shape()).ok();
    if how == Unresponsive::Silent {
        peer.take_if(|peer| peer.register().is_err());
    }
    while !over.load(Ordering::Relaxed) {
        if how == Unresponsive::Silent {
            peer.take_if(|peer| !take(peer).unwrap_or(false));
        }
        std::thread::sleep(TURN);
    }
}

struct UnresponsiveClient {
    _background: Option<Background>,
    how: Unresponsive,
}

impl Running for UnresponsiveClient {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        if self.how == Unresponsive::Crashed {
            return Some(Exit::Crashed("signal: 11".into()));
        }
        std::thread::sleep(patience);
        None
    }
}
