//! Any bytes as frames, and an arbitrary publisher for a reader of this crate.
//!
//! The publisher is written from `spec/snapshot.md` alone: its codes, frames and memory are its
//! own. It may be right for as long as the script wants, so that later mistakes reach a reader that
//! reads.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use rdma_backend::time::Instant;
use rdma_backend::{
    Access, Backend, CmEventKind, ConnectParams, Domain, EventChannel, Identifier, QueuePairLimits, Region,
};
use rdma_conn::{ConnectionId, Endpoint, Event, Limits, Options};
use rdma_snapshot::wire::Frame;
use rdma_snapshot::{Error, Have, Reader, Secret, reader};
use rdma_softsim::{DeviceKind, Limits as Device, Resources, Simulation, SimulationSettings, SoftSim};
use sha2::Sha256;

use crate::script::Script;

const SECRET: &[u8] = b"secret";
/// Bytes of the publisher's memory.
const MEMORY: usize = 1 << 14;
const CHUNK: u32 = 2048;
/// Chunks that the reader holds at a time.
const ROOM: usize = 4;

pub(crate) fn run(input: &[u8]) {
    frames(input);
    session(input);
}

/// Returns the frame by the specification: kind and length, or that it is invalid; `None` if more
/// bytes are needed.
fn expected(bytes: &[u8]) -> Option<Option<(u8, usize)>> {
    let header = bytes.get(..8)?;
    let length = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let kind = header[4];
    let possible = match kind {
        1 => length == 72,
        2 => length == 64,
        3 => length == 56,
        4 => length == 100,
        5 => length > 0 && length <= 32_768 && length.is_multiple_of(64),
        6 => length == 24,
        7 => length == 48,
        8 | 10 => length == 8,
        9 | 11 => length == 0,
        12 => length == 4,
        _ => false,
    };
    if !possible {
        return Some(None);
    }
    let payload = bytes.get(8..8 + length)?;
    let is_foreign = matches!(kind, 1 | 2) && !payload.starts_with(b"VRSNAP\r\n");
    Some((!is_foreign).then_some((kind, 8 + length)))
}

fn frames(input: &[u8]) {
    let decoded = Frame::decode(input);
    match expected(input) {
        None => assert_eq!(decoded, Ok(None)),
        Some(None) => assert!(decoded.is_err(), "{decoded:?}"),
        Some(Some((kind, taken))) => {
            let Ok(Some((frame, length))) = decoded else { panic!("kind {kind}: {decoded:?}") };
            assert_eq!(length, taken);
            let mut again = Vec::new();
            frame.encode(&mut again);
            assert_eq!(again[..5], input[..5]);
            assert_eq!(again[5..8], [0; 3], "reserved");
            assert_eq!(again[8..], input[8..taken]);
        }
    }
}

/// A frame of this kind.
fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short one");
    [&length.to_be_bytes()[..], &[kind, 0, 0, 0], payload].concat()
}

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host])
}

/// The publisher.
struct Liar<'a> {
    script: Script<'a>,
    endpoint: Endpoint<SoftSim>,
    talk: Option<ConnectionId>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    pairs: Vec<(<SoftSim as Backend>::QueuePair, <SoftSim as Backend>::Identifier)>,
    queue: <SoftSim as Backend>::CompletionQueue,
    region: <SoftSim as Backend>::Region,
    domain: <SoftSim as Backend>::Domain,
    listener: <SoftSim as Backend>::Identifier,
    events: <SoftSim as Backend>::EventChannel,
    layout: u8,
    /// The bytes that both codes cover.
    nonces: Vec<u8>,
    /// Digest and length of each entry that was announced in order.
    announced: Vec<([u8; 32], u32)>,
    bytes: u64,
    established: bool,
    over: bool,
}

impl<'a> Liar<'a> {
    fn new(mut script: Script<'a>, backend: &SoftSim) -> Self {
        let mut endpoint = Endpoint::new(backend, Limits::default()).expect("a device");
        endpoint.listen((address(1), 7000).into(), Options::default()).expect("a port");
        let events = backend.event_channel().expect("a channel");
        let listener = events.listen((address(1), 0).into(), 0).expect("a port");
        let domain = listener.create_domain().expect("a domain");
        let queue = listener.create_completion_queue(1, 0).expect("a queue");
        let region = domain.register(MEMORY, Access::REMOTE_READ).expect("memory");
        let pattern: Vec<u8> = (0..MEMORY).map(|at| (at * 7 + at / 251) as u8).collect();
        assert!(region.memory().write(0, &pattern));
        // As in the seed's table, with one area.
        assert!(region.memory().write(0, &(region.address() + 8).to_be_bytes()));
        let layout = script.byte() % 3;
        Self {
            script,
            endpoint,
            talk: None,
            inbox: Vec::new(),
            outbox: Vec::new(),
            pairs: Vec::new(),
            queue,
            region,
            domain,
            listener,
            events,
            layout,
            nonces: Vec::new(),
            announced: Vec::new(),
            bytes: 0,
            established: false,
            over: false,
        }
    }

