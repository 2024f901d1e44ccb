//! Runs Valkey's own programs, unmodified.
//!
//! Skipped if there is no Valkey with RDMA: `VALKEY_BIN` names the directory of its programs, or
//! `lab/run setup` has built it.

mod common;

use std::process::{Command, Stdio};

use common::{Home, Running, await_some, valkey};
use rustix::process::{Pid, Signal, kill_process};
use softrdma_wire::Socket;

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";
const PORT: &str = "6379";
/// The bytes of a reply: sixteen windows of libvalkey.
const REPLY: usize = 16 << 20;

/// Starts a Valkey server, and returns it with its process when it takes connections.
fn serve(home: &Home, program: &str) -> (Running, Pid) {
    let arguments =
        ["--rdma-bind", SERVER, "--rdma-port", PORT, "--port", "0", "--save", "", "--protected-mode", "no"];
    let mut server = Running::start(&mut home.run(SERVER, &[&[program], &arguments[..]].concat()));
    let pid = server.line("pid=").split(',').next().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    server.line("Ready to accept connections rdma");
    (server, pid.expect("a process"))
}

fn cli(home: &Home, program: &str, arguments: &[&str]) -> Command {
    let mut command = home.run(CLIENT, &[&[program, "--rdma", "-h", SERVER, "-p", PORT], arguments].concat());
    command.stderr(Stdio::inherit());
    command
}

/// Counts the open files and the threads of a process.
fn holds(pid: u32) -> [usize; 2] {
    ["fd", "task"].map(|what| std::fs::read_dir(format!("/proc/{pid}/{what}")).expect("it runs").count())
}

/// Kills a server in the middle of its replies, as often as `SOFTRDMA_KILLS` says. Its clients end,
/// and nothing is left in the fabric.
#[test]
fn a_killed_server_leaves_no_client_waiting() {
    let (Some(server), Some(client)) = (valkey("valkey-server"), valkey("valkey-cli")) else { return };
    let kills = std::env::var("SOFTRDMA_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    let home = Home::new("valkey-kill");
    // Keeps the fabric alive from one server to the next.
    let mut keeper = home.run(CLIENT, &["cat"]).stdin(Stdio::piped()).spawn().expect("starts");
    let fabric = await_some("the fabric", || Some(Socket::connect(&home.socket()).ok()?.peer().ok()?.0));
    // The table of sessions is its heading.
    let no_session = || {
        let status = common::succeeded(&home.softrdma(&["status"]).output().expect("runs"));
        status.lines().take_while(|line| !line.is_empty()).count() == 2
    };
    let mut held = None;
    for kill in 0..kills {
        let (running, pid) = serve(&home, &server);
        let last = (REPLY - 1).to_string();
        common::succeeded(&cli(&home, &client, &["SETRANGE", "key", &last, "x"]).output().expect("runs"));
        let [mut one, two] =
            [(); 2].map(|()| Running::start(&mut cli(&home, &client, &["-r", "-1", "GET", "key"])));
        // The first client has printed some of a reply or all of it; the second is at any point.
        let printed = one.skip(1 + kill * REPLY / kills);
        kill_process(pid, Signal::KILL).expect("it runs");
        if let Err(ended) = printed {
            panic!("kill {kill}: {ended}; the server: {}", running.finish().1);
        }
        for client in [one, two] {
            // The client may succeed or fail.
            let _status = client.finish();
        }
        let (done, _text) = running.finish();
        assert!(!done, "it was killed");
        await_some("the end of all sessions", || no_session().then_some(()));
        let first = *held.get_or_insert_with(|| holds(fabric));
        // The thread that served the request for the status may still be ending.
        await_some("the fabric's files and threads of before", || (holds(fabric) <= first).then_some(()));
    }
    drop(keeper.stdin.take());
    assert!(keeper.wait().expect("a child").success());
    home.is_left();
}
