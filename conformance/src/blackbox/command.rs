//! `valkey-rdma-conformance run|list|replay|report|doctor`.

mod doctor;
mod pair;
mod replay;
mod whole;

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use rdma_conn::{Descriptors, Options};
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;

use super::baseline::Baseline;
use super::bench::Side;
use super::case::{Case, role_name};
use super::own::{OwnClients, OwnServer, small};
use super::process::{AwaitedClients, ExecClients, ExecServer, RunningServer};
use super::report::{self, Format};
use super::results::{Run, Target};
use super::run::{self, NoRun, Plan};
use super::select::{Harm, Select};
use super::target::{Clients, Server};
use super::verdict::Verdict;
use crate::adversary::Lurker;
use crate::reqs::{Level, Requirements, Role};
use crate::trace::{Limits, Recorded, Recorder};

pub use doctor::{Doctor, doctor};
pub use replay::{Replay, replay};
pub use whole::whole;

/// All as it should be.
pub const DONE: u8 = 0;
/// A requirement is not met, or an expected failure has gone.
pub const FAILED: u8 = 1;
/// Nothing failed, and something could not be decided.
pub const UNDECIDED: u8 = 2;
/// The suite itself could not do its work.
pub const BROKEN: u8 = 3;
/// The command line makes no sense, or selects nothing.
pub const USAGE: u8 = 64;
/// There is no RDMA here.
pub const NO_ENVIRONMENT: u8 = 69;

/// Who is tested.
#[derive(Subcommand, Clone, Debug)]
pub enum Who {
    /// A server: the suite connects to it.
    Server(ServerRun),
    /// A client: it connects to the suite.
    Client(ClientRun),
    /// A client and a server with each other, and the suite in between, which watches both.
    Pair(pair::Pair),
}

/// What carries the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The RDMA device of this machine.
    Verbs,
    /// The fabric inside this process, with this library's own side as the target.
    Softsim,
}

/// A server under test.
#[derive(Args, Clone, Debug)]
pub struct ServerRun {
    /// It listens there already (HOST:PORT).
    #[arg(long, conflicts_with_all = ["exec", "listen"])]
    target: Option<String>,
    /// Shell command that starts it, with {host} and {port} for where it shall listen. It is started again when it has died.
    #[arg(long, requires = "listen")]
    exec: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// A client under test.
#[derive(Args, Clone, Debug)]
pub struct ClientRun {
    /// Shell command that has it connect to {host} and {port} and do what it does; started for each case. See docs/adopt.md
    /// for what it should do.
    #[arg(long, requires = "listen", conflicts_with = "wait")]
    exec: Option<String>,
    /// Connections that the command makes before the one that counts; they are served as they should be.
    #[arg(long, default_value_t = 0, requires = "exec")]
    first: u32,
    /// Somebody else has it connect, again and again.
    #[arg(long, requires = "listen")]
    wait: bool,
    #[command(flatten)]
    common: Common,
}

/// What all runs have in common.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// An address of this machine's RDMA device (ADDRESS:PORT): where a target that is started here shall listen, or where
    /// the suite waits for clients.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// What carries it; a device, unless there is neither a target nor an address.
    #[arg(long, value_enum)]
    backend: Option<Backend>,
    /// The name and version of what is tested, for the reports.
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    select: Select,
    /// Also run cases that may bring the target down. Say it twice for a target on another machine.
    #[arg(long, action = clap::ArgAction::Count)]
    allow_disruptive: u8,
    /// Seconds that the target may take for anything that must happen.
    #[arg(long, default_value_t = 5.0)]
    patience: f64,
    /// A file of expected failures, each with its reason. They must still fail.
    #[arg(long)]
    baseline: Option<PathBuf>,
    /// Take a failure of what should be, and what is only tolerated, for a failure.
    #[arg(long)]
    strict: bool,
    /// What to print.
    #[arg(long, value_enum, default_value = "pretty")]
    format: Format,
    /// A directory for results.json, junit.xml, results.tap, badge.json and report.html.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// A run that came to nothing: its exit code, and why.
type Trouble = (u8, String);

fn no_environment(reason: impl std::fmt::Display) -> Trouble {
    (NO_ENVIRONMENT, format!("cannot run here: {reason}"))
}

fn usage(reason: impl Into<String>) -> Trouble {
    (USAGE, reason.into())
}

/// Runs it. `arguments` are those of the command line behind the program's name.
pub fn run(who: &Who, arguments: &[String]) -> ExitCode {
    let outcome = match who {
        Who::Pair(pair) => return finish(pair::run(pair)),
        Who::Server(server) => test_server(server, arguments).map(|run| (run, &server.common)),
        Who::Client(client) => test_client(client, arguments).map(|run| (run, &client.common)),
    };
    finish(outcome.and_then(|(mut run, common)| conclude(&mut run, common)))
}

fn finish(outcome: Result<u8, Trouble>) -> ExitCode {
    let (code, reason) = match outcome {
        Ok(code) => return ExitCode::from(code),
        Err(trouble) => trouble,
    };
    eprintln!("{reason}");
    ExitCode::from(code)
}

/// The command that runs it again, without any selection.
fn again(arguments: &[String]) -> String {
    let mut words = vec!["valkey-rdma-conformance".to_string()];
    let mut rest = arguments.iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "--select" | "--skip" | "--out" | "--format" | "--baseline" => drop(rest.next()),
            word if ["--select=", "--skip=", "--out=", "--format=", "--baseline="]
                .iter()
                .any(|one| word.starts_with(one)) => {}
            word if word.chars().all(|one| one.is_ascii_alphanumeric() || "-_.:/[]=".contains(one)) => {
                words.push(word.into());
            }
            word => words.push(format!("'{}'", word.replace('\'', r"'\''"))),
        }
    }
    words.join(" ")
}

