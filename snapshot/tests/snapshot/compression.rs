//! The source's `rdbcompression`, off for our snapshot, is on again in whatever way that ends.
//! Skipped, with a message, without `valkey-server`.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_snapshot::valkey::{LiveSource, Opening, Server};
use rdma_snapshot::{Piece, Source, Stop};
use redis::cmd;

use crate::server::Valkey;

/// Compressible bytes of the source's keys.
const BYTES: usize = 2 << 20;

/// Longer than a test waits: a fork that never comes.
pub(crate) const NEVER: &str = "10000";

/// A source of compressible keys, and a folder for notes.
pub(crate) struct Scene {
    pub(crate) valkey: Valkey,
    notes: PathBuf,
}

impl Scene {
    pub(crate) fn new() -> Option<Self> {
        let valkey = Valkey::start()?;
        let mut connection = valkey.connect();
        for key in 0..BYTES >> 10 {
            cmd("SET").arg(key).arg("x".repeat(1 << 10)).exec(&mut connection).expect("written");
        }
        // The program keeps them here, too, if this is the folder of its state.
        let notes = valkey.folder.join("valkey-rdma-sync");
        Some(Self { valkey, notes })
    }

    fn opening(&self, stop: &Stop) -> Opening {
        let notes = Some(self.notes.clone());
        Opening { uncompressed: true, notes, stop: stop.clone(), ..Opening::default() }
    }

    pub(crate) fn set(&self, name: &str, value: &str) {
        cmd("CONFIG").arg("SET").arg(name).arg(value).exec(&mut self.valkey.connect()).expect("a setting");
    }

    pub(crate) fn is_on(&self) -> bool {
        let mut connection = self.valkey.connect();
        let [_, value]: [String; 2] =
            cmd("CONFIG").arg("GET").arg("rdbcompression").query(&mut connection).expect("a setting");
        value == "yes"
    }

    pub(crate) fn notes(&self) -> usize {
        std::fs::read_dir(&self.notes).map_or(0, Iterator::count)
    }

    /// Checks that nothing of ours is left.
    pub(crate) fn is_as_it_was(&self) {
        assert!(self.is_on(), "it is off");
        assert_eq!(self.notes(), 0, "a note is left");
    }

    /// Opens the source, which forks only on request.
    fn waiting(&self, stop: &Stop) -> JoinHandle<std::io::Result<LiveSource>> {
        self.set("repl-diskless-sync-delay", NEVER);
        let (server, opening) = (self.valkey.server(), self.opening(stop));
        let thread = std::thread::spawn(move || LiveSource::open(server, &opening));
        self.until_replicas_wait(1);
        thread
    }

    /// Waits until this many replicas wait, which is after the setting was changed.
    pub(crate) fn until_replicas_wait(&self, count: usize) {
        let mut connection = self.valkey.connect();
        loop {
            let info: String = cmd("INFO").arg("replication").query(&mut connection).expect("text");
            if info.matches("state=wait_bgsave").count() >= count {
                break;
            }
            std::thread::yield_now();
        }
        assert!(!self.is_on(), "it is not off for the fork");
    }
}

/// Reads all of the snapshot. Returns its length.
fn length(mut source: LiveSource) -> usize {
    let (mut bytes, mut into) = (0, vec![0; 1 << 16]);
    loop {
        match source.read(&mut into).expect("the snapshot") {
            Piece::Bytes(count) => bytes += count,
            _ => return bytes,
        }
    }
}

fn open(scene: &Scene, how: &Opening) -> usize {
    length(LiveSource::open(scene.valkey.server(), how).expect("a snapshot"))
}

/// The snapshot is not compressed, and the setting is on again before its first byte is read.
#[test]
fn a_snapshot_is_not_compressed_and_the_source_is_as_it_was() {
    let Some(scene) = Scene::new() else { return };
    let live = LiveSource::open(scene.valkey.server(), &scene.opening(&Stop::default())).expect("a snapshot");
    scene.is_as_it_was();
    assert!(length(live) > BYTES);
    // By default, and if the operator has it off, nothing is changed.
    assert!(open(&scene, &Opening::default()) < BYTES / 2);
    scene.set("rdbcompression", "no");
    assert!(open(&scene, &scene.opening(&Stop::default())) > BYTES);
    assert!(!scene.is_on(), "it is the operator's");
    assert_eq!(scene.notes(), 0);
}

