//! What many connections hold of a server with one thread on `Endpoint`, `Server` of rdma-server,
//! and tokio, while they are idle: once connected, and after they have carried bytes. The clients
//! are the same. What a server does for them in time, `benches/counts` and tests of `rdma-conn`
//! count.

mod serving;

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use rdma_conn::{Connect, ConnectionId, Descriptors, Endpoint, Event, Limits, Options, Stream};
use rdma_softsim::{Fabric, Limits as HostLimits};
use rdma_verbs::Verbs;

use conformance::client::{Failure, RespClient};
use intercept::Intercepted;
use serving::{Objects, beside};
use suite::resources;
use suite::terminal::{self, cannot_run};

/// How long a connection may take to be established on a machine that establishes thousands.
const PATIENCE: Duration = Duration::from_secs(120);

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
    #[command(flatten)]
    exchange: Exchange,
}

/// What each client does before it is idle.
#[derive(Args, Clone, Copy, Debug)]
pub struct Exchange {
    /// How many clients there are.
    #[arg(long, default_value_t = 2000)]
    pub connections: usize,
    /// Length of a receive window, in bytes.
    #[arg(long, default_value_t = 128 << 10)]
    pub window: u32,
    /// Bytes that each client sends in one command and gets in one reply.
    #[arg(long = "exchange", value_name = "BYTES", default_value_t = 0)]
    pub bytes: usize,
}

/// What all clients hold together.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Bytes that the server registered.
    pub registered: u64,
    /// Completion queues of the server.
    pub completion_queues: usize,
    /// Descriptors of both sides, which run in this process.
    pub descriptors: usize,
    /// Bytes of memory of both sides that are not registered, by the caller's measure; on the
    /// embedded fabric, with its model's.
    pub beside: u64,
}

