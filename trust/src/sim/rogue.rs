//! Peers that break the rules, one at a time: raw verbs and a script.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_proto::backend::{
    Access, Backend, CmEventKind, Completed, Completion, CompletionQueue as _, ConnectParams, Domain as _,
    EventChannel as _, Identifier as _, Immediate, QueuePair as _, QueuePairLimits, RecvRequest, Region as _,
    RemoteAddress, SendOp, SendRequest, Slice,
};
use rdma_proto::time::Instant;
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_softsim::{CompletionQueue, Domain, EventChannel, Identifier, QueuePair, Region, SoftSim};

use super::deviation::Deviation;

/// Receives a rogue posts, each of [`SLOT`] bytes.
const RECEIVES: u64 = 64;
const SLOT: usize = 64;
/// Where in its memory it puts what it sends.
const OUT: usize = SLOT * RECEIVES as usize;
const MEMORY: usize = OUT + 4096;
/// How long it waits for its victim.
const PATIENCE: Duration = Duration::from_secs(4);
const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };

/// A rogue and how far it is.
pub struct Rogue {
    deviation: Deviation,
    backend: SoftSim,
    step: Step,
    /// When it gives up.
    until: Instant,
    /// Whether it came to its script.
    acted: bool,
    /// Whether its script was executed by the victim's device.
    pub executed: bool,
    /// Whether a READ of the victim's window succeeded.
    pub read_succeeded: bool,
}

enum Step {
    Listening { _id: Identifier, events: EventChannel },
    Resolving { id: Identifier, events: EventChannel },
    Connected(Box<Ends>),
    Over,
}

struct Ends {
    pair: QueuePair,
    completions: CompletionQueue,
    memory: Region,
    window: Option<Region>,
    id: Identifier,
    events: EventChannel,
    _domain: Domain,
    established: bool,
    /// The victim's window.
    victim: Option<Window>,
    posts: u64,
}

impl Rogue {
    /// A rogue client of `peer`.
    pub fn dial(
        backend: &SoftSim,
        peer: SocketAddr,
        deviation: Deviation,
    ) -> Result<Self, rdma_softsim::Error> {
        let events = backend.event_channel()?;
        let id = events.create_id()?;
        id.resolve_address(None, peer, PATIENCE)?;
        Ok(Self::new(backend, deviation, Step::Resolving { id, events }))
    }

    /// A rogue server.
    pub fn listen(
        backend: &SoftSim,
        address: SocketAddr,
        deviation: Deviation,
    ) -> Result<Self, rdma_softsim::Error> {
        let events = backend.event_channel()?;
        let id = events.listen(address, 0)?;
        Ok(Self::new(backend, deviation, Step::Listening { _id: id, events }))
    }

    fn new(backend: &SoftSim, deviation: Deviation, step: Step) -> Self {
        // Longer than any victim waits for it.
        let patience = if deviation == Deviation::NeverReady { PATIENCE * 15 } else { PATIENCE };
        let until = backend.now().after(patience);
        Self {
            deviation,
            backend: backend.clone(),
            step,
            until,
            acted: false,
            executed: false,
            read_succeeded: false,
        }
    }

    /// What its victim could notice: only silence, if the victim ended before the rogue came to its script.
    pub const fn shown(&self) -> Deviation {
        if self.acted { self.deviation } else { Deviation::Silence }
    }

    /// Whether it is gone.
    pub const fn is_over(&self) -> bool {
        matches!(self.step, Step::Over)
    }

    /// When it wants to run, if nothing else happens.
    pub const fn next_wake(&self) -> Instant {
        self.until
    }

    /// Whether something waits for it.
    pub fn is_readable(&self) -> bool {
        match &self.step {
            Step::Listening { events, .. } | Step::Resolving { events, .. } => events.is_readable(),
            Step::Connected(_) if self.deviation == Deviation::NeverReady => false,
            Step::Connected(ends) => ends.events.is_readable() || ends.completions.is_readable(),
            Step::Over => false,
        }
    }

    /// Goes on. Whatever fails is its end: rogues report nothing.
    pub fn run(&mut self) {
        if self.backend.now() >= self.until || self.advance().is_none() {
            self.step = Step::Over;
        }
    }

