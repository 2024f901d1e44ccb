//! A peer of raw verbs, against a client or a server of ours. The fuzzer's input is its program.
//!
//! The test checks: no panic; our side keeps every rule (the simulator's oracles); an error stays
//! the same, and is never an internal one; no program spins; everything ends and leaves nothing
//! behind; and another client of the same server gets every byte.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_conn::{Connection, ConnectionId, Endpoint, Error, Options};
use rdma_proto::{Keepalive, State};
use rdma_softsim::{DeviceKind, Limits, Random, Resources, Simulation, SimulationSettings, SoftSim};
use trust::sim::app::{App, AppEnd, EndCause, Stream, Workload};
use trust::sim::end::{Acceptor, End, is_readable};
use trust::sim::event_loop::{EventLoop, Usage};
use trust::sim::oracle::Oracle;

use crate::peer::Peer;
use crate::script::Script;

const VICTIM: u8 = 0;
pub(crate) const HOSTILE: u8 = 1;
const BYSTANDER: u8 = 2;
const PORT: u16 = 6379;
const USAGE: Usage = Usage { edges: false, abandons: false, limits: rdma_conn::Limits::NONE };
/// After so many turns without an event of the fabric, a program spins.
const MOST_TURNS: u32 = 100;
/// So many events after the peer has fallen silent, everything should have ended.
const MOST_EVENTS: u32 = 100_000;

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host + 1])
}

pub(crate) fn run(input: &[u8]) {
    let mut script = Script::new(input);
    let mut world = World::new(&mut script);
    world.settle();
    while let Some(step) = script.step() {
        world.step(step, &mut script);
        world.settle();
    }
    world.finish();
}

struct World {
    sim: Simulation,
    oracle: Oracle,
    random: Random,
    victim: Option<(Endpoint<SoftSim>, ConnectionId)>,
    acceptor: Option<Acceptor>,
    peer: Peer,
    /// The client of the same server that does nothing wrong, and its server's side.
    bystander: Option<(Workloads, EventLoop, Option<EventLoop>)>,
    /// Bytes that our application has written and read.
    wrote: u64,
    read: u64,
    pair: Option<u32>,
    /// The error that has ended our connection.
    failed: Option<String>,
}

struct Workloads {
    client: Workload,
    server: Workload,
}

fn options(script: &mut Script<'_>, usual: Options) -> Options {
    let interval = |script: &mut Script<'_>| {
        let millis = script.byte();
        (millis > 127).then(|| Duration::from_millis(millis.into()))
    };
    let mut options = usual;
    let protocol = &mut options.protocol;
    protocol.window = script.within(1..=128);
    protocol.windows = script.within(1..=2) as u8;
    protocol.send_buffer = script.within(1..=128);
    protocol.send_depth = script.within(1..=16) as u16;
    protocol.peer_receives = script.within(2..=16) as u16;
    protocol.window_limit = 4096;
    protocol.negotiate = script.flag();
    let keepalive = Keepalive::NONE.every(interval(script)).probe(interval(script)).limit(interval(script));
    protocol.keepalive = Some(keepalive);
    protocol.stall_limit = interval(script);
    options.receives = script.within(1..=16) as u16;
    options.inline = script.within(0..=64);
    options.handshake_timeout = Duration::from_millis(500);
    options.keep_memory = Duration::from_millis(script.byte().max(1).into());
    options
}

impl World {
    fn new(script: &mut Script<'_>) -> Self {
        let device_kind = DeviceKind::ALL[usize::from(script.byte()) % DeviceKind::ALL.len()];
        let seed = script.byte().into();
        let sim = Simulation::new(seed, device_kind, SimulationSettings::default(), Vec::new());
        let ours = sim.host(&[address(VICTIM)], Limits::default());
        let theirs = sim.host(&[address(HOSTILE)], Limits::default());
        let serves = script.flag();
        let mut options = options(script, Options::default());
        let accompanied = serves && script.flag();
        if accompanied {
            // A slow bystander does nothing wrong.
            options.protocol.keepalive = Some(Keepalive::NONE);
            options.protocol.stall_limit = None;
        }
        let target = SocketAddr::new(address(if serves { VICTIM } else { HOSTILE }), PORT);
        let mut random = Random::new(seed);
        let (victim, acceptor, peer, bystander) = if serves {
            let acceptor = Acceptor::open(&ours, target, options).expect("nothing is in its way");
            let bystander = accompanied.then(|| {
                let host = sim.host(&[address(BYSTANDER)], Limits::default());
                bystander(&host, target, &options, sim.now(), &mut random)
            });
            (None, Some(acceptor), Peer::dial(&theirs, target, script), bystander)
        } else {
            let peer = Peer::listen(&theirs, target, script);
            let mut endpoint = Endpoint::new(&ours, rdma_conn::Limits::NONE).expect("nothing is in its way");
            let id = endpoint.connect(target, None, Duration::from_secs(1), options);
            (Some((endpoint, id.expect("nothing is in its way"))), None, peer, None)
        };
        let (oracle, pair) = (Oracle::default(), None);
        Self { sim, oracle, random, victim, acceptor, peer, bystander, wrote: 0, read: 0, pair, failed: None }
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) {
        match step % 16 {
            0 | 1 => self.write(script.byte().into()),
            2 | 3 => self.consume(script.byte().into()),
            4 => {
                let linger = Duration::from_millis(script.byte().into());
                // Rare, because little follows it.
                if let (0..32, Some((endpoint, id))) = (script.byte(), self.open()) {
                    endpoint.close(id, linger).expect("it is there");
                }
            }
            5 | 6 => {
                for _ in 0..=script.byte() {
                    if !self.sim.step() {
                        break;
                    }
                    self.settle();
                }
            }
            7 => self.advance(Duration::from_millis(script.byte().into())),
            other => self.peer.step(other, script),
        }
    }