impl Common {
    fn patience(&self) -> Result<Duration, Trouble> {
        Duration::try_from_secs_f64(self.patience)
            .ok()
            .filter(|patience| !patience.is_zero())
            .ok_or_else(|| usage("--patience wants a number of seconds above 0"))
    }

    /// What may be done to a target; `local` says that it is on this machine.
    fn harm(&self, local: bool) -> Result<Harm, Trouble> {
        match self.allow_disruptive {
            0 => Ok(Harm::None),
            1 if !local => Err(usage(
                "the target is on another machine, which disruptive cases may harm; say --allow-disruptive twice to mean it",
            )),
            _ => Ok(Harm::Allowed),
        }
    }

    fn on_softsim(&self, has_target: bool) -> Result<bool, Trouble> {
        match self.backend {
            Some(Backend::Softsim) if has_target || self.listen.is_some() => Err(usage(
                "on softsim the target is this library's own side; a target or an address needs --backend verbs",
            )),
            Some(Backend::Verbs) if !has_target && self.listen.is_none() => {
                Err(usage("on a device, --target, or --listen with an address of it, is needed"))
            }
            Some(backend) => Ok(backend == Backend::Softsim),
            None => Ok(!has_target && self.listen.is_none()),
        }
    }

    fn target(&self, role: Role, own: bool, how: &str, backend: &str) -> Target {
        let name = match &self.name {
            Some(name) => name.clone(),
            None if own => concat!("valkey-rdma ", env!("CARGO_PKG_VERSION")).into(),
            None => how.into(),
        };
        Target { name, role, how: how.into(), backend: backend.into() }
    }
}

/// Hosts of the embedded fabric: the target's and the suite's.
fn hosts() -> (SoftSim, SocketAddr, SoftSim, SocketAddr) {
    let fabric = Fabric::new();
    let (theirs, ours) =
        (SocketAddr::from(([192, 0, 2, 1], 6379)), SocketAddr::from(([192, 0, 2, 66], 6379)));
    (fabric.host(&[theirs.ip()]), theirs, fabric.host(&[ours.ip()]), ours)
}

/// Enough of a case to see what happened.
fn recorder() -> Recorder {
    Recorder::new(Limits { entries: 120, bytes: 64 })
}

fn resolve(target: &str) -> Result<SocketAddr, Trouble> {
    let mut addresses = target.to_socket_addrs().map_err(|error| usage(format!("{target}: {error}")))?;
    addresses.next().ok_or_else(|| usage(format!("{target} has no address")))
}

