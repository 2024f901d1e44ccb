//! A target never ends, and never loses its file, because of what it was sent: RDBs that are
//! damaged, or that the target cannot load, from files and from peers. Skipped, with a message,
//! without `valkey-server`.

use std::io;
use std::net::SocketAddr;

use rdma_snapshot::run::{Progress, Publish, Pull, Stop, pull};
use rdma_snapshot::valkey::{LiveSink, LiveSource, Opening};
use rdma_snapshot::wire::Content;
use rdma_snapshot::{Error, FileSink, FileSource, Piece, Source};
use rdma_softsim::{Fabric, SoftSim};
use redis::{Value, cmd};

use crate::keys::{assert_equal, fill};
use crate::runs::{address, publishing};
use crate::server::Valkey;

/// A peer that publishes any bytes as an RDB.
struct Claims {
    bytes: io::Cursor<Vec<u8>>,
    marked: bool,
}

impl Source for Claims {
    fn content(&self) -> Content {
        Content::Rdb
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        Ok(match io::Read::read(&mut self.bytes, into)? {
            0 if std::mem::replace(&mut self.marked, true) => Piece::End,
            0 => Piece::Mark,
            count => Piece::Bytes(count),
        })
    }
}

/// Publishes `source` until `use_it` has used its address. Returns the outcomes of both.
fn published<T>(
    fabric: &Fabric,
    source: impl Source + 'static,
    use_it: impl FnOnce(SocketAddr) -> T,
) -> (Result<Progress, Error>, T) {
    let withdraw = Stop::default();
    let how = Publish { withdraw: withdraw.clone(), chunk_size: 4096, ..Publish::default() };
    let (at, publisher) = publishing(fabric, 1, source, how);
    let used = use_it(at);
    withdraw.stop();
    (publisher.join().expect("no panic"), used)
}

/// A target with data and a file of its own.
struct Owner {
    valkey: Valkey,
    digest: String,
    file: Vec<u8>,
}

impl Owner {
    fn new(options: &[&str]) -> Option<Self> {
        let valkey = Valkey::start_with(options)?;
        let mut connection = valkey.connect();
        cmd("SET").arg("mine").arg("precious").exec(&mut connection).expect("written");
        cmd("SAVE").exec(&mut connection).expect("saved");
        let digest = cmd("DEBUG").arg("DIGEST").query(&mut connection).expect("a digest");
        let file = std::fs::read(valkey.folder.join("dump.rdb")).expect("a file");
        Some(Self { valkey, digest, file })
    }

    /// Pulls into it from `at`. It must be refused, and the target must be as it was.
    fn refuses(&self, backend: &SoftSim, at: SocketAddr) -> String {
        let how = Pull { attempts: 3, ..Pull::default() };
        let sink = LiveSink::new(self.valkey.target(true));
        let pulled = pull(backend, &[at], sink, &how, &mut |_| {});
        let mut connection = self.valkey.connect();
        let digest: String = cmd("DEBUG").arg("DIGEST").query(&mut connection).expect("it lives");
        assert_eq!(digest, self.digest);
        let file = std::fs::read(self.valkey.folder.join("dump.rdb")).expect("a file");
        assert!(file == self.file, "its file is another");
        let role: Vec<Value> = cmd("ROLE").query(&mut connection).expect("a role");
        assert_eq!(role.first(), Some(&Value::BulkString(b"master".to_vec())));
        pulled.expect_err("no RDB for it").to_string()
    }
}

