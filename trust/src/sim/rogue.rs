//! Peers that break the rules, one at a time: a raw peer and a script.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::{Connecting, Incoming, Progress, Session, Shape, Step};
use rdma_backend::time::Instant;
use rdma_backend::{Access, Backend as _, ConnectParams, Immediate, RemoteAddress, SendOp};
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_softsim::SoftSim;

use super::deviation::Deviation;

/// The number of windows that a rogue records, and that a trespasser fills.
const MOST_WINDOWS: usize = 12;
const SHAPE: Shape =
    Shape { sends: 512, receives: 64, window: 4096, access: Access::REMOTE_WRITE, outbox: 32 << 10 };
/// How long it waits for its victim.
const PATIENCE: Duration = Duration::from_secs(4);
const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };

/// A rogue and its progress.
pub struct Rogue {
    deviation: Deviation,
    backend: SoftSim,
    stage: Stage,
    until: Instant,
    acted: bool,
    /// Whether its script was executed by the victim's device.
    pub executed: bool,
    /// Whether a READ of the victim's window succeeded.
    pub read_succeeded: bool,
}

enum Stage {
    Connecting(Connecting<SoftSim>),
    Connected(Box<Connected>),
    Over,
}

struct Connected {
    session: Session<SoftSim>,
    established: bool,
    windows: Vec<Window>,
    asked: bool,
    told: bool,
    script: VecDeque<Step>,
}

impl Rogue {
    /// Creates a rogue client of `peer`.
    pub fn dial(
        backend: &SoftSim,
        peer: SocketAddr,
        deviation: Deviation,
    ) -> Result<Self, rdma_softsim::Error> {
        Ok(Self::new(backend, deviation, Connecting::dial(backend, peer, PATIENCE)?))
    }

    /// Creates a rogue server.
    pub fn listen(
        backend: &SoftSim,
        address: SocketAddr,
        deviation: Deviation,
    ) -> Result<Self, rdma_softsim::Error> {
        Ok(Self::new(backend, deviation, Connecting::listen(backend, address)?))
    }

    fn new(backend: &SoftSim, deviation: Deviation, connecting: Connecting<SoftSim>) -> Self {
        // Longer than any victim waits.
        let patience = if deviation == Deviation::NeverReady { PATIENCE * 15 } else { PATIENCE };
        let until = backend.now().after(patience);
        Self {
            deviation,
            backend: backend.clone(),
            stage: Stage::Connecting(connecting),
            until,
            acted: false,
            executed: false,
            read_succeeded: false,
        }
    }

    /// Returns the deviation that its victim could notice: silence, if it ended before the script.
    pub const fn shown(&self) -> Deviation {
        if self.acted { self.deviation } else { Deviation::Silence }
    }

    /// Returns whether it is gone.
    pub const fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Returns when it wants to run, if nothing else happens.
    pub const fn next_wake(&self) -> Instant {
        self.until
    }

    /// Returns whether an event waits for it.
    pub fn is_readable(&self) -> bool {
        match &self.stage {
            Stage::Connecting(connecting) => connecting.events().is_readable(),
            // It never reads that it was accepted, and its victim must end the wait (mutant 45).
            Stage::Connected(_) if self.deviation == Deviation::NeverReady => false,
            Stage::Connected(connected) => {
                let session = &connected.session;
                session.events().is_readable() || session.completions().is_readable()
            }
            Stage::Over => false,
        }
    }

    /// Continues. Any failure ends it: rogues report nothing.
    pub fn run(&mut self) {
        let stage = core::mem::replace(&mut self.stage, Stage::Over);
        if self.backend.now() < self.until
            && let Some(stage) = self.advance(stage)
        {
            self.stage = stage;
        }
    }

