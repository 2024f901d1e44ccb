//! Which kinds of failure a run has met.

/// The classes, each with its words.
macro_rules! classes {
    ($($class:ident $words:literal,)*) => {
        /// A class of failure that a reliable connection can meet.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum FailureClass {
            $(#[doc = $words] $class,)*
        }

        impl FailureClass {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$class),*];

            /// The class in a few words.
            #[must_use]
            pub const fn words(self) -> &'static str {
                match self {
                    $(Self::$class => $words,)*
                }
            }
        }
    };
}

classes! {
    ReceiverNotReady "receiver not ready",
    RetriesExceeded "retries exceeded",
    AccessRefused "bad key, bounds or stale window",
    EmptyWrite "zero-length WRITE",
    ReceiveTooSmall "receive buffer too small",
    ReceiveMemoryGone "receive memory gone",
    LocalProtection "local protection error",
    Deregistered "region deregistered with work in flight",
    UnsignaledFails "unsignaled work fails",
    Flush "flush semantics",
    ErrorContents "contents of error completions",
    QueueOverrun "completion queue overrun",
    SendQueueFull "send queue full",
    DeviceLimits "device limits",
    CompletionOrder "order of completions",
    NotificationRace "one-shot notification race",
    EventCoalescing "event coalescing",
    EventAcknowledgement "event acknowledgement",
    DataVisibility "data visibility",
    BufferOwnership "send buffer ownership",
    PacketLoss "lost and duplicated packets",
    ConnectionSetup "connection setup faults",
    EstablishmentRace "establishment races",
    DisconnectMidWrite "disconnect in the middle of writes",
    AbruptEvent "abrupt events",
    TeardownOrder "teardown order",
    Exhaustion "resource exhaustion",
    SlowConsumer "slow consumer, stalled peer",
    WrongPeer "peer that breaks the rules",
    Scheduling "scheduling",
}

/// The number of classes.
const COUNT: usize = FailureClass::ALL.len();

/// How often each class was brought about, and how often whoever uses the fabric was confronted with it. A fault that is
/// injected and never observed has tested nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FailureCounts {
    injected: [u64; COUNT],
    observed: [u64; COUNT],
}

impl FailureCounts {
    /// Notes that `class` was brought about.
    pub const fn inject(&mut self, class: FailureClass) {
        self.injected[class as usize] += 1;
    }

    /// Notes that somebody had to deal with it.
    pub const fn observe(&mut self, class: FailureClass) {
        self.observed[class as usize] += 1;
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.injected.iter_mut().zip(other.injected) {
            *sum += count;
        }
        for (sum, count) in self.observed.iter_mut().zip(other.observed) {
            *sum += count;
        }
    }

    /// Returns how often `class` was brought about.
    #[must_use]
    pub const fn injected(&self, class: FailureClass) -> u64 {
        self.injected[class as usize]
    }

    /// Returns how often somebody had to deal with `class`.
    #[must_use]
    pub const fn observed(&self, class: FailureClass) -> u64 {
        self.observed[class as usize]
    }
}

/// Several classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct ClassSet(u32);

impl ClassSet {
    /// No class.
    pub(crate) const EMPTY: Self = Self(0);

    pub(crate) const fn insert(&mut self, class: FailureClass) {
        self.0 |= 1 << class as u32;
    }

    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = FailureClass> {
        FailureClass::ALL.iter().copied().filter(move |class| self.0 & 1 << *class as u32 != 0)
    }
}
