//! Two connections in plain memory, and between them a fabric that keeps the order of reliable connections.
//!
//! Nothing happens by itself: a test says what is posted, carried, handled and reported, or calls [`Pair::settle`] for all
//! of it. Every posted request is checked by a [`Ledger`]; send buffers are checked when bytes are carried and again when
//! they are known to have arrived, because a device may send them twice; every byte read is compared with the one written.

// Each test binary uses a part of it.
#![allow(dead_code)]

mod ledger;

use std::collections::VecDeque;
use std::time::Duration;

use rdma_proto::backend::{CompletionError, CompletionStatus, Immediate, RNR_RETRY_INFINITE};
use rdma_proto::time::Instant;
use rdma_proto::wire::{MESSAGE_LEN, Message};
use rdma_proto::{Action, Config, Connection, RegionAddress, Role, Source, Span, State};

pub(crate) use ledger::Ledger;

/// The two ends, as indices.
pub(crate) use Role::{Client, Server};

pub(crate) fn peer(who: Role) -> Role {
    match who {
        Client => Server,
        Server => Client,
    }
}

/// The stream that `who` writes, at `position`: long in period, so that no two windows look alike.
fn stream_byte(who: Role, position: usize) -> u8 {
    let mixed = (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (who as u64);
    (mixed >> 32) as u8
}

/// A settings base with which nothing but the tested rule limits anything.
pub(crate) fn quiet(base: Config) -> Config {
    let mut config = base;
    config.keepalive.every = None;
    config.keepalive.probe = None;
    Config { window: 64, send_buffer: 256, ..config }
}

pub(crate) fn at(millis: u64) -> Instant {
    Instant::from_start(Duration::from_millis(millis))
}

pub(crate) fn failure(status: CompletionStatus) -> CompletionError {
    CompletionError { status, vendor: 0 }
}

/// What consumed a receive and was not handled yet.
#[derive(Clone, Debug)]
pub(crate) enum Arrival {
    Message([u8; MESSAGE_LEN]),
    Immediate(u32),
}

#[derive(Clone, Debug)]
struct Request {
    action: Action,
    /// How often its side had lent when it was posted.
    lent: usize,
    /// What the send buffer, the lent memory or the slot must hold until this is known to have arrived.
    bytes: Vec<u8>,
}

pub(crate) struct Side {
    pub(crate) machine: Connection,
    pub(crate) ledger: Ledger,
    /// All that it ever posted.
    pub(crate) log: Vec<Action>,
    /// What arrived and waits to be handled.
    pub(crate) arrivals: VecDeque<Arrival>,
    /// Receives posted and free.
    pub(crate) receives: usize,
    /// How often this side repeats what meets no receive, as the peer told it.
    pub(crate) rnr_retry: u8,
    /// Whether [`Pair::settle`] lets this side handle what arrives, ...
    pub(crate) handles: bool,
    /// ... reports its completions, ...
    pub(crate) reports: bool,
    /// ... and carries what it posts.
    pub(crate) carries: bool,
    /// Bytes it wrote and read.
    pub(crate) wrote: usize,
    pub(crate) read: usize,
    role: Role,
    regions: [Vec<u8>; 2],
    addresses: [RegionAddress; 2],
    buffer: Vec<u8>,
    /// Memory it ever lent.
    lent: Vec<Vec<u8>>,
    slots: Vec<[u8; MESSAGE_LEN]>,
    queue: VecDeque<Request>,
    /// Carried and not reported.
    carried: VecDeque<Request>,
    completions: VecDeque<(u64, Result<(), CompletionError>)>,
    /// Whether the peer's disconnect waits to be heard.
    left: bool,
    broken: bool,
}

impl Side {
    fn new(config: Config, receives: u16) -> Self {
        let base = match config.role {
            Client => 0x10_0000_0000,
            Server => 0x20_0000_0001, // odd, because nothing says that a window is aligned
        };
        let addresses = [
            RegionAddress { address: base, rkey: base as u32 + 1 },
            RegionAddress { address: base + (1 << 32), rkey: base as u32 + 2 },
        ];
        Self {
            machine: Connection::new(config, addresses).expect("settings within their bounds"),
            ledger: Ledger::new(config),
            log: Vec::new(),
            arrivals: VecDeque::new(),
            receives: receives.into(),
            rnr_retry: RNR_RETRY_INFINITE,
            handles: true,
            reports: true,
            carries: true,
            wrote: 0,
            read: 0,
            role: config.role,
            regions: [vec![0; config.window as usize], vec![0; config.window as usize]],
            addresses,
            buffer: vec![0; config.send_buffer as usize],
            lent: Vec::new(),
            slots: vec![[0; MESSAGE_LEN]; config.send_depth.into()],
            queue: VecDeque::new(),
            carried: VecDeque::new(),
            completions: VecDeque::new(),
            left: false,
            broken: false,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.machine.state()
    }

    /// The control messages it posted, decoded, oldest first.
    pub(crate) fn messages(&self) -> Vec<Message> {
        let message = |action: &Action| match action {
            Action::Send { message, .. } => {
                Some(Message::decode(message).expect("a message that can be read"))
            }
            _ => None,
        };
        self.log.iter().filter_map(message).collect()
    }

    pub(crate) fn registrations(&self) -> usize {
        self.messages().iter().filter(|message| matches!(message, Message::RegisterXferMemory(_))).count()
    }

    /// Its data requests: bytes, and the immediate of those that have one.
    pub(crate) fn writes(&self) -> Vec<(u32, Option<u32>)> {
        let write = |action: &Action| match action {
            Action::Write { from, immediate, .. } => {
                Some((from.len(), immediate.map(|immediate| immediate.0)))
            }
            _ => None,
        };
        self.log.iter().filter_map(write).collect()
    }

    pub(crate) fn disconnects(&self) -> usize {
        self.log.iter().filter(|action| matches!(action, Action::Disconnect)).count()
    }

    /// Puts up to `bytes` of its stream into the send buffer and says how many.
    pub(crate) fn write(&mut self, bytes: usize) -> usize {
        let mut left = bytes;
        while left > 0 {
            let Span { offset, len } = self.machine.space();
            let count = left.min(len as usize);
            if count == 0 || self.machine.commit(count).is_err() {
                break;
            }
            for place in &mut self.buffer[offset as usize..][..count] {
                *place = stream_byte(self.role, self.wrote);
                self.wrote += 1;
            }
            left -= count;
        }
        bytes - left
    }

    /// Lends up to `bytes` of its stream and says how many.
    pub(crate) fn lend(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.machine.lendable() as usize);
        if self.machine.lend(bytes).is_err() {
            return 0;
        }
        if bytes > 0 {
            self.lent.push((self.wrote..self.wrote + bytes).map(|at| stream_byte(self.role, at)).collect());
        }
        self.wrote += bytes;
        bytes
    }

    /// Reads up to `bytes` of the peer's stream, compares them and says how many.
    pub(crate) fn read(&mut self, bytes: usize) -> usize {
        let mut left = bytes;
        while let Some(readable) = self.machine.readable() {
            let count = left.min(readable.len as usize);
            if count == 0 {
                break;
            }
            for byte in &self.regions[usize::from(readable.region)][readable.offset as usize..][..count] {
                assert_eq!(
                    *byte,
                    stream_byte(peer(self.role), self.read),
                    "byte {} of the stream",
                    self.read
                );
                self.read += 1;
            }
            self.machine.consume(count as u32).expect("what is readable can be consumed");
            left -= count;
        }
        bytes - left
    }

    /// The bytes of an action that was posted when `lent` memories had been lent.
    fn bytes_of(&self, action: &Action, lent: usize) -> Vec<u8> {
        match *action {
            Action::Send { slot, .. } => self.slots[usize::from(slot)].to_vec(),
            Action::Write { from: Source::Buffer(Span { offset, len }), .. } => {
                self.buffer[offset as usize..][..len as usize].to_vec()
            }
            Action::Write { from: Source::Lent(Span { offset, len }), .. } => {
                self.lent[lent - 1][offset as usize..][..len as usize].to_vec()
            }
            Action::Disconnect => Vec::new(),
        }
    }

    fn check_owned(&self, request: &Request) {
        assert_eq!(
            self.bytes_of(&request.action, request.lent),
            request.bytes,
            "changed while it was owned by the device"
        );
    }

    /// What the peer wrote, whatever it is for.
    fn place(&mut self, rkey: u32, address: u64, bytes: &[u8]) {
        let region = self.addresses.iter().position(|region| region.rkey == rkey).expect("a known rkey");
        let offset = (address - self.addresses[region].address) as usize;
        self.regions[region][offset..][..bytes.len()].copy_from_slice(bytes);
    }
}

pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) client: Side,
    pub(crate) server: Side,
}

