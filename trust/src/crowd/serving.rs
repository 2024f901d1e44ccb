use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::BytesMut;
use conformance::client::Failure;
use intercept::{Interceptor, Origin};
use kv_store::{Cut, Frames, Server, Store};
use rdma_backend::{Backend, QueuePairLimits, Region as _};
use rdma_conn::{AsyncEndpoint, AsyncStream, Descriptors, Endpoint, Limits, Options};
use rdma_server::{ConnectionType as _, Flow, Rdma, RdmaSettings, Replies, ServerSettings, Service, Vector};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Face;

/// The longest sleep of a server before it checks whether to stop.
const NAP: Duration = Duration::from_millis(500);

/// Counts the regions and completion queues of a server, at the backend: so interfaces compare.
pub(super) struct Objects<B: Backend> {
    regions: Arc<Mutex<Vec<Weak<B::Region>>>>,
    queues: Arc<Mutex<Vec<Weak<B::CompletionQueue>>>>,
}

impl<B: Backend> Default for Objects<B> {
    fn default() -> Self {
        Self { regions: Arc::default(), queues: Arc::default() }
    }
}

impl<B: Backend> Clone for Objects<B> {
    fn clone(&self) -> Self {
        Self { regions: Arc::clone(&self.regions), queues: Arc::clone(&self.queues) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Objects<B> {
    pub(super) fn registered_bytes(&self) -> u64 {
        lock(&self.regions).iter().filter_map(Weak::upgrade).map(|region| region.len() as u64).sum()
    }

    pub(super) fn completion_queues(&self) -> usize {
        lock(&self.queues).iter().filter(|queue| queue.strong_count() > 0).count()
    }
}

impl<B: Backend> Interceptor<B> for Objects<B> {
    type Identifier = ();
    type QueuePair = ();

    fn identifier(&self, _inner: &Arc<B::Identifier>, _origin: Origin) {}

    fn queue_pair(
        &self,
        (): &(),
        _inner: &Arc<B::QueuePair>,
        _domain: &B::Domain,
        _limits: QueuePairLimits,
    ) -> Result<(), B::Error> {
        Ok(())
    }

    fn completion_queue(&self, inner: &Arc<B::CompletionQueue>) {
        // Weak: being counted must not keep it alive.
        lock(&self.queues).push(Arc::downgrade(inner));
    }

    fn registered(&self, inner: &Arc<B::Region>) {
        let mut regions = lock(&self.regions);
        // Windows are registered and released under load.
        if regions.len() == regions.capacity() {
            regions.retain(|region| region.strong_count() > 0);
        }
        regions.push(Arc::downgrade(inner));
    }
}

/// Runs `body` beside a server, with the address at which it listens.
pub(super) fn beside<B: Descriptors, T>(
    face: Face,
    backend: B,
    at: (SocketAddr, Options),
    body: impl FnOnce(SocketAddr) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let over = AtomicBool::new(false);
    let (listens, listening) = mpsc::channel();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(face, backend, at, listens, &over));
        // Without an address the server has failed and reports why.
        let told = listening.recv().map_err(|_| Failure::wrong("the server does not listen")).and_then(body);
        over.store(true, Ordering::Relaxed);
        match server.join() {
            Ok(served) => served.and(told),
            Err(_) => Err(Failure::wrong("the server panicked")),
        }
    })
}

fn serve<B: Descriptors>(
    face: Face,
    backend: B,
    (address, options): (SocketAddr, Options),
    listens: Sender<SocketAddr>,
    over: &AtomicBool,
) -> Result<(), Failure> {
    match face {
        Face::Endpoint => on_endpoint(&backend, (address, options), &listens, over),
        Face::Server => on_server(backend, (address, options), &listens, over),
        Face::Tokio => on_tokio(&backend, (address, options), &listens, over),
    }
}

fn limits() -> Limits {
    Limits::default().connections(usize::MAX)
}

