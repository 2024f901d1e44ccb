//! One machine, with a driver, an application and a peer that do anything in any order.

use std::ops::Range;
use std::time::Duration;

use rdma_proto::CompletionStatus;
use rdma_proto::time::Instant;
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_proto::{Action, Config, Error, Keepalive, Machine, RegionAddress, Role, State, TransportError};

use super::Script;
use crate::pair::{SendQueue, at, failure, handle_immediates, put, take};

pub(crate) fn run(input: &[u8]) {
    let mut script = Script::new(input);
    let (config, withholds) = settings(&mut script);
    let mut world = World::new(config, withholds);
    while let Some(step) = script.step() {
        let before = world.machine.state();
        world.step(step, &mut script);
        world.check(before);
    }
    let before = world.machine.state();
    world.drain();
    world.check(before);
}

/// Returns the settings, and whether the first window is withheld.
fn settings(script: &mut Script<'_>) -> (Config, bool) {
    let interval = |script: &mut Script<'_>| {
        let millis = script.byte();
        (millis > 127).then(|| Duration::from_millis(millis.into()))
    };
    let config = Config::client()
        .role(if script.flag() { Role::Client } else { Role::Server })
        .window(script.within(1..=64))
        .windows(script.within(1..=2) as u8)
        .send_buffer(script.within(1..=64))
        .send_depth(script.within(1..=40) as u16)
        .peer_receives(script.within(2..=20) as u16)
        .window_limit(if script.flag() { 100 } else { u32::MAX })
        .features(FeatureSet(script.byte().into()));
    let negotiates = script.byte();
    let config = config
        .negotiate(negotiates % 2 == 1)
        .keepalive(Some(
            Keepalive::NONE.every(interval(script)).probe(interval(script)).limit(interval(script)),
        ))
        .stall_limit(interval(script));
    assert_eq!(config.check(), Ok(()));
    (config, negotiates / 2 % 4 == 1)
}

fn region(rkey: u32) -> RegionAddress {
    RegionAddress { address: u64::from(rkey) << 32, rkey }
}

struct World {
    config: Config,
    machine: Machine,
    /// Whether it has no window yet.
    withheld: bool,
    now: Instant,
    /// `None` after a made-up completion: what is in flight is then unknown.
    send_queue: Option<SendQueue>,
    /// Positions of the bytes that were lent.
    loans: Vec<Range<u64>>,
    disconnects: u32,
    closed: bool,
    noted: Option<Instant>,
}

impl World {
    fn new(config: Config, withheld: bool) -> Self {
        let mut machine = Machine::new(config, [1, 2].map(region)).expect("settings within their bounds");
        if withheld {
            machine.withhold_window();
        }
        Self {
            config,
            machine,
            withheld,
            now: at(1),
            send_queue: Some(SendQueue::new(config)),
            loans: Vec::new(),
            disconnects: 0,
            closed: false,
            noted: None,
        }
    }

