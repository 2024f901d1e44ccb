//! The programs that use connections: what they write and read, when, and how they end.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_conn::{Connection, ConnectionId, Endpoint, Error, Receiving, RegisteredBuffer};
use rdma_proto::{Config, State};
use rdma_softsim::{Random, SoftSim};

/// Longer than any run.
const PATIENCE: Duration = Duration::from_secs(3600);

/// A connection as its program sees it: a handle on its endpoint, which may drive others.
#[allow(missing_docs)] // the others are plain
pub struct Handle<'a> {
    pub endpoint: &'a mut Endpoint<SoftSim>,
    pub id: ConnectionId,
    /// Whether the program wants no more events of a connection that it ends.
    pub abandons: bool,
    /// Whether the connection was left to the endpoint, which closes it.
    pub abandoned: bool,
}

impl Handle<'_> {
    /// Returns the connection itself.
    pub fn connection(&self) -> &Connection<SoftSim> {
        match self.endpoint.connection(self.id) {
            Some(connection) => connection,
            None => unreachable!("a program runs only while its connection is there"),
        }
    }

    /// Checks that no error has ended the connection.
    ///
    /// # Errors
    /// The error that has ended it.
    pub fn check(&self) -> Result<(), Error> {
        self.endpoint.check(self.id)
    }

    /// Begins a graceful end. Returns false if the program gets no more events of it.
    fn close(&mut self, linger: Duration) -> bool {
        self.abandoned = self.abandons;
        let closed = if self.abandons {
            self.endpoint.abandon(self.id, linger)
        } else {
            self.endpoint.close(self.id, linger)
        };
        closed.is_ok() && !self.abandons
    }

    /// Returns a call that would still wait, although the connection has ended.
    fn waits_for_ever(&mut self, lent: Option<&Arc<RegisteredBuffer<SoftSim>>>) -> Option<&'static str> {
        // Only after the end may no call wait.
        if !matches!(self.connection().state(), State::Closed | State::Failed(_)) {
            return None;
        }
        let (endpoint, id) = (&mut *self.endpoint, self.id);
        let waits = [
            ("read", matches!(endpoint.read(id, &mut [0]), Ok(None))),
            ("write", matches!(endpoint.write(id, &[IoSlice::new(&[0])]), Ok(None))),
            ("flush", matches!(endpoint.flush(id), Ok(None))),
            ("close", matches!(endpoint.closed(id), Ok(None))),
            ("lend", lent.is_some_and(|lent| matches!(endpoint.lend(id, lent, 0..lent.len()), Ok(None)))),
            ("returned", lent.is_some_and(|lent| matches!(endpoint.returned(id, lent), Ok(None)))),
        ];
        waits.into_iter().find(|(_, waits)| *waits).map(|(call, _)| call)
    }
}

/// What a program writes and reads, when, and how it ends.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Bytes that it writes.
    pub bytes: u64,
    /// The most bytes of one write.
    pub write: u64,
    /// The most bytes of one read.
    pub read: u64,
    /// How long it rests after writing.
    pub write_rest: Duration,
    /// How long it rests after reading.
    pub read_rest: Duration,
    /// How long it rests before its first read.
    pub reads_late: Duration,
    /// How it ends.
    pub end: AppEnd,
    /// How long ending may take, and after which time it ends in any case.
    linger: Duration,
    gives_up: Option<Duration>,
}

/// How a program ends a connection.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppEnd {
    /// Closes once it has written everything and, with `reads_first`, has read the peer's.
    Close { reads_first: bool },
    /// Waits for the peer's end.
    Wait,
    /// Drops the connection once it has written `after` bytes.
    Drop { after: u64 },
}

impl Workload {
    /// Draws a workload for a connection between these two. It keeps a run short.
    pub fn draw(random: &mut Random, own: &Config, peer: &Config) -> Self {
        let write = random.pick(&[1, 3, 10, 100, 1000, 5000]);
        let read = random.pick(&[1, 7, 64, 1000, 10_000]);
        // About the bytes of one round trip, so that no other choice makes a run long.
        let unit = write.min(own.send_buffer.into()).min(peer.window.into()).min(read * 4);
        let most = (unit * random.pick(&[1, 8, 40, 100])).min(30_000);
        let micros = |random: &mut Random| Duration::from_micros(random.pick(&[0, 0, 0, 50, 2000]));
        Self {
            bytes: random.below(most + 1),
            write,
            read,
            write_rest: micros(random),
            read_rest: micros(random),
            reads_late: Duration::from_micros(random.pick(&[0, 0, 0, 1000, 400_000])),
            end: AppEnd::Wait,
            linger: PATIENCE,
            gives_up: None,
        }
    }

