//! A Valkey, filled by a primary of ours.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use redis::Value;

use super::admin::{Admin, without_text};
use super::door::{self, Proof};
use super::link::Link;
use super::setting::{self, Changed, Place};
use super::spool::Spool;
use super::{Server, field};
use crate::rdb::Needs;
use crate::reader::{Offer, Position};
use crate::source::Sink;
use crate::wait::{Limit, Stop, is_stop};
use crate::wire::Content;

/// How long the target may take for each request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// To answer commands before it is filled.
    pub(super) answer: Duration,
    /// To connect and to ask for the snapshot, after the command.
    pub(super) connect: Duration,
    /// To acknowledge what it was sent. It loads the RDB before its first acknowledgement.
    pub(super) load: Duration,
}

/// The setting with a replica's password for its primary.
const MASTERAUTH: &str = "masterauth";

/// The most acknowledgements handled after a write.
const ACKNOWLEDGEMENTS: usize = 64;

/// A live target, and the allowed changes to it.
#[derive(Clone, Debug)]
pub struct Target {
    /// The Valkey.
    pub server: Server,
    /// Whether its data may be replaced.
    pub replace: bool,
    /// Whether it has the modules whose values the RDB has. No server tells which types of values
    /// its modules have, and one that lacks a type ends when it loads it.
    pub modules: bool,
    /// The address that it must connect to. The default is the one from which this machine reaches
    /// it.
    pub serve_on: Option<IpAddr>,
    /// The folder of notes about settings to restore at targets. A killed program leaves one. The
    /// next one that fills the same target with this folder restores the setting.
    pub notes: PathBuf,
}

/// A live target. If undone before its end, the target becomes a primary again, with the data that
/// it has loaded by then: all of a snapshot or nothing, unless it loads without a disk.
///
/// **What it gets.** The RDB is kept in a file without a name (in `TMPDIR`, or in `/var/tmp`), and
/// checked as it comes. The target is told to become a replica once all of the RDB is here, its
/// structure and its checksum are right, and the target has the version, the databases and the
/// modules for it. So no damaged, cut or foreign RDB replaces its file or ends it. Values are not
/// looked into: a publisher that has proven the secret decides what the target will have.
///
/// A Valkey that is loading refuses to become a primary until it has loaded. Undoing waits for
/// that, for up to half an hour, or until [`Stop::stop`] is called a second time. Then the error
/// says that the target is still a replica.
///
/// **Who gets the snapshot.** Any local user may connect to the target's port on this machine, from
/// the same address as the target. So the target gets a password for its primaries (`masterauth`),
/// drawn for this pull. A connection without it gets nothing. Once the target has sent the
/// password, its earlier `masterauth` is restored. Without the right to `CONFIG GET` or `CONFIG
/// SET`, or if no note of the change can be kept, the connection must name the target's own history
/// (`master_replid`), as every primary does that becomes a replica. Every user with the right to
/// `INFO` can read that, so a warning is logged.
pub struct LiveSink {
    target: Target,
    stop: Stop,
    pub(super) patience: Patience,
    /// The position in the history at which the RDB was made.
    position: Position,
    /// The RDB so far.
    spool: Option<Spool>,
    link: Option<Link>,
    /// Stays open for as long as the target may connect to it, so that no other program can take
    /// the port.
    listener: Option<TcpListener>,
    /// The address whose replica the target was told to be, while it may be.
    attached: Option<SocketAddr>,
    /// The target's `masterauth`, while it may be ours.
    password: Option<Changed>,
    /// Whether all of the snapshot was sent.
    is_whole: bool,
    /// The target's final position in the history.
    offset: u64,
    /// The target's acknowledged position.
    acknowledged: Option<u64>,
    /// Whether there is nothing left to undo, or undoing was tried.
    over: bool,
}

/// What a target says of itself.
struct Facts {
    /// Where notes about its process are, if it names that.
    place: Option<Place>,
    /// The name of its history.
    history: String,
    /// The version of its RDBs.
    version: u16,
}

impl LiveSink {
    /// Returns a sink into `target`. Does not connect.
    #[must_use]
    pub fn new(target: Target) -> Self {
        Self {
            target,
            stop: Stop::default(),
            patience: Patience {
                answer: Duration::from_secs(60),
                connect: Duration::from_secs(15),
                load: Duration::from_secs(1800),
            },
            position: Position { history: [b'0'; 40], offset: 0 },
            spool: None,
            link: None,
            listener: None,
            attached: None,
            password: None,
            is_whole: false,
            offset: 0,
            acknowledged: None,
            over: false,
        }
    }

