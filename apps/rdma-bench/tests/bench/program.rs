//! The program as a shell meets it: arguments, what it prints, and its exit status.

use std::fs::File;
use std::io::{Read, Write, pipe};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::thread;

fn bench(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-bench"));
    command.args(arguments.split_ascii_whitespace()).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

fn status(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn wrong_arguments_have_a_status_of_their_own() {
    for arguments in [
        "--target 192.0.2.1:6379",
        "--target http://192.0.2.1:6379",
        "--target tcp://192.0.2.1",
        "--target tcp://:6379",
        "--target rdma://192.0.2.1:65536",
        "--target unix://",
        "--rate 1e-19",
        "--rate 1e-25",
        "--rate 1e300",
        "--rate NaN",
        "-d 536870913",
        "-P 1000001",
        "-P 16 -d 536870912",
        "-c 0",
        "-c 18446744073709551615",
        "--threads 1000000",
        "-n 0",
    ] {
        let (status, says) = status(&bench(arguments).output().expect("runs"));
        assert_eq!(status, Some(64), "{arguments}: {says}");
        assert!(says.starts_with("error: "), "{arguments}: {says}");
    }
}

/// It cannot log in. What it says of a target with a password does not repeat it.
#[test]
fn a_password_is_not_printed() {
    for arguments in [
        "--target tcp://:hunter2@127.0.0.1:6379",
        "--target tcp://user:hunter2@127.0.0.1",
        "--target=rdma://user:hunter2@@nosuch.invalid:6379",
        "--target redis://:hunter2@127.0.0.1:6379",
        "--target :hunter2@127.0.0.1:6379",
        "--target tcp://hunter2",
        "tcp://:hunter2@127.0.0.1:6379",
        "-t tcp://:hunter2@127.0.0.1:6379",
        "-ttcp://:hunter2@127.0.0.1:6379",
        "-c :hunter2@127.0.0.1",
    ] {
        let output = bench(arguments).output().expect("runs");
        let (status, says) = status(&output);
        assert_eq!(status, Some(64), "{arguments}: {says}");
        assert!(says.starts_with("error: ") && !says.contains("hunter2"), "{arguments}: {says}");
        assert!(output.stdout.is_empty(), "{arguments}");
    }
}

/// What is piped fits 120 columns: whoever reads it later has no terminal to ask.
#[test]
fn what_is_piped_is_not_wide() {
    let long = format!("unix:///{}", "no such place ".repeat(12)).replace(' ', "-/");
    for arguments in [
        "-n 10",
        "--help",
        "-n 10 --threads 0",
        &format!("--target {long}"),
        "--target tcp://nosuch.invalid:1",
    ] {
        let output = bench(arguments).output().expect("runs");
        let (_, says) = status(&output);
        let told = String::from_utf8(output.stdout).expect("text") + &says;
        let wide = |line: &&str| line.chars().count() > 120 && line.trim().contains(' ');
        assert_eq!(told.lines().find(wide), None, "{arguments}");
    }
}

#[test]
fn as_many_are_sent_together_as_there_are() {
    let output = bench("-P 1000000 -n 10 -d 3 --json").output().expect("runs");
    assert_eq!(status(&output), (Some(0), String::new()));
    let told = String::from_utf8(output.stdout).expect("text");
    assert_eq!(told.matches(r#""requests": 10"#).count(), 3, "{told}");
}

#[test]
fn what_cannot_be_printed_is_an_error_and_no_panic() {
    // As `| true` and `> /dev/full` in a shell.
    let (nobody, to_nobody) = pipe().expect("a pipe");
    drop(nobody);
    let output = bench("-n 10 -t ping").stdout(to_nobody).output().expect("runs");
    assert_eq!(status(&output), (Some(0), String::new()));
    let full = File::options().write(true).open("/dev/full").expect("a device that is full");
    let (status, says) = status(&bench("-n 10 -t ping").stdout(full).output().expect("runs"));
    assert_eq!(status, Some(1), "{says}");
    assert!(says.starts_with("cannot print: "), "{says}");
}

/// A test that fails takes nothing from those before it.
#[test]
fn what_was_measured_before_a_failure_is_printed() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let mut chunk = [0; 4096];
            while let Ok(read @ 1..) = client.read(&mut chunk) {
                let reads_only = chunk[..read].windows(3).any(|word| word == b"SET");
                let reply: &[u8] = if reads_only { b"-READONLY no\r\n" } else { b"+PONG\r\n" };
                client.write_all(reply).expect("there is room");
            }
        }
    });
    let arguments = format!("--target tcp://{address} -c 1 -n 10 -t ping,set,ping --csv");
    let output = bench(&arguments).output().expect("runs");
    assert_eq!(status(&output), (Some(1), "SET: the server replied \"READONLY no\"\n".into()));
    let told = String::from_utf8(output.stdout).expect("text");
    assert_eq!(told.lines().count(), 2, "{told}");
    assert!(told.lines().nth(1).is_some_and(|line| line.starts_with(r#""PING","#)), "{told}");
}

/// As many clients as it is told of have the memory that they need.
#[test]
#[ignore = "takes up to 20 s; .ci/nightly runs it"]
fn eleven_hundred_clients_find_room() {
    let (status, says) = status(&bench("-c 1100 -n 1100 -t ping --json").output().expect("runs"));
    // Where it takes long, it says how far it is.
    assert_eq!(status, Some(0), "{says}");
}
