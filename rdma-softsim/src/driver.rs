//! Runs the model: a lock, a clock, descriptors that wake sleepers, and in real time one thread for
//! events between calls.
//!
//! A caller executes what is due, so data moves in the calling thread. The thread only sleeps until
//! the model's next deadline (a retry, a time-out, or everything if the fabric has a latency). It
//! starts with the first deadline and ends with the last handle.

use core::sync::atomic::Ordering::{Acquire, Release};
use core::time::Duration;
use std::collections::HashMap;
use std::io::ErrorKind::Interrupted;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_backend::time::Instant;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::load::Load;
use crate::model::{Freight, Model, SimulationState, Wake};
use crate::settings::Parameters;
use crate::sync::{AtomicBool, Builder, JoinHandle, Monitor, MutexGuard, Ticks};

/// The longest single sleep. A spurious wake-up now and then is harmless; an overflowing time-out
/// is not.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// How long the thread lets others have the lock, if more is due than it executes at a time.
const TURN: Duration = Duration::from_micros(20);

/// State that every handle of one fabric shares.
pub(crate) struct Driver {
    core: Arc<Core>,
}

pub(crate) struct Core {
    /// The thread sleeps until its deadline moves, or until it must end.
    state: Monitor<Guarded>,
    clock: Clock,
    /// Whether nothing is due at any time, so that a call without changes need not execute
    /// anything. Never in virtual time, where each call is a chance to lose the processor.
    idle: AtomicBool,
}

/// The kind of caller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    Program,
    /// A program, in a call that is allowed during copies.
    BesideCopies,
    /// A caller that cannot lose the processor.
    Observer,
}

/// The clock that the model runs on.
enum Clock {
    /// The machine's clock, since the fabric began.
    Real(Ticks),
    /// The model's own clock, which the simulation moves.
    Virtual,
}

struct Guarded {
    model: Model,
    /// The descriptors of possible sleepers.
    signals: HashMap<Wake, Arc<dyn Signal>>,
    /// Descriptors held by another process, in a simulation.
    held: Vec<OwnedFd>,
    /// Until when the thread sleeps.
    asleep_until: Option<Instant>,
    thread: Option<JoinHandle<()>>,
    closed: bool,
    /// Whether anything was woken, for a simulation, which checks its programs only then.
    woken: bool,
    /// Copies in progress, by threads that have released the lock.
    copies: usize,
    /// Threads that wait until there is none.
    waiting: usize,
    /// Threads that wait to take memory in other processes away.
    leaving: usize,
}

impl Driver {
    pub(crate) fn new(parameters: Parameters) -> Self {
        let mut model = Model::new(parameters);
        model.carry_bulks();
        Self::with_clock(model, Clock::Real(Ticks::begin()))
    }

    pub(crate) fn simulated(simulation: SimulationState) -> Self {
        Self::with_clock(Model::simulated(simulation), Clock::Virtual)
    }

    fn with_clock(model: Model, clock: Clock) -> Self {
        // Before there are handles that a child must leave alone (`Driver::release`).
        rdma_process::watch_forks();
        let state = Guarded {
            model,
            signals: HashMap::new(),
            held: Vec::new(),
            asleep_until: None,
            thread: None,
            closed: false,
            woken: false,
            copies: 0,
            waiting: 0,
            leaving: 0,
        };
        Self { core: Arc::new(Core { state: Monitor::new(state), clock, idle: AtomicBool::new(false) }) }
    }

    /// Checks that a handle is of this fabric: ids of another one would name other objects here.
    pub(crate) fn same_fabric(self: &Arc<Self>, other: &Arc<Self>) -> Result<(), Error> {
        if Arc::ptr_eq(self, other) { Ok(()) } else { Err(Error::Argument("a handle of another fabric")) }
    }

    pub(crate) fn now(&self) -> Instant {
        match &self.core.clock {
            Clock::Real(ticks) => Instant::from_start(ticks.elapsed()),
            Clock::Virtual => self.core.lock().model.now(),
        }
    }

