//! A fabric is in the process tree of no program: neither its starter's child, nor in its process
//! group, nor with anything that it had open.

mod common;

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Home, Running, SERVER, await_some, role, succeeded};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, getpgid, getpgrp, getpid, set_child_subreaper, wait};
use softrdma::fabric::Fabric;
use softrdma_wire::{Listener, Reply, Request, SOCKET, Socket, VERSION};

/// What a shell leaves to the program that it becomes: a signal that is ignored, a mask of file
/// modes, and an open file.
const LEAVES: &str = r#"trap "" HUP; umask 0; exec 9>held; exec "$0" "$@""#;

/// A program that adopts orphans, and becomes one that starts a fabric.
#[test]
fn adopts_orphans() {
    let Some(softrdma) = role("adopts_orphans") else { return };
    set_child_subreaper(Some(getpid())).expect("prctl");
    let own = std::env::current_exe().expect("this test");
    let mut starts = Command::new("sh");
    starts.args(["-c", LEAVES, &softrdma, "run", "--address", SERVER, "--"]).arg(own);
    starts.args(["--exact", "has_no_fabric", "--nocapture"]).env("SOFTRDMA_TEST_ROLE", "has_no_fabric");
    panic!("{}", starts.exec());
}

/// A program that looks for its fabric where it must not be.
#[test]
fn has_no_fabric() {
    let Some(_) = role("has_no_fabric") else { return };
    // It would wait for ever for a fabric that waits for it.
    assert_eq!(wait(WaitOptions::NOHANG).err(), Some(Errno::CHILD));
    let path = std::env::var_os(SOCKET).expect("started by softrdma");
    let mut socket = Socket::connect(Path::new(&path)).expect("a fabric");
    let devices = vec![vec![SERVER.parse().expect("an address")]];
    let hello = Request::Hello { version: VERSION, program: "tree".into(), devices, above: 0 };
    socket.send(&hello, None).expect("the fabric listens");
    let Ok((Reply::Welcome { fabric, .. }, _)) = socket.receive() else { panic!("no session") };
    let of = |what: &str| format!("/proc/{fabric}/{what}");
    let read = |what: &str| std::fs::read(of(what)).expect("a file of proc(5)");
    let number = Pid::from_raw(fabric.cast_signed());
    assert_ne!(getpgid(number).expect("its group"), getpgrp());
    assert_eq!(std::fs::read_link(of("cwd")).expect("a directory"), Path::new("/"));
    let status = String::from_utf8(read("status")).expect("text");
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of proc(5)");
        line.trim().to_owned()
    };
    assert_eq!(line("Umask:"), "0077");
    let ignored = u64::from_str_radix(&line("SigIgn:"), 16).expect("a number");
    assert_eq!(ignored & 1, 0, "it ignores SIGHUP");
    // The descriptors of the fabric's own are no files, but of its log.
    for descriptor in std::fs::read_dir(of("fd")).expect("descriptors").flatten() {
        let Ok(file) = std::fs::read_link(descriptor.path()) else { continue };
        assert!(!file.ends_with("held"), "it holds what its starter had open");
    }
    let names = String::from_utf8_lossy(&read("environ")).into_owned();
    assert!(!names.split('\0').any(|name| name.starts_with("LD_PRELOAD=") || name.starts_with(SOCKET)));
}

#[test]
fn a_fabric_is_in_no_programs_process_tree() {
    let home = Home::new("tree");
    let own = std::env::current_exe().expect("this test");
    let adopts = |fabric: &mut Command| {
        fabric.env("SOFTRDMA_TEST_ROLE", "adopts_orphans").env("XDG_RUNTIME_DIR", home.path());
        fabric.env("SOFTRDMA_TEST_ARGUMENT", env!("CARGO_BIN_EXE_softrdma")).current_dir(home.path());
        fabric.stdin(Stdio::null());
    };
    let mut first = Command::new(&own);
    first.args(["--exact", "adopts_orphans", "--nocapture"]);
    adopts(&mut first);
    succeeded(&first.output().expect("runs"));
    home.is_left();
    // A program on one fabric starts another one.
    let own = own.to_str().expect("a path in UTF-8");
    let outer = ["run", "--fabric", "outer", "--", own, "--exact", "adopts_orphans", "--nocapture"];
    let mut nested = home.softrdma(&outer);
    adopts(&mut nested);
    let (done, said) = Running::start(nested.stdout(Stdio::piped())).finish();
    assert!(done, "{said}");
}

/// A program that comes and leaves.
#[test]
fn comes_and_leaves() {
    let Some(path) = role("comes_and_leaves") else { return };
    Socket::connect(Path::new(&path)).expect("a fabric");
}

/// A fabric ends with its last program, also if that has left before the fabric looks at it.
#[test]
fn a_fabric_ends_whose_program_has_left() {
    let home = Home::new("left");
    let path = home.path().join("socket");
    let listener = Listener::bind(&path).expect("a socket");
    let own = std::env::current_exe().expect("this test");
    let mut program = Command::new(own);
    program.args(["--exact", "comes_and_leaves", "--nocapture"]);
    program.env("SOFTRDMA_TEST_ROLE", "comes_and_leaves").env("SOFTRDMA_TEST_ARGUMENT", &path);
    succeeded(&program.output().expect("runs"));
    let fabric = Fabric::new().expect("a fabric");
    let serving = std::thread::spawn(move || fabric.serve(&listener));
    await_some("the fabric's end", || serving.is_finished().then_some(()));
    serving.join().expect("no panic").expect("no error");
}
