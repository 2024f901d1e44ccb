//! The runner's verdicts on targets with faults outside the protocol: as processes.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conformance::blackbox;
use conformance::blackbox::builtin::{BuiltInClients, BuiltInServer, small};
use conformance::blackbox::context::Side;
use conformance::blackbox::process::{ExecClients, ExecServer, RunningServer};
use conformance::blackbox::report::{self, Format};
use conformance::blackbox::results::{CaseResult, FORMAT, Run, Suite, Target};
use conformance::blackbox::run::{Plan, Runner};
use conformance::blackbox::target::{Exit, Running, TargetClients, TargetServer};
use conformance::client::{Failure, RespClient};
use conformance::requirements::Role;
use conformance::resources::ProcessResources;
use conformance::tester::{Listener, Peer, Shape};
use intercept::trace::{Limits, Recorded, Recorder};
use rdma_conn::{Connect, Options, Stream};
use rdma_softsim::{Fabric, SoftSim};
use suite::{Cause, Verdict};

const THEIRS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 6379);
const OURS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 66)), 6379);

const PATIENCE: Duration = Duration::from_secs(2);

fn judge(backend: &SoftSim, side: Side<'_, SoftSim>, role: Role, case: &str) -> CaseResult {
    let plan = Plan::harmful(PATIENCE);
    let cases = blackbox::cases();
    let case = cases.iter().find(|one| one.role == Some(role) && one.id == case).unwrap();
    Runner::new(backend, side, &plan).only(case)
}

/// Clients whose processes end as `exit` says, whatever they did.
struct Ending {
    own: BuiltInClients<SoftSim>,
    exit: Option<Exit>,
    /// How many requests for its end are in vain.
    late: u32,
    is_seen: bool,
}

impl Ending {
    fn new(backend: SoftSim, exit: Option<Exit>) -> Self {
        let own = BuiltInClients::new(backend, small(Options::default()));
        Self { own, exit, late: 0, is_seen: true }
    }
}

struct Process {
    own: Box<dyn Running>,
    exit: Option<Exit>,
    late: u32,
    is_seen: bool,
}

impl TargetClients for Ending {
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let (late, is_seen) = (self.late, self.is_seen);
        Ok(Box::new(Process { own: self.own.start(case, address)?, exit: self.exit.clone(), late, is_seen }))
    }
}

impl Running for Process {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        self.own.ended(patience)?;
        if self.late > 0 {
            self.late -= 1;
            std::thread::sleep(patience);
            return None;
        }
        self.exit.clone()
    }

    fn is_observed(&self) -> bool {
        self.is_seen
    }

    fn last_lines(&self) -> String {
        "still here".into()
    }
}

#[test]
fn a_hang_is_told_with_what_came_before_it() {
    let fabric = Fabric::new();
    let recorder = Recorder::new(Limits::default());
    let backend = Recorded::new(fabric.host(&[OURS.ip()]), &recorder);
    let listener = Listener::new(&backend, OURS).unwrap();
    // One never connects. The other does everything right, but does not end.
    let silent =
        ExecClients { command: "sh -c 'echo waiting; echo for a server >&2; sleep 60'".into(), first: 0 };
    let staying = Ending::new(fabric.host(&[THEIRS.ip()]), None);
    let plan = Plan { recorder: Some(&recorder), ..Plan::harmful(PATIENCE) };
    let cases = blackbox::cases();
    let case = cases.iter().find(|one| one.role == Some(Role::Client) && one.id == "close.clean").unwrap();

    let result = Runner::new(&backend, Side::Client(&listener, &silent), &plan).only(case);
    assert_eq!(result.cause, Some(Cause::Refused));
    assert!(result.reason.ends_with("the last that it printed: waiting\nfor a server"), "{}", result.reason);

    let result = Runner::new(&backend, Side::Client(&listener, &staying), &plan).only(case);
    assert_eq!(result.cause, Some(Cause::Hung));
    assert!(result.reason.ends_with("the last that it printed: still here"), "{}", result.reason);
    let run = Run {
        format: FORMAT,
        target: no_target(Role::Client),
        suite: Suite { version: String::new(), requirements: 0 },
        environment: None,
        arguments: Vec::new(),
        begun: 0,
        took: 0.0,
        results: vec![result],
        withheld: None,
    };
    for format in [Format::Pretty, Format::Junit] {
        let text = report::text(&run, format, false).unwrap();
        let wire = text.lines().filter(|line| line.trim_start().starts_with("| ")).collect::<Vec<_>>();
        assert!(wire.iter().any(|line| line.contains("event: Disconnected")), "{text}");
    }
}

