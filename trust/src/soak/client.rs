//! One client: sessions in a row until it is told to stop, and a last one that checks all keys.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use hdrhistogram::Histogram;
use resp_rs::resp2::Frame;

use super::face::{ExchangeError, Face, LIMIT, SessionEnd};
use super::keys::{Exchange, Fault, Keys};

/// The longest path through a client: a dial in vain, a second one, a reply that does not arrive.
const OVERDUE: Duration = Duration::from_secs(2 * LIMIT.as_secs() + 20);
/// Within this time after the worst faults each client must have reached its server.
const UNREACHED: Duration = Duration::from_secs(180);

pub(super) struct LoadState {
    begun: Instant,
    /// Clients finish when it is set.
    pub stop: AtomicBool,
    tally: Mutex<Tally>,
    failures: Mutex<Vec<String>>,
    conditional_failures: Mutex<Vec<ConditionalFailure>>,
    watched: Mutex<Vec<Watched>>,
}

pub(super) struct Tally {
    pub operations: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub connected: u64,
    pub refused: u64,
    pub lost: u64,
    /// Times of exchanges, in microseconds.
    pub latency: Histogram<u64>,
    pub exchanges: BTreeMap<String, u64>,
    /// Why connections were lost or not established, and how often.
    pub reasons: BTreeMap<String, u64>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            operations: 0,
            bytes_sent: 0,
            bytes_received: 0,
            connected: 0,
            refused: 0,
            lost: 0,
            // 1 µs to 10 minutes, three digits.
            latency: Histogram::new_with_bounds(1, 600_000_000, 3)
                .unwrap_or_else(|_| unreachable!("valid bounds")),
            exchanges: BTreeMap::new(),
            reasons: BTreeMap::new(),
        }
    }
}

/// A loss that is a failure unless the server has ended.
#[derive(Clone, Debug)]
pub(super) struct ConditionalFailure {
    pub server: String,
    pub what: String,
}

