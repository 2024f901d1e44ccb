//! Recordings: their entries, their limits, and their format (one JSON object a line).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_backend::time::Instant;
use rdma_backend::{ConnectParams, SendOp};
use serde::{Deserialize, Serialize};

use suite::hex::Bytes;

/// The version of the format, in a recording's first line.
const VERSION: u32 = 1;

/// The entries, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// All entries, except those that an [`EntryKind::Dropped`] stands for.
    pub entries: Vec<Entry>,
}

/// Something that happened at one end of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Nanoseconds of the backend's clock.
    pub at: u64,
    /// The number of the connection's end, from 1; 0 for none.
    pub end: u32,
    /// The event.
    #[serde(flatten)]
    pub what: EntryKind,
}

/// An event at one end of a connection.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum EntryKind {
    /// An identifier for an outgoing connection was created: this end is a client.
    Created,
    /// A connect request arrived: this end is a server.
    Requested { peer: Params },
    /// The identifier's queue pair was created.
    QueuePair { number: u32, sends: u32, receives: u32 },
    /// The program requested a connection, or accepted one.
    Connecting { local: Option<SocketAddr>, peer: Option<SocketAddr>, params: Params },
    /// The program made another call to the connection manager.
    Called {
        /// The call, as in rdma_cma.h without its prefix.
        call: String,
    },
    /// An event of the connection manager.
    Event { event: String },
    /// A send work request was posted.
    Posted(Request),
    /// Receives were posted.
    Receives { count: usize },
    /// Posting was refused.
    Refused {
        /// How many requests of the chain before, the last ones recorded, were not posted.
        requests: usize,
        error: String,
    },
    /// A completion was polled.
    Completed {
        id: u64,
        #[serde(flatten)]
        outcome: Outcome,
    },
    /// Receives were flushed: returned unused after the end of the connection.
    Flushed { count: usize },
    /// Entries are missing here: the recorder was full.
    Dropped { count: u64 },
}

impl EntryKind {
    /// Merges the next event if it only repeats this one: there are a thousand receives.
    const fn extend(&mut self, next: &Self) -> bool {
        match (self, next) {
            (Self::Receives { count }, Self::Receives { count: more })
            | (Self::Flushed { count }, Self::Flushed { count: more }) => {
                *count = count.saturating_add(*more);
                true
            }
            _ => false,
        }
    }
}

/// Connection parameters, `rdma_connect(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// READs the receiver of these may have outstanding.
    pub responder_resources: u8,
    /// READs the sender of these may have outstanding.
    pub initiator_depth: u8,
    /// How often an unacknowledged request is repeated.
    pub retry_count: u8,
    /// How often a request that finds no receive is repeated; 7 is forever.
    pub rnr_retry_count: u8,
}

impl From<ConnectParams> for Params {
    fn from(params: ConnectParams) -> Self {
        let ConnectParams { responder_resources, initiator_depth, retry_count, rnr_retry_count } = params;
        Self { responder_resources, initiator_depth, retry_count, rnr_retry_count }
    }
}

/// A send work request.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u64,
    pub op: Op,
    /// The place in the peer's memory, for WRITE and READ.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub remote: Option<Remote>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub immediate: Option<u32>,
    pub len: usize,
    /// Whether success is reported.
    pub signaled: bool,
    /// Its first bytes, as many as the recorder keeps.
    pub bytes: Bytes,
}

impl Request {
    /// Builds a request from its parts.
    #[must_use]
    pub fn new(id: u64, op: SendOp, len: usize, signaled: bool, bytes: Vec<u8>) -> Self {
        let (op, remote, immediate) = match op {
            SendOp::Send => (Op::Send, None, None),
            SendOp::SendImmediate(immediate) => (Op::Send, None, Some(immediate.0)),
            SendOp::Write(to) => (Op::Write, Some(to), None),
            SendOp::WriteImmediate(to, immediate) => (Op::Write, Some(to), Some(immediate.0)),
            SendOp::Read(from) => (Op::Read, Some(from), None),
        };
        let remote = remote.map(|remote| Remote { address: remote.address, rkey: remote.rkey });
        Self { id, op, remote, immediate, len, signaled, bytes: Bytes(bytes) }
    }
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// SEND, with immediate or without.
    Send,
    /// RDMA WRITE, with immediate or without.
    Write,
    /// RDMA READ.
    Read,
}

impl Op {
    /// Its name in the specification of verbs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::Write => "WRITE",
            Self::Read => "READ",
        }
    }
}

/// A place in memory, with its key.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    pub address: u64,
    pub rkey: u32,
}

/// The result of a work request.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// It was acknowledged.
    Done { op: Op },
    /// A receive took a SEND.
    Received {
        len: u32,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        immediate: Option<u32>,
        bytes: Bytes,
    },
    /// A receive was consumed by a WRITE with immediate.
    Notified {
        immediate: u32,
        /// The place of its bytes in this end's window, if a window was announced.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        place: Option<Remote>,
        /// The first of these bytes.
        bytes: Bytes,
    },
    /// It failed.
    Failed {
        /// `enum ibv_wc_status`.
        status: u32,
        vendor: u32,
    },
}

