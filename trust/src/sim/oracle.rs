//! Invariants at every step, judged from the trace: on the wire, and in each queue pair's state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rdma_backend::{Access, Completed, Completion, SendOp};
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_softsim::trace::{Entry, EntryKind, Work};

/// Windows that may wait behind the one that is being filled (VM-003).
const WAITING: usize = 3;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The oracle that reports it: a stable name.
    pub oracle: &'static str,
    /// A description of the violation.
    pub what: String,
}

impl Violation {
    /// Creates a violation that `oracle` saw.
    pub fn new(oracle: &'static str, what: impl Into<String>) -> Self {
        Self { oracle, what: what.into() }
    }
}

/// The state of all queue pairs.
#[derive(Default)]
pub struct Oracle {
    pairs: BTreeMap<u32, WatchedQueuePair>,
    windows_ahead: u64,
}

#[derive(Default)]
struct WatchedQueuePair {
    /// Whether its owner is expected to follow the rules.
    honest: bool,
    /// Requests posted and not completed, with whether they are signaled.
    sends: VecDeque<(u64, bool)>,
    receives: BTreeSet<u64>,
    reposts: Reposts,
    /// The window that its owner may write to.
    target: Option<Target>,
    announced: Announced,
    /// The features in the last `GetServerFeature` that it sent.
    said: Option<FeatureSet>,
    /// The features in the last one that it received: those of its server, or a question.
    heard: Option<FeatureSet>,
    /// Whether windows may be announced early: the server's answer decides (VM-001).
    queues: bool,
    /// Its identifier, and whether its owner has posted, failed or disconnected.
    identifier: u64,
    spoke: bool,
    failed: bool,
    disconnected: bool,
    /// Bytes that its peer has announced to it, and bytes that its program has read.
    arrived: u64,
    read: u64,
}

/// Receives that its owner posts (VR-RES-003), and which before it acts (VR-RES-012).
#[derive(Default)]
struct Reposts {
    posted: u64,
    /// Those posted before the first notification.
    initial: Option<u64>,
    /// Notifications that arrived. Each consumes a receive.
    consumed: u64,
    /// The last window that it was given, and how many receives were consumed by then.
    given: Option<(u64, u64)>,
    /// How many receives were consumed when its last window was full.
    filled: u64,
    /// Whether it asks questions.
    asks: bool,
    /// How many receives were consumed before each question of its peer that it has not answered.
    asked: VecDeque<u64>,
}

impl Reposts {
    fn consume(&mut self) {
        self.initial.get_or_insert(self.posted);
        self.consumed += 1;
    }

    /// Records a `GetServerFeature` that it posts. Returns how many receives were consumed before
    /// the question, if it is an answer.
    fn answers(&mut self) -> Option<u64> {
        let consumed = self.asked.pop_front();
        self.asks |= consumed.is_none();
        consumed
    }

    /// Returns whether what was consumed up to then was posted again.
    fn are_made(&self, consumed: u64) -> bool {
        self.posted - self.initial.unwrap_or(self.posted) >= consumed
    }
}

struct Target {
    window: Window,
    used: u32,
    unannounced: u32,
    /// Windows that were registered before this one was full, in order (VM-002), also those of a
    /// rogue that registers too early: its own count of what it posted may differ from the wire.
    next: VecDeque<Window>,
}

impl Target {
    const fn new(window: Window) -> Self {
        Self { window, used: 0, unannounced: 0, next: VecDeque::new() }
    }

    fn comes_first(&self) -> bool {
        !self.is_full() || !self.next.is_empty()
    }

    const fn is_full(&self) -> bool {
        self.used == self.window.length
    }
}

impl WatchedQueuePair {
    fn says(&mut self, number: u32, message: Message) -> Result<(), Violation> {
        let wrong = |what: &str| Err(Violation::new("features", format!("pair {number} {what}")));
        match message {
            Message::GetServerFeature { features, .. } => {
                // Only an answer offers features: in a question they are zero (VR-FEAT-012).
                if features != FeatureSet::NONE && self.heard.is_none() {
                    return wrong("offers features to a peer that did not ask");
                }
                self.said = Some(features);
            }
            Message::SetClientFeature { features, .. } => {
                // A client sets only what the server offers (VR-FEAT-010).
                if features.common(self.heard.unwrap_or_default()) != features {
                    return wrong("chooses features that were not offered");
                }
                self.queues = features.contains(FeatureSet::MULTI_BUFFER);
            }
            _ => {}
        }
        Ok(())
    }

