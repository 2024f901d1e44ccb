//! `valkey-rdma-bridge`: connects TCP clients to an RDMA server, and RDMA clients to a TCP one.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use any_backend::{AnyBackend, either, softsim};
use clap::Parser;
use connection_args::Network;
use rdma_bridge::{Bridge, Carrier, Place, Settings, TlsFiles};
use rdma_conn::Descriptors;
use rdma_program::{USAGE, status};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

const WIDTH: usize = 100;

/// Bridges between TCP and RDMA.
///
/// A side is tcp://HOST:PORT, tls://HOST:PORT or rdma://HOST:PORT.
#[derive(Parser)]
#[command(
    name = "valkey-rdma-bridge",
    version,
    after_help = "Examples:
  TCP clients to a server's RDMA port:
    valkey-rdma-bridge --listen tcp://127.0.0.1:6390 \\
        --connect rdma://192.0.2.1:6379
  RDMA clients to a server that speaks TCP alone:
    valkey-rdma-bridge --listen rdma://192.0.2.1:6379 \\
        --connect tcp://127.0.0.1:6379
  No RDMA device: TCP clients to a TCP server, with Valkey's RDMA protocol in
  between, on a fabric inside the process:
    valkey-rdma-bridge --softsim --listen tcp://127.0.0.1:6390 \\
        --connect tcp://127.0.0.1:6379

Signals: SIGTERM or SIGINT drains and ends, a second one ends at once; SIGUSR1
prints the counters."
)]
struct Arguments {
    /// Where clients connect to; port 0 takes a free one, which is printed.
    #[arg(long)]
    listen: String,
    /// Where the server is.
    #[arg(long)]
    connect: String,
    /// Put an RDMA connection on a fabric inside this process between two sides of TCP or TLS.
    /// Needs no device.
    #[arg(long)]
    softsim: bool,
    /// Clients at the same time; one more is closed, with an error reply over TCP.
    #[arg(long, default_value_t = Settings::default().max_connections)]
    max_connections: usize,
    /// Seconds that the connection to the server, or a TLS handshake, may take.
    #[arg(long, value_parser = seconds, default_value = "5")]
    connect_timeout: Duration,
    /// Seconds that either side may take nothing while there are bytes for it.
    #[arg(long, value_parser = seconds, default_value = "60")]
    stall: Duration,
    /// Seconds without a reply after which the server's RDMA connection ends, once a client of TCP
    /// has ended its own direction.
    #[arg(long, value_parser = seconds, default_value = "0.2")]
    quiet: Duration,
    /// Seconds that clients have to end by themselves after SIGTERM.
    #[arg(long, value_parser = seconds, default_value = "30")]
    drain: Duration,
    /// The certificate chain for clients of tls:// (PEM).
    #[arg(long, requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of the certificate (PEM).
    #[arg(long, requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The authorities that a server behind tls:// is certified by (PEM).
    #[arg(long)]
    tls_ca: Option<PathBuf>,
    #[command(flatten)]
    network: Network,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "seconds, such as 2.5")?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    rdma_program::run(perform)
}

#[tokio::main]
async fn perform(arguments: Arguments) -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    // Not parsed by clap, which would repeat an invalid value: it may contain a password.
    let (listen, connect) = match (arguments.listen.parse::<Place>(), arguments.connect.parse::<Place>()) {
        (Ok(listen), Ok(connect)) => (listen, connect),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("{}", folded(&error.to_string()));
            return ExitCode::from(USAGE);
        }
    };
    let rdma = [&listen, &connect].iter().any(|place| place.carrier == Carrier::Rdma);
    if rdma == arguments.softsim {
        eprintln!(
            "{}",
            if rdma {
                "--softsim puts RDMA between two sides of TCP or TLS: neither may be rdma://"
            } else {
                "neither side is rdma://; with --softsim there is RDMA in between"
            }
        );
        return ExitCode::from(USAGE);
    }
    let settings = arguments.settings();
    let done = if arguments.softsim {
        through_softsim(listen, connect, &settings).await
    } else {
        through_devices(listen, connect, &settings).await
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", folded(&error.to_string()));
            ExitCode::from(status(&*error))
        }
    }
}

/// Warns of a server that takes all clients of the bridge for local ones.
fn warn_of_strangers(is_exposed: bool, is_server_here: bool, listen: &Place, connect: &Place) {
    if is_exposed && is_server_here {
        let text = format!(
            "warning: clients from other machines can reach {listen}, and come to {connect} as clients of this machine. A \
             protected mode, which admits these, does not keep them out. If the server has no password, set one \
             (requirepass, or users by ACL SETUSER), or have the bridge listen on a loopback address."
        );
        eprintln!("{}", folded(&text));
    }
}

fn folded(text: &str) -> String {
    textwrap::fill(text, textwrap::Options::new(WIDTH).break_words(false))
}

type Failure = Box<dyn std::error::Error>;

async fn through_devices(listen: Place, connect: Place, settings: &Settings) -> Result<(), Failure> {
    either!(AnyBackend::devices()?, AnyBackend(backend) => {
        let bridge = Bridge::bind(&backend, &listen, connect.clone(), settings).await?;
        warn_of_strangers(bridge.is_exposed()?, bridge.is_server_here(), &listen, &connect);
        serve(bridge).await
    })
}

/// Runs two bridges with RDMA between them: clients connect to the first, the second to the server.
async fn through_softsim(listen: Place, connect: Place, settings: &Settings) -> Result<(), Failure> {
    let [near, far] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(softsim);
    let middle: Place = "rdma://192.0.2.2:6379".parse()?;
    let second = Bridge::bind(&far, &middle, connect.clone(), settings).await?;
    let first = Bridge::bind(&near, &listen, middle, settings).await?;
    warn_of_strangers(first.is_exposed()?, second.is_server_here(), &listen, &connect);
    // Ends with the process. By then, the first has drained.
    let second = tokio::spawn(second.serve(std::future::pending()));
    let served = serve(first).await;
    second.abort();
    served
}

async fn serve<B: Descriptors>(bridge: Bridge<B>) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut print = signal(SignalKind::user_defined1())?;
    println!("listening on {}", bridge.place()?);
    let counters = bridge.counters();
    let (stop, stopped) = oneshot::channel::<()>();
    let mut stop = Some(stop);
    // A dropped sender also means to stop.
    let mut serving = pin!(bridge.serve(async { drop(stopped.await) }));
    let result = loop {
        tokio::select! {
            result = &mut serving => break result,
            _ = print.recv() => {
                println!("{}", counters.snapshot());
                continue;
            }
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if stop.take().is_none() {
            break Ok(());
        }
    };
    println!("{}", counters.snapshot());
    Ok(result?)
}

impl Arguments {
    fn settings(&self) -> Settings {
        let mut settings = Settings::default();
        settings.max_connections = self.max_connections;
        settings.connect_timeout = self.connect_timeout;
        settings.stall = self.stall;
        settings.quiet = self.quiet;
        settings.drain = self.drain;
        settings.options = self.network.on(settings.options);
        settings.tls = TlsFiles {
            identity: self.tls_cert.clone().zip(self.tls_key.clone()),
            authorities: self.tls_ca.clone(),
        };
        settings
    }
}