impl Kept {
    const fn since(self, before: Self) -> Self {
        Self {
            registered: self.registered.saturating_sub(before.registered),
            completion_queues: self.completion_queues.saturating_sub(before.completion_queues),
            descriptors: self.descriptors.saturating_sub(before.descriptors),
            beside: self.beside.saturating_sub(before.beside),
        }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let verbs = match arguments.listen.map(|address| Verbs::load().map(|verbs| (verbs, address))) {
        None => None,
        Some(Ok((verbs, address))) => Some((verbs, SocketAddr::new(address.ip(), 0))),
        Some(Err(error)) => return cannot_run(&error.to_string()),
    };
    match tell(arguments, verbs) {
        Ok(table) => {
            println!("{table}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            terminal::complain(&failure.to_string(), 4);
            ExitCode::FAILURE
        }
    }
}

fn tell(arguments: &Arguments, verbs: Option<(Verbs, SocketAddr)>) -> Result<Table, Failure> {
    let faces = arguments.face.as_ref().map_or(Face::value_variants(), std::slice::from_ref);
    let exchange = arguments.exchange;
    let mut table = terminal::table();
    table.set_header([
        format!("server with {} idle clients", exchange.connections),
        "registered for each".into(),
        "resident beside it, both sides".into(),
        "completion queues".into(),
        "descriptors, both sides".into(),
    ]);
    for face in faces {
        let [connected, after] = match &verbs {
            None => on_softsim(*face, exchange, resident)?,
            Some((verbs, address)) => measure(*face, exchange, [verbs; 2], *address, resident)?,
        };
        let connections = exchange.connections.max(1) as u64;
        let each = |bytes: u64| format!("{} KiB", (bytes / connections).div_ceil(1024));
        let mut tell = |when: String, kept: Kept| {
            table.add_row([
                format!("{face:?}{when}").to_lowercase(),
                each(kept.registered),
                each(kept.beside),
                kept.completion_queues.to_string(),
                kept.descriptors.to_string(),
            ]);
        };
        tell(String::new(), connected);
        if exchange.bytes > 0 {
            tell(format!(", after {} bytes both ways", exchange.bytes), after);
        }
    }
    Ok(table)
}

/// Measures a server on a fabric in this process: what its clients hold once connected, and after
/// the exchange. `memory` returns the process's current memory.
///
/// # Errors
/// A connection failed, or a reply was wrong.
pub fn on_softsim(face: Face, exchange: Exchange, memory: fn() -> u64) -> Result<[Kept; 2], Failure> {
    let fabric = Fabric::new();
    // The crowd is measured, and not the limit of the device.
    let limits = HostLimits { locked_memory: u64::MAX, ..HostLimits::default() };
    let ips = [1, 2].map(|last| IpAddr::from([192, 0, 2, last]));
    let [ours, theirs] = ips.map(|ip| fabric.host_with(&[ip], limits));
    measure(face, exchange, [&ours, &theirs], (ips[0], 6379).into(), memory)
}

/// Returns the resident memory of this process, in bytes; 0 if the system does not report it.
pub fn resident() -> u64 {
    resources::status("self", "VmRSS").unwrap_or(0) * 1024
}

/// Returns how many descriptors this process has.
pub(crate) fn descriptors() -> Result<usize, Failure> {
    resources::descriptors("self").ok_or_else(|| Failure::wrong("/proc does not show this process"))
}

fn options(window: u32) -> Options {
    let mut options = Options::default();
    options.protocol.window = window;
    options.protocol.send_buffer = window;
    options
}

fn measure<B: Descriptors>(
    face: Face,
    exchange: Exchange,
    [ours, theirs]: [&B; 2],
    address: SocketAddr,
    memory: fn() -> u64,
) -> Result<[Kept; 2], Failure> {
    let [of_server, of_clients] = [Objects::<B>::default(), Objects::default()];
    let server = Intercepted::by(ours.clone(), of_server.clone());
    let clients = Intercepted::by(theirs.clone(), of_clients.clone());
    let now = || -> Result<Kept, Failure> {
        let registered = of_server.registered_bytes();
        Ok(Kept {
            registered,
            completion_queues: of_server.completion_queues(),
            descriptors: descriptors()?,
            beside: memory().saturating_sub(registered + of_clients.registered_bytes()),
        })
    };
    beside(face, server, (address, options(exchange.window)), |at| {
        let value = vec![b'x'; exchange.bytes];
        let mut into = vec![0; 256 << 10];
        // It stays connected, so that its values exist before the first measurement.
        let mut first = Crowd::gather(&clients, at, 1, exchange.window)?;
        first.exchange(&value, &mut into)?;
        let mut last = RespClient::new(Stream::connect_with(&clients, at, &Connect::default())?);
        rest(&mut last)?;
        let before = now()?;
        let mut crowd = Crowd::gather(&clients, at, exchange.connections, exchange.window)?;
        rest(&mut last)?;
        let connected = now()?;
        if exchange.bytes > 0 {
            crowd.exchange(&value, &mut into)?;
            rest(&mut last)?;
        }
        Ok([connected.since(before), now()?.since(before)])
    })
}

/// Waits until the server, which has one thread, has finished its work before this request.
fn rest<B: Descriptors>(client: &mut RespClient<Stream<B>>) -> Result<(), Failure> {
    client.send(&[b"PING"])?;
    client.expect("PONG")
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
        let style = ProgressStyle::with_template("connecting [{wide_bar}] {pos}/{len}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(size as u64).with_style(style);
        // In batches: the backlog of a listener is finite.
        let mut asked = 0;
        while crowd.members.len() < size {
            while asked < size && asked - crowd.members.len() < 64 {
                crowd.endpoint.connect(address, None, PATIENCE, options)?;
                asked += 1;
            }
            crowd.turn()?;
            bar.set_position(crowd.members.len() as u64);
        }
        bar.finish_and_clear();
        Ok(crowd)
    }

    fn turn(&mut self) -> Result<(), Failure> {
        self.endpoint.wait(Some(PATIENCE))?;
        while let Some(event) = self.endpoint.next_event() {
            match event {
                Event::Opened { id, .. } => self.members.push(id),
                // Without each of them, the figures would mean nothing.
                Event::Ended(id) => {
                    self.endpoint.check(id)?;
                    return Err(Failure::wrong("the server has closed a connection"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn exchange(&mut self, value: &[u8], into: &mut [u8]) -> Result<(), Failure> {
        let head = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n", value.len());
        let reply = format!("${}\r\n", value.len()).len() + value.len() + 2;
        for id in self.members.clone() {
            for part in [head.as_bytes(), value, b"\r\n"] {
                self.send(id, part)?;
            }
            self.receive(id, "+OK\r\n".len(), into)?;
            self.send(id, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")?;
            self.receive(id, reply, into)?;
        }
        Ok(())
    }

    fn send(&mut self, id: ConnectionId, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            match self.endpoint.write(id, &[IoSlice::new(bytes)])? {
                Some(written) => bytes = bytes.get(written..).unwrap_or_default(),
                None => self.turn()?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, id: ConnectionId, mut left: usize, into: &mut [u8]) -> Result<(), Failure> {
        while left > 0 {
            let most = left.min(into.len());
            match self.endpoint.read(id, &mut into[..most])? {
                Some(0) => return Err(Failure::wrong("the server has left")),
                Some(read) => left -= read,
                None => self.turn()?,
            }
        }
        Ok(())
    }
}