    fn hears(&mut self, message: Message) {
        match message {
            Message::RegisterXferMemory(window) => match &mut self.target {
                Some(old) if old.comes_first() => old.next.push_back(window),
                target => *target = Some(Target::new(window)),
            },
            Message::GetServerFeature { features, .. } => self.heard = Some(features),
            Message::SetClientFeature { features, .. } => {
                // In force is what both sides have (VR-FEAT-010).
                let both = features.common(self.said.unwrap_or_default());
                self.queues = both.contains(FeatureSet::MULTI_BUFFER);
            }
            Message::Keepalive => {}
        }
    }
}

#[derive(Default)]
struct Announced {
    total: u64,
    /// For each address, the byte of the stream up to which it was last used.
    ends: BTreeMap<u64, u64>,
}

impl Announced {
    fn not_full(&self, arrived: u64) -> usize {
        self.ends.values().filter(|end| **end > arrived).count()
    }
}

impl Oracle {
    /// Returns how many windows were announced before the last one was full.
    #[must_use]
    pub const fn windows_ahead(&self) -> u64 {
        self.windows_ahead
    }

    /// Records an entry of the trace. `honest` returns whether a host's program follows the rules.
    pub fn look(&mut self, entry: &Entry, honest: impl Fn(u32) -> bool) -> Result<(), Violation> {
        match &entry.what {
            EntryKind::Created { host, pair, identifier } => {
                let (honest, identifier) = (honest(*host), *identifier);
                let pair_of = WatchedQueuePair { honest, identifier, ..WatchedQueuePair::default() };
                // In the place of a former queue pair, perhaps: numbers are reused.
                self.pairs.insert(*pair, pair_of);
                Ok(())
            }
            // Peers write to windows, and read nothing (VR-SEC-001).
            EntryKind::Registered { host, access } if honest(*host) && access.allows(Access::REMOTE_READ) => {
                Err(Violation::new("rights", format!("host {host} registered memory that its peer can read")))
            }
            EntryKind::Called { host, identifier, what } if honest(*host) => self.called(*identifier, what),
            EntryKind::Posted { pair, work } => self.posted(*pair, work),
            EntryKind::Received { pair, id } => self.received(*pair, *id),
            EntryKind::Executed { from, to, work } => self.executed(*from, *to, work),
            EntryKind::Completed(completion) => self.completed(completion),
            // A peer with endless retries waits instead, which is allowed (VR-FLOW-015).
            EntryKind::NotReady { from, to, injected: false, limited: true }
                if self.is_honest(*from) && self.is_honest(*to) =>
            {
                let what = format!("pair {from} outran the receives of pair {to}, which cannot wait");
                Err(Violation::new("credit", what))
            }
            // The device may read them again until the completion says otherwise (VR-XFER-011).
            EntryKind::Tampered { pair, id } if self.is_honest(*pair) => {
                let what =
                    format!("pair {pair}: bytes of work {id:#x} changed before its completion was polled");
                Err(Violation::new("ownership", what))
            }
            // Queue pairs go before what they use (VR-RES-001).
            EntryKind::Busy { host, what } if honest(*host) => {
                Err(Violation::new("teardown", format!("host {host}: {what} destroyed while in use")))
            }
            _ => Ok(()),
        }
    }

    /// Records that the program on `host` behind queue pair `pair` has read `bytes` bytes in all.
    pub fn has_read(&mut self, pair: u32, bytes: u64) {
        if let Some(pair) = self.pairs.get_mut(&pair) {
            pair.read = bytes;
        }
    }

    /// Records that the connection behind queue pair `pair` has failed.
    pub fn has_failed(&mut self, pair: u32) {
        if let Some(pair) = self.pairs.get_mut(&pair) {
            pair.failed = true;
        }
    }