    fn turn(&mut self) {
        self.endpoint.progress().expect("a device");
        while let Some(event) = self.endpoint.next_event() {
            if let Event::Opened { id, .. } = event {
                self.talk = Some(id);
            }
        }
        while let Some(event) = self.events.next_event().expect("events") {
            match event.kind {
                CmEventKind::ConnectRequest { id, peer } => self.accept(id, &peer),
                CmEventKind::Established { .. } => self.established = true,
                _ => {}
            }
        }
        let Some(id) = self.talk else { return };
        let mut bytes = [0; 512];
        while let Ok(Some(count @ 1..)) = self.endpoint.read(id, &mut bytes) {
            self.inbox.extend_from_slice(&bytes[..count]);
        }
        while let Some(Some((kind, length))) = expected(&self.inbox) {
            let payload: Vec<u8> = self.inbox.drain(..length).skip(8).collect();
            self.answer(kind, &payload);
        }
        if self.established && self.outbox.is_empty() && !self.over {
            match self.script.step() {
                Some(step) => self.say(step),
                None => self.over = true,
            }
        }
        if let Ok(Some(count)) = self.endpoint.write(id, &[std::io::IoSlice::new(&self.outbox)]) {
            self.outbox.drain(..count);
        }
    }

    fn accept(&mut self, id: <SoftSim as Backend>::Identifier, asked: &ConnectParams) {
        let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
        let pair = id.create_queue_pair(&self.domain, &self.queue, limits).expect("a queue pair");
        let params = ConnectParams {
            responder_resources: asked.initiator_depth.max(asked.responder_resources),
            initiator_depth: 0,
            retry_count: 0,
            rnr_retry_count: 0,
        };
        id.accept(&params, &[]).expect("accepted");
        self.pairs.push((pair, id));
    }

    /// Answers in the handshake, correctly unless the script wants otherwise.
    fn answer(&mut self, kind: u8, payload: &[u8]) {
        match kind {
            1 => {
                let port = self.listener.local_addr().expect("a port").port();
                let challenge =
                    [b"VRSNAP\r\n", &[0, 2][..], &port.to_be_bytes(), &[0; 4], &[1; 16], &[2; 32]].concat();
                let challenge = self.spoilt(challenge);
                self.nonces =
                    [&payload[40..72], &challenge[32..64], &challenge[16..32], &challenge[10..12]].concat();
                self.outbox.extend(frame(2, &challenge));
            }
            3 => {
                let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("a key");
                mac.update(b"R");
                mac.update(&self.nonces);
                mac.update(&payload[..18]);
                assert_eq!(mac.finalize().into_bytes()[..], payload[24..56], "the reader's code");
                let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("a key");
                mac.update(b"P");
                mac.update(&self.nonces);
                let code = mac.finalize().into_bytes();
                let size = CHUNK.to_be_bytes();
                let lease = 1000_u32.to_be_bytes();
                let welcome =
                    [&code[..], &[self.layout, 1, 0, 0], &size, &lease, &[0; 8], &[0; 40], &[0; 8]].concat();
                let welcome = self.spoilt(welcome);
                self.outbox.extend(frame(4, &welcome));
            }
            _ => {}
        }
    }

    /// Returns the payload, with one byte changed if the script wants that: one time in eight.
    fn spoilt(&mut self, mut payload: Vec<u8>) -> Vec<u8> {
        let how = self.script.byte();
        if how >= 0xe0 {
            let at = usize::from(self.script.byte()) % payload.len();
            payload[at] ^= self.script.byte();
        }
        payload
    }

    /// Returns the next entry, a correct one.
    fn entry(&mut self) -> Vec<u8> {
        let length = self.script.within(1..=256) * CHUNK / 256;
        let at = self.script.within(0..=255) * (MEMORY as u32 - CHUNK) / 256;
        let mut bytes = vec![0; length as usize];
        assert!(self.region.memory().read(at as usize, &mut bytes));
        let digest = *blake3::hash(&bytes).as_bytes();
        let address = self.region.address() + u64::from(at);
        let index = self.announced.len() as u64;
        self.announced.push((digest, length));
        self.bytes += u64::from(length);
        let numbers = [self.region.rkey(), length, 0, 0].map(u32::to_be_bytes).concat();
        [&index.to_be_bytes()[..], &address.to_be_bytes(), &numbers, &digest].concat()
    }

