//! The states of a queue pair, as `ibv_modify_qp(3)` changes them.
//!
//! Programs that speak verbs make queue pairs on a device, change their state themselves and find
//! their peers by number and address. If the connection manager connects them, it is told which to
//! connect.

use std::net::IpAddr;

use rdma_backend::{CompletionStatus, RnrTimer};

use super::manager::identifier::ack_timeout;
use super::pairs::path::Path;
use super::pairs::queue_pair::{QueuePair, QueuePairState};
use super::pairs::responder::Responder;
use super::pairs::shared_queue::LAST_REACHED;
use super::queues::completion::{Entry, failure};
use super::{DomainId, Event, Model, PairId};
use crate::device_kind::Flush;
use crate::error::Error;
use crate::failure_class::FailureClass;
use crate::request::Rights;

impl Model {
    /// `ibv_modify_qp(3)` to RESET: as new, and posted requests are never reported.
    pub(crate) fn reset(&mut self, id: PairId) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        pair.state = QueuePairState::Reset;
        self.cut_short_of(id);
        self.pairs.end_repeat(&mut self.env, &mut self.contexts, id);
        let pair = self.pairs.find_mut(id)?;
        pair.path = None;
        // In a new epoch: answers to what was sent before end nothing of the new life.
        pair.requester.renew();
        pair.responder = Responder::new();
        // Held completions are of posted requests, of which a reset reports none.
        (pair.held, pair.ownership, pair.cut, pair.cut_until) = Default::default();
        self.free_nothing(id);
        // For a capture, what follows is another connection.
        self.capture_end(id);
        Ok(())
    }

    /// `ibv_modify_qp(3)` to INIT.
    pub(crate) fn initialise(&mut self, id: PairId) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        // INIT to INIT is valid, and changes attributes only.
        if !matches!(pair.state, QueuePairState::Reset | QueuePairState::Idle) {
            return Err(Error::State("INIT comes after RESET"));
        }
        pair.state = QueuePairState::Idle;
        Ok(())
    }

    /// `ibv_modify_qp(3)` to RTR: the peer is the queue pair with this number at `remote`.
    pub(crate) fn begin_receiving(
        &mut self,
        id: PairId,
        local: IpAddr,
        remote: IpAddr,
        number: u32,
        timer: RnrTimer,
    ) -> Result<(), Error> {
        let theirs = self.hosts.at(remote);
        // A device does not know its peer's numbers: what it sends to a wrong one goes unanswered.
        let peer = self.pairs.numbered(&self.hosts, number, remote).unwrap_or(PairId::NONE);
        let pair = self.receiving(id, true)?;
        pair.responder.rnr_timer = timer;
        pair.path = Some(Path { peer, local, remote, loopback: theirs == Some(pair.host) });
        Ok(())
    }

    /// `ibv_modify_qp(3)` to RTR, of a queue pair for datagrams.
    pub(crate) fn begin_receiving_datagrams(&mut self, id: PairId) -> Result<(), Error> {
        self.receiving(id, false).map(drop)
    }

    /// Moves a queue pair with or without a peer to RTR.
    fn receiving(&mut self, id: PairId, has_peer: bool) -> Result<&mut QueuePair, Error> {
        let pair = self.pairs.find_mut(id)?;
        if pair.key.is_none() != has_peer {
            return Err(Error::Argument("a connected queue pair has a peer, and one for datagrams has none"));
        }
        if pair.state != QueuePairState::Idle {
            return Err(Error::State("RTR comes after INIT"));
        }
        pair.state = QueuePairState::Receiving;
        Ok(pair)
    }

    /// `qp_access_flags` of `ibv_modify_qp(3)`.
    pub(crate) fn set_rights(&mut self, id: PairId, rights: Rights) -> Result<(), Error> {
        self.pairs.find_mut(id)?.rights = rights;
        Ok(())
    }

    /// `qkey` of `ibv_modify_qp(3)`.
    pub(crate) fn set_key(&mut self, id: PairId, key: u32) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        let own = pair.key.as_mut().ok_or(Error::Argument("only a queue pair for datagrams has a Q_Key"))?;
        *own = key;
        Ok(())
    }

    /// `ibv_modify_qp(3)` to RTS.
    pub(crate) fn begin_sending(
        &mut self,
        id: PairId,
        retry: u8,
        rnr_retry: u8,
        read_depth: u8,
    ) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        match pair.state {
            QueuePairState::Receiving => {
                pair.state = QueuePairState::Ready;
                pair.requester.configure(retry, rnr_retry, read_depth);
                Ok(())
            }
            // RTS to RTS is valid, and does not change these (`ib_modify_qp_is_ok` of the kernel).
            QueuePairState::Ready => Ok(()),
            // Work that was posted in SQD has waited for this.
            QueuePairState::Draining => {
                pair.state = QueuePairState::Ready;
                pair.requester.end_drain();
                self.ring(id);
                Ok(())
            }
            _ => Err(Error::State("RTS comes after RTR")),
        }
    }

    /// `ibv_modify_qp(3)` to ERR.
    pub(crate) fn end_pair(&mut self, id: PairId) -> Result<(), Error> {
        match self.pairs.find(id)?.state {
            // The kernel has no transition from RESET to ERR.
            QueuePairState::Reset => Err(Error::State("a queue pair that is reset does not fail")),
            _ => {
                self.enter_error(id);
                Ok(())
            }
        }
    }

    pub(crate) fn set_ack_timeout(&mut self, id: PairId, code: u8) -> Result<(), Error> {
        let timeout = ack_timeout(code)?;
        self.pairs.find_mut(id)?.requester.ack_timeout = Some(timeout);
        Ok(())
    }

    pub(crate) fn send_room(&self, id: PairId) -> u32 {
        self.pairs.get(id).map_or(0, |pair| pair.requester.room(pair.limits.send_depth))
    }

    pub(crate) fn domain_of(&self, id: PairId) -> Option<DomainId> {
        Some(self.pairs.get(id)?.domain)
    }

    /// `ibv_modify_qp(3)` to SQD: requests in flight are completed, and no others leave. Raises an
    /// event then, if requested.
    pub(crate) fn drain(&mut self, id: PairId, notify: bool) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        if !matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining) {
            return Err(Error::State("SQD comes after RTS"));
        }
        pair.state = QueuePairState::Draining;
        pair.requester.begin_drain(notify);
        // If nothing is in flight, the event comes at once.
        self.tell_drained(id);
        Ok(())
    }

    pub(crate) fn state_of(&self, id: PairId) -> Result<QueuePairState, Error> {
        Ok(self.pairs.find(id)?.state)
    }

    /// `ibv_query_qp(3)`: the addresses between which it sends, and the number it sends to.
    pub(crate) fn ends_of(&self, id: PairId) -> Option<(IpAddr, IpAddr, u32)> {
        let path = self.pairs.get(id)?.path?;
        Some((path.local, path.remote, self.pairs.number(path.peer)))
    }

    /// `min_rnr_timer` of `ibv_modify_qp(3)`.
    pub(crate) fn set_min_rnr_timer(&mut self, id: PairId, timer: RnrTimer) -> Result<(), Error> {
        let pair = self.pairs.find_mut(id)?;
        // `ibv_modify_qp(3)` takes it from the transition to RTR on.
        if !pair.state.responds() {
            return Err(Error::State("min_rnr_timer is set on a connected queue pair"));
        }
        pair.responder.rnr_timer = timer;
        Ok(())
    }

    /// The address vector of `ibv_query_qp(3)`: whether it leads to this host. It outlives the
    /// connection.
    pub(crate) fn is_loopback(&self, id: PairId) -> Result<bool, Error> {
        let pair = self.pairs.find(id)?;
        let path = pair.path.ok_or(Error::State("a queue pair has a path once it is connected"))?;
        Ok(path.loopback)
    }

    /// The state of `ibv_query_qp(3)`: whether it is the error state.
    pub(crate) fn has_failed(&self, id: PairId) -> Result<bool, Error> {
        let pair = self.pairs.find(id)?;
        Ok(pair.state == QueuePairState::Error)
    }

    /// Enters the error state: everything outstanding is flushed, in order. The peer is not
    /// notified.
    pub(super) fn enter_error(&mut self, id: PairId) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let pair_shares = pair.shared.is_some() && pair.state != QueuePairState::Error;
        pair.state = QueuePairState::Error;
        self.pairs.forget_flights(&mut self.env, &mut self.contexts, id);
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.has_work() || !pair.responder.receives.is_empty() {
            self.env.count_injected(FailureClass::Flush);
        }
        if pair_shares {
            // None of its receives is flushed. This event says that it will consume none any more.
            self.tell_pair(id, LAST_REACHED);
        }
        // Before the flush: flushed bytes are their owner's, and no message may access them.
        self.cut_short_of(id);
        self.begin_flush(id);
    }

    /// Flushes when this kind of device does.
    pub(super) fn begin_flush(&mut self, id: PairId) {
        // Flushed bytes belong to their owner, and a copy still uses them. The end of the copy
        // comes back here.
        if self.pairs.get(id).is_some_and(|pair| pair.bulks > 0) {
            return;
        }
        match self.env.behaviour().map_or(Flush::AtOnce, |behaviour| behaviour.flush) {
            Flush::AtOnce => self.flush(id),
            Flush::Late(longest) => {
                let delay = self.env.by_duration(|_| longest);
                self.env.schedule(delay, Event::Flush(id));
            }
            // As soft-RoCE: `destroy_pair` drops them without completions.
            Flush::AtDestruction => {}
        }
    }

    pub(super) fn flush(&mut self, id: PairId) {
        // Each work queue in order. Between the two there is none (`ibv_poll_cq(3)`).
        while let Some(pair) = self.pairs.get_mut(id)
            && let Some(work) = pair.requester.retire()
        {
            self.end_send(id, work, Err(CompletionStatus::WR_FLUSH_ERR));
        }
        while let Some(pair) = self.pairs.get_mut(id)
            && let Some(work) = pair.responder.receives.pop_front()
        {
            let completion = failure(work.id, pair.number, CompletionStatus::WR_FLUSH_ERR);
            let queue = pair.receive_queue;
            self.report(queue, Entry::new(completion, id));
        }
    }
}
