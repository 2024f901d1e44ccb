//! What many connections cost a server with one thread on `Endpoint`, `Server` of rdma-server, and
//! tokio. The clients are the same: one is busy, alone and beside idle clients; others never read
//! their replies, which shows what a server costs when it has nothing to do.

mod idle;
mod serving;

use std::io::{IoSlice, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use rdma_conn::{Connect, ConnectionId, Descriptors, Endpoint, Event, Limits, Options, Stream};
use rdma_softsim::{Fabric, Limits as HostLimits, SoftSim};
use rdma_verbs::Verbs;
use rustix::time::{ClockId, clock_gettime};

use conformance::client::{Failure, RespClient};
pub use idle::{Exchange, Kept, idle_on_softsim, resident};
use intercept::Intercepted;
use serving::{Objects, beside};
use suite::exit::NO_ENVIRONMENT;
use suite::terminal;

/// How long a connection may take to be established on a machine that establishes thousands.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the server has to become idle.
const REST: Duration = Duration::from_secs(1);
/// A reply that fills every window and buffer.
const LONG_REPLY: usize = 1 << 20;

/// The interface on which the server holds its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Face {
    /// An `rdma_conn::Endpoint` and a loop of its own.
    Endpoint,
    /// An `rdma_server::Server`.
    Server,
    /// An `rdma_conn::AsyncListener`, and a task for each connection.
    Tokio,
}

/// The command's arguments.
#[derive(Args)]
pub struct Arguments {
    /// Run on the real RDMA device with this address (any port), instead of the embedded fabric.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// The interface of the server. All, one after another, unless set.
    #[arg(long, value_enum)]
    face: Option<Face>,
    /// Have each connection send and get this many bytes, one after another. Prints the memory that
    /// they keep when idle, and nothing else.
    #[arg(long, value_name = "BYTES")]
    exchange: Option<usize>,
    #[command(flatten)]
    load: Load,
}

/// The load on a server.
#[derive(Args, Clone, Copy, Debug)]
pub struct Load {
    /// Idle connections.
    #[arg(long, default_value_t = 2000)]
    pub connections: usize,
    /// Connections that never read their replies.
    #[arg(long, default_value_t = 100)]
    pub mute: usize,
    /// Length of a receive window, in bytes.
    #[arg(long, default_value_t = 128 << 10)]
    pub window: u32,
    /// Round trips of the busy client in each measurement.
    #[arg(long, default_value_t = 20_000)]
    pub requests: u32,
    /// Seconds to watch a server whose clients do not read.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
}

/// The cost of the connections.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Bytes that the server registered for the idle connections.
    pub registered_bytes: u64,
    /// Completion queues that the server created for them.
    pub completion_queues: usize,
    /// Descriptors that this process holds for them, on both sides.
    pub descriptors: usize,
    /// A round trip without other connections, before and after.
    pub alone: [Duration; 2],
    /// A round trip beside the idle connections.
    pub among: Duration,
    /// Processor time of server and clients while the clients that do not read were watched.
    pub mute: Duration,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    match tell(arguments) {
        Ok(Some(table)) => {
            println!("{table}");
            ExitCode::SUCCESS
        }
        Ok(None) => ExitCode::from(NO_ENVIRONMENT),
        Err(failure) => {
            terminal::complain(&failure.to_string(), 4);
            ExitCode::FAILURE
        }
    }
}

fn tell(arguments: &Arguments) -> Result<Option<Table>, Failure> {
    let faces = arguments.face.as_ref().map_or(Face::value_variants(), std::slice::from_ref);
    let verbs = match arguments.listen.map(|address| Verbs::load().map(|verbs| (verbs, address))) {
        None => None,
        Some(Ok((verbs, address))) => Some((verbs, SocketAddr::new(address.ip(), 0))),
        Some(Err(error)) => {
            eprintln!("cannot run here: {error}");
            return Ok(None);
        }
    };
    let Load { connections, window, .. } = arguments.load;
    match arguments.exchange {
        None => tell_costs(faces, arguments.load, verbs),
        Some(bytes) => tell_idle(faces, Exchange { connections, window, bytes }, verbs),
    }
    .map(Some)
}

fn tell_idle(
    faces: &[Face],
    exchange: Exchange,
    verbs: Option<(Verbs, SocketAddr)>,
) -> Result<Table, Failure> {
    let Exchange { connections, bytes, .. } = exchange;
    let mut table = Table::new();
    table.set_header([
        "server".into(),
        format!("registered for each of {connections}, both sides"),
        "resident beside it".into(),
        format!("registered after {bytes} bytes both ways"),
        "resident beside it".into(),
    ]);
    for face in faces {
        let [connected, after] = match &verbs {
            None => idle_on_softsim(*face, exchange, resident)?,
            Some((verbs, address)) => idle::idle(*face, exchange, verbs, verbs, *address, resident)?,
        };
        let each = |bytes: u64| format!("{} KiB", (bytes / connections.max(1) as u64).div_ceil(1024));
        table.add_row([
            format!("{face:?}").to_lowercase(),
            each(connected.registered),
            each(connected.beside()),
            each(after.registered),
            each(after.beside()),
        ]);
    }
    Ok(table)
}

