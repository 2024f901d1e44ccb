//! Runs programs of others, as they are installed. What is not installed is skipped.

mod common;

use std::io::Write as _;
use std::process::{ChildStdin, Command, Stdio};

use common::{CLIENT, Home, Running, SERVER, compiled, installed, pair, pinged, served, succeeded, success};
use rustix::process::{Pid, Signal, kill_process};
use softrdma_wire::Socket;

#[test]
fn rdma_client_and_server() {
    if let Some(text) = pair("rdma-client", &["rdma_server"], &["rdma_client", "-s", SERVER], success) {
        assert!(text.contains("end 0"), "{text}");
    }
}

#[test]
fn rping() {
    let server = ["rping", "-s", "-a", SERVER, "-C", "20", "-V"];
    let client = ["rping", "-c", "-a", SERVER, "-C", "20", "-V", "-v"];
    pair("rping", &server, &client, pinged(20));
}

#[test]
fn ibv_rc_pingpong_with_events() {
    let server = ["ibv_rc_pingpong", "-e", "-c", "-g", "0", "-p", "18611"];
    let client = ["ibv_rc_pingpong", "-e", "-c", "-g", "0", "-p", "18611", "127.0.0.1"];
    if let Some(text) = pair("pingpong", &server, &client, success) {
        assert!(text.contains("1000 iters"), "{text}");
    }
}

/// Datagrams: their own programs, and perftest by both ways to post.
#[test]
fn datagrams_of_stock_programs() {
    let perftest = ["ib_send_lat", "-c", "UD", "-x", "0", "-n", "100", "-s", "2048", "-F", "-p", "18617"];
    for server in [
        &["ibv_ud_pingpong", "-e", "-g", "0", "-n", "100", "-p", "18616"][..],
        &perftest,
        &[&perftest[..], &["--use_old_post_send"]].concat(),
    ] {
        let client = [server, &["127.0.0.1"]].concat();
        if let Some(text) = pair("datagrams-stock", server, &client, success) {
            assert!(text.contains("100 iters") || text.contains("2048    100"), "{text}");
        }
    }
}

#[test]
fn perftest_write_and_read() {
    for (program, port) in [
        ("ib_write_bw", "18612"),
        ("ib_read_bw", "18613"),
        ("ib_send_bw", "18614"),
        ("ib_write_lat", "18615"),
    ] {
        // By the extended way to post, and by `ibv_post_send(3)`.
        for old in [&[][..], &["--use_old_post_send"]] {
            let common = ["-x", "0", "-n", "100", "-s", "4096", "-F", "-p", port];
            let server: Vec<&str> = [program].into_iter().chain(common).chain(old.iter().copied()).collect();
            let client: Vec<&str> = server.iter().copied().chain(["127.0.0.1"]).collect();
            if let Some(text) = pair(program, &server, &client, success) {
                assert!(text.contains("4096"), "{text}");
            }
        }
    }
}

/// Runs a program of C that checks by itself, and then says that it is done.
fn ends_well(name: &str) {
    let home = Home::new(name);
    let Some(program) = compiled(&home, name) else { return };
    let output = home.run(SERVER, &[&program]).output().expect("runs");
    assert_eq!(succeeded(&output), "done\n", "{}", String::from_utf8_lossy(&output.stderr));
    home.is_left();
}

/// Scatter-gather lists, through the C ABI and the headers' inline functions.
#[test]
fn elements_of_a_work_request() {
    ends_well("elements");
}

/// Options of identifiers and of regions have the results of Linux and librdmacm.
#[test]
fn options_of_identifiers_and_regions() {
    ends_well("options");
}

/// More inline WRITEs than one message holds, by either way to post.
#[test]
fn long_chains() {
    ends_well("chains");
}

