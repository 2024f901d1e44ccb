//! Two connection machines, and between them a channel that keeps the order of connections.
//!
//! A step is the smallest event on one side: its application writes or reads a byte, hands memory
//! over for landing or takes it back; its machine is asked for an action; its device carries a
//! request; an arrival is handled and its receive posted again; a completion is reported. Every
//! order that drivers, devices and applications can produce is an order of these steps. Bytes are
//! read from the send buffer when carried, and compared again at the completion. Time stands still.

use std::collections::VecDeque;
use std::time::Duration;

use rdma_proto::time::Instant;
use rdma_proto::wire::Message;
use rdma_proto::{Action, Config, Machine, Readable, RegionAddress, Role, Source, Span, State};
use rdma_proto::{Immediate, RNR_RETRY_INFINITE};

use super::Defect;
use super::search::Model;

/// A setting, explored completely.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub client: Config,
    pub server: Config,
    /// Bytes that the client and the server write, at most 255.
    pub bytes: [u8; 2],
    /// Bytes of memory for the server's windows (VR-MEM-018), handed over twice at most.
    pub lands: u32,
    /// Whether the server allows no retries, as Valkey's does: each notification needs a receive.
    pub fatal: bool,
    /// The side that closes, once it has written and read everything.
    pub closes: Option<Role>,
    pub defect: Option<Defect>,
}

#[derive(Clone, Hash)]
pub struct World {
    client: Side,
    server: Side,
}

#[derive(Clone, Hash)]
struct Side {
    machine: Machine,
    established: bool,
    closed: bool,
    buffer: Vec<u8>,
    /// The receive regions and the application's memory. Zero: read, or not written.
    regions: [Vec<u8>; 3],
    /// How often that memory was handed over.
    landings: u8,
    /// How many bytes had been read when it was last handed over.
    landed_from: u8,
    /// Whether it was taken back the last time.
    gave_up: bool,
    /// Bytes written and read by the application. A byte's value is its position, from 1.
    wrote: u8,
    read: u8,
    /// Requests posted and not carried yet.
    queue: VecDeque<Action>,
    /// Carried requests, with their bytes, whose completion was not reported yet.
    carried: VecDeque<(Action, Vec<u8>)>,
    completions: VecDeque<u64>,
    receives: u16,
    arrivals: VecDeque<Arrival>,
    /// Its queue pair is in the error state, because it has disconnected.
    broken: bool,
    /// Its peer has disconnected, and it has not noticed.
    left: bool,
    /// Registrations carried: defects affect one of them.
    registrations: u8,
}

