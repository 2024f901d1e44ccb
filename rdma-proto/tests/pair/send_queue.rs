//! The posted work requests of one machine, recorded independently and checked against the rules.

use std::collections::VecDeque;

use rdma_proto::RNR_RETRY_INFINITE;
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_proto::{Action, Config, Role, Source, Span};

#[derive(Clone, Debug)]
pub(crate) struct SendQueue {
    config: Config,
    /// The peer's window and how much of it is used.
    window: Option<(Window, u32)>,
    /// The windows after it (VM-002).
    queued: VecDeque<Window>,
    /// Whether windows are registered ahead, and prove nothing (VM-006). A server needs no proof.
    ahead: bool,
    plain: u32,
    outstanding: VecDeque<Outstanding>,
    notified: u64,
    /// Notifications that the peer must have handled, or acknowledged if that is enough.
    proven: u64,
    /// What each possible proof would cover: a new window, bytes in ours, an answer.
    at_full: Option<u64>,
    at_registration: Option<u64>,
    at_question: Option<u64>,
    patient: bool,
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct Outstanding {
    id: u64,
    signaled: bool,
    slot: Option<u16>,
    notifies: bool,
    notified: u64,
}

impl SendQueue {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            window: None,
            queued: VecDeque::new(),
            ahead: false,
            plain: 0,
            outstanding: VecDeque::new(),
            notified: 0,
            proven: 0,
            at_full: None,
            at_registration: None,
            at_question: None,
            patient: config.role == Role::Server,
            ended: false,
        }
    }

    pub(crate) fn replace_send_buffer(&mut self, length: u32) {
        self.config.send_buffer = length;
    }

    pub(crate) fn established(&mut self, rnr_retry: u8) {
        self.patient |= rnr_retry >= RNR_RETRY_INFINITE;
    }

    pub(crate) fn is_patient(&self) -> bool {
        self.patient
    }

    pub(crate) fn window(&mut self, window: Window) {
        if self.room() > 0 {
            self.queued.push_back(window);
            return;
        }
        self.window = Some((window, 0));
        if !self.ahead {
            self.proven = self.proven.max(self.at_full.take().unwrap_or(0));
        }
    }

    pub(crate) fn bytes_came(&mut self) {
        self.proven = self.proven.max(self.at_registration.take().unwrap_or(0));
    }

    pub(crate) fn answer_came(&mut self) {
        self.proven = self.proven.max(self.at_question.take().unwrap_or(0));
    }

    pub(crate) fn awaits_answer(&self) -> bool {
        self.at_question.is_some()
    }

    pub(crate) fn room(&self) -> u32 {
        self.window.map_or(0, |(window, used)| window.length - used)
    }

    pub(crate) fn awaits_completion(&self) -> bool {
        self.outstanding.iter().any(|request| request.signaled)
    }

    pub(crate) fn unacknowledged_notifications(&self) -> usize {
        self.outstanding.iter().filter(|request| request.notifies).count()
    }

    pub(crate) fn signaled(&self) -> impl Iterator<Item = u64> {
        self.outstanding.iter().filter(|request| request.signaled).map(|request| request.id)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    pub(crate) fn post(&mut self, action: &Action) {
        assert!(!self.ended, "{action:?} after Disconnect");
        match *action {
            Action::Send { id, signaled, slot, message } => {
                assert_eq!(self.plain, 0, "a SEND between a plain WRITE and its immediate");
                assert!(slot < self.config.send_depth, "slot {slot} is outside the table");
                let taken = self.outstanding.iter().any(|request| request.slot == Some(slot));
                assert!(!taken, "slot {slot} is still in use");
                self.book(id, signaled, Some(slot), true);
                self.message(&message);
            }
            Action::Write { id, signaled, from, to, immediate } => {
                if from.len() == 0 {
                    assert!(signaled && immediate.is_none() && self.plain == 0, "an empty WRITE is a fence");
                } else {
                    let (window, used) = self.window.as_mut().expect("a WRITE before the peer's window");
                    assert_eq!(to.rkey, window.rkey);
                    assert_eq!(to.address, window.address + u64::from(*used), "a gap or an overlap");
                    assert!(from.len() <= window.length - *used, "a WRITE past the end of the window");
                    if let Source::Buffer(Span { offset, len }) = from {
                        let end = offset.checked_add(len).expect("a span that wraps");
                        assert!(end <= self.config.send_buffer, "a WRITE from outside the send buffer");
                    }
                    *used += from.len();
                    self.plain += from.len();
                    if let Some(immediate) = immediate {
                        assert_eq!(immediate.0, self.plain, "not what was written since the last one");
                        self.plain = 0;
                    }
                }
                self.book(id, signaled, None, immediate.is_some());
                if from.len() > 0 && self.room() == 0 {
                    self.at_full = Some(self.notified);
                    if let Some(next) = self.queued.pop_front() {
                        assert_eq!(self.plain, 0, "a notification over the end of a window (VM-004)");
                        self.window = Some((next, 0));
                    }
                }
            }
            Action::Disconnect => self.ended = true,
        }
        let unproven = self.notified - self.proven;
        assert!(unproven <= self.config.peer_receives.into(), "the peer's receives may be used up");
        assert!(self.outstanding.len() <= usize::from(self.config.send_depth), "the send queue overflows");
    }

    fn book(&mut self, id: u64, signaled: bool, slot: Option<u16>, notifies: bool) {
        self.notified += u64::from(notifies);
        self.outstanding.push_back(Outstanding { id, signaled, slot, notifies, notified: self.notified });
    }

    fn message(&mut self, message: &[u8]) {
        let client = self.config.role == Role::Client;
        match Message::decode(message).expect("a message that can be read") {
            Message::GetServerFeature { .. } if client => {
                assert!(self.at_question.is_none(), "two questions at once");
                self.at_question = Some(self.notified);
            }
            Message::RegisterXferMemory(_) if self.ahead => {}
            Message::RegisterXferMemory(_) => self.at_registration = Some(self.notified),
            Message::SetClientFeature { features, .. } => {
                assert!(client, "a server sent what only clients do");
                self.ahead = features.contains(FeatureSet::MULTI_BUFFER);
            }
            Message::GetServerFeature { .. } | Message::Keepalive => {}
        }
    }

    /// Completes `id` and all before it. Returns how many.
    pub(crate) fn complete(&mut self, id: u64) -> usize {
        let place =
            self.outstanding.iter().position(|request| request.id == id).expect("an outstanding request");
        if self.patient {
            self.proven = self.proven.max(self.outstanding[place].notified);
        }
        self.outstanding.drain(..=place).count()
    }
}