/// Whether an address is one of this machine.
fn is_local(address: SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

fn test_server(options: &ServerRun, arguments: &[String]) -> Result<Run, Trouble> {
    let common = &options.common;
    let given = options.target.is_some() || options.exec.is_some();
    if common.on_softsim(given)? {
        let (theirs, address, ours, _) = hosts();
        let server = OwnServer::start(&theirs, address, small(Options::server())).map_err(no_environment)?;
        let target = common.target(Role::Server, true, "in this process", "softsim");
        let recorder = recorder();
        let ours = Recorded::new(ours, &recorder);
        return go(common, arguments, (&ours, &recorder), Side::Server(&server), target, true);
    }
    let verbs = Verbs::load().map_err(no_environment)?;
    let (server, own, local, how): (Box<dyn Server>, _, _, _) =
        match (&options.target, &options.exec, common.listen) {
            (Some(target), ..) => {
                let address = resolve(target)?;
                (Box::new(RunningServer { address }), false, is_local(address), target.clone())
            }
            (None, Some(exec), Some(listen)) => {
                let server = ExecServer::start(exec.clone(), listen.ip(), listen.port())
                    .map_err(|reason| (BROKEN, reason))?;
                (Box::new(server), false, true, exec.clone())
            }
            (None, None, Some(listen)) => {
                let server =
                    OwnServer::start(&verbs, listen, small(Options::server())).map_err(no_environment)?;
                (Box::new(server), true, true, "in this process".into())
            }
            (None, _, None) => {
                return Err(usage("what is to be tested? --target, --exec or --listen says it"));
            }
        };
    let target = common.target(Role::Server, own, &how, &server.address().ip().to_string());
    let recorder = recorder();
    let ours = Recorded::new(verbs, &recorder);
    go(common, arguments, (&ours, &recorder), Side::Server(&*server), target, local)
}

fn test_client(options: &ClientRun, arguments: &[String]) -> Result<Run, Trouble> {
    let common = &options.common;
    let given = options.exec.is_some() || options.wait;
    if common.on_softsim(given)? {
        let (theirs, _, ours, address) = hosts();
        let recorder = recorder();
        let ours = Recorded::new(ours, &recorder);
        let lurker = Lurker::new(&ours, address).map_err(no_environment)?;
        let clients = OwnClients { backend: theirs, options: small(Options::client()) };
        let target = common.target(Role::Client, true, "in this process", "softsim");
        return go(common, arguments, (&ours, &recorder), Side::Client(&lurker, &clients), target, true);
    }
    let Some(listen) = common.listen else {
        return Err(usage("where shall clients connect? --listen says it"));
    };
    let verbs = Verbs::load().map_err(no_environment)?;
    let recorder = recorder();
    let ours = Recorded::new(verbs.clone(), &recorder);
    let lurker = Lurker::new(&ours, listen).map_err(no_environment)?;
    let (clients, how): (Box<dyn Clients>, _) = match &options.exec {
        Some(command) => {
            (Box::new(ExecClients { command: command.clone(), first: options.first }), command.clone())
        }
        None if options.wait => (Box::new(AwaitedClients), "awaited".into()),
        None => (
            Box::new(OwnClients { backend: verbs.clone(), options: small(Options::client()) }),
            "in this process".into(),
        ),
    };
    let target = common.target(Role::Client, !given, &how, &listen.ip().to_string());
    // Whoever connects is not protected by where it is.
    go(common, arguments, (&ours, &recorder), Side::Client(&lurker, &*clients), target, !options.wait)
}

fn go<B: Descriptors>(
    common: &Common,
    arguments: &[String],
    (backend, recorder): (&B, &Recorder),
    side: Side<'_, B>,
    target: Target,
    local: bool,
) -> Result<Run, Trouble> {
    let cases: Vec<Case<B>> = common.select.cases(target.role);
    if cases.is_empty() {
        return Err(usage("nothing is selected; `list` shows what there is"));
    }
    let again = again(arguments);
    let plan = Plan {
        patience: common.patience()?,
        harm: common.harm(local)?,
        again: &again,
        arguments,
        recorder: Some(recorder),
    };
    let bar = bar(cases.len() as u64);
    let run = run::run(&cases, backend, side, &plan, target, |case, result| match result {
        None => bar.set_message(case.to_string()),
        Some(result) => {
            if !result.verdict.is_pass() && result.verdict != Verdict::Skipped {
                bar.suspend(|| eprintln!("{:14} {case}: {}", result.verdict, result.reason));
            }
            bar.inc(1);
        }
    });
    bar.finish_and_clear();
    run.map_err(|NoRun::Insane(reason)| (BROKEN, NoRun::Insane(reason).to_string()))
}

/// A bar on a terminal; nothing elsewhere.
fn bar(length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:32} [{wide_bar}] {pos}/{len} {elapsed:>4}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}

/// Judges a run, writes what is wanted, and says how it went.
fn conclude(run: &mut Run, common: &Common) -> Result<u8, Trouble> {
    let baseline = common.baseline.as_deref().map(Baseline::read).transpose().map_err(usage)?;
    let stale = baseline.map(|baseline| baseline.apply(run)).unwrap_or_default();
    print!("{}", report::text(run, common.format, common.strict).map_err(|reason| (BROKEN, reason))?);
    if let Some(out) = &common.out {
        write_all(run, out)?;
        eprintln!("written to {}", out.display());
    }
    stale.iter().for_each(|stale| eprintln!("{stale}"));
    Ok(if stale.is_empty() { code(run, common.strict) } else { FAILED })
}

/// Writes a run in all formats.
fn write_all(run: &Run, out: &Path) -> Result<(), Trouble> {
    let told = |error: std::io::Error| (BROKEN, format!("{}: {error}", out.display()));
    std::fs::create_dir_all(out).map_err(told)?;
    for (file, format) in [
        ("results.json", Format::Json),
        ("junit.xml", Format::Junit),
        ("results.tap", Format::Tap),
        ("badge.json", Format::Badge),
        ("report.html", Format::Html),
    ] {
        let text = report::text(run, format, false).map_err(|reason| (BROKEN, reason))?;
        std::fs::write(out.join(file), text).map_err(told)?;
    }
    Ok(())
}

