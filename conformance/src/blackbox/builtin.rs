//! This library's server and client as targets, in this process.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use intercept::{Frozen, Gate, Intercepted};
use rdma_conn::{Connect, Descriptors, Error, Keepalive, Listener, Options, Stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

use super::close::LAST_REPLY;
use super::flow::{ROOM_TO_ASK, UNHANDLED};
use super::keep::IDLE;
use super::responder::{made_up_key, made_up_value};
use super::session::{LONG_VALUE, MANY};
use super::target::{Exit, Running, TargetClients, TargetServer};
use super::xfer::SEND_MEMORY;
use crate::client::{Failure, RespClient};
use crate::resources::ProcessResources;
use crate::workload::Entry;
use kv_store as kv;

/// How long our side waits for a peer that stalls: longer than any case lets it wait and continue.
const STALL: Duration = Duration::from_secs(2);
/// How soon our client checks whether its server is still alive.
const PROBE: Duration = Duration::from_millis(500);

/// The small commands of our client, and how many a pipelining one has unanswered.
const ROUNDS: usize = 70;
const AHEAD: usize = 20;

/// The length of our side's windows.
pub const WINDOW: u32 = 64 << 10;

/// Returns options with small windows and short time-outs.
pub const fn small(options: Options) -> Options {
    with_window(options, WINDOW)
}

/// Returns options with windows of this length and short time-outs.
pub const fn with_window(mut options: Options, window: u32) -> Options {
    options.protocol.window = window;
    options.protocol.send_buffer = if window < WINDOW { WINDOW } else { window };
    options.protocol.stall_limit = Some(STALL);
    options.handshake_timeout = STALL;
    options.linger = PROBE;
    // A client asks for features, so that there is something to answer.
    options.protocol.negotiate = true;
    options
}

/// How a connection of our side ended.
#[derive(Debug)]
pub enum Ended {
    /// With the end of the stream.
    InOrder,
    /// With this error of the connection.
    With(Error),
    /// With another error, of the application or of the system.
    Otherwise(String),
}

impl From<&Failure> for Ended {
    fn from(failure: &Failure) -> Self {
        match failure {
            Failure::Connection(error) => Self::With(error.clone()),
            Failure::Io(error) => match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
                Some(inner) => Self::With(inner.clone()),
                None if error.kind() == std::io::ErrorKind::UnexpectedEof => Self::InOrder,
                None => Self::Otherwise(error.to_string()),
            },
            // The application judges whether the stream ended too early.
            Failure::Closed => Self::InOrder,
            other => Self::Otherwise(other.to_string()),
        }
    }
}

impl Ended {
    /// Returns whether our side reports a bug of its own: as bad as a panic.
    const fn is_bug(&self) -> bool {
        matches!(self, Self::With(Error::Protocol(rdma_proto::Error::Bug(_))))
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::InOrder => f.write_str("in order"),
            Self::With(error) => write!(f, "with {error:?}: {error}"),
            Self::Otherwise(what) => write!(f, "with another error: {what}"),
        }
    }
}

/// The connections of our side: the number of open ones, and the ends of the others.
#[derive(Clone, Default)]
pub struct Connections(Arc<Mutex<Counted>>);

#[derive(Default)]
struct Counted {
    open: usize,
    ended: Vec<Ended>,
}

impl Connections {
    /// Returns the number of open connections, including those being established.
    #[must_use]
    pub fn open(&self) -> usize {
        self.lock().open
    }

    /// Takes the ends of connections since the last call, in order.
    #[must_use]
    pub fn take_ended(&self) -> Vec<Ended> {
        std::mem::take(&mut self.lock().ended)
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opens(&self) {
        self.lock().open += 1;
    }

    fn ends(&self, result: &Result<(), Failure>) {
        let mut counted = self.lock();
        counted.open = counted.open.saturating_sub(1);
        counted.ended.push(result.as_ref().err().map_or(Ended::InOrder, Ended::from));
    }
}

/// The example server's store behind a listener.
pub struct BuiltInServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    store: kv::Store,
    connections: Connections,
    /// Accepted connections are served only while this is not held.
    gate: Mutex<()>,
    /// Everything is done only while this is open.
    stop: Gate,
    over: AtomicBool,
    /// A thread panicked, or a call reported a panic.
    broken: AtomicBool,
}

