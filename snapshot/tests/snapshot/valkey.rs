//! From a live Valkey into live ones, by RDMA READ on softsim. Skipped, with a message, without
//! `valkey-server`.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rdma_snapshot::run::{Progress, Publish, Pull, Stop, pull};
use rdma_snapshot::valkey::{LiveSink, LiveSource, Opening};
use rdma_snapshot::wire::Content;
use rdma_snapshot::{Error, FileSink, FileSource};
use rdma_softsim::Fabric;
use redis::{Value, cmd};

use crate::history;
use crate::keys::{assert_equal, fill};
use crate::runs::{Running, address, ended, publishing, pulling, reporting};
use crate::server::Valkey;

/// The bound of a wait for a Valkey.
const MOST: Duration = Duration::from_secs(600);

fn into(target: &Valkey) -> LiveSink {
    LiveSink::new(target.target(false))
}

/// A replica can be the source: the target gets the primary's data and later writes, and the
/// primary creates nothing for that.
#[test]
fn a_snapshot_of_a_replica_costs_its_primary_nothing() {
    let valkeys = [(); 3].map(|()| Valkey::start());
    let [Some(primary), Some(replica), Some(target)] = valkeys else { return };
    fill(&mut primary.connect(), 1 << 20);
    cmd("REPLICAOF").arg("127.0.0.1").arg(primary.port()).exec(&mut replica.connect()).expect("a replica");
    let is_up = || {
        let info: String = cmd("INFO").arg("replication").query(&mut replica.connect()).expect("text");
        info.contains("master_link_status:up")
    };
    let by = Instant::now() + MOST;
    while !is_up() {
        assert!(Instant::now() < by, "the replica does not come up");
        std::thread::sleep(Duration::from_millis(10));
    }
    let fabric = Fabric::new();
    let stop = Stop::default();
    let notes = Some(replica.folder.join("notes"));
    let how = Opening { follow: true, uncompressed: true, notes, ..Opening::default() };
    let live = LiveSource::open(replica.server(), &how).expect("a snapshot");
    let how = Publish { readers: Some(1), stop: stop.clone(), ..Publish::default() };
    let (at, publisher) = publishing(&fabric, 1, live, how);
    let pulled = pulling(&fabric, 2, [at], into(&target), Pull::default());
    let mut connection = primary.connect();
    cmd("SET").arg("written").arg("later").exec(&mut connection).expect("written");
    // The replica has it.
    let replicas: i64 =
        cmd("WAIT").arg(1).arg(MOST.as_millis() as u64).query(&mut connection).expect("an answer");
    assert_eq!(replicas, 1, "the replica acknowledges nothing");
    stop.stop();
    ended(pulled);
    ended(publisher);
    assert_equal(&mut connection, &mut target.connect());
    assert_eq!(snapshots_made(&primary), 1);
}

/// Returns how many snapshots a source has made for replicas.
fn snapshots_made(source: &Valkey) -> usize {
    let info: String = cmd("INFO").arg("stats").query(&mut source.connect()).expect("text");
    let made = info.lines().find_map(|line| line.strip_prefix("sync_full:"));
    made.and_then(|made| made.trim().parse().ok()).expect("a number")
}

