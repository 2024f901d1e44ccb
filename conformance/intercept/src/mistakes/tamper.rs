//! Applies a mistake to the sends and to the incoming messages of one queue pair.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rdma_backend::memory::SharedMemory;
use rdma_backend::{Immediate, RemoteAddress, SendOp};
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Window};

use super::{Conduct, Mistake, Variant};

type Bytes = [u8; MESSAGE_LEN];

pub(super) struct OutgoingSend {
    pub(super) op: SendOp,
    pub(super) offset: usize,
    pub(super) len: usize,
    /// Messages to send after it; an empty one stands for an immediate of zero.
    pub(super) behind: Vec<Vec<u8>>,
}

impl OutgoingSend {
    pub(super) fn empty_immediate(&self) -> bool {
        self.behind.iter().any(Vec::is_empty)
    }

    /// Replaces it by a send without effect.
    fn vanish(&mut self) {
        self.op = SendOp::Write(RemoteAddress { address: 0, rkey: 0 });
        self.len = 0;
    }
}

pub(super) const fn zero(op: SendOp) -> SendOp {
    match op {
        SendOp::WriteImmediate(to, _) => SendOp::WriteImmediate(to, Immediate(0)),
        other => other,
    }
}

pub(super) struct IncomingMessage {
    pub(super) bytes: Bytes,
    pub(super) len: u32,
    pub(super) immediate: Option<Immediate>,
    /// Payload to report in its place.
    pub(super) payload: Option<Immediate>,
}

/// The state of a queue pair that mistakes depend on.
pub(super) struct Tamper {
    mistake: Option<Mistake>,
    variant: Option<Variant>,
    pub(super) has_heard: bool,
    /// The program has said that it is idle, and has sent nothing since.
    pub(super) is_idle: bool,
    /// The peer's first window and its latest.
    windows: Option<(Window, Window)>,
    /// Bytes written into the latest.
    used: u32,
    /// Its own registrations so far, and the last.
    registered: u32,
    registration: Option<Bytes>,
    /// Bytes that arrived in the last.
    heard: u32,
    /// Bytes notified so far, and whether there were any since the last keepalive.
    told: u32,
    has_told: bool,
    /// Received questions for features, and the bits of the last.
    asked: u32,
    bits: FeatureSet,
    /// Since when it waits for a window.
    waiting: Instant,
    done: bool,
    /// Notifications of payload so far, and whether the variant added each open question.
    tellings: u32,
    questions: VecDeque<bool>,
}

/// One notification in this many is followed by a question for features.
const ASKING: u32 = 16;

/// A message with an undefined opcode, which replaces one that the side must refuse.
const REFUSED: Bytes = {
    let mut bytes = [0; MESSAGE_LEN];
    bytes[0] = 0x7f;
    bytes
};

impl Tamper {
    pub(super) fn new(Conduct { mistake, variant }: Conduct) -> Self {
        Self {
            mistake,
            variant,
            has_heard: false,
            is_idle: false,
            windows: None,
            used: 0,
            registered: 0,
            registration: None,
            heard: 0,
            told: 0,
            has_told: false,
            asked: 0,
            bits: FeatureSet::NONE,
            waiting: Instant::now(),
            done: false,
            tellings: 0,
            questions: VecDeque::new(),
        }
    }

    const fn once(&mut self) -> bool {
        !std::mem::replace(&mut self.done, true)
    }