    /// Refuses a target that cannot take a snapshot, or whose keys would be lost. First restores
    /// what a killed program has left.
    fn check(&self, admin: &mut Admin, limit: &Limit) -> io::Result<Facts> {
        let place = Place::new(&self.target.server, &admin.info("server", limit)?, &self.target.notes);
        if let Some(place) = &place {
            place.recover(MASTERAUTH, admin, limit)?;
        }
        let info = admin.info("replication", limit)?;
        if field(&info, "role") != Some("master") {
            return Err(io::Error::other("the target is the replica of another: REPLICAOF NO ONE first"));
        }
        let cluster = admin.info("cluster", limit)?;
        if field(&cluster, "cluster_enabled") == Some("1") {
            return Err(io::Error::other("the target is a cluster node, which takes no REPLICAOF"));
        }
        let keys = admin.info("keyspace", limit)?;
        if !self.target.replace && keys.lines().any(|line| line.starts_with("db")) {
            return Err(io::Error::other("the target is not empty: --replace replaces what it has"));
        }
        // Its libraries, and behind them the version of its RDBs and a checksum.
        let Value::BulkString(dump) = admin.get(&["FUNCTION", "DUMP"], limit)? else {
            return Err(io::Error::other("the target does not say which RDBs it takes (FUNCTION DUMP)"));
        };
        let Some((libraries, [low, high, ..])) = dump.split_last_chunk::<10>() else {
            return Err(io::Error::other("the target does not say which RDBs it takes (FUNCTION DUMP)"));
        };
        if !self.target.replace && !libraries.is_empty() {
            return Err(io::Error::other("the target has functions: --replace replaces them"));
        }
        let history = field(&info, "master_replid").unwrap_or_default().into();
        Ok(Facts { place, history, version: u16::from_le_bytes([*low, *high]) })
    }

    /// Refuses a target that lacks what the RDB needs: it would end while it loads.
    fn suits(&self, needs: &Needs, facts: &Facts, admin: &mut Admin, limit: &Limit) -> io::Result<()> {
        let Needs { version, database, module } = *needs;
        if version > facts.version {
            return Err(io::Error::other(format!(
                "the target takes RDBs up to version {}, and this one has version {version}: it is of a newer server",
                facts.version
            )));
        }
        if database > 0 {
            let answer = admin.ask(&["SELECT", &database.to_string()], limit)?;
            without_text(&answer).map_err(|code| {
                io::Error::other(format!(
                    "the RDB has keys of database {database}, and the target has none: {code}"
                ))
            })?;
        }
        if let Some(module) = module {
            let module = String::from_utf8_lossy(&module);
            let modules = admin.info("modules", limit)?;
            let why = if !modules.lines().any(|line| line.starts_with("module:")) {
                "the target has no modules"
            } else if !self.target.modules {
                "a target without that module exits while it loads the RDB; pass --modules if the target has it"
            } else {
                return Ok(());
            };
            return Err(io::Error::other(format!("the RDB has values of a module (type {module}): {why}")));
        }
        Ok(())
    }