    fn advance(&mut self) -> Option<()> {
        loop {
            match core::mem::replace(&mut self.step, Step::Over) {
                Step::Listening { _id: id, events } => {
                    let Some(event) = events.next_event().ok()? else {
                        self.step = Step::Listening { _id: id, events };
                        return Some(());
                    };
                    if let CmEventKind::ConnectRequest { id, .. } = event.kind {
                        let ends = self.ends(id, events)?;
                        ends.id.accept(&PARAMS, &[]).ok()?;
                        self.step = Step::Connected(Box::new(ends));
                    } else {
                        self.step = Step::Listening { _id: id, events };
                    }
                }
                Step::Resolving { id, events } => match events.next_event().ok()?.map(|event| event.kind) {
                    None => {
                        self.step = Step::Resolving { id, events };
                        return Some(());
                    }
                    Some(CmEventKind::AddressResolved) => {
                        id.resolve_route(PATIENCE).ok()?;
                        self.step = Step::Resolving { id, events };
                    }
                    Some(CmEventKind::RouteResolved) => {
                        let ends = self.ends(id, events)?;
                        ends.id.connect(&PARAMS, &[]).ok()?;
                        if self.deviation == Deviation::NeverReady {
                            // It is for whoever reads that it was accepted to say so.
                            (self.acted, self.executed) = (true, true);
                            self.step = Step::Connected(Box::new(ends));
                            return Some(());
                        }
                        self.step = Step::Connected(Box::new(ends));
                    }
                    Some(_) => return None,
                },
                Step::Connected(mut ends) => {
                    let goes_on = self.talk(&mut ends);
                    if goes_on.is_some() {
                        self.step = Step::Connected(ends);
                    }
                    return goes_on;
                }
                Step::Over => return None,
            }
        }
    }

    fn ends(&self, id: Identifier, events: EventChannel) -> Option<Ends> {
        let domain = id.create_domain().ok()?;
        let memory = domain.register(MEMORY, Access::LOCAL_WRITE).ok()?;
        let window = domain.register(4096, Access::REMOTE_WRITE).ok()?;
        let completions = id.create_completion_queue(1024, 0).ok()?;
        let most = id.capabilities().ok()?.max_queue_depth;
        let limits =
            QueuePairLimits { send_depth: most.min(512), recv_depth: most.min(RECEIVES as u32), inline: 0 };
        let pair = id.create_queue_pair(&domain, &completions, limits).ok()?;
        let receives = match self.deviation {
            Deviation::Starving | Deviation::FeatureFlood => 2,
            _ => u64::from(limits.recv_depth),
        };
        for slot in 0..receives {
            post_receive(&pair, &memory, slot)?;
        }
        completions.arm().ok()?;
        Some(Ends {
            pair,
            completions,
            memory,
            window: Some(window),
            id,
            events,
            _domain: domain,
            established: false,
            victim: None,
            posts: 0,
        })
    }

    fn talk(&mut self, ends: &mut Ends) -> Option<()> {
        while let Some(event) = ends.events.next_event().ok()? {
            match event.kind {
                CmEventKind::Established { .. } => ends.established = true,
                CmEventKind::TimewaitExit | CmEventKind::ConnectRequest { .. } => {}
                _ => return None,
            }
        }
        ends.completions.take_events().ok()?;
        ends.completions.arm().ok()?;
        let mut batch = [Completion::EMPTY; 16];
        loop {
            let count = ends.completions.poll(&mut batch).ok()?;
            for completion in &batch[..count] {
                match completion.result {
                    Ok(Completed::Recv { len: 32, .. }) => ends.hear(completion.id)?,
                    Ok(Completed::Recv { .. } | Completed::RecvWrite { .. }) => {}
                    Ok(Completed::Read) => self.read_succeeded = true,
                    Ok(_) => self.executed |= self.acted && completion.id + 1 == 1 << 32 | ends.posts,
                    // What the victim refuses, its device has executed.
                    Err(_) => return None,
                }
                let received =
                    matches!(completion.result, Ok(Completed::Recv { .. } | Completed::RecvWrite { .. }));
                if received && !matches!(self.deviation, Deviation::Starving | Deviation::FeatureFlood) {
                    post_receive(&ends.pair, &ends.memory, completion.id)?;
                }
            }
            if count < batch.len() {
                break;
            }
        }
        if ends.established && !self.acted {
            self.script(ends)?;
        }
        Some(())
    }

