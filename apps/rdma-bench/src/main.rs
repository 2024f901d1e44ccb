//! `valkey-rdma-bench`: how many requests a second a server answers, and how long each takes.

use std::io::{self, IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use clap::{CommandFactory, Parser};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kv_store::{Server, Store};
use rdma_bench::{CONNECTING, Load, Outcome, Test, csv, reachable, run, table};
use rdma_conn::{Descriptors, Endpoint, Limits, Options};
use rdma_server::{Address, ConnectionType, Rdma, RdmaSettings, Tcp, Unix};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;
use rustix::termios::tcgetwinsize;

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
  valkey-rdma-bench --target rdma://192.0.2.1:6379 --rate 20000  # open loop

Exit status: 0 measured, 1 not all of it, 64 wrong arguments."
)]
struct Arguments {
    /// The server: rdma://HOST:PORT, tcp://HOST:PORT or unix:///PATH.
    #[arg(long)]
    target: Option<String>,
    /// The tests to run, in this order.
    #[arg(short = 't', long, value_enum, value_delimiter = ',', default_value = "ping,set,get")]
    tests: Vec<Test>,
    /// Clients at the same time.
    #[arg(short, long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    clients: u32,
    /// Requests of all clients together, for each test.
    #[arg(short = 'n', long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Bytes of a value.
    #[arg(short = 'd', long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(..=LONGEST_VALUE))]
    size: u64,
    /// Requests that a client sends together.
    #[arg(short = 'P', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000), conflicts_with = "rate")]
    pipeline: u32,
    /// Keys to choose from at random. By default all requests use one.
    #[arg(short = 'r', long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    keyspace: u64,
    /// Threads that the clients are spread over.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Requests a second, sent at their time whether earlier replies have come or not (open loop). Latencies count from that time.
    #[arg(long, value_parser = rate)]
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

/// Bytes of a value at most, as in Valkey.
const LONGEST_VALUE: u64 = 512 << 20;
/// Bytes that a client sends together at most.
const MOST_TOGETHER: u64 = 4 << 30;

fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e9).contains(rate));
    rate.ok_or("requests a second, 0.001 to 1000000000")
}

/// Where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Rdma(String),
    Tcp(String),
    Unix(String),
}

impl FromStr for Target {
    // Never the text itself: it may hold a password.
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (scheme, place) = text.split_once("://").unwrap_or_default();
        if scheme != "unix" && text.contains('@') {
            return Err("a target has no user and no password here: rdma://HOST:PORT or tcp://HOST:PORT");
        }
        let port = place.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
        let has_port = port.and_then(|port| port.parse().ok()).is_some_and(|port: u16| port > 0);
        match scheme {
            "rdma" if has_port => Ok(Self::Rdma(place.into())),
            "tcp" if has_port => Ok(Self::Tcp(place.into())),
            "unix" if !place.is_empty() => Ok(Self::Unix(place.into())),
            _ => Err("a target is rdma://HOST:PORT, tcp://HOST:PORT or unix:///PATH"),
        }
    }
}

