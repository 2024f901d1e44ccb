//! Faults as data: what befalls a simulated fabric, and when.

use std::net::{IpAddr, SocketAddr};

use crate::failure_class::FailureClass;

/// The faults of a simulation: a list, so that it can be written down, read back and made smaller.
pub type FaultPlan = Vec<Injection>;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Injection {
    /// When it may happen.
    pub when: When,
    /// Whom it befalls: hosts count from 0 in the order of their creation.
    pub host: u32,
    /// The fault. It strikes once, at the first object of the host that it can strike.
    pub fault: Fault,
}

/// From when on a fault waits for something to strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum When {
    /// After so many events of the simulation.
    Event(u64),
    /// From this pass on through a place that faults can strike.
    Pass(Site, u32),
}

/// Which connections of a host a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// All of them, and what belongs to none.
    All,
    /// That of the queue pair with this number.
    Pair(u32),
    /// Those with a peer at this address.
    Peer(IpAddr),
    /// That with a peer at this address and port, as the connection manager knows them.
    PeerAt(SocketAddr),
}

/// How often a fault strikes that may strike again and again: at so many of [`Chance::OF`] things that it can strike, drawn from the
/// fabric's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chance {
    /// How many of [`Chance::OF`].
    pub times: u32,
}

impl Chance {
    /// A million.
    pub const OF: u64 = 1_000_000;
}

/// Places that faults can strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Site {
    /// Work is posted.
    Post,
    /// A message arrives.
    Arrive,
    /// Its answer arrives.
    Answer,
    /// A completion is reported.
    Report,
    /// An object or a region is made.
    Create,
    /// An address or a route is resolved.
    Resolve,
    /// A message of the connection manager arrives.
    Packet,
}

impl Site {
    pub(crate) const COUNT: usize = 7;
}

/// A fault that can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Fault {
    /// The device has no receive for the next notifications, however many are posted.
    NotReady {
        /// How many.
        times: u8,
    },
    /// Nothing passes to or from the host for so long. Longer than the retries last, it ends what is in flight.
    LinkDown {
        /// How long.
        micros: u32,
    },
    /// The device refuses the next WRITE.
    KeyRefused,
    /// The memory of the next SEND's receive is gone.
    ReceiveGone,
    /// The memory of the next request is gone; the peer learns nothing.
    SourceGone,
    /// The completion queue is lost at the next completion.
    QueueLost,
    /// The next work request is refused for lack of room, after earlier ones of its chain were taken.
    QueueFull,
    /// Completions are held back, to come in a burst.
    Hold {
        /// How long.
        micros: u32,
    },
    /// An event of a completion queue that has nothing new.
    Spurious,
    /// The next message is lost.
    Lose,
    /// The next answer is lost, so that the message comes twice.
    LoseAnswer,
    /// The address is not resolved.
    AddressError,
    /// The route is not resolved.
    RouteError,
    /// The connect request is never answered.
    Unreachable,
    /// The connect request is rejected.
    Rejected {
        /// With this reason.
        reason: i32,
    },
    /// The active side cannot make its queue pair ready.
    ConnectError,
    /// The passive side learns late that it is connected.
    SlowReady {
        /// How late.
        micros: u32,
    },
    /// The device is removed.
    DeviceRemoval,
    /// The device fails, and the connection manager says nothing.
    DeviceFatal,
    /// The device refuses the next WRITE as invalid.
    RequestRefused,
    /// The address changes.
    AddressChange,
    /// A queue pair fails by itself.
    PairFatal,
    /// The process ends without a word; its kernel disconnects.
    Kill,
    /// The next object or region cannot be made.
    Exhausted,
    /// The program on the host does not run for so long. For the harness to obey, see
    /// [`Simulation::stalled_until`](crate::Simulation::stalled_until).
    Stall {
        /// How long.
        micros: u32,
    },
}

impl Fault {
    /// The class of failure that it brings about.
    #[must_use]
    pub const fn class(self) -> FailureClass {
        match self {
            Self::NotReady { .. } => FailureClass::ReceiverNotReady,
            Self::LinkDown { .. } => FailureClass::RetriesExceeded,
            Self::KeyRefused => FailureClass::AccessRefused,
            Self::ReceiveGone => FailureClass::ReceiveMemoryGone,
            Self::SourceGone => FailureClass::LocalProtection,
            Self::QueueLost => FailureClass::QueueOverrun,
            Self::QueueFull => FailureClass::SendQueueFull,
            Self::Hold { .. } => FailureClass::CompletionOrder,
            Self::Spurious => FailureClass::EventCoalescing,
            Self::Lose | Self::LoseAnswer => FailureClass::PacketLoss,
            Self::AddressError
            | Self::RouteError
            | Self::Unreachable
            | Self::Rejected { .. }
            | Self::ConnectError => FailureClass::ConnectionSetup,
            Self::SlowReady { .. } => FailureClass::EstablishmentRace,
            Self::Kill => FailureClass::DisconnectMidWrite,
            Self::DeviceRemoval
            | Self::DeviceFatal
            | Self::RequestRefused
            | Self::AddressChange
            | Self::PairFatal => FailureClass::AbruptEvent,
            Self::Exhausted => FailureClass::Exhaustion,
            Self::Stall { .. } => FailureClass::SlowConsumer,
        }
    }

    /// Returns whether connections of the host may end by it. The others only cost time.
    #[must_use]
    pub const fn may_end_connections(self) -> bool {
        match self {
            Self::NotReady { .. }
            | Self::Hold { .. }
            | Self::Spurious
            | Self::Lose
            | Self::LoseAnswer
            | Self::SlowReady { .. }
            | Self::AddressChange
            | Self::Stall { .. } => false,
            // Seven retries last half a second. A longer outage uses them up, or lets them outlast the news that the peer
            // has gone in the meantime.
            Self::LinkDown { micros } => micros > 150_000,
            _ => true,
        }
    }

    /// Whether it strikes a connection, so that [`Connections`] can say which. The others strike all that is on a host.
    #[must_use]
    pub const fn strikes_connections(self) -> bool {
        !matches!(
            self,
            Self::Spurious
                | Self::DeviceRemoval
                | Self::DeviceFatal
                | Self::AddressChange
                | Self::Kill
                | Self::Exhausted
                | Self::Stall { .. }
        )
    }

    /// Whether it strikes at its moment, rather than at something the host does next.
    #[must_use]
    pub const fn strikes_by_itself(self) -> bool {
        matches!(
            self,
            Self::LinkDown { .. }
                | Self::Spurious
                | Self::DeviceRemoval
                | Self::DeviceFatal
                | Self::AddressChange
                | Self::PairFatal
                | Self::Kill
                | Self::Stall { .. }
        )
    }
}