    pub(super) fn send(&mut self, send: &mut OutgoingSend, memory: &SharedMemory<'_>) {
        match send.op {
            SendOp::Send | SendOp::SendImmediate(_) => self.message(send, memory),
            SendOp::Write(to) => {
                send.op = SendOp::Write(self.place(to, send.len));
                self.payload(send, memory);
            }
            SendOp::WriteImmediate(to, Immediate(count)) => {
                let to = self.place(to, send.len);
                let count = match self.mistake {
                    Some(Mistake::LittleEndianImmediates) => count.swap_bytes(),
                    Some(Mistake::OneTooMany) => count + 1,
                    Some(Mistake::SumsWrap) if self.told > 0 => self.told.wrapping_neg(),
                    _ => count,
                };
                self.told = self.told.wrapping_add(count);
                self.has_told = true;
                send.op = match self.mistake {
                    Some(Mistake::NoImmediates) => SendOp::Write(to),
                    Some(Mistake::PayloadBySend) if send.len <= MESSAGE_LEN => SendOp::Send,
                    _ => SendOp::WriteImmediate(to, Immediate(count)),
                };
                self.payload(send, memory);
                if self.variant == Some(Variant::AsksAgain) && self.tellings.is_multiple_of(ASKING) {
                    let question = Message::GetServerFeature { select: 0, features: FeatureSet::NONE };
                    send.behind.push(question.encode().into());
                    self.questions.push_back(true);
                }
                self.tellings += 1;
            }
            SendOp::Read(_) => {}
        }
    }

    fn place(&mut self, to: RemoteAddress, len: usize) -> RemoteAddress {
        let Some((first, latest)) = self.windows.filter(|_| len > 0) else { return to };
        match self.mistake {
            Some(Mistake::Shifted) => RemoteAddress { address: to.address + 1, ..to },
            Some(Mistake::FirstWindowForEver) => RemoteAddress {
                address: first.address.wrapping_add(to.address.wrapping_sub(latest.address)),
                rkey: first.rkey,
            },
            _ => to,
        }
    }

    fn payload(&mut self, send: &mut OutgoingSend, memory: &SharedMemory<'_>) {
        self.used += u32::try_from(send.len).unwrap_or_default();
        match self.mistake {
            Some(Mistake::IdleWithoutReceives) => {
                const IDLE: &[u8] = b"ECHO\r\n$4\r\nidle\r\n";
                let mut bytes = vec![0; send.len.min(64)];
                self.is_idle = memory.read(send.offset, &mut bytes) && bytes.ends_with(IDLE);
            }
            Some(Mistake::WritesBehind) if send.len > 0 => send.len += 1,
            Some(Mistake::ZeroBehindEach) => send.behind.push(Vec::new()),
            Some(Mistake::FlippedByte) if send.len > 4000 => {
                let (mut byte, at) = ([0], send.offset + send.len / 2);
                if memory.read(at, &mut byte) {
                    let flipped = memory.write(at, &[byte[0] ^ 1]);
                    debug_assert!(flipped, "it was read there");
                }
            }
            _ => {}
        }
    }

