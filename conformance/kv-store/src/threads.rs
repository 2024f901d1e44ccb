//! Serves the store on several threads behind one port: each has an endpoint of its own, and shares nothing but the store.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use rdma_backend::{CmEventKind, EventChannel, Identifier};
use rdma_conn::{Descriptors, Endpoint, EndpointWaker, Error, Limits, Options};

use crate::kv::Store;
use crate::serve::Server;

/// A descriptor that is watched, and the calls of [`Waker::wake`].
const DESCRIPTOR: Token = Token(0);
const WOKEN: Token = Token(1);
/// As many requests wait for a thread; more are rejected.
const BACKLOG: usize = 128;
/// As many are handed over or accepted in one turn, before other work has its turn (VR-RES-007).
const REQUESTS_PER_TURN: usize = 16;

/// A listener and the threads that serve its clients.
///
/// Each request for a connection goes to the next thread in turn (round robin), whatever the others' load is. Nothing is made for it before: that
/// thread moves the request to the event channel of its own [`Endpoint`] (`rdma_migrate_id(3)`), accepts it there, and serves it to its
/// end. So threads share no queue and no lock but that of the store.
pub struct Threads<B: Descriptors> {
    // The identifier goes before its channel.
    listener: B::Identifier,
    events: B::EventChannel,
    poll: Poll,
    /// Kept, for a waker that is gone wakes nobody, whatever it did before.
    _waker: Arc<Waker>,
    workers: Vec<Worker<B>>,
    /// The place of the thread whose turn it is.
    next: usize,
}

/// What the listener has of a thread.
struct Worker<B: Descriptors> {
    requests: SyncSender<B::Identifier>,
    waker: EndpointWaker,
    thread: Option<JoinHandle<io::Result<()>>>,
    ended: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
}

/// Says that a thread is at its end, also by a panic.
struct End {
    ended: Arc<AtomicBool>,
    listener: Arc<Waker>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Err(error) = self.listener.wake() {
            tracing::warn!(%error, "the listening thread could not be woken");
        }
    }
}

impl<B: Descriptors> Threads<B> {
    /// Listens on `address` (port 0 takes a free one), and starts `threads` threads, at least one. They together have at most as many
    /// connections, and as much registered memory, as `limits` says, whichever thread has them.
    ///
    /// # Errors
    /// No RDMA device has that address, or it is taken; or the process has no descriptor or thread left.
    pub fn start(
        backend: &B,
        address: SocketAddr,
        options: Options,
        limits: Limits,
        threads: usize,
        store: &Arc<Store>,
    ) -> io::Result<Self> {
        let events = backend.event_channel().map_err(Error::backend("opening an event channel"))?;
        let listener = events.listen(address, 0).map_err(Error::backend("listening"))?;
        let (poll, waker) = poll_for(&events)?;
        let mut this =
            Self { listener, events, poll, _waker: Arc::clone(&waker), workers: Vec::new(), next: 0 };
        // If one of them cannot be had, dropping `this` ends those that began.
        let mut endpoint = Endpoint::new(backend, limits)?;
        for _ in 1..threads.max(1) {
            let further = endpoint.sharing_limits()?;
            this.workers.push(Worker::start(
                std::mem::replace(&mut endpoint, further),
                options,
                store,
                &waker,
            )?);
        }
        this.workers.push(Worker::start(endpoint, options, store, &waker)?);
        Ok(this)
    }

    /// Returns the address of the listener.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns how many connections each thread has accepted, now and whenever it is read.
    pub fn accepted(&self) -> Vec<Arc<AtomicU64>> {
        self.workers.iter().map(|worker| Arc::clone(&worker.accepted)).collect()
    }

    /// Hands requests to the threads for as long as the listener and all threads live.
    ///
    /// # Errors
    /// The listener's device is gone, or a thread has ended, with its error. The threads that are left end too.
    pub fn run(mut self) -> io::Result<Infallible> {
        let mut events = Events::with_capacity(2);
        loop {
            let mut left = REQUESTS_PER_TURN;
            while left > 0
                && let Some(event) =
                    self.events.next_event().map_err(Error::backend("reading connection events"))?
            {
                left -= 1;
                match event.kind {
                    CmEventKind::ConnectRequest { id, .. } => self.hand_over(id),
                    CmEventKind::DeviceRemoval => return Err(Error::DeviceRemoved.into()),
                    // Of a request that was withdrawn, among others: accepting it says so.
                    other => tracing::debug!(event = ?other, "event on a listener"),
                }
            }
            if let Some(ended) = self.workers.iter_mut().find_map(Worker::ended) {
                return Err(ended);
            }
            wait(&mut self.poll, &mut events, (left == 0).then_some(Duration::ZERO))?;
        }
    }

