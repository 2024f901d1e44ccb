//! Threads that access programs' memory.
//!
//! An access takes as long as its program makes it take: a page may come late, or never, and
//! nothing ends the system call before. So each program has a [`Lane`], in which one thread at a
//! time accesses its memory, in order. The threads that serve programs do most of that themselves
//! ([`seats`](super::seats)), and take the steps that others have in the same memory meanwhile: to
//! wake a further thread for a step takes longer than most steps. The threads here do the rest:
//! messages that a timer starts, steps that are too many for such a thread, and steps for slow
//! programs. A thread that a program blocks does nothing else meanwhile; another thread serves the
//! other programs. There are at most as many threads as programs, plus a few.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_softsim::Load;

use super::memory::Process;
use super::seats::{Seat, Watch};
use super::signals;

/// How many steps of others a thread takes that serves a program, after one of its own.
const MOST_FOR_OTHERS: u32 = 16;
/// For how many steps a program that has blocked a thread for long counts as slow.
const TRIAL: u32 = 64;
/// How long a thread waits for a job before it ends.
const REST: Duration = Duration::from_millis(100);

thread_local! {
    /// Whether this is one of these threads, which look for jobs without being woken.
    static MOVES: Cell<bool> = const { Cell::new(false) };
}

/// A job in a program's memory.
pub(super) enum Job {
    /// The next step of a message.
    Step(Load),
    /// Any other function.
    Call(Box<dyn FnOnce(&Process) + Send>),
}

/// The jobs in one program's memory, in order.
#[derive(Default)]
pub(super) struct Lane {
    waiting: Mutex<Waiting>,
    /// How many jobs have ended.
    ended: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// Whether the program waits for a thread, or a thread is in its memory.
    taken: bool,
    /// How many further steps are left to the threads here, which serve no program, because this
    /// program has blocked a thread for long.
    slow: u32,
}

/// The threads, and the programs with jobs for them.
pub(super) struct Movers {
    /// The watch over the threads that serve programs.
    pub(super) watch: Watch,
    state: Mutex<State>,
    work: Condvar,
    most: usize,
}

#[derive(Default)]
struct State {
    /// Programs whose lanes have jobs.
    ready: VecDeque<Arc<Process>>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Lane {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many jobs have ended. While this changes, no job is late: it waits for others.
    pub(super) fn progress(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// Takes a step in the memory.
    fn step(&self, load: &mut Load) {
        load.step();
        self.ended.fetch_add(1, Relaxed);
    }

    /// Returns the answer of a job, for which `wait` waits. `None` if no job has ended in the
    /// memory for as long as `wait` waits.
    pub(super) fn answer<T>(&self, mut wait: impl FnMut() -> Result<T, RecvTimeoutError>) -> Option<T> {
        loop {
            let before = self.progress();
            match wait() {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if self.progress() != before => {}
                Err(_) => return None,
            }
        }
    }

    /// Takes the next job, if it is a step, for the thread in the memory.
    fn next_step(&self) -> Option<Load> {
        let mut lane = self.lock();
        match lane.jobs.pop_front()? {
            Job::Step(load) => Some(load),
            call @ Job::Call(_) => {
                lane.jobs.push_front(call);
                None
            }
        }
    }

    /// Leaves this many steps to threads that serve no program.
    #[cfg(test)]
    pub(super) fn distrust(&self, steps: u32) {
        self.lock().slow = steps;
    }

    /// Whether no thread is in the memory, and none is due.
    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        !self.lock().taken
    }
}

impl Movers {
    /// Makes a set of at most `most` threads: more than there are programs, so that one is left if
    /// programs block all others.
    pub(super) fn new(most: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { watch: Watch::new(patience), state: Mutex::default(), work: Condvar::new(), most })
    }

    /// Takes a step in the memory of a program, on a thread with a seat. Also takes the steps that
    /// others add meanwhile, so that these need no further thread. The step is left to the thread
    /// that is in that memory, or to the threads here if the program is slow.
    pub(super) fn step(self: &Arc<Self>, process: &Arc<Process>, mut load: Load, seat: &Seat) {
        let mut lane = process.lane.lock();
        if lane.taken || lane.slow > 0 {
            drop(lane);
            return self.submit(process, Job::Step(load));
        }
        lane.taken = true;
        drop(lane);
        process.lane.step(&mut load);
        for _ in 0..MOST_FOR_OTHERS {
            if !seat.continues() {
                break;
            }
            let Some(next) = process.lane.next_step() else { break };
            go(std::mem::replace(&mut load, next));
            process.lane.step(&mut load);
        }
        self.leave(process, |slow| if seat.is_kept() { TRIAL } else { slow });
        go(load);
    }

    pub(super) fn submit_all(self: &Arc<Self>, loads: impl IntoIterator<Item = (Arc<Process>, Load)>) {
        for (process, load) in loads {
            self.submit(&process, Job::Step(load));
        }
    }

    /// Queues a job in the memory of a program, after its earlier jobs.
    pub(super) fn submit(self: &Arc<Self>, process: &Arc<Process>, job: Job) {
        let mut lane = process.lane.lock();
        lane.jobs.push_back(job);
        if !std::mem::replace(&mut lane.taken, true) {
            drop(lane);
            self.add(Arc::clone(process));
        }
    }

    /// Ends the threads. One that a program's memory blocks ends afterwards.
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

    /// Makes sure that a thread looks for a job.
    fn wake(self: &Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            self.work.notify_one();
        } else if state.threads < self.most {
            let movers = Arc::clone(self);
            // If no thread can be started, the next free one does the job; if there is none, the
            // model gives up the message.
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
                // This program may block the thread, so another one is woken for the rest.
                self.wake(&mut state);
            }
            drop(state);
            self.work_in(&process);
            (state, rested) = (self.lock(), false);
        }
        state.threads -= 1;
    }

    /// Does the next job in a program's memory. Other programs have their turn before its further
    /// jobs.
    fn work_in(self: &Arc<Self>, process: &Arc<Process>) {
        let job = process.lane.lock().jobs.pop_front();
        let moved = match job {
            Some(Job::Step(mut load)) => {
                process.lane.step(&mut load);
                Some(load)
            }
            Some(Job::Call(call)) => {
                call(process);
                process.lane.ended.fetch_add(1, Relaxed);
                None
            }
            None => None,
        };
        self.leave(process, |slow| slow.saturating_sub(1));
        if let Some(load) = moved {
            go(load);
        }
    }

    /// Leaves a program's memory. These threads do the jobs that are left there.
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

fn go(load: Load) {
    signals::after(|| load.go());
}