impl Pair {
    /// Two machines of which none knows yet that they are connected. Each keeps the receives posted that the other expects.
    pub(crate) fn new(client: Config, server: Config) -> Self {
        assert_eq!((client.role, server.role), (Client, Server));
        Self {
            now: at(1000),
            client: Side::new(client, server.peer_receives),
            server: Side::new(server, client.peer_receives),
        }
    }

    /// The same, connected, with windows exchanged and all completions reported.
    pub(crate) fn connected(client: Config, server: Config) -> Self {
        let mut pair = Self::new(client, server);
        pair.establish(Server);
        pair.establish(Client);
        pair.settle();
        pair
    }

    /// With settings in which nothing but the tested rule limits anything.
    pub(crate) fn quiet() -> Self {
        Self::connected(quiet(Config::client()), quiet(Config::server()))
    }

    pub(crate) fn side(&mut self, who: Role) -> &mut Side {
        match who {
            Client => &mut self.client,
            Server => &mut self.server,
        }
    }

    fn both(&mut self, who: Role) -> (&mut Side, &mut Side) {
        match who {
            Client => (&mut self.client, &mut self.server),
            Server => (&mut self.server, &mut self.client),
        }
    }

    pub(crate) fn establish(&mut self, who: Role) {
        let now = self.now;
        let side = self.side(who);
        let rnr_retry = side.rnr_retry;
        side.ledger.established(rnr_retry);
        side.machine.handle_established(now, rnr_retry);
    }

