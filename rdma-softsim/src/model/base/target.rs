//! Targets of faults: a host, and one of its connections.

use std::net::IpAddr;

use crate::faults::Connections;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Target {
    pub(in crate::model) host: u32,
    pub(in crate::model) connections: Connections,
}

/// The host and connection of an event that a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct Party {
    pub(in crate::model) host: u32,
    pub(in crate::model) pair: Option<u32>,
    /// The peer's address, and its port if the connection manager knows it.
    pub(in crate::model) peer: Option<(IpAddr, Option<u16>)>,
}

impl Party {
    /// Returns a host without a connection.
    pub(in crate::model) const fn host(host: u32) -> Self {
        Self { host, pair: None, peer: None }
    }

    pub(in crate::model) fn is(&self, target: &Target) -> bool {
        let ours = match target.connections {
            Connections::All => true,
            Connections::Pair(number) => self.pair == Some(number),
            Connections::Peer(ip) => self.peer.is_some_and(|(peer, _)| peer == ip),
            Connections::PeerAt(address) => self.peer == Some((address.ip(), Some(address.port()))),
        };
        self.host == target.host && ours
    }
}
