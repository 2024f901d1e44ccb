//! `valkey-rdma-bench`: how many requests a second a server answers, and how long each takes.

use std::io::{self, IsTerminal};
use std::net::ToSocketAddrs;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kv_store::{Server, Store};
use rdma_bench::{Load, Outcome, Test, csv, run, table};
use rdma_conn::{Descriptors, Endpoint, Limits, Options};
use rdma_server::{Address, ConnectionType, Rdma, RdmaSettings, Tcp, Unix};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;

/// Measures a server of the Valkey protocol over RDMA, TCP or Unix sockets: requests a second, and how long each took.
///
/// Without a target: the store of this project's examples, over RDMA on a fabric inside this process, where no device is needed.
#[derive(Parser)]
#[command(
    name = "valkey-rdma-bench",
    version,
    after_help = "Examples:
  valkey-rdma-bench --target rdma://192.0.2.1:6379 -t set,get -c 50 -n 100000
  valkey-rdma-bench --target tcp://127.0.0.1:6379 -t get -d 16384 -P 16
  valkey-rdma-bench --target rdma://192.0.2.1:6379 -t get --rate 20000    # open loop

Exit status: 0 measured, 1 not, 64 wrong arguments."
)]
struct Arguments {
    /// The server: rdma://HOST:PORT, tcp://HOST:PORT or unix:///PATH.
    #[arg(long)]
    target: Option<String>,
    /// The tests to run, in this order.
    #[arg(short = 't', long, value_enum, value_delimiter = ',', default_value = "ping,set,get")]
    tests: Vec<Test>,
    /// Clients at the same time.
    #[arg(short, long, default_value_t = 50, value_parser = at_least_one::<usize>)]
    clients: usize,
    /// Requests of all clients together, for each test.
    #[arg(short = 'n', long, default_value_t = 100_000, value_parser = at_least_one::<u64>)]
    requests: u64,
    /// Bytes of a value.
    #[arg(short = 'd', long, default_value_t = 3)]
    size: usize,
    /// Requests that a client sends together.
    #[arg(short = 'P', long, default_value_t = 1, value_parser = at_least_one::<usize>, conflicts_with = "rate")]
    pipeline: usize,
    /// Keys to choose from at random. By default all requests use one.
    #[arg(short = 'r', long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    keyspace: u64,
    /// Threads that the clients are spread over.
    #[arg(long, default_value_t = 1, value_parser = at_least_one::<usize>)]
    threads: usize,
    /// Requests a second, sent at their time whether earlier replies have come or not (open loop). Latencies count from that time.
    #[arg(long, value_parser = positive)]
    rate: Option<f64>,
    /// Seconds without a reply after which a test has failed.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Microseconds for which a thread that waits looks again and again before it asks to be woken, over RDMA. It costs a processor for
    /// as long.
    #[arg(long, default_value_t = 0)]
    spin: u64,
    /// Print what was measured as JSON.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print what was measured as `valkey-benchmark --csv` does.
    #[arg(long)]
    csv: bool,
}

fn at_least_one<T: std::str::FromStr + PartialOrd + From<u8>>(text: &str) -> Result<T, String> {
    text.parse().ok().filter(|number| *number >= T::from(1)).ok_or_else(|| "a number, at least 1".into())
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate: &f64| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| "requests a second".into())
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _to_a_closed_terminal = error.print();
            return if error.use_stderr() { ExitCode::from(64) } else { ExitCode::SUCCESS };
        }
    };
    match measure(&arguments) {
        Ok(outcomes) if arguments.json => match serde_json::to_string_pretty(&outcomes) {
            Ok(json) => println!("{json}"),
            Err(error) => return fail(&error),
        },
        Ok(outcomes) if arguments.csv => println!("{}", csv(&outcomes)),
        Ok(outcomes) => println!("{}", table(&outcomes)),
        Err(error) => return fail(&error),
    }
    ExitCode::SUCCESS
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}

