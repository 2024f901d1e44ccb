//! Settings of a connection.

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

/// The side that a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that connected.
    Client,
    /// The side that accepted.
    Server,
}

impl Role {
    /// Returns the signs of life that suit this side: a server sends keepalives, a client asks for them.
    pub const fn keepalive(self) -> Keepalive {
        match self {
            Self::Client => Keepalive { probe: Some(Duration::from_secs(10)), ..Keepalive::NONE },
            Self::Server => Keepalive { every: Some(Duration::from_secs(3)), ..Keepalive::NONE },
        }
    }
}

/// Gives a settings type a method for each field that sets it and returns the settings, for chains. `#[non_exhaustive]` lets such
/// a type grow, and so forbids other crates to write it as a literal.
macro_rules! setters {
    ($($field:ident: $type:ty),+ $(,)?) => {
        $(
            #[doc = concat!("Sets `", stringify!($field), "`; see the field.")]
            #[must_use]
            pub fn $field(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            }
        )+
    };
}

/// When keepalives are sent, and how long a peer may be silent. Start from [`Keepalive::NONE`]; fields can be assigned, or set
/// in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Keepalive {
    /// Send a Keepalive this often, whatever else happens (VR-KEEP-001). Servers do, every 3 s; clients may (VR-KEEP-007).
    pub every: Option<Duration>,
    /// Send one when nothing was heard for this long. The peer's device acknowledges it even when its program is busy,
    /// so a dead host is found without disturbing a busy one (VR-KEEP-006), at the latest after [`UNACKNOWLEDGED`].
    pub probe: Option<Duration>,
    /// End the connection when the peer *sent* nothing for this long. Off by default: a busy Valkey server sends nothing.
    pub limit: Option<Duration>,
}

impl Keepalive {
    /// No keepalives, and no limit.
    pub const NONE: Self = Self { every: None, probe: None, limit: None };

    setters! {
        every: Option<Duration>,
        probe: Option<Duration>,
        limit: Option<Duration>,
    }
}

/// Settings of a connection. Start from [`Config::client`] or [`Config::server`]; fields can be assigned, or set in a chain:
/// `Config::client().window(1 << 16).windows(1)`. [`Machine::new`](crate::Machine::new) checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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
    /// Features this side has: none by default. A server tells those who ask (VR-FEAT-002); a client asks if [`Config::negotiate`].
    pub features: FeatureSet,
    /// Whether a client asks for the server's features when connected (VR-FEAT-001: optional).
    pub negotiate: bool,
    /// Signs of life; `None` for [`Role::keepalive`].
    pub keepalive: Option<Keepalive>,
    /// How long the peer may keep data waiting (no window, no receives) before the connection ends (VR-RES-004). Off by
    /// default: whoever waits has its own time-out.
    pub stall_limit: Option<Duration>,
}

impl Config {
    /// Returns the settings that suit most clients.
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
            keepalive: None,
            stall_limit: None,
        }
    }

    /// Returns the settings that suit most servers.
    pub const fn server() -> Self {
        Self { role: Role::Server, ..Self::client() }
    }

    setters! {
        role: Role,
        window: u32,
        windows: u8,
        send_buffer: u32,
        send_depth: u16,
        peer_receives: u16,
        window_limit: u32,
        features: FeatureSet,
        negotiate: bool,
        keepalive: Option<Keepalive>,
        stall_limit: Option<Duration>,
    }

    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`ApiMisuse::Config`] names the first field that is out of bounds.
    pub fn check(&self) -> Result<(), ApiMisuse> {
        let keepalive = self.keepalive.unwrap_or(Keepalive::NONE);
        let passes = |interval: Option<Duration>| interval != Some(Duration::ZERO);
        [
            (self.window >= 1, "window", "at least 1"),
            ((1..=2).contains(&self.windows), "windows", "1 or 2"),
            ((1..=1 << 30).contains(&self.send_buffer), "send_buffer", "1 to 2^30"),
            ((1..=1 << 14).contains(&self.send_depth), "send_depth", "1 to 16384"),
            ((2..=1 << 14).contains(&self.peer_receives), "peer_receives", "2 to 16384"),
            (self.window_limit >= 1, "window_limit", "at least 1"),
            (passes(keepalive.every), "keepalive.every", "longer than zero"),
            (passes(keepalive.probe), "keepalive.probe", "longer than zero"),
            (passes(keepalive.limit), "keepalive.limit", "longer than zero"),
            (passes(self.stall_limit), "stall_limit", "longer than zero"),
        ]
        .into_iter()
        .find(|(within, ..)| !within)
        .map_or(Ok(()), |(_, field, bounds)| Err(ApiMisuse::Config { field, bounds }))
    }
}