/// A new snapshot is made whenever the backlog is full, and new readers get the newest. A reader of
/// the first one follows the history through all of them, and the others cost the source nothing.
#[test]
fn a_full_backlog_makes_a_new_snapshot() {
    let valkeys = [(); 4].map(|()| Valkey::start());
    let [Some(source), Some(early), Some(late), Some(last)] = valkeys else { return };
    fill(&mut source.connect(), 1 << 10);
    let fabric = Fabric::new();
    let stop = Stop::default();
    let live = LiveSource::open(source.server(), &Opening { follow: true, ..Opening::default() })
        .expect("a snapshot");
    let how = Publish { readers: Some(3), stop: stop.clone(), backlog: 1 << 10, ..Publish::default() };
    let (tell, told) = mpsc::channel();
    let tell = move |progress: &Progress| tell.send(*progress).unwrap_or(());
    let (at, publisher) = reporting(&fabric, 1, live, how, tell);
    let pull = |target: &Valkey, host| pulling(&fabric, host, [at], into(target), Pull::default());
    let until = |is_so: &dyn Fn(&Progress) -> bool| {
        // It reports five times a second.
        told.iter().take(3000).find(is_so).expect("the publisher runs, and comes there");
    };

    let first = pull(&early, 2);
    until(&|progress| progress.marked && progress.readers == 1);
    assert_eq!(snapshots_made(&source), 1);
    // Two readers that come while there is room cost nothing more.
    let second = pull(&late, 3);
    until(&|progress| progress.readers == 2);
    assert_eq!(snapshots_made(&source), 1);
    let (finish, finished) = mpsc::channel();
    let mut third = None;
    history::unfold(
        source.connect(),
        [early.connect(), late.connect()],
        || {
            if finished.try_recv().is_ok() {
                until(&|progress| progress.snapshots >= 2);
                third = Some(pull(&last, 4));
                until(&|progress| progress.readers == 3);
                stop.stop();
            }
            !first.is_finished() || !second.is_finished()
        },
        move || finish.send(()).expect("the replicas are watched"),
    );
    let all = [Some(first), Some(second), third].map(|pulled| ended(pulled.expect("three readers")));
    let published = ended(publisher);
    // The end may have come before the last one was complete.
    let made = snapshots_made(&source) - published.snapshots;
    assert!(made <= 1, "{made} snapshots were made for nothing");
    // The last one reads a snapshot with most writes in it, not the first one with all of its log.
    assert!(all[2].bytes < all[0].bytes, "{} of {}", all[2].bytes, all[0].bytes);
    for replica in [&early, &late, &last] {
        assert_equal(&mut source.connect(), &mut replica.connect());
    }
}

/// An RDB through a file: out of a live Valkey, and into another.
#[test]
fn an_rdb_file_is_as_good_as_its_source() {
    let (Some(source), Some(target)) = (Valkey::start(), Valkey::start()) else { return };
    fill(&mut source.connect(), 1 << 20);
    let fabric = Fabric::new();
    let live = LiveSource::open(source.server(), &Opening::default()).expect("a snapshot");
    let (at, publisher) = publishing(&fabric, 1, live, Publish { readers: Some(1), ..Publish::default() });
    let file = source.folder.join("pulled.rdb");
    let reader = fabric.host(&[address(2)]);
    pull(&reader, &[at], FileSink::new(file.clone(), Content::Rdb, false), &Pull::default(), &mut |_| {})
        .expect("pulled");
    ended(publisher);

    let from_file = FileSource::open(&file, Content::Rdb).expect("a file");
    let how = Publish { readers: Some(1), ..Publish::default() };
    let (at, publisher) = publishing(&fabric, 3, from_file, how);
    pull(&reader, &[at], into(&target), &Pull::default(), &mut |_| {}).expect("pulled");
    ended(publisher);
    assert_equal(&mut source.connect(), &mut target.connect());
}

/// A target that is not empty, a target that dies, and a file that is no RDB: each is reported, and
/// nothing is half applied.
#[test]
fn a_target_that_cannot_take_it_is_left_as_it_was() {
    let (Some(source), Some(full), Some(mut dying)) = (Valkey::start(), Valkey::start(), Valkey::start())
    else {
        return;
    };
    fill(&mut source.connect(), 1 << 20);
    cmd("SET").arg("mine").arg(1).exec(&mut full.connect()).expect("written");
    let fabric = Fabric::new();
    let live = LiveSource::open(source.server(), &Opening::default()).expect("a snapshot");
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (at, publisher) = publishing(&fabric, 1, live, how);
    let reader = fabric.host(&[address(2)]);
    let error = pull(&reader, &[at], into(&full), &Pull::default(), &mut |_| {}).expect_err("not empty");
    assert!(error.to_string().contains("not empty"), "{error}");
    let mine: i64 = cmd("GET").arg("mine").query(&mut full.connect()).expect("a value");
    assert_eq!(mine, 1);

    dying.process.kill().expect("killed");
    dying.process.wait().expect("dead");
    let error = pull(&reader, &[at], into(&dying), &Pull::default(), &mut |_| {}).expect_err("dead");
    assert!(matches!(error, Error::Sink(_)), "{error}");
    withdraw.stop();
    ended(publisher);
}

