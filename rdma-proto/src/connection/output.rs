//! Decides what a connection does next: messages, data within windows and credits, and the end.

use crate::credit::Purpose;
use crate::error::Error;
use crate::send::{Progress, Source};
use crate::wire::{FeatureSet, MESSAGE_LEN, Message, Window};
use rdma_types::time::Instant;
use rdma_types::{Immediate, RemoteAddress};

use super::timers::Blocked;
use super::{Due, Machine, Negotiation, RegionAddress, Stage};

/// An instruction to the driver, in the order returned. Consecutive requests may share a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub enum Action {
    /// Posts a SEND of `message`.
    Send {
        /// The work request's id.
        id: u64,
        /// Whether its success must be reported.
        signaled: bool,
        /// Its slot of [`Config::send_depth`](crate::Config::send_depth), until this completes.
        slot: u16,
        /// The bytes of the message.
        message: [u8; MESSAGE_LEN],
    },
    /// Posts a WRITE. An empty one needs no key; its completion shows that all before it are done.
    Write {
        /// The work request's id.
        id: u64,
        /// Whether its success must be reported.
        signaled: bool,
        /// The bytes to write.
        from: Source,
        /// The remote address of the bytes.
        to: RemoteAddress,
        /// The immediate, of a WRITE with immediate.
        immediate: Option<Immediate>,
    },
    /// Disconnects. The last action of a connection.
    Disconnect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flush {
    left: u32,
    total: u32,
}

/// Limits for single WRITEs in a row: within them each finds a slot, a credit and contiguous room
/// on both sides, needs no signal, and makes nothing due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Budget {
    notices: u64,
    bytes: u64,
}

impl Budget {
    #[inline]
    pub(super) const fn covers(&self, posted: Progress, bytes: usize) -> bool {
        // Less, not equal: a WRITE that reaches the limit fills the window, or needs a signal.
        // Neither is checked for within the budget.
        posted.notices < self.notices && (bytes as u64) < self.bytes.wrapping_sub(posted.bytes)
    }
}

impl Machine {
    /// Returns the next action, or `None` if there is none. Calls `now` only if something waits.
    #[inline(always)]
    pub fn poll_action(&mut self, now: impl FnOnce() -> Instant) -> Option<Action> {
        if self.is_one_write() {
            // Debug builds compare this shortcut with the general path, on a copy of the machine.
            let expected = cfg!(debug_assertions).then(|| { *self }.next_action());
            self.due = Due::Nothing;
            // At most the window's room, a u32.
            let total = self.send.unposted() as u32;
            let from = Source::Buffer(self.send.next_span(total));
            let action = self.write_part(Flush { left: total, total }, from, true);
            debug_assert_eq!(expected, Some(action), "a write within the budget is not as others");
            debug_assert_eq!({ *self }.next_action(), None, "something to do went unnoticed");
            return action;
        }
        if self.is_settled() {
            debug_assert_eq!({ *self }.next_action(), None, "something to do went unnoticed");
            return None;
        }
        // A separate value: the WRITE above does not pass through memory.
        let other = self.poll_anything(now)?;
        Some(other)
    }

    #[inline(never)]
    fn poll_anything(&mut self, now: impl FnOnce() -> Instant) -> Option<Action> {
        let action = self.next_action();
        let waits = self.flush.is_some() || !self.send.all_posted();
        // A closing connection is never done here: behind its last byte come the fence and the
        // disconnect (VR-CLOSE-001).
        if self.stage == Stage::Open && !waits && !self.wants_message() {
            self.due = Due::Nothing;
            self.timers.note_free();
            // A sender of messages is not about to write, so that a budget would go unused.
            let messages = matches!(action, Some(Action::Send { .. }));
            self.budget = if messages { Budget::default() } else { self.budget() };
        } else if action.is_none() {
            self.due = Due::Blocked;
            self.timers.note_blocked(now(), self.blocked());
        } else {
            self.due = Due::Anything;
        }
        action
    }

    #[inline]
    fn budget(&self) -> Budget {
        let (notices, bytes) = self.send.budget(self.slots_kept_back);
        // Acknowledgements return the credits of a patient peer, so it is never asked
        // (VR-FLOW-015).
        let proof = if self.patient { u64::MAX } else { self.credits.before_proof() };
        Budget {
            notices: notices.min(self.credits.for_data()).min(proof),
            bytes: bytes.min(self.send.posted().bytes.saturating_add(self.tx.room().into())),
        }
    }

    /// Returns whether [`Machine::poll_action`] will return one WRITE of everything, then `None`.
    #[inline]
    pub const fn is_one_write(&self) -> bool {
        matches!(self.due, Due::Write)
    }

