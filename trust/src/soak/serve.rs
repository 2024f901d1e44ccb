//! The servers' side: runs servers, kills some, and reports what the others hold at the end.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use fastrand::Rng;

use super::faults;
use super::figures::{self, Device, Line, Log, Objects, Process};
use super::phases::{Phase, Phases};

/// A server whose predecessor was killed may find its port taken for a while.
const STARTS: u32 = 10;

/// Arguments of the servers' side.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// A server that is never killed (NAME=SHELL-COMMAND); repeat it for more.
    #[arg(long)]
    server: Vec<Program>,
    /// A server that is killed from time to time.
    #[arg(long)]
    killed_server: Vec<Program>,
    /// A server that is not judged, by name: other people's programs. Its resources are logged, and
    /// if it ends on its own, that is announced.
    #[arg(long)]
    not_ours: Vec<String>,
    /// How long servers are killed and the network gets faults, in seconds.
    #[arg(long, default_value_t = 300)]
    seconds: u64,
    /// The seed of all pseudo-random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds between two lines of figures.
    #[arg(long, default_value_t = 60)]
    interval: u64,
    /// The device whose objects are counted.
    #[arg(long, default_value = "rxe1")]
    device: String,
    /// The interface whose network gets faults; none without it.
    #[arg(long)]
    interface: Option<String>,
    /// The folder shared with the clients' side, for its phases, `servers.jsonl` and the servers'
    /// output.
    #[arg(long)]
    out: PathBuf,
}

#[derive(Clone, Debug)]
struct Program {
    name: String,
    command: String,
}

impl std::str::FromStr for Program {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, command) = text.split_once('=').ok_or("expected NAME=SHELL-COMMAND")?;
        Ok(Self { name: name.into(), command: command.into() })
    }
}

struct ServerProcess {
    program: Program,
    child: Child,
    killed: bool,
    /// Starts since it last ran for a while.
    starts: u32,
    begun: Instant,
    resident_kib: Vec<u64>,
}

impl ServerProcess {
    fn start(program: &Program, killed: bool, out: &Path) -> std::io::Result<Self> {
        let child = spawn(program, out)?;
        let begun = Instant::now();
        Ok(Self { program: program.clone(), child, killed, starts: 1, begun, resident_kib: Vec::new() })
    }

    fn holds(&self) -> std::io::Result<Process> {
        Process::of(&self.child.id().to_string())
    }

    fn objects(&self) -> Objects {
        figures::objects_of(self.child.id())
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        // Otherwise it stays as a zombie (`wait(2)`).
        let _status = self.child.wait();
    }
}

fn spawn(program: &Program, out: &Path) -> std::io::Result<Child> {
    // Appended: a server that is started again continues its log.
    let said = File::options().append(true).create(true).open(out.join(format!("{}.log", program.name)))?;
    let mut command = Command::new("sh");
    // `exec`, so that a kill hits the server and not a shell.
    command.args(["-c", &format!("exec {}", program.command)]);
    command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said).spawn()
}

pub(super) fn run(arguments: &Arguments) -> ExitCode {
    match soak(arguments) {
        Ok(failures) => super::conclude("servers", &failures),
        Err(error) => super::cannot_run(error),
    }
}

fn soak(arguments: &Arguments) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let out = &arguments.out;
    let phases = Phases(out.clone());
    let steady = arguments.server.iter().map(|program| (program, false));
    let mut servers = steady
        .chain(arguments.killed_server.iter().map(|program| (program, true)))
        .map(|(program, killed)| ServerProcess::start(program, killed, out))
        .collect::<Result<Vec<_>, _>>()?;
    // Clients start when every server accepts connections: each has a listening identifier then.
    let wanted = servers.len() as u64;
    let listening = || {
        let count = figures::listening();
        (count < wanted).then(|| format!("{count} listen"))
    };
    if let Some(what) = figures::settled(Duration::from_secs(60), listening) {
        return Err(format!("of {wanted} servers {what}").into());
    }
    phases.tell(Phase::Ready)?;
    phases.wait(Phase::Warm, Duration::from_secs(120))?;
    // The first clients have left. The resources of each server now are its baseline.
    thread::sleep(Duration::from_secs(3));
    let before: Vec<_> = servers.iter().map(|server| (server.holds(), server.objects())).collect();
    phases.tell(Phase::Measured)?;
    let log = Arc::new(Log::create(&out.join("servers.jsonl"))?);

    let over = Arc::new(AtomicBool::new(false));
    let disturber = arguments.interface.clone().map(|interface| {
        let (log, over, seed) = (Arc::clone(&log), Arc::clone(&over), arguments.seed ^ 3);
        thread::spawn(move || faults::take_turns(&interface, seed, "servers", &log, &over))
    });
    let mut failures = Vec::new();
    attend(arguments, &phases, &mut servers, &log, &over, &mut failures)?;
    over.store(true, Ordering::Relaxed);
    match disturber.map(thread::JoinHandle::join) {
        Some(Ok(Err(error))) => failures.push(error),
        Some(Err(_)) => failures.push("a thread of the soak itself panicked".into()),
        Some(Ok(Ok(()))) | None => {}
    }
    for (server, (process, objects)) in servers.iter().zip(&before) {
        let ours = !arguments.not_ours.contains(&server.program.name);
        failures.extend(process.as_ref().ok().and_then(|process| judge(server, *process, objects, ours)));
    }
    let (at, side, totals) = (log.now(), "servers".to_string(), Device(arguments.device.clone()).counters());
    log.write(&Line::Verdict { at, side, failures: failures.clone(), totals });
    Ok(failures)
}