    fn message(&mut self, send: &mut OutgoingSend, memory: &SharedMemory<'_>) {
        let mut bytes = [0; MESSAGE_LEN];
        if send.len != MESSAGE_LEN || !memory.read(send.offset, &mut bytes) {
            return;
        }
        let Ok(message) = Message::decode(&bytes) else { return };
        if let Message::GetServerFeature { .. } = message {
            self.questions.push_back(false);
        }
        let mut becomes = message;
        match (self.mistake, message) {
            (Some(Mistake::ShortMessages), _) => send.len -= 1,
            (Some(Mistake::LittleEndianFields), Message::RegisterXferMemory(window)) => {
                becomes = Message::RegisterXferMemory(Window {
                    address: window.address.swap_bytes(),
                    length: window.length.swap_bytes(),
                    rkey: window.rkey.swap_bytes(),
                });
            }
            (Some(Mistake::ReservedSet), Message::RegisterXferMemory(_)) => {
                let set = memory.write(send.offset + 4, &[0xff; 8]);
                debug_assert!(set, "inside the message");
                return;
            }
            (Some(Mistake::KeepalivesWhenIdle), Message::Keepalive) if std::mem::take(&mut self.has_told) => {
                send.vanish();
            }
            (Some(Mistake::NeverRegisters), Message::RegisterXferMemory(_)) => send.vanish(),
            (Some(Mistake::RegistersOnce), Message::RegisterXferMemory(_)) if self.registered > 0 => {
                send.vanish();
            }
            (Some(Mistake::ShrinkingWindows), Message::RegisterXferMemory(window)) => {
                let length = window.length - self.registered.min(window.length - 1);
                becomes = Message::RegisterXferMemory(Window { length, ..window });
            }
            (Some(Mistake::SelectForgotten), Message::GetServerFeature { features, .. }) => {
                becomes = Message::GetServerFeature { select: 0, features };
            }
            (Some(Mistake::FeatureMadeUp), Message::GetServerFeature { select, .. }) => {
                becomes = Message::GetServerFeature { select, features: FeatureSet(1) };
            }
            (Some(Mistake::FeaturesUnanswered), Message::GetServerFeature { .. }) => send.vanish(),
            (Some(Mistake::FeaturesAnsweredOnce | Mistake::AskedOnce), Message::GetServerFeature { .. })
                if !self.once() =>
            {
                send.vanish();
            }
            (Some(Mistake::BitsEchoed), Message::GetServerFeature { select, .. }) => {
                becomes = Message::GetServerFeature { select, features: self.bits };
            }
            (Some(Mistake::FeaturesAnsweredTwice), Message::GetServerFeature { .. }) => {
                send.behind.push(bytes.into());
            }
            (Some(Mistake::FeaturesUnprompted), _) if self.once() => {
                let answer = Message::GetServerFeature { select: 0, features: FeatureSet::NONE };
                send.behind.push(answer.encode().into());
            }
            (Some(Mistake::FeaturesSet), _) if self.once() => {
                let set = Message::SetClientFeature { select: 0, features: FeatureSet(1) };
                send.behind.push(set.encode().into());
            }
            _ => {}
        }
        if let Message::RegisterXferMemory(_) = message {
            self.registered += 1;
            self.heard = 0;
            self.registration = Some(becomes.encode());
            if self.mistake == Some(Mistake::RegistersEarly) && self.windows.is_some() && self.once() {
                send.behind.push(becomes.encode().into());
            }
        }
        if becomes != message {
            let written = memory.write(send.offset, &becomes.encode());
            debug_assert!(written, "it was read there");
        }
    }

    pub(super) fn notified(&mut self, count: u32) -> u32 {
        let room = 64 << 10;
        let told = match self.mistake {
            Some(Mistake::ZeroIsError) if count == 0 => u32::MAX,
            Some(Mistake::OverrunIgnored) if count > room - self.heard.min(room) => 0,
            Some(Mistake::OverrunTaken) => count.min(room - self.heard.min(room)),
            Some(Mistake::LongImmediateCut) => count.min(512),
            Some(Mistake::ShortImmediateIgnored) if count < 4 => 0,
            Some(Mistake::HearsTwice) => count.saturating_mul(2),
            Some(Mistake::FeaturesRequired) if self.asked == 0 => u32::MAX,
            Some(Mistake::OverrunPanics) if count > 1 << 30 => panic!("a mistake that was asked for"),
            _ => count,
        };
        self.heard = self.heard.saturating_add(told);
        told
    }

