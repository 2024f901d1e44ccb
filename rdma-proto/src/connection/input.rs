//! Handles the inputs of a connection: messages, data, completions, events and time.

use crate::config::Role;
use crate::error::{Error, InvalidMessage, PeerMisbehaved, TransportError};
use crate::wire::{FeatureSet, Message, Opcode};
use rdma_types::time::Instant;
use rdma_types::{CompletionError, CompletionStatus, Immediate, RNR_RETRY_INFINITE};

use super::timers::Blocked;
use super::{Due, Machine, Negotiation, Stage};

impl Machine {
    /// Reports that the connection is established. Only then does the machine announce a window,
    /// write or ask (VR-CONN-018).
    ///
    /// `peer_rnr_retry_count`, from the peer's `rdma_connect` or `rdma_accept`, is how often *our*
    /// queue pair retries a send that found no receive.
    pub fn handle_established(&mut self, now: Instant, peer_rnr_retry_count: u8) {
        let established = match self.stage {
            Stage::Connecting => Some(Stage::Open),
            Stage::Leaving => Some(Stage::Closing),
            Stage::Open | Stage::Closing | Stage::Ended => None,
        };
        if let Some(stage) = established {
            self.stage = stage;
            self.due = Due::Anything;
            // A client does not expect the question. If it allows few retries, that is its risk.
            self.patient =
                peer_rnr_retry_count >= RNR_RETRY_INFINITE || matches!(self.config.role, Role::Server);
            self.timers.start(now);
        }
    }

    fn note_in_flight(&mut self) {
        self.counters.most_in_flight = self.most_in_flight();
    }

    /// Reports a received SEND. It may precede the established event (VR-CONN-007, VR-MEM-014), and
    /// come in any order with others (VR-CTRL-009, VR-FEAT-013).
    pub fn handle_message(&mut self, now: Instant, bytes: &[u8]) {
        if self.has_ended() {
            return;
        }
        self.due = Due::Anything;
        self.timers.heard(now);
        self.counters.messages_received = self.counters.messages_received.wrapping_add(1);
        // Before a proof in the message lowers the number.
        self.note_in_flight();
        if let Err(error) = self.receive_message(bytes) {
            self.fail(error);
        }
    }

    fn receive_message(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match Message::decode(bytes)? {
            // VR-KEEP-002: accepted at any time, never answered.
            Message::Keepalive => {
                self.counters.keepalives_received = self.counters.keepalives_received.saturating_add(1);
            }
            Message::RegisterXferMemory(window) => {
                let queues = self.queues_windows();
                self.tx.register(window, self.config.window_limit, queues)?;
                // A window registered early proves nothing about the immediate that filled the last
                // (VM-006).
                if !queues {
                    self.credits.got_registration();
                }
                self.timers.window_came();
                self.counters.windows_received = self.counters.windows_received.saturating_add(1);
            }
            // In a question, `features` has no meaning (VR-FEAT-012).
            Message::GetServerFeature { select, features } => match self.config.role {
                Role::Server => self.answers.push(select)?,
                Role::Client => self.receive_answer(select, features)?,
            },
            Message::SetClientFeature { features, .. } => match self.config.role {
                // Choosing a feature that was not offered enables nothing (VM-001).
                Role::Server if self.negotiation == Negotiation::None => {}
                // VR-FEAT-004: unknown bits enable nothing and harm nothing. Not answered
                // (VR-FEAT-009).
                Role::Server => self.agree(features.common(self.config.features)),
                Role::Client => {
                    let opcode = Opcode::SET_CLIENT_FEATURE;
                    return Err(PeerMisbehaved::ServerSent { opcode }.into());
                }
            },
        }
        Ok(())
    }

    /// Puts the features of both sides into force (VR-FEAT-010). All questions have select 0:
    /// another select is no answer (VR-FEAT-014).
    fn receive_answer(&mut self, select: u16, features: FeatureSet) -> Result<(), Error> {
        if !self.credits.has_asked() || select != 0 {
            return Err(Error::PeerMisbehaved(PeerMisbehaved::UnaskedFeatures));
        }
        self.credits.got_answer();
        self.timers.receives_came();
        // Answers to later questions, which are for credits, change no features (VM-001).
        if matches!(self.negotiation, Negotiation::Asked) {
            self.negotiation = Negotiation::Answered(features.common(self.config.features));
        }
        Ok(())
    }

    /// Reports a received WRITE with immediate: `immediate` more bytes lie in the window.
    pub fn handle_immediate(&mut self, now: Instant, immediate: Immediate) {
        if !self.handle_immediates(now, 1, immediate.0.into()) {
            self.fail(Error::PeerMisbehaved(self.rx.refusal(immediate.0)));
        }
    }

    /// Reports `count` consecutive WRITEs with immediate of `bytes` in sum. Returns false,
    /// unchanged, on overrun: then call [`Machine::handle_immediate`] for each.
    #[inline]
    pub fn handle_immediates(&mut self, now: Instant, count: usize, bytes: u64) -> bool {
        if self.has_ended() {
            return true;
        }
        let Some(filled) = self.rx.receive(bytes) else { return false };
        self.timers.heard(now);
        let counters = &mut self.counters;
        counters.data_notifications_received =
            counters.data_notifications_received.wrapping_add(count as u64);
        counters.bytes_received = counters.bytes_received.wrapping_add(bytes);
        // The next window is to be announced, or memory for it is lacking.
        if filled {
            self.due = Due::Anything;
        }
        // An immediate of 0 needs no window, so that it proves no registration (VR-XFER-005).
        if self.credits.awaits_data() && bytes != 0 {
            self.got_first_data();
        }
        true
    }

