//! The connections for READs.

use std::net::SocketAddr;

use rdma_backend::{CmEvent, CmEventKind, ConnectParams, Identifier, IdentifierKey, QueuePairLimits};
use rdma_conn::Descriptors;

use super::{Member, Publisher};
use crate::error::Error;

/// A reader's connection for READs.
pub(super) struct Data<B: Descriptors> {
    _pair: B::QueuePair,
    id: B::Identifier,
}

impl<B: Descriptors> Publisher<B> {
    pub(super) fn handle_data(&mut self, event: CmEvent<B>) -> Result<(), Error> {
        let now = self.backend.now();
        match event.kind {
            CmEventKind::ConnectRequest { id, peer } => self.admit(id, peer),
            CmEventKind::Established { .. } => {
                if let Some(at) = self.find(event.id)
                    && let Some(member) = self.members.get_mut(at)
                {
                    member.session.handle_established(self.config.lease, now);
                }
            }
            kind @ (CmEventKind::Disconnected
            | CmEventKind::ConnectError { .. }
            | CmEventKind::Unreachable { .. }
            | CmEventKind::DeviceRemoval) => self.data_ended(event.id, &kind)?,
            CmEventKind::Async(told) if told.is_fatal() => {
                self.data_ended(event.id, &CmEventKind::Async(told))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn find(&self, key: IdentifierKey) -> Option<usize> {
        self.members.iter().position(|member| member.data.as_ref().is_some_and(|data| data.id.key() == key))
    }

    fn data_ended(&mut self, key: IdentifierKey, kind: &CmEventKind<B>) -> Result<(), Error> {
        if key == self.data_listener.key() {
            return Err(Error::DataEnded("the device of the listener failed or was removed"));
        }
        // A finished reader may say so after it has disconnected, so its message is awaited.
        if let Some(member) = self.find(key).and_then(|at| self.members.get_mut(at)) {
            tracing::debug!(?kind, "a reader's connection for READs ended");
            member.data = None;
        }
        Ok(())
    }

    /// Creates a queue pair in the snapshot's domain for a reader that has proven the secret and
    /// announced this address. All others are rejected, by dropping their identifiers
    /// (VS-AUTH-003).
    fn admit(&mut self, id: B::Identifier, asked: ConnectParams) {
        let from = id.peer_addr().map(canonical);
        let expected =
            |member: &Member<B>| member.data.is_none() && member.session.expects().map(canonical) == from;
        let place = from.and_then(|_| self.members.iter().position(expected));
        let Some(member) = place.and_then(|at| self.members.get_mut(at)) else {
            tracing::warn!(?from, "a connection for READs that no reader has announced was rejected");
            return;
        };
        let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
        let made = (|| {
            let depth = id.capabilities()?.max_read_depth.min(self.config.depth);
            let pair = id.create_queue_pair(self.store.domain(), &self.queue, limits)?;
            let params = ConnectParams {
                responder_resources: depth.min(asked.responder_resources),
                initiator_depth: 0,
                retry_count: 0,
                rnr_retry_count: 0,
            };
            id.accept(&params, &[])?;
            Ok::<_, B::Error>(pair)
        })();
        match made {
            Ok(pair) => member.data = Some(Data { _pair: pair, id }),
            Err(error) => tracing::warn!(%error, "a reader's connection for READs was not made"),
        }
    }
}

/// Returns the address without a mapping of IPv4 into IPv6.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
