//! `valkey-rdma-bench`: how many requests a second a server answers, and how long each takes.

use std::io::{self, IsTerminal, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use any_backend::{AnyBackend, either, softsim};
use clap::{Args, CommandFactory, Parser, Subcommand};
use connection_args::Network;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kv_store::{Server, Store};
use rdma_bench::predict::{self, Machine};
use rdma_bench::{CONNECTING, Carrier, Load, Login, Outcome, Target, Test, csv, reachable, run, table};
use rdma_conn::{Descriptors, Endpoint, Limits, Options};
use rdma_program::{DONE, FAILED, UNREAD, misused, status};
use rdma_server::{Address, ConnectionType, Rdma, RdmaSettings, Tcp, Tls, TlsSettings, Unix};
use rustix::termios::tcgetwinsize;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};

/// Measures a server of the Valkey protocol over RDMA, TCP or Unix sockets: requests a second, and
/// how long each took.
///
/// Without a target: the store of this project's examples, over RDMA on a fabric inside this
/// process, where no device is needed.
#[derive(Parser)]
#[command(
    name = "valkey-rdma-bench",
    version,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  valkey-rdma-bench --target rdma://192.0.2.1:6379 -t set,get -c 50 -n 100000
  valkey-rdma-bench --target tcp://127.0.0.1:6379 -t get -d 16384 -P 16
  valkey-rdma-bench --target rdma://:PASSWORD@192.0.2.1:6379/2 -t set
  valkey-rdma-bench --target rdma://192.0.2.1:6379 --rate 20000  # open loop
  valkey-rdma-bench predict --link 100 --rtt 3 --tcp-rate 160000"
)]
struct Arguments {
    /// The server: `SCHEME://[[USER]:PASSWORD@]HOST:PORT[/DATABASE]`, where SCHEME is rdma, tcp or
    /// tls, or unix:///PATH. In a user and a password, %40 is an @.
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
    /// Requests a second, sent at their time whether earlier replies have come or not (open loop).
    /// Latencies count from that time.
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    /// Seconds without a reply after which a test has failed. 128 connections together have as
    /// long, and 10 seconds at least.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Microseconds for which a waiting thread busy-polls before it sleeps, over RDMA. Meanwhile it
    /// occupies a processor.
    #[arg(long, default_value_t = 0)]
    spin: u64,
    /// The authorities that a server behind tls:// is certified by (PEM).
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// The certificate chain that is shown to a server behind tls:// (PEM), if it asks for one.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of that certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Print what was measured as JSON.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print what was measured as `valkey-benchmark --csv` does.
    #[arg(long)]
    csv: bool,
    #[command(flatten)]
    network: Network,
    #[command(subcommand)]
    command: Option<Command>,
    /// As the target says.
    #[arg(skip)]
    login: Login,
}

#[derive(Subcommand)]
enum Command {
    /// Says what a server would do on a card, by a formula that was compared with what others
    /// published. No device is used.
    Predict(Predict),
}

/// The machines, the card and the network.
#[derive(Args)]
struct Predict {
    /// Gb/s of the link.
    #[arg(long, default_value_t = Machine::default().link, value_parser = above_zero)]
    link: f64,
    /// Microseconds of both ways over cables and switches, without the cards.
    #[arg(long, default_value_t = Machine::default().rtt, value_parser = above_zero)]
    rtt: f64,
    /// PINGs a second that Valkey answers over TCP on this processor with one thread, as `-t ping`
    /// measures them: how fast it is.
    #[arg(long, value_parser = above_zero)]
    tcp_rate: Option<f64>,
    /// Clients at the same time.
    #[arg(short, long, default_value_t = Machine::default().clients, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    clients: u32,
    /// Requests that a client sends together.
    #[arg(short = 'P', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pipeline: u32,
    /// GB/s that one core copies.
    #[arg(long, default_value_t = Machine::default().copy, value_parser = above_zero)]
    copy: f64,
    /// Both sides busy-poll instead of sleeping.
    #[arg(long)]
    poll: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Print how far the formula is from what was published, instead.
    #[arg(long)]
    calibration: bool,
}

