//! Classes of failure, and counts of those that a run met.

/// Defines the classes with their descriptions.
macro_rules! classes {
    ($($class:ident $words:literal,)*) => {
        /// A class of failure that a reliable connection can meet.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum FailureClass {
            $(#[doc = $words] $class,)*
        }

        impl FailureClass {
            /// All classes.
            pub const ALL: &[Self] = &[$(Self::$class),*];

            /// Returns a short description.
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

const COUNT: usize = FailureClass::ALL.len();

/// How often each class was injected, and how often a user of the fabric observed it. A fault that
/// is injected and never observed has tested nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FailureCounts {
    injected: [u64; COUNT],
    observed: [u64; COUNT],
}

impl FailureCounts {
    /// Records an injection of `class`.
    pub const fn inject(&mut self, class: FailureClass) {
        self.injected[class as usize] += 1;
    }

    /// Records an observation of `class`.
    pub const fn observe(&mut self, class: FailureClass) {
        self.observed[class as usize] += 1;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.injected.iter_mut().zip(other.injected) {
            *sum += count;
        }
        for (sum, count) in self.observed.iter_mut().zip(other.observed) {
            *sum += count;
        }
    }

    /// Returns how often `class` was injected.
    #[must_use]
    pub const fn injected(&self, class: FailureClass) -> u64 {
        self.injected[class as usize]
    }

    /// Returns how often `class` was observed.
    #[must_use]
    pub const fn observed(&self, class: FailureClass) -> u64 {
        self.observed[class as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct ClassSet(u32);

impl ClassSet {
    pub(crate) const EMPTY: Self = Self(0);

    pub(crate) const fn insert(&mut self, class: FailureClass) {
        // 30 classes fit into 32 bits.
        self.0 |= 1 << class as u32;
    }

    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = FailureClass> {
        FailureClass::ALL.iter().copied().filter(move |class| self.0 & 1 << *class as u32 != 0)
    }
}