/// Kills and starts servers, and logs their resources, until the clients are done.
fn attend(
    arguments: &Arguments,
    phases: &Phases,
    servers: &mut [ServerProcess],
    log: &Log,
    over: &AtomicBool,
    failures: &mut Vec<String>,
) -> std::io::Result<()> {
    let mut rng = Rng::with_seed(arguments.seed ^ 4);
    let (begun, mut measured) = (Instant::now(), Instant::now());
    let mut kill_at = Duration::from_secs(rng.u64(15..30));
    // Only for the case that the clients' side is gone: it has limits of its own for everything.
    let limit = Duration::from_secs(arguments.seconds + 900);
    while !phases.told(Phase::Ended) {
        if begun.elapsed() > limit {
            failures.push("the clients did not end".into());
            return Ok(());
        }
        thread::sleep(Duration::from_millis(200));
        let quiet = begun.elapsed() >= Duration::from_secs(arguments.seconds);
        if quiet {
            over.store(true, Ordering::Relaxed);
        }
        if !quiet && begun.elapsed() >= kill_at {
            kill_at = begun.elapsed() + Duration::from_secs(rng.u64(15..30));
            let killed: Vec<_> = servers.iter_mut().filter(|server| server.killed).collect();
            if let Some(server) = rng.choice(killed) {
                kill(server, &mut rng, log, &arguments.out)?;
            }
        }
        for server in &mut *servers {
            look_after(server, arguments, phases, failures)?;
        }
        if measured.elapsed() >= Duration::from_secs(arguments.interval) {
            measured = Instant::now();
            for server in &mut *servers {
                if let Ok(process) = server.holds() {
                    server.resident_kib.push(process.resident_kib);
                    let (at, name) = (log.now(), server.program.name.clone());
                    log.write(&Line::Server { at, name, process });
                }
            }
        }
    }
    Ok(())
}

fn kill(server: &mut ServerProcess, rng: &mut Rng, log: &Log, out: &Path) -> std::io::Result<()> {
    let name = &server.program.name;
    log.write(&Line::Fault { at: log.now(), side: "servers".into(), what: format!("{name} is killed") });
    server.child.kill()?;
    server.child.wait()?;
    // Meanwhile clients find no listener.
    thread::sleep(Duration::from_millis(rng.u64(100..4000)));
    server.child = spawn(&server.program, out)?;
    (server.starts, server.begun) = (1, Instant::now());
    Ok(())
}

/// Reports servers that ended without [`kill`]. One that was just started again may fail at first.
/// An end of other people's servers is announced, not judged.
fn look_after(
    server: &mut ServerProcess,
    arguments: &Arguments,
    phases: &Phases,
    failures: &mut Vec<String>,
) -> std::io::Result<()> {
    let Some(status) = server.child.try_wait()? else { return Ok(()) };
    let (name, lasted) = (&server.program.name, server.begun.elapsed());
    let young = lasted < Duration::from_secs(5);
    if !(server.killed && young && server.starts < STARTS) {
        phases.tell_end_of(name)?;
        let what = format!("{name} ended by itself after {} s: {status} (see its log)", lasted.as_secs());
        if arguments.not_ours.contains(name) {
            println!("{what} (told, not judged: it is not ours)");
        } else {
            failures.push(what);
        }
    }
    // Its port may be taken for a moment; see `STARTS`.
    thread::sleep(Duration::from_millis(500));
    server.child = spawn(&server.program, &arguments.out)?;
    server.starts = if young { server.starts + 1 } else { 1 };
    server.begun = Instant::now();
    Ok(())
}

/// Returns what our server still holds, and must not, when all clients have left.
fn judge(server: &ServerProcess, before: Process, objects: &Objects, ours: bool) -> Option<String> {
    let name = &server.program.name;
    let left = || {
        let Ok(now) = server.holds() else { return Some("it is gone".into()) };
        now.beyond(before).or_else(|| figures::more(&server.objects(), objects))
    };
    // No minute is spent on others: what they keep is told, not judged.
    let left = if ours { figures::settled(Duration::from_secs(60), left) } else { left() };
    println!("{name}: at the beginning {before:?}, {objects:?}");
    println!("{name}: at the end       {:?}, {:?}", server.holds().unwrap_or_default(), server.objects());
    let left = left.map(|what| format!("left behind by the clients of {name}: {what}"));
    // A killed server starts with a new process each time.
    let grown = if server.killed { None } else { figures::growth(&server.resident_kib) };
    let wrong = left.or_else(|| grown.map(|what| format!("the memory of {name} grows: {what}")))?;
    if ours {
        return Some(wrong);
    }
    println!("{wrong} (told, not judged: it is not ours)");
    None
}