    /// Checks that a connection that fails tells its peer itself, and not by a later drop.
    fn called(&mut self, identifier: u64, what: &str) -> Result<(), Violation> {
        let Some((number, pair)) = self.pairs.iter_mut().find(|(_, pair)| pair.identifier == identifier)
        else {
            return Ok(());
        };
        pair.disconnected |= what == "disconnect";
        // Destroying notifies the peer, too, but not at once (VR-CLOSE-007; mutant 29).
        if what == "destroy" && pair.spoke && pair.failed && !pair.disconnected {
            let what = format!("pair {number} failed and did not tell its peer");
            return Err(Violation::new("disconnect", what));
        }
        Ok(())
    }

    fn is_honest(&self, pair: u32) -> bool {
        self.pairs.get(&pair).is_some_and(|pair| pair.honest)
    }

    fn posted(&mut self, number: u32, work: &Work) -> Result<(), Violation> {
        let Some(pair) = self.pairs.get_mut(&number) else { return Ok(()) };
        pair.sends.push_back((work.id, work.signaled));
        pair.spoke = true;
        if !pair.honest {
            return Ok(());
        }
        let late = |what: &str| {
            Err(Violation::new("receives", format!("pair {number} {what} before it posts the receive again")))
        };
        // The receive of a registration, before the first byte in its window (VR-RES-012).
        if let SendOp::Write(at) | SendOp::WriteImmediate(at, _) = work.op
            && let Some((window, consumed)) = pair.reposts.given
            && at.address == window
            && work.len > 0
            && !pair.reposts.are_made(consumed)
        {
            return late("writes into a window");
        }
        let message = work.message.and_then(|bytes| Message::decode(&bytes).ok());
        // Receives consumed before a question, before its answer (VR-RES-012).
        if let Some(Message::GetServerFeature { .. }) = message
            && let Some(consumed) = pair.reposts.answers()
            && !pair.reposts.are_made(consumed)
        {
            return late("answers a question");
        }
        let window = match message {
            // With windows ahead, the immediate is not the reason.
            Some(Message::RegisterXferMemory(_))
                if !pair.queues && !pair.reposts.are_made(pair.reposts.filled) =>
            {
                return late("registers a window");
            }
            Some(Message::RegisterXferMemory(window)) => window,
            Some(message) => return pair.says(number, message),
            None => return Ok(()),
        };
        let announced = &mut pair.announced;
        let early = |what: String| Err(Violation::new("early window", what));
        // Unless both want windows ahead, only when the last one is full (VR-MEM-004, VM-001).
        if pair.arrived < announced.total && !pair.queues {
            return early(format!(
                "pair {number} announces a window when {} of {} bytes of the last ones have arrived",
                pair.arrived, announced.total
            ));
        }
        if announced.not_full(pair.arrived) > WAITING {
            return early(format!("pair {number} announces a window behind {WAITING} that wait"));
        }
        self.windows_ahead += u64::from(pair.arrived < announced.total);
        // Only when all bytes in that memory are read (VR-MEM-010, VM-005).
        if let Some(end) = announced.ends.get(&window.address).filter(|end| pair.read < **end) {
            return early(format!(
                "pair {number} announces {:#x} again, which holds bytes up to {end} of which {} are read",
                window.address, pair.read
            ));
        }
        announced.total += u64::from(window.length);
        announced.ends.insert(window.address, announced.total);
        Ok(())
    }

    fn received(&mut self, number: u32, id: u64) -> Result<(), Violation> {
        let Some(pair) = self.pairs.get_mut(&number) else { return Ok(()) };
        pair.reposts.posted += 1;
        // Two messages would land in one slot (mutant 37).
        if !pair.receives.insert(id) && pair.honest {
            let what = format!("pair {number}: receive {id} is posted twice");
            return Err(Violation::new("exactly once", what));
        }
        Ok(())
    }

