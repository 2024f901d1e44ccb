//! Instructions of the paths that a user pays for, without the device; for `benches/instructions`.
//!
//! Both ends and the device run on one thread in virtual time: a read finds its bytes, and every
//! run gives the same count. callgrind collects the functions `measured_…`, one at a time.

use std::io::{IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_conn::{
    ConnectionId, Endpoint, Event, Limits as Share, Listener, Options, Received, Receiving, Stream,
};
use rdma_proto::wire::{FeatureSet, Message};
use rdma_proto::{Action, Config, Machine, RegionAddress};
use rdma_softsim::{DeviceKind, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};

const LEN: usize = 64;
/// The bytes of the first write of a side, which registers its send buffer.
const FIRST: usize = 4096;
/// Pieces of a vectored write, and completions in a batch.
const MANY: usize = 16;
/// Work requests in flight while a message is answered.
const BUSY: u16 = 512;
/// Connections of a server. One of them is in use.
const CROWD: usize = 2000;

const VALUE: usize = 32 << 20;

type Piece = [u8; LEN];

#[inline(never)]
fn measured_stream_write(stream: &mut Stream<SoftSim>, bytes: &Piece) {
    assert_eq!(stream.write(bytes).expect("written"), LEN);
}

#[inline(never)]
fn measured_stream_read(stream: &mut Stream<SoftSim>, bytes: &mut Piece) {
    assert_eq!(stream.read(bytes).expect("read"), LEN);
}

#[inline(never)]
fn measured_pieces_write(stream: &mut Stream<SoftSim>, pieces: &[IoSlice<'_>; MANY]) {
    assert_eq!(stream.write_vectored(pieces).expect("written"), MANY * LEN);
}

#[inline(never)]
fn measured_endpoint_write(endpoint: &mut Endpoint<SoftSim>, id: ConnectionId, bytes: &Piece) {
    assert_eq!(endpoint.write(id, &[IoSlice::new(bytes)]).expect("written"), Some(LEN));
}

#[inline(never)]
fn measured_endpoint_read(endpoint: &mut Endpoint<SoftSim>, bytes: &mut Piece) {
    endpoint.progress().expect("goes on");
    while let Some(event) = endpoint.next_event() {
        if let Event::Readable(id) = event {
            assert_eq!(endpoint.read(id, bytes).expect("read"), Some(LEN));
        }
    }
}

#[inline(never)]
fn measured_serve(server: &mut Endpoint<SoftSim>, bytes: &mut Piece) {
    server.progress().expect("goes on");
    while let Some(event) = server.next_event() {
        if let Event::Readable(id) = event {
            assert_eq!(server.read(id, bytes).expect("read"), Some(LEN));
            assert_eq!(server.write(id, &[IoSlice::new(bytes)]).expect("written"), Some(LEN));
        }
    }
}

/// Finds many notifications in one poll, and posts their receives again.
#[inline(never)]
fn measured_batch(endpoint: &mut Endpoint<SoftSim>) {
    endpoint.progress().expect("goes on");
}

/// Receives a long value, most of which lands in its final place. Returns true once all is there.
#[inline(never)]
fn measured_landing(
    endpoint: &mut Endpoint<SoftSim>,
    receiving: &mut (ConnectionId, Receiving<SoftSim>),
) -> bool {
    endpoint.progress().expect("goes on");
    while endpoint.next_event().is_some() {}
    endpoint.receive(receiving.0, &mut receiving.1).expect("goes on").is_some()
}

#[inline(never)]
fn measured_message(machine: &mut Machine, now: Instant, question: &[u8]) -> Option<Action> {
    machine.handle_message(now, question);
    machine.poll_action(|| now)
}

/// Advances time until everything that follows from the posted requests has happened.
fn settle(sim: &Simulation) {
    let until = sim.now().after(Duration::from_millis(1));
    while sim.deadline().is_some_and(|at| at <= until) {
        sim.step();
    }
}

fn streams(rounds: usize) {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&server, address).expect("a free address");
    let [mut one, mut other] = thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect(&client, address).expect("connects"));
        let accepted = scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accepts");
            stream.flush().expect("is established");
            stream
        });
        while !(dial.is_finished() && accepted.is_finished()) {
            settle(&sim);
            thread::yield_now();
        }
        [dial, accepted].map(|end| end.join().expect("does not panic"))
    });
    let (mut bytes, mut first) = ([0x5a; LEN], [0x5a; FIRST]);
    for stream in [&mut one, &mut other] {
        stream.write_all(&first).expect("written");
    }
    settle(&sim);
    for stream in [&mut one, &mut other] {
        stream.read_exact(&mut first).expect("read");
    }
    for _ in 0..rounds {
        for from_one in [true, false] {
            let (from, to) = if from_one { (&mut one, &mut other) } else { (&mut other, &mut one) };
            measured_stream_write(from, &bytes);
            settle(&sim);
            measured_stream_read(to, &mut bytes);
        }
    }
    let before = (one.counters(), one.work());
    let (mut all, piece) = ([0; MANY * LEN], bytes);
    for _ in 0..rounds {
        measured_pieces_write(&mut one, &[IoSlice::new(&piece); MANY]);
        settle(&sim);
        other.read_exact(&mut all).expect("read");
        assert!(all.chunks(LEN).all(|one| one == piece));
    }
    let (counters, work) = (one.counters(), one.work());
    let each = |before: u64, after: u64| (after - before) as f64 / rounds as f64;
    println!("doorbells of a write of {MANY} pieces {:.1}", each(before.1.doorbells, work.doorbells));
    println!("work requests of a write of {MANY} pieces {:.1}", each(before.1.requests, work.requests));
    println!(
        "notifications of a write of {MANY} pieces {:.1}",
        each(before.0.data_notifications_sent, counters.data_notifications_sent)
    );
    // No later event could deliver the last bytes.
    std::mem::forget((one, other));
}