    /// A peer that breaks the rules may never let it finish, so it finishes without the peer.
    pub fn faces_rogue(&mut self) {
        // Less than the windows that rogues register, so that they never fill.
        self.bytes = self.bytes.min(2000);
        self.gives_up = Some(Duration::from_secs(3));
        self.linger = Duration::from_secs(1);
    }

    /// It writes this many bytes.
    pub const fn says(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// It leaves ending the connection to others.
    pub const fn waits_for_ever(&mut self) {
        self.gives_up = None;
    }

    /// It only reads.
    pub fn says_nothing(&mut self) {
        self.bytes = 0;
        if let AppEnd::Drop { after } = &mut self.end {
            *after = 0;
        }
    }

    /// It makes many small writes in a row.
    pub fn says_little_at_once(&mut self) {
        self.write = 3;
        self.write_rest = Duration::ZERO;
        self.bytes = self.bytes.min(200);
        if let AppEnd::Drop { after } = &mut self.end {
            *after = self.bytes.min(*after);
        }
    }
}

/// A running program.
pub struct App {
    workload: Workload,
    writes: Stream,
    reads: Stream,
    expected: u64,
    written: u64,
    read: u64,
    random: Random,
    /// Decides what is lent instead of written.
    lends: Option<Random>,
    /// Decides what is received into registered memory instead of read.
    lands: Option<Random>,
    /// Bytes that are being received into registered memory.
    landing: Option<Landing>,
    /// How many bytes had arrived when it gave up receiving so, while windows may still lie there.
    gave_up: Option<u64>,
    next_write: Instant,
    next_read: Instant,
    gives_up: Option<Instant>,
    last_run: Instant,
    closing: bool,
    /// Whether the bytes before a close are known to be delivered.
    delivered: bool,
    flushing: bool,
    /// The last lent buffer, until it has been returned.
    lent: Option<Arc<RegisteredBuffer<SoftSim>>>,
    wrong: Option<u64>,
    /// The peer's data is not checked.
    trusts_no_peer: bool,
}

struct Landing {
    buffer: Arc<RegisteredBuffer<SoftSim>>,
    receiving: Receiving<SoftSim>,
    /// How many of them were checked.
    seen: usize,
}

/// The result of a program.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Bytes taken from the program.
    pub written: u64,
    /// Bytes given to the program.
    pub read: u64,
    /// Whether its own close reported that every byte written had arrived.
    pub delivered: bool,
    /// How the connection ended.
    pub cause: EndCause,
}

/// How a program's connection ended.
#[derive(Clone, Debug)]
pub enum EndCause {
    /// The program closed or dropped it.
    Own,
    /// The peer ended it, and everything before was read.
    Eof,
    /// It failed.
    Failed(Error),
    /// The host was killed, or the connection was never established on this side.
    Gone,
    /// It has ended, and this call on it would still wait.
    Waits(&'static str),
}

/// A pseudo-random stream of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub u64);

impl Stream {
    fn fill(self, from: u64, into: &mut [u8]) {
        for (at, byte) in (from..).zip(into) {
            *byte = self.byte(at);
        }
    }

    const fn byte(self, at: u64) -> u8 {
        // From the position alone: reads and writes cut the stream anywhere.
        let mixed = Random::new(self.0 ^ (at / 8)).next();
        mixed.to_le_bytes()[(at % 8) as usize]
    }
}

impl App {
    /// Creates a program with its streams.
    pub fn new(
        workload: Workload,
        writes: Stream,
        reads: Stream,
        expected: u64,
        now: Instant,
        seed: u64,
    ) -> Self {
        Self {
            workload,
            writes,
            reads,
            expected,
            written: 0,
            read: 0,
            random: Random::new(seed),
            // By generators of their own, so that the other choices of a seed stay the same.
            lends: Some(Random::new(!seed)).filter(|random| random.clone().chance(1, 3)),
            lands: Some(Random::new(seed.rotate_left(17))).filter(|random| random.clone().chance(1, 3)),
            landing: None,
            gave_up: None,
            next_write: now,
            next_read: now.after(workload.reads_late),
            gives_up: workload.gives_up.map(|after| now.after(after)),
            last_run: Instant::default(),
            closing: false,
            delivered: false,
            flushing: false,
            lent: None,
            wrong: None,
            // Only a program that faces a rogue gives up.
            trusts_no_peer: workload.gives_up.is_some(),
        }
    }

