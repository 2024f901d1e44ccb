//! What children and executed programs do with what they inherit.

mod common;
mod pairs;
mod session;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use common::{Home, Running, SERVER, await_some, compiled, role, succeeded};
use pairs::{Program, connected, pages};
use session::{ask, come, listening, open_on};
use softrdma_wire::{Amounts, Reply, Request, Session, Socket};

fn fabric_of(home: &Home) -> Pid {
    let (fabric, _user) = Socket::connect(&home.socket()).and_then(|socket| socket.peer()).expect("it runs");
    i32::try_from(fabric).ok().and_then(Pid::from_raw).expect("a process")
}

/// Returns the sessions of a fabric, and what programs have taken of it.
fn status(fabric: &mut Socket) -> (Vec<Session>, Amounts) {
    let Reply::Status { sessions, used, .. } = ask(fabric, &Request::Status) else { panic!("no status") };
    (sessions, used)
}

fn has_no_session(fabric: &mut Socket) -> Option<()> {
    status(fabric).0.is_empty().then_some(())
}

#[test]
fn children_change_nothing_for_their_parent() {
    let home = Home::new("forks");
    let Some(program) = compiled(&home, "forks") else { return };
    let output = home.run(SERVER, &[&program]).output().expect("runs");
    assert_eq!(succeeded(&output), "done\n", "{}", String::from_utf8_lossy(&output.stderr));
    home.is_left();
}

/// A program goes on as another process image, or as a child, and has no session meanwhile.
fn comes_back(way: &str) {
    let home = Home::new(way);
    let Some(program) = compiled(&home, "forks") else { return };
    let mut running = Running::start(home.run(SERVER, &[&program, way]).stdin(Stdio::piped()));
    running.line("is another");
    let mut fabric = Socket::connect(&home.socket()).expect("a fabric");
    await_some("the session's end", || has_no_session(&mut fabric));
    let process = pidfd_open(fabric_of(&home), PidfdFlags::empty()).expect("a process");
    drop(fabric);
    // It would end at once.
    let moment = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&moment)), Ok(0), "it ended");
    running.input().write_all(b"\n").expect("it listens");
    let (done, said) = running.finish();
    assert!(done && said.contains("done"), "{said}");
    home.is_left();
}

#[test]
fn a_program_executes_itself_and_comes_back() {
    comes_back("again");
}

#[test]
fn a_daemon_comes_back() {
    comes_back("daemon");
}

/// A program that executes another one has left the fabric, though its child lives.
#[test]
fn a_session_ends_when_its_program_executes_another() {
    let home = Home::new("execute");
    let Some(program) = compiled(&home, "forks") else { return };
    let mut running = Running::start(home.run(SERVER, &[&program, "executes"]).stdin(Stdio::piped()));
    running.line("is another");
    let mut fabric = Socket::connect(&home.socket()).expect("a fabric");
    await_some("the session's end", || has_no_session(&mut fabric));
    // Both end with their input.
    drop((running.input(), fabric));
    running.ended();
    home.is_left();
}

/// Fewer answers than a socket holds.
const FEW: u32 = 4;

/// A program that reads no answers, and has a child that holds its session's socket.
#[test]
fn reads_no_answers() {
    let Some(argument) = role("reads_no_answers") else { return };
    let (path, requests) = argument.rsplit_once(' ').expect("two parts");
    let socket = Socket::connect(Path::new(path)).expect("a fabric");
    let mut program = Program::on(open_on(socket, 3), 3, pages());
    program.pair();
    rustix::io::fcntl_setfd(&program.socket, FdFlags::empty()).expect("a descriptor");
    let mut child = Command::new("cat").stdout(Stdio::null()).spawn().expect("starts");
    let thread = rustix::thread::gettid().as_raw_nonzero();
    let socket = rustix::fs::fstat(&program.socket).expect("a socket").st_ino;
    println!("process {} {thread} {} {socket}", std::process::id(), child.id());
    for _ in 0..requests.parse::<u32>().expect("a number") {
        if program.socket.send(&Request::AllocateDomain(0), None).is_err() {
            break;
        }
    }
    // Both end with their input.
    child.wait().expect("a child");
}

/// The fabric does not wait for the child, which holds the socket as long as it likes, nor for room
/// in a socket that is full.
#[test]
fn a_killed_program_is_gone_though_its_child_holds_unread_answers() {
    for requests in [FEW, u32::MAX] {
        let home = Home::new("unread");
        let fabric = listening(&home.socket());
        let [mut one, mut other] = [1, 2].map(|last| Program::new(&fabric, last, pages()));
        let (pair, _) = connected(&mut one, &mut other);
        let mut exchanges = |id| {
            one.write(pair, id, &other);
            assert_eq!(one.completion(), (id, 0));
        };
        let mut asks = come(&fabric);
        let (sessions, used) = status(&mut asks);
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command
            .args(["--exact", "reads_no_answers", "--nocapture"])
            .env("SOFTRDMA_TEST_ROLE", "reads_no_answers");
        command.env("SOFTRDMA_TEST_ARGUMENT", format!("{} {requests}", home.socket().display()));
        let mut running = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let input = running.input();
        let said = running.line("process ");
        let [number, thread, child, socket] = said.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{said}")
        };
        let sleeps = || {
            let stat =
                std::fs::read_to_string(format!("/proc/{number}/task/{thread}/stat")).expect("a thread");
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
        };
        let lost = await_some("unread answers", || {
            let (sessions, _) = status(&mut asks);
            match sessions.iter().find(|session| session.pid.to_string() == number) {
                // It has sent all requests, or waits for room.
                Some(session) => (session.domains > FEW && sleeps()).then_some(false),
                None => Some(true),
            }
        });
        assert!(running.runs() && (!lost || requests > FEW), "its socket had room");
        exchanges(1);
        kill_process(number.parse().ok().and_then(Pid::from_raw).expect("a process"), Signal::KILL)
            .expect("it runs");
        await_some("the end of all that it had", || {
            let now = status(&mut asks);
            (now.0.len() == sessions.len() && now.1 == used).then_some(())
        });
        exchanges(2);
        let mut held = std::fs::read_dir(format!("/proc/{child}/fd")).expect("the child lives").flatten();
        let socket = format!("socket:[{socket}]");
        assert!(
            held.any(|held| std::fs::read_link(held.path()).is_ok_and(|held| held == Path::new(&socket)))
        );
        drop(input);
        running.ended();
    }
}