    /// Runs a program's call on the model, at the present time. In real time everything that
    /// follows at once is done on return. In virtual time it waits for its turn, but the program
    /// may have lost its processor before.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Model) -> T) -> T {
        self.act(act, Caller::Program)
    }

    /// Runs a call like [`Driver::with`] that takes no memory from a copy and changes no queue
    /// pair's state. It does not wait for copies in progress. Work on a queue pair behind such a
    /// copy is done by the copying thread.
    pub(crate) fn beside_copies<T>(&self, act: impl FnOnce(&mut Model) -> T) -> T {
        self.act(act, Caller::BesideCopies)
    }

    /// Waits while bytes may still be moved to memory that was taken away.
    ///
    /// # Errors
    /// [`Error::Landing`] after [`Parameters::reach`]. They may be moved later, too.
    pub(crate) fn wait_while(&self, moves: impl Fn(&Model) -> bool) -> Result<(), Error> {
        let mut state = self.core.lock();
        let elapsed = || match &self.core.clock {
            Clock::Real(ticks) => ticks.elapsed(),
            // Bytes are moved at once.
            Clock::Virtual => Duration::MAX,
        };
        let until = elapsed().saturating_add(state.model.reach());
        // Only if a thread waits does `copy` notify of each move.
        state.leaving += 1;
        let mut landing = moves(&state.model);
        while landing {
            let Some(left) = until.checked_sub(elapsed()).filter(|left| !left.is_zero()) else { break };
            state = self.core.state.wait_for_calm_within(state, left);
            landing = moves(&state.model);
        }
        state.leaving -= 1;
        if landing { Err(Error::Landing) } else { Ok(()) }
    }

    pub(crate) fn peek<T>(&self, act: impl FnOnce(&mut Model) -> T) -> T {
        self.act(act, Caller::Observer)
    }

    fn act<T>(&self, act: impl FnOnce(&mut Model) -> T, caller: Caller) -> T {
        let mut state = self.core.lock();
        match &self.core.clock {
            Clock::Real(ticks) => {
                // What was due before the call happens before it.
                (state, _) = self.core.advance(state, ticks);
                if caller != Caller::BesideCopies {
                    // The call may take memory away that a copy still uses.
                    state = self.core.end_copies(state);
                }
                // All were woken before. What `act` takes must leave no descriptor readable.
                let result = act(&mut state.model);
                state.model.settle();
                state = self.core.copy(state, ticks);
                self.core.note_idle(&state);
                self.core.watch(&mut state);
                result
            }
            Clock::Virtual => {
                if caller != Caller::Observer {
                    state.model.pause();
                    state.wake();
                }
                let result = act(&mut state.model);
                state.wake();
                result
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.core.idle.load(Acquire)
    }

    pub(crate) fn has_woken(&self) -> bool {
        core::mem::take(&mut self.core.lock().woken)
    }

    /// Calls `look` with the state of the simulation.
    ///
    /// # Panics
    /// Panics if this is no simulation; only [`Driver::simulated`] is.
    pub(crate) fn simulation<T>(&self, look: impl FnOnce(&mut SimulationState) -> T) -> T {
        match self.core.lock().model.simulation_mut() {
            Some(simulation) => look(simulation),
            None => unreachable!("only simulations ask"),
        }
    }

    /// Creates an object that wakes a descriptor of its own.
    pub(crate) fn create_waking<T>(
        &self,
        create: impl FnOnce(&mut Model) -> Result<T, Error>,
        wake: impl FnOnce(&T) -> Wake,
    ) -> Result<(T, Arc<dyn Signal>), Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::Descriptor)?;
        {
            let mut state = self.core.lock();
            if state.model.simulation().is_some_and(|simulation| simulation.settings.held_descriptors) {
                // As a forked child does.
                let held = rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(Error::Descriptor)?;
                state.held.push(held);
            }
        }
        let signal: Arc<dyn Signal> = Arc::new(Eventfd(fd));
        Ok((self.create_signalling(&signal, create, wake)?, signal))
    }

    /// Creates an object that raises `signal`.
    pub(crate) fn create_signalling<T>(
        &self,
        signal: &Arc<dyn Signal>,
        create: impl FnOnce(&mut Model) -> Result<T, Error>,
        wake: impl FnOnce(&T) -> Wake,
    ) -> Result<T, Error> {
        // Under one lock: a wake of the new object must find its signal.
        let mut state = self.core.lock();
        if matches!(self.core.clock, Clock::Virtual) {
            state.model.pause();
        }
        let created = create(&mut state.model)?;
        state.signals.insert(wake(&created), Arc::clone(signal));
        state.wake();
        Ok(created)
    }

    /// Destroys what a handle stands for, when the handle is dropped.
    ///
    /// Does nothing in a forked child. Its copy of the model has no threads, and one of these may
    /// have held the lock.
    pub(crate) fn release(&self, destroy: impl FnOnce(&Self)) {
        if !rdma_process::is_child() {
            destroy(self);
        }
    }

    /// Destroys an object that wakes.
    pub(crate) fn destroy_waking(&self, wake: Wake, destroy: impl FnOnce(&mut Model)) {
        self.with(destroy);
        let signal = self.core.lock().signals.remove(&wake);
        // Not under the lock: dropping a caller's signal may run anything.
        drop(signal);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The thread exists only in the parent (`fork(2)`), and may have held the lock.
        if rdma_process::is_child() {
            return;
        }
        let mut state = self.core.lock();
        state.closed = true;
        let thread = state.thread.take();
        drop(state);
        self.core.state.notify();
        if let Some(thread) = thread {
            // It returns nothing, and a panic would have been reported by now.
            let _ended = thread.join();
        }
    }
}