/// What a run comes down to.
pub(super) fn code(run: &Run, strict: bool) -> u8 {
    let any = |test: &dyn Fn(&super::results::CaseResult) -> bool| run.results.iter().any(test);
    if any(&|result| result.is_scored_failure(strict)) {
        FAILED
    } else if any(&|result| result.verdict == Verdict::Broken) {
        BROKEN
    } else if any(&|result| result.verdict == Verdict::Inconclusive) {
        UNDECIDED
    } else {
        DONE
    }
}

/// What there is.
#[derive(Args, Clone, Debug)]
pub struct List {
    /// Only cases for servers, or for clients.
    #[arg(long)]
    role: Option<Role>,
    #[command(flatten)]
    select: Select,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists cases.
pub fn list(options: &List) -> ExitCode {
    let roles = options.role.map_or_else(|| vec![Role::Server, Role::Client], |role| vec![role]);
    let cases: Vec<Case<SoftSim>> = roles.into_iter().flat_map(|role| options.select.cases(role)).collect();
    if cases.is_empty() {
        return finish(Err(usage("nothing is selected")));
    }
    let requirements = Requirements::built_in();
    if options.json {
        let all: Vec<_> = cases.iter().map(|case| described(case, &requirements)).collect();
        println!("{:#}", serde_json::Value::from(all));
    } else {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_header([
            "case",
            "of",
            "level",
            "requirements",
            "what the target is shown, and what it has to make of it",
        ]);
        for case in &cases {
            let tags: String = case.tags.iter().map(|tag| format!(" [{}]", tag.name())).collect();
            table.add_row([
                case.id.to_string(),
                role_name(case.role).into(),
                case.level(&requirements).to_string(),
                case.requirements.join(" "),
                format!("{}. {}{tags}", case.intent, case.expectation),
            ]);
        }
        println!("{table}");
        let count = |role| cases.iter().filter(|case| case.role == role).count();
        println!(
            "{} cases: {} for servers, {} for clients",
            cases.len(),
            count(Role::Server),
            count(Role::Client)
        );
    }
    ExitCode::from(DONE)
}

fn described<B: Descriptors>(case: &Case<B>, requirements: &Requirements) -> serde_json::Value {
    serde_json::json!({
        "id": case.id,
        "role": role_name(case.role),
        "level": case.level(requirements).to_string(),
        "intent": case.intent,
        "expectation": case.expectation,
        "requirements": case.requirements,
        "tags": case.tags.iter().map(|tag| tag.name()).collect::<Vec<_>>(),
    })
}

/// Reports from results.
#[derive(Args, Clone, Debug)]
pub struct Report {
    /// What to make. HTML sets several runs side by side; the others take one.
    #[arg(value_enum)]
    format: Format,
    /// results.json of runs.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Where to write it, instead of printing it.
    #[arg(long, short)]
    out: Option<PathBuf>,
}

/// Makes a report.
pub fn make_report(options: &Report) -> ExitCode {
    let make = || -> Result<u8, Trouble> {
        let runs: Vec<Run> =
            options.files.iter().map(|file| Run::read(file)).collect::<Result<_, _>>().map_err(usage)?;
        let text = match &runs[..] {
            runs if options.format == Format::Html => report::html(runs),
            [run] => report::text(run, options.format, false),
            _ => return Err(usage("only HTML takes several runs")),
        };
        let text = text.map_err(|reason| (BROKEN, reason))?;
        match &options.out {
            None => print!("{text}"),
            Some(out) => {
                std::fs::write(out, text).map_err(|error| (BROKEN, format!("{}: {error}", out.display())))?;
            }
        }
        Ok(DONE)
    };
    finish(make())
}

/// Parses a command line of `run`.
fn parse(arguments: &[String]) -> Result<Who, String> {
    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(subcommand)]
        command: Only,
    }
    #[derive(Subcommand)]
    enum Only {
        Run {
            #[command(subcommand)]
            who: Who,
        },
    }
    let Line { command: Only::Run { who } } =
        Line::try_parse_from(arguments).map_err(|error| error.to_string())?;
    Ok(who)
}

impl super::results::CaseResult {
    /// A failure that counts.
    pub fn is_scored_failure(&self, strict: bool) -> bool {
        self.expected.is_none()
            && match self.verdict {
                Verdict::Fail => strict || self.level == Level::Must || self.is_harm(),
                Verdict::PassLenient => strict,
                _ => false,
            }
    }

    /// A failure of more than the requirement: whatever its level is, this must not be.
    fn is_harm(&self) -> bool {
        use super::verdict::Cause::{Bystander, Died, Hung, Refused};
        matches!(self.cause, Some(Bystander | Died | Hung | Refused))
    }
}