    pub(super) fn receive(&mut self, incoming: &mut IncomingMessage) -> Option<Vec<u8>> {
        let keepalive = Message::Keepalive.encode();
        if let (Some(Mistake::ImmediateOfSendCounted), Some(immediate)) = (self.mistake, incoming.immediate) {
            incoming.payload = Some(immediate);
            return None;
        }
        if self.mistake == Some(Mistake::ImmediateOfSendIgnored) && incoming.immediate.is_some() {
            incoming.bytes = keepalive;
            return None;
        }
        let decoded = Message::decode(incoming.bytes.get(..incoming.len as usize).unwrap_or_default());
        let Ok(message) = decoded else {
            let accepted = match self.mistake {
                Some(Mistake::ShortAccepted) => incoming.len < 32,
                Some(Mistake::LongAccepted) => incoming.len > 32,
                Some(Mistake::UnknownAccepted) => incoming.len == 32,
                _ => false,
            };
            if accepted {
                (incoming.bytes, incoming.len) = (keepalive, 32);
            }
            return None;
        };
        let judged = self.mistake == Some(Mistake::ReservedJudged) && incoming.bytes != message.encode();
        if judged || self.refuses(message, incoming.immediate) {
            incoming.bytes = REFUSED;
            return None;
        }
        if let Message::GetServerFeature { features, .. } = message {
            self.asked += 1;
            self.bits = features;
        }
        match (self.mistake, message) {
            (Some(Mistake::FloodPanics), _) if self.asked > 200 => panic!("a mistake that was asked for"),
            (Some(Mistake::FeaturesBeforeWindowRefused), Message::GetServerFeature { .. })
                if self.windows.is_none() =>
            {
                incoming.bytes = REFUSED;
            }
            (Some(Mistake::FeaturesUnaskedIgnored), Message::GetServerFeature { .. }) if self.asked > 1 => {
                incoming.bytes = keepalive;
            }
            (Some(Mistake::FeaturesUnaskedIgnored), Message::SetClientFeature { .. }) => {
                incoming.bytes = keepalive;
            }
            (Some(Mistake::SelectUnchecked), Message::GetServerFeature { features, .. }) => {
                incoming.bytes = Message::GetServerFeature { select: 0, features }.encode();
            }
            (Some(Mistake::SetRefused), Message::SetClientFeature { .. }) => incoming.bytes = REFUSED,
            (Some(Mistake::SetAnswered), Message::SetClientFeature { select, features }) => {
                return Some(Message::GetServerFeature { select, features }.encode().into());
            }
            (Some(Mistake::KeepalivesAnswered), Message::Keepalive) => return Some(keepalive.into()),
            (Some(Mistake::KeepalivesRefused), Message::Keepalive) => incoming.bytes = REFUSED,
            // The side does not know of the question.
            (None, Message::GetServerFeature { .. })
                if self.variant == Some(Variant::AsksAgain) && self.questions.pop_front() == Some(true) =>
            {
                incoming.bytes = keepalive;
            }
            (_, Message::RegisterXferMemory(window)) => return self.window(incoming, window),
            _ => {}
        }
        None
    }

    fn refuses(&self, message: Message, immediate: Option<Immediate>) -> bool {
        match (self.variant, message) {
            (Some(Variant::EndsAtOnce), Message::RegisterXferMemory(window)) => {
                let shorter = self.windows.is_some_and(|(_, latest)| window.length < latest.length);
                immediate.is_some() || shorter
            }
            (Some(Variant::EndsAtOnce), _) => immediate.is_some(),
            (Some(Variant::EndsAtKeepalive), Message::Keepalive) => immediate.is_some(),
            _ => false,
        }
    }

    fn window(&mut self, incoming: &mut IncomingMessage, window: Window) -> Option<Vec<u8>> {
        let room = self.windows.is_some_and(|(_, latest)| self.used < latest.length);
        let wraps = window.address.checked_add(u64::from(window.length)).is_none();
        let ignored = Message::Keepalive.encode();
        match self.mistake {
            Some(Mistake::EmptyWindowIgnored) if window.length == 0 => incoming.bytes = ignored,
            Some(Mistake::WrappingWindowIgnored) if wraps => incoming.bytes = ignored,
            Some(Mistake::LateWindowRefused) if self.waiting.elapsed() > Duration::from_millis(80) => {
                incoming.bytes = REFUSED;
            }
            Some(Mistake::SecondWindowRefused) if self.windows.is_some() => incoming.bytes = REFUSED,
            Some(Mistake::EarlyWindowIgnored) if room => incoming.bytes = ignored,
            Some(Mistake::SmallWindowRefused) if window.length < 4096 => incoming.bytes = REFUSED,
            Some(Mistake::OddWindowRefused) if window.address % 2 == 1 => incoming.bytes = REFUSED,
            _ => {
                let first = self.windows.map_or(window, |(first, _)| first);
                self.windows = Some((first, window));
                self.used = 0;
                self.waiting = Instant::now();
            }
        }
        // The peer has a window of this side's by now, and has hardly used it.
        let early =
            self.mistake == Some(Mistake::RegistersEarly) && self.registration.is_some() && self.once();
        if early { self.registration.map(Vec::from) } else { None }
    }
}