    /// Returns the bytes read.
    pub const fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Returns the position of a byte that differs from the one the peer wrote.
    pub const fn wrong_byte(&self) -> Option<u64> {
        self.wrong
    }

    /// Returns whether windows still lie in memory that it gave up, although one may be full by now
    /// and its bytes are read.
    pub fn is_kept_from_memory(&self, connection: &Connection<SoftSim>) -> bool {
        self.gave_up.is_some_and(|at| {
            let window = u64::from(connection.options().protocol.window);
            let arrived = connection.counters().bytes_received.saturating_sub(at);
            connection.is_landing() && connection.unread() == 0 && arrived >= window
        })
    }

    /// Returns when it wants to run, if nothing else happens.
    pub fn next_wake(&self) -> Option<Instant> {
        let times = [Some(self.next_read), Some(self.next_write), self.gives_up];
        // Times that have passed were used by the last run.
        times.into_iter().flatten().filter(|at| *at > self.last_run).min()
    }

    /// Runs the program. Returns whether it did something, or its ending if it has ended.
    pub fn run(&mut self, link: &mut Handle<'_>) -> Result<bool, Ending> {
        let now = link.connection().now();
        self.last_run = now;
        let read = now >= self.next_read && self.read_some(link, now)?;
        self.lent.take_if(|lent| matches!(link.connection().returned(lent), Ok(Some(()))));
        self.flushing = self.flushing && matches!(link.endpoint.flush(link.id), Ok(None));
        let writes = !self.closing && !self.flushing && now >= self.next_write;
        let wrote = writes && self.write_some(link, now)?;
        if self.closing && link.connection().state() == State::Closed {
            // If the peer closed first, it is unknown how much of our data it received.
            self.delivered = link.connection().unconfirmed() == 0;
            return Err(self.ending(EndCause::Own));
        }
        let finished = match self.workload.end {
            AppEnd::Close { reads_first } => {
                self.written == self.workload.bytes && (!reads_first || self.read >= self.expected)
            }
            AppEnd::Drop { after } if self.written >= after => return Err(self.ending(EndCause::Own)),
            AppEnd::Wait | AppEnd::Drop { .. } => false,
        };
        let late = self.gives_up.is_some_and(|at| now >= at);
        // Before the establishment, a close delivers what was written. If nothing was, the peer
        // would never learn of the connection.
        let closes = link.connection().state() != State::Connecting || self.written > 0;
        if (finished || late) && !self.closing && closes {
            self.closing = true;
            let goes_on = link.close(self.workload.linger);
            return if goes_on { Ok(true) } else { Err(self.ending(EndCause::Own)) };
        }
        if late && !closes {
            return Err(self.ending(EndCause::Own));
        }
        Ok(read || wrote)
    }

    fn read_some(&mut self, link: &mut Handle<'_>, now: Instant) -> Result<bool, Ending> {
        let buffer = match self.land_some(link) {
            Some(landed) if landed.is_empty() => return Ok(false),
            Some(landed) => landed,
            None => {
                let mut buffer = vec![0; self.random.within(1..=self.workload.read) as usize];
                match link.endpoint.read(link.id, &mut buffer) {
                    Ok(None) => return Ok(false),
                    // Its own close is finished when the connection's state says so.
                    Ok(Some(0)) if self.closing => return Ok(false),
                    Ok(Some(0)) => return Err(self.ending(EndCause::Eof)),
                    Ok(Some(count)) => buffer.truncate(count),
                    Err(error) => return Err(self.ending(EndCause::Failed(error))),
                }
                buffer
            }
        };
        if self.wrong.is_none() && !self.trusts_no_peer {
            let mut read = (self.read..).zip(&buffer);
            let limit = self.expected;
            // Any byte beyond those that the peer writes is wrong.
            let wrong = read.find(|(at, byte)| *at >= limit || **byte != self.reads.byte(*at));
            self.wrong = wrong.map(|(at, _)| at);
        }
        self.read += buffer.len() as u64;
        if !self.workload.read_rest.is_zero() {
            self.next_read = now.after(self.random.duration(self.workload.read_rest));
        }
        Ok(true)
    }