    fn say(&mut self, step: u8) {
        let chunks = (self.announced.len() as u64).to_be_bytes();
        let said = match step % 12 {
            0 | 1 => {
                let count = step / 12 % 4 + 1;
                let entries: Vec<u8> = (0..count).flat_map(|_| self.entry()).collect();
                frame(5, &entries)
            }
            2 => {
                let entry = self.entry();
                let at = usize::from(self.script.byte()) % entry.len();
                let mut entry = entry;
                entry[at] ^= self.script.byte();
                // The reader may rely on its present value.
                let number =
                    |at: usize| u32::from_be_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
                if let Some(last) = self.announced.last_mut() {
                    last.0.copy_from_slice(&entry[32..]);
                    last.1 = number(20);
                }
                frame(5, &entry)
            }
            3 => frame(7, &[&chunks[..], &self.bytes.to_be_bytes(), &[0; 32]].concat()),
            4 => frame(8, &chunks),
            5 => {
                let numbers = [self.region.rkey(), 1].map(u32::to_be_bytes).concat();
                let bytes = u64::from(self.script.within(1..=255) * 8);
                let mut mapping =
                    [&self.region.address().to_be_bytes()[..], &numbers, &bytes.to_be_bytes()].concat();
                let at = usize::from(self.script.byte()) % mapping.len();
                mapping[at] ^= self.script.byte();
                frame(6, &mapping)
            }
            6 => frame(9, &[]),
            7 => frame(12, &[0, 0, 0, self.script.byte()]),
            8 => {
                let kind = self.script.byte() % 14;
                let length = self.script.within(0..=80);
                let payload: Vec<u8> = (0..length).map(|_| self.script.byte()).collect();
                frame(kind, &payload)
            }
            9 => {
                let length = self.script.within(0..=40);
                (0..length).map(|_| self.script.byte()).collect()
            }
            10 => {
                let at = usize::from(self.script.byte()) * MEMORY / 256;
                assert!(self.region.memory().write(at, &[self.script.byte()]));
                Vec::new()
            }
            _ if step > 0x80 => {
                self.pairs.clear();
                Vec::new()
            }
            _ => {
                if let Some(id) = self.talk.take() {
                    self.endpoint.abort(id);
                }
                Vec::new()
            }
        };
        self.outbox.extend(said);
    }
}

fn session(input: &[u8]) {
    let mut script = Script::new(input);
    let personality = DeviceKind::ALL[usize::from(script.byte()) % 4];
    let sim = Simulation::new(input.len() as u64, personality, SimulationSettings::default(), Vec::new());
    let [ours, theirs] = [1, 2].map(|host| sim.host(&[address(host)], Device::default()));
    let mut liar = Liar::new(script, &ours);
    let limits = reader::Limits { chunk: CHUNK, bytes: 1 << 20, chunks: 200, areas: 1 };
    let config =
        reader::Config { secret: Secret::new(SECRET), limits, depth: 3, ..reader::Config::default() };
    let to = SocketAddr::new(address(1), 7000);
    let mut pulling = Reader::connect(&theirs, to, config, Have::default(), None).expect("a device");
    let mut taken = Have::default();
    let ended = loop {
        liar.turn();
        let worked = pulling.progress(ROOM);
        while let Some(landed) = pulling.poll() {
            assert_eq!(landed.chunk.index, taken.chunks, "chunks come in order");
            assert!(landed.bytes.len() == landed.chunk.length as usize && landed.chunk.length <= CHUNK);
            if liar.layout == 1 {
                let (digest, length) = liar.announced[landed.chunk.index as usize];
                assert_eq!(
                    (*blake3::hash(&landed.bytes).as_bytes(), landed.chunk.length),
                    (digest, length),
                    "a wrong chunk"
                );
            }
            taken.chunks += 1;
            taken.bytes += u64::from(landed.chunk.length);
            pulling.recycle(landed.region);
        }
        assert!(taken.bytes <= limits.bytes && taken.chunks <= limits.chunks);
        assert!(pulling.counters().most_in_flight <= 3);
        // Two windows and a send buffer of 64 KiB, the addresses of one area, and memory for
        // chunks.
        let held = sim.fabric().resources(address(2)).registered_bytes;
        assert!(held <= (3 << 16) + 8 + ROOM as u64 * u64::from(CHUNK), "{held} bytes registered");
        match worked {
            Err(error) => break Some(error),
            Ok(()) if pulling.is_done() => break None,
            Ok(()) => {}
        }
        let next = [Some(pulling.next_timeout()), liar.endpoint.next_timeout()].into_iter().flatten().min();
        step(&sim, next);
    };
    if let Some(error) = &ended {
        assert!(!error.to_string().is_empty());
        assert!(!matches!(error, Error::Backend { .. } | Error::Device(_)), "blames the machine: {error:?}");
    } else {
        assert_eq!(pulling.have().bytes, taken.bytes);
    }
    drop((pulling, liar));
    sim.advance(sim.now().after(Duration::from_secs(600)));
    for host in [1, 2] {
        assert_eq!(sim.fabric().resources(address(host)), Resources::default());
    }
}

/// Lets time pass until the next event, or until `at`.
fn step(sim: &Simulation, at: Option<Instant>) {
    if sim.has_woken() {
        return;
    }
    match (sim.deadline(), at) {
        (Some(event), Some(at)) if at < event => sim.advance(at),
        (Some(_), _) => assert!(sim.step()),
        (None, Some(at)) => sim.advance(at),
        (None, None) => panic!("everybody waits for ever"),
    }
    assert!(sim.now().since_start() < Duration::from_secs(600), "a session without end");
    assert!(sim.events() < 1_000_000, "a session without end");
}
