//! Threads that reach into programs' memory.
//!
//! A reach takes as long as its program lets it: a page may come late, or never, and nothing ends the system call before.
//! So each program has a [`Lane`], in which one thread at a time reaches into its memory, in order. The threads that serve
//! programs do most of that themselves ([`seats`](super::seats)). The threads here do the rest: what a timer sets in motion,
//! what finds another thread in the program's memory, and what goes to programs that are slow. A thread whose program keeps
//! it does nothing else meanwhile; another takes its place for the other programs. There are never more of them than programs,
//! and a few.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_softsim::Load;

use super::memory::Process;
use super::seats::{Seat, Watch};

/// Steps in a program's memory before one that has kept a thread for long is trusted again.
const TRIAL: u32 = 64;
/// How long a thread waits for something to do before it ends.
const REST: Duration = Duration::from_millis(100);

thread_local! {
    /// Whether this is one of the threads: it looks for something to do by itself.
    static MOVES: Cell<bool> = const { Cell::new(false) };
}

/// What is to be done in a program's memory.
pub(super) enum Job {
    /// The next step of a message.
    Step(Load),
    /// Something else.
    Call(Box<dyn FnOnce(&Process) + Send>),
}

/// What is to be done in one program's memory, in order.
#[derive(Default)]
pub(super) struct Lane(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// The program waits for a thread, or a thread is in its memory.
    taken: bool,
    /// It has kept a thread for long. So many steps are left to the threads here, which serve no program.
    slow: u32,
}

/// The threads, and what they have to do.
pub(super) struct Movers {
    /// Who else moves.
    pub(super) watch: Watch,
    state: Mutex<State>,
    work: Condvar,
    most: usize,
}

#[derive(Default)]
struct State {
    /// Programs in whose memory there is something to do.
    ready: VecDeque<Arc<Process>>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Lane {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has so many steps taken by threads that serve no program.
    #[cfg(test)]
    pub(super) fn distrust(&self, steps: u32) {
        self.lock().slow = steps;
    }

    /// Whether nobody is there, nor is to come.
    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        !self.lock().taken
    }
}

impl Movers {
    /// At most so many threads: more than there are programs, so that one is left when all others are kept.
    pub(super) fn new(most: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { watch: Watch::new(patience), state: Mutex::default(), work: Condvar::new(), most })
    }

    /// Takes a step in the memory of a program, in a thread with a seat. These threads take it if somebody else is there, or if the program
    /// has kept a thread for long.
    pub(super) fn step(self: &Arc<Self>, process: &Arc<Process>, mut load: Load, seat: &Seat) {
        let mut lane = process.lane.lock();
        if lane.taken || lane.slow > 0 {
            drop(lane);
            return self.submit(process, Job::Step(load));
        }
        lane.taken = true;
        drop(lane);
        load.step();
        self.leave(process, |slow| if seat.is_kept() { TRIAL } else { slow });
        load.go();
    }

    /// As [`Movers::submit`], for several messages.
    pub(super) fn submit_all(self: &Arc<Self>, loads: impl IntoIterator<Item = (Arc<Process>, Load)>) {
        for (process, load) in loads {
            self.submit(&process, Job::Step(load));
        }
    }

    /// Has something done in the memory of a program, after all that was to be done there before.
    pub(super) fn submit(self: &Arc<Self>, process: &Arc<Process>, job: Job) {
        let mut lane = process.lane.lock();
        lane.jobs.push_back(job);
        if !std::mem::replace(&mut lane.taken, true) {
            drop(lane);
            self.add(Arc::clone(process));
        }
    }

    /// The threads end, but for those that a program's memory keeps: these end afterwards.
    pub(super) fn close(&self) {
        self.watch.close();
        self.lock().closed = true;
        self.work.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(self: &Arc<Self>, process: Arc<Process>) {
        let mut state = self.lock();
        state.ready.push_back(process);
        if !MOVES.get() {
            self.wake(&mut state);
        }
    }

    /// Makes sure that a thread looks.
    fn wake(self: &Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            self.work.notify_one();
        } else if state.threads < self.most {
            let movers = Arc::clone(self);
            // Without a thread it is done by the next that has time, and given up by the model if none has.
            if std::thread::Builder::new().name("mover".into()).spawn(move || movers.run()).is_ok() {
                state.threads += 1;
            }
        }
    }

    fn run(self: &Arc<Self>) {
        MOVES.set(true);
        let (mut state, mut rested) = (self.lock(), false);
        loop {
            let Some(process) = state.ready.pop_front() else {
                if state.closed || rested {
                    break;
                }
                state.idle += 1;
                let waited = self.work.wait_timeout(state, REST).unwrap_or_else(PoisonError::into_inner);
                (state, rested) = (waited.0, waited.1.timed_out());
                state.idle -= 1;
                continue;
            };
            if !state.ready.is_empty() {
                // This program may keep the thread.
                self.wake(&mut state);
            }
            drop(state);
            self.work_in(&process);
            (state, rested) = (self.lock(), false);
        }
        state.threads -= 1;
    }

    /// Does the next thing in a program's memory. Then it is the turn of the others.
    fn work_in(self: &Arc<Self>, process: &Arc<Process>) {
        let job = process.lane.lock().jobs.pop_front();
        let moved = match job {
            Some(Job::Step(mut load)) => {
                load.step();
                Some(load)
            }
            Some(Job::Call(call)) => {
                call(process);
                None
            }
            None => None,
        };
        self.leave(process, |slow| slow.saturating_sub(1));
        if let Some(load) = moved {
            load.go();
        }
    }

    /// Somebody leaves a program's memory. What else is to be done there is done by these threads.
    fn leave(self: &Arc<Self>, process: &Arc<Process>, slow: impl FnOnce(u32) -> u32) {
        let mut lane = process.lane.lock();
        lane.slow = slow(lane.slow);
        lane.taken = !lane.jobs.is_empty();
        let more = lane.taken;
        drop(lane);
        if more {
            self.add(Arc::clone(process));
        }
    }
}
