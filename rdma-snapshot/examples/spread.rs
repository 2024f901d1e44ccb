//! One snapshot to one, two and three replicas, side by side in one run: a plain TCP stream of the bytes, the paper's table, and chunks, as
//! a star and as a chain. Everything is on softsim and in this process.
//!
//! ```text
//! cargo run --release -p rdma-snapshot --example spread                       # 16 MiB, to see that it works
//! cargo run --release -p rdma-snapshot --example spread -- --mib 1024 --rounds 5 --out docs/snapshot
//! ```
//!
//! The bytes are base64 text in images of 100 KiB, as in the paper. Softsim moves bytes with the processor and has no bandwidth of its own,
//! so the figures are what this program and this machine cost, and no network's.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use clap::Parser;
use plotters::coord::Shift;
use plotters::prelude::*;
use rdma_snapshot::run::{Progress, Publish, Pull, Republish, publish, pull};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Offer, Piece, Sink, Source, publisher, reader};
use rdma_softsim::Fabric;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
struct Arguments {
    /// MiB of the snapshot.
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// How often everything is done; the kinds take turns.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Where spread.jsonl and spread.svg go.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only draws spread.svg from the spread.jsonl that is there.
    #[arg(long, requires = "out")]
    draw: bool,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// One stream for each replica.
    Tcp,
    /// The paper's table, as the paper reads it: one READ at a time.
    RcpSerial,
    /// The paper's table, 16 READs at a time.
    Rcp,
    /// Chunks, from one publisher.
    Star,
    /// Chunks, handed on.
    Chain,
}

const KINDS: [Kind; 5] = [Kind::Tcp, Kind::RcpSerial, Kind::Rcp, Kind::Star, Kind::Chain];

/// A line of the raw data.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Figure {
    round: usize,
    kind: Kind,
    replicas: usize,
    bytes: u64,
    /// From the first connection to the last replica's last byte.
    seconds: f64,
    /// Of the publisher's own thread, or of the threads that write streams, once the table is built.
    processor_seconds: f64,
    /// Of the whole process, both ends of everything and building included.
    all_processor_seconds: f64,
    /// From the source to the table, before anybody reads; 0 for a stream.
    building_seconds: f64,
}

/// Processor time of this thread, or of the process.
fn spent(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Base64 text.
fn images(len: usize) -> Arc<[u8]> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        DIGITS[(state >> 26) as usize]
    };
    (0..len).map(|_| next()).collect()
}

/// Memory, as a source.
struct Memory {
    bytes: Arc<[u8]>,
    at: usize,
    marked: bool,
}

impl Source for Memory {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn total(&self) -> Option<u64> {
        Some(self.bytes.len() as u64)
    }
    fn position(&self) -> Option<reader::Position> {
        None
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            return Ok(if std::mem::replace(&mut self.marked, true) { Piece::End } else { Piece::Mark });
        }
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(Piece::Bytes(count))
    }
    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Memory, as a target.
struct Kept {
    bytes: Vec<u8>,
    expected: Arc<[u8]>,
}

impl Kept {
    fn new(expected: &Arc<[u8]>) -> Self {
        Self { bytes: Vec::with_capacity(expected.len()), expected: Arc::clone(expected) }
    }
}

impl Sink for Kept {
    fn begin(&mut self, _offer: &Offer) -> io::Result<()> {
        Ok(())
    }
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
    fn mark(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn end(&mut self) -> io::Result<()> {
        if self.bytes == self.expected[..] { Ok(()) } else { Err(io::Error::other("other bytes came")) }
    }
}

/// Joins threads, and their errors.
fn all<T>(threads: Vec<std::thread::JoinHandle<Result<T, Failure>>>) -> Result<Vec<T>, Failure> {
    threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?).collect()
}

fn stream(bytes: &Arc<[u8]>, replicas: usize) -> Result<(f64, f64, f64), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let at = listener.local_addr()?;
    let begun = Instant::now();
    let readers = (0..replicas).map(|_| {
        let expected = Arc::clone(bytes);
        std::thread::spawn(move || -> Result<(), Failure> {
            let mut sink = Kept::new(&expected);
            let mut stream = TcpStream::connect(at)?;
            let mut piece = vec![0; 1 << 20];
            while let count @ 1.. = stream.read(&mut piece)? {
                sink.write(&piece[..count])?;
            }
            Ok(sink.end()?)
        })
    });
    let readers: Vec<_> = readers.collect();
    let writers = (0..replicas).map(|_| {
        let (stream, bytes) = (listener.accept().map(|(stream, _)| stream), Arc::clone(bytes));
        std::thread::spawn(move || -> Result<f64, Failure> {
            stream?.write_all(&bytes)?;
            Ok(spent(ClockId::ThreadCPUTime))
        })
    });
    let writers: Vec<_> = writers.collect();
    let processor = all(writers)?.iter().sum();
    all(readers)?;
    Ok((begun.elapsed().as_secs_f64(), processor, 0.0))
}

fn address(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, host as u8])
}

