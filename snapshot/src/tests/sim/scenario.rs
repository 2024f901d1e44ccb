//! The parameters of one run, drawn from its seed before the run begins.

use std::time::Duration;

use rdma_softsim::{DeviceKind, Fault, FaultPlan, Injection, Random, When};

use super::forgery::Forgery;
use crate::reader::AREA;
use crate::wire::{Layout, Reason};
use crate::{Error, tests::CHUNK};

/// The publisher's host. The readers have the numbers after it.
pub(super) const ORIGIN: u8 = 1;

/// Attempts without progress after which a replica gives up. With the pauses between them they
/// outlast every outage drawn here.
pub(super) const ATTEMPTS: u32 = 16;

pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) personality: DeviceKind,
    pub(super) layout: Layout,
    /// Bytes of each chunk.
    pub(super) lengths: Vec<usize>,
    /// Chunks of the snapshot. The log of later writes follows them.
    pub(super) marked: usize,
    /// The time between two chunks of the source.
    pub(super) pace: Duration,
    /// READs that the publisher grants to each reader.
    pub(super) depth: u8,
    /// The publisher's readers at a time.
    pub(super) readers: usize,
    pub(super) lease: Duration,
    pub(super) replicas: Vec<Plan>,
    pub(super) troubles: Vec<Trouble>,
}

/// The parameters of a replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) host: u8,
    /// The host that it pulls from.
    pub(super) parent: u8,
    /// Whether it also tries the first publisher after a lost connection.
    pub(super) falls_back: bool,
    pub(super) depth: u8,
    /// Chunks that it holds at a time.
    pub(super) room: usize,
    /// How long its sink takes for a chunk.
    pub(super) pace: Duration,
}

/// A fault in a run.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// The devices and the network.
    Faults(FaultPlan),
    /// The publisher's announcements are false.
    Forgery(Forgery),
    /// A published chunk is overwritten after a number of events, and restored after a while.
    Torn { host: u8, chunk: usize, at: u64, heals: Option<Duration> },
    /// The publisher withdraws the snapshot.
    Withdrawn { at: u64, reason: Reason },
    /// A process ends, or its machine falls silent. It comes back without its state.
    Death { host: u8, at: u64, silent: bool, back: Option<Duration> },
    /// A program does not run for a while.
    Sleep { host: u8, at: u64, lasts: Option<Duration> },
    /// A replica has another secret.
    Stranger { host: u8 },
    /// The publisher accepts fewer readers than come.
    Crowded,
    /// A client of the publisher that sends arbitrary frames.
    RogueReader,
    /// A replica first connects to a rogue in place of a publisher.
    RoguePublisher { host: u8 },
}

/// Faults that a publisher and its readers survive, or that name missing resources of the machine.
const FAULTS: [Fault; 22] = [
    Fault::LinkDown { micros: 100_000 },
    Fault::LinkDown { micros: 1_000_000 },
    Fault::LinkDown { micros: 20_000_000 },
    Fault::PairFatal,
    Fault::QueueLost,
    Fault::Lose,
    Fault::LoseAnswer,
    Fault::Hold { micros: 5000 },
    Fault::SlowReady { micros: 300_000 },
    Fault::Rejected { reason: 28 },
    Fault::Unreachable,
    Fault::ConnectError,
    Fault::SourceGone,
    Fault::ReceiveGone,
    Fault::KeyRefused,
    Fault::RequestRefused,
    Fault::NotReady { times: 2 },
    Fault::Spurious,
    Fault::AddressError,
    Fault::RouteError,
    Fault::Exhausted,
    Fault::DeviceFatal,
];