struct Watched {
    name: String,
    doing: &'static str,
    since: Option<Instant>,
    /// When its last exchange succeeded, or when it began.
    through: Instant,
    /// Whether it needs no more checks.
    told: bool,
    over: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A client that panicked must not hide what the others report.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LoadState {
    pub(super) fn new() -> Self {
        Self {
            begun: Instant::now(),
            stop: AtomicBool::new(false),
            tally: Mutex::default(),
            failures: Mutex::default(),
            conditional_failures: Mutex::default(),
            watched: Mutex::default(),
        }
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(super) fn fail(&self, what: String) {
        eprintln!("[{:4}s] FAILED: {what}", self.begun.elapsed().as_secs());
        lock(&self.failures).push(what);
    }

    pub(super) fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }

    fn fail_conditionally(&self, server: &str, what: String) {
        eprintln!("[{:4}s] right only if {server} has ended: {what}", self.begun.elapsed().as_secs());
        lock(&self.conditional_failures).push(ConditionalFailure { server: server.into(), what });
    }

    pub(super) fn conditional_failures(&self) -> Vec<ConditionalFailure> {
        lock(&self.conditional_failures).clone()
    }

    pub(super) fn take_tally(&self) -> Tally {
        std::mem::take(&mut lock(&self.tally))
    }

    /// Reports each client, once, that is in one call for too long, or has not reached its server.
    pub(super) fn look_for_hung(&self) {
        let mut late = Vec::new();
        for client in lock(&self.watched).iter_mut().filter(|client| !client.told) {
            let stuck = client.since.map_or(Duration::ZERO, |since| since.elapsed());
            if stuck > OVERDUE {
                // Once: it may hang for hours.
                client.told = true;
                late.push(format!("{}: hung: {} for {} s", client.name, client.doing, stuck.as_secs()));
            } else if client.through.elapsed() > UNREACHED {
                client.told = true;
                let unreached = client.through.elapsed().as_secs();
                late.push(format!("{}: got nothing through to its server for {unreached} s", client.name));
            }
        }
        // Afterwards: no lock is taken while another is held.
        late.into_iter().for_each(|what| self.fail(what));
    }

    /// Returns the number of running clients, except hung ones: waiting for these would not end.
    pub(super) fn at_work(&self) -> usize {
        lock(&self.watched).iter().filter(|client| !client.told).count()
    }

    pub(super) fn hung(&self) -> usize {
        lock(&self.watched).iter().filter(|client| !client.over).count()
    }

    pub(super) fn watch(&self, name: &str) -> usize {
        let mut watched = lock(&self.watched);
        let (name, through) = (name.to_string(), Instant::now());
        watched.push(Watched { name, doing: "", since: None, through, told: false, over: false });
        watched.len() - 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Stores, reads and deletes keys of its own.
    Keys,
    /// Stores nothing that stays: for clients that are killed themselves.
    Echoes,
}

pub(super) struct LoadClient {
    pub name: String,
    pub face: Box<dyn Face + Send>,
    pub work: Work,
    pub server: String,
    /// Whether its server is killed from time to time, and loses all its data.
    pub server_is_killed: bool,
    /// Whether it pauses now and then, at times so long that it asks whether its peer is alive.
    pub idles: bool,
    pub seed: u64,
}

struct Run<'a> {
    client: LoadClient,
    progress: &'a LoadState,
    number: usize,
    keys: Keys,
    rng: Rng,
}

impl LoadClient {
    pub(super) fn run(self, progress: &LoadState, number: usize) {
        let mut rng = Rng::with_seed(self.seed);
        let keys = Keys::new(self.name.clone(), rng.fork());
        Run { client: self, progress, number, keys, rng }.run();
    }
}

impl Run<'_> {
    fn run(&mut self) {
        let mut last = false;
        loop {
            // One more session after it is told to stop: it checks all keys again.
            if self.progress.stopped() && std::mem::replace(&mut last, true) {
                break;
            }
            match self.session() {
                Ok(()) => continue,
                Err(ExchangeError::Lost(reason)) => self.note(&reason),
                Err(ExchangeError::Died(what)) => self.died(what),
                Err(ExchangeError::Wrong(what)) => {
                    self.progress.fail(format!("{}: {what}", self.client.name));
                    // What the server has is unknown from now on.
                    self.keys.forget();
                }
            }
            // The session has failed already: another error adds nothing.
            let _given_up = self.client.face.leave(SessionEnd::Dropped);
            // A last session that failed is repeated, unless the client was reported as hung.
            last &= lock(&self.progress.watched)[self.number].told;
            std::thread::sleep(Duration::from_millis(self.rng.u64(50..500)));
        }
        let client = &mut lock(&self.progress.watched)[self.number];
        (client.told, client.over) = (true, true);
    }

    /// Reports a failure that is excused if its server has ended.
    fn died(&self, what: String) {
        if self.client.server_is_killed {
            self.note(&what);
        } else {
            self.progress.fail_conditionally(&self.client.server, format!("{}: {what}", self.client.name));
        }
    }

    fn note(&self, reason: &str) {
        *lock(&self.progress.tally).reasons.entry(reason.to_string()).or_default() += 1;
    }

    fn watched<T>(
        &mut self,
        doing: &'static str,
        act: impl FnOnce(&mut dyn Face) -> Result<T, ExchangeError>,
    ) -> Result<T, ExchangeError> {
        let mark = |since: Option<Instant>| {
            let client = &mut lock(&self.progress.watched)[self.number];
            (client.doing, client.since) = (doing, since);
        };
        mark(Some(Instant::now()));
        let done = act(&mut *self.client.face);
        // A panic in `act` leaves the mark, and the client counts as hung.
        mark(None);
        done
    }