    /// Agrees with the target on a proof that a connection is its own.
    fn agree(&mut self, admin: &mut Admin, facts: &Facts, limit: &Limit) -> io::Result<Proof> {
        let password = crate::hex(&crate::random::<32>().map_err(io::Error::other)?);
        let changed = match &facts.place {
            Some(place) => Changed::begin(place, MASTERAUTH, &password, admin, limit, &self.stop)?,
            None => Err("it does not name its process".into()),
        };
        let why = match changed {
            Ok(changed) => {
                self.password = Some(changed);
                return Ok(Proof::Password(password));
            }
            Err(why) => why,
        };
        let history = &facts.history;
        if history.len() != 40 || !history.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(io::Error::other(format!(
                "the target names no history, and {MASTERAUTH} cannot be changed: nothing would tell it from others ({why})"
            )));
        }
        tracing::warn!("the target is known by its master_replid alone: {why}");
        Ok(Proof::History(history.clone()))
    }

    /// Restores the target's earlier `masterauth`.
    fn give_back(&mut self, admin: &mut Admin, limit: &Limit) -> io::Result<()> {
        if let Some(changed) = &mut self.password {
            changed.restore(admin, limit)?;
        }
        self.password = None;
        Ok(())
    }

    /// Makes the target our replica, up to where it waits for the RDB and the `mark` behind it.
    fn attach(&mut self, needs: &Needs, mark: &str) -> io::Result<()> {
        let limit = Limit::new(&self.stop, self.patience.answer);
        let server = self.target.server.clone();
        let mut admin = Admin::connect(&server, &limit)?;
        let facts = self.check(&mut admin, &limit)?;
        self.suits(needs, &facts, &mut admin, &limit)?;
        let serve_on = match self.target.serve_on {
            Some(ip) => ip,
            None => admin.link().local()?.ip(),
        };
        let listener = TcpListener::bind((serve_on, 0))?;
        listener.set_nonblocking(true)?;
        let here = listener.local_addr()?;
        let proof = self.agree(&mut admin, &facts, &limit)?;
        let (host, port) = (here.ip().to_string(), here.port().to_string());
        self.attached = Some(here);
        let listener = self.listener.insert(listener);
        let answer = admin.ask(&["REPLICAOF", &host, &port], &limit)?;
        if let Err(code) = without_text(&answer) {
            self.attached = None;
            return Err(io::Error::other(format!("the target refuses REPLICAOF: {code}")));
        }
        let connect = limit.within(self.patience.connect);
        let mut link = door::wait(listener, &proof, admin.link().peer()?.ip(), &self.stop, &connect)?;
        self.give_back(&mut admin, &limit)?;
        let Position { history, offset } = self.position;
        let history = String::from_utf8_lossy(&history).into_owned();
        let begin = format!("+FULLRESYNC {history} {offset}\r\n$EOF:{mark}\r\n");
        link.write_all(begin.as_bytes(), &limit)?;
        self.link = Some(link);
        self.offset = offset;
        Ok(())
    }

    /// Records the target's acknowledgements.
    fn hear(&mut self, words: &[Vec<u8>]) {
        if self.is_whole
            && let [verb, what, offset, ..] = words
            && verb.eq_ignore_ascii_case(b"REPLCONF")
            && what.eq_ignore_ascii_case(b"ACK")
        {
            self.acknowledged = std::str::from_utf8(offset).ok().and_then(|offset| offset.parse().ok());
        }
    }

    /// Waits until the target has acknowledged everything.
    fn settle(&mut self) -> io::Result<()> {
        let limit = Limit::new(&self.stop, self.patience.load);
        while self.acknowledged.is_none_or(|acknowledged| acknowledged < self.offset) {
            let link = self.link.as_mut().ok_or_else(not_reached)?;
            let late = "the target does not say that it has loaded";
            let late = || io::Error::new(io::ErrorKind::TimedOut, late);
            // The limit also holds for a target that never stops sending.
            limit.nap().map_err(|error| if is_stop(&error) { error } else { late() })?;
            let words = link.command(&limit).map_err(gave_up)?.ok_or_else(late)?;
            self.hear(&words);
        }
        Ok(())
    }

    /// Makes the target a primary again, as soon as it accepts that.
    fn detach(&mut self) -> io::Result<()> {
        let limit = Limit::of_undoing(&self.stop, self.patience.load);
        let mut is_told = false;
        while self.attached.is_some() || self.password.is_some() {
            let tried = self.try_detach(&limit);
            // A loading target may not answer for a while, or answer that it is loading.
            let loads = self.is_whole && self.acknowledged.is_none();
            match tried {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::TimedOut && loads => {}
                Err(error) => return Err(error),
            }
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(
                    "the target loads, and takes no REPLICAOF NO ONE before it has: waiting for that"
                );
            }
            std::thread::sleep(limit.nap()?);
        }
        self.link = None;
        self.listener = None;
        Ok(())
    }

    /// Returns true if the target is a primary and has its own password again, false if it is
    /// loading.
    fn try_detach(&mut self, limit: &Limit) -> io::Result<bool> {
        let mut admin = Admin::connect(&self.target.server, limit)?;
        // A loading target accepts this command.
        let given = self.give_back(&mut admin, limit);
        if self.attached.is_some() {
            let answer = admin.ask(&["REPLICAOF", "NO", "ONE"], limit)?;
            match without_text(&answer) {
                Ok(()) => self.attached = None,
                Err("LOADING") => return Ok(false),
                Err(code) => return Err(io::Error::other(format!("REPLICAOF NO ONE: {code}"))),
            }
        }
        given.map(|()| true)
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let limit = Limit::new(&self.stop, self.patience.load);
        let link = self.link.as_mut().ok_or_else(not_reached)?;
        link.write_all(bytes, &limit).map_err(|error| match error {
            error if is_stop(&error) => error,
            error => io::Error::new(
                error.kind(),
                format!("the target takes no more (see its log; is its disk full?): {error}"),
            ),
        })?;
        // Its acknowledgements would fill its memory if unread.
        for _ in 0..ACKNOWLEDGEMENTS {
            let link = self.link.as_mut().ok_or_else(not_reached)?;
            let Some(words) = link.command_now(&self.stop).map_err(gave_up)? else { break };
            self.hear(&words);
        }
        Ok(())
    }
}