    fn advance(&mut self, stage: Stage) -> Option<Stage> {
        match stage {
            Stage::Connecting(connecting) => match connecting.poll().ok()? {
                Progress::NoWay(_) => None,
                Progress::Waits(connecting) => Some(Stage::Connecting(connecting)),
                Progress::Ready(candidate) => {
                    let most = candidate.most().ok()?;
                    let (sends, receives) = (SHAPE.sends.min(most), SHAPE.receives.min(most));
                    let asked = candidate.asked.is_some();
                    let mut session = candidate.session(Shape { sends, receives, ..SHAPE }).ok()?;
                    session.create_queue_pair().ok()?;
                    let starves = matches!(self.deviation, Deviation::Starving | Deviation::FeatureFlood);
                    session.reposts = !starves;
                    session.take(Step::Receive(if starves { 2 } else { receives as usize })).ok()?;
                    if asked { session.accept(&PARAMS, &[]) } else { session.connect(&PARAMS, &[]) }.ok()?;
                    let (windows, script) = (Vec::new(), VecDeque::new());
                    let connected =
                        Connected { session, established: false, windows, asked: false, told: false, script };
                    let connected = Box::new(connected);
                    if self.deviation == Deviation::NeverReady {
                        // The side that reads reports that it was accepted.
                        (self.acted, self.executed) = (true, true);
                        return Some(Stage::Connected(connected));
                    }
                    self.advance(Stage::Connected(connected))
                }
            },
            Stage::Connected(mut connected) => {
                self.talk(&mut connected)?;
                Some(Stage::Connected(connected))
            }
            Stage::Over => None,
        }
    }

    fn talk(&mut self, connected: &mut Connected) -> Option<()> {
        // Before it polls, so that later completions are reported.
        connected.session.arm().ok()?;
        while let Some(incoming) = connected.session.poll().ok()? {
            match incoming {
                Incoming::Established(_) => connected.established = true,
                Incoming::Message(bytes) => match Message::decode(&bytes) {
                    Ok(Message::RegisterXferMemory(window)) if connected.windows.len() < MOST_WINDOWS => {
                        if self.deviation == Deviation::Trespass {
                            connected.script.extend(trespass(&connected.windows, window));
                        }
                        connected.windows.push(window);
                    }
                    Ok(Message::GetServerFeature { .. }) => connected.told = true,
                    _ => {}
                },
                Incoming::Notified(_) => {}
                Incoming::Read => self.read_succeeded = true,
                // The last request: requests complete in order.
                Incoming::Sent => {
                    let all = self.acted && connected.script.is_empty();
                    let done = connected.session.outstanding() == 0 && connected.session.unsuccessful() == 0;
                    self.executed |= all && done;
                }
                // The victim's device has executed what the victim refuses.
                Incoming::Failed(_) | Incoming::Gone(_) => return None,
            }
        }
        if connected.established && !self.acted {
            self.act(connected)?;
        }
        // Answers to windows that came before the rogue acts wait in its script. The send queue has
        // room once an earlier request has completed.
        while self.acted
            && let Some(step) = connected.script.front()
        {
            match connected.session.take(step.clone()) {
                Ok(()) => _ = connected.script.pop_front(),
                Err(_) if connected.session.outstanding() > 0 => break,
                Err(_) => return None,
            }
        }
        Some(())
    }

    /// Begins the deviation, once everything that it needs is there.
    fn act(&mut self, connected: &mut Connected) -> Option<()> {
        let needs_window = matches!(
            self.deviation,
            Deviation::Overrun
                | Deviation::Wrap
                | Deviation::WriteOutside
                | Deviation::ReadWindow
                | Deviation::Odd
        );
        let victim = connected.windows.first().copied();
        if needs_window && victim.is_none() {
            return Some(());
        }
        // The bit is in force only with the server's answer (VM-001).
        if self.deviation == Deviation::WindowsWithoutEnd && !connected.told {
            if !core::mem::replace(&mut connected.asked, true) {
                connected.session.take(question(0)).ok()?;
            }
            return Some(());
        }
        self.acted = true;
        let own = Window { length: 2048, ..connected.session.own_window()? };
        let begins = script(self.deviation, own, victim.unwrap_or(own))?;
        // The deviation first. Answers to windows that came before follow it.
        let behind = core::mem::replace(&mut connected.script, begins.into());
        connected.script.extend(behind);
        Some(())
    }
}

