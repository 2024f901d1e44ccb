//! What programs take of the fabric: each of them, and all together, which are of one user.
//!
//! An object takes what it may ever hold, before it is made. So a bound refuses new objects, and
//! does no harm to those that exist: neither to those of its own program, nor to those of others.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource as Limit, getrlimit, pidfd_open};
use softrdma_wire::{Amounts, Exceeded, Resource};

/// The most descriptors of all programs, if the fabric may have as many.
const MOST_DESCRIPTORS: u64 = 1 << 17;
/// How many descriptors the fabric keeps for itself.
const OWN_DESCRIPTORS: u64 = 128;
/// The most memory of all programs, if half of the machine's is more.
const MOST_MEMORY: u64 = 8 << 30;

/// What programs may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// What each program may take.
    pub each: Amounts,
    /// What all programs together may take.
    pub all: Amounts,
}

impl Bounds {
    /// Returns the bounds of a fabric in this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let descriptors = getrlimit(Limit::Nofile).current.unwrap_or(u64::MAX);
        // Not what is available now: a fabric that starts at a bad moment would keep that bound.
        Self::within(descriptors, rdma_program::memory().map_or(u64::MAX, |memory| memory.total))
    }

    /// Returns the bounds of a fabric that may have so many descriptors, where there is so much
    /// memory.
    fn within(descriptors: u64, memory: u64) -> Self {
        let descriptors = descriptors.saturating_sub(OWN_DESCRIPTORS).min(MOST_DESCRIPTORS);
        // Counted is what objects may ever hold, most of which they never do: an endpoint of more
        // than four connections counts 15 MiB for its completion queue.
        let memory = (memory / 2).min(MOST_MEMORY);
        Self {
            // A process needs one session, and a second one if `softrdma run` has become it.
            each: Amounts { memory: memory / 2, descriptors: descriptors / 4, sessions: 32 },
            all: Amounts { memory, descriptors, sessions: 1024 },
        }
    }
}

/// So much of each resource, in the order of [`Resource::ALL`].
type Counts = [AtomicU64; Resource::ALL.len()];

/// What was taken on one account, and what may be.
struct Account {
    most: Amounts,
    used: Counts,
    /// How often a bound was in the way.
    refused: Counts,
}

impl Account {
    fn new(most: Amounts) -> Self {
        Self { most, used: Counts::default(), refused: Counts::default() }
    }

    /// Takes some of a resource. Returns false, and takes nothing, if that would be too much.
    fn take(&self, resource: Resource, amount: u64) -> bool {
        let most = self.most.of(resource);
        let add = |used: u64| used.checked_add(amount).filter(|used| *used <= most);
        amount == 0 || self.used[resource as usize].fetch_update(Relaxed, Relaxed, add).is_ok()
    }

    fn give_back(&self, resource: Resource, amount: u64) {
        self.used[resource as usize].fetch_sub(amount, Relaxed);
    }
}

/// The accounts of a fabric.
pub(super) struct Budget {
    pub(super) bounds: Bounds,
    /// The account of all programs, and how often the bounds of single ones were in the way.
    all: Arc<(Account, Counts)>,
    programs: Mutex<BTreeMap<u32, Weak<Program>>>,
}

