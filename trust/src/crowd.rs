//! What many connections cost a server that has one thread for all of them.
//!
//! Not a test: it prints figures. A busy client does the same thing alone and among idle ones, and clients that never read
//! their replies show what a server does that has nothing to do.

use std::io::{IoSlice, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rdma_conn::{
    Connect, ConnectionId, Descriptors, Endpoint, Error, Event, Limits, Options, Role, Stream, Usage,
};
use rdma_softsim::{Fabric, Limits as HostLimits};
use rdma_verbs::Verbs;
use rustix::time::{ClockId, clock_gettime};

use conformance::client::{Client, Failure};
use kv_store::Server;
use kv_store::Store;
use suite::exit::NO_ENVIRONMENT;

/// How long a connection may take to come about, on a machine that makes thousands.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the server has to come to rest.
const REST: Duration = Duration::from_secs(1);
/// A reply that fills every window and buffer there is on its way.
const LONG_REPLY: usize = 1 << 20;

/// The command's arguments.
#[derive(Args)]
pub struct Arguments {
    /// Run on the real RDMA device with this address (any port), instead of the embedded fabric.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Idle connections.
    #[arg(long, default_value_t = 2000)]
    connections: usize,
    /// Connections that never read their replies.
    #[arg(long, default_value_t = 100)]
    mute: usize,
    /// Length of a receive window, in bytes.
    #[arg(long, default_value_t = 128 << 10)]
    window: u32,
    /// Round trips of the busy client, each time.
    #[arg(long, default_value_t = 20_000)]
    requests: u32,
    /// Seconds to watch a server whose clients do not read.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let told = match arguments.listen {
        None => {
            let fabric = Fabric::new();
            let (ours, theirs) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
            let host =
                |ip| fabric.host_with(&[ip], HostLimits { locked_memory: u64::MAX, ..HostLimits::default() });
            measure(arguments, &host(ours), &host(theirs), (ours, 6379).into())
        }
        Some(address) => match Verbs::load() {
            Ok(verbs) => measure(arguments, &verbs, &verbs, SocketAddr::new(address.ip(), 0)),
            Err(error) => {
                eprintln!("cannot run here: {error}");
                return ExitCode::from(NO_ENVIRONMENT);
            }
        },
    };
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Of the server, as large servers set it.
fn options(window: u32) -> Options {
    let mut options = Options::server();
    options.protocol.window = window;
    options.protocol.send_buffer = window;
    options
}

fn measure<B: Descriptors>(
    arguments: &Arguments,
    ours: &B,
    theirs: &B,
    address: SocketAddr,
) -> Result<(), Failure> {
    let limits = Limits::default().connections(usize::MAX);
    let mut endpoint = Endpoint::new(ours, limits)?;
    let listener = endpoint.listen(address, options(arguments.window))?;
    let address = endpoint.local_addr(listener).unwrap_or(address);
    let (over, usage) = (AtomicBool::new(false), Mutex::new(Usage::default()));
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(endpoint, &over, &usage));
        let told = among_idle(arguments, theirs, address, &usage)
            .and_then(|()| among_mute(arguments, theirs, address, &usage));
        over.store(true, Ordering::Relaxed);
        match server.join() {
            Ok(served) => told.and(served.map_err(Failure::from)),
            Err(_) => Err(Failure::wrong("the server panicked")),
        }
    })
}

/// The server, which tells what it uses after every turn.
fn serve<B: Descriptors>(
    endpoint: Endpoint<B>,
    over: &AtomicBool,
    usage: &Mutex<Usage>,
) -> Result<(), Error> {
    let store = Store::default();
    let mut server = Server::new(endpoint, &store);
    while !over.load(Ordering::Relaxed) {
        server.turn()?;
        *usage.lock().unwrap_or_else(PoisonError::into_inner) = server.endpoint.usage();
        server.endpoint.wait(Some(Duration::from_millis(500)))?;
    }
    Ok(())
}

