use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::{Descriptors, Endpoint, Limits, Listener, Options, Request, Waker};

use crate::kv::Store;
use crate::serve::Server;

/// The most requests that wait for a thread. If all have as many, others wait in the kernel.
const BACKLOG: usize = 128;
/// How long the listener pauses after a temporary error.
const REST: Duration = Duration::from_millis(100);
/// The most requests accepted in one turn, before other work (VR-RES-007).
const REQUESTS_PER_TURN: usize = 16;

/// A listener and the threads that serve its clients.
///
/// Each request goes to the next thread in turn (round robin). Nothing is created for it before.
/// That thread moves it to the event channel of its own [`Endpoint`] (`rdma_migrate_id(3)`),
/// accepts it there, and serves it until its end. So threads share no queue and no lock except the
/// store's.
pub struct Threads<B: Descriptors> {
    listener: Listener<B>,
    workers: Vec<Worker<B>>,
    next: usize,
}

struct Worker<B: Descriptors> {
    requests: SyncSender<Request<B>>,
    waker: Waker,
    thread: Option<JoinHandle<io::Result<()>>>,
    ended: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
}

/// Reports the end of a thread, also by a panic.
struct End {
    ended: Arc<AtomicBool>,
    listener: Waker,
}

impl Drop for End {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.listener.wake();
    }
}

impl<B: Descriptors> Threads<B> {
    /// Listens on `address` (port 0 takes a free one), and starts `threads` threads, at least one.
    /// `limits` is for the connections and the registered memory of all threads together.
    ///
    /// # Errors
    /// No RDMA device has that address, or it is in use; or the process has no descriptor or thread
    /// left.
    pub fn start(
        backend: &B,
        address: SocketAddr,
        options: Options,
        limits: Limits,
        threads: usize,
        store: &Arc<Store>,
    ) -> io::Result<Self> {
        let mut this = Self { listener: Listener::bind(backend, address)?, workers: Vec::new(), next: 0 };
        // If one of them fails, dropping `this` ends those that have started.
        let mut endpoint = Endpoint::new(backend, limits)?;
        for _ in 1..threads.max(1) {
            let further = endpoint.sharing_limits()?;
            let endpoint = std::mem::replace(&mut endpoint, further);
            this.workers.push(Worker::start(endpoint, options, store, this.listener.waker())?);
        }
        this.workers.push(Worker::start(endpoint, options, store, this.listener.waker())?);
        Ok(this)
    }

    /// Returns the address of the listener.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns how many connections each thread has accepted. The counters keep counting.
    pub fn accepted(&self) -> Vec<Arc<AtomicU64>> {
        self.workers.iter().map(|worker| Arc::clone(&worker.accepted)).collect()
    }

    /// Hands requests to the threads while the listener and all threads live.
    ///
    /// # Errors
    /// The listener has ended, or a thread has ended, with its error. The other threads end, too.
    pub fn run(mut self) -> io::Result<Infallible> {
        loop {
            match self.listener.try_request() {
                Ok(Some(request)) => self.hand_over(request),
                Ok(None) => self.listener.wait(None)?,
                Err(error) if self.listener.is_over() => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(%error, "no request can be taken now");
                    std::thread::sleep(REST);
                }
            }
            if let Some(ended) = self.workers.iter_mut().find_map(Worker::ended) {
                return Err(ended);
            }
        }
    }

    /// Gives a request to the next thread with room, or waits. Without a thread it is rejected.
    fn hand_over(&mut self, mut request: Request<B>) {
        for turn in 0..2 * self.workers.len() {
            let place = (self.next + turn) % self.workers.len();
            let worker = &self.workers[place];
            let given = if turn < self.workers.len() {
                worker.requests.try_send(request)
            } else {
                worker.requests.send(request).map_err(|refused| TrySendError::Disconnected(refused.0))
            };
            match given {
                Ok(()) => {
                    worker.waker.wake();
                    self.next = place + 1;
                    return;
                }
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => request = back,
            }
        }
    }
}