fn endpoint(rounds: usize) {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut endpoint = Endpoint::new(&server, Share::default()).expect("an endpoint");
    endpoint.listen(address, Options::default()).expect("a free address");
    let mut opened = None;
    let mut stream = thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect(&client, address).expect("connects"));
        while !dial.is_finished() || opened.is_none() {
            endpoint.progress().expect("goes on");
            while let Some(event) = endpoint.next_event() {
                if let Event::Opened { id, .. } = event {
                    opened = Some(id);
                }
            }
            settle(&sim);
            thread::yield_now();
        }
        dial.join().expect("does not panic")
    });
    let id = opened.expect("a connection");
    let (mut bytes, mut first) = ([0x5a; LEN], [0x5a; FIRST]);
    assert_eq!(endpoint.write(id, &[IoSlice::new(&first)]).expect("written"), Some(FIRST));
    stream.write_all(&first).expect("written");
    settle(&sim);
    stream.read_exact(&mut first).expect("read");
    endpoint.progress().expect("goes on");
    while endpoint.next_event().is_some() {}
    assert_eq!(endpoint.read(id, &mut first).expect("read"), Some(FIRST));
    for _ in 0..rounds {
        measured_endpoint_write(&mut endpoint, id, &bytes);
        settle(&sim);
        stream.read_exact(&mut bytes).expect("read");
        stream.write_all(&bytes).expect("written");
        settle(&sim);
        measured_endpoint_read(&mut endpoint, &mut bytes);
    }
    let before = endpoint.connection(id).expect("a connection").work();
    for _ in 0..rounds {
        for _ in 0..MANY {
            stream.write_all(&bytes).expect("written");
        }
        settle(&sim);
        measured_batch(&mut endpoint);
        while let Some(event) = endpoint.next_event() {
            assert_eq!(event, Event::Readable(id));
        }
        let mut all = [0; MANY * LEN];
        assert_eq!(endpoint.read(id, &mut all).expect("read"), Some(MANY * LEN));
    }
    let work = endpoint.connection(id).expect("a connection").work();
    let doorbells = (work.receive_doorbells - before.receive_doorbells) as f64 / rounds as f64;
    println!("receive doorbells of {MANY} notifications {doorbells:.1}");
    std::mem::forget((stream, endpoint));
}

