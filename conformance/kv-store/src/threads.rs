//! Serves the store on several threads behind one port: each has an endpoint of its own, and shares nothing but the store.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
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
/// As many requests wait for a thread. More wait for any thread, one in the listener's hand and the
/// others where the kernel keeps them.
const BACKLOG: usize = 128;
/// How long the listener rests after an error of its events, and how many it takes one after
/// another before it gives up.
const REST: Duration = Duration::from_millis(100);
const FAILURES: u32 = 10;
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
    room: Arc<Room>,
    workers: Vec<Worker<B>>,
    /// The place of the thread whose turn it is.
    next: usize,
    /// A request for which no thread had room. No other is looked at before it.
    held: Option<B::Identifier>,
    /// Errors of the listener's events, one after another.
    failures: u32,
}

/// How the listener learns that a thread has room for a request again.
struct Room {
    wanted: AtomicBool,
    listener: Arc<Waker>,
}

impl Room {
    /// A thread has taken a request.
    fn made(&self) {
        if self.wanted.swap(false, Ordering::SeqCst)
            && let Err(error) = self.listener.wake()
        {
            tracing::warn!(%error, "the listening thread could not be woken");
        }
    }
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
        let room = Arc::new(Room { wanted: AtomicBool::new(false), listener: waker });
        let (workers, held) = (Vec::new(), None);
        let mut this = Self { listener, events, poll, room, workers, next: 0, held, failures: 0 };
        // If one of them cannot be had, dropping `this` ends those that began.
        let mut endpoint = Endpoint::new(backend, limits)?;
        for _ in 1..threads.max(1) {
            let further = endpoint.sharing_limits()?;
            this.workers.push(Worker::start(
                std::mem::replace(&mut endpoint, further),
                options,
                store,
                &this.room,
            )?);
        }
        this.workers.push(Worker::start(endpoint, options, store, &this.room)?);
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
    /// The listener's device is gone, its events fail again and again, or a thread has ended, with
    /// its error. The threads that are left end too.
    pub fn run(mut self) -> io::Result<Infallible> {
        let mut events = Events::with_capacity(2);
        loop {
            let limit = self.turn()?;
            if let Some(ended) = self.workers.iter_mut().find_map(Worker::ended) {
                return Err(ended);
            }
            wait(&mut self.poll, &mut events, limit)?;
        }
    }

    /// Hands over what has come. Returns how long the listener may then wait.
    fn turn(&mut self) -> io::Result<Option<Duration>> {
        for _ in 0..REQUESTS_PER_TURN {
            if let Some(request) = self.held.take()
                && !self.hand_over(request)
            {
                // Until a thread has room.
                return Ok(None);
            }
            let event = match self.events.next_event().map_err(Error::backend("reading connection events")) {
                Ok(None) => return Ok(None),
                Ok(Some(event)) => event,
                // It may be that of one request only (VR-SEC-004).
                Err(error) if self.failures < FAILURES => {
                    self.failures += 1;
                    tracing::warn!(%error, "a request was lost, or more than one");
                    return Ok(Some(REST));
                }
                Err(error) => return Err(error.into()),
            };
            self.failures = 0;
            match event.kind {
                CmEventKind::ConnectRequest { id, .. } => self.held = Some(id),
                // It would answer nobody, for ever.
                CmEventKind::DeviceRemoval => return Err(Error::DeviceRemoved.into()),
                CmEventKind::Async(event) if event.is_fatal() => return Err(Error::Device { event }.into()),
                // Of a request that was withdrawn, among others: accepting it says so.
                other => tracing::debug!(event = ?other, "event on a listener"),
            }
        }
        Ok(Some(Duration::ZERO))
    }

    /// Gives a request to the next thread that has room. False, and it is held, if none has.
    fn hand_over(&mut self, request: B::Identifier) -> bool {
        let Some(request) = self.give(request) else { return true };
        self.room.wanted.store(true, Ordering::SeqCst);
        // One may have made room before it could see that it is wanted.
        self.held = self.give(request);
        self.held.is_none()
    }

    /// Gives a request to the next thread that has room; returns it if none has.
    fn give(&mut self, mut request: B::Identifier) -> Option<B::Identifier> {
        let (before, from) = self.workers.split_at(self.next.min(self.workers.len()));
        let turn = from.iter().chain(before).zip(self.next..);
        for (worker, place) in turn {
            match worker.requests.try_send(request) {
                Ok(()) => {
                    self.next = (place + 1) % self.workers.len();
                    if let Err(error) = worker.waker.wake() {
                        tracing::warn!(%error, "a thread could not be woken");
                    }
                    return None;
                }
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => request = back,
            }
        }
        Some(request)
    }
}

