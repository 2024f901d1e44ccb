//! Targets of faults: a host, and one of its connections.

use std::net::{IpAddr, SocketAddr};

use super::queue_pair::QueuePair;
use super::{IdentifierId, Model, PairId};
use crate::device::{Connection, PairState};
use crate::faults::Connections;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) host: u32,
    pub(super) connections: Connections,
}

/// The host and connection of an event that a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Party {
    host: u32,
    pair: Option<u32>,
    /// The peer's address, and its port if the connection manager knows it.
    peer: Option<(IpAddr, Option<u16>)>,
}

impl Party {
    /// Returns a host without a connection.
    pub(super) const fn host(host: u32) -> Self {
        Self { host, pair: None, peer: None }
    }

    pub(super) fn is(&self, target: &Target) -> bool {
        let ours = match target.connections {
            Connections::All => true,
            Connections::Pair(number) => self.pair == Some(number),
            Connections::Peer(ip) => self.peer.is_some_and(|(peer, _)| peer == ip),
            Connections::PeerAt(address) => self.peer == Some((address.ip(), Some(address.port()))),
        };
        self.host == target.host && ours
    }
}

impl Model {
    pub(super) fn party(&self, id: PairId) -> Option<Party> {
        let pair = self.pairs.get(id)?;
        let managed = pair.identifier.and_then(|id| self.identifiers.get(id)?.remote);
        let peer = managed
            .map(|remote| (remote.ip(), Some(remote.port())))
            .or_else(|| pair.path.map(|path| (path.remote, None)));
        Some(Party { host: pair.host.index(), pair: Some(pair.number), peer })
    }

    pub(super) fn managed_party(&self, id: IdentifierId) -> Option<Party> {
        let identifier = self.identifiers.get(id)?;
        let pair = identifier.pair.and_then(|pair| self.pairs.get(pair)).map(|pair| pair.number);
        let peer = identifier.remote.map(|remote| (remote.ip(), Some(remote.port())));
        Some(Party { host: identifier.host.index(), pair, peer })
    }

    /// Returns all queue pairs, by number.
    pub(crate) fn connections(&self) -> Vec<Connection> {
        let seen = |(id, pair): (PairId, &QueuePair)| {
            let identifier = pair.identifier.and_then(|id| self.identifiers.get(id));
            let ends = pair.path.map(|path| (path.local, path.remote));
            let address = |managed: Option<SocketAddr>, ip: Option<IpAddr>| {
                managed.or_else(|| ip.map(|ip| SocketAddr::new(ip, 0)))
            };
            Connection {
                pair: pair.number,
                host: self.addresses(pair.host),
                state: self.state_of(id).map_or(PairState::Error, PairState::from),
                local: address(identifier.and_then(|id| id.local), ends.map(|(local, _)| local)),
                remote: address(identifier.and_then(|id| id.remote), ends.map(|(_, remote)| remote)),
                peer: pair.path.map(|path| self.pair_number(path.peer)),
            }
        };
        let mut all: Vec<_> = self.pairs.iter().map(seen).collect();
        all.sort_unstable_by_key(|connection| connection.pair);
        all
    }

    /// Returns the queue pairs that a fault may strike.
    pub(super) fn targets(&self, target: &Target) -> Vec<PairId> {
        let is_one = |id: &PairId| self.party(*id).is_some_and(|party| party.is(target));
        self.pairs.iter().map(|(id, _)| id).filter(is_one).collect()
    }
}
