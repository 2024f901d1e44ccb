//! Whole runs in real time, on softsim: a file to files.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rdma_snapshot::run::{Progress, Publish, Pull, Republish, Stop, pull};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Error, FileSink, FileSource, Offer, Piece, Sink, publisher, reader};
use rdma_softsim::Fabric;

use crate::runs::{Paced, Reading, Running, address, ended, publishing, pulling};

/// Creates a folder for a test, with a file of `len` bytes in it.
pub(crate) fn folder(name: &str, len: usize) -> (PathBuf, Vec<u8>) {
    let folder = std::env::temp_dir().join(format!("rdma-snapshot-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + at / 977) as u8).collect();
    std::fs::write(folder.join("source"), &bytes).expect("a file");
    (folder, bytes)
}

/// Publishes a folder's file on this host.
fn published(fabric: &Fabric, host: u8, folder: &Path, how: Publish) -> (SocketAddr, Running) {
    let source = FileSource::open(&folder.join("source"), Content::Bytes).expect("a source");
    publishing(fabric, host, source, how)
}

pub(crate) fn into_file(folder: &Path, name: &str) -> FileSink {
    FileSink::new(folder.join(name), Content::Bytes, false)
}

/// A star of three in both layouts, verified.
#[test]
fn a_file_is_pulled_by_three_in_either_layout() {
    for (name, layout) in [("chunks", Layout::Chunks), ("rcp", Layout::Rcp)] {
        let (folder, bytes) = folder(name, 9_000_001);
        let fabric = Fabric::new();
        let how = Publish { layout, readers: Some(3), ..Publish::default() };
        let (at, publisher) = published(&fabric, 1, &folder, how);
        let sink = |host: u8| into_file(&folder, &host.to_string());
        let pulls = [2, 3, 4].map(|host| (host, pulling(&fabric, host, [at], sink(host), Pull::default())));
        for (host, pulled) in pulls {
            let progress = ended(pulled);
            assert_eq!((progress.bytes, progress.marked), (9_000_001, true));
            assert!(std::fs::read(folder.join(host.to_string())).expect("a file") == bytes);
        }
        let published = ended(publisher);
        assert_eq!((published.bytes, published.done), (9_000_001, 3));
        for host in 1..5 {
            assert_eq!(fabric.resources(address(host)), rdma_softsim::Resources::default());
        }
        std::fs::remove_dir_all(folder).expect("clean");
    }
}

/// A replica that reaches its limit of memory ends handing on, and still pulls everything. It waits
/// for no reader.
#[test]
fn a_replica_without_memory_to_hand_on_pulls_everything() {
    let (folder, bytes) = folder("no-memory", 9_000_001);
    let fabric = Fabric::new();
    let how = Publish { readers: Some(1), ..Publish::default() };
    let (at, publisher) = published(&fabric, 1, &folder, how);
    let republish = Republish {
        address: (address(2), 7000).into(),
        config: publisher::Config { memory: 3 << 20, ..publisher::Config::default() },
        readers: 1,
        keep: Duration::MAX,
    };
    let how = Pull { republish: Some(republish), ..Pull::default() };
    ended(pulling(&fabric, 2, [at], into_file(&folder, "copy"), how));
    assert!(std::fs::read(folder.join("copy")).expect("a file") == bytes);
    assert_eq!(fabric.resources(address(2)).registered_bytes, 0);
    assert_eq!(ended(publisher).done, 1);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A run that cannot succeed, or was stopped, leaves no file behind and says why.
#[test]
fn a_pull_that_fails_leaves_nothing_behind() {
    let (folder, _) = folder("failing", 3_000_000);
    let fabric = Fabric::new();
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (at, publisher) = published(&fabric, 1, &folder, how);
    let client = fabric.host(&[address(2)]);

    // The file exists already, which is reported before a publisher is contacted: here is none.
    let unused = SocketAddr::new(address(1), 1);
    let how = Pull { attempts: u32::MAX, ..Pull::default() };
    let error = pull(&client, &[unused], into_file(&folder, "source"), &how, &mut |_| {});
    let error = error.expect_err("it exists").to_string();
    assert!(error.contains("source exists; --replace replaces it"), "{error}");

    // More than the reader accepts.
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

    // No publisher there: it still ends.
    let how = Pull { attempts: 2, ..Pull::default() };
    let error = pull(&client, &[unused], into_file(&folder, "none"), &how, &mut |_| {}).expect_err("none");
    assert_eq!(error.to_string(), format!("gave up after 2 attempts: no publisher listens at {unused}"));

    withdraw.stop();
    ended(publisher);
    let mut left: Vec<_> =
        std::fs::read_dir(&folder).expect("a folder").map(|one| one.expect("one").file_name()).collect();
    left.sort();
    assert_eq!(left, ["source"]);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A full target.
struct Full;

impl Sink for Full {
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

/// A file begun by another program, and one that appears meanwhile, stay unchanged.
#[test]
fn a_file_that_is_not_the_pulls_own_stays() {
    let (folder, _) = folder("foreign", 10);
    let offer = Offer {
        layout: Layout::Chunks,
        content: Content::Bytes,
        chunk_size: 4096,
        total: None,
        position: None,
    };
    let read = |name: &str| std::fs::read(folder.join(name)).expect("a file");
    let names = || std::fs::read_dir(&folder).expect("a folder").count();
    std::fs::write(folder.join("here.part"), "somebody's").expect("a file");
    for undoes in [true, false] {
        let mut sink = into_file(&folder, "here");
        sink.begin(&offer, &Stop::default()).expect("it begins");
        sink.write(b"other").expect("it is taken");
        assert_eq!(names(), 3);
        if undoes {
            sink.undo().expect("it is undone");
        }
        drop(sink);
        assert_eq!((read("here.part").as_slice(), names()), (&b"somebody's"[..], 2));
    }

    let mut sink = into_file(&folder, "here");
    sink.begin(&offer, &Stop::default()).expect("it begins");
    sink.write(b"ours").expect("it is taken");
    sink.mark().expect("it is whole");
    std::fs::write(folder.join("here"), "meanwhile").expect("a file");
    let error = sink.end().expect_err("it exists");
    assert!(error.to_string().contains("--replace"), "{error}");
    drop(sink);
    assert_eq!((read("here").as_slice(), names()), (&b"meanwhile"[..], 3));

    // Two at a time: each has its own temporary file, and the last one remains.
    let mut two = [(); 2].map(|()| FileSink::new(folder.join("here"), Content::Bytes, true));
    for (sink, bytes) in two.iter_mut().zip([b"first", b"other"]) {
        sink.begin(&offer, &Stop::default()).expect("it begins");
        sink.write(bytes).expect("it is taken");
        sink.mark().expect("it is whole");
    }
    for (sink, bytes) in two.iter_mut().zip([b"first", b"other"]) {
        sink.end().expect("it has its name");
        assert_eq!(read("here"), bytes);
    }
    std::fs::remove_dir_all(folder).expect("clean");
}

/// VS-READ-003: the publisher disappears, the next one has another snapshot, and the one after that
/// has this one: it is pulled from there.
#[test]
fn a_publisher_with_another_snapshot_is_passed_over() {
    let (folder, bytes) = folder("passed-over", 9_000_001);
    let fabric = Fabric::new();
    let withdraw = [(); 2].map(|()| Stop::default());
    let how = |withdraw: &Stop| Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (first, publisher) = published(&fabric, 1, &folder, how(&withdraw[0]));
    // Its contents are the same, but it is still another snapshot.
    let (other, another) = published(&fabric, 4, &folder, how(&withdraw[1]));
    let mirror = SocketAddr::new(address(2), 7000);
    let republish = Republish {
        address: mirror,
        config: publisher::Config::default(),
        readers: 1,
        keep: Duration::from_secs(600),
    };
    let (backend, sink) = (fabric.host(&[address(2)]), into_file(&folder, "mirror"));
    let (tell, is_whole) = mpsc::channel();
    let mirroring = std::thread::spawn(move || {
        let how = Pull { republish: Some(republish), ..Pull::default() };
        let told = &mut |progress: &Progress| {
            if progress.marked {
                let _told_already = tell.send(());
            }
        };
        pull(&backend, &[first], sink, &how, told)
    });
    is_whole.recv().expect("the mirror has everything");
    let (allow, allowed) = mpsc::channel();
    let (sender, taken) = mpsc::channel();
    let how = Pull { room: 2, ..Pull::default() };
    let sink = Paced { allowed, taken: sender };
    let pulled = pulling(&fabric, 3, [first, other, mirror], sink, how);
    let mut all = taken.recv().expect("a chunk");
    withdraw[0].stop();
    ended(publisher);
    drop(allow);
    all.extend(taken.iter().flatten());
    let pulled = ended(pulled);
    assert_eq!((pulled.bytes, all == bytes), (9_000_001, true));
    ended(mirroring);

    // If no other publisher is left, that is the error.
    let unlike = FileSink::new(folder.join("never"), Content::Bytes, false);
    let how = Pull {
        config: reader::Config { secret: rdma_snapshot::Secret::new("x"), ..reader::Config::default() },
        ..Pull::default()
    };
    let error = pulling(&fabric, 3, [other, other], unlike, how).join().expect("no panic");
    let error = error.expect_err("another secret");
    assert!(matches!(error, Error::Refused(_) | Error::Secret), "{error}");
    withdraw[1].stop();
    ended(another);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A sink whose end takes forever unless stopped, and which cannot undo it.
struct Endless {
    stop: Stop,
    ends: mpsc::Sender<()>,
}

impl Sink for Endless {
    fn begin(&mut self, _offer: &Offer, stop: &Stop) -> io::Result<()> {
        self.stop = stop.clone();
        Ok(())
    }
    fn write(&mut self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn end(&mut self) -> io::Result<()> {
        self.ends.send(()).expect("a test");
        // The test would fail in the end, even if nothing stopped it.
        for _ in 0..300 {
            self.stop.check()?;
            std::thread::sleep(rdma_snapshot::run::TICK);
        }
        Ok(())
    }
    fn undo(&mut self) -> io::Result<()> {
        Err(io::Error::other("its target keeps a part"))
    }
}

/// A signal ends a run whose sink waits at its end, and the error says what is left behind.
#[test]
fn a_sink_that_waits_is_stopped_and_says_what_it_leaves() {
    let (folder, _) = folder("endless", 3_000_000);
    let fabric = Fabric::new();
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (at, publisher) = published(&fabric, 1, &folder, how);
    let (sender, ends) = mpsc::channel();
    let how = Pull::default();
    let stop = how.stop.clone();
    let pulled = pulling(&fabric, 2, [at], Endless { stop: Stop::default(), ends: sender }, how);
    ends.recv().expect("its end");
    stop.stop();
    let error = pulled.join().expect("no panic").expect_err("stopped");
    assert!(matches!(&error, Error::NotUndone { error, .. } if matches!(**error, Error::Stopped)), "{error}");
    assert_eq!(error.to_string(), "stopped before it was complete; its target keeps a part");
    withdraw.stop();
    ended(publisher);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A source that is always ahead does not keep the run from checking the operator: it ends before
/// its memory does.
#[test]
fn a_fast_source_does_not_keep_a_publication_from_ending() {
    let how = Publish {
        config: publisher::Config { memory: 64 << 20, ..publisher::Config::default() },
        ..Publish::default()
    };
    let (withdraw, mut given) = (how.withdraw.clone(), 0);
    let read = move |into: &mut [u8]| {
        given += into.len();
        if given >= 16 << 20 && !withdraw.is_stopped() {
            withdraw.stop();
        }
        Ok(Piece::Bytes(into.len()))
    };
    let zeros = Reading { read, offset: None, again: None };
    ended(publishing(&Fabric::new(), 1, zeros, how).1);
}

/// The publisher returns a failed source's error, in its words.
#[test]
fn a_source_that_fails_ends_the_publication() {
    let mut given = false;
    let read = move |into: &mut [u8]| {
        if std::mem::replace(&mut given, true) {
            return Err(io::Error::other("the disk is on fire"));
        }
        Ok(Piece::Bytes(into.len()))
    };
    let source = Reading { read, offset: None, again: None };
    let outcome = publishing(&Fabric::new(), 1, source, Publish::default()).1.join().expect("no panic");
    let error = outcome.expect_err("the source failed").to_string();
    assert_eq!(error, "the source: the disk is on fire");
}