impl Core {
    /// # Panics
    /// Panics in a forked child if another thread of its parent held the lock at the fork.
    fn lock(&self) -> MutexGuard<'_, Guarded> {
        if rdma_process::is_child() { self.state.lock_in_child() } else { self.state.lock() }
    }

    /// Executes what is due, and everything that follows from it at once. If that is much, only
    /// some of it, and returns false with the state.
    fn advance<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, Guarded>,
        ticks: &Ticks,
    ) -> (MutexGuard<'a, Guarded>, bool) {
        let all = state.model.advance_some(Instant::from_start(ticks.elapsed()));
        (self.copy(state, ticks), all)
    }

    /// Wakes sleepers, copies the bytes of long messages, and hands out messages with an end in
    /// another process. Releases the lock meanwhile, unless a thread waits for the end of all
    /// copies.
    #[inline]
    fn copy<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, Guarded>,
        ticks: &Ticks,
    ) -> MutexGuard<'a, Guarded> {
        state.wake();
        loop {
            if let Some(freight) = state.model.next_freight() {
                drop(state);
                let ended = Load::new(Arc::clone(self), freight).pass();
                state = self.lock();
                if let Some(freight) = ended {
                    // Time has passed without the lock.
                    state.model.advance_some(Instant::from_start(ticks.elapsed()));
                    state.model.end_freight(freight);
                    state.model.settle();
                    state.wake();
                }
                continue;
            }
            let Some(bulk) = state.model.next_bulk() else { break };
            // A thread waits for all copies to end: under the lock no further one begins.
            let copied = if state.waiting > 0 {
                bulk.copy()
            } else {
                state.copies += 1;
                drop(state);
                let copied = bulk.copy();
                state = self.lock();
                state.copies -= 1;
                copied
            };
            state.model.advance_some(Instant::from_start(ticks.elapsed()));
            state.model.end_bulk(&bulk, copied);
            state.model.settle();
            state.wake();
            if state.copies == 0 && state.waiting > 0 {
                self.state.notify_calm();
            }
        }
        if state.leaving > 0 {
            self.state.notify_calm();
        }
        state
    }

    /// Handles bytes that have arrived, on a thread that is not a caller's.
    pub(crate) fn arrive(self: &Arc<Self>, freight: Freight) {
        self.end(|model| model.end_freight(freight));
    }

    pub(crate) fn lose(self: &Arc<Self>, freight: &Freight) {
        self.end(|model| model.lose_freight(freight));
    }

    fn end(self: &Arc<Self>, end: impl FnOnce(&mut Model)) {
        let Clock::Real(ticks) = &self.clock else { return end(&mut self.lock().model) };
        let mut state = self.lock();
        state.model.advance_some(Instant::from_start(ticks.elapsed()));
        end(&mut state.model);
        state.model.settle();
        state = self.copy(state, ticks);
        self.note_idle(&state);
        self.watch(&mut state);
    }

    fn end_copies<'a>(&'a self, mut state: MutexGuard<'a, Guarded>) -> MutexGuard<'a, Guarded> {
        // They end: while a thread waits, `copy` begins no other without the lock.
        while state.copies > 0 {
            state.waiting += 1;
            state = self.state.wait_for_calm(state);
            state.waiting -= 1;
        }
        state
    }

    fn note_idle(&self, state: &Guarded) {
        self.idle.store(state.model.deadline().is_none(), Release);
    }

    /// Ensures that a thread will wake at the model's next deadline.
    fn watch(self: &Arc<Self>, state: &mut Guarded) {
        let Some(deadline) = state.model.deadline() else { return };
        if state.thread.is_none() {
            // The core and not the driver, whose drop joins this thread.
            let core = Arc::clone(self);
            let thread = Builder::new().name("softsim".into()).spawn(move || core.keep_time());
            // Without a thread, time passes only in calls. The next call tries again.
            state.thread = thread.ok();
        } else if state.asleep_until.is_none_or(|until| deadline < until) {
            self.state.notify();
        }
    }

    fn keep_time(self: &Arc<Self>) {
        let Clock::Real(ticks) = &self.clock else { return };
        let mut state = self.lock();
        while !state.closed {
            let all;
            (state, all) = self.advance(state, ticks);
            self.note_idle(&state);
            let deadline = state.model.deadline();
            let most = if all {
                state.asleep_until = deadline;
                deadline.map(|at| at.since(state.model.now()).min(LONGEST_SLEEP))
            } else {
                // Threads that wait for the lock have a turn, and need not wake this one.
                state.asleep_until = Some(Instant::default());
                Some(TURN)
            };
            state = self.state.sleep(state, most, ticks);
        }
    }
}

