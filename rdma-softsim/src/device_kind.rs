//! The behaviour of devices where verbs leaves them a choice.

use core::time::Duration;

use rdma_backend::CompletionStatus;

use crate::Random;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum DeviceKind {
    /// By the letter of the InfiniBand architecture, and prompt.
    Ibta,
    /// As soft-RoCE: what a failed queue pair held is flushed when it is destroyed, not before; seven retries are endless; and of
    /// queue pairs no event tells but that one failed.
    Rxe,
    /// As a ConnectX: sizes rounded up, a refused key looks like a dead peer, a lost completion queue says nothing.
    Mlx5,
    /// Whatever the manual pages allow, drawn anew for each seed.
    HostileButLegal,
}

impl DeviceKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ibta, Self::Rxe, Self::Mlx5, Self::HostileButLegal];

    /// Its name on command lines.
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

/// Times of a simulated fabric beyond [`Parameters`](crate::Parameters): how much they vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationSettings {
    /// The fabric's times.
    pub parameters: crate::Parameters,
    /// The most that a message may take longer than its latency.
    pub jitter: Duration,
    /// The most that a message of the connection manager may take longer.
    pub cm_jitter: Duration,
    /// In how many of 256 calls the caller loses its processor, ...
    pub pauses: u8,
    /// ... and for how long at most. The fabric goes on meanwhile: this is how completions come between two calls.
    pub pause: Duration,
    /// The `rnr_retry_count` of accepting sides, whatever their program says; a Valkey server passes 0.
    pub accept_rnr_retry: Option<u8>,
    /// Whether a completion of a flushed request does not say of which queue pair it is, as
    /// ocrdma's does not: the number is 0.
    pub unnamed_flushes: bool,
    /// Whether somebody else holds every descriptor of the fabric for as long as there is a
    /// simulation, as a child does that the process has forked: to close one does not take it out
    /// of an epoll instance.
    pub held_descriptors: bool,
}

impl Default for SimulationSettings {
    fn default() -> Self {
        let latency = Duration::from_micros(5);
        Self {
            parameters: crate::Parameters { latency, ..crate::Parameters::default() },
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
    /// The status that the requester sees of a key that is refused.
    pub(crate) bad_key: CompletionStatus,
    /// Whether what was under way when a region was deregistered may still succeed.
    pub(crate) stale_keys: bool,
    pub(crate) flush: Flush,
    /// Whether a lost completion queue looks empty rather than broken.
    pub(crate) silent_overrun: bool,
    /// Whether completion queues are rounded up to a power of two.
    pub(crate) rounds_up: bool,
    /// In how many of 256 armings an event comes that nothing caused.
    pub(crate) spurious: u8,
    /// Whether the bytes of a WRITE land in pieces, the last when the completion that stands for them is polled.
    pub(crate) late_bytes: bool,
    /// How long a completion may take from its queue pair to its queue.
    pub(crate) report_delay: Duration,
    /// Whether an event tells of a request that ended the queue pair and consumed no receive.
    pub(crate) tells_of_requests: bool,
    /// Whether an event tells of a message that comes before the connection manager's word. By the letter only a queue pair
    /// that cannot send yet raises it, and librdmacm makes it able to at once.
    pub(crate) tells_of_first: bool,
    /// Whether seven retries where nothing answers are as endless as they are where no receive is posted.
    pub(crate) endless_retries: bool,
    /// How many numbers of queue pairs are given back before the first of them is given again.
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
                endless_retries: true,
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