/// Returns a live target that loads slowly, and the pull into it, up to where it loads.
fn loading(target: &Valkey, fabric: &Fabric, at: SocketAddr, stop: &Stop) -> Running {
    let mut admin = target.connect();
    // It answers that it is loading: it serves its clients after each key.
    for (name, value) in [("key-load-delay", "20000"), ("loading-process-events-interval-bytes", "1024")] {
        cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut admin).expect("a setting");
    }
    let how = Pull { stop: stop.clone(), ..Pull::default() };
    let pulled = pulling(fabric, 2, [at], into(target), how);
    loop {
        let info: String = cmd("INFO").arg("persistence").query(&mut admin).expect("text");
        if info.contains("\nloading:1") {
            return pulled;
        }
        assert!(!pulled.is_finished(), "{:?}", pulled.join());
    }
}

fn role(valkey: &Valkey) -> Value {
    let role: Vec<Value> = cmd("ROLE").query(&mut valkey.connect()).expect("a role");
    role.into_iter().next().expect("a word")
}

/// One signal ends a pull whose target is loading, and the target is a primary as soon as it has
/// loaded. Two leave it a replica, and the error says so. Its `masterauth` is restored.
#[test]
fn signals_are_obeyed_while_a_target_loads() {
    let (Some(source), Some(one), Some(two)) = (Valkey::start(), Valkey::start(), Valkey::start()) else {
        return;
    };
    let mut connection = source.connect();
    for key in 0..2000 {
        cmd("SET").arg(key).arg("x".repeat(100)).exec(&mut connection).expect("written");
    }
    let fabric = Fabric::new();
    let live = LiveSource::open(source.server(), &Opening::default()).expect("a snapshot");
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), ..Publish::default() };
    let (at, publisher) = publishing(&fabric, 1, live, how);
    let faster = |valkey: &Valkey| {
        let mut admin = valkey.connect();
        cmd("CONFIG").arg("SET").arg("key-load-delay").arg("0").exec(&mut admin).expect("a setting");
    };

    cmd("CONFIG").arg("SET").arg("masterauth").arg("mine").exec(&mut one.connect()).expect("a setting");
    let stop = Stop::default();
    let pulled = loading(&one, &fabric, at, &stop);
    stop.stop();
    faster(&one);
    let error = pulled.join().expect("no panic").expect_err("stopped");
    assert!(matches!(error, Error::Stopped), "{error}");
    assert_eq!(role(&one), Value::BulkString(b"master".to_vec()));
    let keys: i64 = cmd("DBSIZE").query(&mut one.connect()).expect("a number");
    assert_eq!(keys, 2000);
    let masterauth: Vec<String> =
        cmd("CONFIG").arg("GET").arg("masterauth").query(&mut one.connect()).expect("a setting");
    assert_eq!(masterauth, ["masterauth", "mine"]);

    let stop = Stop::default();
    let pulled = loading(&two, &fabric, at, &stop);
    stop.stop();
    stop.stop();
    let error = pulled.join().expect("no panic").expect_err("stopped");
    assert!(error.to_string().contains("is still a replica of 127.0.0.1:"), "{error}");
    faster(&two);
    withdraw.stop();
    ended(publisher);
}