fn above_zero(text: &str) -> Result<f64, &'static str> {
    text.parse()
        .ok()
        .filter(|number| (0.001..=1e9).contains(number))
        .ok_or("a number from 0.001 to 1000000000")
}

impl Predict {
    fn machine(&self) -> Machine {
        let &Self { link, rtt, clients, pipeline, copy, poll: polls, .. } = self;
        let machine = Machine { link, rtt, clients, pipeline, copy, polls, ..Machine::default() };
        self.tcp_rate.map_or(machine, |rate| machine.with_tcp_rate(rate, 0.0))
    }

    fn tell(&self) -> io::Result<String> {
        let (machine, points) = (self.machine(), predict::points());
        let rows = predict::rows(&machine);
        let mut table = match (self.calibration, self.json) {
            (true, true) => return Ok(serde_json::to_string_pretty(&points)?),
            (false, true) => return Ok(serde_json::to_string_pretty(&rows)?),
            (true, false) => predict::calibration(&points),
            (false, false) => predict::table(&rows),
        };
        table.set_width(columns(io::stdout()));
        if self.calibration {
            return Ok(table.to_string());
        }
        let overtakes = match machine.overtakes() {
            Some(size) => format!("RDMA is ahead of TCP with values of {size} bytes and longer"),
            None => "RDMA is not ahead of TCP with the longest of these values".into(),
        };
        Ok(format!(
            "{table}\n{overtakes} (one thread; Valkey's threads for input and output are not in the formula).\n\
                    No card was measured for it: `predict --calibration` says how far it is from what others published."
        ))
    }
}

/// The longest value, as in Valkey.
const LONGEST_VALUE: u64 = 512 << 20;
/// The most bytes that a client sends together.
const MOST_TOGETHER: u64 = 4 << 30;

fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e9).contains(rate));
    rate.ok_or("requests a second, 0.001 to 1000000000")
}

