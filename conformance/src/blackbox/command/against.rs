//! Runs against the target of the command line.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressStyle};
use rdma_conn::{Descriptors, Options};
use rdma_softsim::{Fabric, SoftSim};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::options::{ClientRun, Common, ServerRun, again, one_command};
use super::{CommandError, device, no_environment, usage};
use crate::blackbox::builtin::{BuiltInClients, BuiltInServer, small};
use crate::blackbox::case::Case;
use crate::blackbox::context::Side;
use crate::blackbox::process::{AwaitedClients, ExecClients, ExecServer, RunningServer};
use crate::blackbox::results::{CaseResult, Run, Target};
use crate::blackbox::run::{self, Plan, RECORDED};
use crate::blackbox::session::legal;
use crate::blackbox::target::{TargetClients, TargetServer};
use crate::exit::{BROKEN, NOTHING};
use crate::requirements::Role;
use crate::tester::Listener;
use intercept::mistakes;
use intercept::trace::{Recorded, Recorder};
use suite::Verdict;
use suite::terminal;

fn hosts() -> (SoftSim, SocketAddr, SoftSim, SocketAddr) {
    let fabric = Fabric::new();
    let (theirs, ours) =
        (SocketAddr::from(([192, 0, 2, 1], 6379)), SocketAddr::from(([192, 0, 2, 66], 6379)));
    (fabric.host(&[theirs.ip()]), theirs, fabric.host(&[ours.ip()]), ours)
}

/// Returns the address of a target.
///
/// # Errors
/// It has none: [`crate::exit::USAGE`].
pub fn resolve(target: &str) -> Result<SocketAddr, CommandError> {
    // Not repeated, because it may contain a password.
    if target.contains('@') {
        return Err(usage("a target is HOST:PORT, without a user and a password"));
    }
    let mut addresses = target.to_socket_addrs().map_err(|error| usage(format!("{target}: {error}")))?;
    addresses.next().ok_or_else(|| usage(format!("{target} has no address")))
}

fn is_local(address: SocketAddr) -> bool {
    UdpSocket::bind((address.ip(), 0)).is_ok()
}

pub(super) fn server(options: &ServerRun, arguments: &[String]) -> Result<Run, CommandError> {
    let common = &options.common;
    options.exec.as_deref().map_or(Ok(()), one_command)?;
    let given = options.target.is_some() || options.exec.is_some();
    if common.on_softsim(given)? {
        let (theirs, address, ours, _) = hosts();
        let (mistake, options) = common.own(Options::default());
        let server = match mistake {
            None => BuiltInServer::start(&theirs, address, options),
            some => BuiltInServer::start(&mistakes::host(theirs, some), address, options),
        };
        let server = server.map_err(no_environment)?;
        let target = common.target(Role::Server, true, "in this process", "softsim");
        let recorder = Recorder::new(RECORDED);
        let ours = Recorded::new(ours, &recorder);
        return go(common, arguments, (&ours, &recorder), Side::Server(&server), target, true);
    }
    let running = options.target.as_deref().map(resolve).transpose()?;
    let local = running.is_none_or(is_local);
    // Checked before any case, with RDMA or without.
    common.harm(local)?;
    let verbs = device()?;
    let (server, own, how): (Box<dyn TargetServer>, _, _) = match (running, &options.exec, common.listen) {
        (Some(address), ..) => {
            (Box::new(RunningServer { address }), false, options.target.clone().unwrap_or_default())
        }
        (None, Some(exec), Some(listen)) => {
            let server = ExecServer::start(exec.clone(), listen.ip(), listen.port())
                .map_err(|reason| (BROKEN, reason))?;
            (Box::new(server), false, exec.clone())
        }
        (None, None, Some(listen)) => {
            let server =
                BuiltInServer::start(&verbs, listen, small(Options::default())).map_err(no_environment)?;
            (Box::new(server), true, "in this process".into())
        }
        (None, _, None) => {
            return Err(usage("what is to be tested? --target, --exec or --listen says it"));
        }
    };
    let target = common.target(Role::Server, own, &how, &server.address().ip().to_string());
    let recorder = Recorder::new(RECORDED);
    let ours = Recorded::new(verbs, &recorder);
    go(common, arguments, (&ours, &recorder), Side::Server(&*server), target, local)
}

