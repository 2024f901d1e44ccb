//! Runs cases: the sanity case first and last, and after each case a check of the server and of a
//! bystander. If the sanity case fails at first, only cases that were selected by name are run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use rdma_conn::Descriptors;

use super::case::{Case, Tag};
use super::context::{Context, Side};
use super::environment::Environment;
use super::hints;
use super::results::Teardown;
use super::results::{CaseResult, FORMAT, GONE_SINCE, INTERRUPTED, Run, Suite, Target, UNPROBED};
use super::select::Harm;
use super::session::Session;
use super::target::{TargetServer, with_last_lines};
use crate::client::Failure;
use crate::requirements::Requirements;
use crate::tester::{Peer, Shape};
use intercept::trace::recording::Limits;
use intercept::trace::{Recorder, Recording, timeline};
use suite::{Cause, Judged, Stop, Verdict};

/// The sanity case, run first and last.
pub const SANITY: &str = "conn.plain";

/// The limits of a case's recording.
pub const RECORDED: Limits = Limits { entries: 120, bytes: 64 };

/// How long a server may take to start.
pub(super) const STARTING: Duration = Duration::from_secs(10);
/// How long a process may take to end after its connections.
const DYING: Duration = Duration::from_millis(500);

/// The settings of a run.
#[allow(missing_docs)] // the others are plain
pub struct Plan<'a> {
    pub patience: Duration,
    pub harm: Harm,
    /// The command that repeats one case, without the case.
    pub again: &'a str,
    pub arguments: &'a [String],
    /// Whether the cases were selected by name. They run even if the sanity case failed.
    pub selected: bool,
    /// Records the suite's side, for the timelines of cases that did not pass.
    pub recorder: Option<&'a Recorder>,
    /// Set when the run must end. The results so far are its result.
    pub interrupted: Option<&'a AtomicBool>,
    /// When no further case begins. Those that did not are no part of the result.
    pub until: Option<Instant>,
}

impl Plan<'_> {
    /// Returns a plan by which the target may be harmed, and nothing is recorded.
    #[must_use]
    pub const fn harmful(patience: Duration) -> Self {
        Self {
            patience,
            harm: Harm::Allowed,
            again: "",
            arguments: &[],
            selected: false,
            recorder: None,
            interrupted: None,
            until: None,
        }
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
    }
}

/// Runs cases against a target. Calls `progress` before and after each.
pub fn run<'a, B: Descriptors>(
    cases: &[Case<'a, B>],
    backend: &'a B,
    side: Side<'a, B>,
    plan: &'a Plan<'a>,
    target: Target,
    mut progress: impl FnMut(&str, Option<&CaseResult>),
) -> Run {
    let mut suite = Runner::new(backend, side, plan);
    let begun = Instant::now();
    let environment = Environment::here();
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut results = Vec::with_capacity(cases.len());
    let mut neighbour = Bystander::default();
    progress(SANITY, None);
    let failed = suite.probe();
    if let Some(failed) = &failed {
        progress(SANITY, Some(failed));
        results.push(failed.clone());
    }
    for case in cases.iter().filter(|case| failed.is_none() || case.id != SANITY) {
        if plan.until.is_some_and(|until| Instant::now() >= until) && !results.is_empty() {
            break;
        }
        progress(case.id, None);
        let result = match &failed {
            Some(failed) if !plan.selected => {
                CaseResult { reason: format!("{UNPROBED}{}", failed.reason), ..suite.blank(case) }
            }
            _ if plan.is_interrupted() => interrupted(&suite, case),
            _ => match suite.case(case, &mut neighbour) {
                // The signal may have ended the target, too.
                _ if plan.is_interrupted() => interrupted(&suite, case),
                result => result,
            },
        };
        progress(case.id, Some(&result));
        results.push(result);
    }
    drop(neighbour);
    // Damage may show only now.
    if failed.is_none()
        && suite.gone.is_none()
        && !plan.is_interrupted()
        && let Err(stop) = suite.sanity()
        && let Some(last) = results.last_mut()
    {
        fail(last, stop.cause, format!("after all cases, {SANITY}: {}", stop.reason));
    }
    let suite =
        Suite { version: env!("CARGO_PKG_VERSION").into(), requirements: suite.requirements.iter().count() };
    let arguments = plan.arguments.to_vec();
    Run {
        format: FORMAT,
        target,
        suite,
        arguments,
        begun: since,
        took: begun.elapsed().as_secs_f64(),
        environment: Some(environment),
        results,
        withheld: None,
    }
}

fn interrupted<'a, B: Descriptors>(suite: &Runner<'a, B>, case: &Case<'a, B>) -> CaseResult {
    CaseResult { reason: INTERRUPTED.into(), ..suite.blank(case) }
}

/// Runs cases, one by one.
pub struct Runner<'a, B: Descriptors> {
    backend: &'a B,
    side: Side<'a, B>,
    plan: &'a Plan<'a>,
    requirements: Requirements,
    /// The case since which the target is gone.
    gone: Option<String>,
    /// Whether a new connection shows health. Not if the sanity case failed at first.
    is_sane: bool,
}

