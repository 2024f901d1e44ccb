//! The behaviour of devices where verbs leaves a choice.

use core::time::Duration;

use rdma_backend::CompletionStatus;

use crate::random::Random;
use crate::settings::Parameters;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum DeviceKind {
    /// Follows the InfiniBand architecture to the letter, without delay.
    Ibta,
    /// Behaves like soft-RoCE. Work of a failed queue pair is flushed when it is destroyed, not
    /// before. Seven retries are endless. The only event about a queue pair is that it failed.
    Rxe,
    /// Behaves like a ConnectX. Sizes are rounded up, a refused key looks like a dead peer, and a
    /// lost completion queue reports nothing.
    Mlx5,
    /// Anything that the manual pages allow, drawn for each seed.
    HostileButLegal,
}

impl DeviceKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ibta, Self::Rxe, Self::Mlx5, Self::HostileButLegal];

    /// Returns its name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ibta => "ibta",
            Self::Rxe => "rxe",
            Self::Mlx5 => "mlx5",
            Self::HostileButLegal => "hostile-but-legal",
        }
    }
}

/// Settings of a simulated fabric beyond [`Parameters`](Parameters).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationSettings {
    /// The fabric's times.
    pub parameters: Parameters,
    /// Maximum random delay of a message beyond its latency.
    pub jitter: Duration,
    /// Maximum random delay of a connection manager message.
    pub cm_jitter: Duration,
    /// In how many of 256 calls the caller loses its processor.
    pub pauses: u8,
    /// For how long at most. The fabric continues meanwhile, so completions can come between two
    /// calls.
    pub pause: Duration,
    /// The `rnr_retry_count` of accepting sides, overriding their programs. A Valkey server passes
    /// 0.
    pub accept_rnr_retry: Option<u8>,
    /// Whether completions of flushed requests do not name their queue pair, like ocrdma's: the
    /// number is 0.
    pub unnamed_flushes: bool,
    /// Whether another process holds every descriptor of the fabric for the life of the simulation,
    /// like a forked child. Closing a descriptor then does not remove it from an epoll instance.
    pub held_descriptors: bool,
}

impl Default for SimulationSettings {
    fn default() -> Self {
        let latency = Duration::from_micros(5);
        Self {
            parameters: Parameters { latency, ..Parameters::default() },
            jitter: latency,
            cm_jitter: Duration::from_micros(200),
            pauses: 16,
            pause: Duration::from_micros(20),
            accept_rnr_retry: None,
            unnamed_flushes: false,
            held_descriptors: false,
        }
    }
}

/// When the work of a failed queue pair is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flush {
    AtOnce,
    /// Within this time.
    Late(Duration),
    AtDestruction,
}

/// How a kind of device behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behaviour {
    /// The status of a request with a refused key.
    pub(crate) bad_key: CompletionStatus,
    /// Whether requests in flight at a deregistration may still succeed.
    pub(crate) stale_keys: bool,
    pub(crate) flush: Flush,
    /// Whether a lost completion queue looks empty rather than broken.
    pub(crate) silent_overrun: bool,
    /// Whether completion queues are rounded up to a power of two.
    pub(crate) rounds_up: bool,
    /// In how many of 256 armings a spurious event comes.
    pub(crate) spurious: u8,
    /// Whether the bytes of a WRITE land in pieces, the last when its completion is polled.
    pub(crate) late_bytes: bool,
    /// Maximum delay of a completion from its queue pair to its queue.
    pub(crate) report_delay: Duration,
    /// Whether an event reports a request that ended the queue pair and consumed no receive.
    pub(crate) tells_of_requests: bool,
    /// Whether an event reports a message that precedes the connection manager's event. To the
    /// letter only a queue pair that cannot send yet raises it, and librdmacm makes it able to at
    /// once.
    pub(crate) tells_of_first: bool,
    /// Whether seven retries without acknowledgement are endless, like those without a receive.
    pub(crate) endless_retries: bool,
    /// How many queue pair numbers are freed before the first of them is reused.
    pub(crate) resting_numbers: usize,
}

impl Behaviour {
    pub(crate) fn of(device_kind: DeviceKind, random: &mut Random) -> Self {
        let ibta = Self {
            bad_key: CompletionStatus::REM_ACCESS_ERR,
            stale_keys: false,
            flush: Flush::AtOnce,
            silent_overrun: false,
            rounds_up: false,
            spurious: 0,
            late_bytes: false,
            report_delay: Duration::ZERO,
            endless_retries: false,
            tells_of_requests: true,
            tells_of_first: true,
            resting_numbers: 0,
        };
        match device_kind {
            DeviceKind::Ibta => ibta,
            DeviceKind::Rxe => Self {
                flush: Flush::AtDestruction,
                spurious: 2,
                report_delay: Duration::from_micros(10),
                // Seen on the device: docs/decisions.md, 8.
                endless_retries: true,
                // Its deviation from the case `verbs.async.access`.
                tells_of_requests: false,
                tells_of_first: false,
                // It walks through its table of queue pairs.
                resting_numbers: 4,
                ..ibta
            },
            DeviceKind::Mlx5 => Self {
                bad_key: CompletionStatus::RETRY_EXC_ERR,
                stale_keys: true,
                flush: Flush::Late(Duration::from_micros(50)),
                silent_overrun: true,
                rounds_up: true,
                late_bytes: true,
                report_delay: Duration::from_micros(2),
                ..ibta
            },
            DeviceKind::HostileButLegal => Self {
                bad_key: random.pick(&[CompletionStatus::REM_ACCESS_ERR, CompletionStatus::RETRY_EXC_ERR]),
                stale_keys: random.chance(1, 2),
                flush: random.pick(&[
                    Flush::AtOnce,
                    Flush::Late(Duration::from_micros(100)),
                    Flush::Late(Duration::from_millis(300)),
                    Flush::AtDestruction,
                ]),
                silent_overrun: random.chance(1, 2),
                rounds_up: random.chance(1, 2),
                spurious: random.pick(&[0, 4, 32]),
                late_bytes: random.chance(3, 4),
                report_delay: random.pick(&[
                    Duration::ZERO,
                    Duration::from_micros(5),
                    Duration::from_micros(200),
                ]),
                endless_retries: random.chance(1, 2),
                tells_of_requests: random.chance(1, 2),
                tells_of_first: random.chance(1, 2),
                resting_numbers: random.pick(&[0, 1, 3]),
            },
        }
    }
}