fn on_endpoint<B: Descriptors>(
    backend: &B,
    (address, options): (SocketAddr, Options),
    listens: &Sender<SocketAddr>,
    over: &AtomicBool,
) -> Result<(), Failure> {
    let mut endpoint = Endpoint::new(backend, limits())?;
    let listener = endpoint.listen(address, options)?;
    // If it fails, the measurement has given up, and `over` is set.
    let _measured = listens.send(endpoint.local_addr(listener).unwrap_or(address));
    let store = Store::default();
    let mut server = Server::new(endpoint, &store);
    while !over.load(Ordering::Relaxed) {
        server.turn()?;
        server.endpoint.wait(Some(NAP))?;
    }
    Ok(())
}

#[derive(Default)]
struct StoreService(Store);

impl Service for StoreService {
    type Client = Cut;

    fn serve(
        &mut self,
        _from: rdma_server::SessionId,
        cut: &mut Cut,
        input: &mut BytesMut,
        replies: &mut Replies,
    ) -> Flow {
        // Bounded by room for replies, so that a pipeline does not collect them all in memory.
        while !replies.is_full() {
            let Ok(command) = cut.take(input) else { return Flow::Leave };
            let Some(command) = command else { return Flow::Stay };
            if self.0.answer(command, replies.buffer()) {
                return Flow::Leave;
            }
        }
        Flow::Again
    }

    fn request_limit(&self, _: &Cut) -> usize {
        64 << 20
    }
}

fn on_server<B: Descriptors>(
    backend: B,
    (address, options): (SocketAddr, Options),
    listens: &Sender<SocketAddr>,
    over: &AtomicBool,
) -> Result<(), Failure> {
    // On the embedded fabric, the clients are on another machine.
    let settings = ServerSettings::default().max_clients(usize::MAX).protected(false);
    let mut server = rdma_server::Server::new(StoreService::default(), settings)?;
    let rdma = Rdma::new(backend);
    // One vector: on the other interfaces each vector has completion queues of its own.
    let vector = Vector::Fixed(options.completion_vector);
    rdma.configure(RdmaSettings::default().server(options).vector(vector).limits(limits()))?;
    let binding = server.bind(rdma, &[address.into()])?;
    let bound = server.local_addrs(binding).first().and_then(|address| address.ip().ok());
    let _measured = listens.send(bound.unwrap_or(address));
    while !over.load(Ordering::Relaxed) {
        server.turn(Some(NAP))?;
    }
    Ok(())
}

fn on_tokio<B: Descriptors>(
    backend: &B,
    (address, options): (SocketAddr, Options),
    listens: &Sender<SocketAddr>,
    over: &AtomicBool,
) -> Result<(), Failure> {
    // One thread, as on the other interfaces.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = AsyncEndpoint::new(backend, limits())?.listen(address, options)?;
        let _measured = listens.send(listener.local_addr().unwrap_or(address));
        let store = Arc::new(Store::default());
        while !over.load(Ordering::Relaxed) {
            if let Ok(accepted) = tokio::time::timeout(NAP, listener.accept()).await {
                tokio::spawn(session(accepted?.0, Arc::clone(&store)));
            }
        }
        Ok(())
    })
}

async fn session<B: Descriptors>(mut stream: AsyncStream<B>, store: Arc<Store>) -> std::io::Result<()> {
    let (mut received, mut replies, mut chunk) = (Frames::default(), BytesMut::new(), [0; 4 << 10]);
    loop {
        let read = stream.read(&mut chunk).await?;
        received.push(&chunk[..read]);
        let mut quits = read == 0;
        while !quits && let Some(command) = received.take()? {
            quits = store.answer(command, &mut replies);
            // Taken, so that a long reply does not leave its memory to an idle session.
            stream.write_all(&std::mem::take(&mut replies)).await?;
        }
        if quits {
            return stream.shutdown().await;
        }
    }
}
