//! The clients' side: runs the clients, logs figures, and reports the result.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use rdma_conn::{Descriptors, Stream};
use rdma_verbs::Verbs;
use tokio::runtime::Runtime;

use super::client::{ConditionalFailure, LoadClient, LoadState, Tally, Work};
use super::face::{Blocking, Redis, Tasks};
use super::faults;
use super::figures::{self, Clients, Device, Line, Log, Objects, Process};
use super::phases::{Phase, Phases};

/// Arguments of the clients' side.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// A server that is never killed (NAME=ADDRESS:PORT); repeat it for more.
    #[arg(long)]
    server: Vec<NamedServer>,
    /// A server that is killed from time to time and loses its data.
    #[arg(long)]
    killed_server: Vec<NamedServer>,
    /// How long to work, in seconds. The last check of all keys follows.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// Clients of each kind at each server.
    #[arg(long, default_value_t = 1)]
    clients: u32,
    /// The seed of all pseudo-random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds between two lines of figures.
    #[arg(long, default_value_t = 60)]
    interval: u64,
    /// The device whose objects and counters are logged.
    #[arg(long, default_value = "rxe1")]
    device: String,
    /// The interface whose network gets faults; none without it.
    #[arg(long)]
    interface: Option<String>,
    /// The folder shared with the servers' side, for its phases and `clients.jsonl`.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run as a client that is killed: exchange echoes until then.
    #[arg(long, hide = true)]
    echoes: bool,
}

#[derive(Clone, Debug)]
pub(super) struct NamedServer {
    pub name: String,
    pub address: SocketAddr,
}

impl std::str::FromStr for NamedServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = text.split_once('=').ok_or("expected NAME=ADDRESS:PORT")?;
        let address = address.parse().map_err(|error| format!("{address}: {error}"))?;
        Ok(Self { name: name.into(), address })
    }
}

impl Arguments {
    fn servers(&self) -> impl Iterator<Item = (&NamedServer, bool)> {
        let steady = self.server.iter().map(|server| (server, false));
        steady.chain(self.killed_server.iter().map(|server| (server, true)))
    }
}

pub(super) fn run(arguments: &Arguments) -> ExitCode {
    match Verbs::load() {
        Ok(verbs) if arguments.echoes => echo(&verbs, arguments),
        Ok(verbs) => match soak(&verbs, arguments) {
            Ok(failures) => super::conclude("clients", &failures),
            Err(error) => super::cannot_run(error),
        },
        Err(error) => super::cannot_run(error),
    }
}

pub(super) fn clients<B: Descriptors>(
    backend: &B,
    arguments: &Arguments,
    runtime: &Runtime,
) -> Result<Vec<LoadClient>, redis::RedisError> {
    let mut clients = Vec::new();
    // One for all clients, so that a seed repeats the whole run.
    let mut seeds = fastrand::Rng::with_seed(arguments.seed);
    for (server, server_is_killed) in arguments.servers() {
        for number in 0..arguments.clients {
            let (backend, handle, address) = (backend.clone(), runtime.handle().clone(), server.address);
            let mut add = |kind: &str, face| {
                let (name, server) = (format!("{}/{kind}-{number}", server.name), server.name.clone());
                let work = if arguments.echoes { Work::Echoes } else { Work::Keys };
                let (idles, seed) = (true, seeds.u64(..));
                clients.push(LoadClient { name, face, work, server, server_is_killed, idles, seed });
            };
            add("stream", Box::new(Blocking::new(backend.clone(), address)));
            add("tokio", Box::new(Tasks::new(backend.clone(), address, handle.clone())));
            add("redis-rs", Box::new(Redis::new(backend, address, handle)?));
        }
    }
    Ok(clients)
}