fn tell_costs(faces: &[Face], load: Load, verbs: Option<(Verbs, SocketAddr)>) -> Result<Table, Failure> {
    let Load { connections, mute, seconds, .. } = load;
    let mut table = terminal::table();
    table.set_header([
        "server".into(),
        format!("registered for each of {connections} idle"),
        "completion queues".into(),
        "descriptors, both sides".into(),
        "round trip alone".into(),
        "beside them".into(),
        "ratio".into(),
        format!("processor, {mute} that do not read, {seconds} s"),
    ]);
    for face in faces {
        let figures = match &verbs {
            None => on_softsim(*face, load)?,
            Some((verbs, address)) => measure(*face, load, verbs, verbs, *address)?,
        };
        let micros = |time: Duration| format!("{:.1} us", time.as_secs_f64() * 1e6);
        let [before, after] = figures.alone;
        let each = figures.registered_bytes / connections.max(1) as u64;
        table.add_row([
            format!("{face:?}").to_lowercase(),
            format!("{} KiB", each.div_ceil(1024)),
            figures.completion_queues.to_string(),
            figures.descriptors.to_string(),
            micros(before.min(after)),
            micros(figures.among),
            format!("{:.2}", figures.among.as_secs_f64() / before.min(after).as_secs_f64()),
            format!("{:.3} s", figures.mute.as_secs_f64()),
        ]);
    }
    Ok(table)
}

/// Measures a server on a fabric in this process.
///
/// # Errors
/// A connection failed, or a reply was wrong.
pub fn on_softsim(face: Face, load: Load) -> Result<Figures, Failure> {
    let (ours, theirs, address) = hosts();
    measure(face, load, &ours, &theirs, address)
}

fn hosts() -> (SoftSim, SoftSim, SocketAddr) {
    let fabric = Fabric::new();
    let (ours, theirs) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
    let host = |ip| fabric.host_with(&[ip], HostLimits { locked_memory: u64::MAX, ..HostLimits::default() });
    (host(ours), host(theirs), (ours, 6379).into())
}

fn options(window: u32) -> Options {
    let mut options = Options::default();
    options.protocol.window = window;
    options.protocol.send_buffer = window;
    options
}

fn measure<B: Descriptors>(
    face: Face,
    load: Load,
    ours: &B,
    theirs: &B,
    address: SocketAddr,
) -> Result<Figures, Failure> {
    let objects = Objects::<B>::default();
    let counted = Intercepted::by(ours.clone(), objects.clone());
    beside(face, counted, (address, options(load.window)), |at| {
        let figures = among_idle(load, theirs, at, &objects)?;
        Ok(Figures { mute: among_mute(load, theirs, at)?, ..figures })
    })
}

fn among_idle<B: Descriptors>(
    load: Load,
    backend: &B,
    address: SocketAddr,
    objects: &Objects<B>,
) -> Result<Figures, Failure> {
    let mut busy = RespClient::new(Stream::connect_with(backend, address, &Connect::default())?);
    let before = round_trip(&mut busy, load.requests)?;
    let (bytes, queues, open) = (objects.registered_bytes(), objects.completion_queues(), descriptors()?);
    let mut crowd = Crowd::gather(backend, address, load.connections, load.window)?;
    let registered_bytes = objects.registered_bytes().saturating_sub(bytes);
    let completion_queues = objects.completion_queues().saturating_sub(queues);
    let descriptors = descriptors()?.saturating_sub(open);
    let among = crowd.beside(|| round_trip(&mut busy, load.requests))??;
    drop(crowd);
    let alone = [before, round_trip(&mut busy, load.requests)?];
    let mute = Duration::ZERO;
    Ok(Figures { registered_bytes, completion_queues, descriptors, alone, among, mute })
}

fn descriptors() -> Result<usize, Failure> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

fn round_trip<B: Descriptors>(
    client: &mut RespClient<Stream<B>>,
    requests: u32,
) -> Result<Duration, Failure> {
    let begun = Instant::now();
    for _ in 0..requests {
        client.send(&[b"PING"])?;
        client.expect("PONG")?;
    }
    Ok(begun.elapsed() / requests.max(1))
}

/// Returns the processor time for clients that request more than fits and read none of it.
fn among_mute<B: Descriptors>(load: Load, backend: &B, address: SocketAddr) -> Result<Duration, Failure> {
    let mut client = RespClient::new(Stream::connect_with(backend, address, &Connect::default())?);
    client.send(&[b"SET", b"long", &vec![b'x'; LONG_REPLY]])?;
    client.expect("OK")?;
    client.stream().flush().map_err(Failure::from)?;
    drop(client);
    let mut crowd = Crowd::gather(backend, address, load.mute, load.window)?;
    crowd.write(b"GET long\r\nGET long\r\n")?;
    crowd.idle(REST)?;
    let spent = processor_time();
    crowd.idle(Duration::from_secs(load.seconds))?;
    Ok(processor_time().saturating_sub(spent))
}

fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

struct Crowd<B: Descriptors> {
    endpoint: Endpoint<B>,
    members: Vec<ConnectionId>,
}

impl<B: Descriptors> Crowd<B> {
    fn gather(backend: &B, address: SocketAddr, size: usize, window: u32) -> Result<Self, Failure> {
        let limits = Limits::default().connections(usize::MAX);
        let mut crowd = Self { endpoint: Endpoint::new(backend, limits)?, members: Vec::new() };
        let options = options(window);
        let bar = bar(size);
        // In batches: the backlog of a listener is finite.
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

    /// Answers keepalives by posting receives again, and reads nothing.
    fn idle(&mut self, time: Duration) -> Result<(), Failure> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.turn(left)?;
        }
    }

    fn turn(&mut self, time: Duration) -> Result<(), Failure> {
        self.endpoint.wait(Some(time))?;
        while let Some(event) = self.endpoint.next_event() {
            if let Event::Ended(id) = event {
                self.endpoint.check(id)?;
            }
        }
        Ok(())
    }

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