#[test]
fn the_limit_on_locked_memory_applies_if_it_is_to() {
    let home = Home::new("memlock");
    let Some(program) = compiled(&home, "memlock") else { return };
    for command in [&["run", "--memlock", "--", &program, "applies"][..], &["run", "--", &program]] {
        let output = home.softrdma(command).output().expect("runs");
        assert_eq!(succeeded(&output), "done\n", "{}", String::from_utf8_lossy(&output.stderr));
    }
    home.is_left();
}

/// Each completion vector has its thread, which alone raises the events of its queues.
#[test]
fn completion_vectors_have_threads() {
    let home = Home::new("vectors");
    let Some(program) = compiled(&home, "vectors") else { return };
    for (vectors, said) in [(Some("4"), "0, 1, 2, 3"), (Some("1"), "0"), (None, "")] {
        let mut command = home.softrdma(&["run", "--address", SERVER]);
        command.args(vectors.map(|count| ["--vectors", count]).into_iter().flatten()).args(["--", &program]);
        let mut program = Asked::start(&mut command);
        program.says(&format!("{} vectors", vectors.unwrap_or("2")));
        let status = succeeded(&home.softrdma(&["status"]).output().expect("runs"));
        let events = status.lines().find_map(|line| line.strip_prefix("events of completion vectors: "));
        assert_eq!(events.unwrap_or_default(), said);
        program.goes_on();
        program.succeeds();
        home.is_left();
    }
}

/// Completion queues and queue pairs with functions, shared receives, solicited events, SQD, a
/// child, acknowledgements.
#[test]
fn the_newer_calls() {
    ends_well("extended");
}

/// Address handles, the header of received bytes, Q_Keys, what is lost and what is refused.
#[test]
fn datagrams() {
    ends_well("datagrams");
}

/// Results, refusals, and several threads that add to one number.
#[test]
fn atomic_operations() {
    ends_well("atomics");
}

/// A program that prints lines, and waits for one after each.
struct Asked {
    running: Running,
    told: ChildStdin,
}

impl Asked {
    fn start(command: &mut Command) -> Self {
        let mut running = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let told = running.input();
        Self { running, told }
    }

    fn says(&mut self, line: &str) {
        assert_eq!(self.running.next_line().as_deref(), Some(line));
    }

    fn goes_on(&mut self) {
        self.told.write_all(b"\n").expect("it reads");
    }

    fn finishes(mut self) {
        self.says("done");
        self.succeeds();
    }

    fn succeeds(self) {
        assert!(self.running.ended().0.success());
    }
}

/// Receives of a queue pair that is not connected cost no requests.
#[test]
fn receives_that_are_kept() {
    let home = Home::new("kept");
    let Some(program) = compiled(&home, "kept") else { return };
    let mut child = Asked::start(&mut home.run(SERVER, &[&program]));
    let asked = || {
        let status = succeeded(&home.softrdma(&["status"]).output().expect("runs"));
        let row = status.lines().find(|line| line.starts_with("| kept ")).expect("it is there").to_owned();
        row.trim_end_matches(['|', ' ']).rsplit(' ').next().and_then(|count| count.parse::<u64>().ok())
    };
    let mut counts = Vec::new();
    for word in ["initialised", "posted"] {
        child.says(word);
        counts.push(asked().expect("a count"));
        child.goes_on();
    }
    child.finishes();
    assert_eq!(counts[0], counts[1]);
    home.is_left();
}

/// A fabric that stands still, until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(home: &Home) -> Self {
        let (fabric, _user) = Socket::connect(&home.socket()).and_then(|socket| socket.peer()).expect("runs");
        let fabric = i32::try_from(fabric).ok().and_then(Pid::from_raw).expect("a process");
        kill_process(fabric, Signal::STOP).expect("is this user's");
        Self(fabric)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ended = kill_process(self.0, Signal::CONT);
    }
}

/// Lets a program that is `ready` post while the fabric stands still.
fn posts_meanwhile(home: &Home, asked: &mut Asked, ready: &str, posted: &str) {
    asked.says(ready);
    let stopped = Stopped::new(home);
    asked.goes_on();
    asked.says(posted);
    drop(stopped);
    asked.goes_on();
}

