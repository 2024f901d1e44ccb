//! A primary, read as its replica.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::admin::Admin;
use super::arriving::{Arriving, End};
use super::compression;
use super::link::{Link, command};
use super::setting::{self, Place};
use super::{PATIENCE, Server, field};
use crate::reader::Position;
use crate::source::{Again, Piece, QUIET, Source};
use crate::wait::{Limit, Stop};
use crate::wire::Content;

/// How long the primary may be silent while it prepares its snapshot, and while it sends it.
const SNAPSHOT: Duration = Duration::from_secs(60);

/// How long it may take until the snapshot's first byte.
const BEGIN: Duration = Duration::from_secs(1800);

/// How long it may be silent once it sends later writes. By default it sends a PING every ten
/// seconds.
const SILENCE: Duration = Duration::from_secs(300);

/// How often our position is reported to the primary, which drops silent replicas.
const ACKNOWLEDGE: Duration = Duration::from_secs(1);

/// The latest version whose RDB is known here.
const KNOWN: &str = "9.1.0";

/// How to read a primary.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Whether the log of later writes follows the snapshot, until it is stopped.
    pub follow: bool,
    /// Whether the primary creates its RDB without compression: its `rdbcompression` is turned off,
    /// and restored once it has forked. If it refuses `CONFIG`, the setting does not change, and a
    /// warning says so. Needs `notes`.
    pub uncompressed: bool,
    /// The folder of notes about settings to restore at primaries. A killed program leaves one. The
    /// next one that opens the same primary with this folder restores the setting, whatever its
    /// other options.
    pub notes: Option<PathBuf>,
    /// Ends the wait for the snapshot.
    pub stop: Stop,
}

/// A live primary.
pub struct LiveSource {
    server: Server,
    link: Link,
    position: Position,
    state: State,
    /// The position of the log's next byte in the history.
    offset: u64,
    /// The end of the log, once requested.
    until: Option<u64>,
    acknowledged: Instant,
    /// When the last byte came, or the end was requested.
    heard: Instant,
    /// How long it may be silent once it sends later writes.
    pub(super) silence: Duration,
    /// Where the log is cut next.
    cut: Option<u64>,
    how: Opening,
}

enum State {
    Snapshot(Arriving),
    /// The RDB was handed over. The log follows.
    Log,
}

impl LiveSource {
    /// Becomes a replica of `server`, and waits until its snapshot begins.
    ///
    /// # Errors
    /// It does not answer, refuses, or is no primary that can be replicated from. The error names a
    /// change that could not be undone.
    pub fn open(server: Server, how: &Opening) -> io::Result<Self> {
        let limit = Limit::new(&how.stop, BEGIN);
        let mut admin = Admin::connect(&server, &limit)?;
        let info = admin.info("server", &limit)?;
        let version = field(&info, "valkey_version").or_else(|| field(&info, "redis_version"));
        // The RDB has the format of the version that we announce. The primary's own version loses
        // nothing, but no reader takes a format that this program does not know.
        let version = version.filter(|version| is_known(version)).unwrap_or(KNOWN);
        // This cannot change while it runs. Without the right to ask, it is taken to be off.
        let is_summed = setting::read("rdbchecksum", &mut admin, &limit)?.is_some_and(|value| value == "yes");
        let place = how.notes.as_ref().and_then(|notes| Place::new(&server, &info, notes));
        let mut off = None;
        if let Some(place) = &place {
            place.recover(compression::NAME, &mut admin, &limit)?;
            if how.uncompressed {
                off = compression::turn_off(&server, place, &mut admin, &limit, &how.stop)?;
            }
        }
        let forked = Self::ask(&server, version, &limit);
        let put_back = off.map_or(Ok(()), |off| off.put_back(&mut admin));
        let (mut link, position) = match (forked, put_back) {
            (Ok(forked), Ok(())) => forked,
            (Err(error), Ok(())) | (Ok(_), Err(error)) => return Err(error),
            (Err(error), Err(left)) => {
                return Err(io::Error::new(error.kind(), format!("{error}; {left}")));
            }
        };
        let unexpected = |answer: &str| unexpected(&server, answer);
        let begin = link.answer(&limit, SNAPSHOT)?;
        let end = match begin.strip_prefix("$EOF:") {
            Some(mark) => {
                let mark = mark.as_bytes().try_into();
                End::Mark(mark.map_err(|_| unexpected(&begin))?)
            }
            None => {
                let length = begin.strip_prefix('$').and_then(|length| length.parse().ok());
                End::After(length.ok_or_else(|| unexpected(&begin))?)
            }
        };
        let state = State::Snapshot(Arriving::new(end, is_summed));
        let offset = position.offset;
        let now = Instant::now();
        Ok(Self {
            server,
            link,
            position,
            state,
            offset,
            until: None,
            acknowledged: now,
            heard: now,
            silence: SILENCE,
            cut: None,
            how: how.clone(),
        })
    }

