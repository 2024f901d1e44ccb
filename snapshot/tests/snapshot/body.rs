//! Any bytes as frames, and an arbitrary publisher for a reader of this crate.
//!
//! It may be right for as long as the script wants, so that later mistakes reach a reader that
//! reads.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use rdma_backend::time::Instant;
use rdma_backend::{
    Access, Backend, CmEventKind, ConnectParams, Domain, EventChannel, Identifier, QueuePairLimits, Region,
};
use rdma_conn::{ConnectionId, Endpoint, Event, Limits, Options};
use rdma_snapshot::wire::{Challenge, End, Entry, Frame, MAGIC, Mapping, Mark, Refused, VERSION, Welcome};
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

/// They are a frame, which is encoded to the same bytes, or none.
fn frames(input: &[u8]) {
    let Ok(Some((frame, taken))) = Frame::decode(input) else { return };
    let again = encoded(&frame);
    assert_eq!((&again[..5], &again[8..]), (&input[..5], &input[8..taken]));
    assert_eq!(again[5..8], [0; 3], "reserved");
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
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
        while let Ok(Some((frame, length))) = Frame::decode(&self.inbox) {
            self.inbox.drain(..length);
            self.answer(&frame);
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
    fn answer(&mut self, frame: &Frame) {
        match frame {
            Frame::Hello(hello) => {
                let challenge = Challenge {
                    magic: MAGIC,
                    version: VERSION.into(),
                    data_port: self.listener.local_addr().expect("a port").port().into(),
                    reserved: [0; 4],
                    snapshot: [1; 16],
                    nonce: [2; 32],
                };
                let said = self.spoil(&Frame::Challenge(challenge), 0xe0);
                if let Ok(Some((Frame::Challenge(said), _))) = Frame::decode(&said) {
                    let parts = [&hello.nonce[..], &said.nonce, &said.snapshot, &said.data_port.to_bytes()];
                    self.nonces = parts.concat();
                }
            }
            Frame::Proof(proof) => {
                let code = self.code(b"R", &[&proof.address[..], &proof.port.to_bytes()].concat());
                assert_eq!(code, proof.code, "the reader's code");
                let welcome = Welcome {
                    code: self.code(b"P", &[]),
                    layout: self.layout,
                    content: 1,
                    reserved: [0; 2],
                    chunk_size: CHUNK.into(),
                    lease: 1000.into(),
                    total: 0.into(),
                    history: [0; 40],
                    offset: 0.into(),
                };
                self.spoil(&Frame::Welcome(welcome), 0xe0);
            }
            _ => {}
        }
    }

    fn code(&self, role: &[u8], address: &[u8]) -> [u8; 32] {
        let mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("a key");
        let mac = mac.chain_update(role).chain_update(&self.nonces).chain_update(address);
        mac.finalize().into_bytes().into()
    }

    /// Says a frame. One byte of its payload is changed if the script's next byte is as large as
    /// `from`. Returns its bytes.
    fn spoil(&mut self, frame: &Frame, from: u8) -> Vec<u8> {
        let mut bytes = encoded(frame);
        if from == 0 || self.script.byte() >= from {
            let at = usize::from(self.script.byte()) % (bytes.len() - 8);
            bytes[8 + at] ^= self.script.byte();
        }
        self.outbox.extend(&bytes);
        bytes
    }

    /// Returns the next entry, a correct one.
    fn entry(&mut self) -> Entry {
        let length = self.script.within(1..=256) * CHUNK / 256;
        let at = self.script.within(0..=255) * (MEMORY as u32 - CHUNK) / 256;
        let mut bytes = vec![0; length as usize];
        assert!(self.region.memory().read(at as usize, &mut bytes));
        let entry = Entry {
            index: (self.announced.len() as u64).into(),
            address: (self.region.address() + u64::from(at)).into(),
            rkey: self.region.rkey().into(),
            length: length.into(),
            reserved: [0; 8],
            digest: *blake3::hash(&bytes).as_bytes(),
        };
        self.announced.push((entry.digest, length));
        self.bytes += u64::from(length);
        entry
    }

    fn say(&mut self, step: u8) {
        let chunks = (self.announced.len() as u64).into();
        let said = match step % 12 {
            0 | 1 => {
                let count = step / 12 % 4 + 1;
                encoded(&Frame::Chunks((0..count).map(|_| self.entry()).collect()))
            }
            2 => {
                let entry = self.entry();
                let said = self.spoil(&Frame::Chunks(vec![entry]), 0);
                // The reader may rely on its present value.
                if let (Some(last), Ok(Some((Frame::Chunks(now), _)))) =
                    (self.announced.last_mut(), Frame::decode(&said))
                {
                    *last = (now[0].digest, now[0].length.get());
                }
                return;
            }
            3 => encoded(&Frame::Mark(Mark { chunks, bytes: self.bytes.into(), digest: [0; 32] })),
            4 => encoded(&Frame::End(End { chunks })),
            5 => {
                let (address, rkey) = (self.region.address().into(), self.region.rkey().into());
                let bytes = u64::from(self.script.within(1..=255) * 8).into();
                self.spoil(&Frame::Mapping(Mapping { address, rkey, areas: 1.into(), bytes }), 0);
                return;
            }
            6 => encoded(&Frame::Alive),
            7 => encoded(&Frame::Refused(Refused { reason: u32::from(self.script.byte()).into() })),
            8 => {
                let kind = self.script.byte() % 14;
                let length = self.script.within(0..=80);
                let payload: Vec<u8> = (0..length).map(|_| self.script.byte()).collect();
                [&length.to_be_bytes()[..], &[kind, 0, 0, 0], &payload].concat()
            }
            9 => {
                let length = self.script.within(0..=40);
                (0..length).map(|_| self.script.byte()).collect()
            }
            10 => {
                let at = usize::from(self.script.byte()) * MEMORY / 256;
                assert!(self.region.memory().write(at, &[self.script.byte()]));
                return;
            }
            _ if step > 0x80 => return self.pairs.clear(),
            _ => {
                if let Some(id) = self.talk.take() {
                    self.endpoint.abort(id);
                }
                return;
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