/// VS-READ-007: an RDB with one changed byte, a cut one, an empty one, and what is none, reach
/// no target, however it loads: not from a file, which is not published to its end, and not from a
/// peer that does not check what it publishes. Nor do they become files.
#[test]
fn what_is_no_rdb_never_reaches_a_target() {
    let Some(source) = Valkey::start() else { return };
    let targets =
        [&[][..], &["--repl-diskless-load", "swapdb"], &["--repl-diskless-load", "flush-before-load"]];
    let [Some(disk), Some(swaps), Some(flushes)] = targets.map(Owner::new) else { return };
    fill(&mut source.connect(), 1 << 16);
    cmd("SAVE").exec(&mut source.connect()).expect("saved");
    let whole = std::fs::read(source.folder.join("dump.rdb")).expect("a file");
    let changed = |at: usize| {
        let mut changed = whole.clone();
        changed[at] ^= 0x20;
        changed
    };
    let fabric = Fabric::new();
    let ours = fabric.host(&[address(2)]);
    let path = source.folder.join("damaged.rdb");
    for damaged in [
        changed(0),
        changed(whole.len() / 3),
        changed(whole.len() / 2),
        changed(whole.len() - 9),
        changed(whole.len() - 1),
        whole[..whole.len() / 2].to_vec(),
        whole[..whole.len() - 1].to_vec(),
        Vec::new(),
        [&whole[..], b"\n"].concat(),
        // Without its checksum: nothing would show the changed byte.
        [&changed(whole.len() / 2)[..whole.len() - 8], &[0; 8]].concat(),
        b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
    ] {
        std::fs::write(&path, &damaged).expect("a file");
        let from_file = FileSource::open(&path, Content::Rdb).expect("a file");
        let (outcome, told) = published(&fabric, from_file, |at| disk.refuses(&ours, at));
        let error = outcome.expect_err("no RDB").to_string();
        assert!(error.contains("damaged.rdb is no RDB that a Valkey could load"), "{error}");
        assert!(!told.is_empty());

        let claims = Claims { bytes: io::Cursor::new(damaged), marked: false };
        let (_, ()) = published(&fabric, claims, |at| {
            for owner in [&disk, &swaps, &flushes] {
                let error = owner.refuses(&ours, at);
                assert!(error.contains("is no RDB that a Valkey could load"), "{error}");
            }
            let copy = source.folder.join("copy.rdb");
            let sink = FileSink::new(copy.clone(), Content::Rdb, false);
            let error = pull(&ours, &[at], sink, &Pull::default(), &mut |_| {}).expect_err("no RDB");
            assert!(error.to_string().contains("is no RDB"), "{error}");
            assert!(!copy.exists());
        });
    }
}

/// A source that computes no checksums fills a target, and a file that another Valkey takes: its
/// RDB gets a checksum on the way, with and without a disk.
#[test]
fn a_source_without_checksums_is_as_good() {
    let options = ["--rdbchecksum", "no"];
    let (Some(source), Some(one), Some(two)) =
        (Valkey::start_with(&options), Valkey::start(), Valkey::start())
    else {
        return;
    };
    let mut connection = source.connect();
    fill(&mut connection, 1 << 16);
    let fabric = Fabric::new();
    let ours = fabric.host(&[address(2)]);
    for (target, is_diskless) in [(&one, "yes"), (&two, "no")] {
        cmd("CONFIG")
            .arg("SET")
            .arg("repl-diskless-sync")
            .arg(is_diskless)
            .exec(&mut connection)
            .expect("a setting");
        let live = LiveSource::open(source.server(), &Opening::default()).expect("a snapshot");
        let file = source.folder.join(format!("pulled-{is_diskless}"));
        let (outcome, ()) = published(&fabric, live, |at| {
            let sink = LiveSink::new(target.target(false));
            pull(&ours, &[at], sink, &Pull::default(), &mut |_| {}).expect("pulled");
            let sink = FileSink::new(file.clone(), Content::Rdb, false);
            pull(&ours, &[at], sink, &Pull::default(), &mut |_| {}).expect("pulled");
        });
        outcome.expect("published");
        assert_equal(&mut connection, &mut target.connect());
        let mut read = FileSource::open(&file, Content::Rdb).expect("a file");
        let mut into = vec![0; 1 << 16];
        while read.read(&mut into).expect("an RDB with a checksum") != Piece::Mark {}
    }
}