    fn open(&mut self) -> Option<(&mut Endpoint<SoftSim>, ConnectionId)> {
        let (endpoint, id) = self.victim.as_mut()?;
        endpoint.is_open(*id).then_some((endpoint, *id))
    }

    fn write(&mut self, count: usize) {
        let Some((endpoint, id)) = self.open() else { return };
        let bytes = vec![0x5a; count];
        if let Ok(Some(taken)) = endpoint.write(id, &[IoSlice::new(&bytes)]) {
            assert!(taken <= count);
            self.wrote += taken as u64;
        }
    }

    fn consume(&mut self, count: usize) {
        let Some((endpoint, id)) = self.open() else { return };
        let mut bytes = vec![0; count.max(1)];
        if let Ok(Some(taken)) = endpoint.read(id, &mut bytes) {
            self.read += taken as u64;
        }
    }

    fn advance(&mut self, by: Duration) {
        let until = self.sim.now().after(by);
        while let Some(next) = self.next().filter(|next| *next <= until) {
            self.sim.advance(next.max(self.sim.now()));
            self.settle();
        }
        self.sim.advance(until);
    }

    fn next(&self) -> Option<Instant> {
        let victim = self.victim.as_ref().and_then(|(endpoint, _)| endpoint.next_timeout());
        let event_loops =
            self.bystander.iter().flat_map(|(_, client, server)| [Some(client), server.as_ref()]);
        let event_loops = event_loops.flatten().filter_map(EventLoop::next_wake);
        victim.into_iter().chain(event_loops).chain(self.sim.deadline()).min()
    }