/// A client that is correct on the wire, but ends wrongly, passes no case that includes its end.
#[test]
fn a_client_has_to_end() {
    for (exit, cause) in [
        (None, Some(Cause::Hung)),
        (Some(Exit::Crashed("signal: 11".into())), Some(Cause::Died)),
        (Some(Exit::Failure("no".into())), Some(Cause::Requirement)),
        (Some(Exit::Success), None),
    ] {
        for case in ["close.clean", "conn.plain", "xfer.round-trip", "keep.accepted"] {
            let fabric = Fabric::new();
            let backend = fabric.host(&[OURS.ip()]);
            let listener = Listener::new(&backend, OURS).unwrap();
            let clients = Ending::new(fabric.host(&[THEIRS.ip()]), exit.clone());
            let result = judge(&backend, Side::Client(&listener, &clients), Role::Client, case);
            let wanted = if cause.is_some() { Verdict::Fail } else { Verdict::Pass };
            let found = (result.verdict, result.cause);
            assert_eq!(found, (wanted, cause), "{case}, {exit:?}: {}", result.reason);
        }
    }
}

fn no_target(role: Role) -> Target {
    Target { name: String::new(), role, how: String::new(), backend: String::new() }
}

fn judge_ending(change: impl FnOnce(&mut Ending), case: &str) -> CaseResult {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let listener = Listener::new(&backend, OURS).unwrap();
    let mut clients = Ending::new(fabric.host(&[THEIRS.ip()]), Some(Exit::Success));
    change(&mut clients);
    judge(&backend, Side::Client(&listener, &clients), Role::Client, case)
}

#[test]
fn success_is_no_report_of_a_failure() {
    for case in ["conn.rejected", "close.in-a-reply", "close.vanishes", "ctrl.opcode-4", "mem.of-0"] {
        let result = judge_ending(|_| {}, case);
        assert_eq!((result.verdict, result.cause), (Verdict::Fail, Some(Cause::Requirement)), "{case}");
        assert!(result.reason.ends_with("reported success"), "{case}: {}", result.reason);
    }
}

#[test]
fn an_end_that_cannot_be_seen_passes_nothing() {
    for case in
        ["conn.rejected", "conn.never-registered", "close.in-a-reply", "close.vanishes", "keep.vanished"]
    {
        let result = judge_ending(|clients| clients.is_seen = false, case);
        assert_eq!(result.verdict, Verdict::NotApplicable, "{case}: {}", result.reason);
    }
    for case in ["conn.plain", "ctrl.opcode-4", "close.clean"] {
        let result = judge_ending(|clients| clients.is_seen = false, case);
        assert_eq!(result.verdict, Verdict::Pass, "{case}: {}", result.reason);
    }
}

#[test]
fn a_slow_client_is_not_hung() {
    let result = judge_ending(|clients| clients.late = 1, "close.clean");
    assert_eq!(result.verdict, Verdict::PassLenient, "{}", result.reason);
    let failing = |clients: &mut Ending| {
        clients.exit = Some(Exit::Failure("no".into()));
        // It is asked every 50 ms.
        clients.late = 60;
    };
    let result = judge_ending(failing, "close.in-a-reply");
    assert_eq!(result.verdict, Verdict::PassLenient, "{}", result.reason);
}

#[test]
fn the_suite_may_not_misspeak() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let _server =
        BuiltInServer::start(&fabric.host(&[THEIRS.ip()]), THEIRS, small(Options::default())).unwrap();
    for words in [
        &b"*3\r\n$3\r\nSET\r\n$15\r\nconformance:mem\r\n$2\r\nxxx\r\n"[..],
        b"PING\n",
        b"*1\r\n$04\r\nPING\r\n",
    ] {
        let mut peer = Peer::dial(&backend, THEIRS, Shape::default()).unwrap();
        peer.handshake().unwrap();
        let failure = peer.send_bytes(words).unwrap_err();
        assert_eq!(suite::Stop::from(failure).verdict, Verdict::Broken);
    }
}

/// A client that sends ten commands and then nothing, until its server disconnects.
struct Pausing(SoftSim);

impl TargetClients for Pausing {
    fn start(&self, _: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let backend = self.0.clone();
        let thread = std::thread::spawn(move || -> Result<(), Failure> {
            let how = Connect::default().options(small(Options::default()));
            let mut client = RespClient::new(Stream::connect_with(&backend, address, &how)?);
            for _ in 0..10 {
                client.call(&[b"ECHO", b"again"])?;
            }
            client.expect_end()
        });
        Ok(Box::new(Thread(Some(thread))))
    }
}

struct Thread(Option<JoinHandle<Result<(), Failure>>>);

impl Running for Thread {
    fn ended(&mut self, _: Duration) -> Option<Exit> {
        match self.0.take()?.join().expect("no panic") {
            Ok(()) => Some(Exit::Success),
            Err(failure) => Some(Exit::Failure(failure.to_string())),
        }
    }
}

/// Ten commands are enough if each takes long. A client may then send no more.
#[test]
fn a_client_may_pause_when_it_has_shown_enough() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let listener = Listener::new(&backend, OURS).unwrap();
    let clients = Pausing(fabric.host(&[THEIRS.ip()]));
    let result = judge(&backend, Side::Client(&listener, &clients), Role::Client, "flow.slow-reader");
    assert_eq!(result.verdict, Verdict::Pass, "{}", result.reason);
    assert_eq!(result.reason, "goes on (10 commands)");
}