/// Without the right to `CONFIG`, without the right to `CONFIG SET`, and if no note can be kept, it
/// continues with what it gets.
#[test]
fn a_source_that_cannot_be_changed_is_read_as_it_is() {
    let Some(scene) = Scene::new() else { return };
    for right in [&["-config"][..], &["-config", "+config|get"]] {
        let mut acl = cmd("ACL");
        acl.arg(&["SETUSER", "who", "reset", "on", ">s3cret", "+@all", "~*", "&*"]).arg(right);
        acl.exec(&mut scene.valkey.connect()).expect("a user");
        let url = scene.valkey.url().replace("://", "://who:s3cret@");
        let server = Server::new(&url).expect("a URL");
        let live = LiveSource::open(server, &scene.opening(&Stop::default())).expect("a snapshot");
        assert!(length(live) < BYTES / 2);
        scene.is_as_it_was();
    }
    std::fs::write(scene.valkey.folder.join("file"), "").expect("a file");
    let notes = Some(scene.valkey.folder.join("file/notes"));
    let how = Opening { notes, ..scene.opening(&Stop::default()) };
    assert!(LiveSource::open(scene.valkey.server(), &how).map(length).is_ok_and(|bytes| bytes < BYTES / 2));
    scene.is_as_it_was();
}

/// The connection over which the snapshot was requested is lost, while the source lives.
#[test]
fn a_lost_connection_puts_it_back() {
    let Some(scene) = Scene::new() else { return };
    let opening = scene.waiting(&Stop::default());
    cmd("CLIENT").arg("KILL").arg("TYPE").arg("replica").exec(&mut scene.valkey.connect()).expect("killed");
    opening.join().expect("no panic").expect_err("its connection is lost");
    scene.is_as_it_was();
    // Every connection is lost.
    let opening = scene.waiting(&Stop::default());
    for kind in ["normal", "replica"] {
        let mut kill = cmd("CLIENT");
        kill.arg("KILL").arg("TYPE").arg(kind).arg("SKIPME").arg("yes");
        kill.exec(&mut scene.valkey.connect()).expect("killed");
    }
    opening.join().expect("no panic").expect_err("its connections are lost");
    scene.is_as_it_was();
}

/// A killed source has the setting of its file when it comes back. The error names what could not
/// be restored.
#[test]
fn a_lost_source_is_named() {
    let Some(mut scene) = Scene::new() else { return };
    let opening = scene.waiting(&Stop::default());
    scene.valkey.process.kill().expect("killed");
    scene.valkey.process.wait().expect("dead");
    let error = opening.join().expect("no panic").expect_err("the source is lost").to_string();
    let named = format!("may still be changed at {}", scene.valkey.url().replace("valkey://", ""));
    assert!(error.contains(&named), "{error}");
}

/// The end is requested at random moments: before the change, while the source delays its fork, and
/// after that.
#[test]
fn a_stop_at_any_moment_puts_it_back() {
    let Some(scene) = Scene::new() else { return };
    let opening = {
        let stop = Stop::default();
        let opening = scene.waiting(&stop);
        stop.stop();
        opening
    };
    opening.join().expect("no panic").expect_err("stopped");
    scene.is_as_it_was();
    scene.set("repl-diskless-sync-delay", "0");
    for _ in 0..stops() {
        let (stop, server) = (Stop::default(), scene.valkey.server());
        let how = scene.opening(&stop);
        let opening = std::thread::spawn(move || LiveSource::open(server, &how).map(drop));
        std::thread::sleep(moment());
        stop.stop();
        // It may already have ended.
        let _ended = opening.join().expect("no panic");
        scene.is_as_it_was();
    }
}

/// Returns how many random moments to try: a few, or `SNAPSHOT_STOPS`.
pub(crate) fn stops() -> usize {
    std::env::var("SNAPSHOT_STOPS").map_or(10, |stops| stops.parse().expect("a number"))
}

/// Returns a random time, about as long as opening takes.
pub(crate) fn moment() -> Duration {
    let mut bytes = [0; 2];
    getrandom::fill(&mut bytes).expect("randomness");
    Duration::from_micros(u64::from(u16::from_be_bytes(bytes)))
}

/// A note about a dead process of the source does not apply to the next process.
#[test]
fn a_note_is_of_one_process_of_the_source() {
    let Some(scene) = Scene::new() else { return };
    std::fs::create_dir_all(&scene.notes).expect("a folder");
    let other = scene.notes.join(format!("rdbcompression-{}", "0".repeat(40)));
    std::fs::write(&other, "rdbcompression was yes\n").expect("a note");
    scene.set("rdbcompression", "no");
    open(&scene, &scene.opening(&Stop::default()));
    assert!(!scene.is_on() && Path::new(&other).is_file());
}
