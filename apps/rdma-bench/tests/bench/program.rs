//! The program as seen from a shell: arguments, output, and exit status.

use std::fs::File;
use std::io::{Read, Write, pipe};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

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

#[test]
fn a_password_is_not_printed() {
    for arguments in [
        "--target tcp://:hunter2@127.0.0.1:6379/none",
        "--target tcp://user:hunter2@127.0.0.1",
        "--target=rdma://user-hunter2@nosuch.invalid:6379",
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

/// Each connection of each thread begins with AUTH and SELECT. A refusal repeats no password.
#[test]
fn it_logs_in() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || {
                let (mut chunk, mut known) = ([0; 4096], 0);
                while let Ok(read @ 1..) = client.read(&mut chunk) {
                    let words = String::from_utf8_lossy(&chunk[..read]).replace("\r\n", " ");
                    let reply: &[u8] = match (known, &*words) {
                        (0, "*3 $4 AUTH $3 ann $7 hunter2 ") | (1, "*2 $6 SELECT $1 3 ") => b"+OK\r\n",
                        (0 | 1, _) => b"-WRONGPASS it is not hunter3\r\n",
                        _ if words.contains("SET") => b"+OK\r\n",
                        _ if words.contains("GET") => b"$3\r\nxxx\r\n",
                        _ => b"$0\r\n\r\n",
                    };
                    known += 1;
                    client.write_all(reply).expect("there is room");
                }
            });
        }
    });
    let load = "-c 3 --threads 2 -n 20 -t ping,get,set";
    let line = format!("--target tcp://ann:hunter2@{address}/3 {load}");
    assert_eq!(status(&bench(&line).output().expect("runs")), (Some(0), String::new()));
    let line = format!("--target tcp://ann:hunter3@{address}/3 {load}");
    let told = "PING: AUTH: the server replied \"WRONGPASS it is not …\"\n";
    assert_eq!(status(&bench(&line).output().expect("runs")), (Some(1), told.into()));
}

/// A TLS server needs a certificate of the given authority. Any other is rejected.
#[test]
fn it_speaks_tls() {
    let file =
        |name: &str| format!("{}/../rdma-bridge/tests/certificates/{name}", env!("CARGO_MANIFEST_DIR"));
    let chain = CertificateDer::pem_file_iter(file("server.pem")).expect("a file");
    let key = PrivateKeyDer::from_pem_file(file("server.key.pem")).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain.map(|one| one.expect("a certificate")).collect(), key)
        .expect("they fit");
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let tls = ServerConnection::new(Arc::clone(&config)).expect("a session");
            let mut stream = StreamOwned::new(tls, client);
            thread::spawn(move || {
                let mut chunk = [0; 4096];
                while let Ok(1..) = stream.read(&mut chunk) {
                    stream.write_all(b"+PONG\r\n").expect("there is room");
                }
            });
        }
    });
    let line = format!("--target tls://localhost:{port} -c 2 -n 10 -t ping --tls-ca");
    let run = |authority: &str| status(&bench(&line).arg(file(authority)).output().expect("runs"));
    assert_eq!(run("authority.pem"), (Some(0), String::new()));
    let (code, says) = run("server.pem");
    assert!(code == Some(1) && says.contains("certificate"), "{says}");
    let (code, says) = run("none.pem");
    assert!(code == Some(1) && says.contains("none.pem"), "{says}");
    let (code, says) = status(&bench("--target tls://localhost:1").output().expect("runs"));
    assert!(code == Some(64) && says.contains("--tls-ca"), "{says}");
}

/// Piped output fits 120 columns: a later reader has no terminal to ask.
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
    // Like `| true` and `> /dev/full` in a shell.
    let (nobody, to_nobody) = pipe().expect("a pipe");
    drop(nobody);
    let output = bench("-n 10 -t ping").stdout(to_nobody).output().expect("runs");
    assert_eq!(status(&output), (Some(141), String::new()));
    let full = File::options().write(true).open("/dev/full").expect("a device that is full");
    let (status, says) = status(&bench("-n 10 -t ping").stdout(full).output().expect("runs"));
    assert_eq!(status, Some(1), "{says}");
    assert!(says.starts_with("cannot print: "), "{says}");
}

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

#[test]
#[ignore = "takes up to 20 s; .ci/nightly runs it"]
fn eleven_hundred_clients_find_room() {
    let (status, says) = status(&bench("-c 1100 -n 1100 -t ping --json").output().expect("runs"));
    // If it takes long, it prints its progress.
    assert_eq!(status, Some(0), "{says}");
}
