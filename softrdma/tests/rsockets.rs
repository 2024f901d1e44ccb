//! rsockets: rdma-core's own librdmacm above softrdma, and unmodified programs of sockets by its
//! librspreload.so. What is not installed is skipped.

mod common;

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use common::{CLIENT, Home, Running, SERVER, await_some, compiled, installed, served, succeeded};
use rustix::process::{Pid, Signal};

// Debian's other `nc` opens its sockets by `SOCK_NONBLOCK` and `accept4(2)`, which librspreload
// leaves to TCP.

/// Returns the command for a program with rsockets at `address`.
fn rsockets(home: &Home, address: &str, program: &[&str]) -> Command {
    let mut command = home.softrdma(&["run", "--rsockets", "--address", address, "--"]);
    command.args(program).current_dir(home.path()).stdout(Stdio::piped());
    command
}

/// Returns whether rdma-core's library for rsockets is installed; prints a reason if not.
fn preloaded() -> bool {
    static LACKS: LazyLock<bool> = LazyLock::new(|| {
        let home = Home::new("rsockets");
        let output = rsockets(&home, SERVER, &["true"]).output().expect("runs");
        let lacks = String::from_utf8_lossy(&output.stderr).contains("librspreload.so is not there");
        assert!(lacks || output.status.success(), "{output:?}");
        lacks
    });
    if *LACKS {
        println!("skipped: rsocket/librspreload.so is not installed");
    }
    !*LACKS
}

/// Writes a file of arbitrary bytes, none of which repeat at the length of any buffer.
fn arbitrary(path: &Path, len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(len).collect();
    std::fs::write(path, &bytes).expect("a file");
    bytes
}

/// `rstream -T v` compares what it gets, 128 MiB there and as many back.
///
/// Not by poll (`-T a`): it then takes the peer's end for an error if that comes with the last
/// bytes.
#[test]
fn rstream() {
    if installed("rstream").is_none() || !preloaded() {
        return;
    }
    for wait in ["-Tb", "-Tn"] {
        let home = Home::new("rstream");
        let options = ["-T", "v", wait, "-S", "1048576", "-C", "32", "-I", "4"];
        let server = Running::start(&mut rsockets(
            &home,
            SERVER,
            &[&["rstream", "-b", SERVER], &options[..]].concat(),
        ));
        let client = [&["rstream", "-s", SERVER], &options[..]].concat();
        let text = served(&home, server, || rsockets(&home, CLIENT, &client), common::success);
        assert!(text.contains("256m"), "{wait}: {text}");
    }
}

/// Without the option, a program that calls rsockets is told of it.
#[test]
fn the_option_is_named() {
    if installed("rstream").is_some() {
        let home = Home::new("option");
        let output = home.run(SERVER, &["rstream"]).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("`softrdma run --rsockets`"), "{said}");
        assert!(!output.status.success());
    }
}

/// `rcopy` maps the file at its peer. Its server takes one after the other.
#[test]
fn rcopy() {
    if installed("rcopy").is_none() || !preloaded() {
        return;
    }
    let home = Home::new("rcopy");
    let bytes = arbitrary(&home.path().join("from"), 64 << 20);
    let server = Running::start(&mut rsockets(&home, SERVER, &["rcopy"]));
    for to in ["first", "second"] {
        let to = home.path().join(to);
        let place = format!("{SERVER}:{}", to.display());
        await_some("a copy", || {
            Running::start(&mut rsockets(&home, CLIENT, &["rcopy", "from", &place])).finish().0.then_some(())
        });
        // The server closes the file after the client has ended.
        await_some("the copied bytes", || (std::fs::read(&to).ok()? == bytes).then_some(()));
    }
    server.asked_to_end();
    home.is_left();
}

/// The real librdmacm and the library in its place reach each other.
#[test]
fn rping_of_either_library() {
    if installed("rping").is_none() || !preloaded() {
        return;
    }
    let server = ["rping", "-s", "-a", SERVER, "-C", "20", "-V"];
    let client = ["rping", "-c", "-a", SERVER, "-C", "20", "-V", "-v"];
    for ours in [None, Some(SERVER), Some(CLIENT)] {
        let home = Home::new("rping-real");
        let start = |address, program: &[&str]| {
            if ours == Some(address) { home.run(address, program) } else { rsockets(&home, address, program) }
        };
        let running = Running::start(&mut start(SERVER, &server));
        served(&home, running, || start(CLIENT, &client), common::pinged(20));
    }
}

