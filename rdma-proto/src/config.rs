//! What a connection may be told about itself.

use core::time::Duration;

use crate::error::ApiMisuse;
use crate::wire::FeatureSet;

/// Receives that a Valkey server and libvalkey keep posted; the document recommends it (VR-RES-002).
pub const RECEIVES: u16 = 1024;

/// The largest window that a Valkey server can be configured to, 16 MiB.
pub const LARGEST_WINDOW: u32 = 16 << 20;

/// How long the peer's device may leave a keepalive without an acknowledgement (VR-KEEP-006). The device itself gives up much
/// earlier where retries are limited; soft-RoCE takes a `retry_count` of 7 in the peer's request for endless, and a peer that
/// posts no receives makes the device wait as long as that peer chose.
pub const UNACKNOWLEDGED: Duration = Duration::from_secs(120);

/// Who connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that connected.
    Client,
    /// The side that accepted.
    Server,
}

/// How life is shown and watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Keepalive {
    /// Send a Keepalive this often, whatever else happens (VR-KEEP-001). Servers do, every 3 s; clients may (VR-KEEP-007).
    pub every: Option<Duration>,
    /// Send one when nothing was heard for this long. The peer's device acknowledges it even when its program is busy,
    /// so a dead host is found without disturbing a busy one (VR-KEEP-006), at the latest after [`UNACKNOWLEDGED`].
    pub probe: Option<Duration>,
    /// End the connection when the peer *sent* nothing for this long. Off by default: a busy Valkey server sends nothing.
    pub limit: Option<Duration>,
}

/// Settings of a connection. Start from [`Config::client`] or [`Config::server`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Which side this is.
    pub role: Role,
    /// Length of a receive window, in bytes; the same for the life of the connection (VR-MEM-008). At least 1; Valkey
    /// itself uses 64 KiB to 16 MiB, by default 1 MiB (VR-MEM-016).
    pub window: u32,
    /// Receive windows, 1 or 2. With two, the second is announced as soon as the first is full, and filled while the
    /// application still reads the first (VR-MEM-003).
    pub windows: u8,
    /// Length of the buffer in which outgoing bytes wait for window, credit and acknowledgement: 1 byte to 1 GiB.
    pub send_buffer: u32,
    /// Work requests the send queue holds: 1 to 16384.
    pub send_depth: u16,
    /// Receives the peer is assumed to keep posted: 2 to 16384. Never more notifications are in flight (VR-FLOW-005).
    pub peer_receives: u16,
    /// The longest window a peer may register (VR-MEM-005).
    pub window_limit: u32,
    /// Features this side has. None is defined.
    pub features: FeatureSet,
    /// Whether a client asks for the server's features when connected (VR-FEAT-001: optional).
    pub negotiate: bool,
    /// Signs of life.
    pub keepalive: Keepalive,
    /// How long the peer may keep data waiting (no window, no receives) before the connection ends (VR-RES-004). Off by
    /// default: whoever waits has its own time-out.
    pub stall_limit: Option<Duration>,
}

impl Config {
    /// What a client usually wants.
    pub const fn client() -> Self {
        Self {
            role: Role::Client,
            window: 1 << 20,
            windows: 2,
            send_buffer: 1 << 20,
            send_depth: 256,
            peer_receives: RECEIVES,
            window_limit: LARGEST_WINDOW,
            features: FeatureSet::NONE,
            negotiate: false,
            keepalive: Keepalive { every: None, probe: Some(Duration::from_secs(10)), limit: None },
            stall_limit: None,
        }
    }

    /// What a server usually wants.
    pub const fn server() -> Self {
        let keepalive = Keepalive { every: Some(Duration::from_secs(3)), probe: None, limit: None };
        Self { role: Role::Server, keepalive, ..Self::client() }
    }

    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`ApiMisuse::Config`] names the first field that is out of bounds.
    pub fn check(&self) -> Result<(), ApiMisuse> {
        let passes = |interval: Option<Duration>| interval != Some(Duration::ZERO);
        [
            (self.window >= 1, "window", "at least 1"),
            ((1..=2).contains(&self.windows), "windows", "1 or 2"),
            ((1..=1 << 30).contains(&self.send_buffer), "send_buffer", "1 to 2^30"),
            ((1..=1 << 14).contains(&self.send_depth), "send_depth", "1 to 16384"),
            ((2..=1 << 14).contains(&self.peer_receives), "peer_receives", "2 to 16384"),
            (self.window_limit >= 1, "window_limit", "at least 1"),
            (passes(self.keepalive.every), "keepalive.every", "longer than zero"),
            (passes(self.keepalive.probe), "keepalive.probe", "longer than zero"),
            (passes(self.keepalive.limit), "keepalive.limit", "longer than zero"),
            (passes(self.stall_limit), "stall_limit", "longer than zero"),
        ]
        .into_iter()
        .find(|(within, ..)| !within)
        .map_or(Ok(()), |(_, field, bounds)| Err(ApiMisuse::Config { field, bounds }))
    }
}
