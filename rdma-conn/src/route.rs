//! Whether a peer is on this machine: the rule of protected modes (VR-SEC-008).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::{CmEventKind, EventChannel, Identifier};

use crate::endpoint::{Descriptors, readable};
use crate::error::Error;

/// Returns whether a path that leaves from `here`, an address of this machine, and leads to `there`
/// stays on this machine: it leads to the same address, or through the loopback interface.
pub fn is_one_machine(here: IpAddr, there: IpAddr) -> bool {
    let [here, there] = [here, there].map(|address| address.to_canonical());
    // The kernel takes the unspecified address for this machine, and loopback addresses for one.
    here == there || there.is_unspecified() || (here.is_loopback() && there.is_loopback())
}

/// Returns whether the path to `peer` by an RDMA device leads back to the machine it leaves from.
/// Nothing is sent to the peer.
///
/// A connection to such a peer is local at both ends ([`Connection::is_local`]), and a server in
/// protected mode admits it.
///
/// # Errors
/// Returns an error if there is no RDMA device, no device has a path to the peer, or resolving its
/// address takes longer than `timeout`.
///
/// [`Connection::is_local`]: crate::Connection::is_local
pub fn leads_back<B: Descriptors>(backend: &B, peer: SocketAddr, timeout: Duration) -> Result<bool, Error> {
    const DOING: &str = "resolving the address";
    Error::unless_forked()?;
    let by = backend.now().after(timeout);
    let events = backend.event_channel().map_err(Error::backend("opening an event channel"))?;
    let id = events.create_id().map_err(Error::backend("creating a connection identifier"))?;
    id.resolve_address(None, peer, timeout).map_err(Error::backend(DOING))?;
    loop {
        let event = events.next_event().map_err(Error::backend("reading events"))?;
        match event.map(|event| event.kind) {
            Some(CmEventKind::AddressResolved) => {
                return Ok(id.local_addr().is_some_and(|here| is_one_machine(here.ip(), peer.ip())));
            }
            Some(CmEventKind::AddressError { status }) => {
                return Err(Error::unreachable(peer, "no RDMA device has a way to its address", status));
            }
            Some(_) => {}
            None => {
                let left = by.since(backend.now());
                if left.is_zero() {
                    return Err(Error::TimedOut { doing: DOING, after: timeout, peer: Some(peer) });
                }
                readable(&events, Some(left))?;
            }
        }
    }
}