#[derive(Clone, Copy, Hash)]
enum Arrival {
    Message(Message),
    Immediate(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Establish,
    Write,
    Read,
    Land,
    GiveUp,
    Post,
    Carry,
    Handle,
    Report,
    Close,
    Hear,
}

const KINDS: [Kind; 11] = [
    Kind::Establish,
    Kind::Write,
    Kind::Read,
    Kind::Land,
    Kind::GiveUp,
    Kind::Post,
    Kind::Carry,
    Kind::Handle,
    Kind::Report,
    Kind::Close,
    Kind::Hear,
];

const NOW: Instant = Instant::from_start(Duration::from_secs(1));

const fn region(number: u8) -> RegionAddress {
    RegionAddress { address: 0x1000 * (number as u64 + 1), rkey: number as u32 + 1 }
}

fn decode(step: u8) -> (Role, Kind) {
    let role = if step.is_multiple_of(2) { Role::Client } else { Role::Server };
    (role, KINDS[usize::from(step / 2)])
}

fn must(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

impl Model for Scenario {
    type State = World;

    fn start(&self) -> World {
        let forgetful = self.defect == Some(Defect::ReceiveForgotten);
        World {
            client: Side::new(self.client, self.server.peer_receives, 0, forgetful),
            server: Side::new(self.server, self.client.peer_receives, self.lands, forgetful),
        }
    }

    fn steps(&self) -> u8 {
        2 * KINDS.len() as u8
    }

    fn take(&self, state: &World, step: u8) -> Option<Result<World, String>> {
        let (role, kind) = decode(step);
        if !self.is_possible(state, role, kind) {
            return None;
        }
        let mut world = state.clone();
        match self.act(&mut world, role, kind) {
            Ok(true) => Some(world.check().map(|()| world)),
            Ok(false) => None,
            Err(what) => Some(Err(what)),
        }
    }

    fn is_goal(&self, World { client, server }: &World) -> bool {
        let [from_client, from_server] = self.bytes;
        let arrived = (client.read, server.read) == (from_server, from_client);
        let written = (client.wrote, server.wrote) == (from_client, from_server);
        let closed = |side: &Side| side.machine.state() == State::Closed;
        arrived && written && (self.closes.is_none() || closed(client) && closed(server))
    }

    fn describe(&self, step: u8) -> String {
        let (role, kind) = decode(step);
        format!("{role:?}: {kind:?}")
    }
}

impl Scenario {
    const fn quota(&self, role: Role) -> (u8, u8) {
        let [client, server] = self.bytes;
        match role {
            Role::Client => (client, server),
            Role::Server => (server, client),
        }
    }

    fn is_possible(&self, world: &World, role: Role, kind: Kind) -> bool {
        let (side, other) = world.sides(role);
        let (quota, expected) = self.quota(role);
        let finished = side.wrote == quota && side.read == expected;
        match kind {
            // The passive side is established once the active side has read that it is.
            Kind::Establish => !side.established && (role == Role::Client || other.established),
            Kind::Write => {
                side.wrote < quota
                    && side.machine.space().len > 0
                    && matches!(side.machine.state(), State::Connecting | State::Open)
            }
            Kind::Read => side.machine.readable().is_some(),
            // Bytes that were not read.
            Kind::Land => {
                !side.memory().is_empty()
                    && side.landings < 2
                    && side.read < expected
                    && !side.machine.is_landing()
                    && matches!(side.machine.state(), State::Connecting | State::Open)
            }
            Kind::GiveUp => side.machine.is_landing() && !side.gave_up,
            Kind::Post => !side.broken,
            Kind::Carry => {
                let takes = side.queue.front().is_some_and(notifies);
                !side.queue.is_empty()
                    && !other.broken
                    && (!takes || other.receives > 0 || self.fatal && role == Role::Client)
            }
            Kind::Handle => !side.arrivals.is_empty() && !side.broken,
            Kind::Report => !side.completions.is_empty() && !side.broken,
            Kind::Close => {
                self.closes == Some(role) && !side.closed && finished && side.machine.state() == State::Open
            }
            // Everything that had arrived is handled first (VR-CLOSE-002).
            Kind::Hear => side.left && side.arrivals.is_empty() && side.completions.is_empty(),
        }
    }

    /// Takes a step. Returns false if nothing changed.
    fn act(&self, world: &mut World, role: Role, kind: Kind) -> Result<bool, String> {
        let defect = self.defect;
        let (side, other) = world.sides_mut(role);
        match kind {
            Kind::Establish => {
                let retries = if self.fatal && role == Role::Client { 0 } else { RNR_RETRY_INFINITE };
                side.established = true;
                side.machine.handle_established(NOW, retries);
            }
            Kind::Write => side.write(defect)?,
            Kind::Read => side.read()?,
            Kind::Land => side.take_memory()?,
            Kind::GiveUp => {
                side.machine.stop_landing();
                side.gave_up = true;
            }
            Kind::Post => return side.post(other, defect),
            Kind::Carry => side.carry(other, defect)?,
            Kind::Handle => side.handle(defect),
            Kind::Report => side.report(defect)?,
            Kind::Close => {
                side.closed = true;
                side.machine.close(NOW, Duration::from_secs(3600));
            }
            Kind::Hear => {
                side.left = false;
                side.machine.handle_disconnected();
            }
        }
        Ok(true)
    }
}

fn notifies(action: &Action) -> bool {
    matches!(action, Action::Send { .. } | Action::Write { immediate: Some(_), .. })
}

impl World {
    const fn sides(&self, role: Role) -> (&Side, &Side) {
        match role {
            Role::Client => (&self.client, &self.server),
            Role::Server => (&self.server, &self.client),
        }
    }

    const fn sides_mut(&mut self, role: Role) -> (&mut Side, &mut Side) {
        match role {
            Role::Client => (&mut self.client, &mut self.server),
            Role::Server => (&mut self.server, &mut self.client),
        }
    }

    fn check(&self) -> Result<(), String> {
        for side in [&self.client, &self.server] {
            if let State::Failed(error) = side.machine.state() {
                return Err(format!("a machine failed: {error}"));
            }
        }
        Ok(())
    }
}

impl Side {
    fn new(config: Config, receives: u16, lands: u32, forgetful: bool) -> Self {
        let window = vec![0; config.window as usize];
        Self {
            machine: Machine::new(config, [region(0), region(1)]).expect("a scenario's settings are valid"),
            established: false,
            closed: false,
            buffer: vec![0; config.send_buffer as usize],
            regions: [window.clone(), window, vec![0; lands as usize]],
            landings: 0,
            landed_from: 0,
            gave_up: false,
            wrote: 0,
            read: 0,
            queue: VecDeque::new(),
            carried: VecDeque::new(),
            completions: VecDeque::new(),
            receives: if forgetful { receives.saturating_sub(1) } else { receives },
            arrivals: VecDeque::new(),
            broken: false,
            left: false,
            registrations: 0,
        }
    }

    fn write(&mut self, defect: Option<Defect>) -> Result<(), String> {
        let at = self.machine.space().offset;
        let owned = |(action, _): &(Action, Vec<u8>)| overlaps(action, at);
        let in_use = self.queue.iter().any(|action| overlaps(action, at)) || self.carried.iter().any(owned);
        must(!in_use, || format!("byte {at} of the send buffer is given out while the device owns it"))?;
        self.wrote += 1;
        self.buffer[at as usize] = self.wrote;
        self.machine.commit(1).map_err(|error| error.to_string())?;
        if defect == Some(Defect::BufferReused) && self.wrote > 1 {
            // The byte before counts as completed.
            let before = (at as usize + self.buffer.len() - 1) % self.buffer.len();
            self.buffer[before] = self.wrote;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), String> {
        let Some(readable) = self.machine.readable() else { return Ok(()) };
        let byte = &mut self.regions[usize::from(readable.region)][readable.offset as usize];
        let (found, due) = (std::mem::take(byte), self.read + 1);
        must(found == due, || format!("byte {due} reads as {found}"))?;
        if readable.region == Readable::LANDED {
            let place = u32::from(self.read.wrapping_sub(self.landed_from));
            let offset = readable.offset;
            must(offset == place, || format!("byte {due} landed at {offset}, not at {place}"))?;
        }
        self.read = due;
        self.machine.consume(1).map_err(|error| error.to_string())
    }

    fn memory(&self) -> &[u8] {
        &self.regions[usize::from(Readable::LANDED)]
    }

    fn take_memory(&mut self) -> Result<(), String> {
        let empty = self.memory().iter().all(|byte| *byte == 0);
        must(empty, || "memory is the application's again with bytes in it that it has not read".into())?;
        let (memory, len) = (region(Readable::LANDED), self.memory().len() as u32);
        self.machine.land(memory, len).map_err(|error| error.to_string())?;
        self.landings += 1;
        self.landed_from = self.read;
        self.gave_up = false;
        Ok(())
    }

    /// Posts the machine's next action. If there is none, nothing has happened.
    fn post(&mut self, other: &mut Self, defect: Option<Defect>) -> Result<bool, String> {
        let Some(mut action) = self.machine.poll_action(|| NOW) else { return Ok(false) };
        match &mut action {
            Action::Disconnect => {
                self.broken = true;
                self.queue.clear();
                self.arrivals.clear();
                self.completions.clear();
                other.left = true;
                return Ok(true);
            }
            Action::Write { from, immediate: Some(immediate), .. } => {
                if defect == Some(Defect::NoticeTooLong) && from.len() > 1 {
                    immediate.0 += 1;
                }
            }
            Action::Send { slot, .. } => {
                let slot = *slot;
                let same =
                    |action: &Action| matches!(action, Action::Send { slot: other, .. } if *other == slot);
                let taken =
                    self.queue.iter().any(same) || self.carried.iter().any(|(action, _)| same(action));
                must(!taken, || format!("message slot {slot} is given out while the device owns it"))?;
            }
            Action::Write { .. } => {}
        }
        self.queue.push_back(action);
        let depth = usize::from(self.machine.config().send_depth);
        let posted = self.queue.len() + self.carried.len();
        must(posted <= depth, || format!("{posted} requests in a send queue for {depth}"))?;
        Ok(true)
    }

    fn carry(&mut self, other: &mut Self, defect: Option<Defect>) -> Result<(), String> {
        let Some(action) = self.queue.pop_front() else { return Ok(()) };
        if notifies(&action) {
            must(other.receives > 0, || "a notification without a receive, and no retries".into())?;
        }
        let mut bytes = Vec::new();
        let signaled = match action {
            Action::Send { id, signaled, message, .. } => {
                let message = Message::decode(&message).map_err(|error| error.to_string())?;
                if matches!(message, Message::RegisterXferMemory(_)) {
                    self.registrations += 1;
                }
                match defect {
                    Some(Defect::RegistrationLost) if self.registrations == 2 => self.registrations += 1,
                    Some(Defect::RegistrationTwice) if self.registrations == 1 => {
                        other.receives -= 1;
                        other.arrivals.extend([Arrival::Message(message); 2]);
                    }
                    _ => {
                        other.receives -= 1;
                        other.arrivals.push_back(Arrival::Message(message));
                    }
                }
                signaled.then_some(id)
            }
            Action::Write { id, signaled, from, to, immediate } => {
                let Span { offset, len } = span(from)?;
                bytes = self.buffer[offset as usize..][..len as usize].to_vec();
                other.land(to.rkey, to.address, &bytes, defect)?;
                if let Some(Immediate(count)) = immediate {
                    other.receives -= 1;
                    other.arrivals.push_back(Arrival::Immediate(count));
                }
                signaled.then_some(id)
            }
            Action::Disconnect => None,
        };
        self.carried.push_back((action, bytes));
        if let Some(id) = signaled
            && defect != Some(Defect::CompletionLost)
        {
            self.completions.push_back(id);
        }
        Ok(())
    }

    fn land(&mut self, rkey: u32, address: u64, bytes: &[u8], defect: Option<Defect>) -> Result<(), String> {
        if bytes.is_empty() {
            return Ok(());
        }
        let number = rkey.wrapping_sub(1);
        // The driver keeps the application's memory until the machine releases it (VR-MEM-019).
        let kept = self.machine.is_landing() && !(self.gave_up && defect == Some(Defect::MemoryLetGo));
        must(number != u32::from(Readable::LANDED) || kept, || "a WRITE into memory that was let go".into())?;
        let target = self.regions.get_mut(number as usize).ok_or("a WRITE with an unknown key")?;
        let start = address.wrapping_sub(region(number as u8).address) as usize;
        let end = start.saturating_add(bytes.len());
        let window = target.get_mut(start..end).ok_or("a WRITE outside the window")?;
        must(window.iter().all(|byte| *byte == 0), || "a WRITE over bytes that were not read".into())?;
        window.copy_from_slice(bytes);
        Ok(())
    }

    fn handle(&mut self, defect: Option<Defect>) {
        match self.arrivals.pop_front() {
            Some(Arrival::Message(message)) => self.machine.handle_message(NOW, &message.encode()),
            Some(Arrival::Immediate(count)) => self.machine.handle_immediate(NOW, Immediate(count)),
            None => return,
        }
        let keeps = defect == Some(Defect::ReceivesDwindle);
        self.receives += u16::from(!keeps);
    }

    fn report(&mut self, defect: Option<Defect>) -> Result<(), String> {
        let Some(id) = self.completions.pop_front() else { return Ok(()) };
        let mut found = false;
        while let Some((action, bytes)) = self.carried.pop_front() {
            if let Action::Write { from, .. } = action {
                let Span { offset, len } = span(from)?;
                let now = &self.buffer[offset as usize..][..len as usize];
                must(now == bytes, || "the send buffer changed while the device owned it".into())?;
            }
            if let Action::Send { id: this, .. } | Action::Write { id: this, .. } = action
                && this == id
            {
                found = true;
                break;
            }
        }
        must(found, || "a request completes twice".into())?;
        if defect != Some(Defect::CompletionUnreported) {
            self.machine.handle_sent(NOW, id);
        }
        Ok(())
    }
}

/// Returns a part of the send buffer: nothing is lent here.
fn span(from: Source) -> Result<Span, String> {
    match from {
        Source::Buffer(span) => Ok(span),
        Source::Lent(_) => Err("a WRITE of bytes that were not lent".into()),
    }
}

fn overlaps(action: &Action, at: u32) -> bool {
    matches!(action, Action::Write { from: Source::Buffer(Span { offset, len }), .. } if (*offset..offset + len).contains(&at))
}