    fn exchange(&mut self, exchange: &Exchange) -> Result<Vec<Frame>, ExchangeError> {
        if exchange.commands.is_empty() {
            return Ok(Vec::new());
        }
        let begun = Instant::now();
        let replies = self.watched("waiting for replies", |face| face.exchange(&exchange.commands));
        let took = begun.elapsed();
        let replies = match replies {
            Ok(replies) => replies,
            Err(trouble) => {
                lock(&self.progress.tally).lost += 1;
                return Err(trouble);
            }
        };
        let mut tally = lock(&self.progress.tally);
        tally.operations += replies.len() as u64;
        let sent = exchange.commands.iter().flat_map(|command| command.words()).map(<[u8]>::len);
        tally.bytes_sent += sent.sum::<usize>() as u64;
        tally.bytes_received += replies.iter().map(length).sum::<usize>() as u64;
        // Longer than ten minutes counts as ten: `Tally::default`.
        tally.latency.saturating_record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        *tally.exchanges.entry(self.client.name.clone()).or_default() += 1;
        // No lock is taken while this one is held.
        drop(tally);
        lock(&self.progress.watched)[self.number].through = Instant::now();
        Ok(replies)
    }

    /// Makes an exchange whose replies must be right. If a connection reconnects to a server that
    /// was started again, a missing key ends the session, and the next session checks for the mark.
    fn checked(&mut self, exchange: &Exchange) -> Result<(), ExchangeError> {
        let replies = self.exchange(exchange)?;
        self.keys.judge(exchange, &replies).map_err(|fault| match fault {
            Fault::Missing(what) => ExchangeError::Lost(what),
            Fault::Wrong(what) => ExchangeError::Wrong(what),
        })
    }

    fn session(&mut self) -> Result<(), ExchangeError> {
        let connected = self.watched("connecting", |face| face.connect());
        let mut tally = lock(&self.progress.tally);
        *(if connected.is_ok() { &mut tally.connected } else { &mut tally.refused }) += 1;
        drop(tally);
        connected?;
        if self.client.work == Work::Keys {
            self.open()?;
        }
        for _ in 0..self.rng.u32(20..200) {
            if self.progress.stopped() {
                break;
            }
            let exchange =
                if self.client.work == Work::Echoes { self.keys.echoes() } else { self.keys.any() };
            self.checked(&exchange)?;
            match self.rng.u32(0..500) {
                _ if !self.client.idles => {}
                0..10 => {
                    let time = Duration::from_millis(self.rng.u64(0..3000));
                    self.idle(time);
                }
                // Longer than the 10 s after which a waiting client asks whether its peer is alive.
                10 => self.idle(Duration::from_secs(12)),
                _ => {}
            }
        }
        let how = match self.rng.u32(0..4) {
            _ if self.progress.stopped() => SessionEnd::Orderly,
            0..2 => SessionEnd::Orderly,
            2 => SessionEnd::Dropped,
            _ => SessionEnd::MidReply(self.keys.echoes().commands),
        };
        self.watched("ending a session", |face| face.leave(how))
    }

    /// Checks that all keys of the last session are there.
    fn open(&mut self) -> Result<(), ExchangeError> {
        if let Some(question) = self.keys.begin() {
            let replies = self.exchange(&question)?;
            if let Some(mark) = self.keys.remembered(&question, &replies).map_err(ExchangeError::Wrong)? {
                self.died(format!("{mark}: the server has lost what it had answered with OK"));
            }
        }
        let deletions = self.keys.open();
        self.checked(&deletions)?;
        let mark = self.keys.leave_mark();
        self.checked(&mark)
    }

    fn idle(&self, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time && !self.progress.stopped() {
            // In steps: the end of the run does not wait for a pause.
            std::thread::sleep(Duration::from_millis(50).min(time));
        }
    }
}

fn length(reply: &Frame) -> usize {
    match reply {
        Frame::BulkString(Some(bytes)) | Frame::SimpleString(bytes) | Frame::Error(bytes) => bytes.len(),
        _ => 0,
    }
}