fn now(usage: &Mutex<Usage>) -> Usage {
    *usage.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One busy client, alone, among idle ones, and alone again.
fn among_idle<B: Descriptors>(
    arguments: &Arguments,
    backend: &B,
    address: SocketAddr,
    usage: &Mutex<Usage>,
) -> Result<(), Failure> {
    let mut busy = Client::new(Stream::connect_with(backend, address, &Connect::default())?);
    let before = round_trip(&mut busy, arguments.requests)?;
    let base = now(usage).registered_bytes;
    let mut crowd = Crowd::gather(backend, address, arguments.connections, arguments.window)?;
    let held = now(usage);
    let among = crowd.beside(|| round_trip(&mut busy, arguments.requests))??;
    drop(crowd);
    let after = round_trip(&mut busy, arguments.requests)?;
    let each = held.registered_bytes.saturating_sub(base) / arguments.connections.max(1) as u64;
    println!(
        "{} idle connections: {} KiB registered for each by the server, {} completion queues",
        arguments.connections,
        each.div_ceil(1024),
        held.completion_queues,
    );
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let alone = before.min(after);
    println!(
        "a round trip beside them: {:.1} us; alone: {:.1} us before, {:.1} us after; ratio {:.2}",
        micros(among),
        micros(before),
        micros(after),
        among.as_secs_f64() / alone.as_secs_f64(),
    );
    Ok(())
}

/// The time of one of many round trips, on average.
fn round_trip<B: Descriptors>(client: &mut Client<Stream<B>>, requests: u32) -> Result<Duration, Failure> {
    let begun = Instant::now();
    for _ in 0..requests {
        client.send(&[b"PING"])?;
        client.expect("PONG")?;
    }
    Ok(begun.elapsed() / requests.max(1))
}

/// Clients that ask for more than there is room for and read none of it.
fn among_mute<B: Descriptors>(
    arguments: &Arguments,
    backend: &B,
    address: SocketAddr,
    usage: &Mutex<Usage>,
) -> Result<(), Failure> {
    let mut client = Client::new(Stream::connect_with(backend, address, &Connect::default())?);
    client.send(&[b"SET", b"long", &vec![b'x'; LONG_REPLY]])?;
    client.expect("OK")?;
    client.stream().flush().map_err(Failure::from)?;
    drop(client);
    let mut crowd = Crowd::gather(backend, address, arguments.mute, arguments.window)?;
    crowd.write(b"GET long\r\nGET long\r\n")?;
    crowd.idle(REST)?;
    let (turns, cpu) = (now(usage).turns, processor_time());
    crowd.idle(Duration::from_secs(arguments.seconds))?;
    let spent = processor_time().saturating_sub(cpu);
    println!(
        "{} clients that do not read: {:.3} s of processor time (server and clients) in {} s, {} turns of the server",
        arguments.mute,
        spent.as_secs_f64(),
        arguments.seconds,
        now(usage).turns.saturating_sub(turns),
    );
    Ok(())
}

/// What all threads of this process have used.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// Client connections on one endpoint.
struct Crowd<B: Descriptors> {
    endpoint: Endpoint<B>,
    members: Vec<ConnectionId>,
}

impl<B: Descriptors> Crowd<B> {
    fn gather(backend: &B, address: SocketAddr, size: usize, window: u32) -> Result<Self, Failure> {
        let limits = Limits::default().connections(usize::MAX);
        let mut crowd = Self { endpoint: Endpoint::new(backend, limits)?, members: Vec::new() };
        let options = {
            let mut options = options(window);
            options.protocol.role = Role::Client;
            options.protocol.keepalive = Options::client().protocol.keepalive;
            options
        };
        let bar = bar(size);
        // Not all at once: the backlog of a listener is not endless.
        let mut asked = 0;
        while crowd.members.len() < size {
            while asked < size && asked - crowd.members.len() < 64 {
                crowd.endpoint.connect(address, None, PATIENCE, options)?;
                asked += 1;
            }
            crowd.endpoint.wait(Some(PATIENCE))?;
            while let Some(event) = crowd.endpoint.next_event() {
                match event {
                    Event::Opened { id, .. } => crowd.members.push(id),
                    Event::Ended(id) => crowd.endpoint.check(id)?,
                    _ => {}
                }
            }
            bar.set_position(crowd.members.len() as u64);
        }
        bar.finish_and_clear();
        Ok(crowd)
    }

    fn write(&mut self, command: &[u8]) -> Result<(), Failure> {
        for id in &self.members {
            self.endpoint.write(*id, &[IoSlice::new(command)])?;
        }
        Ok(())
    }

    /// Only what a client has to do: keepalives are answered with a receive posted again, and nothing is read.
    fn idle(&mut self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.endpoint.wait(Some(left))?;
            while let Some(event) = self.endpoint.next_event() {
                if let Event::Ended(id) = event {
                    self.endpoint.check(id)?;
                }
            }
        }
    }

    /// Idles while `body` runs.
    fn beside<T: Send>(&mut self, body: impl FnOnce() -> T + Send) -> Result<T, Failure> {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let idling = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    self.idle(Duration::from_millis(100))?;
                }
                Ok(())
            });
            let done = body();
            over.store(true, Ordering::Relaxed);
            match idling.join() {
                Ok(idled) => idled.map(|()| done),
                Err(_) => Err(Failure::wrong("the idle clients panicked")),
            }
        })
    }
}

fn bar(size: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("connecting [{wide_bar}] {pos}/{len}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(size as u64).with_style(style)
}