impl Guarded {
    /// Makes the descriptors of waiting objects readable. Under the lock, so that readable means
    /// waiting: a take that empties a channel cannot come in between.
    fn wake(&mut self) {
        for wake in self.model.wakes() {
            self.woken = true;
            if let Some(signal) = self.signals.get(&wake) {
                signal.raise();
            }
        }
    }
}

/// Tells a possible sleeper that something waits. Its descriptor is readable meanwhile.
///
/// Both functions are called under the fabric's lock. They must not block and must not call the
/// fabric.
pub trait Signal: AsFd + Send + Sync {
    /// Something waits that did not wait before.
    fn raise(&self);

    /// Nothing waits any more.
    fn clear(&self);
}

struct Eventfd(OwnedFd);

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Signal for Eventfd {
    fn raise(&self) {
        // Fails only if the counter is full; the descriptor is readable then anyway.
        let _raised = retry(|| rustix::io::write(&self.0, &1u64.to_ne_bytes()));
    }

    fn clear(&self) {
        let mut count = [0; 8];
        // It is empty already, or the call was interrupted and the next wake-up is spurious.
        let _cleared = retry(|| rustix::io::read(&self.0, &mut count));
    }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(errno) if errno.kind() == Interrupted => {}
            other => return other,
        }
    }
}
