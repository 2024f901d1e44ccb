//! Our own sides pass the cases for the snapshot protocol, and each case notices faulty peers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use indicatif::ProgressBar;
use intercept::Intercepted;
use rdma_snapshot::wire::Layout;
use rdma_softsim::{Fabric, SoftSim};
use snapshot_suite::bent::{Bent, Mistake, Proxy};
use snapshot_suite::builtin::{OwnPublisher, OwnReaders, SECRET};
use snapshot_suite::publisher::{self, Publisher};
use snapshot_suite::reader::{self, Reader};
use suite::{Case, Cause, Judged, exit};

/// How long faulty targets may take. A correct one does not need it.
const PATIENCE: Duration = Duration::from_secs(2);

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("snapshot-{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn our_sides_pass() {
    for side in ["publisher", "reader"] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-snapshot-suite"));
        let output = program.args([side, "--patience", "20"]).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{told}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{side}");
        assert!(told.contains(" passed, 0 failed"));
    }
}

fn run<S>(cases: &[Case<S>], id: &str, on: &S) -> Judged {
    let case = cases.iter().find(|case| case.id == id).unwrap_or_else(|| panic!("no case {id}"));
    (case.run)(on, &ProgressBar::hidden())
}

/// A password in a target is not repeated. Without RDMA, no case is run.
#[test]
fn what_cannot_be_run_is_not() {
    let tried = |arguments: &[&str]| {
        let program = env!("CARGO_BIN_EXE_valkey-rdma-snapshot-suite");
        let output = Command::new(program).args(arguments).output().unwrap();
        let told = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (output.status.code(), told.concat())
    };
    let (code, told) = tried(&["publisher", "--target", "valkey://default:hunter2@192.0.2.1:6379"]);
    assert!(code == Some(exit::USAGE.into()) && !told.contains("hunter2"), "{code:?}: {told}");
    if conformance::device().is_ok() {
        return println!("skipped: there is an RDMA device");
    }
    for alone in [
        &["publisher", "--target", "192.0.2.1:6379"][..],
        &["reader", "--exec", "false", "--listen", "192.0.2.1:6379"],
    ] {
        let (code, told) = tried(alone);
        assert_eq!(code, Some(exit::NO_ENVIRONMENT.into()), "{alone:?}: {told}");
    }
}

/// Each mistake of a publisher, the case that must notice it, the layout, and words of its finding.
const PUBLISHERS: [(Mistake, &str, Layout, &str); 20] = [
    (Mistake::RepeatsEntries, "publisher.whole", Layout::Chunks, "cannot be as it announces it"),
    (Mistake::WrongChunk, "publisher.whole", Layout::Chunks, "the digest of chunk 0 is wrong"),
    (Mistake::WrongDigest, "publisher.whole", Layout::Chunks, "or lies"),
    (Mistake::EndsEarly, "publisher.whole", Layout::Rcp, "Mark is not where"),
    (Mistake::ElsewhereTable, "publisher.whole", Layout::Rcp, "not that of its data"),
    (Mistake::ProvesNothing, "publisher.whole", Layout::Chunks, "the code in its Welcome is wrong"),
    (Mistake::TakesAnyReader, "publisher.secret", Layout::Chunks, "kind: 04"),
    (Mistake::AdmitsStrangers, "publisher.stranger", Layout::Chunks, "it accepted a stranger"),
    (Mistake::NamesEarly, "publisher.names-late", Layout::Chunks, "it said Chunks (5)"),
    (Mistake::AnyVersion, "publisher.version", Layout::Chunks, "kind: 02"),
    (Mistake::IgnoresNoFrames, "publisher.no-frame", Layout::Chunks, "the session goes on"),
    (Mistake::IgnoresDisorder, "publisher.out-of-order", Layout::Chunks, "the session goes on"),
    (Mistake::IgnoresDisorder, "publisher.claims", Layout::Chunks, "the session goes on"),
    (Mistake::AnySnapshot, "publisher.other-snapshot", Layout::Chunks, "kind: 02"),
    (Mistake::FromTheFirst, "publisher.resume", Layout::Chunks, "asked for chunk 1"),
    (Mistake::ChangesChunks, "publisher.unchanged", Layout::Chunks, "its bytes have changed"),
    (Mistake::Writable, "publisher.write", Layout::Chunks, "its bytes have changed"),
    (Mistake::NoReads, "publisher.depth", Layout::Chunks, "it grants no READs"),
    (Mistake::EndlessLease, "publisher.lease", Layout::Chunks, "the session goes on"),
    (Mistake::HoldsOn, "publisher.says-nothing", Layout::Chunks, "the session does not end"),
];