impl Scenario {
    pub(super) fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let random = &mut random;
        let personality = random.pick(&DeviceKind::ALL);
        let layout = if random.chance(1, 16) { Layout::Rcp } else { Layout::Chunks };
        let (lengths, marked) = lengths(layout, random);
        let count = random.within(1..=4) as u8;
        let replicas: Vec<_> = (1..=count).map(|number| Plan::draw(number, layout, random)).collect();
        let mut scenario = Self {
            seed,
            personality,
            layout,
            lengths,
            marked,
            pace: random.pick(&[Duration::ZERO, Duration::from_micros(100), Duration::from_millis(20)]),
            depth: random.pick(&[1, 3, 16]),
            readers: 64,
            lease: random.pick(&[Duration::from_secs(2), Duration::from_secs(20)]),
            replicas,
            troubles: Vec::new(),
        };
        for _ in 0..random.pick(&[0, 1, 1, 2]) {
            let trouble = scenario.trouble(random);
            if matches!(trouble, Trouble::Crowded) {
                scenario.readers = 1;
            }
            scenario.troubles.push(trouble);
        }
        scenario
    }

    fn trouble(&self, random: &mut Random) -> Trouble {
        let replica = random.within(2..=self.replicas.len() as u64 + 1) as u8;
        let anybody = random.within(1..=self.replicas.len() as u64 + 1) as u8;
        let at = random.below(800);
        let soon = Some(Duration::from_micros(random.below(5_000_000)));
        match random.below(12) {
            0..3 => Trouble::Faults(self.faults(random)),
            3 | 4 => Trouble::Forgery(Forgery::draw(self, random)),
            5 => {
                let chunk = random.below(self.lengths.len() as u64) as usize;
                Trouble::Torn { host: anybody, chunk, at, heals: soon.filter(|_| random.chance(1, 2)) }
            }
            6 => Trouble::Withdrawn { at, reason: random.pick(&[Reason::Withdrawn, Reason::Failed]) },
            7 => {
                let back = soon.filter(|_| random.chance(3, 4));
                Trouble::Death { host: anybody, at, silent: random.chance(1, 2), back }
            }
            8 => {
                // A publisher that sleeps forever is a dead one.
                let for_ever = anybody != ORIGIN && random.chance(1, 3);
                let lasts = random.duration(Duration::from_secs(15));
                Trouble::Sleep { host: anybody, at, lasts: Some(lasts).filter(|_| !for_ever) }
            }
            9 => Trouble::Stranger { host: replica },
            10 => Trouble::Crowded,
            _ if random.chance(1, 2) => Trouble::RogueReader,
            _ => Trouble::RoguePublisher { host: replica },
        }
    }

    fn faults(&self, random: &mut Random) -> FaultPlan {
        let count = random.within(1..=3);
        let fault = |_| {
            let host = random.below(self.replicas.len() as u64 + 1) as u32;
            Injection { when: When::Event(random.below(600)), host, fault: random.pick(&FAULTS) }
        };
        (0..count).map(fault).collect()
    }

    pub(super) fn plan(&self) -> FaultPlan {
        let plans = self.troubles.iter().filter_map(|trouble| match trouble {
            Trouble::Faults(plan) => Some(plan.clone()),
            _ => None,
        });
        plans.flatten().collect()
    }

    pub(super) fn forgery(&self) -> Option<&Forgery> {
        self.troubles
            .iter()
            .find_map(|trouble| if let Trouble::Forgery(forgery) = trouble { Some(forgery) } else { None })
    }

    pub(super) const fn chunk_size(&self) -> u32 {
        match self.layout {
            Layout::Chunks => CHUNK,
            Layout::Rcp => AREA,
        }
    }

    /// Returns whether the session of `plan` may end with `error`, given this run's faults.
    pub(super) fn excuses(&self, plan: &Plan, error: &Error) -> bool {
        self.troubles.iter().any(|trouble| trouble.excuses(plan, error))
    }
}

