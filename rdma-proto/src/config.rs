//! Settings of a connection.

use core::time::Duration;

use crate::error::ApiMisuse;
use crate::wire::FeatureSet;

/// Receives that Valkey and libvalkey keep posted, as Valkey's document recommends (VR-RES-002).
pub const RECEIVES: u16 = 1024;

/// The largest window of a Valkey server, 16 MiB.
pub const LARGEST_WINDOW: u32 = 16 << 20;

/// How long the peer's device may leave a keepalive without an acknowledgement (VR-KEEP-006).
///
/// With limited retries the device gives up much earlier. Soft-RoCE takes a `retry_count` of 7 in
/// the peer's request as endless, and a peer without posted receives sets how long a device waits.
pub const UNACKNOWLEDGED: Duration = Duration::from_secs(120);

/// The role of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The side that connected.
    Client,
    /// The side that accepted.
    Server,
}

impl Role {
    /// Returns the default keepalives: a server sends them regularly, a client after silence.
    pub const fn keepalive(self) -> Keepalive {
        match self {
            Self::Client => Keepalive { probe: Some(Duration::from_secs(10)), ..Keepalive::NONE },
            Self::Server => Keepalive { every: Some(Duration::from_secs(3)), ..Keepalive::NONE },
        }
    }
}

/// Adds a chainable setter for each field: `#[non_exhaustive]` forbids literals in other crates.
/// For the crates above, too; no part of the interface.
#[doc(hidden)]
#[macro_export]
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

/// When to send keepalives, and how long a peer may be silent. Start from [`Keepalive::NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Keepalive {
    /// Sends a Keepalive at this interval, regardless of other traffic (VR-KEEP-001). Servers send
    /// one every 3 s; clients may (VR-KEEP-007).
    pub every: Option<Duration>,
    /// Sends a Keepalive after this much silence. The device of a busy peer acknowledges it, so
    /// only a dead host is detected (VR-KEEP-006), at the latest after [`UNACKNOWLEDGED`].
    pub probe: Option<Duration>,
    /// Ends the connection when the peer *sent* nothing for this long. Off by default, because a
    /// busy Valkey server sends nothing.
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

/// Settings of a connection, which [`Machine::new`](crate::Machine::new) checks. Start from
/// [`Config::client`] or [`Config::server`], then set fields: `Config::client().windows(1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Config {
    /// The role of this side.
    pub role: Role,
    /// Length of a receive window, in bytes, at least 1, fixed for the connection (VR-MEM-008)
    /// unless [`Config::grow_to`] says otherwise. Valkey uses 64 KiB to 16 MiB, by default 1 MiB
    /// (VR-MEM-016).
    pub window: u32,
    /// Doubles a server's window each time it was filled and read, up to this length (VR-MEM-020).
    /// The region has this length from the beginning, and is the only one: a second window saves
    /// more than a longer one. `None` by default: the length stays. So does that of a client's
    /// windows, whatever this is (VR-MEM-008).
    pub grow_to: Option<u32>,
    /// Receive windows, 1 or 2. The second is announced when the first is full, and filled while
    /// the first is read (VR-MEM-003).
    pub windows: u8,
    /// Length of the send buffer, 1 byte to 1 GiB. It holds bytes until they have arrived.
    pub send_buffer: u32,
    /// Work requests the send queue holds: 1 to 16384.
    pub send_depth: u16,
    /// Receives that the peer keeps posted, 2 to 16384: the limit of notifications (VR-FLOW-005).
    pub peer_receives: u16,
    /// The longest window a peer may register (VR-MEM-005).
    pub window_limit: u32,
    /// Features of this side, none by default. A server tells clients that ask (VR-FEAT-002); a
    /// client asks with [`Config::negotiate`].
    pub features: FeatureSet,
    /// Whether a client asks for the server's features once connected (VR-FEAT-001).
    pub negotiate: bool,
    /// Keepalive settings. `None` uses [`Role::keepalive`].
    pub keepalive: Option<Keepalive>,
    /// How long the peer may keep data waiting, for a window or receives (VR-RES-004). Off by
    /// default, because waiting calls have time-outs of their own.
    pub stall_limit: Option<Duration>,
}

impl Config {
    /// Returns the settings that suit most clients.
    pub const fn client() -> Self {
        Self {
            role: Role::Client,
            // At most this, towards a peer whose limit is unknown (VR-MEM-016).
            window: 1 << 20,
            grow_to: None,
            windows: 2,
            send_buffer: 1 << 20,
            send_depth: 256,
            peer_receives: RECEIVES,
            window_limit: LARGEST_WINDOW,
            features: FeatureSet::NONE,
            // Deployed servers offer no feature (spec/differences.md, VR-FEAT-002).
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
        grow_to: Option<u32>,
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

    /// Returns the length of a region that a window is in.
    pub const fn region(&self) -> u32 {
        match self.longest() {
            Some(longest) => longest,
            None => self.window,
        }
    }

    /// Returns up to what length a window grows, if it may.
    pub(crate) const fn longest(&self) -> Option<u32> {
        match self.role {
            Role::Client => None,
            Role::Server => self.grow_to,
        }
    }

    /// Checks that every field is within its bounds, which are those of both roles.
    ///
    /// # Errors
    /// Returns [`ApiMisuse::Config`], which names the first field out of bounds.
    pub fn check(&self) -> Result<(), ApiMisuse> {
        let keepalive = self.keepalive.unwrap_or(Keepalive::NONE);
        // Two windows would have different lengths (VR-MEM-008).
        let grow_to = self.grow_to.is_none_or(|longest| self.windows == 1 && longest >= self.window);
        // A time-out that is always due would be busy-polling (VR-FLOW-013).
        let passes = |interval: Option<Duration>| interval != Some(Duration::ZERO);
        [
            (self.window >= 1, "window", "at least 1"),
            ((1..=2).contains(&self.windows), "windows", "1 or 2"),
            (grow_to, "grow_to", "at least the window, of which there must be one"),
            // The upper bounds of these three keep counts within the bits of an id (`send.rs`).
            // Towards a peer with one receive, no payload could leave (spec/few-receives.md).
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
