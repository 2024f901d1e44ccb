//! The ends in a recording, and which two of them form a connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::recording::{Entry, EntryKind, Recording};

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionEnd {
    /// Whether its beginning is recorded.
    pub(super) begun: bool,
    /// Whether it accepted the connection.
    pub(super) server: bool,
    pub(super) pair: Option<u32>,
    /// Its address, and the peer's.
    pub(super) addresses: Option<(SocketAddr, SocketAddr)>,
    pub(super) other: Option<u32>,
}

pub(super) fn of(recording: &Recording) -> BTreeMap<u32, ConnectionEnd> {
    let mut ends = BTreeMap::<u32, ConnectionEnd>::new();
    for Entry { end, what, .. } in recording.entries.iter().filter(|entry| entry.end > 0) {
        let end = ends.entry(*end).or_default();
        match *what {
            EntryKind::Created => end.begun = true,
            EntryKind::Requested { .. } => (end.begun, end.server) = (true, true),
            EntryKind::QueuePair { number, .. } => end.pair = Some(number),
            EntryKind::Connecting { local: Some(local), peer: Some(peer), .. } => {
                end.addresses = Some((local, peer));
            }
            _ => {}
        }
    }
    let clients: Vec<_> = ends
        .iter()
        .filter(|(_, end)| !end.server)
        .filter_map(|(number, end)| Some((*number, end.addresses?)))
        .collect();
    for (client, (local, peer)) in clients {
        // Ports are reused. The first end without a partner is the right one.
        let server = ends
            .iter()
            .find(|(_, end)| end.server && end.other.is_none() && end.addresses == Some((peer, local)));
        if let Some(server) = server.map(|(number, _)| *number) {
            for (this, that) in [(client, server), (server, client)] {
                if let Some(end) = ends.get_mut(&this) {
                    end.other = Some(that);
                }
            }
        }
    }
    ends
}
