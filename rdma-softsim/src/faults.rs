//! Faults as data: what befalls a simulated fabric, and when.

/// What befalls a simulation: a list, so that it can be written down, read back and made smaller.
pub type FaultPlan = Vec<Injection>;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Injection {
    /// When it may happen.
    pub when: When,
    /// Whom it befalls: hosts count from 0 in the order of their creation.
    pub host: u32,
    /// What happens. It strikes once, at the first thing of the host that it can strike.
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

/// What can happen. The number is the class of failure in [`CLASSES`](crate::CLASSES).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Fault {
    /// 1: the device has no receive for the next notifications, however many are posted.
    NotReady {
        /// How many.
        times: u8,
    },
    /// 2: nothing passes to or from the host for so long. Longer than the retries last, it ends what is in flight.
    LinkDown {
        /// How long.
        micros: u32,
    },
    /// 3: the device refuses the next WRITE.
    KeyRefused,
    /// 6: the memory of the next SEND's receive is gone.
    ReceiveGone,
    /// 7: the memory of the next request is gone; the peer learns nothing.
    SourceGone,
    /// 12: the completion queue is lost at the next completion.
    QueueLost,
    /// 13: the next work request is refused for lack of room, after earlier ones of its chain were taken.
    QueueFull,
    /// 15: completions are held back, to come in a burst.
    Hold {
        /// How long.
        micros: u32,
    },
    /// 17: an event of a completion queue that has nothing new.
    Spurious,
    /// 21: the next message is lost.
    Lose,
    /// 21: the next answer is lost, so that the message comes twice.
    LoseAnswer,
    /// 22: the address is not resolved.
    AddressError,
    /// 22: the route is not resolved.
    RouteError,
    /// 22: the connect request is never answered.
    Unreachable,
    /// 22: the connect request is rejected.
    Rejected {
        /// With this reason.
        reason: i32,
    },
    /// 22: the active side cannot make its queue pair ready.
    ConnectError,
    /// 23: the passive side learns late that it is connected.
    SlowReady {
        /// How late.
        micros: u32,
    },
    /// 25: the device is removed.
    DeviceRemoval,
    /// 25: the device fails, and the connection manager says nothing.
    DeviceFatal,
    /// 25: the device refuses the next WRITE as invalid.
    RequestRefused,
    /// 25: the address changes.
    AddressChange,
    /// 25: a queue pair fails by itself.
    PairFatal,
    /// 24: the process ends without a word; its kernel disconnects.
    Kill,
    /// 27: the next object or region cannot be made.
    Exhausted,
    /// 28: the program on the host does not run for so long. For the harness to obey, see
    /// [`Simulation::stalled_until`](crate::Simulation::stalled_until).
    Stall {
        /// How long.
        micros: u32,
    },
}

impl Fault {
    /// Its class in [`CLASSES`](crate::CLASSES).
    #[must_use]
    pub const fn class(self) -> usize {
        match self {
            Self::NotReady { .. } => 1,
            Self::LinkDown { .. } => 2,
            Self::KeyRefused => 3,
            Self::ReceiveGone => 6,
            Self::SourceGone => 7,
            Self::QueueLost => 12,
            Self::QueueFull => 13,
            Self::Hold { .. } => 15,
            Self::Spurious => 17,
            Self::Lose | Self::LoseAnswer => 21,
            Self::AddressError
            | Self::RouteError
            | Self::Unreachable
            | Self::Rejected { .. }
            | Self::ConnectError => 22,
            Self::SlowReady { .. } => 23,
            Self::Kill => 24,
            Self::DeviceRemoval
            | Self::DeviceFatal
            | Self::RequestRefused
            | Self::AddressChange
            | Self::PairFatal => 25,
            Self::Exhausted => 27,
            Self::Stall { .. } => 28,
        }
    }

    /// Whether connections of the host may end by it. The others only cost time.
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

    /// Whether it strikes at its moment, rather than at something the host does next.
    pub(crate) const fn strikes_by_itself(self) -> bool {
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