impl<B: Descriptors> Worker<B> {
    /// Starts a thread; the listener is woken when it ends, and when it has room for which the
    /// listener waits.
    fn start(
        mut endpoint: Endpoint<B>,
        options: Options,
        store: &Arc<Store>,
        room: &Arc<Room>,
    ) -> io::Result<Self> {
        let waker = endpoint.waker()?;
        let (requests, taken) = sync_channel(BACKLOG);
        let (store, room, ended) = (Arc::clone(store), Arc::clone(room), Arc::new(AtomicBool::new(false)));
        let end = End { ended: Arc::clone(&ended), listener: Arc::clone(&room.listener) };
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
            work(server, &taken, options, &counted, &room)
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
    room: &Room,
) -> io::Result<()> {
    loop {
        let mut left = REQUESTS_PER_TURN;
        while left > 0 {
            match requests.try_recv() {
                Ok(request) => {
                    room.made();
                    match server.endpoint.accept_request(request, options) {
                        Ok(_) => _ = accepted.fetch_add(1, Ordering::Relaxed),
                        Err(error) => tracing::warn!(%error, "a connection was rejected"),
                    }
                }
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
    use rdma_conn::Event;
    use rdma_softsim::{Fabric, SoftSim};

    use super::*;

    const ADDRESS: ([u8; 4], u16) = ([192, 0, 2, 1], 6379);
    const HOUR: Duration = Duration::from_secs(3600);

    /// A listener whose threads take nothing, since they are none: their requests wait in the
    /// test's hands.
    struct Lagging {
        fabric: Fabric,
        threads: Threads<SoftSim>,
        lagging: Vec<Receiver<<SoftSim as rdma_backend::Backend>::Identifier>>,
    }

    fn lagging() -> Lagging {
        let fabric = Fabric::new();
        let backend = fabric.host(&[ADDRESS.0.into()]);
        let store = Arc::new(Store::default());
        let mut threads =
            Threads::start(&backend, ADDRESS.into(), Options::server(), Limits::default(), 2, &store)
                .expect("a device and threads");
        let lagging = threads.workers.iter_mut().map(|worker| {
            let (requests, waiting) = sync_channel(BACKLOG);
            worker.requests = requests;
            // The real thread ends when it is woken.
            worker.waker.wake().expect("a wake-up");
            worker.thread.take().expect("a thread").join().expect("no panic").expect("an orderly end");
            waiting
        });
        let lagging = lagging.collect();
        Lagging { fabric, threads, lagging }
    }

    /// However many come while the threads lag behind, none is rejected: the last wait until there
    /// is room.
    #[test]
    fn requests_wait_for_threads_that_lag() {
        const MORE: usize = 5;
        let Lagging { fabric, mut threads, lagging } = lagging();
        let client = fabric.host(&[[192, 0, 2, 2].into()]);
        let mut clients = Endpoint::new(&client, Limits::NONE).expect("a device");
        let mut asked = 0;
        let mut ask = |threads: &mut Threads<SoftSim>, more: usize| {
            for _ in 0..more {
                let options = Options::client();
                clients.connect(ADDRESS.into(), None, HOUR, options).expect("begins to connect");
            }
            asked += more;
            // A request each comes through.
            for _ in 0..10 * asked {
                clients.progress().expect("progress");
                while let Some(event) = clients.next_event() {
                    assert!(!matches!(event, Event::Ended(_)), "rejected");
                }
                threads.turn().expect("a turn");
            }
        };
        ask(&mut threads, 2 * BACKLOG);
        assert!(threads.held.is_none());
        ask(&mut threads, MORE);
        assert!(threads.held.is_some() && threads.turn().expect("a turn").is_none(), "it waits");
        let mut events = Events::with_capacity(2);
        wait(&mut threads.poll, &mut events, Some(Duration::ZERO)).expect("takes what was told");
        // One of them has room now. It says so, which ends the wait.
        let accepted = lagging[1].try_recv().expect("a request");
        threads.room.made();
        wait(&mut threads.poll, &mut events, Some(Duration::from_secs(60))).expect("waits");
        assert!(events.iter().any(|event| event.token() == WOKEN));
        threads.turn().expect("a turn");
        assert!(threads.held.is_some(), "the next one");
        drop(accepted);
        let waiting: usize = lagging.iter().map(|requests| requests.try_iter().count()).sum();
        assert_eq!(waiting, 2 * BACKLOG);
        threads.turn().expect("a turn");
        let waiting: usize = lagging.iter().map(|requests| requests.try_iter().count()).sum();
        assert_eq!((waiting, threads.held.is_none()), (MORE - 1, true));
    }

    /// What is wrong with one event is not the end of the server; what stays wrong is.
    #[test]
    fn an_error_of_events_is_not_the_end() {
        let Lagging { fabric, mut threads, .. } = lagging();
        fabric.kill_host(ADDRESS.0.into());
        for _ in 0..FAILURES {
            assert_eq!(threads.turn().expect("a turn"), Some(REST));
        }
        threads.turn().expect_err("nothing comes any more");
    }

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
