//! A session is with an address space: what a process executes later is another program.
#![allow(unsafe_code, reason = "mmap(2) has no safe wrapper")]

mod common;
mod pairs;
mod session;

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Home, Running, role};
use pairs::{Program, pages};
use rustix::io::{Errno, FdFlags};
use session::{ask, greet, listening};
use softrdma::fabric::Fabric;
use softrdma_wire::{Access, Op, Reply, Request, Socket};

/// Where both programs of a process have three pages.
const AT: u64 = 0x3000_0000_0000;
const PAGE: usize = 4096;

/// Maps three pages at [`AT`]. They are never unmapped.
fn mapped() -> &'static mut [u8] {
    let place = std::ptr::with_exposed_provenance_mut(AT as usize);
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: mmap(2): memory where there is none.
    let memory = unsafe { libc::mmap(place, 3 * PAGE, access, flags | libc::MAP_FIXED_NOREPLACE, -1, 0) };
    assert_eq!(memory.addr() as u64, AT, "{}", std::io::Error::last_os_error());
    // SAFETY: just mapped, and of no other owner.
    unsafe { std::slice::from_raw_parts_mut(memory.cast(), 3 * PAGE) }
}

fn next_line() -> String {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("a line");
    line.trim().to_owned()
}

/// A program that lets a peer write to its memory, and executes another one.
#[test]
fn executes() {
    let Some(path) = role("executes") else { return };
    let number = u64::MAX / 3;
    mapped()[..8].copy_from_slice(&number.to_ne_bytes());
    let mut socket = greet(Socket::connect(Path::new(&path)).expect("a fabric"), 2);
    assert_eq!(ask(&mut socket, &Request::ShowMemory { at: AT, number }), Reply::Done);
    let mut program = Program::on(socket, 2, AT);
    let pairs = [program.pair(), program.pair()];
    println!("has {} {} {}", program.key, pairs[0].1, pairs[1].1);
    for pair in pairs {
        program.connect(pair, 1, next_line().parse().expect("a number"));
    }
    println!("is connected");
    assert_eq!(next_line(), "execute");
    // As if a child held it: the session does not end by itself.
    rustix::io::fcntl_setfd(&program.socket, FdFlags::empty()).expect("a descriptor");
    let own = std::env::current_exe().expect("this test");
    let mut next = Command::new(own);
    next.args(["--exact", "is_executed", "--nocapture"]).env("SOFTRDMA_TEST_ROLE", "is_executed");
    panic!("{}", next.exec());
}

/// The program that it executes.
#[test]
fn is_executed() {
    let Some(_) = role("is_executed") else { return };
    let memory = mapped();
    println!("is another");
    assert_eq!(next_line(), "look");
    println!("sees {}", memory.iter().filter(|byte| **byte != 0).count());
}

#[test]
fn a_peer_does_not_reach_a_program_that_is_executed_later() {
    let home = Home::new("executing");
    let path = home.socket();
    let fabric = listening(&path);
    let mut writer = Program::new(&fabric, 1, pages());
    let pairs = [writer.pair(), writer.pair()];

    let own = std::env::current_exe().expect("this test");
    let mut command = Command::new(own);
    command.args(["--exact", "executes", "--nocapture"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.env("SOFTRDMA_TEST_ROLE", "executes").env("SOFTRDMA_TEST_ARGUMENT", &path);
    let mut owner = Running::start(&mut command);
    let mut input = owner.input();
    let numbers: Vec<u32> =
        owner.line("has ").split(' ').map(|number| number.parse().expect("a number")).collect();
    let [key, peers @ ..] = &numbers[..] else { panic!("{numbers:?}") };
    let mut say = |what: &str| writeln!(input, "{what}").expect("it listens");
    for (pair, peer) in pairs.into_iter().zip(peers) {
        writer.connect(pair, 2, *peer);
        say(&pair.1.to_string());
    }
    owner.line("is connected");
    let to = AT + PAGE as u64;
    writer.write_to(pairs[0], 1, to, *key);
    assert_eq!(writer.completion(), (1, 0));
    let read = Op::Read { address: to, rkey: *key };
    assert!(matches!(writer.post(pairs[1], 2, read), Reply::Posted { count: 1, errno: 0, .. }));
    assert_eq!(writer.completion(), (2, 0));
    say("execute");
    owner.line("is another");
    // The address is mapped again, and the session is still there.
    writer.write_to(pairs[0], 3, to, *key);
    let (id, status) = writer.completion();
    assert!(id == 3 && status != 0, "{id} {status}");
    assert!(matches!(writer.post(pairs[1], 4, read), Reply::Posted { count: 1, errno: 0, .. }));
    let (id, status) = writer.completion();
    assert!(id == 4 && status != 0, "{id} {status}");
    say("look");
    assert_eq!(owner.line("sees "), "0");
}

/// A process whose memory does not have the number is another program by now, and none may be
/// registered for it.
#[test]
fn memory_that_is_not_shown_is_not_accessed() {
    let fabric = Fabric::new().expect("a fabric");
    let mut socket = session::unshown(&fabric, 1);
    let refused = Reply::Refused(Errno::PERM.raw_os_error());
    let number = Box::new(7_u64);
    let at = (&raw const *number).expose_provenance() as u64;
    assert_eq!(ask(&mut socket, &Request::ShowMemory { at, number: 8 }), refused);
    assert_eq!(ask(&mut socket, &Request::ShowMemory { at: 8, number: 7 }), refused);
    let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
    let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
    let region = Request::Register { domain, at, address: at, len: 8, access };
    assert_eq!(ask(&mut socket, &region), refused);
    assert_eq!(ask(&mut socket, &Request::ShowMemory { at, number: 7 }), Reply::Done);
    assert!(matches!(ask(&mut socket, &region), Reply::Region { .. }));
    // No memory is there.
    let region = Request::Register { domain, at: 8, address: 8, len: 8, access };
    assert_eq!(ask(&mut socket, &region), Reply::Refused(Errno::FAULT.raw_os_error()));
}