    /// The deviation itself, when all it needs is there.
    fn script(&mut self, ends: &mut Ends) -> Option<()> {
        let needs_window = matches!(
            self.deviation,
            Deviation::Overrun
                | Deviation::Wrap
                | Deviation::WriteOutside
                | Deviation::ReadWindow
                | Deviation::Odd
        );
        if needs_window && ends.victim.is_none() {
            return Some(());
        }
        self.acted = true;
        let window = ends.window.as_ref().map(|window| Window {
            address: window.address(),
            length: 2048,
            rkey: window.rkey(),
        })?;
        let victim = ends.victim.unwrap_or(window);
        let remote = RemoteAddress { address: victim.address, rkey: victim.rkey };
        let register = |window| Message::RegisterXferMemory(window).encode().to_vec();
        match self.deviation {
            Deviation::Silence | Deviation::NeverReady => {}
            Deviation::Deaf | Deviation::Starving => ends.send(&register(window))?,
            Deviation::Vanish => return None,
            Deviation::WithdrawWindow => {
                ends.send(&register(window))?;
                ends.window = None;
            }
            Deviation::Overrun => {
                ends.post(SendOp::WriteImmediate(remote, Immediate(victim.length + 1)), 0)?;
            }
            Deviation::Wrap => {
                ends.post(SendOp::WriteImmediate(remote, Immediate(1)), 1)?;
                ends.post(SendOp::WriteImmediate(remote, Immediate(u32::MAX)), 0)?;
            }
            Deviation::UnknownOpcode(opcode) => {
                let mut message = vec![0; 32];
                message[..2].copy_from_slice(&opcode.to_be_bytes());
                ends.send(&message)?;
            }
            Deviation::Length(length) => ends.send(&vec![0; length.into()])?,
            Deviation::EmptyWindow => ends.send(&register(Window { length: 0, ..window }))?,
            Deviation::HugeWindow => ends.send(&register(Window { length: 4097, ..window }))?,
            Deviation::WrappedWindow => {
                ends.send(&register(Window { address: u64::MAX - 10, length: 100, ..window }))?;
            }
            Deviation::BogusKey => ends.send(&register(Window { rkey: window.rkey ^ 0x100, ..window }))?,
            Deviation::EarlyRegistration => {
                // Longer than anything that could be written in between.
                ends.send(&register(Window { length: 4096, ..window }))?;
                ends.send(&register(Window { length: 4096, ..window }))?;
            }
            Deviation::UnaskedFeatures => {
                ends.send(&Message::GetServerFeature { select: 0, features: FeatureSet::NONE }.encode())?;
                ends.send(&Message::GetServerFeature { select: 0, features: FeatureSet::NONE }.encode())?;
            }
            Deviation::ServerSends => {
                ends.send(&Message::SetClientFeature { select: 0, features: FeatureSet::NONE }.encode())?;
            }
            Deviation::FeatureFlood => {
                for select in 0..400 {
                    let question = Message::GetServerFeature { select, features: FeatureSet::NONE };
                    if ends.send(&question.encode()).is_none() {
                        break;
                    }
                }
            }
            Deviation::WriteOutside => {
                let behind = RemoteAddress { address: remote.address + u64::from(victim.length), ..remote };
                ends.post(SendOp::Write(behind), 1)?;
            }
            Deviation::ReadWindow => ends.post(SendOp::Read(remote), 1)?,
            Deviation::Odd => {
                ends.send(&register(window))?;
                let mut message = Message::Keepalive.encode();
                message[31] = 0xff;
                ends.send(&message)?;
                ends.post(SendOp::WriteImmediate(remote, Immediate(0)), 0)?;
            }
        }
        Some(())
    }
}

impl Ends {
    /// A message of the victim's.
    fn hear(&mut self, slot: u64) -> Option<()> {
        let mut bytes = [0; 32];
        let read = self.memory.memory().read(slot as usize * SLOT, &mut bytes);
        if read && let Ok(Message::RegisterXferMemory(window)) = Message::decode(&bytes) {
            self.victim.get_or_insert(window);
        }
        Some(())
    }

    fn send(&mut self, message: &[u8]) -> Option<()> {
        let offset = OUT + (self.posts as usize % 32) * SLOT;
        let inside = self.memory.memory().write(offset, message);
        self.post_from(SendOp::Send, offset, message.len()).filter(|()| inside)
    }

    fn post(&mut self, op: SendOp, len: usize) -> Option<()> {
        self.post_from(op, OUT, len)
    }

    fn post_from(&mut self, op: SendOp, offset: usize, len: usize) -> Option<()> {
        let local = Slice { region: &self.memory, offset, len };
        // Above all ids of receives.
        let id = 1 << 32 | self.posts;
        self.posts += 1;
        self.pair.post_send(&[SendRequest { id, op, local, signaled: true, inline: false }]).ok()
    }
}

fn post_receive(pair: &QueuePair, memory: &Region, slot: u64) -> Option<()> {
    let local = Slice { region: memory, offset: slot as usize * SLOT, len: SLOT };
    pair.post_recv(&[RecvRequest { id: slot, local }]).ok()
}