#[test]
fn a_server_that_only_keeps_alive_is_given_up() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let mut options = small(Options::default());
    options.protocol.keepalive = Some(rdma_conn::Keepalive::NONE.every(Some(Duration::from_millis(300))));
    let (backend_of_theirs, limits) = (fabric.host(&[THEIRS.ip()]), rdma_conn::Limits::default());
    let listener = rdma_conn::Listener::bind_with(&backend_of_theirs, THEIRS, options, limits).unwrap();
    let server = RunningServer { address: THEIRS };
    std::thread::spawn(move || {
        let mut held = Vec::new();
        // Ends with the test's process.
        while let Ok((mut stream, _)) = listener.accept() {
            let _established = std::io::Write::flush(&mut stream);
            held.push(stream);
        }
    });
    let result = judge(&backend, Side::Server(&server), Role::Server, "xfer.round-trip");
    assert_eq!(result.verdict, Verdict::Fail, "{}", result.reason);
    assert!(result.reason.starts_with("nothing came within 2s"), "{}", result.reason);
}

/// A server that pins the requested memory only when it handles the message.
struct Pinning {
    own: BuiltInServer,
    looks: Cell<u32>,
}

impl TargetServer for Pinning {
    fn address(&self) -> SocketAddr {
        self.own.address()
    }

    fn death(&self, patience: Duration) -> Option<String> {
        self.own.death(patience)
    }

    fn restart(&self) -> Result<bool, String> {
        self.own.restart()
    }

    fn held(&self) -> Option<ProcessResources> {
        self.looks.set(self.looks.get() + 1);
        // Not yet right after the message, and no longer at the end.
        Some(ProcessResources::new(10, if self.looks.get() == 3 { 4 << 20 } else { 0 }))
    }

    fn processor_time(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn memory_pinned_in_between_is_seen() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let own = BuiltInServer::start(&fabric.host(&[THEIRS.ip()]), THEIRS, small(Options::default())).unwrap();
    let server = Pinning { own, looks: Cell::new(0) };
    let result = judge(&backend, Side::Server(&server), Role::Server, "mem.of-4-gib");
    assert_eq!(result.verdict, Verdict::Fail, "{}", result.reason);
    assert!(result.reason.contains("4194304 KiB pinned"), "{}", result.reason);
}

/// An interrupted run has the results so far, without the case whose target may have been ended.
#[test]
fn an_interrupted_run_tells_what_there_is() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let server =
        BuiltInServer::start(&fabric.host(&[THEIRS.ip()]), THEIRS, small(Options::default())).unwrap();
    let interrupted = AtomicBool::new(false);
    let plan = Plan::harmful(Duration::from_secs(30));
    let plan = Plan { selected: true, interrupted: Some(&interrupted), ..plan };
    let mut cases = blackbox::cases();
    cases.retain(|case| {
        case.role == Some(Role::Server)
            && ["conn.plain", "ctrl.first-message", "feat.asked"].contains(&case.id)
    });
    let target = no_target(Role::Server);
    let run = blackbox::run::run(&cases, &backend, Side::Server(&server), &plan, target, |case, result| {
        if case == "ctrl.first-message" && result.is_none() {
            interrupted.store(true, Ordering::Relaxed);
        }
    });
    let told: Vec<_> =
        run.results.iter().map(|result| (&*result.id, result.verdict, &*result.reason)).collect();
    let untried = (Verdict::Skipped, "the run was interrupted");
    assert_eq!(told[0].1, Verdict::Pass, "{told:?}");
    let skipped = |id| (id, untried.0, untried.1);
    assert_eq!(told[1..], ["ctrl.first-message", "feat.asked"].map(skipped));
    assert!(run.is_interrupted());
}

#[test]
fn a_frozen_process_stands_still_until_it_may_go_on() {
    const LOOP: &str = "echo $$.; while kill -0 $PPID; do :; done";
    let escaped = LOOP.replace('$', "\\$");
    // By itself, and as the child of a shell.
    for busy in [format!("sh -c '{LOOP}'"), format!("sh -c 'sh -c \"{escaped}\" & wait'")] {
        let server =
            ExecServer::start(format!("{busy} {{host}} {{port}}"), THEIRS.ip(), THEIRS.port()).unwrap();
        let until = |what: &str, is_so: &dyn Fn() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !is_so() {
                assert!(Instant::now() < deadline, "{busy}: not within a minute: {what}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        until("it says its number", &|| server.last_lines().ends_with('.'));
        let stat = format!("/proc/{}/stat", server.last_lines().trim_end_matches('.'));
        let has_stopped = || std::fs::read_to_string(&stat).unwrap().contains(") T ");
        let frozen = server.freeze().unwrap();
        assert!(has_stopped(), "{busy}");
        drop(frozen);
        until("it goes on", &|| !has_stopped());
    }
}