    /// Asks for the snapshot as a replica of this version, and waits until the primary has forked
    /// for it.
    fn ask(server: &Server, version: &str, limit: &Limit) -> io::Result<(Link, Position)> {
        let mut link = Link::connect(server, limit)?;
        if let Some(password) = &server.password {
            let answer = match &server.user {
                Some(user) => link.ask(&["AUTH", user, password], limit)?,
                None => link.ask(&["AUTH", password], limit)?,
            };
            // An answer may repeat the refused command.
            if answer != "+OK" {
                return Err(server.failed("AUTH", io::Error::other("refused")));
            }
        }
        link.ask(&["REPLCONF", "capa", "eof", "capa", "psync2"], limit)?;
        // Primaries before Valkey 8 do not know this command, and do not need it.
        link.ask(&["REPLCONF", "version", version], limit)?;
        link.write_all(&command(&["PSYNC", "?", "-1"]), limit)?;
        let answer = link.answer(limit, SNAPSHOT)?;
        let position = position(&answer).ok_or_else(|| unexpected(server, &answer))?;
        Ok((link, position))
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        self.acknowledged = Instant::now();
        let limit = Limit::new(&Stop::default(), PATIENCE);
        self.link.write_all(&command(&["REPLCONF", "ACK", &self.offset.to_string()]), &limit)
    }

    /// Handles the end of the RDB.
    fn mark(&mut self) -> io::Result<Piece> {
        self.state = State::Log;
        self.heard = Instant::now();
        // This starts the primary's log.
        self.acknowledge()?;
        Ok(Piece::Mark)
    }

    fn log(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if !self.how.follow || self.until.is_some_and(|until| self.offset >= until) {
            return Ok(Piece::End);
        }
        if self.acknowledged.elapsed() >= ACKNOWLEDGE {
            self.acknowledge()?;
        }
        let room = match self.cut.map(|cut| cut.saturating_sub(self.offset)) {
            Some(0) => {
                self.cut = None;
                return Ok(Piece::Idle);
            }
            Some(left) => usize::try_from(left).unwrap_or(usize::MAX).min(into.len()),
            None => into.len(),
        };
        let limit = Limit::new(&Stop::default(), QUIET);
        let Some(count) = self.link.read(into.get_mut(..room).unwrap_or_default(), &limit)? else {
            // The log may end without further bytes.
            if self.heard.elapsed() >= self.silence {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the primary has gone silent"));
            }
            return Ok(Piece::Idle);
        };
        self.heard = Instant::now();
        self.offset += count as u64;
        Ok(Piece::Bytes(count))
    }
}

impl fmt::Debug for LiveSource {
    /// Omits the received bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveSource")
            .field("server", &self.server)
            .field("position", &self.position)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl Source for LiveSource {
    fn content(&self) -> Content {
        Content::Rdb
    }

    fn total(&self) -> Option<u64> {
        if let State::Snapshot(arriving) = &self.state { arriving.left() } else { None }
    }

    fn position(&self) -> Option<Position> {
        Some(self.position)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let limit = Limit::new(&Stop::default(), SNAPSHOT);
        let State::Snapshot(arriving) = &mut self.state else { return self.log(into) };
        match arriving.read(into, &mut self.link, &limit)? {
            Some(count) => Ok(Piece::Bytes(count)),
            None => self.mark(),
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        let limit = Limit::new(&Stop::default(), PATIENCE);
        let info = Admin::connect(&self.server, &limit)?.info("replication", &limit)?;
        let offset = field(&info, "master_repl_offset").and_then(|offset| offset.parse().ok());
        self.until = Some(offset.ok_or_else(|| io::Error::other("the primary does not say how far it is"))?);
        // The rest was already written, so it arrives soon or not at all.
        self.silence = self.silence.min(SNAPSHOT);
        self.heard = Instant::now();
        Ok(())
    }

    fn wait(&mut self) -> io::Result<()> {
        self.link.check()?;
        if self.acknowledged.elapsed() >= ACKNOWLEDGE {
            self.acknowledge()?;
        }
        Ok(())
    }

    fn again(&self) -> Option<Again> {
        let (server, how, history) = (self.server.clone(), self.how.clone(), self.position.history);
        let again: Again = Arc::new(move |stop: &Stop| {
            let source = Self::open(server.clone(), &Opening { stop: stop.clone(), ..how.clone() })?;
            if source.position.history != history {
                return Err(io::Error::other("the source has begun another history"));
            }
            Ok(Box::new(source))
        });
        self.how.follow.then_some(again)
    }

    fn offset(&self) -> Option<u64> {
        Some(self.offset)
    }

    fn cut_at(&mut self, offset: u64) {
        self.cut = Some(offset);
    }
}

/// Returns whether this version writes RDBs that are known here.
fn is_known(version: &str) -> bool {
    let numbers = |version: &str| {
        let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
        numbers.next().zip(numbers.next())
    };
    numbers(version).is_some_and(|version| Some(version) <= numbers(KNOWN))
}

fn unexpected(server: &Server, answer: &str) -> io::Error {
    io::Error::other(format!("the primary answered: {}", server.printable(answer)))
}

/// Parses `+FULLRESYNC id offset`. Valkey's offsets are signed, so no later one exceeds a `u64`.
pub(super) fn position(answer: &str) -> Option<Position> {
    let mut words = answer.strip_prefix("+FULLRESYNC ")?.split(' ');
    let history = words.next()?.as_bytes().try_into().ok()?;
    let offset = words.next()?.parse::<i64>().ok()?.try_into().ok()?;
    Some(Position { history, offset })
}
