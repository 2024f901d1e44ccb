//! The test clients of docs/adopt behave as the suite requires. They speak TCP: no RDMA is needed.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::spec::have;
use conformance::blackbox::responder::Responder;
use conformance::requirements::workspace;

#[derive(Clone, Copy, PartialEq)]
enum Conduct {
    Right,
    /// It changes one byte of a long reply.
    Changes,
    /// It disconnects in the middle.
    Leaves,
}

fn meet(client: &mut Command, how: Conduct) -> (Option<i32>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut responder, mut chunk) = (Responder::default(), vec![0; 1 << 16]);
        while let Ok(read @ 1..) = stream.read(&mut chunk) {
            let mut replies = responder.answer(&chunk[..read]).unwrap();
            let is_long = replies.len() > 50_000 && replies.len() < 100_000;
            match how {
                Conduct::Changes if is_long => replies[40_000] ^= 1,
                Conduct::Leaves if is_long => return,
                _ => {}
            }
            if stream.write_all(&replies).is_err() {
                return;
            }
        }
    });
    let port = address.port().to_string();
    let output = client.args(["127.0.0.1", &port]).stdin(Stdio::null()).output().unwrap();
    serving.join().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn is_a_test_client(client: impl Fn() -> Command) {
    assert_eq!(meet(&mut client(), Conduct::Right), (Some(0), String::new()));
    for wrong in [Conduct::Changes, Conduct::Leaves] {
        let (status, told) = meet(&mut client(), wrong);
        assert!(status == Some(1) && !told.is_empty() && !told.contains("Traceback"), "{status:?}: {told}");
    }
    let refused = client().args(["127.0.0.1", "1"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
}

fn source(name: &str) -> PathBuf {
    workspace().unwrap().join("docs/adopt").join(name)
}

#[test]
fn in_python() {
    if !have("python3", "--version") {
        return;
    }
    is_a_test_client(|| {
        let mut client = Command::new("python3");
        client.arg(source("client.py"));
        client
    });
}

#[test]
fn in_c() {
    if !have("cc", "--version") {
        return;
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("test-client");
    let flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", "-o"];
    let built = Command::new("cc").args(flags).arg(&program).arg(source("client.c")).status().unwrap();
    assert!(built.success());
    is_a_test_client(|| Command::new(&program));
}