pub(super) fn start(clients: Vec<LoadClient>, progress: &Arc<LoadState>) {
    for client in clients {
        let progress = Arc::clone(progress);
        let number = progress.watch(&client.name);
        thread::spawn(move || client.run(&progress, number));
    }
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// Runs in a process that is killed: only exchanges. It ends without a kill only on a failure.
fn echo<B: Descriptors>(backend: &B, arguments: &Arguments) -> ExitCode {
    let Ok(runtime) = runtime() else { return super::cannot_run("no runtime") };
    let progress = Arc::new(LoadState::new());
    match clients(backend, arguments, &runtime) {
        Ok(clients) => start(clients, &progress),
        Err(error) => return super::cannot_run(error),
    }
    while progress.failures().is_empty() {
        thread::sleep(Duration::from_millis(200));
        progress.look_for_hung();
    }
    super::conclude("a client that is killed", &progress.failures())
}

struct Baseline {
    process: Process,
    objects: Objects,
}

fn soak(backend: &Verbs, arguments: &Arguments) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let runtime = runtime()?;
    let out = arguments.out.clone().unwrap_or_else(|| ".".into());
    let phases = Phases(out.clone());
    let device = Device(arguments.device.clone());
    if arguments.out.is_some() {
        phases.wait(Phase::Ready, Duration::from_secs(120))?;
    }
    // The first connections create what a process creates only once.
    for (server, _) in arguments.servers() {
        let first = || Stream::connect(backend, server.address).err().map(|error| error.to_string());
        if let Some(why) = figures::settled(Duration::from_secs(60), first) {
            return Err(format!("no first connection to {}: {why}", server.name).into());
        }
    }
    // The device may keep identifiers of ended connections for a while.
    let nothing = || device.objects().get("cm_id").filter(|count| **count > 0).map(|_| String::new());
    let _still_parting = figures::settled(Duration::from_secs(10), nothing);
    if arguments.out.is_some() {
        // What both sides hold is recorded while no client is connected.
        phases.tell(Phase::Warm)?;
        phases.wait(Phase::Measured, Duration::from_secs(120))?;
    }

    let log = Arc::new(Log::create(&out.join("clients.jsonl"))?);
    let before = Baseline { process: Process::of("self")?, objects: device.objects() };
    let progress = Arc::new(LoadState::new());
    start(clients(backend, arguments, &runtime)?, &progress);
    let over = Arc::new(AtomicBool::new(false));
    let helpers = [disturb, kill_clients].map(|help| {
        let (arguments, log, over, progress) =
            (arguments.clone(), Arc::clone(&log), Arc::clone(&over), Arc::clone(&progress));
        thread::spawn(move || help(&arguments, &log, &over, &progress))
    });
    let mut totals = Totals::default();
    let begun = Instant::now();
    let mut counted = device.counters();
    let mut last = Instant::now();
    loop {
        thread::sleep(Duration::from_millis(500));
        progress.look_for_hung();
        // `over` ends this side's faults and kills: the last check is made without.
        if begun.elapsed() >= Duration::from_secs(arguments.seconds) && !over.swap(true, Ordering::Relaxed) {
            println!("[{:4}s] the last look at everything", begun.elapsed().as_secs());
            progress.stop.store(true, Ordering::Relaxed);
        }
        let done = progress.stopped() && progress.at_work() == 0;
        if done || last.elapsed() >= Duration::from_secs(arguments.interval) {
            let now = device.counters();
            let (at, seconds) = (log.now(), last.elapsed());
            let figures =
                measured(&progress.take_tally(), at, seconds, &device, (&counted, &now), &mut totals)?;
            (counted, last) = (now, Instant::now());
            show(begun.elapsed(), &figures);
            log.write(&Line::Clients(figures));
        }
        if done {
            break;
        }
    }
    // First: the objects of a child that is still running would count as ours.
    for helper in helpers {
        if helper.join().is_err() {
            progress.fail("a thread of the soak itself panicked".into());
        }
    }
    judge(&progress, &phases, &before, &device, &mut totals)?;
    for (reason, count) in &totals.reasons {
        println!("{count:6} times: {reason}");
    }
    let failures = progress.failures();
    let (at, side) = (log.now(), "clients".to_string());
    log.write(&Line::Verdict { at, side, failures: failures.clone(), totals: totals.totals });
    if arguments.out.is_some() {
        phases.tell(Phase::Ended)?;
    }
    Ok(failures)
}

#[derive(Default)]
struct Totals {
    totals: BTreeMap<String, u64>,
    exchanges: BTreeMap<String, u64>,
    reasons: BTreeMap<String, u64>,
    resident_kib: Vec<u64>,
}

fn measured(
    tally: &Tally,
    at: f64,
    length: Duration,
    device: &Device,
    (before, after): (&BTreeMap<String, u64>, &BTreeMap<String, u64>),
    totals: &mut Totals,
) -> std::io::Result<Clients> {
    let process = Process::of("self")?;
    totals.resident_kib.push(process.resident_kib);
    for (into, from) in [(&mut totals.exchanges, &tally.exchanges), (&mut totals.reasons, &tally.reasons)] {
        for (name, count) in from {
            *into.entry(name.clone()).or_default() += count;
        }
    }
    let counted = |name: &String, count: &u64| count.saturating_sub(before.get(name).copied().unwrap_or(0));
    let figures = Clients {
        at,
        seconds: (length.as_secs_f64() * 10.0).round() / 10.0,
        operations: tally.operations,
        bytes_sent: tally.bytes_sent,
        bytes_received: tally.bytes_received,
        connected: tally.connected,
        refused: tally.refused,
        lost: tally.lost,
        p50: tally.latency.value_at_quantile(0.5),
        p99: tally.latency.value_at_quantile(0.99),
        max: tally.latency.max(),
        process,
        objects: device.objects(),
        device: after.iter().map(|(name, count)| (name.clone(), counted(name, count))).collect(),
    };
    let device = &figures.device;
    for (name, count) in [
        ("operations", figures.operations),
        ("bytes_sent", figures.bytes_sent),
        ("bytes_received", figures.bytes_received),
        ("connected", figures.connected),
        ("refused", figures.refused),
        ("lost", figures.lost),
    ]
    .into_iter()
    .chain(device.iter().map(|(name, count)| (name.as_str(), *count)))
    {
        *totals.totals.entry(name.into()).or_default() += count;
    }
    Ok(figures)
}