impl Sink for LiveSink {
    fn prepare(&mut self, stop: &Stop) -> io::Result<()> {
        let limit = Limit::new(stop, self.patience.answer);
        self.check(&mut Admin::connect(&self.target.server, &limit)?, &limit).map(drop)
    }

    fn begin(&mut self, offer: &Offer, stop: &Stop) -> io::Result<()> {
        self.stop = stop.clone();
        if offer.content != Content::Rdb {
            return Err(io::Error::other("what is published is no RDB: pull it into a file"));
        }
        // An RDB from a file has a history of its own.
        self.position = match offer.position {
            Some(position) => position,
            None => {
                let mut history = [b'0'; 40];
                history.copy_from_slice(mark()?.as_bytes());
                Position { history, offset: 1 }
            }
        };
        self.spool = Some(Spool::new()?);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(spool) = &mut self.spool {
            return spool.write(bytes);
        }
        self.send(bytes)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn mark(&mut self) -> io::Result<()> {
        let spool = self.spool.take().ok_or_else(|| io::Error::other("no snapshot was begun"))?;
        let (mut whole, needs) = spool.whole()?;
        let mark = mark()?;
        self.attach(&needs, &mark)?;
        loop {
            // A target that takes everything at once would not let the send look.
            self.stop.check()?;
            let bytes = whole.next()?;
            if bytes.is_empty() {
                break;
            }
            self.send(bytes)?;
        }
        drop(whole);
        self.is_whole = true;
        self.send(mark.as_bytes())?;
        self.settle()
    }

    fn end(&mut self) -> io::Result<()> {
        self.settle()?;
        self.detach()?;
        self.over = true;
        Ok(())
    }

    fn undo(&mut self) -> io::Result<()> {
        self.over = true;
        // A target that loads while it receives stops when the connection ends.
        self.link = None;
        let Err(why) = self.detach() else { return Ok(()) };
        let mut left = Vec::new();
        if let Some(primary) = self.attached {
            // An unreachable target may have ended, or have done it without an answer.
            let is = if is_stop(&why) || why.kind() == io::ErrorKind::TimedOut { "is" } else { "may be" };
            left.push(format!(
                "the target {is} still a replica of {primary}, where no server is: REPLICAOF NO ONE makes it a primary"
            ));
        }
        if let Some(changed) = self.password.take() {
            changed.leave();
            left.push(setting::left(MASTERAUTH, &self.target.server));
        }
        Err(io::Error::new(why.kind(), format!("{} ({why})", left.join(", and "))))
    }
}

impl Drop for LiveSink {
    fn drop(&mut self) {
        if !self.over
            && let Err(error) = self.undo()
        {
            tracing::error!(%error, "not undone");
        }
    }
}

impl fmt::Debug for LiveSink {
    /// Omits the target's password for its primaries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveSink")
            .field("target", &self.target)
            .field("attached", &self.attached)
            .field("offset", &self.offset)
            .field("acknowledged", &self.acknowledged)
            .finish_non_exhaustive()
    }
}

/// Returns forty digits that were never used.
fn mark() -> io::Result<String> {
    Ok(crate::hex(&crate::random::<20>().map_err(io::Error::other)?))
}

fn not_reached() -> io::Error {
    io::Error::other("the target was not reached")
}

fn gave_up(error: io::Error) -> io::Error {
    if is_stop(&error) {
        return error;
    }
    io::Error::new(
        error.kind(),
        format!("the target gave up (see its log; is it of an older version?): {error}"),
    )
}