    /// Takes one action of `who` and does it; false if there is none.
    pub(crate) fn post_one(&mut self, who: Role) -> bool {
        let now = self.now;
        let (side, other) = self.both(who);
        let Some(action) = side.machine.poll_action(now) else { return false };
        side.ledger.post(&action);
        side.log.push(action);
        match action {
            Action::Send { slot, message, .. } => side.slots[usize::from(slot)] = message,
            Action::Write { .. } => {}
            Action::Disconnect => {
                // The queue pair goes to the error state; what was not carried is flushed, which nobody waits for.
                side.queue.clear();
                side.broken = true;
                other.left = true;
                return true;
            }
        }
        let lent = side.lent.len();
        let bytes = side.bytes_of(&action, lent);
        side.queue.push_back(Request { action, lent, bytes });
        true
    }

    pub(crate) fn post(&mut self, who: Role) -> usize {
        std::iter::from_fn(|| self.post_one(who).then_some(())).count()
    }

    /// Carries the oldest request of `who` to its peer; false if there is none, or it waits for a receive.
    pub(crate) fn carry(&mut self, who: Role) -> bool {
        let (side, other) = self.both(who);
        if other.broken {
            // Nobody answers; the device would give up long after the disconnect was heard.
            return false;
        }
        let Some(Request { action, .. }) = side.queue.front() else { return false };
        let arrival = match action {
            Action::Send { message, .. } => Some(Arrival::Message(*message)),
            Action::Write { immediate, .. } => immediate.map(|Immediate(bytes)| Arrival::Immediate(bytes)),
            Action::Disconnect => None,
        };
        if arrival.is_some() && other.receives == 0 {
            if side.rnr_retry < RNR_RETRY_INFINITE {
                side.break_down(CompletionStatus::RNR_RETRY_EXC_ERR);
                return true;
            }
            return false;
        }
        let Some(request) = side.queue.pop_front() else { return false };
        side.check_owned(&request);
        if let Action::Write { from, to, .. } = request.action
            && from.len() > 0
        {
            other.place(to.rkey, to.address, &request.bytes);
        }
        if let Some(arrival) = arrival {
            other.receives -= 1;
            other.arrivals.push_back(arrival);
        }
        if let Action::Send { id, signaled: true, .. } | Action::Write { id, signaled: true, .. } =
            request.action
        {
            side.completions.push_back((id, Ok(())));
        }
        side.carried.push_back(request);
        true
    }

    /// The oldest request of `who` is taken by the device of a peer that is not the other side; false if there is none.
    pub(crate) fn carry_away(&mut self, who: Role) -> bool {
        let side = self.side(who);
        let Some(request) = side.queue.pop_front() else { return false };
        if let Action::Send { id, signaled: true, .. } | Action::Write { id, signaled: true, .. } =
            request.action
        {
            side.completions.push_back((id, Ok(())));
        }
        side.carried.push_back(request);
        true
    }

    /// `who` handles the oldest arrival and posts its receive again.
    pub(crate) fn handle(&mut self, who: Role) -> bool {
        let now = self.now;
        let side = self.side(who);
        let Some(arrival) = side.arrivals.pop_front() else { return false };
        match arrival {
            Arrival::Message(bytes) => {
                side.machine.handle_message(now, &bytes);
                match Message::decode(&bytes) {
                    Ok(Message::RegisterXferMemory(window)) => side.ledger.window(window),
                    Ok(Message::GetServerFeature { .. }) if side.role == Client => side.ledger.answer_came(),
                    _ => {}
                }
            }
            Arrival::Immediate(bytes) => {
                side.machine.handle_immediate(now, Immediate(bytes));
                side.ledger.bytes_came();
            }
        }
        side.receives += 1;
        true
    }