    #[cold]
    fn got_first_data(&mut self) {
        self.note_in_flight();
        if self.credits.got_data() {
            self.timers.receives_came();
            self.due = Due::Anything;
        }
    }

    /// Reports the completion of a signalled send request, and with it of all requests before it.
    pub fn handle_sent(&mut self, now: Instant, id: u64) {
        if let Err(error) = self.send.complete(id) {
            self.fail(error);
            return;
        }
        self.due = Due::Anything;
        if self.patient {
            self.note_in_flight();
            self.credits.got_acknowledgement(self.send.done().notices);
            self.timers.receives_came();
        }
        self.timers.acknowledged(now, self.send.done().slots);
    }

    /// Reports a failed work request. The first failure that names a cause counts; others are
    /// flushed because of it (VR-CLOSE-008). Before the connection is established a flush means
    /// nothing: the connection manager's event gives the reason.
    pub fn handle_failure(&mut self, failure: CompletionError) {
        let early = matches!(self.stage, Stage::Connecting | Stage::Leaving);
        if failure.status == CompletionStatus::WR_FLUSH_ERR && early {
            return;
        }
        let error = match failure.status {
            // VR-CTRL-008.
            CompletionStatus::LOC_LEN_ERR => Error::InvalidMessage(InvalidMessage::TooLong),
            // VR-SEC-009, VR-SEC-011.
            CompletionStatus::LOC_ACCESS_ERR => Error::PeerMisbehaved(PeerMisbehaved::ReachedOutside),
            // VR-MEM-009.
            CompletionStatus::REM_ACCESS_ERR => Error::PeerMisbehaved(PeerMisbehaved::WindowRefused),
            // Credits stay within the limit, so the peer keeps fewer receives than that
            // (VR-RES-002).
            CompletionStatus::RNR_RETRY_EXC_ERR => {
                Error::PeerMisbehaved(PeerMisbehaved::TooFewReceives { limit: self.config.peer_receives })
            }
            _ => Error::Transport(TransportError::Completion(failure)),
        };
        match self.failure {
            Some(Error::Transport(TransportError::Completion(first)))
                if first.status == CompletionStatus::WR_FLUSH_ERR =>
            {
                self.failure = Some(error);
            }
            _ => self.fail(error),
        }
    }

    /// Reports a failed receive, which the peer caused: soft-RoCE gives it the status of the peer's
    /// refused WRITE.
    pub fn handle_receive_failure(&mut self, failure: CompletionError) {
        let status = match failure.status {
            CompletionStatus::REM_ACCESS_ERR => CompletionStatus::LOC_ACCESS_ERR,
            other => other,
        };
        self.handle_failure(CompletionError { status, ..failure });
    }

    /// Reports that the backend refused `call`.
    pub fn handle_refusal(&mut self, call: &'static str) {
        self.fail(Error::Transport(TransportError::Backend { call }));
    }

    /// Reports that the peer disconnected, which ours answers or caused (VR-CLOSE-005). First
    /// report all completions: the last bytes may be among them (VR-CLOSE-002).
    pub fn handle_disconnected(&mut self) {
        match self.stage {
            Stage::Connecting | Stage::Leaving => self.fail(Error::Transport(TransportError::Disconnected)),
            Stage::Open | Stage::Closing => self.end(),
            Stage::Ended => {}
        }
    }

    /// Reports the time. Call it at [`Machine::next_timeout`] at the latest.
    pub fn handle_timeout(&mut self, now: Instant) {
        if !self.is_established() && self.stage != Stage::Leaving {
            return;
        }
        self.due = Due::Anything;
        if self.timers.close_is_due(now) {
            // The last completion may come together with the deadline: then the close is complete.
            match self.send.unconfirmed() {
                0 => self.end(),
                unconfirmed => self.fail(Error::Transport(TransportError::CloseTimedOut { unconfirmed })),
            }
        } else if self.is_established() {
            self.handle_timers(now);
        }
    }

    fn handle_timers(&mut self, now: Instant) {
        if let Some(waited) = self.timers.silent(now) {
            self.fail(Error::PeerMisbehaved(PeerMisbehaved::Silent { waited }));
        } else if let Some(waited) = self.timers.unacknowledged(now) {
            self.fail(Error::Transport(TransportError::Unacknowledged { waited }));
        } else if let Some((blocked, waited)) = self.timers.stalled(now) {
            self.fail(Error::PeerMisbehaved(match blocked {
                Blocked::NoWindow => PeerMisbehaved::NeverRegistered { waited },
                Blocked::WindowFull => PeerMisbehaved::NeverDrained { waited },
                Blocked::NoReceives => PeerMisbehaved::NeverReceives { waited },
            }));
        } else {
            self.timers.tick(now);
        }
    }
}