impl BuiltInServer {
    /// Listens.
    ///
    /// # Errors
    /// It cannot.
    pub fn start<B: Descriptors>(
        backend: &B,
        address: SocketAddr,
        options: Options,
    ) -> Result<Self, Failure> {
        let shared = Arc::new(Shared::default());
        let backend = Intercepted::by(backend.clone(), shared.stop.clone());
        let listener = Listener::bind_with(&backend, address, options, rdma_conn::Limits::default())?;
        let address = listener.local_addr().unwrap_or(address);
        let accepting = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || accept(&listener, &shared)
        });
        Ok(Self { address, shared, accepting: Some(accepting) })
    }

    /// Returns the connections that it accepted.
    #[must_use]
    pub fn connections(&self) -> &Connections {
        &self.shared.connections
    }
}

fn accept<B: Descriptors>(listener: &Listener<B>, shared: &Arc<Shared>) {
    while !shared.over.load(Ordering::Relaxed) {
        match listener.try_accept() {
            Ok(Some(accepted)) => {
                let shared = Arc::clone(shared);
                shared.connections.opens();
                std::thread::spawn(move || {
                    // Served in the background only after that: until then it is not polled.
                    drop(shared.gate.lock());
                    let (endpoint, id) = accepted;
                    let mut stream = Stream::from_endpoint(endpoint, id);
                    // Dropped before the stream, so that a panic is recorded before the peer's end.
                    let serving = Serving(shared);
                    let served = serving.0.store.serve(&mut stream);
                    drop(stream);
                    let served = served.map_err(Failure::from);
                    if served.as_ref().is_err_and(|failure| Ended::from(failure).is_bug()) {
                        serving.0.broken.store(true, Ordering::Relaxed);
                    }
                    serving.0.connections.ends(&served);
                });
            }
            Ok(None) => {
                let mut requests = [PollFd::new(listener, PollFlags::IN)];
                // A spurious wake-up, or a signal, does no harm.
                let _woken = poll(&mut requests, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
            }
            Err(error) => tracing::debug!(%error, "cannot accept"),
        }
    }
}

/// Records a panic of a thread that serves a connection.
struct Serving(Arc<Shared>);

impl Drop for Serving {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::Relaxed);
            self.0.connections.ends(&Err(Failure::wrong("its thread panicked")));
        }
    }
}

impl Drop for BuiltInServer {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // A panic there was recorded.
            let _ended = accepting.join();
        }
    }
}

impl TargetServer for BuiltInServer {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn death(&self, _: Duration) -> Option<String> {
        self.shared.broken.swap(false, Ordering::Relaxed).then(|| "a thread of it panicked".into())
    }

    fn restart(&self) -> Result<bool, String> {
        Ok(true)
    }

    fn held(&self) -> Option<ProcessResources> {
        Some(ProcessResources::now())
    }

    fn hold(&self) -> Option<MutexGuard<'_, ()>> {
        Some(self.shared.gate.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn freeze(&self) -> Option<Frozen> {
        Some(self.shared.stop.freeze())
    }

    fn processor_time(&self) -> Option<Duration> {
        Some(Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default())
    }
}

/// Our client, which uses a little of every feature.
pub struct BuiltInClients<B> {
    /// The clients' backend.
    pub backend: B,
    /// Its options.
    pub options: Options,
    /// Whether it sends commands before earlier replies have come.
    pub pipelines: bool,
    /// The clients' connections.
    pub connections: Connections,
}

impl<B> BuiltInClients<B> {
    /// Returns clients with these options.
    pub fn new(backend: B, mut options: Options) -> Self {
        options.protocol.keepalive.get_or_insert(Keepalive::NONE.probe(Some(PROBE)));
        Self { backend, options, pipelines: false, connections: Connections::default() }
    }
}

impl<B: Descriptors> TargetClients for BuiltInClients<B> {
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let (report, reported) = channel();
        let (idle, told) = channel::<()>();
        let case = case.to_string();
        let stop = Gate::default();
        let backend = Intercepted::by(self.backend.clone(), stop.clone());
        let (options, ahead) = (self.options, usize::from(self.pipelines) * AHEAD);
        let connections = self.connections.clone();
        connections.opens();
        let thread = std::thread::Builder::new().spawn(move || {
            let work = Work { ahead, ..Work::of(&case, || while told.recv().is_ok() {}) };
            let result = run_client(&backend, address, options.handshake_timeout, options, work);
            connections.ends(&result);
            // The case may have failed and ended meanwhile.
            let _read = report.send(result);
        });
        thread.map_err(|error| error.to_string())?;
        Ok(Box::new(Thread { reported, exit: None, idle: Some(idle), stop }))
    }
}

