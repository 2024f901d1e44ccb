//! Two connections in plain memory, and a fabric that keeps the order of reliable connections.
//!
//! A test says what is posted, carried, handled and reported, or calls [`Pair::settle`] for all. A
//! [`SendQueue`] checks every posted request. Send buffers are checked when bytes are carried and
//! when they have arrived: a device may send twice. Bytes read are compared with those written.

// Not all test binaries use all of it.
#![allow(dead_code)]

mod at_once;
mod send_queue;
mod side;

use std::time::Duration;

use rdma_proto::time::Instant;
use rdma_proto::wire::Message;
use rdma_proto::{Action, Config, Keepalive, Role};
use rdma_proto::{CompletionError, CompletionStatus, Immediate, RNR_RETRY_INFINITE};

pub(crate) use at_once::{handle_immediates, put, take};
pub(crate) use send_queue::SendQueue;
use side::Request;
pub(crate) use side::{Arrival, Side};

pub(crate) use Role::{Client, Server};

pub(crate) fn peer(who: Role) -> Role {
    match who {
        Client => Server,
        Server => Client,
    }
}

/// Its period is long: no two windows look alike.
fn stream_byte(who: Role, position: usize) -> u8 {
    let mixed = (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (who as u64);
    (mixed >> 32) as u8
}

/// Settings that limit nothing but what is tested.
pub(crate) fn quiet(base: Config) -> Config {
    base.keepalive(Some(Keepalive::NONE)).window(64).send_buffer(256)
}

pub(crate) fn at(millis: u64) -> Instant {
    Instant::from_start(Duration::from_millis(millis))
}

pub(crate) fn failure(status: CompletionStatus) -> CompletionError {
    CompletionError { status, vendor: 0 }
}

pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) client: Side,
    pub(crate) server: Side,
}

impl Pair {
    /// Unconnected machines. Each keeps the receives posted that the other expects.
    pub(crate) fn new(client: Config, server: Config) -> Self {
        assert_eq!((client.role, server.role), (Client, Server));
        Self {
            now: at(1000),
            client: Side::new(client, server.peer_receives),
            server: Side::new(server, client.peer_receives),
        }
    }

    /// Connected machines, with windows exchanged and all completions reported.
    pub(crate) fn connected(client: Config, server: Config) -> Self {
        Self::with_retries(client, server, RNR_RETRY_INFINITE)
    }

    /// Connected machines; `rnr_retry` limits the client's retries without a receive.
    pub(crate) fn with_retries(client: Config, server: Config, rnr_retry: u8) -> Self {
        let mut pair = Self::new(client, server);
        pair.client.rnr_retry = rnr_retry;
        pair.establish(Server);
        pair.establish(Client);
        pair.settle();
        pair
    }

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
        side.send_queue.established(rnr_retry);
        side.machine.handle_established(now, rnr_retry);
    }

    /// Returns false if there is none.
    pub(crate) fn post_one(&mut self, who: Role) -> bool {
        let now = self.now;
        let (side, other) = self.both(who);
        let settled = side.machine.is_settled();
        let Some(action) = side.machine.poll_action(|| now) else { return false };
        assert!(!settled, "{action:?} of a machine that had said that nothing is due");
        if let Action::Send { slot, message, .. } = action {
            side.slots[usize::from(slot)] = message;
        }
        side.post(action);
        if action == Action::Disconnect {
            // The queue pair goes to the error state: requests not carried are flushed.
            side.queue.clear();
            side.broken = true;
            other.left = true;
        }
        true
    }

    pub(crate) fn post(&mut self, who: Role) -> usize {
        std::iter::from_fn(|| self.post_one(who).then_some(())).count()
    }

    /// Carries the oldest request of `who`. Returns false if there is none, or it needs a receive.
    pub(crate) fn carry(&mut self, who: Role) -> bool {
        let (side, other) = self.both(who);
        if other.broken {
            // No answer. The device would give up long after the disconnect was seen.
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
        side.complete(request);
        true
    }

    /// Another peer's device takes the oldest request.
    pub(crate) fn carry_away(&mut self, who: Role) -> bool {
        let side = self.side(who);
        let Some(request) = side.queue.pop_front() else { return false };
        side.complete(request);
        true
    }

    /// `who` handles the oldest arrival and reposts its receive.
    pub(crate) fn handle(&mut self, who: Role) -> bool {
        let now = self.now;
        let side = self.side(who);
        let Some(arrival) = side.arrivals.pop_front() else { return false };
        match arrival {
            Arrival::Message(bytes) => {
                side.machine.handle_message(now, &bytes);
                match Message::decode(&bytes) {
                    Ok(Message::RegisterXferMemory(window)) => side.send_queue.window(window),
                    Ok(Message::GetServerFeature { .. }) if side.role == Client => {
                        side.send_queue.answer_came();
                    }
                    _ => {}
                }
            }
            Arrival::Immediate(bytes) => {
                handle_immediates(&mut side.machine, now, &[bytes]);
                side.send_queue.bytes_came();
            }
        }
        side.receives += 1;
        true
    }

    pub(crate) fn report(&mut self, who: Role) -> bool {
        let now = self.now;
        let side = self.side(who);
        match side.completions.pop_front() {
            None => false,
            Some((id, Ok(()))) => {
                let count = side.send_queue.complete(id);
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

    /// Reports the peer's disconnect to `who`, after everything that arrived before (VR-CLOSE-002).
    pub(crate) fn hear_disconnect(&mut self, who: Role) -> bool {
        if !std::mem::take(&mut self.side(who).left) {
            return false;
        }
        while self.handle(who) || self.report(who) {}
        self.side(who).machine.handle_disconnected();
        true
    }

    /// Does all that [`Side::handles`] and its neighbours allow. Returns false if nothing was.
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

    pub(crate) fn trickle(&mut self, who: Role, bytes: usize) {
        for _ in 0..bytes {
            self.side(who).write(1);
            self.settle();
        }
    }

    pub(crate) fn pass(&mut self, step: Duration, times: u64) {
        for _ in 0..times {
            self.advance(step);
            self.settle();
        }
    }

    /// Writes `bytes` more from each side until both have read all. Time stands still.
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

    pub(crate) fn unhandled(&mut self, who: Role) -> usize {
        let notifies = |request: &&Request| {
            !matches!(request.action, Action::Write { immediate: None, .. } | Action::Disconnect)
        };
        let (side, other) = self.both(who);
        side.queue.iter().filter(notifies).count() + other.arrivals.len()
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