    fn hand_over(&mut self, request: B::Identifier) {
        let Some(worker) = self.workers.get(self.next) else { return };
        self.next = (self.next + 1) % self.workers.len();
        // A thread that has ended takes none, and one that lags behind no more; dropping a request rejects its peer.
        if worker.requests.try_send(request).is_ok()
            && let Err(error) = worker.waker.wake()
        {
            tracing::warn!(%error, "a thread could not be woken");
        }
    }
}

impl<B: Descriptors> Worker<B> {
    /// Starts a thread; `listener` is woken when it ends.
    fn start(
        mut endpoint: Endpoint<B>,
        options: Options,
        store: &Arc<Store>,
        listener: &Arc<Waker>,
    ) -> io::Result<Self> {
        let waker = endpoint.waker()?;
        let (requests, taken) = sync_channel(BACKLOG);
        let (store, ended) = (Arc::clone(store), Arc::new(AtomicBool::new(false)));
        let end = End { ended: Arc::clone(&ended), listener: Arc::clone(listener) };
        let (woken, accepted) = (waker.clone(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&accepted);
        let serve = move || {
            let _end = end;
            let wake = move || {
                if let Err(error) = woken.wake() {
                    tracing::warn!(%error, "a thread could not be woken");
                }
            };
            let server = Server::new(endpoint, &store).woken_by(wake);
            work(server, &taken, options, &counted)
        };
        let thread = std::thread::Builder::new().name("kv-store".to_owned()).spawn(serve)?;
        Ok(Self { requests, waker, thread: Some(thread), ended, accepted })
    }

    /// Returns the reason for which the thread has ended, if it has.
    fn ended(&mut self) -> Option<io::Error> {
        let thread = self.thread.take_if(|_| self.ended.load(Ordering::Acquire))?;
        let nothing = || io::Error::other("a thread of the server has ended");
        Some(thread.join().map_or_else(|_| nothing(), |ended| ended.err().unwrap_or_else(nothing)))
    }
}

impl<B: Descriptors> Drop for Threads<B> {
    fn drop(&mut self) {
        for Worker { requests, waker, thread, .. } in self.workers.drain(..) {
            // What a thread without a sender finds when it is woken is its end.
            drop(requests);
            if waker.wake().is_ok()
                && let Some(Err(_) | Ok(Err(_))) = thread.map(JoinHandle::join)
            {
                tracing::warn!("a thread of the server ended by an error");
            }
        }
    }
}

/// One thread: accepts what it is given, and serves it.
fn work<B: Descriptors>(
    mut server: Server<'_, B>,
    requests: &Receiver<B::Identifier>,
    options: Options,
    accepted: &AtomicU64,
) -> io::Result<()> {
    loop {
        let mut left = REQUESTS_PER_TURN;
        while left > 0 {
            match requests.try_recv() {
                Ok(request) => match server.endpoint.accept_request(request, options) {
                    Ok(_) => _ = accepted.fetch_add(1, Ordering::Relaxed),
                    Err(error) => tracing::warn!(%error, "a connection was rejected"),
                },
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            left -= 1;
        }
        if left == 0 { server.turn()? } else { server.wait(None)? }
    }
}

/// Watches a descriptor; the waker interrupts whoever waits for it.
fn poll_for(source: &impl AsFd) -> io::Result<(Poll, Arc<Waker>)> {
    let poll = Poll::new()?;
    poll.registry().register(&mut SourceFd(&source.as_fd().as_raw_fd()), DESCRIPTOR, Interest::READABLE)?;
    let waker = Waker::new(poll.registry(), WOKEN)?;
    Ok((poll, Arc::new(waker)))
}

fn wait(poll: &mut Poll, events: &mut Events, limit: Option<Duration>) -> io::Result<()> {
    match poll.poll(events, limit) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_listening_thread_hears_of_a_panic() {
        let (_never, quiet) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let (mut poll, listener) = poll_for(&quiet).expect("descriptors");
        let ended = Arc::new(AtomicBool::new(false));
        let end = End { ended: Arc::clone(&ended), listener: Arc::clone(&listener) };
        let thread = std::thread::spawn(move || {
            let _end = end;
            panic!("as it was told");
        });
        assert!(thread.join().is_err());
        let mut events = Events::with_capacity(2);
        wait(&mut poll, &mut events, Some(Duration::from_secs(60))).expect("waits");
        assert!(events.iter().any(|event| event.token() == WOKEN) && ended.load(Ordering::Acquire));
    }
}
