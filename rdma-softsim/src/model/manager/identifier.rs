//! An identifier of the connection manager.

use core::time::Duration;
use std::collections::VecDeque;
use std::net::SocketAddr;

use rdma_backend::time::Instant;
use rdma_backend::{ConnectParams, IdentifierKey};

use crate::error::Error;
use crate::model::base::arena::OnHost;
use crate::model::base::event_queue::Key;
use crate::model::base::ids::{ChannelId, HostId, IdentifierId, PairId};

/// `-ETIMEDOUT`.
pub(in crate::model) const TIMED_OUT: i32 = -110;
/// `-ENETUNREACH`.
pub(in crate::model) const NET_UNREACHABLE: i32 = -101;
/// A listener's default backlog, `net.rdma_ucm.max_backlog`.
const MAX_BACKLOG: u32 = 1024;
/// With this many unread events, an identifier begins no resolution, which would end in another.
/// They are within [`OBJECT`](crate::footprint::OBJECT).
pub(in crate::model) const MOST_UNREAD: usize = 8;
/// Reject reason of a side that stopped waiting (InfiniBand CM, table of REJ reasons).
pub(in crate::model) const REJECT_TIMEOUT: i32 = 4;

/// Maximum private data of a request, a reply and a reject (`rdma_connect(3)`, `rdma_accept(3)`,
/// `rdma_reject(3)`).
pub(in crate::model) const REQUEST_DATA: usize = 56;
pub(in crate::model) const REPLY_DATA: usize = 196;
pub(in crate::model) const REJECT_DATA: usize = 148;

/// Private data as received: its field has a fixed length, so the sent length is unknown.
pub(in crate::model) fn padded(data: &[u8], room: usize) -> Box<[u8]> {
    let mut field = vec![0; room];
    // It fits: `Manager::offer` and `Manager::reject` have checked the length.
    if let Some(front) = field.get_mut(..data.len()) {
        front.copy_from_slice(data);
    }
    field.into()
}

/// Returns how many unread requests a listener may have that asks for so many (`rdma_listen(3)`).
#[must_use]
pub const fn listen_backlog(backlog: u32) -> u32 {
    // As the kernel does (`ucma_listen`), which knows no backlog of zero.
    if backlog == 0 || backlog > MAX_BACKLOG { MAX_BACKLOG } else { backlog }
}

pub(crate) struct Identifier {
    pub(in crate::model) host: HostId,
    /// The channel of its events. None while it is that of an unread request: the kernel ignores
    /// its events then (`ucma_event_handler`).
    pub(in crate::model) channel: ChannelId,
    pub(in crate::model) key: IdentifierKey,
    pub(in crate::model) phase: Phase,
    /// How many resolutions of its address or route have ended.
    pub(in crate::model) resolutions: u64,
    /// The scheduled ends of the current one, of which the first counts.
    pub(in crate::model) ends: Vec<Key>,
    pub(in crate::model) bound: Option<SocketAddr>,
    pub(in crate::model) local: Option<SocketAddr>,
    pub(in crate::model) remote: Option<SocketAddr>,
    pub(in crate::model) pair: Option<PairId>,
    /// The traffic class of what its connection sends.
    pub(in crate::model) traffic_class: u8,
    /// The acknowledgement timeout of its queue pair, if its owner sets one.
    pub(in crate::model) ack_timeout: Option<Duration>,
    /// Whether its owner changes the queue pair's state, and says when the connection can be used
    /// (`rdma_establish(3)`).
    pub(in crate::model) external: bool,
    pub(in crate::model) peer: Option<IdentifierId>,
    pub(in crate::model) peer_pair: Option<PairId>,
    /// When its last message reaches the peer.
    pub(in crate::model) arrival: Instant,
    /// The parameters of both sides, as each passed them.
    pub(in crate::model) ours: ConnectParams,
    pub(in crate::model) theirs: ConnectParams,
    /// The request's `retry_count`, which applies to both sides: `rdma_accept(3)` ignores its own.
    pub(in crate::model) retry: u8,
    /// The numbers of its unread events, and how many of them are connect requests.
    pub(in crate::model) unread: VecDeque<u64>,
    pub(in crate::model) requests: u32,
}

impl OnHost for Identifier {
    const NAME: &'static str = "identifier";

    fn host(&self) -> HostId {
        self.host
    }
}

/// The phase of an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Phase {
    Idle,
    ResolvingAddress,
    /// No host has the remote address. One that joins in time may.
    AwaitingHost,
    AddressResolved,
    ResolvingRoute,
    RouteResolved,
    Listening {
        backlog: u32,
    },
    /// The active side has sent its request.
    Connecting,
    /// The active side was accepted, and its owner has not read that.
    Answered,
    /// The passive side has an undecided request.
    Requested,
    /// The passive side has accepted and waits for the active one to be ready.
    Accepted,
    Connected,
    /// It has ended the connection and waits for the peer to do so.
    Disconnecting,
    /// The peer has ended the connection.
    PeerGone,
    Closed,
}

const NO_PARAMS: ConnectParams =
    ConnectParams { responder_resources: 0, initiator_depth: 0, retry_count: 0, rnr_retry_count: 0 };

/// Returns the acknowledgement timeout for a code of `ibv_modify_qp(3)`.
pub(in crate::model) const fn ack_timeout(code: u8) -> Result<Duration, Error> {
    /// The field has five bits.
    const MOST: u8 = 31;
    match code {
        // 4.096 µs · 2^code, and no timer at all for 0 (IBA 9.7.6.1.3).
        0 => Ok(Duration::MAX),
        1..=MOST => Ok(Duration::from_nanos(4096 << code)),
        _ => Err(Error::Argument("the time-out is at most 31")),
    }
}

impl Identifier {
    pub(in crate::model) const fn new(
        host: HostId,
        channel: ChannelId,
        key: IdentifierKey,
        phase: Phase,
    ) -> Self {
        Self {
            host,
            channel,
            key,
            phase,
            resolutions: 0,
            ends: Vec::new(),
            bound: None,
            local: None,
            remote: None,
            pair: None,
            traffic_class: 0,
            ack_timeout: None,
            external: false,
            peer: None,
            peer_pair: None,
            arrival: Instant::from_start(Duration::ZERO),
            ours: NO_PARAMS,
            theirs: NO_PARAMS,
            retry: 0,
            unread: VecDeque::new(),
            requests: 0,
        }
    }
}
