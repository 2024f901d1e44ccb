//! Drops futures at any moment, in virtual time and on one thread. A seed determines each run.
//!
//! Nothing here sleeps, and nothing wakes a task without cause. A task is polled only after its own
//! waker was called, so a forgotten task stays forgotten. When no task can run, the reactor has no
//! event, and the fabric has none left, a waiting task would wait for ever.

use std::future::Future;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rdma_softsim::{DeviceKind, Fabric, FaultPlan, Limits, Random, Simulation, SimulationSettings, SoftSim};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};

use super::driver::Turn;
use super::{AsyncEndpoint, AsyncListener, AsyncStream};
use crate::background;
use crate::endpoint::Endpoint;
use crate::options::Options;
use crate::stream::Connect;

const NEVER: Duration = Duration::from_secs(1 << 20);

const MOST_TURNS: u32 = 1_000_000;

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A task's waker. Each future gets a new one: the waker of a dropped future must wake no other.
struct Place {
    woken: Arc<Woken>,
    waker: Waker,
}

impl Place {
    fn new() -> Self {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        Self { waker: Arc::clone(&woken).into(), woken }
    }

    fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::Relaxed)
    }

    fn poll<T>(&self, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        if !self.woken.0.swap(false, Ordering::Relaxed) {
            return Poll::Pending;
        }
        poll(&mut Context::from_waker(&self.waker))
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Read,
    Write,
    Flush,
    Shutdown,
}

enum Half {
    Read(ReadHalf<AsyncStream<SoftSim>>),
    Write(WriteHalf<AsyncStream<SoftSim>>),
}

struct Task {
    half: Half,
    /// Its future, the future's waker, and how many bytes it moves.
    future: Option<(Op, Place, usize)>,
    at: usize,
    len: usize,
    stream: u64,
    /// Whether it ends the connection, or sees its end, before it is done.
    ends: bool,
    done: bool,
}

fn byte(stream: u64, at: usize) -> u8 {
    Random::new(stream ^ at as u64).next() as u8
}

impl Task {
    fn new(half: Half, stream: u64, len: usize) -> Self {
        Self { half, future: None, at: 0, len, stream, ends: false, done: false }
    }

    fn begin(&mut self, random: &mut Random) {
        if self.done || self.future.is_some() {
            return;
        }
        let op = match &self.half {
            Half::Read(_) => Op::Read,
            Half::Write(_) if self.at == self.len => {
                if self.ends {
                    Op::Shutdown
                } else {
                    Op::Flush
                }
            }
            Half::Write(_) => random.pick(&[Op::Write, Op::Write, Op::Flush]),
        };
        self.future = Some((op, Place::new(), random.within(1..=40) as usize));
    }

    fn runs(&self) -> bool {
        self.future.as_ref().is_some_and(|(_, place, _)| place.is_woken())
    }

    fn poll(&mut self) {
        let Some((op, place, len)) = self.future.take() else { return };
        let (at, stream, left) = (self.at, self.stream, self.len - self.at);
        let mut bytes: Vec<u8> = (at..at + len.min(left)).map(|at| byte(stream, at)).collect();
        let ready = place.poll(|cx| match (&mut self.half, op) {
            (Half::Write(half), Op::Write) => {
                let (one, other) = bytes.split_at(bytes.len() / 3);
                let slices = [IoSlice::new(one), IoSlice::new(other)];
                Pin::new(half).poll_write_vectored(cx, &slices)
            }
            (Half::Write(half), Op::Flush) => Pin::new(half).poll_flush(cx).map_ok(|()| 0),
            (Half::Write(half), _) => Pin::new(half).poll_shutdown(cx).map_ok(|()| 0),
            (Half::Read(half), _) => {
                bytes.resize(len, 0);
                let mut buffer = ReadBuf::new(&mut bytes);
                Pin::new(half).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
            }
        });
        let Poll::Ready(count) = ready else {
            self.future = Some((op, place, len));
            return;
        };
        let count = count.unwrap_or_else(|error| panic!("nothing breaks here: {error}"));
        match (op, self.ends) {
            (Op::Read, ends) => {
                assert!(count > 0 || ends && left == 0, "the end came {left} bytes too early");
                for (place, got) in (at..).zip(&bytes[..count]) {
                    assert!(place < self.len && *got == byte(stream, place), "byte {place} is another one");
                }
                self.at += count;
                self.done = if ends { count == 0 } else { self.at == self.len };
            }
            (Op::Write, _) => self.at += count,
            (Op::Flush, ends) => self.done = !ends && self.at == self.len,
            (Op::Shutdown, _) => self.done = true,
        }
    }
}

/// Lets the drivers run: the runtime turns its reactor, the drivers, and the tasks they woke.
async fn drivers_run() {
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
}

