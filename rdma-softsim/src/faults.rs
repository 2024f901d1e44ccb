//! Faults of a simulated fabric, as data.

use std::net::{IpAddr, SocketAddr};

use crate::failure_class::FailureClass;

/// The faults of a simulation, as a list that can be written, read back and reduced.
pub type FaultPlan = Vec<Injection>;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Injection {
    /// When it may happen.
    pub when: When,
    /// The host, counted from 0 in the order of creation.
    pub host: u32,
    /// The fault. It strikes once, at the first object of the host that it can strike.
    pub fault: Fault,
}

/// When a fault becomes active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum When {
    /// After this many events of the simulation.
    Event(u64),
    /// At this pass, counted, through a place that faults can strike.
    Pass(Site, u32),
}

/// The connections of a host that a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// All connections, and objects that belong to none.
    All,
    /// The connection of the queue pair with this number.
    Pair(u32),
    /// Connections with a peer at this address.
    Peer(IpAddr),
    /// The connection with a peer at this address and port, as the connection manager knows them.
    PeerAt(SocketAddr),
}

/// How often a repeated fault strikes: at this many of [`Chance::OF`] possible targets, drawn from
/// the fabric's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chance {
    /// This many of [`Chance::OF`].
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

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Fault {
    /// The device has no receive for the next notifications, however many are posted.
    NotReady {
        /// How many.
        times: u8,
    },
    /// Nothing passes to or from the host for this long. If the retries end before, requests in
    /// flight fail.
    LinkDown {
        /// How long.
        micros: u32,
    },
    /// The device refuses the next WRITE.
    KeyRefused,
    /// The memory of the next SEND's receive is gone.
    ReceiveGone,
    /// The memory of the next request is gone. The peer does not notice.
    SourceGone,
    /// The completion queue is lost at the next completion.
    QueueLost,
    /// The next work request is refused for lack of room, after earlier ones of its chain were
    /// posted.
    QueueFull,
    /// Completions are held back, to come in a burst.
    Hold {
        /// How long.
        micros: u32,
    },
    /// A completion queue raises an event without a new completion.
    Spurious,
    /// The next message is lost.
    Lose,
    /// The next answer is lost, so that the message is sent twice.
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
    /// The device fails, and the connection manager reports nothing.
    DeviceFatal,
    /// The device refuses the next WRITE as invalid.
    RequestRefused,
    /// The address changes.
    AddressChange,
    /// A queue pair fails by itself.
    PairFatal,
    /// The process ends without a message, and its kernel disconnects.
    Kill,
    /// The next object or region cannot be made.
    Exhausted,
    /// The program on the host does not run for this long. The harness must obey it, see
    /// [`Simulation::stalled_until`](crate::Simulation::stalled_until).
    Stall {
        /// How long.
        micros: u32,
    },
}

impl Fault {
    /// Returns the failure class that it causes.
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

    /// Returns whether it may end connections of the host. Other faults only cost time.
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
            // Seven retries last half a second. A longer outage uses them up, or lets them outlast
            // a peer that has left in the meantime.
            Self::LinkDown { micros } => micros > 150_000,
            _ => true,
        }
    }

    /// Returns whether it strikes a connection, so that [`Connections`] can select. Other faults
    /// strike everything on a host.
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

    /// Returns whether it strikes at its time, rather than at the host's next action.
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