impl Budget {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            all: Arc::new((Account::new(bounds.all), Counts::default())),
            programs: Mutex::default(),
        }
    }

    /// Returns the program in a process, which has one account, however many sessions it opens.
    pub(super) fn program(&self, number: u32) -> Result<Arc<Program>, Errno> {
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let known = programs.get(&number).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|known| !known.has_ended()) {
            return Ok(known);
        }
        let alive = pidfd_open(pid, PidfdFlags::empty())?;
        let program = Program { pid, alive, own: Account::new(self.bounds.each), all: Arc::clone(&self.all) };
        let program = Arc::new(program);
        programs.retain(|_, program| program.strong_count() > 0);
        programs.insert(number, Arc::downgrade(&program));
        Ok(program)
    }

    /// Returns what all programs have taken.
    pub(super) fn used(&self) -> Amounts {
        let used = |resource: Resource| self.all.0.used[resource as usize].load(Relaxed);
        let [memory, descriptors, sessions] = Resource::ALL.map(used);
        Amounts { memory, descriptors, sessions }
    }

    /// Returns the bounds that were in the way, and how often.
    pub(super) fn refusals(&self) -> Vec<(Exceeded, u64)> {
        let (all, single) = &*self.all;
        let of = |resource: Resource| {
            let bound = |each, most: &Amounts| Exceeded { resource, each, most: most.of(resource) };
            [
                (bound(true, &self.bounds.each), single[resource as usize].load(Relaxed)),
                (bound(false, &self.bounds.all), all.refused[resource as usize].load(Relaxed)),
            ]
        };
        Resource::ALL.into_iter().flat_map(of).filter(|(_, times)| *times > 0).collect()
    }
}

/// A process with sessions, and what it has taken.
pub(super) struct Program {
    pub(super) pid: Pid,
    /// Readable when the process has ended. Its number may then mean another process.
    pub(super) alive: OwnedFd,
    own: Account,
    all: Arc<(Account, Counts)>,
}

impl Program {
    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.alive, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
    }

    /// Takes resources, until the result is dropped.
    pub(super) fn take(self: &Arc<Self>, amounts: Amounts) -> Result<Taken, Exceeded> {
        let mut taken = Taken { program: Arc::clone(self), amounts: [0; Resource::ALL.len()] };
        for resource in Resource::ALL {
            let (amount, (all, single)) = (amounts.of(resource), &*self.all);
            let exceeds = |each, account: &Account, refused: &Counts| {
                refused[resource as usize].fetch_add(1, Relaxed);
                Exceeded { resource, each, most: account.most.of(resource) }
            };
            if !self.own.take(resource, amount) {
                return Err(exceeds(true, &self.own, single));
            }
            if !all.take(resource, amount) {
                self.own.give_back(resource, amount);
                return Err(exceeds(false, all, &all.refused));
            }
            taken.amounts[resource as usize] = amount;
        }
        Ok(taken)
    }

    /// Takes memory, until the result is dropped.
    pub(super) fn take_memory(self: &Arc<Self>, memory: u64) -> Result<Taken, Exceeded> {
        self.take(Amounts { memory, ..Amounts::default() })
    }
}

/// What a program has taken until this is dropped.
pub(super) struct Taken {
    pub(super) program: Arc<Program>,
    amounts: [u64; Resource::ALL.len()],
}

impl Drop for Taken {
    fn drop(&mut self) {
        for (resource, amount) in Resource::ALL.into_iter().zip(self.amounts) {
            self.program.own.give_back(resource, amount);
            self.program.all.0.give_back(resource, amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs can take no more memory than the machine has, or a limit of its control groups.
    #[test]
    fn bounds_are_a_share_of_what_there_is() {
        let memory = |total| {
            let bounds = Bounds::within(0, total);
            (bounds.each.memory, bounds.all.memory)
        };
        assert_eq!(memory(512 << 20), (128 << 20, 256 << 20));
        assert_eq!(memory(16 << 30), (4 << 30, 8 << 30));
        assert_eq!(memory(u64::MAX), (4 << 30, 8 << 30));
        let total = rdma_program::memory().expect("Linux says so").total;
        let here = Bounds::of_this_process();
        assert_eq!((here.each.memory, here.all.memory), memory(total));
        let descriptors = |most| {
            let bounds = Bounds::within(most, 0);
            (bounds.each.descriptors, bounds.all.descriptors)
        };
        assert_eq!(descriptors(100), (0, 0));
        assert_eq!(descriptors(1128), (250, 1000));
        assert_eq!(descriptors(u64::MAX), (1 << 15, 1 << 17));
    }
}