    /// Gives every program with a ready descriptor or timer a turn, until none is ready.
    fn settle(&mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < MOST_TURNS, "somebody spins: {:?}", self.link());
        }
        self.look();
    }

    fn link(&self) -> Option<&Connection<SoftSim>> {
        let (endpoint, id) = self.victim.as_ref()?;
        endpoint.connection(*id)
    }

    fn turn(&mut self) -> bool {
        self.peer.run();
        self.accept() | self.drive() | self.serve_bystander()
    }

    fn accept(&mut self) -> bool {
        let woken = self.acceptor.as_ref().is_some_and(Acceptor::is_readable);
        while let Some((endpoint, id)) = self.acceptor.as_mut().filter(|_| woken).and_then(Acceptor::accept) {
            let peer = endpoint.peer_addr(id).map(|peer| peer.ip());
            if let Some((Workloads { client, server }, _, accepted)) =
                self.bystander.as_mut().filter(|_| peer != Some(address(HOSTILE)))
            {
                let app =
                    App::new(*server, Stream(2), Stream(1), client.bytes, self.sim.now(), self.random.next());
                let event_loop = EventLoop::accepted((endpoint, id), VICTIM.into(), USAGE, 0, app);
                *accepted = Some(event_loop.expect("it can be watched"));
            } else {
                self.victim = Some((endpoint, id));
                self.take_turn();
            }
        }
        woken
    }

    fn drive(&mut self) -> bool {
        let now = self.sim.now();
        let wanted = self.victim.as_ref().is_some_and(|(endpoint, _)| {
            is_readable(endpoint) || endpoint.next_timeout().is_some_and(|at| at <= now)
        });
        if wanted {
            self.take_turn();
        }
        wanted
    }

    fn take_turn(&mut self) {
        let Some((endpoint, id)) = &mut self.victim else { return };
        endpoint.progress().expect("nothing befell the endpoint");
        while endpoint.next_event().is_some() {}
        // Before it is established it has no queue pair number that the program could know.
        if self.acceptor.is_some() || endpoint.is_open(*id) {
            self.pair = endpoint.connection(*id).map(Connection::queue_pair_number).or(self.pair);
        }
        let now = endpoint.check(*id).err();
        if let Some(error) = &now {
            assert_reasonable(error);
        }
        let now = now.map(|error| error.to_string());
        if let Some(before) = self.failed.take() {
            let now = now.as_ref().expect("an error is for good");
            // A flush may hide a cause that shows later.
            assert!(before == *now || before.contains("WR_FLUSH_ERR"), "{before}, then {now}");
        }
        self.failed = now;
    }

    fn serve_bystander(&mut self) -> bool {
        let now = self.sim.now();
        let Some((_, client, server)) = &mut self.bystander else { return false };
        let mut any = false;
        for event_loop in [Some(client), server.as_mut()].into_iter().flatten() {
            if event_loop.is_readable() || event_loop.next_wake().is_some_and(|at| at <= now) {
                let no_request = |_: &mut Random, _| unreachable!("it does not listen");
                event_loop.run(&mut self.random, no_request).expect("nothing befell the endpoint");
                any = true;
            }
        }
        any
    }

    fn look(&mut self) {
        if let Some(pair) = self.pair {
            self.oracle.has_read(pair, self.read);
            if self.link().is_some_and(|link| link.check().is_err()) {
                self.oracle.has_failed(pair);
            }
        }
        if let Some((_, client, server)) = &self.bystander {
            for end in [Some(client), server.as_ref()].into_iter().flatten().flat_map(EventLoop::ends) {
                assert_eq!(end.app().wrong_byte(), None, "the bystander's bytes");
                if let Some(pair) = end.pair() {
                    self.oracle.has_read(pair, end.app().bytes_read());
                }
            }
        }
        for entry in self.sim.take_trace() {
            let verdict = self.oracle.look(&entry, |host| host != u32::from(HOSTILE));
            assert_eq!(verdict, Ok(()), "{entry:?}");
        }
    }

    /// Our application ends the connection. Whatever the peer does, it ends in bounded time.
    fn finish(&mut self) {
        let mut events = 0;
        loop {
            if self.link().is_some_and(|connection| connection.state() == State::Open)
                && let Some((endpoint, id)) = &mut self.victim
            {
                endpoint.close(*id, Duration::from_secs(1)).expect("it is there");
                self.settle();
            }
            if self.is_over() {
                break;
            }
            let next = self.next().unwrap_or_else(|| panic!("all sleep for ever: {:?}", self.link()));
            self.sim.advance(next.max(self.sim.now()));
            self.settle();
            events += 1;
            assert!(events < MOST_EVENTS, "nothing comes to an end: {:?}", self.link());
        }
        if let Some((Workloads { client, server }, one, other)) = &self.bystander {
            for (event_loop, bytes) in [(Some(one), server.bytes), (other.as_ref(), client.bytes)] {
                let end = event_loop.and_then(|event_loop| event_loop.ends().first());
                let ending = end.and_then(End::ending).expect("both sides have ended");
                assert!(matches!(ending.cause, EndCause::Own | EndCause::Eof), "the bystander's: {ending:?}");
                assert_eq!(ending.read, bytes, "the bystander's bytes");
            }
        }
        self.clear_up();
    }

    fn is_over(&self) -> bool {
        // `None`: a peer that never asked to connect.
        let victim = self.victim.as_ref().is_none_or(|(endpoint, id)| match endpoint.connection(*id) {
            Some(connection) => matches!(connection.state(), State::Closed | State::Failed(_)),
            None => endpoint.check(*id).is_err(),
        });
        let bystander = self.bystander.as_ref().is_none_or(|(_, client, server)| {
            client.is_over() && server.as_ref().is_some_and(EventLoop::is_over)
        });
        victim && bystander
    }

    fn clear_up(&mut self) {
        self.victim = None;
        self.bystander = None;
        self.acceptor = None;
        self.look();
        self.peer.leave();
        for _ in 0..1000 {
            if !self.sim.step() {
                break;
            }
        }
        for host in [VICTIM, BYSTANDER] {
            assert_eq!(self.sim.fabric().resources(address(host)), Resources::default(), "host {host}");
        }
    }
}

/// A peer never proves that our side is wrong.
fn assert_reasonable(error: &Error) {
    let ours = matches!(error, Error::Protocol(rdma_proto::Error::Bug(_) | rdma_proto::Error::ApiMisuse(_)));
    assert!(!ours, "{error}");
}

fn bystander(
    backend: &SoftSim,
    target: SocketAddr,
    server: &Options,
    now: Instant,
    random: &mut Random,
) -> (Workloads, EventLoop, Option<EventLoop>) {
    let options = Options::default().protocol(server.protocol);
    let mut client = Workload::draw(random, &options.protocol, &server.protocol);
    let server = Workload::draw(random, &server.protocol, &options.protocol);
    client.end = AppEnd::Close { reads_first: true };
    let app = App::new(client, Stream(1), Stream(2), server.bytes, now, random.next());
    let mut event_loop = EventLoop::new(backend, BYSTANDER.into(), USAGE).expect("nothing is in its way");
    event_loop.dial(target, options, now, 0, app);
    (Workloads { client, server }, event_loop, None)
}