fn show(since: Duration, figures: &Clients) {
    let Clients { operations, connected, refused, lost, p50, p99, max, process, .. } = figures;
    let mib = (figures.bytes_sent + figures.bytes_received) as f64 / f64::from(1 << 20) / figures.seconds;
    println!(
        "[{:4}s] {operations} operations, {mib:.1} MiB/s; p50 {:.1} ms, p99 {:.0} ms, max {:.1} s; connections {connected} made, \
         {refused} not made, {lost} lost; {} MiB resident, {} descriptors",
        since.as_secs(),
        *p50 as f64 / 1e3,
        *p99 as f64 / 1e3,
        *max as f64 / 1e6,
        process.resident_kib >> 10,
        process.descriptors,
    );
}

fn judge(
    progress: &LoadState,
    phases: &Phases,
    before: &Baseline,
    device: &Device,
    totals: &mut Totals,
) -> std::io::Result<()> {
    for ConditionalFailure { server, what } in progress.conditional_failures() {
        // The servers' side notices within seconds, and judges it.
        let unexplained = || (!phases.has_ended(&server)).then(|| what.clone());
        match figures::settled(Duration::from_secs(10), unexplained) {
            Some(what) => progress.fail(what),
            None => *totals.reasons.entry(format!("{server} ended by itself: {what}")).or_default() += 1,
        }
    }
    if progress.hung() > 0 {
        progress.fail(format!("{} clients did not end", progress.hung()));
    }
    for (client, exchanges) in &totals.exchanges {
        println!("{exchanges:6} exchanges: {client}");
        // Not even one session: each has at least as many (`Run::session`).
        if *exchanges < 20 {
            progress.fail(format!("{client}: {exchanges} exchanges show nothing"));
        }
    }
    let process = || Process::of("self").ok()?.beyond(before.process);
    // The device may still have identifiers of connections that have ended.
    let objects = || figures::more(&device.objects(), &before.objects);
    for complaint in [
        figures::settled(Duration::from_secs(60), process),
        figures::settled(Duration::from_secs(60), objects),
    ] {
        complaint.into_iter().for_each(|what| progress.fail(format!("left behind by the clients: {what}")));
    }
    if let Some(what) = figures::growth(&totals.resident_kib) {
        progress.fail(format!("the clients' memory grows: {what}"));
    }
    let after = Process::of("self")?;
    println!("at the beginning: {:?}, {:?}", before.process, before.objects);
    println!("at the end:       {after:?}, {:?}", device.objects());
    Ok(())
}

fn disturb(arguments: &Arguments, log: &Log, over: &AtomicBool, progress: &LoadState) {
    let Some(interface) = &arguments.interface else { return };
    // Each thread of both sides has a sequence of its own.
    if let Err(error) = faults::take_turns(interface, arguments.seed ^ 1, "clients", log, over) {
        progress.fail(error);
    }
}

fn kill_clients(arguments: &Arguments, log: &Log, over: &AtomicBool, progress: &LoadState) {
    let mut rng = fastrand::Rng::with_seed(arguments.seed ^ 2);
    // The command line of this program up to its subcommand.
    let mut words: Vec<_> = std::env::args_os().take_while(|word| word != "load").collect();
    if words.is_empty() || arguments.out.is_none() {
        return;
    }
    let program = words.remove(0);
    while !over.load(Ordering::Relaxed) {
        let mut command = Command::new(&program);
        command.args(&words).args(["load", "--echoes", "--seed"]).arg(rng.u32(..).to_string());
        for (server, killed) in arguments.servers() {
            let option = if killed { "--killed-server" } else { "--server" };
            command.arg(option).arg(format!("{}={}", server.name, server.address));
        }
        let mut child = match command.stdin(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => return progress.fail(format!("{}: {error}", program.to_string_lossy())),
        };
        faults::pause(Duration::from_millis(rng.u64(3000..20_000)), over);
        match child.try_wait() {
            // It is still running, as it must until it is killed.
            Ok(None) => {}
            ended => progress.fail(format!("a client that is killed ended by itself: {ended:?}")),
        }
        let what = "a process with clients is killed".into();
        log.write(&Line::Fault { at: log.now(), side: "clients".into(), what });
        let _gone_already = child.kill();
        // Until then it is a zombie (`std::process::Child`).
        let _status = child.wait();
    }
}
