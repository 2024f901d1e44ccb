//! The peer of `hostile`: a queue pair, some memory, and a program that does anything with them.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_proto::backend::{
    Access, Backend, CmEventKind, Completed, Completion, CompletionQueue as _, ConnectParams, Domain as _,
    EventChannel as _, Identifier as _, Immediate, QueuePair as _, QueuePairLimits, RecvRequest, Region as _,
    RemoteAddress, SendOp, SendRequest, Slice,
};
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_softsim::{CompletionQueue, Domain, EventChannel, Identifier, QueuePair, Region, SoftSim};

use crate::script::Script;

/// Its receives, each of [`SLOT`] bytes, and where it puts what it sends.
const RECEIVES: u64 = 32;
const SLOT: usize = 64;
const OUT: usize = SLOT * RECEIVES as usize;
const MEMORY: usize = OUT + 4096;
const WINDOW: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(4);

pub(crate) struct Peer {
    stage: Stage,
    params: ConnectParams,
    /// How it answers who wants to connect: accepts, refuses, or lets them wait.
    welcome: u8,
    /// Receives it posts before it connects.
    receives: u64,
}

enum Stage {
    Listening { _id: Identifier, events: EventChannel },
    Resolving { id: Identifier, events: EventChannel },
    Undecided { _id: Identifier, _events: EventChannel },
    Connected(Box<Ends>),
    Gone,
}

/// In the order in which they go.
struct Ends {
    pair: Option<QueuePair>,
    completions: CompletionQueue,
    memory: Region,
    window: Option<Region>,
    id: Identifier,
    events: EventChannel,
    domain: Domain,
    /// The victim's windows: the last one, and how far it is filled.
    target: Option<Window>,
    used: u32,
    posts: u64,
    /// Receives that were consumed.
    consumed: Vec<u64>,
}

impl Peer {
    pub(crate) fn dial(backend: &SoftSim, target: SocketAddr, script: &mut Script<'_>) -> Self {
        let events = backend.event_channel().expect("a host has channels");
        let id = events.create_id().expect("and identifiers");
        id.resolve_address(None, target, PATIENCE).expect("resolving begins");
        Self::new(Stage::Resolving { id, events }, script)
    }

    pub(crate) fn listen(backend: &SoftSim, address: SocketAddr, script: &mut Script<'_>) -> Self {
        let events = backend.event_channel().expect("a host has channels");
        let id = events.listen(address, 0).expect("nobody else listens there");
        Self::new(Stage::Listening { _id: id, events }, script)
    }

    fn new(stage: Stage, script: &mut Script<'_>) -> Self {
        let params = ConnectParams {
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: script.byte() % 8,
            rnr_retry_count: script.byte() % 8,
        };
        Self { stage, params, welcome: script.byte(), receives: u64::from(script.byte()) % (RECEIVES + 1) }
    }

    /// Connects, as far as it wants to. Whatever fails is its end.
    pub(crate) fn run(&mut self) {
        let stage = std::mem::replace(&mut self.stage, Stage::Gone);
        if let Some(stage) = self.advance(stage) {
            self.stage = stage;
        }
    }

    fn advance(&self, mut stage: Stage) -> Option<Stage> {
        loop {
            stage = match stage {
                Stage::Listening { _id, events } => match events.next_event().ok()?.map(|event| event.kind) {
                    Some(CmEventKind::ConnectRequest { id, .. }) => match self.welcome {
                        0..16 => return None,
                        16..24 => return Some(Stage::Undecided { _id: id, _events: events }),
                        _ => {
                            let ends = Ends::new(id, events, self.receives)?;
                            ends.id.accept(&self.params, &[]).ok()?;
                            Stage::Connected(Box::new(ends))
                        }
                    },
                    Some(_) => Stage::Listening { _id, events },
                    None => return Some(Stage::Listening { _id, events }),
                },
                Stage::Resolving { id, events } => match events.next_event().ok()?.map(|event| event.kind) {
                    Some(CmEventKind::AddressResolved) => {
                        id.resolve_route(PATIENCE).ok()?;
                        Stage::Resolving { id, events }
                    }
                    Some(CmEventKind::RouteResolved) => {
                        let ends = Ends::new(id, events, self.receives)?;
                        ends.id.connect(&self.params, &[]).ok()?;
                        Stage::Connected(Box::new(ends))
                    }
                    Some(_) => return None,
                    None => return Some(Stage::Resolving { id, events }),
                },
                Stage::Connected(mut ends) => {
                    ends.hear();
                    return Some(Stage::Connected(ends));
                }
                Stage::Undecided { .. } | Stage::Gone => return Some(stage),
            }
        }
    }

    /// One step of its program.
    pub(crate) fn step(&mut self, step: u8, script: &mut Script<'_>) {
        if let Stage::Connected(ends) = &mut self.stage {
            // What the device refuses was worth a try.
            let _refused = ends.step(step, script);
        }
        if step == 15 && script.byte() < 16 {
            self.leave();
        }
    }

    pub(crate) fn leave(&mut self) {
        self.stage = Stage::Gone;
    }
}

impl Ends {
    fn new(id: Identifier, events: EventChannel, receives: u64) -> Option<Self> {
        let domain = id.create_domain().ok()?;
        let memory = domain.register(MEMORY, Access::LOCAL_WRITE).ok()?;
        let window = domain.register(WINDOW, Access::REMOTE_WRITE).ok();
        let completions = id.create_completion_queue(1024, 0).ok()?;
        let limits = QueuePairLimits { send_depth: 256, recv_depth: RECEIVES as u32, inline: 0 };
        let pair = id.create_queue_pair(&domain, &completions, limits).ok();
        let consumed = (0..RECEIVES).rev().collect();
        let mut this = Self {
            pair,
            completions,
            memory,
            window,
            id,
            events,
            domain,
            target: None,
            used: 0,
            posts: 0,
            consumed,
        };
        for _ in 0..receives {
            this.receive();
        }
        Some(this)
    }