    /// Returns the bytes received into registered memory since the last call; `None` if the program
    /// reads now: also what arrived before an end, and its cause.
    fn land_some(&mut self, link: &mut Handle<'_>) -> Option<Vec<u8>> {
        let random = self.lands.as_mut()?;
        if self.landing.is_none() {
            let window = u64::from(link.connection().options().protocol.window);
            let most = self.expected.saturating_sub(self.read).min(window.saturating_mul(8));
            if most == 0 || random.chance(1, 3) {
                return None;
            }
            let len = random.within(1..=most) as usize;
            // Where no memory can be registered, it reads.
            let buffer = Arc::new(link.connection().register_landing(len).ok()?);
            let receiving = Receiving::new(Arc::clone(&buffer), 0..len);
            self.landing = Some(Landing { buffer, receiving, seen: 0 });
            self.gave_up = None;
        }
        let landing = self.landing.as_mut()?;
        let outcome = link.endpoint.receive(link.id, &mut landing.receiving);
        let received = landing.receiving.received();
        let count = (received.landed + received.copied) as usize;
        let mut bytes = vec![0; count - landing.seen];
        let _inside = landing.buffer.read(landing.seen, &mut bytes);
        landing.seen = count;
        // At times while windows lie there, whose memory the endpoint must keep (mutant 88).
        let gives_up = !matches!(outcome, Ok(None)) || random.chance(1, 8);
        if gives_up {
            self.landing = None;
            // The connection exists: the program holds it.
            let _is_there = link.endpoint.stop_landing(link.id);
            self.gave_up = Some(link.connection().counters().bytes_received);
        }
        if bytes.is_empty() && gives_up { None } else { Some(bytes) }
    }

    fn write_some(&mut self, link: &mut Handle<'_>, now: Instant) -> Result<bool, Ending> {
        let left = self.workload.bytes - self.written;
        if left == 0 {
            return Ok(false);
        }
        let mut buffer = vec![0; self.random.within(1..=self.workload.write.min(left)) as usize];
        self.writes.fill(self.written, &mut buffer);
        match self.send(link, &buffer) {
            Ok(None | Some(0)) => Ok(false),
            Ok(Some(count)) => {
                self.written += count as u64;
                self.flushing = self.random.chance(1, 8);
                if !self.workload.write_rest.is_zero() {
                    self.next_write = now.after(self.random.duration(self.workload.write_rest));
                }
                Ok(true)
            }
            // No memory for a send buffer ends nothing, but this program is done.
            Err(_) if link.check().is_ok() => Err(self.ending(EndCause::Own)),
            // Data that arrived before the end can still be read, and reading returns the cause.
            Err(_) if now < self.next_read => {
                self.next_read = now;
                Ok(true)
            }
            Err(_) => self.read_some(link, now),
        }
    }

    fn send(&mut self, link: &mut Handle<'_>, bytes: &[u8]) -> Result<Option<usize>, Error> {
        // In two slices, because a vectored write may end in either of them.
        let (one, other) = bytes.split_at(self.random.below(bytes.len() as u64 + 1) as usize);
        // Where no memory can be registered, it writes.
        if let Some(random) = &mut self.lends
            && random.chance(1, 2)
            && let Ok(mut buffer) = link.connection().register_buffer(bytes.len())
            && buffer.write(0, bytes)
        {
            let buffer = Arc::new(buffer);
            let lent = link.endpoint.lend(link.id, &buffer, 0..bytes.len());
            self.lent = Some(buffer);
            return lent;
        }
        link.endpoint.write(link.id, &[IoSlice::new(one), IoSlice::new(other)])
    }

    /// Returns its ending, or the broken rule: an error stays the same, and waiting calls return.
    pub fn checked(&self, ending: Ending, link: &mut Handle<'_>) -> Ending {
        if let EndCause::Failed(error) = &ending.cause {
            let again = link.endpoint.read(link.id, &mut [0]).err().map(|error| error.to_string());
            if again != Some(error.to_string()) || link.check().is_ok() {
                let cause = EndCause::Failed(rdma_proto::Error::Bug("an error that was not sticky").into());
                return Ending { cause, ..ending };
            }
        }
        match link.waits_for_ever(self.lent.as_ref()).filter(|_| !link.abandoned) {
            Some(call) => Ending { cause: EndCause::Waits(call), ..ending },
            None => ending,
        }
    }

    /// Returns the program's ending as of now.
    pub fn ending(&self, cause: EndCause) -> Ending {
        Ending { written: self.written, read: self.read, delivered: self.delivered, cause }
    }
}