struct Thread {
    reported: Receiver<Result<(), Failure>>,
    exit: Option<Exit>,
    idle: Option<Sender<()>>,
    stop: Gate,
}

impl Running for Thread {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        if self.exit.is_none() {
            self.exit = match self.reported.recv_timeout(patience) {
                Ok(Ok(())) => Some(Exit::Success),
                Ok(Err(failure)) if Ended::from(&failure).is_bug() => {
                    Some(Exit::Crashed(failure.to_string()))
                }
                Ok(Err(failure)) => Some(Exit::Failure(failure.to_string())),
                Err(Timeout) => None,
                Err(Disconnected) => Some(Exit::Crashed("its thread panicked".into())),
            };
        }
        self.exit.clone()
    }

    fn go_on(&mut self) {
        self.idle = None;
    }

    fn pause(&self) -> Option<Frozen> {
        Some(self.stop.freeze())
    }
}

/// A client's case-specific work.
pub struct Work<I> {
    rounds: usize,
    /// The length of one more value that it stores, 0 for none.
    long: usize,
    /// How far it runs ahead of the replies.
    ahead: usize,
    /// Waits in the middle, if the case is about that.
    idle: Option<I>,
    /// Whether the server may leave first, so that the last command is not known to have arrived.
    may_be_left: bool,
}

impl<I: FnOnce()> Work<I> {
    /// Returns the work for a case. `idle` waits for as long as the client must be idle.
    pub fn of(case: &str, idle: I) -> Self {
        let counted = case == UNHANDLED || case == ROOM_TO_ASK;
        Self {
            rounds: if counted { MANY } else { ROUNDS },
            long: if case == SEND_MEMORY { LONG_VALUE } else { 0 },
            ahead: 0,
            idle: (case == IDLE).then_some(idle),
            may_be_left: case == LAST_REPLY,
        }
    }
}

/// Behaves like a client under test: connects, stores values and reads them back, requests a reply
/// longer than its windows, and disconnects. A reply that is not exactly right is an error.
///
/// # Errors
/// The connection fails, or a reply is wrong.
pub fn run_client<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    patience: Duration,
    options: Options,
    Work { rounds, long, ahead, idle, may_be_left }: Work<impl FnOnce()>,
) -> Result<(), Failure> {
    let how = Connect::default().timeout(patience).options(options);
    let mut stream = Stream::connect_with(backend, address, &how)?;
    stream.set_read_timeout(Some(10 * patience));
    stream.set_write_timeout(Some(10 * patience));
    let mut client = RespClient::new(stream);
    for round in 0..rounds + ahead {
        if round < rounds {
            client.send(&[b"ECHO", format!("round {round}").as_bytes()])?;
        }
        let Some(round) = round.checked_sub(ahead) else { continue };
        if client.expect_bulk()? != format!("round {round}") {
            return Err(Failure::wrong("ECHO answered something else"));
        }
    }
    if let Some(idle) = idle {
        client.send(&[b"ECHO", b"idle"])?;
        client.expect_bulk()?;
        idle();
    }
    let window = options.protocol.window as usize;
    // Each window costs a message and a wait.
    let long = (long > 0).then_some(long);
    let lengths = [0, 1, 100, 4096, 70_000, 200_000]
        .into_iter()
        .chain(long)
        .filter(|len| *len <= 4096.max(100 * window));
    for (number, value_len) in (0..).zip(lengths) {
        let entry = Entry { number, value_len };
        client.send(&[b"SET", entry.key().as_bytes(), &entry.value()])?;
        client.expect("OK")?;
        client.send(&[b"GET", entry.key().as_bytes()])?;
        if let Some(difference) = entry.difference(&client.expect_bulk()?) {
            return Err(Failure::wrong(difference));
        }
    }
    let long = 4 * window + 1000;
    client.send(&[b"GET", made_up_key(long).as_bytes()])?;
    if client.expect_bulk()? != made_up_value(long) {
        return Err(Failure::wrong("a long reply came back wrong"));
    }
    let closed = client.stream().close(patience);
    if may_be_left { Ok(()) } else { Ok(closed?) }
}