/// A program of plain sockets: three streams one after the other, each shut down half-way, and two
/// peers that are killed.
#[test]
fn plain_sockets() {
    let home = Home::new("sockets");
    let Some(program) = compiled(&home, "sockets") else { return };
    if !preloaded() {
        return;
    }
    let mut server = Running::start(&mut rsockets(&home, SERVER, &[&program, "serve", SERVER]));
    server.line("listens");
    for mebibytes in ["1", "64", "3"] {
        let mut client = rsockets(&home, CLIENT, &[&program, "move", SERVER, mebibytes]);
        let (done, said) = Running::start(&mut client).finish();
        let bytes = mebibytes.parse::<u64>().expect("a number") << 20;
        assert!(done && said == format!("moved {bytes}\n"), "{said}");
        assert_eq!(server.line("served"), bytes.to_string());
    }
    for _ in 0..2 {
        let mut held = rsockets(&home, CLIENT, &[&program, "hold", SERVER]).spawn().expect("starts");
        let mut line = [0; 6];
        std::io::Read::read_exact(held.stdout.as_mut().expect("is piped"), &mut line).expect("a line");
        assert_eq!(&line, b"holds\n");
        rustix::process::kill_process(Pid::from_child(&held), Signal::KILL).expect("runs");
        held.wait().expect("a child");
        server.line("lost");
    }
    assert!(server.finish().0);
    home.is_left();
}

/// The commands of the README.
#[test]
fn nc() {
    if installed("nc.traditional").is_none() || !preloaded() {
        return;
    }
    let home = Home::new("nc");
    let (from, to) = (home.path().join("from"), home.path().join("to"));
    let bytes = arbitrary(&from, 16 << 20);
    let mut server = rsockets(&home, SERVER, &["nc.traditional", "-l", "-s", SERVER, "-p", "8080"]);
    let mut server = server.stdout(File::create(&to).expect("a file")).spawn().expect("starts");
    await_some("a connection", || {
        let mut client = rsockets(&home, CLIENT, &["nc.traditional", "-q", "0", SERVER, "8080"]);
        client.stdin(File::open(&from).expect("a file"));
        Running::start(&mut client).finish().0.then_some(())
    });
    assert!(server.wait().expect("a child").success());
    assert!(std::fs::read(&to).expect("a file") == bytes);
    home.is_left();
}

/// A request of `curl`, and the answer of a `nc` that knows nothing of HTTP.
#[test]
fn curl_and_nc() {
    if installed("nc.traditional").is_none() || installed("curl").is_none() || !preloaded() {
        return;
    }
    let home = Home::new("curl");
    let bytes = arbitrary(&home.path().join("from"), 64 << 20);
    // It ends when curl does, and not before, however long the end of its input has been read.
    let mut server =
        rsockets(&home, SERVER, &["nc.traditional", "-l", "-s", SERVER, "-p", "8080", "-q", "60"]);
    let mut server = server.stdin(Stdio::piped()).spawn().expect("starts");
    let mut answer = server.stdin.take().expect("is piped");
    let writing = std::thread::spawn(move || {
        write!(answer, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len()).expect("reads");
        answer.write_all(&bytes).expect("reads");
        bytes
    });
    let address = format!("http://{SERVER}:8080/all");
    let client = ["curl", "--silent", "--show-error", "--output", "to", &address];
    await_some("an answer", || {
        Running::start(&mut rsockets(&home, CLIENT, &client)).finish().0.then_some(())
    });
    let bytes = writing.join().expect("written");
    assert!(std::fs::read(home.path().join("to")).expect("a file") == bytes);
    let asked = succeeded(&server.wait_with_output().expect("a child"));
    assert!(asked.starts_with("GET /all HTTP/1.1\r\nHost: 192.0.2.1:8080\r\n"), "{asked}");
    home.is_left();
}

/// The file by which librdmacm asks Linux, with arbitrary commands; and programs of librdmacm and
/// verbs, which run on the library in its place as well (`stock_programs.rs`).
#[test]
fn programs_of_c() {
    for name in ["file", "options", "elements", "chains", "extended", "threads"] {
        let home = Home::new(&format!("real-{name}"));
        let Some(program) = compiled(&home, name) else { return };
        if !preloaded() {
            return;
        }
        let output = rsockets(&home, SERVER, &[&program]).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(succeeded(&output), "done\n", "{name}: {said}");
        home.is_left();
    }
}