    fn step(&mut self, step: u8, script: &mut Script<'_>) {
        match step % 22 {
            _ if step >= 250 => {
                let length = script.within(1..=64);
                self.machine.open_window(region(3), length, length);
                // It is without effect on a machine that has a window.
                if std::mem::take(&mut self.withheld) {
                    self.config.window = length;
                }
            }
            0 => {
                let rnr_retry = script.byte() % 8;
                if self.machine.state() == State::Connecting
                    && let Some(send_queue) = &mut self.send_queue
                {
                    send_queue.established(rnr_retry);
                }
                self.machine.handle_established(self.now, rnr_retry);
            }
            1 => self.message(Message::Keepalive),
            2 => {
                let (select, features) = (script.byte().into(), FeatureSet(script.byte().into()));
                self.message(Message::GetServerFeature { select, features });
            }
            3 => {
                let (select, features) = (script.byte().into(), FeatureSet(script.byte().into()));
                self.message(Message::SetClientFeature { select, features });
            }
            4 | 5 => {
                let address = u64::from(script.number());
                let window = Window { address, length: script.within(1..=100), rkey: script.byte().into() };
                self.message(Message::RegisterXferMemory(window));
            }
            6 => {
                let window = Window {
                    address: u64::from_be_bytes(script.bytes()),
                    length: script.number(),
                    rkey: script.number(),
                };
                self.message(Message::RegisterXferMemory(window));
            }
            7 => {
                let bytes: [u8; 40] = script.bytes();
                let length = usize::from(script.byte()) % 41;
                if length != 32 {
                    self.machine.handle_message(self.now, &bytes[..length]);
                }
            }
            8 => {
                let immediate = script.byte().into();
                self.immediates(&[immediate]);
            }
            9 => {
                let immediates = [script.byte(), script.byte() / 16, script.byte() / 16].map(u32::from);
                self.immediates(&immediates);
            }
            10 => {
                let immediate = script.number();
                self.immediates(&[immediate]);
            }
            11 => {
                if let Some(send_queue) = &mut self.send_queue {
                    let skip = usize::from(script.byte()) % 3;
                    let due: Vec<u64> = send_queue.signaled().take(skip + 1).collect();
                    if let Some(id) = due.last() {
                        send_queue.complete(*id);
                        self.machine.handle_sent(self.now, *id);
                    }
                }
            }
            12 => match script.byte() {
                0..8 => {
                    self.machine.handle_sent(self.now, u64::from_be_bytes(script.bytes()));
                    self.send_queue = None;
                }
                8..16 => self.machine.handle_refusal("a call"),
                16..24 => self.machine.handle_disconnected(),
                24..64 => {
                    self.machine.handle_failure(failure(CompletionStatus(u32::from(script.byte()) % 24)));
                }
                _ => self.drain(),
            },
            13 => {
                self.now = self.now.after(Duration::from_millis(script.byte().into()));
                self.machine.handle_timeout(self.now);
                let next = self.machine.next_timeout();
                assert!(next.is_none_or(|due| due > self.now), "a time-out that never ends");
            }
            14 => {
                let bytes = usize::from(script.byte());
                let (open, before) = (self.is_open(), self.machine.unconfirmed());
                let taken = put(&mut self.machine, self.now, bytes).map_or(0, |place| place.len);
                assert!(open || taken == 0);
                assert_eq!(self.machine.unconfirmed(), before + u64::from(taken));
            }
            15 => {
                let space = self.machine.space().len as usize;
                let bytes = usize::from(script.byte()) % (space + 1);
                let accepted = self.machine.commit(bytes);
                let open = self.is_open();
                assert_eq!(accepted.is_ok(), open);
            }
            16 => {
                let bytes = script.number() as usize;
                let fits = bytes <= self.machine.space().len as usize;
                assert!(self.machine.commit(bytes).is_err() || fits);
            }
            17 => {
                let readable = self.machine.readable().map_or(0, |readable| readable.len);
                let bytes = script.byte();
                match bytes % 2 {
                    0 => assert_eq!(self.machine.consume(bytes.into()).is_ok(), u32::from(bytes) <= readable),
                    _ => _ = take(&mut self.machine, bytes.into()),
                }
            }
            18 => match script.byte() {
                0..32 => {
                    self.machine.close(self.now, Duration::from_millis(script.byte().into()));
                    self.closed = true;
                }
                32..64 => self.machine.confirm(),
                _ => _ = self.post(),
            },
            19 => {
                let bytes = usize::from(script.byte());
                let open = self.is_open();
                let fits = bytes <= self.machine.lendable() as usize;
                assert_eq!(self.machine.lend(bytes).is_ok(), open && fits);
                if open && fits {
                    let end = self.machine.confirmed() + self.machine.unconfirmed();
                    self.loans.push(end - bytes as u64..end);
                }
            }
            20 => {
                let length = script.within(1..=64);
                if self.machine.can_replace_send_buffer(length) {
                    self.machine.replace_send_buffer(length);
                    self.config.send_buffer = length;
                    if let Some(send_queue) = &mut self.send_queue {
                        send_queue.replace_send_buffer(length);
                    }
                }
            }
            _ => self.drain(),
        }
    }

    // One that was closed before it was established takes no more.
    fn is_open(&self) -> bool {
        matches!(self.machine.state(), State::Connecting | State::Open) && !self.closed
    }

    fn message(&mut self, message: Message) {
        let windows = self.machine.counters().windows_received;
        self.machine.handle_message(self.now, &message.encode());
        let Some(send_queue) = &mut self.send_queue else { return };
        match message {
            Message::RegisterXferMemory(window) if self.machine.counters().windows_received > windows => {
                assert_eq!(send_queue.room(), 0, "a window replaced before it was full");
                assert!(window.length > 0 && window.length <= self.config.window_limit);
                send_queue.window(window);
            }
            Message::GetServerFeature { .. } if self.config.role == Role::Client => send_queue.answer_came(),
            _ => {}
        }
    }

    fn immediates(&mut self, immediates: &[u32]) {
        handle_immediates(&mut self.machine, self.now, immediates);
        if let (Some(send_queue), true) = (&mut self.send_queue, immediates.iter().any(|bytes| *bytes > 0)) {
            send_queue.bytes_came();
        }
    }