impl<B: Descriptors> Worker<B> {
    /// Starts a thread, which wakes `listener` when it ends.
    fn start(
        mut endpoint: Endpoint<B>,
        options: Options,
        store: &Arc<Store>,
        listener: Waker,
    ) -> io::Result<Self> {
        let waker = endpoint.waker()?;
        let (requests, taken) = sync_channel(BACKLOG);
        let (store, ended) = (Arc::clone(store), Arc::new(AtomicBool::new(false)));
        let end = End { ended: Arc::clone(&ended), listener };
        let (woken, accepted) = (waker.clone(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&accepted);
        let serve = move || {
            let _end = end;
            let server = Server::new(endpoint, &store).woken_by(woken);
            work(server, &taken, options, &counted)
        };
        let thread = std::thread::Builder::new().name("kv-store".to_owned()).spawn(serve)?;
        Ok(Self { requests, waker, thread: Some(thread), ended, accepted })
    }

    fn ended(&mut self) -> Option<io::Error> {
        let thread = self.thread.take_if(|_| self.ended.load(Ordering::Acquire))?;
        let nothing = || io::Error::other("a thread of the server has ended");
        Some(thread.join().map_or_else(|_| nothing(), |ended| ended.err().unwrap_or_else(nothing)))
    }
}

impl<B: Descriptors> Drop for Threads<B> {
    fn drop(&mut self) {
        for Worker { requests, waker, thread, .. } in self.workers.drain(..) {
            // A woken thread without a sender ends.
            drop(requests);
            waker.wake();
            if let Some(Err(_) | Ok(Err(_))) = thread.map(JoinHandle::join) {
                tracing::warn!("a thread of the server ended by an error");
            }
        }
    }
}

fn work<B: Descriptors>(
    mut server: Server<'_, B>,
    requests: &Receiver<Request<B>>,
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

#[cfg(test)]
mod tests {
    use rdma_conn::Event;
    use rdma_softsim::{Fabric, SoftSim};

    use super::*;

    const ADDRESS: ([u8; 4], u16) = ([192, 0, 2, 1], 6379);
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn requests_wait_for_threads_that_lag() {
        const THREADS: usize = 2;
        const ASKED: usize = THREADS * BACKLOG + 5;
        let fabric = Fabric::new();
        let (backend, store) = (fabric.host(&[ADDRESS.0.into()]), Arc::new(Store::default()));
        let (options, limits) = (Options::default(), Limits::default());
        let mut threads = Threads::start(&backend, ADDRESS.into(), options, limits, THREADS, &store)
            .expect("a device and threads");
        // Stand-ins for threads that take nothing: their requests wait in the test's hands.
        let lag = |worker: &mut Worker<SoftSim>| {
            let (requests, waiting) = sync_channel(BACKLOG);
            worker.requests = requests;
            // The real thread ends when it is woken.
            worker.waker.wake();
            worker.thread.take().expect("a thread").join().expect("no panic").expect("an orderly end");
            waiting
        };
        let lagging: Vec<_> = threads.workers.iter_mut().map(lag).collect();
        let client = fabric.host(&[[192, 0, 2, 2].into()]);
        let mut clients = Endpoint::new(&client, Limits::NONE).expect("a device");
        for _ in 0..ASKED {
            clients.connect(ADDRESS.into(), None, HOUR, options).expect("begins to connect");
        }
        let turn = |clients: &mut Endpoint<SoftSim>| {
            clients.progress().expect("the fabric stays");
            while let Some(event) = clients.next_event() {
                assert!(!matches!(event, Event::Ended(_)), "rejected");
            }
        };
        for _ in 0..THREADS * BACKLOG {
            let request = loop {
                turn(&mut clients);
                if let Some(request) = threads.listener.try_request().expect("a device") {
                    break request;
                }
            };
            threads.hand_over(request);
        }
        std::thread::spawn(move || threads.run());
        let mut taken = Vec::new();
        while taken.len() < ASKED {
            turn(&mut clients);
            taken.extend(lagging.iter().flat_map(Receiver::try_iter));
        }
    }

    #[test]
    fn the_listening_thread_hears_of_a_panic() {
        let fabric = Fabric::new();
        let listener =
            Listener::bind(&fabric.host(&[ADDRESS.0.into()]), SocketAddr::from(ADDRESS)).expect("a device");
        let ended = Arc::new(AtomicBool::new(false));
        let end = End { ended: Arc::clone(&ended), listener: listener.waker() };
        let thread = std::thread::spawn(move || {
            let _end = end;
            panic!("as it was told");
        });
        assert!(thread.join().is_err());
        listener.wait(None).expect("woken");
        assert!(ended.load(Ordering::Acquire));
    }
}