/// The world of a seed: which task runs next, and which future is dropped instead.
struct World {
    sim: Simulation,
    random: Random,
    /// Futures that may still be dropped. After that, all must finish.
    drops: u64,
}

impl World {
    /// Runs one turn when no task can: the reactor reports events, or the fabric advances. Returns
    /// false if nothing will ever happen again.
    async fn idle(&self, woken: impl Fn() -> bool) -> bool {
        drivers_run().await;
        woken() || self.sim.step() || {
            drivers_run().await;
            // A driver may have begun something.
            woken() || self.sim.step()
        }
    }

    fn drops_one(&mut self) -> bool {
        let drops = self.drops > 0 && self.random.chance(1, 6);
        self.drops -= u64::from(drops);
        drops
    }

    async fn run(&mut self, tasks: &mut [Task]) {
        let mut turns = 0;
        while tasks.iter().any(|task| !task.done) {
            turns += 1;
            assert!(turns < MOST_TURNS, "it goes round and round");
            tasks.iter_mut().for_each(|task| task.begin(&mut self.random));
            let place = self.random.below(tasks.len() as u64) as usize;
            if self.drops_one() {
                tasks[place].future = None;
            } else if tasks[place].runs() {
                tasks[place].poll();
            }
            if self.random.chance(1, 8) {
                self.sim.step();
            }
            if self.random.chance(1, 32) {
                tokio::task::yield_now().await;
            }
            let woken = || {
                let done = tasks.iter().all(|task| task.done);
                done || tasks.iter().any(|task| task.future.is_none() && !task.done || task.runs())
            };
            if !woken() && !self.idle(woken).await {
                let wait = tasks.iter().filter_map(|task| Some((task.future.as_ref()?.0, task.at, task.len)));
                panic!("somebody waits for ever: {:?}", wait.collect::<Vec<_>>());
            }
        }
    }

    /// Returns both ends of a connection. Dropped dials and accepts leave streams without a peer.
    async fn connect(
        &mut self,
        client: &SoftSim,
        listener: &AsyncListener<SoftSim>,
        how: &Connect,
    ) -> [AsyncStream<SoftSim>; 2] {
        let address = listener.local_addr().expect("it listens");
        let (mut dial, mut accept) = (None, None);
        let mut dialed: Option<AsyncStream<SoftSim>> = None;
        let mut accepted: Vec<(AsyncStream<SoftSim>, Place)> = Vec::new();
        for _ in 0..MOST_TURNS {
            let (future, dialing) = dial.get_or_insert_with(|| {
                (Box::pin(AsyncStream::connect_with(client, address, how)), Place::new())
            });
            if let (None, Poll::Ready(stream)) = (&dialed, dialing.poll(|cx| future.as_mut().poll(cx))) {
                dialed = Some(stream.expect("somebody listens"));
            }
            let (future, accepting) =
                accept.get_or_insert_with(|| (Box::pin(listener.accept()), Place::new()));
            if let Poll::Ready(stream) = accepting.poll(|cx| future.as_mut().poll(cx)) {
                // The peer may be gone already.
                accepted.extend(stream.ok().map(|(stream, _)| (stream, Place::new())));
                accept = None;
            }
            // A server takes part by waiting to be connected.
            for (stream, place) in &mut accepted {
                let _connected_or_left = place.poll(|cx| Pin::new(stream).poll_flush(cx));
            }
            let own = dialed.as_ref().and_then(AsyncStream::local_addr);
            if let Some(place) = accepted.iter().position(|(stream, _)| Some(stream.peer_addr()) == own)
                && let Some(client) = dialed.take()
            {
                return [client, accepted.swap_remove(place).0];
            }
            let woken = || {
                let accepting = accept.as_ref().is_none_or(|(_, place)| place.is_woken());
                let dialing = dial.as_ref().is_none_or(|(_, place)| place.is_woken());
                accepting || dialing || accepted.iter().any(|(_, place)| place.is_woken())
            };
            assert!(woken() || self.idle(woken).await, "somebody waits for ever");
            if dialed.is_none() && self.drops_one() {
                dial = None;
            }
            if self.drops_one() {
                accept = None;
            }
        }
        panic!("it goes round and round");
    }
}

fn options(random: &mut Random, usual: Options) -> Options {
    let mut options = Options { keep_memory: NEVER, linger: NEVER, handshake_timeout: NEVER, ..usual };
    let protocol = &mut options.protocol;
    protocol.window = random.pick(&[1, 2, 5, 16, 64, 1000]);
    protocol.windows = random.pick(&[1, 2]);
    protocol.send_buffer = random.pick(&[1, 3, 7, 64, 1000]);
    protocol.send_depth = random.pick(&[2, 4, 16]);
    protocol.peer_receives = random.pick(&[2, 4, 16]);
    protocol.keepalive = Some(rdma_proto::Keepalive::NONE);
    options.receives = random.pick(&[2, 4, 16]);
    options
}