    /// The oldest completion of `who` is reported to it.
    pub(crate) fn report(&mut self, who: Role) -> bool {
        let now = self.now;
        let side = self.side(who);
        match side.completions.pop_front() {
            None => false,
            Some((id, Ok(()))) => {
                let count = side.ledger.complete(id);
                for request in side.carried.drain(..count).collect::<Vec<_>>() {
                    side.check_owned(&request);
                }
                side.machine.handle_sent(now, id);
                true
            }
            Some((_, Err(error))) => {
                side.machine.handle_failure(error);
                true
            }
        }
    }

    /// `who` hears of its peer's disconnect, after all that had arrived before (VR-CLOSE-002).
    pub(crate) fn hear_disconnect(&mut self, who: Role) -> bool {
        if !std::mem::take(&mut self.side(who).left) {
            return false;
        }
        while self.handle(who) || self.report(who) {}
        self.side(who).machine.handle_disconnected();
        true
    }

    /// Everything that can happen without the application and without time, within the limits of [`Side::handles`] and its
    /// neighbours; false if nothing could.
    pub(crate) fn settle(&mut self) -> bool {
        let mut ever = false;
        loop {
            let mut moved = false;
            for who in [Client, Server] {
                let (handles, reports, carries) = {
                    let side = self.side(who);
                    (side.handles, side.reports, side.carries)
                };
                moved |= self.post(who) > 0;
                while carries && self.carry(who) {
                    moved = true;
                }
                while reports && self.report(who) {
                    moved = true;
                }
                while handles && self.handle(who) {
                    moved = true;
                }
                moved |= handles && self.hear_disconnect(who);
            }
            if !moved {
                return ever;
            }
            ever = true;
        }
    }

    /// Lets `time` pass, in one step.
    pub(crate) fn advance(&mut self, time: Duration) {
        self.now = self.now.after(time);
        for who in [Client, Server] {
            let now = self.now;
            let machine = &mut self.side(who).machine;
            if machine.next_timeout().is_some_and(|due| due <= now) {
                machine.handle_timeout(now);
                let next = machine.next_timeout();
                assert!(next.is_none_or(|due| due > now), "a time-out that never ends: {next:?} at {now:?}");
            }
        }
    }

    /// Writes `bytes` more from each side in turns with everything else, until both have read all. Time stands still, so
    /// whatever waits for anything but an event never gets on.
    pub(crate) fn finish(&mut self, bytes: [usize; 2]) {
        let mut left = bytes;
        loop {
            let mut moved = self.settle();
            for (who, left) in [Client, Server].into_iter().zip(&mut left) {
                let wrote = self.side(who).write(*left);
                *left -= wrote;
                moved |= wrote > 0 || self.side(who).read(usize::MAX) > 0;
            }
            if !moved {
                break;
            }
        }
        assert_eq!(left, [0, 0], "the rest was never accepted: {self:?}");
        assert_eq!((self.client.wrote, self.server.wrote), (self.server.read, self.client.read), "{self:?}");
    }

    /// Notifications of `who` that its peer has not handled.
    pub(crate) fn unhandled(&mut self, who: Role) -> usize {
        let notifies = |request: &&Request| {
            !matches!(request.action, Action::Write { immediate: None, .. } | Action::Disconnect)
        };
        let (side, other) = self.both(who);
        side.queue.iter().filter(notifies).count() + other.arrivals.len()
    }
}

impl Side {
    /// The queue pair fails: the oldest request with `status`, all others are flushed.
    pub(crate) fn break_down(&mut self, status: CompletionStatus) {
        self.broken = true;
        let mut status = status;
        for request in self.queue.drain(..) {
            if let Action::Send { id, .. } | Action::Write { id, .. } = request.action {
                self.completions.push_back((id, Err(failure(status))));
                status = CompletionStatus::WR_FLUSH_ERR;
            }
        }
    }
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for side in [&self.client, &self.server] {
            writeln!(
                f,
                "\n{:?}: {:?}, wrote {}, read {}, queue {:?}, {} arrivals, {} receives\n{:#?}",
                side.role,
                side.state(),
                side.wrote,
                side.read,
                side.queue,
                side.arrivals.len(),
                side.receives,
                side.machine
            )?;
        }
        Ok(())
    }
}
