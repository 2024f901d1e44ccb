//! `demo`: commands of redis-rs, what each does on the wire, and what the suite says of a server that errs. Needs no RDMA device
//! and no rights.

use std::io::{Read, Write as _, stdout};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use kv_store::Store;
use rdma_bridge::{Bridge, Place, Settings as BridgeSettings};
use rdma_redis::redis::{self, aio::MultiplexedConnection};
use rdma_redis::{Client, Settings};
use rdma_softsim::Fabric;

use super::doctor::{VALKEY, on_path};
use super::options::parse;
use super::{CommandError, finish, perform, usage};
use crate::exit::{BROKEN, DONE, FAILED};
use crate::trace::recording::{Entry, EntryKind};
use crate::trace::{Limits, Recorded, Recorder, Recording, timeline};

/// How long a Valkey may take to listen.
const STARTING: Duration = Duration::from_secs(10);
/// How long the end of a connection may take.
const LEAVING: Duration = Duration::from_secs(2);
/// The client's window, small so that a value of 40 kB needs several.
const WINDOW: u32 = 16 << 10;
/// A long value.
const LONG: usize = 40_000;
/// A mistake that leaves a server able to answer, and the case that is about it.
const MISTAKE: &str = "registers-early";
const CASE: &str = "mem.not-before-full";

/// The protocol at work.
#[derive(Args, Clone, Debug)]
pub struct Demo {
    /// Record the connection into this file, for `trace show` and `trace pcap`.
    #[arg(long)]
    record: Option<PathBuf>,
}

/// Shows it.
pub fn demo(options: &Demo) -> ExitCode {
    finish(shown(options))
}

fn broken(error: impl std::fmt::Display) -> CommandError {
    (BROKEN, error.to_string())
}

fn shown(options: &Demo) -> Result<u8, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
    let recording = runtime.block_on(right())?;
    if let Some(file) = &options.record {
        recording.save(file).map_err(|error| (BROKEN, format!("{}: {error}", file.display())))?;
    }
    wrong()
}

/// A client and a server that do as they should, and what goes between them.
async fn right() -> Result<Recording, CommandError> {
    let server = match on_path(VALKEY) {
        Some(program) => Server::valkey(&program),
        None => Server::store(),
    };
    let server = server.map_err(broken)?;
    let recorder = Recorder::new(Limits::default());
    let fabric = Fabric::new();
    let host = |last| Recorded::new(fabric.host(&[Ipv4Addr::new(192, 0, 2, last).into()]), &recorder);
    let place: Place = format!("tcp://{}", server.address).parse().map_err(broken)?;
    let middle: Place = "rdma://192.0.2.1:6379".parse().map_err(broken)?;
    let bridge = Bridge::bind(&host(1), &middle, place, &BridgeSettings::default()).await.map_err(broken)?;
    let bridge = tokio::spawn(bridge.serve(std::future::pending()));
    println!(
        "server   {}\n         over TCP, at {}\nbridge   from TCP to an RDMA fabric in this process, where it is the server\n\
         client   redis-rs over RDMA, with a window of {} KiB\n",
        server.what,
        server.address,
        WINDOW >> 10
    );
    let mut settings = Settings::default();
    settings.connect.options.protocol.window = WINDOW;
    let client = Client::with_settings(host(2), "valkey+rdma://192.0.2.1:6379", settings).map_err(broken)?;

    let mut wire = Wire { recorder, told: 0 };
    let mut connection = client.get_multiplexed_async_connection().await.map_err(broken)?;
    wire.tell("connect: both sides register a window that the other may write to");
    let long = "x".repeat(LONG);
    for (title, words) in [
        ("PING", &["PING"][..]),
        ("SET greeting hello", &["SET", "greeting", "hello"]),
        ("GET greeting", &["GET", "greeting"]),
        ("SET long, of 40000 bytes", &["SET", "long", &long]),
        ("GET long (the window is full twice; the client registers anew)", &["GET", "long"]),
    ] {
        let reply = ask(&mut connection, words).await.map_err(broken)?;
        wire.tell(&format!("{title} -> {reply}"));
    }
    drop(connection);
    let leaving = Instant::now();
    while !wire.is_over() && leaving.elapsed() < LEAVING {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    wire.tell("the client leaves");
    bridge.abort();
    Ok(wire.recorder.recording())
}

/// Sends a command; the reply in a few words.
async fn ask(connection: &mut MultiplexedConnection, words: &[&str]) -> redis::RedisResult<String> {
    let mut command = redis::Cmd::new();
    command.arg(words);
    let reply: String = command.query_async(connection).await?;
    Ok(if reply.len() > 40 { format!("{} bytes", reply.len()) } else { reply })
}

/// The wire, as far as it was told.
struct Wire {
    recorder: Recorder,
    told: usize,
}

impl Wire {
    /// Whether the server has seen the end of the connection.
    fn is_over(&self) -> bool {
        let is_end =
            |entry: &Entry| matches!(&entry.what, EntryKind::Event { event } if event == "Disconnected");
        self.recorder.recording().entries.iter().any(is_end)
    }

    /// Prints what happened since the last call.
    fn tell(&mut self, title: &str) {
        println!("{title}");
        let lines = timeline::first(&self.recorder.recording());
        for line in lines.iter().skip(self.told) {
            let side = match line.column {
                timeline::Column::Client => "client",
                timeline::Column::Server => "server",
            };
            println!("    {side}  {}", line.text);
        }
        println!();
        self.told = lines.len();
    }
}

/// Shows the suite's verdict on a server with one mistake, by its own command.
fn wrong() -> Result<u8, CommandError> {
    let line = format!("run server --select {CASE} --demo-mistake {MISTAKE}");
    println!("a server with one mistake, under the suite:\nvalkey-rdma-conformance {line}");
    // What goes to the other stream stays behind it.
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

/// A server of TCP.
struct Server {
    what: String,
    address: SocketAddr,
    /// Its process, if it has its own.
    child: Option<Child>,
}

impl Server {
    /// The store of examples and tests, in this process.
    fn store() -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let store = Arc::new(Store::default());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let store = Arc::clone(&store);
                std::thread::spawn(move || {
                    if let Err(error) = client.set_nodelay(true).and_then(|()| store.serve(client)) {
                        tracing::debug!(%error, "client lost");
                    }
                });
            }
        });
        Ok(Self {
            what: format!("the store of our examples (no {VALKEY} on the PATH)"),
            address,
            child: None,
        })
    }

    /// An installed Valkey, which keeps nothing.
    fn valkey(program: &Path) -> std::io::Result<Self> {
        // Free now; if somebody takes it meanwhile, the server ends and says so.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let port = address.port().to_string();
        let child = Command::new(program)
            .args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--appendonly", "no"])
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut server = Self { what: program.display().to_string(), address, child: Some(child) };
        let deadline = Instant::now() + STARTING;
        while let Err(error) = TcpStream::connect(address) {
            if Instant::now() >= deadline || server.has_ended()? {
                let mut said = String::new();
                if let Some(child) = &mut server.child {
                    child.kill()?;
                    child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut said)).transpose()?;
                }
                return Err(std::io::Error::new(
                    error.kind(),
                    format!("{} does not start: {said}", server.what),
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn has_ended(&mut self) -> std::io::Result<bool> {
        Ok(self.child.as_mut().map(Child::try_wait).transpose()?.flatten().is_some())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself.
            let _killed = child.kill();
            let _ended = child.wait();
        }
    }
}