impl Outcome {
    /// Returns the peer's request that must have caused it, as far as the receiver can tell.
    /// Earlier WRITEs without an immediate are part of it.
    #[must_use]
    pub fn arrived(&self, id: u64) -> Option<Request> {
        let (op, remote, immediate, len, bytes) = match self {
            Self::Received { len, immediate, bytes } => (Op::Send, None, *immediate, *len, bytes),
            Self::Notified { immediate, place, bytes } => {
                (Op::Write, *place, Some(*immediate), *immediate, bytes)
            }
            Self::Done { .. } | Self::Failed { .. } => return None,
        };
        let len = len as usize;
        Some(Request { id, op, remote, immediate, len, signaled: false, bytes: bytes.clone() })
    }
}

/// The limits of a recording.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most entries: half from the start, the others from the end. With 0 it records nothing.
    pub entries: usize,
    /// The most bytes of each request.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 20_000, bytes: 256 }
    }
}

impl Limits {
    /// Record nothing.
    pub const NOTHING: Self = Self { entries: 0, bytes: 0 };
}

/// Collects entries in bounded memory. Clones share it: both ends of a connection may use it.
#[derive(Clone, Debug)]
pub struct Recorder {
    limits: Limits,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    ends: u32,
    head: Vec<Entry>,
    dropped: u64,
    tail: VecDeque<Entry>,
}

impl Recorder {
    /// Returns a recorder with these limits.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, kept: Arc::default() }
    }

    pub(super) fn bytes(&self) -> Option<usize> {
        (self.limits.entries > 0).then_some(self.limits.bytes)
    }

    pub(super) fn end(&self) -> u32 {
        let mut kept = self.kept();
        kept.ends = kept.ends.wrapping_add(1);
        kept.ends
    }

    /// Adds an entry. Reads the clock inside, so that entries are in its order.
    pub(super) fn record(&self, now: impl FnOnce() -> Instant, end: u32, what: EntryKind) {
        let half = self.limits.entries / 2;
        if half == 0 {
            return;
        }
        let mut kept = self.kept();
        let Kept { head, tail, .. } = &mut *kept;
        if let Some(last) = tail.back_mut().or(head.last_mut())
            && last.end == end
            && last.what.extend(&what)
        {
            return;
        }
        let at = u64::try_from(now().since_start().as_nanos()).unwrap_or(u64::MAX);
        let entry = Entry { at, end, what };
        if kept.head.len() < half {
            kept.head.push(entry);
            return;
        }
        if kept.tail.len() >= half {
            kept.tail.pop_front();
            kept.dropped += 1;
        }
        kept.tail.push_back(entry);
    }

    /// Returns the recording so far.
    #[must_use]
    pub fn recording(&self) -> Recording {
        let kept = self.kept();
        let mut entries = kept.head.clone();
        if let (Some(next), 1..) = (kept.tail.front(), kept.dropped) {
            entries.push(Entry { at: next.at, end: 0, what: EntryKind::Dropped { count: kept.dropped } });
        }
        entries.extend(kept.tail.iter().cloned());
        Recording { entries }
    }

    /// Returns the recording so far and begins a new one. Ends keep their numbers.
    #[must_use]
    pub fn take(&self) -> Recording {
        let recording = self.recording();
        let mut kept = self.kept();
        *kept = Kept { ends: kept.ends, ..Kept::default() };
        recording
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    #[serde(rename = "valkey-rdma-recording")]
    version: u32,
}

impl Recording {
    /// Writes the recording, a line for each entry.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *to, &Header { version: VERSION })?;
        for entry in &self.entries {
            to.write_all(b"\n")?;
            serde_json::to_writer(&mut *to, entry)?;
        }
        to.write_all(b"\n")?;
        to.flush()
    }

    /// Writes the recording into a file.
    ///
    /// # Errors
    /// The file's, with its name.
    pub fn save(&self, file: &Path) -> io::Result<()> {
        let write = || self.write(&mut BufWriter::new(File::create(file)?));
        write().map_err(|error| named(file, &error))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// The file's, with its name; or the number of an invalid line, and why it is invalid.
    pub fn open(file: &Path) -> io::Result<Self> {
        let read = || Self::read(BufReader::new(File::open(file)?));
        read().map_err(|error| named(file, &error))
    }

    /// Reads the output of [`Recording::write`].
    ///
    /// # Errors
    /// The reader's; or the number of an invalid line, and why it is invalid.
    pub fn read(from: impl BufRead) -> io::Result<Self> {
        let mut lines = from.lines().enumerate();
        let wrong = |number: usize, problem: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("line {}: {problem}", number + 1))
        };
        let first = lines.next().map(|(_, line)| line).transpose()?.unwrap_or_default();
        match serde_json::from_str(&first) {
            Ok(Header { version: VERSION }) => {}
            Ok(Header { version }) => {
                let problem = format!("version {version} of the format; this program reads {VERSION}");
                return Err(wrong(0, problem));
            }
            Err(error) => return Err(wrong(0, format!("not the beginning of a recording: {error}"))),
        }
        let entry = |(number, line): (usize, io::Result<String>)| {
            serde_json::from_str(&line?).map_err(|error| wrong(number, error.to_string()))
        };
        lines.map(entry).collect::<io::Result<_>>().map(|entries| Self { entries })
    }
}

fn named(file: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", file.display()))
}