    fn executed(&mut self, from: u32, to: u32, work: &Work) -> Result<(), Violation> {
        let honest = self.is_honest(from);
        match work.op {
            SendOp::Send | SendOp::SendImmediate(_) => {
                let message = work.message.and_then(|bytes| Message::decode(&bytes).ok());
                // A SEND is a control message of 32 bytes (VR-CTRL-001, VR-CTRL-002).
                if honest && (work.len != 32 || message.is_none()) {
                    let what = format!("pair {from} sent {} bytes of nonsense", work.len);
                    return Err(Violation::new("wire", what));
                }
                let Some(peer) = self.pairs.get_mut(&to) else { return Ok(()) };
                peer.reposts.consume();
                // A rogue may register one window many times before it is full.
                if let (true, Some(Message::RegisterXferMemory(window))) = (honest, message) {
                    peer.reposts.given = Some((window.address, peer.reposts.consumed));
                }
                // A question. Its own receive may be posted after the answer.
                if let (true, false, Some(Message::GetServerFeature { .. })) =
                    (honest, peer.reposts.asks, message)
                {
                    peer.reposts.asked.push_back(peer.reposts.consumed - 1);
                }
                if let Some(message) = message {
                    peer.hears(message);
                }
                Ok(())
            }
            // The fence of a close: docs/decisions.md, 7.
            SendOp::Write(_) if work.len == 0 => Ok(()),
            SendOp::Write(at) | SendOp::WriteImmediate(at, _) => {
                let immediate = match work.op {
                    SendOp::WriteImmediate(_, immediate) => Some(immediate.0),
                    _ => None,
                };
                if let (Some(peer), Some(immediate)) = (self.pairs.get_mut(&to), immediate) {
                    peer.reposts.consume();
                    peer.arrived += u64::from(immediate);
                    // It is full: receives up to here precede the next window (VR-RES-012).
                    if immediate > 0 && peer.arrived == peer.announced.total {
                        peer.reposts.filled = peer.reposts.consumed;
                    }
                }
                let Some(WatchedQueuePair { honest: true, target, .. }) = self.pairs.get_mut(&from) else {
                    return Ok(());
                };
                let outside = |what: String| Err(Violation::new("window", what));
                // No payload before the first window (VR-FLOW-004).
                let Some(target) = target else {
                    return outside(format!("pair {from} wrote without a window"));
                };
                if target.is_full()
                    && let Some(window) = target.next.pop_front()
                {
                    if target.unannounced > 0 {
                        // VM-004.
                        let unannounced = target.unannounced;
                        let what =
                            format!("pair {from} begins a window with {unannounced} bytes unannounced");
                        return Err(Violation::new("immediate", what));
                    }
                    (target.window, target.used) = (window, 0);
                }
                let (begin, room) =
                    (target.window.address + u64::from(target.used), target.window.length - target.used);
                // No gap, no other key, nothing beyond its end (VR-MEM-002, VR-FLOW-007).
                if (at.address, at.rkey) != (begin, target.window.rkey) || work.len > room as usize {
                    return outside(format!(
                        "pair {from} wrote {} bytes to {:#x} where {room} bytes at {begin:#x} are free",
                        work.len, at.address
                    ));
                }
                target.used += work.len as u32;
                target.unannounced += work.len as u32;
                if let Some(immediate) = immediate {
                    let written = std::mem::take(&mut target.unannounced);
                    // All bytes since the last immediate, and no others (VR-XFER-004).
                    if immediate != written {
                        let what = format!("pair {from} announced {immediate} bytes and wrote {written}");
                        return Err(Violation::new("immediate", what));
                    }
                }
                Ok(())
            }
            // The protocol has no use for READs (VR-CONN-005).
            SendOp::Read(_) if honest => Err(Violation::new("wire", format!("pair {from} reads"))),
            SendOp::Read(_) => Ok(()),
        }
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), Violation> {
        let number = completion.queue_pair;
        let Some(pair) = self.pairs.get_mut(&number) else { return Ok(()) };
        let received = match completion.result {
            Ok(Completed::Recv { .. } | Completed::RecvWrite { .. }) => true,
            Ok(_) => false,
            // Of a failure only id, status and queue pair are defined, so the id tells the queue.
            Err(_) => pair.receives.contains(&completion.id),
        };
        let wrong = |what: String| Err(Violation::new("exactly once", format!("pair {number}: {what}")));
        if received {
            return if pair.receives.remove(&completion.id) {
                Ok(())
            } else {
                wrong(format!("receive {} completed and was not posted", completion.id))
            };
        }
        while let Some((id, signaled)) = pair.sends.pop_front() {
            if id == completion.id {
                return Ok(());
            }
            // A completion stands for unsignaled requests before it, and for no signaled one.
            if signaled {
                return wrong(format!("work {id:#x} was passed over by {:#x}", completion.id));
            }
        }
        wrong(format!("work {:#x} completed and was not posted", completion.id))
    }
}
