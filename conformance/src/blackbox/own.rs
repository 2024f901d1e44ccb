//! Our own server and client as targets, in this process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::{Connect, Descriptors, Error, Listener, Options, Role, Stream};
use rustix::time::{ClockId, clock_gettime};

use super::responder::{made_up_key, made_up_value};
use super::target::{Clients, Exit, Running, Server};
use crate::client::{Client, Failure};
use crate::held::Held;
use crate::workload::Entry;
use kv_store as kv;

/// How long our side waits for a peer that keeps it waiting: short, so that a suite takes seconds, and longer than any case
/// lets it wait that expects it to go on.
const STALL: Duration = Duration::from_secs(2);
/// How soon our client wonders whether its server is still there.
const PROBE: Duration = Duration::from_millis(500);

/// The window of our side.
const WINDOW: u32 = 64 << 10;

/// Options with small windows, and little patience.
pub const fn small(options: Options) -> Options {
    with_window(options, WINDOW)
}

const fn with_window(mut options: Options, window: u32) -> Options {
    options.protocol.window = window;
    options.protocol.send_buffer = window;
    options.protocol.stall_limit = Some(STALL);
    options.handshake_timeout = STALL;
    options.linger = PROBE;
    // So that there is something to answer.
    options.protocol.negotiate = matches!(options.protocol.role, Role::Client);
    if options.protocol.keepalive.probe.is_some() {
        options.protocol.keepalive.probe = Some(PROBE);
    }
    options
}

/// The example server's store behind a listener.
pub struct OwnServer {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    /// A thread of it panicked.
    broken: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl OwnServer {
    /// Listens.
    ///
    /// # Errors
    /// It cannot.
    pub fn start<B: Descriptors>(
        backend: &B,
        address: SocketAddr,
        options: Options,
    ) -> Result<Self, Failure> {
        let listener = Listener::bind(backend, address, options)?;
        let address = listener.local_addr().unwrap_or(address);
        let (over, broken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let accepting = std::thread::spawn({
            let (over, broken) = (Arc::clone(&over), Arc::clone(&broken));
            move || accept(&listener, &over, &broken)
        });
        Ok(Self { address, over, broken, accepting: Some(accepting) })
    }
}

fn accept<B: Descriptors>(listener: &Listener<B>, over: &AtomicBool, broken: &Arc<AtomicBool>) {
    let store = Arc::new(kv::Store::default());
    while !over.load(Ordering::Relaxed) {
        match listener.accept_timeout(Duration::from_millis(50)) {
            Ok((stream, peer)) => {
                let (store, panics) = (Arc::clone(&store), NotesPanics(Arc::clone(broken)));
                std::thread::spawn(move || {
                    let _noted = panics;
                    if let Err(error) = store.serve(stream) {
                        tracing::debug!(%peer, %error, "client lost");
                    }
                });
            }
            Err(Error::TimedOut { .. }) => {}
            Err(error) => tracing::debug!(%error, "cannot accept"),
        }
    }
}

struct NotesPanics(Arc<AtomicBool>);

impl Drop for NotesPanics {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // A panic there was noted as what it is.
            let _ended = accepting.join();
        }
    }
}

impl Server for OwnServer {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn death(&self, _: Duration) -> Option<String> {
        self.broken.swap(false, Ordering::Relaxed).then(|| "a thread of it panicked".into())
    }

    fn restart(&self) -> Result<bool, String> {
        Ok(true)
    }

    fn held(&self) -> Option<Held> {
        Some(Held::now())
    }

    fn processor_time(&self) -> Option<Duration> {
        Some(Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default())
    }
}

/// Our client, with a little of everything to do.
pub struct OwnClients<B> {
    /// RDMA as the client has it.
    pub backend: B,
    /// Its options.
    pub options: Options,
}

impl<B: Descriptors> Clients for OwnClients<B> {
    fn start(&self, _: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let (report, reported) = channel();
        let (backend, options) = (self.backend.clone(), self.options);
        let thread = std::thread::Builder::new().spawn(move || {
            // The case may have failed and gone meanwhile.
            let _heard = report.send(run_client(&backend, address, STALL, options));
        });
        thread.map_err(|error| error.to_string())?;
        Ok(Box::new(Thread { reported, exit: None }))
    }
}

struct Thread {
    reported: Receiver<Result<(), Failure>>,
    exit: Option<Exit>,
}

impl Running for Thread {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        if self.exit.is_none() {
            self.exit = match self.reported.recv_timeout(patience) {
                Ok(Ok(())) => Some(Exit::Success),
                Ok(Err(failure)) => Some(Exit::Failure(failure.to_string())),
                Err(Timeout) => None,
                Err(Disconnected) => Some(Exit::Crashed("its thread panicked".into())),
            };
        }
        self.exit.clone()
    }
}

/// What a client under test should do, done by ours: connect, store and read back, ask for a reply longer than its windows,
/// and leave. Any doubt is an error.
///
/// # Errors
/// The connection fails, or what comes back is not what must.
pub fn run_client<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    patience: Duration,
    options: Options,
) -> Result<(), Failure> {
    let how = Connect::default().timeout(patience).options(options);
    let mut stream = Stream::connect_with(backend, address, &how)?;
    stream.set_read_timeout(Some(10 * patience));
    stream.set_write_timeout(Some(10 * patience));
    let mut client = Client::new(stream);
    for round in 0..70 {
        client.send(&[b"ECHO", format!("round {round}").as_bytes()])?;
        if client.expect_bulk()? != format!("round {round}") {
            return Err(Failure::wrong("ECHO answered something else"));
        }
    }
    for (number, value_len) in (0..).zip([0, 1, 100, 4096, 70_000, 200_000]) {
        let entry = Entry { number, value_len };
        client.send(&[b"SET", entry.key().as_bytes(), &entry.value()])?;
        client.expect("OK")?;
        client.send(&[b"GET", entry.key().as_bytes()])?;
        if let Some(difference) = entry.difference(&client.expect_bulk()?) {
            return Err(Failure::wrong(difference));
        }
    }
    let long = 4 * options.protocol.window as usize + 1000;
    client.send(&[b"GET", made_up_key(long).as_bytes()])?;
    if client.expect_bulk()? != made_up_value(long) {
        return Err(Failure::wrong("a long reply came back wrong"));
    }
    Ok(client.stream().close(patience)?)
}