fn main() -> ExitCode {
    let (arguments, target) = match Arguments::try_parse().and_then(Arguments::checked) {
        Ok(checked) => checked,
        Err(error) => {
            refuse(&error);
            return if error.use_stderr() { ExitCode::from(64) } else { ExitCode::SUCCESS };
        }
    };
    let mut outcomes = Vec::new();
    let measured = measure(&arguments, target.as_ref(), &mut outcomes);
    // What was measured before a failure stands.
    let told = if outcomes.is_empty() { Ok(()) } else { print(&arguments, &outcomes) };
    match measured.and(told) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn print(arguments: &Arguments, outcomes: &[Outcome]) -> io::Result<()> {
    let text = if arguments.json {
        serde_json::to_string_pretty(outcomes)?
    } else if arguments.csv {
        csv(outcomes)
    } else {
        let mut table = table(outcomes);
        table.set_width(columns(io::stdout()));
        table.to_string()
    };
    let mut output = io::stdout().lock();
    match writeln!(output, "{text}").and_then(|()| output.flush()) {
        // Whoever reads has had enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot print: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// The columns of output that goes to no terminal.
const PIPED: u16 = 120;

/// The columns of the terminal that this goes to.
fn columns(output: impl AsFd) -> u16 {
    tcgetwinsize(output).ok().map(|size| size.ws_col).filter(|columns| *columns > 0).unwrap_or(PIPED)
}

fn complain(text: &str) {
    let options =
        textwrap::Options::new(columns(io::stderr()).into()).subsequent_indent("    ").break_words(false);
    // Nobody is left to be told that nobody is told.
    let _ = writeln!(io::stderr(), "{}", textwrap::fill(text, options));
}

/// Prints what is wrong with the arguments, which it may quote, without what stands before an `@` there: it may be a password.
fn refuse(error: &clap::Error) {
    let said = error.render().to_string();
    let told = without_logins(&said, std::env::args_os().map(|word| word.to_string_lossy().into_owned()));
    if told == said {
        let _to_a_closed_terminal = error.print();
    } else {
        let _to_a_closed_terminal = write!(io::stderr(), "{told}");
    }
}

fn without_logins(text: &str, words: impl Iterator<Item = String>) -> String {
    words.fold(text.into(), |text, word| {
        let Some((login, _)) = word.rsplit_once('@') else { return text };
        let login = login.split_once("://").map_or(login, |(_, login)| login);
        text.replace(&format!("{login}@"), "…@")
    })
}

fn measure(arguments: &Arguments, target: Option<&Target>, outcomes: &mut Vec<Outcome>) -> io::Result<()> {
    match target {
        None => embedded(arguments, outcomes),
        Some(Target::Unix(path)) => all(arguments, Unix::new, &[Address::Unix(path.into())], outcomes),
        Some(Target::Tcp(place)) => all(arguments, Tcp::new, &resolve(place)?, outcomes),
        Some(Target::Rdma(place)) => {
            let addresses = resolve(place)?;
            let verbs = Verbs::load().map_err(io::Error::other)?;
            all(arguments, || with_settings(&verbs, arguments.settings()), &addresses, outcomes)
        }
    }
}

fn resolve(place: &str) -> io::Result<Vec<Address>> {
    let resolved = place.to_socket_addrs();
    let resolved =
        resolved.map_err(|error| io::Error::new(error.kind(), format!("cannot resolve {place}: {error}")))?;
    Ok(resolved.map(Address::from).collect())
}

/// Runs against the store of the examples, which another thread serves.
fn embedded(arguments: &Arguments, outcomes: &mut Vec<Outcome>) -> io::Result<()> {
    let fabric = Fabric::new();
    let [server, client] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| fabric.host(&[address.into()]));
    // As many as it was told of will come, and nobody else.
    let mut endpoint = Endpoint::new(&server, Limits::NONE)?;
    let address: SocketAddr = ([192, 0, 2, 1], 6379).into();
    endpoint.listen(address, Options::default())?;
    thread::spawn(move || -> io::Result<()> {
        let store = Store::default();
        let mut server = Server::new(endpoint, &store);
        loop {
            server.turn()?;
            server.endpoint.wait(None)?;
        }
    });
    all(arguments, || with_settings(&client, arguments.settings()), &[address.into()], outcomes)
}

/// Runs the tests in their order, as far as they can be measured.
fn all<T: ConnectionType + Send>(
    arguments: &Arguments,
    with: impl Fn() -> T,
    addresses: &[Address],
    outcomes: &mut Vec<Outcome>,
) -> io::Result<()> {
    let load = arguments.load();
    let target = reachable(&with(), addresses)?;
    for test in &arguments.tests {
        let mut bar = Progress::new(*test, load.requests);
        let outcome = run(*test, &load, &with, &target, |done| bar.show(done));
        outcomes.push(outcome.map_err(|error| io::Error::new(error.kind(), format!("{test}: {error}")))?);
    }
    Ok(())
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
    /// Checks what no argument shows alone.
    fn checked(self) -> Result<(Self, Option<Target>), clap::Error> {
        let wrong = |text: String| Self::command().error(clap::error::ErrorKind::ValueValidation, text);
        if (self.load().batch() as u64).saturating_mul(self.size) > MOST_TOGETHER {
            return Err(wrong(format!("-P values of -d bytes are more than {MOST_TOGETHER} bytes")));
        }
        let target = self.target.as_deref().map(str::parse).transpose();
        let target = target.map_err(|reason: &str| wrong(format!("--target: {reason}")))?;
        Ok((self, target))
    }

    fn settings(&self) -> RdmaSettings {
        let client = Options::default().spin(Duration::from_micros(self.spin));
        // How many connections there are, and so how much memory, is said by the arguments.
        RdmaSettings::default().client(client).limits(Limits::NONE).connect_timeout(CONNECTING)
    }

    fn load(&self) -> Load {
        Load {
            requests: self.requests,
            clients: self.clients as usize,
            threads: self.threads.min(self.clients) as usize,
            pipeline: self.pipeline as usize,
            size: self.size as usize,
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
            complain(&format!("{}: {done} of {} requests", self.test, self.total));
            self.told = Instant::now();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
