//! Measures from a live Valkey to live ones.

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rdma_snapshot::valkey::{LiveSink, LiveSource, Opening};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{FileSource, Offer, Sink as _, Stop};
use redis::{Connection, cmd};
use rustix::time::ClockId;

use crate::place::{PATIENCE, Place, Publishing, pull_all};
use crate::server::Valkey;
use crate::{Failure, IMAGE, Kind, Link, Measured, all, spent};

/// The offer of an RDB from a file, for a sink outside of a pull.
const FILE: Offer =
    Offer { layout: Layout::Chunks, content: Content::Rdb, chunk_size: 1 << 20, total: None, position: None };

/// A Valkey with images.
pub(crate) struct Source {
    valkey: Valkey,
    digest: String,
}

fn digest(valkey: &Valkey) -> Result<String, Failure> {
    Ok(cmd("DEBUG").arg("DIGEST").query(&mut valkey.connect())?)
}

fn set(server: &Valkey, settings: &[(&str, &str)]) -> Result<(), Failure> {
    let mut connection = server.connect();
    for (name, value) in settings {
        cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut connection)?;
    }
    Ok(())
}

/// Waits until a field of `INFO section` has the value `wanted`.
fn await_info(server: &mut Connection, section: &str, wanted: &str) -> Result<(), Failure> {
    let begun = Instant::now();
    while !cmd("INFO").arg(section).query::<String>(server)?.contains(wanted) {
        if begun.elapsed() > PATIENCE {
            return Err(format!("no {wanted}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Source {
    /// Starts it. Prints why and returns `None` if there is no program.
    pub(crate) fn start(images: &[u8], network: IpAddr) -> Result<Option<Self>, Failure> {
        let Some(valkey) = Valkey::start() else { return Ok(None) };
        if network != Ipv4Addr::LOCALHOST {
            set(&valkey, &[("bind", &format!("127.0.0.1 {network}"))])?;
        }
        let mut connection = valkey.connect();
        for (index, image) in images.chunks(IMAGE).enumerate() {
            cmd("SET").arg(format!("image:{index}")).arg(image).exec(&mut connection)?;
        }
        let digest = digest(&valkey)?;
        Ok(Some(Self { valkey, digest }))
    }

    /// Builds a number of replicas.
    pub(crate) fn measure<P: Place>(
        &self,
        place: &P,
        kind: Kind,
        replicas: usize,
        apart: Duration,
        link: Link,
    ) -> Result<Measured, Failure> {
        let targets: Vec<_> = (0..replicas).map_while(|_| Valkey::start()).collect();
        let count = replicas.to_string();
        let together = theirs(kind) && apart.is_zero();
        // Our sink takes what a single replica takes.
        let sync = [
            ("repl-diskless-sync", if kind == Kind::Disk { "no" } else { "yes" }),
            ("repl-diskless-sync-delay", if together { "5" } else { "0" }),
            // Valkey begins as soon as all replicas wait.
            ("repl-diskless-sync-max-replicas", if together { &count } else { "0" }),
        ];
        let dual = ("dual-channel-replication-enabled", if kind == Kind::DualChannel { "yes" } else { "no" });
        set(&self.valkey, &sync)?;
        set(&self.valkey, &[("rdbcompression", if kind == Kind::Tuned { "no" } else { "yes" })])?;
        set(&self.valkey, &[dual])?;
        for target in &targets {
            set(
                target,
                &[dual, ("repl-diskless-load", if kind == Kind::Disk { "disabled" } else { "swapdb" })],
            )?;
        }
        let before = self.processor()?;
        let mut measured = match kind {
            _ if theirs(kind) => self.replicaof(kind, &targets, apart, link)?,
            Kind::Tcp | Kind::Rcp => self.by_file(place, kind, &targets, link)?,
            _ => self.live(place, kind, &targets, apart, link)?,
        };
        measured.source_seconds += self.processor()? - before;
        for target in &targets {
            if digest(target)? != self.digest {
                return Err(format!("{kind:?}: a replica is not equal").into());
            }
        }
        Ok(measured)
    }

    /// Returns the processor seconds of it and its children. A child counts once it has ended.
    fn processor(&self) -> Result<f64, Failure> {
        let mut connection = self.valkey.connect();
        await_info(&mut connection, "persistence", "rdb_bgsave_in_progress:0")?;
        let info: String = cmd("INFO").arg("cpu").query(&mut connection)?;
        let names = ["used_cpu_sys:", "used_cpu_user:", "used_cpu_sys_children:", "used_cpu_user_children:"];
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        Ok(names.into_iter().filter_map(field).sum())
    }

    /// Measures Valkey's own full sync.
    fn replicaof(
        &self,
        kind: Kind,
        targets: &[Valkey],
        apart: Duration,
        link: Link,
    ) -> Result<Measured, Failure> {
        let begun = Instant::now();
        for (number, target) in (0..).zip(targets) {
            std::thread::sleep((apart * number).saturating_sub(begun.elapsed()));
            let port = self.valkey.port().to_string();
            cmd("REPLICAOF").arg(link.network.to_string()).arg(port).exec(&mut target.connect())?;
        }
        for target in targets {
            await_info(&mut target.connect(), "replication", "master_link_status:up")?;
        }
        let seconds = begun.elapsed().as_secs_f64();
        for target in targets {
            cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut target.connect())?;
        }
        let making_seconds = if kind == Kind::Disk { self.saved()? } else { 0.0 };
        Ok(Measured { seconds, source_seconds: 0.0, making_seconds })
    }

    /// Returns the whole seconds that its last RDB file took.
    fn saved(&self) -> Result<f64, Failure> {
        let info: String = cmd("INFO").arg("persistence").query(&mut self.valkey.connect())?;
        let took = info.lines().find_map(|line| line.strip_prefix("rdb_last_bgsave_time_sec:"));
        Ok(took.ok_or("no last RDB")?.trim().parse()?)
    }

    /// Has it write an RDB file.
    fn save(&self) -> Result<PathBuf, Failure> {
        let mut connection = self.valkey.connect();
        cmd("BGSAVE").exec(&mut connection)?;
        await_info(&mut connection, "persistence", "rdb_bgsave_in_progress:0")?;
        Ok(self.valkey.folder.join("dump.rdb"))
    }

    /// Measures the kinds that write a file and move it.
    fn by_file<P: Place>(
        &self,
        place: &P,
        kind: Kind,
        targets: &[Valkey],
        link: Link,
    ) -> Result<Measured, Failure> {
        let begun = Instant::now();
        let file = self.save()?;
        let making_seconds = begun.elapsed().as_secs_f64();
        let (seconds, source_seconds) = if kind == Kind::Tcp {
            let source_seconds = stream(link, sinks(targets), &file)?;
            (begun.elapsed(), source_seconds)
        } else {
            let source = FileSource::open(&file, Content::Rdb)?;
            let publishing = Publishing::begin(place, kind, source, targets.len(), link)?;
            pull_all(place, kind, sinks(targets), Duration::ZERO)?;
            // No replica waits for the release of the memory.
            (begun.elapsed(), publishing.end()?)
        };
        Ok(Measured { seconds: seconds.as_secs_f64(), source_seconds, making_seconds })
    }

    /// Measures moving the bytes of `PSYNC` as they come.
    fn live<P: Place>(
        &self,
        place: &P,
        kind: Kind,
        targets: &[Valkey],
        apart: Duration,
        link: Link,
    ) -> Result<Measured, Failure> {
        let begun = Instant::now();
        let notes = Some(self.valkey.folder.join("notes"));
        let how = Opening { uncompressed: true, notes, ..Opening::default() };
        let live = LiveSource::open(self.valkey.server(), &how)?;
        let publishing = Publishing::begin(place, kind, live, targets.len(), link)?;
        pull_all(place, kind, sinks(targets), apart)?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Measured { seconds, source_seconds: publishing.end()?, making_seconds: 0.0 })
    }
}

const fn theirs(kind: Kind) -> bool {
    matches!(kind, Kind::Disk | Kind::Diskless | Kind::Tuned | Kind::DualChannel)
}

fn sinks(targets: &[Valkey]) -> Vec<LiveSink> {
    targets.iter().map(|target| LiveSink::new(target.target(false))).collect()
}

/// Sends a file by TCP to every sink. Returns the processor time of the senders.
fn stream(link: Link, sinks: Vec<LiveSink>, file: &Path) -> Result<f64, Failure> {
    let listener = TcpListener::bind((link.network, 0))?;
    let at = listener.local_addr()?;
    let count = sinks.len();
    let readers = sinks.into_iter().map(|mut sink| {
        std::thread::spawn(move || -> Result<(), Failure> {
            let mut stream = TcpStream::connect(at)?;
            sink.begin(&FILE, &Stop::default())?;
            let mut piece = vec![0; 1 << 20];
            while let read @ 1.. = stream.read(&mut piece)? {
                sink.write(&piece[..read])?;
            }
            sink.mark()?;
            Ok(sink.end()?)
        })
    });
    let readers: Vec<_> = readers.collect();
    let writers = (0..count).map(|_| {
        let (stream, file) = (listener.accept().map(|(stream, _)| stream), File::open(file));
        std::thread::spawn(move || -> Result<f64, Failure> {
            std::io::copy(&mut file?, &mut stream?)?;
            Ok(spent(ClockId::ThreadCPUTime))
        })
    });
    let source_seconds = all(writers.collect())?.iter().sum();
    all(readers)?;
    Ok(source_seconds)
}