    /// Returns whether [`Machine::poll_action`] is known to have nothing to do.
    #[inline]
    pub const fn is_settled(&self) -> bool {
        matches!(self.due, Due::Blocked | Due::Nothing)
    }

    #[inline]
    fn next_action(&mut self) -> Option<Action> {
        let action = self.next_request();
        if action.is_none() && self.disconnect {
            self.disconnect = false;
            return Some(Action::Disconnect);
        }
        action
    }

    // Nothing leaves after the end, keepalives included (VR-KEEP-003).
    #[inline]
    fn next_request(&mut self) -> Option<Action> {
        if !self.is_established() {
            return None;
        }
        // A started flush goes first: slot and credit of its last part are reserved.
        if self.flush.is_some() {
            return self.next_write();
        }
        // Messages overtake data that waits for a window: our windows are always registered
        // (VR-FLOW-010, VR-FLOW-016).
        if self.wants_message()
            && let Some(message) = self.next_message()
        {
            return Some(message);
        }
        if let Some(write) = self.next_write() {
            return Some(write);
        }
        if self.stage == Stage::Closing {
            return self.next_of_close();
        }
        if self.confirm && self.send.unposted() == 0 {
            self.confirm = false;
            return self.next_fence();
        }
        None
    }

    #[inline]
    fn next_write(&mut self) -> Option<Action> {
        let flush = self.flush.or_else(|| self.next_flush())?;
        let from = self.send.next_source(flush.left.into());
        self.write_part(flush, from, false)
    }

    #[inline]
    fn wants_message(&self) -> bool {
        self.rx.unannounced().is_some()
            || !self.answers.is_empty()
            || matches!(self.negotiation, Negotiation::Due | Negotiation::Answered(_))
            || self.timers.wants_keepalive()
            || self.wants_proof()
    }

    #[inline]
    const fn wants_proof(&self) -> bool {
        !self.patient && self.credits.wants_proof(self.send.posted().notices)
    }

    fn keepalive_finds_receive(&mut self) -> bool {
        // An acknowledged keepalive shows that the device is alive. Only the program posts
        // receives, so what the program sends counts (VR-KEEP-008).
        if self.timers.heard_since_keepalive() {
            self.credits.peer_spoke(self.send.done().notices);
        }
        self.credits.has_receive_for_keepalive(self.send.posted().notices)
    }

    #[inline]
    fn next_message(&mut self) -> Option<Action> {
        if self.send.free_slots() == 0 {
            return None;
        }
        let sent = self.send.posted().notices;
        if self.credits.allow(sent, Purpose::Control) {
            if let Some((region, offset)) = self.rx.unannounced() {
                return Some(self.announce(region, offset));
            }
            if let Some(select) = self.answers.pop() {
                let features = self.config.features;
                // A choice that came before this answer enables nothing (VM-001).
                if self.negotiation == Negotiation::None {
                    self.negotiation = Negotiation::Offered;
                }
                return Some(self.send(Message::GetServerFeature { select, features }, false));
            }
            if let Negotiation::Answered(features) = self.negotiation {
                self.agree(features);
                return Some(self.send(Message::SetClientFeature { select: 0, features }, false));
            }
            if self.keepalive_finds_receive()
                && self.timers.take_keepalive(self.send.posted().slots.saturating_add(1))
            {
                // Signalled: the limit of VR-KEEP-006 is for its acknowledgement.
                return Some(self.send(Message::Keepalive, true));
            }
        }
        if (self.wants_proof() || self.negotiation == Negotiation::Due)
            && self.credits.allow(sent, Purpose::Question)
        {
            // One question asks for features and proves notifications: the messages are the same.
            if self.negotiation == Negotiation::Due {
                self.negotiation = Negotiation::Asked;
            }
            let action =
                self.send(Message::GetServerFeature { select: 0, features: FeatureSet::NONE }, false);
            self.credits.sent_question(self.send.posted().notices);
            return Some(action);
        }
        // A Keepalive without a receive would wait, for ever if the peer has vanished. An empty
        // WRITE takes no receive, and is acknowledged (VR-KEEP-006).
        let due = self.timers.take_keepalive(self.send.posted().slots.saturating_add(1));
        due.then(|| self.write_nothing())
    }