/// Posts have no answer while there is room, and `ENOMEM` once there is none, or if a fault says
/// so.
#[test]
fn posts_without_an_answer() {
    let home = Home::new("posts");
    let Some(program) = compiled(&home, "posts") else { return };
    let mut asked = Asked::start(&mut home.run(SERVER, &[&program]));
    posts_meanwhile(&home, &mut asked, "ready", "posted");
    posts_meanwhile(&home, &mut asked, "again", "posted again");
    asked.says("faultless");
    succeeded(&home.softrdma(&["fault", "--address", SERVER, "queue-full"]).output().expect("runs"));
    asked.goes_on();
    asked.finishes();
    home.is_left();
}

/// What a program posted before its end is sent, though the fabric saw its end first. What finds no
/// room in the ring of posts comes after what did.
#[test]
fn posts_while_the_fabric_stands_still() {
    for how in ["leaves", "fills"] {
        let home = Home::new(how);
        let Some(program) = compiled(&home, "posts") else { return };
        let mut asked = Asked::start(&mut home.run(SERVER, &[&program, how]));
        posts_meanwhile(&home, &mut asked, "ready", "posted");
        asked.finishes();
        home.is_left();
    }
}

/// Several threads use one queue pair and one completion queue, in a process that forks and
/// executes.
#[test]
fn threads_that_post_and_poll() {
    ends_well("threads");
}

/// Where the kernel forbids the fabric to access programs, they copy their memory themselves, and
/// `doctor` says so.
///
/// Covers READs, WRITEs and SENDs of `rping`, and `extended.c`.
#[test]
fn programs_that_cannot_be_reached_into() {
    let home = Home::new("forbidden");
    let (Some(forbid), Some(program)) = (compiled(&home, "forbid"), compiled(&home, "extended")) else {
        return;
    };
    let forbidden = |command: &Command| {
        let mut wrapped = Command::new(&forbid);
        wrapped.arg(command.get_program()).args(command.get_args()).env("XDG_RUNTIME_DIR", home.path());
        wrapped.stdout(Stdio::piped()).stderr(Stdio::piped());
        wrapped
    };
    let doctor = succeeded(&forbidden(&home.softrdma(&["doctor"])).output().expect("runs"));
    assert!(doctor.contains("forbidden by a seccomp profile, or without /proc; programs copy"), "{doctor}");
    let output = forbidden(&home.run(SERVER, &[&program])).output().expect("runs");
    assert_eq!(succeeded(&output), "done\n", "{}", String::from_utf8_lossy(&output.stderr));
    if installed("rping").is_some() {
        let server = ["rping", "-s", "-a", SERVER, "-C", "5", "-S", "65000", "-V"];
        let serving = Running::start(&mut forbidden(&home.run(SERVER, &server)));
        let client = ["rping", "-c", "-a", SERVER, "-C", "5", "-S", "65000", "-V", "-v"];
        served(&home, serving, || forbidden(&home.run(CLIENT, &client)), pinged(5));
    }
    home.is_left();
}

#[test]
fn ibv_devinfo() {
    if installed("ibv_devinfo").is_none() {
        return;
    }
    let home = Home::new("devinfo");
    let text = succeeded(&home.run(SERVER, &["ibv_devinfo", "-v"]).output().expect("runs"));
    assert!(text.contains("softrdma0") && text.contains("PORT_ACTIVE"), "{text}");
    home.is_left();
}

/// Without `softrdma run` a program that loads the library has no device, and is told why.
#[test]
fn without_a_fabric_there_is_no_device() {
    let Some(program) = installed("ibv_devices") else { return };
    let output = Command::new(program)
        .env("LD_PRELOAD", env!("CARGO_BIN_EXE_librdmacm-softrdma"))
        .env_remove("SOFTRDMA_SOCKET")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("not started by `softrdma run`"), "{said}");
    assert!(!succeeded(&output).contains("softrdma0"));
}
