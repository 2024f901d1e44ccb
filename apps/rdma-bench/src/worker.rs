//! One thread and its clients: sends requests, counts replies, and measures latencies.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier as Gate};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma_server::{Address, Barrier, ConnectionType, EventLoop, Session, SessionId, SessionState};
use slotmap::SecondaryMap;

use crate::prepare::{no_connection, told, warm_up};
use crate::replies::Replies;
use crate::schedule::{Schedule, sleep};
use crate::workload::{Load, Output, Requests, Test};

const CHUNK: usize = 256 << 10;

/// The most requests in flight of a client in an open loop. Later ones wait, which counts.
const OUTSTANDING: usize = 1024;

/// How often a thread checks whether another one has failed.
const LOOK: Duration = Duration::from_millis(100);

/// The most connection attempts at a time: a full listener rejects them. Valkey's has 511
/// places, and `rdma-conn`'s 256.
const AT_ONCE: usize = 128;

pub(crate) struct Shared {
    /// Requests that are not taken yet.
    left: AtomicU64,
    pub(crate) done: AtomicU64,
    failed: AtomicBool,
    /// Opens when all clients are connected, before the first request.
    gate: Gate,
}

impl Shared {
    pub(crate) fn new(load: &Load) -> Arc<Self> {
        Arc::new(Self {
            left: AtomicU64::new(load.requests),
            done: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            gate: Gate::new(load.threads),
        })
    }

    fn take(&self, wanted: usize) -> usize {
        let wanted = wanted as u64;
        let took = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            (left > 0).then(|| left.saturating_sub(wanted))
        });
        took.map_or(0, |before| before.min(wanted) as usize)
    }
}

pub(crate) struct Measured {
    /// How long requests took, in nanoseconds.
    pub(crate) latencies: Histogram<u64>,
    /// When the first request was due.
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
}

#[derive(Default)]
struct Client {
    /// When requests in flight were sent, or were due, and how many at that time.
    sent: VecDeque<(Instant, u64)>,
    output: Output,
    replies: Replies,
}

struct Run {
    clients: SecondaryMap<SessionId, Client>,
    load: Load,
    requests: Requests,
    shared: Arc<Shared>,
    latencies: Histogram<u64>,
    chunk: Box<[u8]>,
    /// Bytes have arrived since the last check.
    heard: bool,
    ended: Instant,
    failure: Option<io::Error>,
}

/// Runs `clients` clients through a test.
///
/// # Errors
/// A connection attempt failed, a connection ended, the server replied with an error, or nothing
/// arrived for [`Load::timeout`].
pub(crate) fn run(
    test: Test,
    load: &Load,
    clients: usize,
    seed: u64,
    (with, target): (&impl ConnectionType, &Address),
    shared: &Arc<Shared>,
) -> io::Result<Measured> {
    let state = Run {
        clients: SecondaryMap::new(),
        load: load.clone(),
        requests: Requests::new(test, load, seed),
        shared: Arc::clone(shared),
        latencies: Histogram::new(3).map_err(io::Error::other)?,
        chunk: vec![0; CHUNK].into(),
        heard: false,
        ended: Instant::now(),
        failure: None,
    };
    let connected = connect_all(state, clients, (with, target)).and_then(|(mut events, ids)| {
        warm_up(&mut events, &ids, test, load)?;
        Ok((events, ids))
    });
    if connected.is_err() {
        shared.failed.store(true, Ordering::Relaxed);
    }
    // Even after a failure, because the others wait here.
    shared.gate.wait();
    let (mut events, ids) = connected?;
    if shared.failed.load(Ordering::Relaxed) {
        return Err(stopped());
    }
    let result = go(&mut events, &ids, load);
    if result.is_err() {
        shared.failed.store(true, Ordering::Relaxed);
    }
    let begun = result?;
    for id in ids {
        events.close(id);
    }
    let Run { latencies, ended, .. } = events.finish()?;
    Ok(Measured { latencies, begun, ended })
}