fn snapshot(kind: Kind, bytes: &Arc<[u8]>, replicas: usize) -> Result<(f64, f64, f64), Failure> {
    let fabric = Fabric::new();
    let layout = if matches!(kind, Kind::Rcp | Kind::RcpSerial) { Layout::Rcp } else { Layout::Chunks };
    let chain = kind == Kind::Chain;
    let how = Publish { layout, readers: Some(if chain { 1 } else { replicas }), ..Publish::default() };
    let source = Memory { bytes: Arc::clone(bytes), at: 0, marked: false };
    let backend = fabric.host(&[address(1)]);
    let (sender, bound) = mpsc::channel();
    let (built, building) = mpsc::channel();
    let begun = Instant::now();
    let publishing = std::thread::spawn(move || -> Result<f64, Failure> {
        let mut built_at = None;
        let told = &mut |progress: &Progress| {
            if progress.marked && built_at.is_none() {
                built_at = Some(spent(ClockId::ThreadCPUTime));
                let _nobody = built.send(());
            }
        };
        publish(&backend, (address(1), 7000).into(), source, &how, |at| sender.send(at).unwrap_or(()), told)?;
        // What it cost to serve, without what it cost to build.
        Ok(spent(ClockId::ThreadCPUTime) - built_at.unwrap_or(0.0))
    });
    let at = bound.recv()?;
    // Nobody reads before everything is there, so that building and reading are seen apart.
    building.recv()?;
    let building = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let pulls = (0..replicas).map(|replica| {
        let host = replica + 2;
        let (backend, sink) = (fabric.host(&[address(host)]), Kept::new(bytes));
        let from = if chain && replica > 0 { SocketAddr::new(address(host - 1), 7000) } else { at };
        let republish = (chain && replica + 1 < replicas).then(|| Republish {
            address: (address(host), 7000).into(),
            config: publisher::Config::default(),
            readers: 1,
            keep: Duration::from_secs(600),
        });
        let depth = if kind == Kind::RcpSerial { 1 } else { 16 };
        let config = reader::Config { depth, ..reader::Config::default() };
        let how = Pull { config, republish, attempts: 100, ..Pull::default() };
        std::thread::spawn(move || -> Result<(), Failure> {
            pull(&backend, &[from], sink, &how, &mut |_| {})?;
            Ok(())
        })
    });
    let pulls: Vec<_> = pulls.collect();
    all(pulls)?;
    let seconds = begun.elapsed().as_secs_f64();
    let processor = all(vec![publishing])?.iter().sum();
    Ok((seconds, processor, building))
}

/// The series of a figure.
type Value = fn(&Figure) -> f64;

/// Medians over the rounds, one group of bars for each number of replicas.
fn draw(figures: &[Figure], into: &Path) -> Result<(), Failure> {
    let mib = figures.first().map_or(0, |figure| figure.bytes >> 20);
    let area = SVGBackend::new(into, (1200, 460)).into_drawing_area();
    area.fill(&WHITE)?;
    let panels: [(&str, Value); 2] = [
        ("seconds until the last has everything", |figure| figure.seconds),
        ("processor seconds of both ends", |figure| figure.all_processor_seconds),
    ];
    for (area, (what, value)) in area.split_evenly((1, 2)).iter().zip(panels) {
        panel(area, figures, &format!("{mib} MiB, softsim: {what}"), value)?;
    }
    area.present()?;
    Ok(())
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    figures: &[Figure],
    caption: &str,
    value: Value,
) -> Result<(), Failure> {
    let median = |kind: Kind, replicas: usize| {
        let mut values: Vec<_> = figures
            .iter()
            .filter(|figure| figure.kind == kind && figure.replicas == replicas)
            .map(value)
            .collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(0.0)
    };
    let most = figures.iter().map(value).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..18.0, 0.0..most * 1.05)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .x_desc("one, two, three replicas")
        .y_desc("s")
        .draw()?;
    for (place, kind) in KINDS.into_iter().enumerate() {
        let color = Palette99::pick(place).to_rgba();
        let bars = (1..=3_usize).map(|replicas| {
            let left = (replicas - 1) as f64 * 6.0 + place as f64 + 0.6;
            Rectangle::new([(left, 0.0), (left + 0.8, median(kind, replicas))], color.filled())
        });
        let name = serde_json::to_value(kind)?.as_str().unwrap_or_default().to_string();
        chart
            .draw_series(bars)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).border_style(BLACK).draw()?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    let data = arguments.out.as_ref().map(|out| out.join("spread.jsonl"));
    let figures = match &data {
        Some(data) if arguments.draw => std::fs::read_to_string(data)?
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<Vec<Figure>, _>>()?,
        _ => measure(&arguments)?,
    };
    if let Some(out) = &arguments.out {
        std::fs::create_dir_all(out)?;
        let lines: Result<Vec<_>, _> = figures.iter().map(serde_json::to_string).collect();
        std::fs::write(out.join("spread.jsonl"), lines?.join("\n") + "\n")?;
        draw(&figures, &out.join("spread.svg"))?;
    }
    Ok(())
}

fn measure(arguments: &Arguments) -> Result<Vec<Figure>, Failure> {
    let bytes = images(arguments.mib << 20);
    let mut figures = Vec::new();
    for round in 0..arguments.rounds {
        for replicas in 1..=3 {
            for kind in KINDS {
                let before = spent(ClockId::ProcessCPUTime);
                let (seconds, processor_seconds, building_seconds) = match kind {
                    Kind::Tcp => stream(&bytes, replicas)?,
                    _ => snapshot(kind, &bytes, replicas)?,
                };
                let bytes = bytes.len() as u64;
                let figure = Figure {
                    round,
                    kind,
                    replicas,
                    bytes,
                    seconds,
                    processor_seconds,
                    all_processor_seconds: spent(ClockId::ProcessCPUTime) - before,
                    building_seconds,
                };
                println!("{}", serde_json::to_string(&figure)?);
                figures.push(figure);
            }
        }
    }
    Ok(figures)
}
