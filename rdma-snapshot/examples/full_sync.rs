//! The first tables of the paper again, side by side in one run: one, two and three replicas of a live Valkey by its own full sync over TCP
//! (through a disk, without, and with two channels), and by chunks over RDMA READ, as a star and as a chain. Valkeys are processes; RDMA is
//! softsim, in this process.
//!
//! ```text
//! cargo run --release -p rdma-snapshot --example full_sync -- --mib 256 --out docs/snapshot
//! ```
//!
//! Needs a `valkey-server`, which `VALKEY_SERVER` may name; without one it says so and ends.

#[path = "../tests/support/server.rs"]
mod server;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Parser;
use rdma_snapshot::publisher;
use rdma_snapshot::run::{Publish, Pull, Republish, publish, pull};
use rdma_snapshot::valkey::{LiveSink, LiveSource, Target};
use rdma_softsim::Fabric;
use redis::{Connection, cmd, pipe};
use serde::Serialize;
use server::Valkey;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How long a replica may take.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Parser)]
struct Arguments {
    /// MiB of images in the source.
    #[arg(long, default_value_t = 8)]
    mib: usize,
    /// Where full_sync.jsonl goes.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// REPLICAOF, through a file at both ends: what the paper compares with.
    Disk,
    /// REPLICAOF, without files.
    Diskless,
    /// REPLICAOF, without files, the RDB over a connection of its own.
    DualChannel,
    /// READ, all from one publisher.
    Star,
    /// READ, handed on.
    Chain,
}

const KINDS: [Kind; 5] = [Kind::Disk, Kind::Diskless, Kind::DualChannel, Kind::Star, Kind::Chain];

/// A line of the raw data.
#[derive(Serialize)]
struct Figure {
    kind: Kind,
    replicas: usize,
    mib: usize,
    /// From the first request to the last replica that has everything.
    seconds: f64,
    /// Of the source's Valkey and its children.
    source_processor_seconds: f64,
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    let Some(source) = Valkey::start() else { return Ok(()) };
    fill(&mut source.connect(), arguments.mib)?;
    let mut lines = String::new();
    for replicas in 1..=3 {
        for kind in KINDS {
            let before = processor(&mut source.connect())?;
            let targets: Vec<_> = (0..replicas).map_while(|_| Valkey::start()).collect();
            let seconds = match kind {
                Kind::Star | Kind::Chain => ours(kind, &source, &targets)?,
                _ => theirs(kind, &source, &targets)?,
            };
            let source_processor_seconds = processor(&mut source.connect())? - before;
            for target in &targets {
                let digest = |one: &Valkey| cmd("DEBUG").arg("DIGEST").query::<String>(&mut one.connect());
                if digest(target)? != digest(&source)? {
                    return Err(format!("{kind:?}: a replica is not equal").into());
                }
            }
            let figure = Figure { kind, replicas, mib: arguments.mib, seconds, source_processor_seconds };
            let line = serde_json::to_string(&figure)?;
            println!("{line}");
            lines += &(line + "\n");
        }
    }
    if let Some(out) = arguments.out {
        std::fs::create_dir_all(&out)?;
        std::fs::write(out.join("full_sync.jsonl"), lines)?;
    }
    Ok(())
}

/// Images of 100 KiB in base64.
fn fill(source: &mut Connection, mib: usize) -> Result<(), Failure> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut state = 1_u32;
    let mut image = vec![0; 100 << 10];
    for index in 0..(mib << 20) / image.len() {
        for byte in &mut image {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = DIGITS[(state >> 26) as usize];
        }
        pipe().cmd("SET").arg(format!("image:{index}")).arg(&image).exec(source)?;
    }
    Ok(())
}

/// Seconds of processor time that a server and its children have had. A child counts once it has ended.
fn processor(server: &mut Connection) -> Result<f64, Failure> {
    while cmd("INFO").arg("persistence").query::<String>(server)?.contains("rdb_bgsave_in_progress:1") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let info: String = cmd("INFO").arg("cpu").query(server)?;
    let names = ["used_cpu_sys:", "used_cpu_user:", "used_cpu_sys_children:", "used_cpu_user_children:"];
    let field =
        |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
    Ok(names.into_iter().filter_map(field).sum())
}