fn measure(arguments: &Arguments) -> io::Result<Vec<Outcome>> {
    let Some(target) = &arguments.target else { return embedded(arguments) };
    let no_target = || {
        let message = format!("{target:?} is no target: rdma://HOST:PORT, tcp://HOST:PORT or unix:///PATH");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let (scheme, place) = target.split_once("://").ok_or_else(no_target)?;
    if scheme == "unix" {
        return all(arguments, Unix::new, &Address::Unix(place.into()));
    }
    let resolved = place
        .to_socket_addrs()
        .map_err(|error| io::Error::new(error.kind(), format!("cannot resolve {place}: {error}")));
    let address = match scheme {
        "rdma" | "tcp" => resolved?.next().ok_or_else(no_target)?.into(),
        _ => return Err(no_target()),
    };
    if scheme == "tcp" {
        return all(arguments, Tcp::new, &address);
    }
    let verbs = Verbs::load().map_err(io::Error::other)?;
    let settings = arguments.settings();
    all(arguments, || with_settings(&verbs, settings), &address)
}

/// Runs against the store of the examples, which another thread serves.
fn embedded(arguments: &Arguments) -> io::Result<Vec<Outcome>> {
    let fabric = Fabric::new();
    let [server, client] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| fabric.host(&[address.into()]));
    let limits = Limits::default().connections(arguments.clients + 1);
    let mut endpoint = Endpoint::new(&server, limits)?;
    let address = ([192, 0, 2, 1], 6379).into();
    endpoint.listen(address, Options::server())?;
    thread::spawn(move || -> io::Result<()> {
        let store = Store::default();
        let mut server = Server::new(endpoint, &store);
        loop {
            server.turn()?;
            server.endpoint.wait(None)?;
        }
    });
    let settings = arguments.settings();
    all(arguments, || with_settings(&client, settings), &address.into())
}

fn all<T: ConnectionType + Send>(
    arguments: &Arguments,
    with: impl Fn() -> T,
    target: &Address,
) -> io::Result<Vec<Outcome>> {
    let load = arguments.load();
    arguments
        .tests
        .iter()
        .map(|test| {
            let mut bar = Progress::new(*test, load.requests);
            run(*test, &load, &with, target, |done| bar.show(done))
        })
        .collect()
}

/// Returns RDMA on a backend with settings that were checked.
fn with_settings<B: Descriptors>(backend: &B, settings: RdmaSettings) -> Rdma<B> {
    let with = Rdma::new(backend.clone());
    if let Err(error) = with.configure(settings) {
        unreachable!("settings that are out of bounds: {error}");
    }
    with
}

impl Arguments {
    fn settings(&self) -> RdmaSettings {
        let client = Options::client().spin(Duration::from_micros(self.spin));
        RdmaSettings::default().client(client)
    }

    fn load(&self) -> Load {
        Load {
            requests: self.requests,
            clients: self.clients,
            threads: self.threads.min(self.clients),
            pipeline: self.pipeline,
            size: self.size,
            keys: self.keyspace,
            rate: self.rate,
            timeout: Duration::from_secs(self.timeout),
        }
    }
}

/// A bar on a terminal, and a line every ten seconds elsewhere.
struct Progress {
    bar: ProgressBar,
    test: Test,
    total: u64,
    told: Instant,
}

impl Progress {
    fn new(test: Test, total: u64) -> Self {
        let terminal = io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{msg:6} [{wide_bar}] {pos}/{len} {per_sec} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(total), target).with_style(style);
        Self { bar: bar.with_message(test.to_string()), test, total, told: Instant::now() }
    }

    fn show(&mut self, done: u64) {
        self.bar.set_position(done);
        if self.bar.is_hidden() && self.told.elapsed() > Duration::from_secs(10) {
            eprintln!("{}: {done} of {} requests", self.test, self.total);
            self.told = Instant::now();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