/// Returns the lengths of all chunks, and how many are before the mark. These are full, except the
/// last.
fn lengths(layout: Layout, random: &mut Random) -> (Vec<usize>, usize) {
    if layout == Layout::Rcp {
        let last = random.within(1..=5000) as usize;
        // An area takes 4 MiB, so two of them are rare.
        let full = usize::from(random.chance(1, 40));
        let lengths: Vec<_> = std::iter::repeat_n(AREA as usize, full).chain([last]).collect();
        let marked = lengths.len();
        return (lengths, marked);
    }
    let any = |random: &mut Random| random.within(1..=CHUNK.into()) as usize;
    let marked = random.within(2..=30) as usize;
    let last = any(random);
    let behind: Vec<_> = (0..random.below(8)).map(|_| any(random)).collect();
    (std::iter::repeat_n(CHUNK as usize, marked - 1).chain([last]).chain(behind).collect(), marked)
}

impl Plan {
    fn draw(number: u8, layout: Layout, random: &mut Random) -> Self {
        let host = number + ORIGIN;
        // The seed's table cannot be handed on.
        let parent = match random.below(4) {
            _ if layout == Layout::Rcp => ORIGIN,
            0 => ORIGIN,
            1 => random.within(1..=number.into()) as u8,
            _ => number,
        };
        Self {
            host,
            parent,
            falls_back: random.chance(1, 2),
            depth: random.pick(&[1, 2, 4, 16]),
            room: random.pick(&[1, 3, 8, 64]),
            pace: random.pick(&[
                Duration::ZERO,
                Duration::ZERO,
                Duration::from_millis(1),
                Duration::from_millis(300),
            ]),
        }
    }
}

impl Trouble {
    fn excuses(&self, plan: &Plan, error: &Error) -> bool {
        let is_cut = is_cut(error);
        let is_told = matches!(error, Error::Refused(Reason::Withdrawn | Reason::Failed | Reason::Resources));
        match self {
            Self::Faults(_) => {
                is_cut
                    || is_told
                    || matches!(
                        error,
                        Error::Backend { .. }
                            | Error::Device(_)
                            | Error::Refused(Reason::Lease | Reason::Full)
                    )
            }
            // If a replica has detected it, replicas that pull from it learn that there is no more.
            Self::Forgery(forgery) => forgery.explains(error) || plan.parent != ORIGIN && (is_cut || is_told),
            Self::Torn { .. } => {
                matches!(error, Error::Corrupt { .. } | Error::Digest)
                    || plan.parent != ORIGIN && (is_cut || is_told)
            }
            Self::Withdrawn { .. } => is_cut || is_told,
            Self::Death { .. } => {
                is_cut || is_told || matches!(error, Error::OtherSnapshot | Error::Refused(Reason::Full))
            }
            Self::Sleep { .. } => {
                is_cut || is_told || matches!(error, Error::Refused(Reason::Lease | Reason::Full))
            }
            Self::Stranger { host } => {
                if plan.host == *host {
                    matches!(error, Error::Refused(Reason::Secret) | Error::Secret)
                } else {
                    plan.parent != ORIGIN && (is_cut || is_told)
                }
            }
            // A reader too many is told so, and further ones are rejected.
            Self::Crowded => is_cut || is_told || matches!(error, Error::Refused(Reason::Full)),
            Self::RogueReader => false,
            Self::RoguePublisher { host } => {
                if plan.host == *host {
                    let is_named = matches!(
                        error,
                        Error::Foreign(_) | Error::Misbehaved(_) | Error::Secret | Error::Version { .. }
                    );
                    is_named || is_cut || matches!(error, Error::Refused(_) | Error::OtherSnapshot)
                } else {
                    plan.parent != ORIGIN && (is_cut || is_told)
                }
            }
        }
    }
}

/// Returns whether the error says that the connection, or the other side, is gone.
fn is_cut(error: &Error) -> bool {
    matches!(
        error,
        Error::Control(_) | Error::Ended | Error::DataEnded(_) | Error::Read { .. } | Error::TimedOut { .. }
    )
}