fn set(server: &Valkey, settings: &[(&str, &str)]) -> Result<(), Failure> {
    let mut connection = server.connect();
    for (name, value) in settings {
        cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut connection)?;
    }
    Ok(())
}

/// Settings of a replica, or target, by how it loads.
fn loading(kind: Kind) -> [(&'static str, &'static str); 2] {
    let dual = if kind == Kind::DualChannel { "yes" } else { "no" };
    let load = if kind == Kind::Disk { "disabled" } else { "swapdb" };
    [("repl-diskless-load", load), ("dual-channel-replication-enabled", dual)]
}

/// Valkey's own full sync.
fn theirs(kind: Kind, source: &Valkey, targets: &[Valkey]) -> Result<f64, Failure> {
    let sync = if kind == Kind::Disk { "no" } else { "yes" };
    // It begins as soon as all replicas wait.
    let count = targets.len().to_string();
    set(source, &[("repl-diskless-sync", sync), ("repl-diskless-sync-delay", "5"), loading(kind)[1]])?;
    set(source, &[("repl-diskless-sync-max-replicas", &count)])?;
    for target in targets {
        set(target, &loading(kind))?;
    }
    let begun = Instant::now();
    for target in targets {
        let port = source.port().to_string();
        cmd("REPLICAOF").arg("127.0.0.1").arg(port).exec(&mut target.connect())?;
    }
    for target in targets {
        let mut connection = target.connect();
        loop {
            let info: String = cmd("INFO").arg("replication").query(&mut connection)?;
            if info.contains("master_link_status:up") {
                break;
            }
            if begun.elapsed() > PATIENCE {
                return Err("a replica does not come up".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    for target in targets {
        cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut target.connect())?;
    }
    Ok(seconds)
}

fn address(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, host as u8])
}

/// Ours, from the PSYNC to the last target that has loaded.
fn ours(kind: Kind, source: &Valkey, targets: &[Valkey]) -> Result<f64, Failure> {
    set(source, &[("repl-diskless-sync", "yes"), ("repl-diskless-sync-delay", "0")])?;
    for target in targets {
        set(target, &loading(kind))?;
    }
    let fabric = Fabric::new();
    let begun = Instant::now();
    let live = LiveSource::open(source.server(), false)?;
    let chain = kind == Kind::Chain;
    let how = Publish { readers: Some(if chain { 1 } else { targets.len() }), ..Publish::default() };
    let backend = fabric.host(&[address(1)]);
    let (sender, bound) = mpsc::channel();
    let publishing = std::thread::spawn(move || {
        publish(
            &backend,
            (address(1), 7000).into(),
            live,
            &how,
            |at| sender.send(at).unwrap_or(()),
            &mut |_| {},
        )
    });
    let at = bound.recv()?;
    let pulls = targets.iter().enumerate().map(|(replica, target)| {
        let host = replica + 2;
        let backend = fabric.host(&[address(host)]);
        let sink = LiveSink::new(Target { server: target.server(), replace: false, serve_on: None });
        let from = if chain && replica > 0 { SocketAddr::new(address(host - 1), 7000) } else { at };
        let republish = (chain && replica + 1 < targets.len()).then(|| Republish {
            address: (address(host), 7000).into(),
            config: publisher::Config::default(),
            readers: 1,
            keep: PATIENCE,
        });
        let how = Pull { republish, attempts: 100, ..Pull::default() };
        std::thread::spawn(move || pull(&backend, &[from], sink, &how, &mut |_| {}))
    });
    let pulls: Vec<_> = pulls.collect();
    for pulled in pulls {
        pulled.join().map_err(|_| "a thread panicked")??;
    }
    let seconds = begun.elapsed().as_secs_f64();
    publishing.join().map_err(|_| "a thread panicked")??;
    Ok(seconds)
}