    /// Announces a window: once established, whatever the peer has sent (VR-MEM-001, VR-FEAT-008),
    /// and when a window is used up (VR-MEM-010).
    fn announce(&mut self, region: u8, offset: u32) -> Action {
        let [first, second] = self.regions;
        let RegionAddress { address, rkey } = match region {
            0 => first,
            1 => second,
            _ => self.landing,
        };
        // Never saturates: own regions have offset 0, and `land` refuses memory that wraps.
        let address = address.saturating_add(offset.into());
        let window = Window { address, length: self.rx.length(), rkey };
        let action = self.send(Message::RegisterXferMemory(window), false);
        self.rx.announce();
        // Bytes in the previous window prove nothing about this registration (VM-006).
        if !self.queues_windows() {
            self.credits.sent_registration(self.send.posted().notices);
        }
        action
    }

    #[inline]
    fn send(&mut self, message: Message, force_signal: bool) -> Action {
        let slot = self.send.next_slot();
        let id = self.send.post(Source::NONE, true);
        let signaled = self.send.take_signal(force_signal);
        self.counters.messages_sent = self.counters.messages_sent.wrapping_add(1);
        Action::Send { id, signaled, slot, message: message.encode() }
    }

    /// Returns everything up to the end of the peer's window (VR-FLOW-006), for one notification.
    /// The rest waits for the next one (VR-FLOW-012). Without bytes there is none (VR-XFER-010).
    #[inline]
    fn next_flush(&self) -> Option<Flush> {
        let pending = self.send.unposted().min(self.tx.room().into());
        let slots = self.send.free_slots().saturating_sub(self.slots_kept_back);
        if pending == 0 || slots == 0 || !self.credits.allow(self.send.posted().notices, Purpose::Data) {
            return None;
        }
        // Wrapped or lent bytes need requests of their own. At most `room`, a u32.
        let total = self.send.carried(pending, slots) as u32;
        Some(Flush { left: total, total })
    }

    /// Posts a part of a flush: a plain WRITE, or the last with the sum (VR-XFER-002, VR-XFER-004).
    #[inline(always)]
    fn write_part(&mut self, flush: Flush, from: Source, within_budget: bool) -> Option<Action> {
        let Some(to) = self.tx.take(from.len()) else {
            self.fail(Error::Bug("a flush longer than the peer's window"));
            return None;
        };
        // At most `left`, which `next_source` was asked for.
        let left = flush.left.wrapping_sub(from.len());
        let ends = left == 0;
        let id = self.send.post(from, ends);
        // The budget ends before the next request that needs a signal.
        let signaled = !within_budget && self.send.take_signal(false);
        let immediate = if ends {
            if !within_budget {
                self.flush = None;
                // If windows queue, the next registration proves nothing (VM-006).
                if self.tx.leave_full() && !self.queues_windows() {
                    self.credits.sent_window_end(self.send.posted().notices);
                }
            }
            Some(Immediate(flush.total))
        } else {
            self.flush = Some(Flush { left, ..flush });
            self.counters.plain_writes_sent = self.counters.plain_writes_sent.wrapping_add(1);
            None
        };
        Some(Action::Write { id, signaled, from, to, immediate })
    }

    /// Disconnects once every byte is known to have arrived (VR-CLOSE-001). A peer that is about to
    /// see the end needs no control messages.
    fn next_of_close(&mut self) -> Option<Action> {
        if self.send.unconfirmed() == 0 {
            self.end();
            return None;
        }
        if self.send.unposted() == 0 { self.next_fence() } else { None }
    }

    /// Follows the last bytes if no completion would report them.
    fn next_fence(&mut self) -> Option<Action> {
        let due = self.send.has_unsignaled() && self.send.free_slots() > 0;
        due.then(|| self.write_nothing())
    }

    /// Its completion shows that all before it are done, and that the peer's device is alive.
    fn write_nothing(&mut self) -> Action {
        // It takes no receive of the peer, and its key is not checked (docs/decisions.md, 7).
        let from = self.send.next_source(0);
        let id = self.send.post(from, false);
        let signaled = self.send.take_signal(true);
        Action::Write { id, signaled, from, to: RemoteAddress { address: 0, rkey: 0 }, immediate: None }
    }

    fn blocked(&self) -> Option<Blocked> {
        // One wait is measured at a time: for a window while bytes wait for one, otherwise for
        // receives (VR-RES-013).
        if !self.is_established() {
            None
        } else if self.send.unposted() > 0 && !self.tx.is_registered() {
            Some(Blocked::NoWindow)
        } else if self.send.unposted() > 0 && self.tx.room() == 0 {
            Some(Blocked::WindowFull)
        } else if self.send.unposted() > 0 || self.rx.unannounced().is_some() || !self.answers.is_empty() {
            Some(Blocked::NoReceives)
        } else {
            None
        }
    }
}