#[test]
fn wrong_publishers_are_noticed() {
    let noticed = |(mistake, id, layout, words): (Mistake, &str, Layout, &str)| {
        let folder = Folder::new(&format!("{mistake:?}-{id}"));
        let fabric = Fabric::new();
        let [at, behind] = [7400, 7401].map(|port| SocketAddr::from(([192, 0, 2, 1], port)));
        let host = fabric.host(&[at.ip()]);
        let bent = Bent::new(mistake);
        let regions = bent.regions();
        let theirs = Intercepted::by(host.clone(), bent);
        let _publisher = OwnPublisher::start(&theirs, behind, layout, &folder.0).unwrap();
        let _proxy = Proxy::start(&host, at, behind, mistake, SECRET, regions).unwrap();
        let backend = fabric.host(&[[192, 0, 2, 66].into()]);
        let on = Publisher { backend, address: at, secret: SECRET.to_vec(), patience: PATIENCE };
        is_noticed(run(&publisher::cases(), id, &on), mistake, id, words);
    };
    std::thread::scope(|scope| {
        for one in PUBLISHERS {
            scope.spawn(move || noticed(one));
        }
    });
}

/// Each mistake of a reader, the case that must notice it, and words of its finding.
const READERS: [(Mistake, &str, &str); 16] = [
    (Mistake::LosesAByte, "reader.whole", "its file has other bytes"),
    (Mistake::SaysDone, "reader.table", "the session should end"),
    (Mistake::OneNonce, "reader.proves", "its nonces are one"),
    (Mistake::TakesAnyPublisher, "reader.secret", "the session goes on"),
    (Mistake::AnyVersion, "reader.version", "the session should end"),
    (Mistake::IgnoresNoFrames, "reader.no-frame", "the session goes on"),
    (Mistake::Renumbers, "reader.place", "the session goes on"),
    (Mistake::SkipsEntries, "reader.entry", "the session goes on"),
    (Mistake::IgnoresChunks, "reader.digest", "the session should end"),
    (Mistake::BelievesEnds, "reader.ends", "the session should end"),
    (Mistake::FromTheFirst, "reader.resume", "it asks for chunk 0"),
    (Mistake::AnySnapshot, "reader.other-snapshot", "the session should end"),
    (Mistake::SaysNoProgress, "reader.lease", "a lease passed"),
    (Mistake::SaysNoProgress, "reader.tells", "it does not say that it has 1 chunks"),
    (Mistake::NoReads, "reader.depth", "it asks for no READs"),
    (Mistake::HoldsOn, "reader.says-nothing", "the session goes on"),
];

#[test]
fn wrong_readers_are_noticed() {
    let noticed = |(mistake, id, words): (Mistake, &str, &str)| {
        let folder = Folder::new(&format!("{mistake:?}-{id}"));
        let fabric = Fabric::new();
        let [listen, told] = [7400, 7401].map(|port| SocketAddr::from(([192, 0, 2, 66], port)));
        let backend = fabric.host(&[listen.ip()]);
        let bent = Bent::new(mistake);
        let regions = bent.regions();
        let theirs = Intercepted::by(fabric.host(&[[192, 0, 2, 1].into()]), bent);
        let readers = Box::new(OwnReaders { backend: theirs, loses: mistake == Mistake::LosesAByte });
        let _proxy = Proxy::start(&backend, told, listen, mistake, SECRET, regions).unwrap();
        let (secret, patience) = (SECRET.to_vec(), PATIENCE);
        let on = Reader { backend, listen, told, secret, readers, folder: folder.0.clone(), patience };
        is_noticed(run(&reader::cases(), id, &on), mistake, id, words);
    };
    std::thread::scope(|scope| {
        for one in READERS {
            scope.spawn(move || noticed(one));
        }
    });
}

/// A missing publisher has violated no requirement: it is lost.
#[test]
fn where_nothing_publishes() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 7400));
    let _there = fabric.host(&[address.ip()]);
    let backend = fabric.host(&[[192, 0, 2, 66].into()]);
    let on = Publisher { backend, address, secret: SECRET.to_vec(), patience: Duration::from_millis(300) };
    let stop = run(&publisher::cases(), "publisher.whole", &on).expect_err("nothing listens there");
    assert_eq!((stop.cause, stop.code()), (Cause::Refused, exit::LOST), "{}", stop.reason);
}

fn is_noticed(judged: Judged, mistake: Mistake, id: &str, words: &str) {
    match judged {
        Ok(passed) => panic!("{id} did not notice {mistake:?}: {}", passed.note),
        Err(stop) => assert!(stop.reason.contains(words), "{id}, {mistake:?}: {}", stop.reason),
    }
}

#[test]
fn every_case_notices_a_mistake() {
    let noticing: BTreeSet<_> =
        PUBLISHERS.iter().map(|one| one.1).chain(READERS.iter().map(|one| one.1)).collect();
    let publishers = publisher::cases::<SoftSim>().into_iter().map(|case| case.id);
    let readers = reader::cases::<SoftSim>().into_iter().map(|case| case.id);
    assert_eq!(publishers.chain(readers).collect::<BTreeSet<_>>(), noticing);
}