    /// Takes its events and completions. It always looks, and need not act on what it sees.
    fn hear(&mut self) {
        while let Ok(Some(_)) = self.events.next_event() {}
        let mut batch = [Completion::EMPTY; 16];
        while let Ok(count @ 1..) = self.completions.poll(&mut batch) {
            for completion in &batch[..count] {
                match completion.result {
                    Ok(Completed::Recv { len, .. }) => {
                        self.consumed.push(completion.id);
                        if len == 32 {
                            self.read(completion.id);
                        }
                    }
                    Ok(Completed::RecvWrite { .. }) => self.consumed.push(completion.id),
                    Ok(Completed::Read) => panic!("a peer could read our window"),
                    _ => {}
                }
            }
        }
    }

    fn read(&mut self, slot: u64) {
        let mut bytes = [0; 32];
        if self.memory.memory().read(slot as usize * SLOT, &mut bytes)
            && let Ok(Message::RegisterXferMemory(window)) = Message::decode(&bytes)
        {
            self.target = Some(window);
            self.used = 0;
        }
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) -> Option<()> {
        match step {
            8 => {
                let message = self.message(script)?;
                self.send(&message)
            }
            // As it should be: what follows what was written, and its length.
            9 | 10 => {
                let target = self.target?;
                let count = u32::from(script.byte()).min(target.length - self.used);
                let at = RemoteAddress { address: target.address + u64::from(self.used), rkey: target.rkey };
                let op = if script.flag() {
                    SendOp::WriteImmediate(at, Immediate(count))
                } else {
                    SendOp::Write(at)
                };
                self.used += count;
                self.post(op, OUT, count as usize)
            }
            // As it should not be.
            11 => {
                let target = self.target?;
                let address = target.address.wrapping_add(u64::from(script.byte()) * 4);
                let at = RemoteAddress { address, rkey: target.rkey ^ u32::from(script.byte() / 200) };
                let immediate = if script.flag() { script.byte().into() } else { script.number() };
                let op = match script.byte() % 4 {
                    0 => SendOp::Write(at),
                    1 => SendOp::Read(at),
                    2 => SendOp::SendImmediate(Immediate(immediate)),
                    _ => SendOp::WriteImmediate(at, Immediate(immediate)),
                };
                let count = usize::from(script.byte());
                // A READ of no bytes is not checked by any device, and reads nothing.
                let least = usize::from(matches!(op, SendOp::Read(_)));
                self.post(op, OUT, count.max(least))
            }
            12 | 13 => {
                for _ in 0..script.byte() % 8 {
                    self.receive();
                }
                Some(())
            }
            14 => {
                self.window = match script.byte() {
                    0..64 => None,
                    _ => self.domain.register(WINDOW, Access::REMOTE_WRITE).ok(),
                };
                Some(())
            }
            _ => {
                match script.byte() {
                    0..16 => drop(self.id.disconnect()),
                    16..24 => self.pair = None,
                    _ => {}
                }
                Some(())
            }
        }
    }

    fn message(&self, script: &mut Script<'_>) -> Option<Vec<u8>> {
        let window = |script: &mut Script<'_>| {
            let region = self.window.as_ref()?;
            let length = 1 + u32::from(script.byte()) * 4;
            Some(Window { address: region.address(), length, rkey: region.rkey() })
        };
        let message = match script.byte() % 12 {
            0 => Message::Keepalive,
            1 => Message::GetServerFeature {
                select: script.byte().into(),
                features: FeatureSet(script.byte().into()),
            },
            2 => Message::SetClientFeature {
                select: script.byte().into(),
                features: FeatureSet(script.byte().into()),
            },
            3..8 => Message::RegisterXferMemory(window(script)?),
            8 => {
                let window = window(script)?;
                Message::RegisterXferMemory(Window { rkey: window.rkey ^ u32::from(script.byte()), ..window })
            }
            9 => Message::RegisterXferMemory(Window {
                address: u64::from_be_bytes(script.bytes()),
                length: script.number(),
                rkey: script.number(),
            }),
            10 => {
                let mut bytes = Message::Keepalive.encode().to_vec();
                bytes[usize::from(script.byte()) % 32] ^= script.byte();
                return Some(bytes);
            }
            _ => return Some(vec![script.byte(); usize::from(script.byte()) % 41]),
        };
        Some(message.encode().to_vec())
    }

    fn send(&mut self, message: &[u8]) -> Option<()> {
        let offset = OUT + (self.posts as usize % 32) * SLOT;
        self.memory.memory().write(offset, message).then_some(())?;
        self.post(SendOp::Send, offset, message.len())
    }

    fn post(&mut self, op: SendOp, offset: usize, len: usize) -> Option<()> {
        let local = Slice { region: &self.memory, offset, len };
        // Above all ids of receives.
        let id = 1 << 32 | self.posts;
        self.posts += 1;
        self.pair.as_ref()?.post_send(&[SendRequest { id, op, local, signaled: true, inline: false }]).ok()
    }

    fn receive(&mut self) -> Option<()> {
        let id = self.consumed.pop()?;
        let local = Slice { region: &self.memory, offset: id as usize * SLOT, len: SLOT };
        self.pair.as_ref()?.post_recv(&[RecvRequest { id, local }]).ok()
    }
}