pub(super) fn client(options: &ClientRun, arguments: &[String]) -> Result<Run, CommandError> {
    let common = &options.common;
    options.exec.as_deref().map_or(Ok(()), one_command)?;
    let given = options.exec.is_some() || options.wait;
    if common.on_softsim(given)? {
        let (theirs, _, ours, address) = hosts();
        let recorder = Recorder::new(RECORDED);
        let ours = Recorded::new(ours, &recorder);
        let listener = Listener::new(&ours, address).map_err(no_environment)?;
        let (mistake, options) = common.own(Options::default());
        let clients: Box<dyn TargetClients> = match mistake {
            None => Box::new(BuiltInClients::new(theirs, options)),
            some => Box::new(BuiltInClients::new(mistakes::host(theirs, some), options)),
        };
        let target = common.target(Role::Client, true, "in this process", "softsim");
        return go(common, arguments, (&ours, &recorder), Side::Client(&listener, &*clients), target, true);
    }
    let Some(listen) = common.listen else {
        return Err(usage("where shall clients connect? --listen says it"));
    };
    // With `--wait`, the client's location gives no protection.
    let local = !options.wait;
    common.harm(local)?;
    let verbs = device()?;
    let recorder = Recorder::new(RECORDED);
    let ours = Recorded::new(verbs.clone(), &recorder);
    let listener = Listener::new(&ours, listen).map_err(no_environment)?;
    let (clients, how): (Box<dyn TargetClients>, _) = match &options.exec {
        Some(command) => {
            (Box::new(ExecClients { command: command.clone(), first: options.first }), command.clone())
        }
        None if options.wait => (Box::new(AwaitedClients), "awaited".into()),
        None => (
            Box::new(BuiltInClients::new(verbs.clone(), small(Options::default()))),
            "in this process".into(),
        ),
    };
    let target = common.target(Role::Client, !given, &how, &listen.ip().to_string());
    go(common, arguments, (&ours, &recorder), Side::Client(&listener, &*clients), target, local)
}

fn go<B: Descriptors>(
    common: &Common,
    arguments: &[String],
    (backend, recorder): (&B, &Recorder),
    side: Side<'_, B>,
    target: Target,
    local: bool,
) -> Result<Run, CommandError> {
    let again = again(arguments);
    let interrupted = interrupts().map_err(|error| (BROKEN, format!("no signal can be awaited: {error}")))?;
    let plan = Plan {
        patience: common.patience()?,
        harm: common.harm(local)?,
        again: &again,
        arguments,
        selected: common.select.names(),
        recorder: Some(recorder),
        interrupted: Some(&interrupted),
        until: common.until()?,
    };
    let role = target.role;
    let cases: Vec<Case<'_, B>> = match common.random {
        None => common.select.cases(role),
        Some(count) => legal::cases(role, common.seed, count, common.draws.unwrap_or(legal::ALL_DRAWS)),
    };
    if cases.is_empty() {
        return Err((NOTHING, "nothing is selected; `list` shows what there is".into()));
    }
    let bar = bar(cases.len() as u64);
    let mut causes: Vec<(String, String)> = Vec::new();
    let mut run = run::run(&cases, backend, side, &plan, target, |case, result| match result {
        None => bar.set_message(case.to_string()),
        Some(result) => {
            if !result.verdict.is_pass() && result.verdict != Verdict::Skipped {
                let cause = result.cause_in_words();
                let known = causes.iter().find(|(known, _)| *known == cause);
                let why = known.map_or_else(|| result.why(), |(_, first)| format!("as {first}"));
                let line = format!("{:14} {case}: {why}", result.verdict);
                if known.is_none() {
                    causes.push((cause, case.to_string()));
                }
                bar.suspend(|| terminal::complain(&line, 15));
            }
            bar.inc(1);
        }
    });
    bar.finish_and_clear();
    // A failed probe is no trace.
    let is_probed = run.results.first().is_none_or(|first| first.id != run::SANITY);
    if is_probed && common.random.is_some() {
        run.results = legal::summed(run.results, common.seed, common.draws, &again);
        if common.minutes.is_some() {
            let target = run.target.clone();
            let plan = Plan { until: None, ..plan };
            shrink(&mut run.results, &again, |seed, draws| {
                let case = legal::cases(role, seed, 1, draws);
                let results = run::run(&case, backend, side, &plan, target.clone(), |_, _| {}).results;
                results.into_iter().find(|result| result.verdict == Verdict::Fail)
            });
        }
    }
    Ok(run)
}

/// Replaces the first failure by that of the peer with the fewest draws that still fails.
/// `failure` runs the peer of a seed with so many draws.
fn shrink(results: &mut [CaseResult], again: &str, mut failure: impl FnMut(u64, u64) -> Option<CaseResult>) {
    let failed = results.iter_mut().find(|result| result.verdict == Verdict::Fail);
    let Some((first, seed)) = failed.and_then(|first| legal::seed(&first.id).map(|seed| (first, seed)))
    else {
        return;
    };
    let mut smallest = None;
    let fewest = legal::fewest_draws(|draws| {
        let failed = failure(seed, draws);
        let fails = failed.is_some();
        // Those that fail come with ever fewer draws.
        smallest = failed.or_else(|| smallest.take());
        fails
    });
    if let (Some(draws), Some(smallest)) = (fewest, smallest) {
        let repro = format!("{again} --random 1 --seed {seed} --draws {draws}");
        *first = CaseResult { id: first.id.clone(), repro, ..smallest };
    }
}

/// Returns a flag that the first Ctrl-C, or SIGTERM, sets. The second ends the program at once.
fn interrupts() -> std::io::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_default(signal, Arc::clone(&interrupted))?;
        flag::register(signal, Arc::clone(&interrupted))?;
    }
    Ok(interrupted)
}

fn bar(length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:32} [{wide_bar}] {pos}/{len} {elapsed:>4}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}