/// Values land. The first window of each was announced before the length was known. One for 250
/// rounds: callgrind also counts the device's copies.
fn landing(rounds: usize) {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [mut server, mut client] = [1, 2].map(|last| {
        let host = sim.host(&[[192, 0, 2, last].into()], Limits::default());
        Endpoint::new(&host, Share::default()).expect("an endpoint")
    });
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    server.listen(address, Options::default()).expect("a free address");
    let to = client.connect(address, None, Duration::from_secs(5), Options::default()).expect("begins");
    let mut from = None;
    while from.is_none() || !client.is_open(to) {
        settle(&sim);
        client.progress().expect("goes on");
        server.progress().expect("goes on");
        while let Some(event) = server.next_event() {
            if let Event::Opened { id, .. } = event {
                from = Some(id);
            }
        }
    }
    let from = from.expect("a connection");
    let memory = client.connection(to).expect("a connection").register_landing(VALUE).expect("memory");
    let (memory, bytes) = (Arc::new(memory), vec![0x5a; 1 << 20]);
    let mut received = Received::default();
    for _ in 0..rounds / 250 {
        let mut left = VALUE;
        let mut receiving = None;
        loop {
            let some = bytes.get(..left.min(bytes.len())).expect("as long");
            left -= server.write(from, &[IoSlice::new(some)]).expect("goes on").unwrap_or(0);
            settle(&sim);
            server.progress().expect("goes on");
            while server.next_event().is_some() {}
            let receiving = receiving.get_or_insert_with(|| {
                // Its first bytes have arrived.
                client.progress().expect("goes on");
                (to, Receiving::new(Arc::clone(&memory), 0..VALUE))
            });
            if measured_landing(&mut client, receiving) {
                received = receiving.1.received();
                break;
            }
        }
        assert_eq!(left, 0);
    }
    println!("percent landed of a value of 32 MiB {:.1}", 100.0 * received.landed as f64 / VALUE as f64);
    std::mem::forget((server, client));
}

fn message(rounds: usize) {
    let now = Instant::from_start(Duration::from_secs(1));
    let question = Message::GetServerFeature { select: 0, features: FeatureSet::NONE }.encode();
    let window =
        Message::RegisterXferMemory(rdma_proto::wire::Window { address: 0x1000, length: 1 << 20, rkey: 7 });
    for _ in 0..rounds {
        let config = Config::server().send_depth(2 * BUSY);
        let mut machine = Machine::new(config, [RegionAddress::default(); 2]).expect("usual settings");
        machine.handle_established(now, 7);
        machine.handle_message(now, &window.encode());
        for _ in 0..BUSY {
            while machine.poll_action(|| now).is_some() {}
            machine.commit(LEN).expect("room");
        }
        while machine.poll_action(|| now).is_some() {}
        assert!(matches!(measured_message(&mut machine, now, &question), Some(Action::Send { .. })));
    }
}

fn crowd(rounds: usize, connections: usize) {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let endpoint =
        |host| Endpoint::new(host, Share::default().connections(connections)).expect("an endpoint");
    let (mut server, mut client) = (endpoint(&server), endpoint(&client));
    // Idle connections cost by their number, so they may be small.
    let small = |mut options: Options| {
        options.protocol = options.protocol.window(4096).send_buffer(4096).send_depth(32);
        options.receives(32)
    };
    server.listen(address, small(Options::default())).expect("a free address");
    let limit = Duration::from_secs(60);
    let mut first = None;
    for _ in 0..connections {
        let id = client.connect(address, None, limit, small(Options::default())).expect("begins");
        let mut opened = 0;
        while opened < 2 {
            for endpoint in [&mut server, &mut client] {
                endpoint.progress().expect("goes on");
                while let Some(event) = endpoint.next_event() {
                    assert!(!matches!(event, Event::Ended(_)), "{:?}", endpoint.check(id));
                    opened += usize::from(matches!(event, Event::Opened { .. }));
                }
            }
            settle(&sim);
        }
        first.get_or_insert(id);
    }
    let id = first.expect("a connection");
    let mut bytes = [0x5a; LEN];
    for _ in 0..rounds {
        assert_eq!(client.write(id, &[IoSlice::new(&bytes)]).expect("written"), Some(LEN));
        settle(&sim);
        measured_serve(&mut server, &mut bytes);
        settle(&sim);
        measured_endpoint_read(&mut client, &mut bytes);
    }
    std::mem::forget((server, client));
}

/// Runs one part, whose function is measured, or all parts that print counts.
fn main() {
    let mut arguments = std::env::args().skip(1);
    let rounds = arguments.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(1000);
    match arguments.next().as_deref() {
        Some("alone") => crowd(rounds, 1),
        Some("crowd") => crowd(rounds, CROWD),
        Some("message") => message(rounds),
        Some("landing") => landing(rounds),
        Some("endpoint") => endpoint(rounds),
        Some("streams") => streams(rounds),
        _ => {
            streams(rounds);
            endpoint(rounds);
            landing(rounds);
        }
    }
}