    fn post(&mut self) -> bool {
        let settled = self.machine.is_settled();
        let Some(action) = self.machine.poll_action(|| self.now) else {
            self.check_wake_up();
            return false;
        };
        assert!(!settled, "{action:?} of a machine that had said that nothing is due");
        assert_eq!(self.disconnects, 0, "{action:?} after Disconnect");
        if let Some(send_queue) = &mut self.send_queue {
            send_queue.post(&action);
        }
        if let Action::Send { message, .. } = &action
            && matches!(Message::decode(message), Ok(Message::RegisterXferMemory(_)))
        {
            assert!(!self.withheld, "a window is announced that there is not");
        }
        if action == Action::Disconnect {
            self.disconnects += 1;
        }
        true
    }

    fn drain(&mut self) {
        while self.post() {}
    }

    /// With nothing left to do, a completion, an answer, a window or time will end every wait.
    fn check_wake_up(&self) {
        let Some(send_queue) = &self.send_queue else { return };
        let (machine, state) = (&self.machine, self.machine.state());
        if !matches!(state, State::Open | State::Closing) {
            return;
        }
        let woken =
            send_queue.awaits_completion() || (send_queue.awaits_answer() && !send_queue.is_patient());
        if machine.unposted() > 0 && send_queue.room() > 0 {
            assert!(woken, "data waits for nothing: {machine:#?}");
        }
        if (machine.space().len == 0 || machine.lendable() == 0) && machine.unposted() == 0 {
            assert!(send_queue.awaits_completion(), "the application waits for nothing: {machine:#?}");
        }
        if state == State::Closing {
            assert!(machine.unconfirmed() > 0, "nothing is left to wait for: {machine:#?}");
            assert!(
                machine.unposted() > 0 || send_queue.awaits_completion(),
                "the close waits for nothing: {machine:#?}"
            );
            assert!(machine.next_timeout().is_some());
        }
    }

    fn check(&mut self, before: State) {
        // Drivers record it only when it may have come nearer: never later than the real time.
        if self.machine.take_sooner() {
            self.noted = self.machine.next_timeout();
        }
        let (noted, next) = (self.noted, self.machine.next_timeout());
        assert!(
            next.is_none_or(|next| noted.is_some_and(|noted| noted <= next)),
            "{next:?} before {noted:?}"
        );
        let (config, machine, state) = (&self.config, &self.machine, self.machine.state());
        let flushed = |error| {
            matches!(error, Error::Transport(TransportError::Completion(first))
                if first.status == CompletionStatus::WR_FLUSH_ERR)
        };
        match before {
            State::Failed(error) if flushed(error) => assert!(matches!(state, State::Failed(_))),
            State::Closed | State::Failed(_) => assert_eq!(state, before, "the end is the end"),
            State::Closing => assert!(!matches!(state, State::Connecting | State::Open)),
            State::Open => assert_ne!(state, State::Connecting),
            State::Connecting => {}
        }
        let leaving = state == State::Connecting && self.closed;
        let running = leaving || matches!(state, State::Open | State::Closing);
        assert!(running || machine.next_timeout().is_none(), "a time-out in {state:?}");
        let counters = machine.counters();
        assert!(counters.most_in_flight <= config.peer_receives.into());
        assert!(machine.unposted() <= machine.unconfirmed());
        assert!(machine.unconfirmed() < 1 << 31, "more than the bits of an id can tell apart");
        assert_eq!(machine.bytes_received(), counters.bytes_received);
        assert_eq!(machine.has_ended(), matches!(state, State::Closed | State::Failed(_)));
        assert_eq!(machine.takes_bytes(), self.is_open());
        assert!(!leaving || machine.unconfirmed() > 0, "nothing is left to be delivered");
        let space = machine.space();
        assert_eq!(machine.has_space(), space.len > 0);
        let lent = |loan: &Range<u64>| loan.end.saturating_sub(loan.start.max(machine.confirmed()));
        let lent = self.loans.iter().map(lent).sum::<u64>();
        let taken = machine.unconfirmed() - lent + u64::from(space.len);
        assert!(space.len == 0 || taken <= config.send_buffer.into(), "space that is still in use");
        assert!(space.offset + space.len <= config.send_buffer);
        if self.withheld {
            assert_eq!(machine.unread(), 0, "it has no window");
        }
        assert!(machine.unread() <= u64::from(config.window) * u64::from(config.windows));
        if let Some(readable) = machine.readable() {
            assert!(readable.len > 0 && readable.region < config.windows);
            assert!(readable.offset + readable.len <= config.window);
        }
        if let Some(send_queue) = &self.send_queue {
            assert_eq!(send_queue.has_ended(), self.disconnects == 1);
        }
    }
}
