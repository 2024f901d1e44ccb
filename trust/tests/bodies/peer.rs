//! The peer of `hostile`: a raw peer, and a script drawn at random.

use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::{Candidate, Connecting, Incoming, Progress, Session, Shape, Step};
use rdma_backend::{Access, ConnectParams, Immediate, RemoteAddress, SendOp};
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_softsim::SoftSim;

use crate::script::Script;

const WINDOW: usize = 4096;
const SHAPE: Shape =
    Shape { sends: 256, receives: 32, window: WINDOW, access: Access::REMOTE_WRITE, outbox: 64 << 10 };
const PATIENCE: Duration = Duration::from_secs(4);

pub(crate) struct Peer {
    stage: Stage,
    params: ConnectParams,
    /// How it answers a connection request: it accepts, refuses, or lets it wait.
    welcome: u8,
    receives: usize,
}

enum Stage {
    Connecting(Connecting<SoftSim>),
    Undecided { _candidate: Candidate<SoftSim> },
    Connected(Box<Connected>),
    Gone,
}

struct Connected {
    session: Session<SoftSim>,
    /// The victim's last window, and how far it is filled.
    target: Option<Window>,
    used: u32,
}

impl Peer {
    pub(crate) fn dial(backend: &SoftSim, target: SocketAddr, script: &mut Script<'_>) -> Self {
        Self::new(Connecting::dial(backend, target, PATIENCE).expect("resolving begins"), script)
    }

    pub(crate) fn listen(backend: &SoftSim, address: SocketAddr, script: &mut Script<'_>) -> Self {
        Self::new(Connecting::listen(backend, address).expect("nothing else listens there"), script)
    }

    fn new(connecting: Connecting<SoftSim>, script: &mut Script<'_>) -> Self {
        let params = ConnectParams {
            responder_resources: 1,
            initiator_depth: 1,
            retry_count: script.byte() % 8,
            rnr_retry_count: script.byte() % 8,
        };
        let welcome = script.byte();
        let receives = usize::from(script.byte()) % (SHAPE.receives as usize + 1);
        Self { stage: Stage::Connecting(connecting), params, welcome, receives }
    }

    /// Connects as far as its script goes. A failure ends it.
    pub(crate) fn run(&mut self) {
        let stage = std::mem::replace(&mut self.stage, Stage::Gone);
        self.stage = match stage {
            Stage::Connecting(connecting) => match connecting.poll() {
                Ok(Progress::Ready(candidate)) => self.meet(candidate).unwrap_or(Stage::Gone),
                Ok(Progress::Waits(connecting)) => Stage::Connecting(connecting),
                Ok(Progress::NoWay(_)) | Err(_) => Stage::Gone,
            },
            other => other,
        };
        if let Stage::Connected(connected) = &mut self.stage {
            connected.look();
        }
    }

    fn meet(&self, candidate: Candidate<SoftSim>) -> Option<Stage> {
        let asked = candidate.asked.is_some();
        match self.welcome {
            0..16 if asked => return None,
            16..24 if asked => return Some(Stage::Undecided { _candidate: candidate }),
            _ => {}
        }
        let mut session = candidate.session(SHAPE).ok()?;
        // Without a queue pair it cannot receive. It continues as far as possible.
        let _gone = session.create_queue_pair();
        let _refused = session.take(Step::Receive(self.receives));
        if asked { session.accept(&self.params, &[]) } else { session.connect(&self.params, &[]) }.ok()?;
        Some(Stage::Connected(Box::new(Connected { session, target: None, used: 0 })))
    }

    pub(crate) fn step(&mut self, step: u8, script: &mut Script<'_>) {
        if let Stage::Connected(connected) = &mut self.stage
            && let Some(step) = connected.draw(step, script)
        {
            // A request that the device refuses is part of the trial.
            let _refused = connected.session.take(step);
        }
        if step == 15 && script.byte() < 16 {
            self.leave();
        }
    }

    pub(crate) fn leave(&mut self) {
        self.stage = Stage::Gone;
    }
}

impl Connected {
    /// Takes what arrived, and need not act on it.
    fn look(&mut self) {
        while let Ok(Some(incoming)) = self.session.poll() {
            match incoming {
                Incoming::Message(bytes) => {
                    if let Ok(Message::RegisterXferMemory(window)) = Message::decode(&bytes) {
                        (self.target, self.used) = (Some(window), 0);
                    }
                }
                Incoming::Read => panic!("a peer could read our window"),
                _ => {}
            }
        }
    }

    fn draw(&mut self, step: u8, script: &mut Script<'_>) -> Option<Step> {
        Some(match step {
            8 => Step::Post(SendOp::Send, self.message(script)?),
            // Correct: an immediate that follows its data and has its length.
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
                Step::Post(op, vec![0; count as usize])
            }
            // Incorrect.
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
                // No device checks a READ of no bytes, and it reads nothing.
                let least = usize::from(matches!(op, SendOp::Read(_)));
                Step::Post(op, vec![0; count.max(least)])
            }
            12 | 13 => Step::Receive(usize::from(script.byte() % 8)),
            14 => match script.byte() {
                0..64 => Step::Withdraw,
                _ => Step::Register(WINDOW),
            },
            _ => match script.byte() {
                0..16 => Step::Disconnect,
                16..24 => Step::LoseQueuePair,
                _ => return None,
            },
        })
    }

    fn message(&self, script: &mut Script<'_>) -> Option<Vec<u8>> {
        let window = |script: &mut Script<'_>| {
            let length = 1 + u32::from(script.byte()) * 4;
            Some(Window { length, ..self.session.own_window()? })
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
}
