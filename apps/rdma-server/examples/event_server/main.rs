//! The store of `kv_server` on every transport at once: TCP, Unix sockets and RDMA, with an
//! operator's settings.
//!
//! ```text
//! cargo run --release -p rdma-server --example event_server -- --rdma 192.0.2.1:6379 --tcp 192.0.2.1:6379 --protected-mode no
//! cargo run --release -p rdma-server --example event_server -- --backend softsim     # no device: serve and try it here
//! cargo run --release -p rdma-server --example event_server -- --doctor              # which interrupt goes where
//! ```
//!
//! At run time, `CONFIG SET` changes `tcp` and `rdma` (addresses separated by spaces; existing
//! clients stay), `maxclients` and `protected-mode`.
//!
//! The two CPU arrangements that Valkey's document recommends, for a device `mlx5_0` and this
//! server on CPU 4 and up, or on CPU 2 with vector 2:
//!
//! ```text
//! event_server --pin-vectors 0-3 --device mlx5_0 --cpus 4-7 …
//! event_server --pin-vectors 0-7 --device mlx5_0 --cpus 2 --completion-vector 2 …
//! ```

#![allow(unreachable_pub, reason = "nothing is reachable from outside a program")]

mod service;

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use any_backend::{AnyBackend, BackendName, Verbs, either, softsim};
use clap::Parser;
use connection_args::Network;
use rdma_conn::Descriptors;
use rdma_server::affinity::{Cpus, Interrupts, devices, pin_thread, thread_cpus};
use rdma_server::{Address, ConnectionType, EventLoop, Rdma, RdmaSettings, Tcp, Unix, Vector};
use rdma_server::{BindingId, Server, ServerSettings};
use rdma_verbs::locality;

use service::{Change, ChangeRequest, StoreService};

#[derive(Parser)]
#[command(version, about = "A small RESP key-value server on TCP, Unix sockets and RDMA")]
struct Arguments {
    /// The RDMA backend. In softsim, clients here try the server.
    #[arg(long, value_enum, default_value_t)]
    backend: BackendName,
    /// Addresses for TCP.
    #[arg(long)]
    tcp: Vec<SocketAddr>,
    /// Addresses for RDMA; they may be the same as for TCP.
    #[arg(long)]
    rdma: Vec<SocketAddr>,
    /// A path for a Unix socket.
    #[arg(long)]
    unix: Option<std::path::PathBuf>,
    /// Clients at the same time.
    #[arg(long, default_value_t = ServerSettings::default().max_clients)]
    maxclients: usize,
    /// Admit only clients of this machine.
    #[arg(long, default_value = "yes", value_parser = clap::builder::BoolishValueParser::new(), action = clap::ArgAction::Set)]
    protected_mode: bool,
    /// The completion vector of all connections. By default each takes one at random.
    #[arg(long)]
    completion_vector: Option<u32>,
    /// CPUs for the server's thread, such as 4-7. By default those near the device of the RDMA
    /// addresses, of the CPUs that this process may use.
    #[arg(long)]
    cpus: Option<Cpus>,
    /// CPUs for the completion vectors of --device, in turn. Needs root.
    #[arg(long, requires = "device")]
    pin_vectors: Option<Cpus>,
    /// The RDMA device for --pin-vectors and --doctor, as in `rdma link`.
    #[arg(long)]
    device: Option<String>,
    /// Print which interrupt goes where, and end.
    #[arg(long)]
    doctor: bool,
    #[command(flatten)]
    network: Network,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    rdma_program::run(|arguments| match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("event_server: {error}");
            ExitCode::from(rdma_program::status(&*error))
        }
    })
}

fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    if let (Some(cpus), Some(device)) = (&arguments.pin_vectors, &arguments.device) {
        let pinned = Interrupts::of(device)?.pin(cpus)?;
        println!("{pinned} completion vectors of {device} sent to CPUs {cpus}");
    }
    if let Some(cpus) = &arguments.cpus {
        pin_thread(cpus)?;
    }
    if arguments.doctor {
        return Ok(diagnose(arguments.device.as_deref())?);
    }
    if arguments.backend == BackendName::Softsim {
        return tried(arguments);
    }
    if arguments.cpus.is_none()
        && let Err(error) = pin_near(&arguments.rdma)
    {
        println!("event_server: on all CPUs, as it cannot choose those near the RDMA device: {error}");
    }
    let mut server = if arguments.rdma.is_empty() {
        Running::new(&arguments, None::<Rdma<Verbs>>)?
    } else {
        let backend = AnyBackend::open(arguments.backend, Ipv4Addr::UNSPECIFIED.into())?;
        either!(backend, AnyBackend(backend) => Running::new(&arguments, Some(Rdma::new(backend)))?)
    };
    loop {
        server.turn(None)?;
    }
}

fn tried(mut arguments: Arguments) -> Result<(), Box<dyn Error>> {
    // The fabric's server has the loopback address, so that TCP and RDMA share it.
    let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
    let rdma = Rdma::new(softsim(loopback.ip()));
    arguments.tcp = vec![loopback];
    let mut server = Running::new(&arguments, Some(rdma.clone()))?;
    let at = server.server.local_addrs(server.tcp);
    server.server.rebind(server.rdma, &at)?;
    let trial = thread::spawn(move || try_it(&rdma, &at).map_err(|error| error.to_string()));
    while !trial.is_finished() {
        server.turn(Some(Duration::from_millis(10)))?;
    }
    trial.join().map_err(|_| "the trial panicked")?.map_err(Into::into)
}

