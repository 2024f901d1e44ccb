//! An opened device (`ibv_open_device(3)`): objects without an identifier, and their asynchronous
//! events.
//!
//! Programs that speak verbs make queue pairs on a device, change their state themselves and find
//! their peers by number and address. If the connection manager connects them, it is told which to
//! connect.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use rdma_backend::{AsyncEvent, RnrTimer};

use super::identifier::{Phase, ack_timeout};
use super::objects::PairAttributes;
use super::queue_pair::{Owner, Path, QueuePair, QueuePairState};
use super::responder::Responder;
use super::{ContextId, DomainId, HostId, IdentifierId, Model, PairId, QueueId, Wake};
use crate::Error;
use crate::device::Offered;
use crate::request::Rights;

pub(crate) struct Context {
    pub(super) host: HostId,
    notices: VecDeque<AsyncNotice>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsyncNotice {
    pub(crate) event: AsyncEvent,
    pub(crate) about: About,
}

/// The object of the event, by its creator's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// A queue pair.
    Pair(u64),
    /// A completion queue.
    Queue(u64),
    /// A shared receive queue.
    Shared(u64),
    /// The device or its port.
    Device,
}

/// Maximum waiting events of one context. A program that reads none misses later ones.
const MOST_NOTICES: usize = 1024;

impl Model {
    pub(crate) fn open(&mut self, host: HostId) -> Result<ContextId, Error> {
        self.alive(host)?;
        Ok(self.contexts.insert(Context { host, notices: VecDeque::new() }))
    }

    pub(crate) fn close(&mut self, id: ContextId) {
        self.contexts.remove(id);
    }

    pub(super) fn opened(&self, id: ContextId) -> Result<HostId, Error> {
        Ok(self.contexts.get(id).ok_or(Error::Gone("device context"))?.host)
    }

    pub(super) fn tell(&mut self, id: ContextId, event: AsyncEvent, about: About) {
        let Some(context) = self.contexts.get_mut(id) else { return };
        if context.notices.len() < MOST_NOTICES {
            context.notices.push_back(AsyncNotice { event, about });
        }
        if context.notices.len() == 1 {
            self.wakes.push(Wake::Asynchronous(id));
        }
    }

    /// Takes the next asynchronous event, and returns whether it was the last.
    pub(crate) fn take_async(&mut self, id: ContextId) -> Result<(Option<AsyncNotice>, bool), Error> {
        let context = self.contexts.get_mut(id).ok_or(Error::Gone("device context"))?;
        let notice = context.notices.pop_front();
        Ok((notice, context.notices.is_empty()))
    }

    pub(crate) fn create_domain_in(&mut self, id: ContextId) -> Result<DomainId, Error> {
        let host = self.opened(id)?;
        self.make_domain(host)
    }

    pub(crate) fn create_queue_in(&mut self, id: ContextId, name: u64, depth: u32) -> Result<QueueId, Error> {
        let host = self.opened(id)?;
        self.make_queue(host, depth, Some((id, name)))
    }

    pub(crate) fn create_pair_in(
        &mut self,
        id: ContextId,
        name: u64,
        attributes: &PairAttributes,
    ) -> Result<(PairId, u32, usize), Error> {
        let host = self.opened(id)?;
        self.make_pair(host, attributes, Owner::Context(id, name))
    }

    /// `ibv_modify_qp(3)` to RESET: as new, and posted requests are never reported.
    pub(crate) fn reset(&mut self, id: PairId) -> Result<(), Error> {
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        pair.state = QueuePairState::Reset;
        self.cut_short_of(id);
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        pair.path = None;
        pair.requester.renew();
        pair.responder = Responder::new();
        (pair.held, pair.ownership, pair.cut) = Default::default();
        self.free_nothing(id);
        self.capture_end(id);
        Ok(())
    }

    /// `ibv_modify_qp(3)` to INIT.
    pub(crate) fn initialise(&mut self, id: PairId) -> Result<(), Error> {
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
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
        let theirs = self.host_at(remote);
        let peer = self.numbered(number, remote).unwrap_or(PairId::NONE);
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
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        if pair.key.is_none() != has_peer {
            return Err(Error::Argument("a connected queue pair has a peer, and one for datagrams has none"));
        }
        if pair.state != QueuePairState::Idle {
            return Err(Error::State("RTR comes after INIT"));
        }
        pair.state = QueuePairState::Receiving;
        Ok(pair)
    }

    /// Returns the queue pair with this number at an address.
    pub(super) fn numbered(&self, number: u32, at: IpAddr) -> Option<PairId> {
        let id = self.numbers.pair(number)?;
        let host = self.hosts.get(self.pairs.get(id)?.host)?;
        host.has(at).then_some(id)
    }

    /// `qp_access_flags` of `ibv_modify_qp(3)`.
    pub(crate) fn set_rights(&mut self, id: PairId, rights: Rights) -> Result<(), Error> {
        self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?.rights = rights;
        Ok(())
    }

