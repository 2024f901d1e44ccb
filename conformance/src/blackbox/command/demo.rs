//! `demo`: a client's commands, what each does on the wire, and the report on a faulty server.

use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use rdma_conn::{Connect, Options, Stream};
use rdma_softsim::{Fabric, SoftSim};
use resp_rs::resp2::Frame;

use super::options::parse;
use super::{CommandError, finish, perform, usage};
use crate::blackbox::builtin::BuiltInServer;
use crate::client::{Failure, RespClient, describe};
use crate::exit::{BROKEN, DONE, FAILED};
use intercept::trace::recording::{Entry, EntryKind};
use intercept::trace::{Limits, Recorded, Recorder, Recording, timeline};

const PATIENCE: Duration = Duration::from_secs(5);
/// The client's window, small so that a value of 40 kB needs several.
const WINDOW: u32 = 16 << 10;
const LONG: usize = 40_000;
/// A mistake that leaves a server able to answer, and the case about it.
const MISTAKE: &str = "registers-early";
const CASE: &str = "mem.not-before-full";

/// The protocol at work.
#[derive(Args, Clone, Debug)]
pub struct Demo {
    /// Record the connection into this file, for `trace show` and `trace pcap`.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// Runs the demo.
pub fn demo(options: &Demo) -> ExitCode {
    finish(shown(options))
}

fn broken(error: impl std::fmt::Display) -> CommandError {
    (BROKEN, error.to_string())
}

fn shown(options: &Demo) -> Result<u8, CommandError> {
    let recording = right().map_err(broken)?;
    if let Some(file) = &options.record {
        recording.save(file).map_err(|error| (BROKEN, format!("{}: {error}", file.display())))?;
    }
    wrong()
}

fn right() -> Result<Recording, Failure> {
    let recorder = Recorder::new(Limits::default());
    let fabric = Fabric::new();
    let host = |last| Recorded::new(fabric.host(&[[192, 0, 2, last].into()]), &recorder);
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let _server = BuiltInServer::start(&host(1), address, Options::default())?;
    println!(
        "server   the store of our examples, on an RDMA fabric in this process\n\
         client   over RDMA, with a window of {} KiB\n",
        WINDOW >> 10
    );
    let mut how = Connect::default().timeout(PATIENCE);
    how.options.protocol.window = WINDOW;
    let mut stream = Stream::connect_with(&host(2), address, &how)?;
    stream.set_read_timeout(Some(PATIENCE));

    let mut client = RespClient::new(stream);
    let mut wire = Wire { recorder, told: 0 };
    // Both windows exist before the wire is shown.
    ask(&mut client, &["ECHO", "hello"])?;
    wire.tell("connect: both sides register a window that the other may write to; ECHO hello");
    let long = "x".repeat(LONG);
    for (title, words) in [
        ("PING", &["PING"][..]),
        ("SET greeting hello", &["SET", "greeting", "hello"]),
        ("GET greeting", &["GET", "greeting"]),
        ("SET long, of 40000 bytes", &["SET", "long", &long]),
        ("GET long (the window is full twice; the client registers anew)", &["GET", "long"]),
    ] {
        let reply = ask(&mut client, words)?;
        wire.tell(&format!("{title} -> {reply}"));
    }
    client.stream().close(PATIENCE)?;
    let leaving = Instant::now();
    while !wire.is_over() && leaving.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    wire.tell("the client leaves");
    Ok(wire.recorder.recording())
}

fn ask(client: &mut RespClient<Stream<Recorded<SoftSim>>>, words: &[&str]) -> Result<String, Failure> {
    let words: Vec<_> = words.iter().map(|word| word.as_bytes()).collect();
    Ok(match client.call(&words)? {
        Frame::SimpleString(text) => String::from_utf8_lossy(&text).into_owned(),
        Frame::BulkString(Some(text)) if text.len() > 40 => format!("{} bytes", text.len()),
        Frame::BulkString(Some(text)) => String::from_utf8_lossy(&text).into_owned(),
        other => describe(&other),
    })
}

struct Wire {
    recorder: Recorder,
    told: usize,
}

impl Wire {
    fn is_over(&self) -> bool {
        let is_end =
            |entry: &Entry| matches!(&entry.what, EntryKind::Event { event } if event == "Disconnected");
        self.recorder.recording().entries.iter().any(is_end)
    }

    fn tell(&mut self, title: &str) {
        println!("{title}");
        let lines = timeline::first(&self.recorder.recording());
        for line in lines.iter().skip(self.told) {
            println!("    {}  {}", line.column.name(), line.text);
        }
        println!();
        self.told = lines.len();
    }
}

fn wrong() -> Result<u8, CommandError> {
    let line = format!("run server --select {CASE} --demo-mistake {MISTAKE}");
    println!("a server with one mistake, under the suite:\nvalkey-rdma-conformance {line}");
    // So that the output on the other stream comes after it.
    let _flushed = stdout().flush();
    let arguments: Vec<String> = line.split(' ').map(String::from).collect();
    let code = perform(&parse(&arguments).map_err(usage)?, &arguments)?;
    if code != FAILED {
        return Err((BROKEN, format!("the mistake was not noticed: status {code}")));
    }
    println!("\nIt exits with {FAILED}. What the case is about, and other mistakes there are:");
    println!("    valkey-rdma-conformance explain {CASE}");
    println!("    valkey-rdma-conformance run server --demo-mistake any");
    println!("To test your own server or client: docs/adopt.md");
    Ok(DONE)
}