struct Running {
    server: Server<StoreService>,
    tcp: BindingId,
    rdma: BindingId,
}

impl Running {
    fn new<B: Descriptors>(arguments: &Arguments, rdma: Option<Rdma<B>>) -> io::Result<Self> {
        let (max_clients, protected) = (arguments.maxclients, arguments.protected_mode);
        let settings = ServerSettings::default().max_clients(max_clients).protected(protected);
        let mut server = Server::new(StoreService::default(), settings)?;
        let ip = |addresses: &[SocketAddr]| addresses.iter().copied().map(Address::from).collect::<Vec<_>>();
        let tcp = server.bind(Tcp::new(), &ip(&arguments.tcp))?;
        let rdma = match rdma {
            Some(rdma) => {
                let vector = arguments.completion_vector.map_or(Vector::Random, Vector::Fixed);
                let settings = RdmaSettings::default().vector(vector);
                rdma.configure(settings.server(arguments.network.on(settings.server)))?;
                server.bind(rdma, &ip(&arguments.rdma))?
            }
            // Without RDMA, a binding without addresses.
            None => server.bind(Tcp::new(), &[])?,
        };
        let unix: Vec<Address> = arguments.unix.iter().cloned().map(Address::from).collect();
        let unix = server.bind(Unix::new(), &unix)?;
        for (name, binding) in [("tcp", tcp), ("rdma", rdma), ("unix", unix)] {
            for address in server.local_addrs(binding) {
                println!("event_server: {name} on {address}");
            }
        }
        Ok(Self { server, tcp, rdma })
    }

    fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.server.turn(timeout)?;
        for ChangeRequest { from, change } in std::mem::take(&mut self.server.service().requests) {
            let done = match change {
                Change::Tcp(at) => self.server.rebind(self.tcp, &at),
                Change::Rdma(at) => self.server.rebind(self.rdma, &at),
                Change::MaxClients(most) => self.server.configure(self.server.settings().max_clients(most)),
                Change::Protected(protected) => {
                    self.server.configure(self.server.settings().protected(protected))
                }
            };
            let reply = done.map_or_else(|error| format!("-ERR {error}\r\n"), |()| "+OK\r\n".to_owned());
            if let Err(error) = self.server.send(from, reply.as_bytes()) {
                tracing::info!(%error, "a change was made, and the client that asked for it could not be told");
                self.server.close(from);
            }
        }
        Ok(())
    }
}

/// Restricts this thread to CPUs near the device of these addresses, if one NUMA node has them.
fn pin_near(addresses: &[SocketAddr]) -> io::Result<()> {
    let addresses: Vec<_> = addresses.iter().map(SocketAddr::ip).collect();
    let devices = locality::devices();
    let Some(node) = locality::common_node(&devices, &addresses) else { return Ok(()) };
    let near: Cpus = node.processors.parse().map_err(io::Error::other)?;
    let usable = thread_cpus()?.common(&near);
    if !usable.is_empty() {
        println!("event_server: on CPUs {usable}, near the RDMA device (NUMA node {})", node.number);
        pin_thread(&usable)?;
    }
    Ok(())
}

fn diagnose(device: Option<&str>) -> io::Result<()> {
    println!("this program may run on CPUs {}", thread_cpus()?);
    let devices = device.map_or_else(devices, |device| vec![device.to_owned()]);
    if devices.is_empty() {
        println!("there is no RDMA device");
    }
    for device in devices {
        println!("{}", Interrupts::of(&device)?);
    }
    Ok(())
}

/// Tries both transports at one address, and moves both while clients are connected.
fn try_it(rdma: &impl ConnectionType, at: &[Address]) -> io::Result<()> {
    const SOON: Duration = Duration::from_secs(10);
    let address = at.first().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let mut clients = EventLoop::new(())?;
    let by_tcp = clients.blocking_connect(&Tcp::new(), address, None, SOON)?;
    let by_rdma = clients.blocking_connect(rdma, address, None, SOON)?;
    for (id, command) in [
        (by_tcp, "SET greeting hello"),
        (by_rdma, "GET greeting"),
        (by_rdma, "CONFIG SET tcp 127.0.0.1:0"),
        (by_rdma, "CONFIG SET rdma 127.0.0.1:7"),
        (by_tcp, "GET greeting"),
        (by_rdma, "GET greeting"),
        (by_tcp, "CONFIG SET maxclients 1"),
    ] {
        let Some(client) = clients.get_mut(id) else { continue };
        client.sync_write(format!("{command}\r\n").as_bytes(), SOON)?;
        let mut reply = client.sync_read_line(1000, SOON)?;
        if reply.starts_with(b"$") {
            reply = client.sync_read_line(1000, SOON)?;
        }
        println!("{:<5} {command} -> {}", client.kind().to_string(), String::from_utf8_lossy(&reply));
    }
    let moved = "127.0.0.1:7".parse().map_err(io::Error::other)?;
    let id = clients.blocking_connect(rdma, &moved, None, SOON)?;
    let Some(client) = clients.get_mut(id) else { return Ok(()) };
    let refusal = client.sync_read_line(1000, SOON)?;
    println!("{:<5} one more -> {}", client.kind().to_string(), String::from_utf8_lossy(&refusal));
    Ok(())
}