    /// `qkey` of `ibv_modify_qp(3)`.
    pub(crate) fn set_key(&mut self, id: PairId, key: u32) -> Result<(), Error> {
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
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
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        match pair.state {
            QueuePairState::Receiving => {
                pair.state = QueuePairState::Ready;
                pair.requester.configure(retry, rnr_retry, read_depth);
                Ok(())
            }
            QueuePairState::Ready => Ok(()),
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
        match self.pairs.get(id).ok_or(Error::Gone("queue pair"))?.state {
            QueuePairState::Reset => Err(Error::State("a queue pair that is reset does not fail")),
            _ => {
                self.enter_error(id);
                Ok(())
            }
        }
    }

    pub(crate) fn set_ack_timeout(&mut self, id: PairId, code: u8) -> Result<(), Error> {
        let timeout = ack_timeout(code)?;
        self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?.requester.ack_timeout = Some(timeout);
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
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        if !matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining) {
            return Err(Error::State("SQD comes after RTS"));
        }
        pair.state = QueuePairState::Draining;
        pair.requester.begin_drain(notify);
        self.tell_drained(id);
        Ok(())
    }

    pub(crate) fn state_of(&self, id: PairId) -> Result<QueuePairState, Error> {
        Ok(self.pairs.get(id).ok_or(Error::Gone("queue pair"))?.state)
    }

    /// `ibv_query_qp(3)`: the addresses between which it sends, and the number it sends to.
    pub(crate) fn ends_of(&self, id: PairId) -> Option<(IpAddr, IpAddr, u32)> {
        let path = self.pairs.get(id)?.path?;
        Some((path.local, path.remote, self.pair_number(path.peer)))
    }

    /// `rdma_bind_addr(3)`.
    pub(crate) fn bind(&mut self, id: IdentifierId, address: SocketAddr) -> Result<(), Error> {
        let identifier = self.identifiers.get(id).ok_or(Error::Gone("identifier"))?;
        if identifier.phase != Phase::Idle || identifier.bound.is_some() {
            return Err(Error::State("an identifier is bound once, before anything else"));
        }
        let devices = self.devices_at(identifier.host, address.ip())?;
        let address = self.claim(&devices, address)?;
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.take_device(&devices);
            identifier.bound = Some(address);
            identifier.local = Some(address);
        }
        Ok(())
    }

    /// `rdma_listen(3)` on a bound identifier.
    pub(crate) fn listen_on(&mut self, id: IdentifierId, backlog: u32) -> Result<(), Error> {
        let identifier = self.identifiers.get(id).ok_or(Error::Gone("identifier"))?;
        let (Phase::Idle, Some(local)) = (identifier.phase, identifier.local) else {
            return Err(Error::State("an identifier listens once it is bound"));
        };
        self.begin_listening(id, local, backlog)
    }

    /// `rdma_connect(3)` or `rdma_accept(3)` with a queue pair made on the device.
    pub(crate) fn lend_pair(&mut self, id: IdentifierId, pair: PairId) -> Result<(), Error> {
        let identifier = self.identifiers.get(id).ok_or(Error::Gone("identifier"))?;
        let queue_pair = self.pairs.get(pair).ok_or(Error::Gone("queue pair"))?;
        if queue_pair.host != identifier.host
            || queue_pair.state != QueuePairState::Idle
            || queue_pair.key.is_some()
        {
            return Err(Error::State("a queue pair is connected from INIT, on its own device"));
        }
        if queue_pair.identifier.is_some_and(|other| other != id && self.identifiers.get(other).is_some()) {
            return Err(Error::State("another identifier connects this queue pair"));
        }
        self.join(id, pair);
        Ok(())
    }

    /// Like [`Model::lend_pair`], with a queue pair whose owner changes its state.
    pub(crate) fn lend_external(&mut self, id: IdentifierId, pair: PairId) -> Result<(), Error> {
        let host = self.pairs.get(pair).ok_or(Error::Gone("queue pair"))?.host;
        let identifier = self.identifiers.get_mut(id).ok_or(Error::Gone("identifier"))?;
        if identifier.host != host {
            return Err(Error::State("a queue pair is connected on its own device"));
        }
        identifier.external = true;
        self.join(id, pair);
        Ok(())
    }

    /// Returns what `rdma_init_qp_attr(3)` tells of a connection: both addresses, the number of the
    /// peer's queue pair, how many READs this side may have outstanding, and how often it retries
    /// without a receive.
    pub(crate) fn offered(&self, id: IdentifierId) -> Result<Offered, Error> {
        let identifier = self.identifiers.get(id).ok_or(Error::Gone("identifier"))?;
        let (local, remote) = self.ends(id).ok_or(Error::State("the identifier has no peer"))?;
        Ok(Offered {
            local,
            remote: remote.ip(),
            peer: identifier.peer_pair.map_or(0, |pair| self.pair_number(pair)),
            theirs: identifier.theirs,
            retry: match identifier.phase {
                Phase::Requested | Phase::Accepted => identifier.theirs.retry_count,
                _ => identifier.ours.retry_count,
            },
        })
    }
}