async fn run(seed: u64) {
    let mut random = Random::new(seed);
    let device_kind = random.pick(&DeviceKind::ALL);
    let settings = SimulationSettings { pauses: random.pick(&[0, 16, 128]), ..SimulationSettings::default() };
    let sim = Simulation::new(seed, device_kind, settings, FaultPlan::new());
    let address = SocketAddr::from(([10, 0, 0, 1], 6379));
    let (server, client) =
        (sim.host(&[address.ip()], Limits::default()), sim.host(&[[10, 0, 0, 2].into()], Limits::default()));
    let how =
        Connect { timeout: NEVER, options: options(&mut random, Options::default()), ..Connect::default() };
    let listener = AsyncListener::bind_with(
        &server,
        address,
        options(&mut random, Options::default()),
        crate::Limits::default(),
    )
    .await
    .expect("free");
    let drops = random.pick(&[0, 3, 30, 100]);
    let mut world = World { sim, random, drops };
    let ends = world.connect(&client, &listener, &how).await;

    let lens = [0, 1].map(|_| world.random.pick(&[0, 1, 50, 500]));
    world.drops = drops;
    let mut tasks = Vec::new();
    for (ours, stream) in ends.into_iter().enumerate() {
        let theirs = 1 - ours;
        let (reader, writer) = tokio::io::split(stream);
        tasks.push(Task::new(Half::Read(reader), seed ^ (theirs as u64) << 32, lens[theirs]));
        tasks.push(Task::new(Half::Write(writer), seed ^ (ours as u64) << 32, lens[ours]));
    }
    for task in &mut tasks {
        task.done = matches!(task.half, Half::Read(_)) && task.len == 0;
    }
    world.run(&mut tasks).await;
    // The client's writer ends the connection, and the server's reader sees the end.
    for place in [1, 2] {
        tasks[place].ends = true;
        tasks[place].done = false;
    }
    world.drops = drops;
    world.run(&mut tasks).await;
}

#[test]
fn dropped_futures_lose_nothing_and_others_end() {
    background::disable();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().expect("a runtime");
    for seed in 0..200 {
        println!("seed {seed}");
        runtime.block_on(run(seed));
    }
}

/// A panic while driving may lose completions. Every waiting task is woken and fails.
#[test]
fn after_a_panic_of_the_driver_calls_fail() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let (server, client) = (fabric.host(&[address.ip()]), fabric.host(&[[192, 0, 2, 2].into()]));
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let (theirs, ours) = (runtime().expect("a runtime"), runtime().expect("a runtime"));
    let (mut stream, _accepted) = theirs.block_on(async {
        let listener =
            AsyncListener::bind_with(&server, address, Options::default(), crate::Limits::default())
                .await
                .expect("a free port");
        let (connected, accepted) = tokio::join!(
            async {
                let connecting = async move { AsyncStream::connect(&client, address).await };
                ours.spawn(connecting).await.expect("no panic")
            },
            async { listener.accept().await.expect("a request") }
        );
        (connected.expect("somebody listens"), accepted)
    });
    let shared = Arc::clone(&stream.shared);
    let panics = std::thread::spawn(move || {
        let _state = shared.lock();
        panic!("as it was told");
    });
    panics.join().expect_err("it panics");
    // Drop the driver as its own panic would.
    drop(ours);
    let place = Place::new();
    let read = place.poll(|cx| Pin::new(&mut stream).poll_read(cx, &mut ReadBuf::new(&mut [0])));
    let Poll::Ready(Err(error)) = read else { panic!("{read:?}, without a driver") };
    assert!(error.to_string().contains("has panicked"), "{error}");
}

/// VR-SEC-004: after one failure to read events the endpoint continues. Repeated ones end it.
#[test]
fn one_failure_to_read_events_loses_no_endpoint() {
    background::disable();
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut endpoint =
        Endpoint::new(&fabric.host(&[address.ip()]), crate::Limits::default()).expect("a device");
    let listener = endpoint.listen(address, Options::default()).expect("a free address");
    // Without a runtime, only this test drives it.
    let (AsyncEndpoint { shared }, _) = AsyncEndpoint::of(endpoint, Some(listener));
    let listener = AsyncListener { shared, listener };
    let mut cx = Context::from_waker(Waker::noop());
    assert!(listener.poll_accept(&mut cx).is_pending());
    fabric.kill_host(address.ip());
    for _ in 1..10 {
        assert!(matches!(listener.shared.turn(None), Turn::Sleep(_)), "it is lost");
        assert!(matches!(listener.poll_accept(&mut cx), Poll::Ready(Err(_))), "no task is told");
        assert!(listener.poll_accept(&mut cx).is_pending(), "it does not go on");
    }
    assert!(matches!(listener.shared.turn(None), Turn::Lost));
    assert!(matches!(listener.poll_accept(&mut cx), Poll::Ready(Err(_))));
}