fn connect_all(
    state: Run,
    clients: usize,
    (with, target): (&impl ConnectionType, &Address),
) -> io::Result<(EventLoop<Run>, Vec<SessionId>)> {
    let mut events = EventLoop::new(state)?;
    events.timeouts.handshake = events.state.load.connecting();
    let together = (AT_ONCE / events.state.load.threads).max(1);
    let mut ids = Vec::with_capacity(clients);
    while ids.len() < clients {
        ids.extend(connect_some(&mut events, together.min(clients - ids.len()), (with, target))?);
    }
    Ok((events, ids))
}

fn connect_some(
    events: &mut EventLoop<Run>,
    clients: usize,
    (with, target): (&impl ConnectionType, &Address),
) -> io::Result<Vec<SessionId>> {
    let mut ids = Vec::with_capacity(clients);
    for _ in 0..clients {
        let id = events.connect(with, target, None, |events, id| {
            // Before that there is nothing to send or to receive.
            let failed = events.get(id).is_none_or(|client| client.state() != SessionState::Connected);
            if failed {
                let error = events.get(id).and_then(|client| client.last_error()).map(copy);
                events.state.fail(error.unwrap_or_else(|| ErrorKind::NotConnected.into()));
            }
        });
        let id = id.map_err(|error| no_connection(target, &error))?;
        events.state.clients.insert(id, Client::default());
        ids.push(id);
    }
    let patience = events.state.load.connecting();
    let until = Instant::now() + patience;
    let missing = |events: &EventLoop<Run>| {
        let connected = |client: &Session<Run>| client.state() == SessionState::Connected;
        ids.iter().filter(|id| !events.get(**id).is_some_and(connected)).count()
    };
    while missing(events) > 0 {
        events.turn(Some(LOOK))?;
        if let Some(error) = events.state.failure.take() {
            return Err(no_connection(target, &error));
        }
        if Instant::now() > until {
            let missing = missing(events);
            let text = format!("{missing} clients had no connection to {target} within {patience:?}");
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
    }
    Ok(ids)
}

/// Sends requests until none are left, and waits for their replies. Returns when it began.
fn go(events: &mut EventLoop<Run>, ids: &[SessionId], load: &Load) -> io::Result<Instant> {
    let begun = Instant::now();
    for id in ids {
        if let Some(client) = events.get_mut(*id) {
            client.set_read_handler(Some(read_replies));
        }
    }
    let mut schedule = load.rate.map(|rate| Schedule::new(begun, rate, load.threads));
    if schedule.is_none() {
        ids.iter().for_each(|id| send_batch(events, *id));
    }
    events.state.ended = begun;
    let mut turns = 0_u32;
    loop {
        let wait = match &mut schedule {
            None => load.timeout,
            Some(schedule) => sleep(schedule.send_due(events, ids).min(load.timeout)),
        };
        if schedule.as_ref().is_none_or(|schedule| schedule.over)
            && events.state.clients.values().all(|client| client.sent.is_empty())
        {
            return Ok(begun);
        }
        let wait = if load.threads > 1 { wait.min(LOOK) } else { wait };
        events.turn(Some(wait))?;
        if let Some(error) = events.state.failure.take() {
            return Err(error);
        }
        if events.state.shared.failed.load(Ordering::Relaxed) {
            return Err(stopped());
        }
        // After bytes, or without a sleep, it checks all clients and the clock now and then only.
        turns = turns.wrapping_add(1);
        if (std::mem::take(&mut events.state.heard) || wait.is_zero()) && !turns.is_multiple_of(1024) {
            continue;
        }
        let oldest = events.state.clients.values().filter_map(|client| client.sent.front()).min();
        let now = Instant::now();
        let silent = now.saturating_duration_since(events.state.ended.max(begun));
        if oldest.is_some_and(|(sent, _)| now.saturating_duration_since(*sent) > load.timeout)
            && silent > load.timeout
        {
            let waited = load.timeout;
            return Err(io::Error::new(ErrorKind::TimedOut, format!("no reply for {waited:?}")));
        }
    }
}

impl Schedule {
    /// Sends the requests that are due. Returns the time until the next one is due.
    fn send_due(&mut self, events: &mut EventLoop<Run>, ids: &[SessionId]) -> Duration {
        while !self.over {
            let Some(due) = self.due() else { break };
            let now = Instant::now();
            if due > now {
                return due - now;
            }
            // Without a client that has room due requests wait, and their wait counts.
            let has_room = |id: &&SessionId| {
                events.state.clients.get(**id).is_some_and(|client| client.sent.len() < OUTSTANDING)
            };
            let (before, after) = ids.split_at(self.next % ids.len().max(1));
            let Some(id) = after.iter().chain(before).find(has_room).copied() else { break };
            self.next = self.next.wrapping_add(1);
            if events.state.shared.take(1) == 0 {
                self.over = true;
                break;
            }
            self.sent += 1;
            events.state.prepare(id, 1, due);
            write_requests(events, id);
        }
        Duration::MAX
    }
}

fn send_batch(events: &mut EventLoop<Run>, id: SessionId) {
    let batch = events.state.shared.take(events.state.load.batch());
    if batch > 0 {
        events.state.prepare(id, batch, Instant::now());
        write_requests(events, id);
    }
}

fn write_requests(events: &mut EventLoop<Run>, id: SessionId) {
    let Some((state, connection)) = events.get_with_state(id) else { return };
    let Some(client) = state.clients.get_mut(id) else { return };
    let waits = loop {
        let next = state.requests.unwritten(&client.output);
        if next.is_empty() {
            break false;
        }
        match connection.write(next) {
            Ok(written) => client.output.advance(written),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break true,
            Err(error) => {
                // Earlier words of the server explain more.
                let said = state.read(id, connection).err();
                state.fail(said.unwrap_or(error));
                break false;
            }
        }
    };
    connection.set_write_handler(waits.then_some(write_requests), Barrier::ReadFirst);
}

fn read_replies(events: &mut EventLoop<Run>, id: SessionId) {
    let Some((state, connection)) = events.get_with_state(id) else { return };
    match state.read(id, connection) {
        Ok(true) if state.load.rate.is_none() => send_batch(events, id),
        Ok(_) => {}
        Err(error) => state.fail(error),
    }
}

impl Run {
    fn fail(&mut self, error: io::Error) {
        self.failure.get_or_insert_with(|| told(error, &self.load));
    }

    fn prepare(&mut self, id: SessionId, requests: usize, at: Instant) {
        let Some(client) = self.clients.get_mut(id) else { return };
        self.requests.add(requests, &mut client.output);
        client.sent.push_back((at, requests as u64));
    }

    fn read(&mut self, id: SessionId, from: &mut impl Read) -> io::Result<bool> {
        let Some(client) = self.clients.get_mut(id) else { return Ok(false) };
        let mut replies = 0;
        // A read that does not fill the chunk has emptied the stream.
        loop {
            let read = match from.read(&mut self.chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            self.heard = true;
            let mut received = self.chunk.get(..read).unwrap_or_default();
            while client.replies.take(&mut received)? {
                replies += 1;
            }
            if read < self.chunk.len() {
                break;
            }
        }
        if replies > 0 {
            let now = Instant::now();
            self.ended = now;
            self.shared.done.fetch_add(replies, Ordering::Relaxed);
            while replies > 0 {
                let Some((sent, waiting)) = client.sent.front_mut() else {
                    return Err(io::Error::new(ErrorKind::InvalidData, "a reply to no request"));
                };
                let nanos =
                    u64::try_from(now.saturating_duration_since(*sent).as_nanos()).unwrap_or(u64::MAX);
                let answered = replies.min(*waiting);
                self.latencies.record_n(nanos.max(1), answered).map_err(io::Error::other)?;
                replies -= answered;
                *waiting -= answered;
                if *waiting == 0 {
                    client.sent.pop_front();
                }
            }
        }
        Ok(client.sent.is_empty())
    }
}

/// Returns the error of a thread that stops because another one has failed. It is not reported.
fn stopped() -> io::Error {
    io::Error::new(ErrorKind::Interrupted, "another thread has failed")
}

fn copy(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}
