//! Whole runs in real time, on softsim: a file to files.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_snapshot::run::{Progress, Publish, Pull, Republish, Stop, publish, pull};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Error, FileSink, FileSource, Offer, Piece, Sink, Source, publisher, reader};
use rdma_softsim::{Fabric, SoftSim};

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host])
}

/// A folder of a test's own, with a file of `len` bytes in it.
fn folder(name: &str, len: usize) -> (PathBuf, Vec<u8>) {
    let folder = std::env::temp_dir().join(format!("rdma-snapshot-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + at / 977) as u8).collect();
    std::fs::write(folder.join("source"), &bytes).expect("a file");
    (folder, bytes)
}

/// Publishes a folder's file on host 1.
fn publishing(
    backend: &SoftSim,
    folder: &std::path::Path,
    how: Publish,
) -> (SocketAddr, JoinHandle<Result<Progress, Error>>) {
    let source = FileSource::open(&folder.join("source"), Content::Bytes).expect("a source");
    let (sender, bound) = mpsc::channel();
    let backend = backend.clone();
    let thread = std::thread::spawn(move || {
        let told = &mut |_: &Progress| {};
        publish(&backend, (address(1), 0).into(), source, &how, |at| sender.send(at).expect("a test"), told)
    });
    (bound.recv().expect("a publisher"), thread)
}

fn into_file(folder: &std::path::Path, name: &str) -> FileSink {
    FileSink::new(folder.join(name), false)
}

/// A star of three in both layouts, verified.
#[test]
fn a_file_is_pulled_by_three_in_either_layout() {
    for (name, layout) in [("chunks", Layout::Chunks), ("rcp", Layout::Rcp)] {
        let (folder, bytes) = folder(name, 9_000_001);
        let fabric = Fabric::new();
        let how = Publish { layout, readers: Some(3), ..Publish::default() };
        let (at, publisher) = publishing(&fabric.host(&[address(1)]), &folder, how);
        let pulls: Vec<_> = (2..5)
            .map(|host| {
                let (backend, sink) = (fabric.host(&[address(host)]), into_file(&folder, &host.to_string()));
                std::thread::spawn(move || {
                    let how = Pull { verify: true, ..Pull::default() };
                    pull(&backend, &[at], sink, &how, &mut |_| {})
                })
            })
            .collect();
        for (host, pulled) in (2..5).zip(pulls) {
            let progress = pulled.join().expect("no panic").expect("pulled");
            assert_eq!((progress.bytes, progress.marked), (9_000_001, true));
            assert!(std::fs::read(folder.join(host.to_string())).expect("a file") == bytes);
        }
        let published = publisher.join().expect("no panic").expect("published");
        assert_eq!((published.bytes, published.done), (9_000_001, 3));
        for host in 1..5 {
            assert_eq!(fabric.resources(address(host)), rdma_softsim::Resources::default());
        }
        std::fs::remove_dir_all(folder).expect("clean");
    }
}

/// A chain of three: the publisher has one reader, and everybody has everything.
#[test]
fn a_chain_hands_on_what_it_pulls() {
    let (folder, bytes) = folder("chain", 9_000_001);
    let fabric = Fabric::new();
    let (at, publisher) =
        publishing(&fabric.host(&[address(1)]), &folder, Publish { readers: Some(1), ..Publish::default() });
    let chain: Vec<_> = (2..5_u8)
        .map(|host| {
            let backend = fabric.host(&[address(host)]);
            let from = if host == 2 { at } else { SocketAddr::new(address(host - 1), 7000) };
            let sink = into_file(&folder, &host.to_string());
            let republish = (host < 4).then(|| Republish {
                address: (address(host), 7000).into(),
                config: publisher::Config::default(),
                readers: 1,
                keep: Duration::from_secs(60),
            });
            std::thread::spawn(move || {
                let how = Pull { verify: true, republish, attempts: 100, ..Pull::default() };
                pull(&backend, &[from], sink, &how, &mut |_| {})
            })
        })
        .collect();
    for (host, pulled) in (2..5).zip(chain) {
        assert_eq!(pulled.join().expect("no panic").expect("pulled").bytes, 9_000_001);
        assert!(std::fs::read(folder.join(host.to_string())).expect("a file") == bytes);
    }
    assert_eq!(publisher.join().expect("no panic").expect("published").done, 1);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A run that cannot succeed, or was stopped, leaves no file behind and says why.
#[test]
fn a_pull_that_fails_leaves_nothing_behind() {
    let (folder, _) = folder("failing", 3_000_000);
    let fabric = Fabric::new();
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (at, publisher) = publishing(&fabric.host(&[address(1)]), &folder, how);
    let client = fabric.host(&[address(2)]);

    // The file is there already.
    let there = FileSink::new(folder.join("source"), false);
    let error = pull(&client, &[at], there, &Pull::default(), &mut |_| {}).expect_err("it exists");
    assert!(error.to_string().contains("--replace"), "{error}");

    // More than the reader takes.
    let limits = reader::Limits { bytes: 1_000_000, ..reader::Limits::default() };
    let how = Pull { config: reader::Config { limits, ..reader::Config::default() }, ..Pull::default() };
    let error = pull(&client, &[at], into_file(&folder, "long"), &how, &mut |_| {}).expect_err("too long");
    assert!(matches!(error, Error::TooMuch { .. }), "{error}");

    // A full disk.
    let error = pull(&client, &[at], Full, &Pull::default(), &mut |_| {}).expect_err("it is full");
    assert!(matches!(&error, Error::Sink(full) if full.kind() == std::io::ErrorKind::StorageFull), "{error}");

    // Stopped from the beginning.
    let how = Pull::default();
    how.stop.stop();
    let error = pull(&client, &[at], into_file(&folder, "stopped"), &how, &mut |_| {}).expect_err("stopped");
    assert!(matches!(error, Error::Stopped), "{error}");

    // Nobody there: it ends all the same.
    let nobody = SocketAddr::new(address(1), 1);
    let how = Pull { attempts: 2, ..Pull::default() };
    let error =
        pull(&client, &[nobody], into_file(&folder, "nobody"), &how, &mut |_| {}).expect_err("nobody");
    assert!(matches!(error, Error::Control(_)), "{error}");

    withdraw.stop();
    publisher.join().expect("no panic").expect("published");
    let mut left: Vec<_> =
        std::fs::read_dir(&folder).expect("a folder").map(|one| one.expect("one").file_name()).collect();
    left.sort();
    assert_eq!(left, ["source"]);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A target without room.
struct Full;

impl Sink for Full {
    fn begin(&mut self, _offer: &Offer) -> io::Result<()> {
        Ok(())
    }
    fn write(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
    fn mark(&mut self) -> io::Result<()> {
        panic!("it did not take the snapshot")
    }
    fn end(&mut self) -> io::Result<()> {
        panic!("it did not take the snapshot")
    }
}

/// A source that gives a chunk, and then fails.
struct Failing {
    given: bool,
}

impl Source for Failing {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn total(&self) -> Option<u64> {
        None
    }
    fn position(&self) -> Option<reader::Position> {
        None
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if std::mem::replace(&mut self.given, true) {
            return Err(io::Error::other("the disk is on fire"));
        }
        Ok(Piece::Bytes(into.len()))
    }
    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A source that fails is the publisher's error, in its words.
#[test]
fn a_source_that_fails_ends_the_publication() {
    let backend = Fabric::new().host(&[address(1)]);
    let told = &mut |_: &Progress| {};
    let source = Failing { given: false };
    let outcome = publish(&backend, (address(1), 0).into(), source, &Publish::default(), |_| {}, told);
    let error = outcome.expect_err("the source failed").to_string();
    assert_eq!(error, "the source: the disk is on fire");
}