fn main() -> ExitCode {
    rdma_program::run(|arguments: Arguments| {
        if let Some(Command::Predict(predict)) = &arguments.command {
            return ExitCode::from(match predict.tell().and_then(|text| say(&text)) {
                Ok(()) => DONE,
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => UNREAD,
                Err(error) => {
                    complain(&error.to_string());
                    FAILED
                }
            });
        }
        let (arguments, target) = match arguments.checked() {
            Ok(checked) => checked,
            Err(error) => return misused(&error),
        };
        let mut outcomes = Vec::new();
        let measured = measure(&arguments, target.as_ref(), &mut outcomes);
        let told = if outcomes.is_empty() { Ok(()) } else { print(&arguments, &outcomes) };
        ExitCode::from(match (measured, told) {
            (Ok(()), Ok(())) => DONE,
            (_, Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => UNREAD,
            (Err(error), _) => {
                complain(&error.to_string());
                status(&error)
            }
            (Ok(()), Err(error)) => {
                complain(&error.to_string());
                FAILED
            }
        })
    })
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
    say(&text)
}

fn say(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    match writeln!(output, "{text}").and_then(|()| output.flush()) {
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot print: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// The columns of output that is not to a terminal.
const PIPED: u16 = 120;

fn columns(output: impl AsFd) -> u16 {
    tcgetwinsize(output).ok().map(|size| size.ws_col).filter(|columns| *columns > 0).unwrap_or(PIPED)
}

fn complain(text: &str) {
    let options =
        textwrap::Options::new(columns(io::stderr()).into()).subsequent_indent("    ").break_words(false);
    // If stderr is closed, there is no place to report it.
    let _ = writeln!(io::stderr(), "{}", textwrap::fill(text, options));
}

fn measure(arguments: &Arguments, target: Option<&Target>, outcomes: &mut Vec<Outcome>) -> io::Result<()> {
    let Some(Target { carrier, place, .. }) = target else { return embedded(arguments, outcomes) };
    match carrier {
        Carrier::Unix => all(arguments, Unix::new, &[Address::Unix(place.into())], outcomes),
        Carrier::Tcp => all(arguments, Tcp::new, &resolve(place)?, outcomes),
        Carrier::Tls => {
            let settings = arguments.tls(place)?;
            all(arguments, || Tls::new(Tcp::new(), settings.clone()), &resolve(place)?, outcomes)
        }
        Carrier::Rdma => {
            let addresses = resolve(place)?;
            either!(AnyBackend::devices()?, AnyBackend(backend) => {
                all(arguments, || with_settings(&backend, arguments.settings()), &addresses, outcomes)
            })
        }
    }
}

fn resolve(place: &str) -> io::Result<Vec<Address>> {
    let resolved = place.to_socket_addrs();
    let resolved =
        resolved.map_err(|error| io::Error::new(error.kind(), format!("cannot resolve {place}: {error}")))?;
    Ok(resolved.map(Address::from).collect())
}

fn embedded(arguments: &Arguments, outcomes: &mut Vec<Outcome>) -> io::Result<()> {
    let [server, client] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(softsim);
    // The number of clients is known, and no other clients connect.
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

fn with_settings<B: Descriptors>(backend: &B, settings: RdmaSettings) -> Rdma<B> {
    let with = Rdma::new(backend.clone());
    if let Err(error) = with.configure(settings) {
        unreachable!("settings that are out of bounds: {error}");
    }
    with
}

impl Arguments {
    fn checked(self) -> Result<(Self, Option<Target>), clap::Error> {
        let wrong = |text: String| Self::command().error(clap::error::ErrorKind::ValueValidation, text);
        if (self.load().batch() as u64).saturating_mul(self.size) > MOST_TOGETHER {
            return Err(wrong(format!("-P values of -d bytes are more than {MOST_TOGETHER} bytes")));
        }
        let target = self.target.as_deref().map(str::parse).transpose();
        let target: Option<Target> = target.map_err(|reason| wrong(format!("--target: {reason}")))?;
        let is_tls = target.as_ref().is_some_and(|target| target.carrier == Carrier::Tls);
        if is_tls != self.tls_ca.is_some() {
            return Err(wrong("tls:// needs --tls-ca, and nothing else does".into()));
        }
        Ok((
            Self { login: target.as_ref().map(|target| target.login.clone()).unwrap_or_default(), ..self },
            target,
        ))
    }

    fn settings(&self) -> RdmaSettings {
        let client = self.network.on(Options::default()).spin(Duration::from_micros(self.spin));
        let patience = CONNECTING.max(Duration::from_secs(self.timeout));
        // The arguments say how many connections there are, and so how much memory they need.
        RdmaSettings::default().client(client).limits(Limits::NONE).connect_timeout(patience)
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
            login: self.login.clone(),
        }
    }

    /// Returns TLS settings for a client of `place`, which the server's certificate must name.
    fn tls(&self, place: &str) -> io::Result<TlsSettings> {
        let mut roots = RootCertStore::empty();
        for (file, certificate) in certificates(self.tls_ca.as_deref())? {
            roots.add(certificate).map_err(|error| unusable(file, &error))?;
        }
        let wrong = |error: rustls::Error| io::Error::other(format!("TLS: {error}"));
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_root_certificates(roots);
        let config = match &self.tls_key {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let key = PrivateKeyDer::from_pem_file(file).map_err(|error| unusable(file, &error))?;
                let chain = certificates(self.tls_cert.as_deref())?.into_iter().map(|(_, one)| one);
                builder.with_client_auth_cert(chain.collect(), key).map_err(wrong)?
            }
        };
        let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_string();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        Ok(TlsSettings::default().client(Some(Arc::new(config))).server_name(Some(name)))
    }
}

fn certificates(file: Option<&Path>) -> io::Result<Vec<(&Path, CertificateDer<'static>)>> {
    let Some(file) = file else { return Ok(Vec::new()) };
    let read = CertificateDer::pem_file_iter(file).map_err(|error| unusable(file, &error))?;
    read.map(|one| Ok((file, one.map_err(|error| unusable(file, &error))?))).collect()
}

fn unusable(file: &Path, error: &dyn std::error::Error) -> io::Error {
    io::Error::other(format!("cannot use {} for TLS: {error}", file.display()))
}

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