fn message(message: Message) -> Step {
    Step::Post(SendOp::Send, message.encode().to_vec())
}

fn question(select: u16) -> Step {
    message(Message::GetServerFeature { select, features: FeatureSet::NONE })
}

fn trespass(before: &[Window], window: Window) -> impl Iterator<Item = Step> {
    let at = |window: &Window| RemoteAddress { address: window.address, rkey: window.rkey };
    let fill = Step::Post(SendOp::WriteImmediate(at(&window), Immediate(window.length)), Vec::new());
    let writes: Vec<_> =
        before.iter().map(|before| Step::Post(SendOp::Write(at(before)), vec![0xee])).collect();
    // A full window is its owner's again, who may take back memory of earlier ones.
    std::iter::once(fill).chain(writes)
}

/// Returns the script of a deviation; `None` if the rogue disappears.
fn script(deviation: Deviation, own: Window, victim: Window) -> Option<Vec<Step>> {
    let remote = RemoteAddress { address: victim.address, rkey: victim.rkey };
    let bytes = |bytes: &[u8]| Step::Post(SendOp::Send, bytes.to_vec());
    let register = |window| message(Message::RegisterXferMemory(window));
    let notify = |count, len| Step::Post(SendOp::WriteImmediate(remote, Immediate(count)), vec![0; len]);
    Some(match deviation {
        Deviation::Silence | Deviation::NeverReady => Vec::new(),
        Deviation::Deaf | Deviation::Starving | Deviation::Trespass => vec![register(own)],
        Deviation::Vanish => return None,
        Deviation::WithdrawWindow => vec![register(own), Step::Withdraw],
        Deviation::Overrun => vec![notify(victim.length + 1, 0)],
        // Together 2³², which is 0 in 32 bits.
        Deviation::Wrap => vec![notify(1, 1), notify(u32::MAX, 0)],
        Deviation::UnknownOpcode(opcode) => {
            let mut unknown = [0; 32];
            unknown[..2].copy_from_slice(&opcode.to_be_bytes());
            vec![bytes(&unknown)]
        }
        Deviation::Length(length) => vec![bytes(&vec![0; length.into()])],
        Deviation::EmptyWindow => vec![register(Window { length: 0, ..own })],
        // One byte more than the `window_limit` of every scenario.
        Deviation::HugeWindow => vec![register(Window { length: 4097, ..own })],
        Deviation::WrappedWindow => vec![register(Window { address: u64::MAX - 10, length: 100, ..own })],
        // On this fabric, a key that no region has: the place of the region is in these bits.
        Deviation::BogusKey => vec![register(Window { rkey: own.rkey ^ 0x100, ..own })],
        // Longer than what could be written in between.
        Deviation::EarlyRegistration => vec![register(Window { length: 4096, ..own }); 2],
        Deviation::WindowsWithoutEnd => {
            let choice = Message::SetClientFeature { select: 0, features: FeatureSet::MULTI_BUFFER };
            // The window that is being filled, three behind it, and one more.
            let windows = vec![register(Window { length: 4096, ..own }); 5];
            [vec![message(choice)], windows].concat()
        }
        Deviation::UnaskedFeatures => vec![question(0); 2],
        Deviation::ServerSends => {
            vec![message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })]
        }
        // Different ones: equal questions are answered one by one, and never refused.
        Deviation::FeatureFlood => (0..400).map(question).collect(),
        Deviation::WriteOutside => {
            let behind = RemoteAddress { address: remote.address + u64::from(victim.length), ..remote };
            vec![Step::Post(SendOp::Write(behind), vec![0])]
        }
        Deviation::ReadWindow => vec![Step::Post(SendOp::Read(remote), vec![0])],
        // Reserved bytes and an immediate of zero mean nothing (VR-CTRL-006, VR-XFER-005).
        Deviation::Odd => {
            let mut odd = Message::Keepalive.encode();
            odd[31] = 0xff;
            vec![register(own), bytes(&odd), notify(0, 0)]
        }
    })
}