fn fail(result: &mut CaseResult, cause: Cause, reason: String) {
    if result.verdict == Verdict::Fail {
        result.reason = format!("{}; {reason}", result.reason);
    } else {
        result.reason = reason;
    }
    result.verdict = Verdict::Fail;
    result.cause = Some(cause);
}

/// Returns why a neighbour or a new connection is not served, unless it is known already.
fn why(known: &str, reason: &str) -> String {
    match hints::cause(known) == hints::cause(reason) {
        true => " either".into(),
        false => format!(": {reason}"),
    }
}

impl<'a, B: Descriptors> Runner<'a, B> {
    /// Makes a runner for a target.
    pub fn new(backend: &'a B, side: Side<'a, B>, plan: &'a Plan<'a>) -> Self {
        Self { backend, side, plan, requirements: Requirements::built_in(), gone: None, is_sane: true }
    }

    /// Runs one case, without the sanity case before it.
    pub fn only(&mut self, case: &Case<'a, B>) -> CaseResult {
        self.case(case, &mut Bystander::default())
    }

    fn context(&self, case: &'static str) -> Context<'a, B> {
        Context::new(self.backend, self.plan.patience, case, self.side)
    }

    /// Runs the sanity case before all others. Returns its result if it failed.
    fn probe(&mut self) -> Option<CaseResult> {
        let begun = Instant::now();
        self.record();
        let context = self.context(SANITY);
        let stop = self.sanity_in(&context).err()?;
        self.is_sane = false;
        let role = Some(context.role());
        let case = super::cases::<B>().into_iter().find(|case| case.role == role && case.id == SANITY)?;
        let mut result = self.blank(&case);
        // A target that reports that it cannot do this cannot be tested.
        result.verdict = if stop.verdict.is_tried() { stop.verdict } else { Verdict::Fail };
        result.cause = Some(stop.cause);
        result.teardown = context.teardown.get();
        let printed = match self.side {
            Side::Server(server) => server.last_lines(),
            Side::Client(..) => context.printed.take(),
        };
        let is_told = stop.reason.contains(&printed);
        result.reason = if is_told { stop.reason } else { with_last_lines(stop.reason, &printed) };
        let recording = self.record();
        result.hint = recording.as_ref().and_then(|recording| self.hint(recording, &result, false));
        result.timeline = recording.map(|recording| timeline::render(&recording));
        result.took = begun.elapsed().as_secs_f64();
        if let Side::Server(server) = self.side
            && self.plan.selected
            && server.death(Duration::ZERO).is_some()
        {
            self.start_again(&case, server, &mut Bystander::default());
        }
        Some(result)
    }

    fn sanity(&self) -> Judged {
        self.sanity_in(&self.context(SANITY))
    }

    fn sanity_in(&self, context: &Context<'a, B>) -> Judged {
        // A just started server may not listen yet.
        let deadline = Instant::now() + self.plan.patience.max(STARTING);
        loop {
            let judged = context.open().and_then(Session::unharmed);
            let (Err(stop), Side::Server(server)) = (&judged, self.side) else { return judged };
            if let Some(death) = server.death(DYING) {
                return Err(Stop::died(format!("the server's process ended: {death}")));
            }
            if stop.cause != Cause::Refused || Instant::now() >= deadline {
                return judged;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn case(&mut self, case: &Case<'a, B>, neighbour: &mut Bystander<B>) -> CaseResult {
        let begun = Instant::now();
        let mut result = self.blank(case);
        if let Some(since) = &self.gone {
            result.reason = format!("{GONE_SINCE}{since}");
            return result;
        }
        if let Some(reason) = self.plan.harm.forbids(case) {
            result.reason = reason.into();
            return result;
        }
        let context = self.context(case.id);
        if self.is_sane {
            neighbour.connect(&context);
        }
        self.record();
        let judged = (case.run)(&context, &ProgressBar::hidden());
        let recording = self.record();
        result.teardown = context.teardown.get();
        match judged {
            Ok(passed) => {
                result.verdict = passed.verdict;
                result.reason = passed.note;
            }
            Err(stop) => {
                result.verdict = stop.verdict;
                result.cause = Some(stop.cause);
                result.reason = stop.reason;
            }
        }
        if result.verdict.is_pass()
            && let Some(breach) = context.breaches.borrow().first()
        {
            fail(&mut result, Cause::Requirement, format!("{}: {}", breach.requirement, breach.what));
        }
        let held = neighbour.is_connected();
        result.hint = recording.as_ref().and_then(|recording| self.hint(recording, &result, held));
        if let Side::Server(server) = self.side {
            self.look_around(case, server, neighbour, &mut result);
        }
        if !result.verdict.is_pass() {
            result.timeline = recording.map(|recording| timeline::render(&recording));
        }
        result.took = begun.elapsed().as_secs_f64();
        result
    }

    fn hint(&self, recording: &Recording, result: &CaseResult, held: bool) -> Option<String> {
        let is_wanted = result.verdict.is_tried() && !result.verdict.is_pass();
        let role = self.context(SANITY).role();
        is_wanted.then(|| hints::of(recording, role, &result.reason, held)).flatten()
    }

    fn record(&self) -> Option<Recording> {
        self.plan.recorder.map(Recorder::take)
    }

    fn look_around(
        &mut self,
        case: &Case<'a, B>,
        server: &dyn TargetServer,
        neighbour: &mut Bystander<B>,
        result: &mut CaseResult,
    ) {
        if let Err(told) = neighbour.check(&self.context(case.id)) {
            // The peers of a process notice its end first.
            if let Some(death) = server.death(DYING) {
                return self.died(case, server, neighbour, result, &death);
            }
            fail(
                result,
                Cause::Bystander,
                format!("the neighbour, connected before, is no longer served{}", why(&result.reason, &told)),
            );
        }
        if let Some(death) = server.death(Duration::ZERO) {
            return self.died(case, server, neighbour, result, &death);
        }
        // After a harmless case that passed, the bystander's reply suffices.
        if result.verdict.is_pass() && !case.is(Tag::Disruptive) && neighbour.is_connected() {
            return;
        }
        if !self.is_sane {
            return;
        }
        let Err(stop) = self.sanity() else { return };
        let cause = if stop.cause.is_loss() { stop.cause } else { Cause::Hung };
        if cause == Cause::Died {
            result.teardown = Some(Teardown::Crashed);
        }
        let reason = format!("a new connection is not served{}", why(&result.reason, &stop.reason));
        fail(result, cause, with_last_lines(reason, &server.last_lines()));
        self.start_again(case, server, neighbour);
    }

    fn died(
        &mut self,
        case: &Case<'a, B>,
        server: &dyn TargetServer,
        neighbour: &mut Bystander<B>,
        result: &mut CaseResult,
        death: &str,
    ) {
        result.teardown = Some(Teardown::Crashed);
        fail(result, Cause::Died, format!("the server's process ended: {death}"));
        self.start_again(case, server, neighbour);
    }

    fn start_again(&mut self, case: &Case<'a, B>, server: &dyn TargetServer, neighbour: &mut Bystander<B>) {
        neighbour.disconnect();
        let lost = match server.restart() {
            Ok(true) if !self.is_sane => None,
            Ok(true) => self.sanity().err().map(|stop| stop.reason),
            Ok(false) => Some("the suite did not start it, and cannot".into()),
            Err(reason) => Some(reason),
        };
        if let Some(reason) = lost {
            self.gone = Some(format!("{} ({reason})", case.id));
        }
    }

    fn blank(&self, case: &Case<'a, B>) -> CaseResult {
        CaseResult {
            id: case.id.into(),
            intent: case.intent.into(),
            expectation: case.expectation.into(),
            requirements: case.requirements.iter().map(ToString::to_string).collect(),
            level: self.requirements.level(case.requirements),
            profile: self.requirements.profile(case.requirements),
            tags: case.tags.iter().map(|tag| tag.name().to_string()).collect(),
            verdict: Verdict::Skipped,
            teardown: None,
            cause: None,
            reason: String::new(),
            hint: None,
            expected: None,
            took: 0.0,
            repro: format!("{} --select {}", self.plan.again, case.id),
            timeline: None,
        }
    }
}

struct Bystander<B: Descriptors> {
    peer: Option<Peer<B>>,
}

impl<B: Descriptors> Default for Bystander<B> {
    fn default() -> Self {
        Self { peer: None }
    }
}

impl<B: Descriptors> Bystander<B> {
    fn connect(&mut self, context: &Context<'_, B>) {
        let Side::Server(server) = context.side else { return };
        // Its last exchange may be long ago.
        if self.peer.is_some() && self.check(context).is_ok() {
            return;
        }
        let shape = Shape { patience: context.patience, ..Default::default() };
        let connect = || {
            let mut peer = Peer::dial(context.backend, server.address(), shape)?;
            peer.handshake()?;
            Ok::<_, Failure>(peer)
        };
        // If the server takes no connection, the case reports it.
        self.peer = connect().ok();
    }

    fn check(&mut self, context: &Context<'_, B>) -> Result<(), String> {
        let Side::Server(_) = context.side else { return Ok(()) };
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let mut ping = || -> Result<Vec<u8>, Failure> {
            peer.send_bytes(b"PING\r\n")?;
            peer.receive_bytes(7)
        };
        let outcome = match ping() {
            Ok(pong) if pong == b"+PONG\r\n" => return Ok(()),
            Ok(_) => "it got another answer than +PONG".into(),
            Err(failure) => failure.to_string(),
        };
        self.peer = None;
        Err(outcome)
    }

    fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    fn disconnect(&mut self) {
        self.peer = None;
    }
}

impl<B: Descriptors> Drop for Bystander<B> {
    fn drop(&mut self) {
        if let Some(peer) = &self.peer {
            let _left = peer.disconnect();
        }
    }
}

/// Returns the title of a run.
pub fn title(target: &Target) -> String {
    format!("{} as {}, on {}", target.name, target.role, target.backend)
}
