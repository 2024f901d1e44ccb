//! Threads that serve programs, and move bytes in between.
//!
//! To hand bytes to another thread takes longer than to copy a few. So the thread that serves a program moves what the
//! program's request has set in motion, before it answers. Meanwhile what it serves lies in its [`Seat`]. If the
//! memory of some program keeps the thread, the [`Watch`] has another thread take everything from there and go on with it. The
//! first thread ends when it comes back. So a page that does not come costs a thread for each program that has such
//! a page, and [`PATIENCE`].
//!
//! The watch looks at the seats now and then, for as long as something is moved. When nothing is, it sleeps until something is.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, Thread};
use std::time::Duration;

use rdma_softsim::Load;

use super::memory::Process;
use super::movers::Movers;
use super::service::Service;

/// After this time, and twice this time at most, a thread that moves is replaced.
pub(super) const PATIENCE: Duration = Duration::from_millis(20);

thread_local! {
    /// The seat of this thread, while it takes what is to be moved.
    static SEAT: RefCell<Option<Arc<Seat>>> = const { RefCell::new(None) };
}

/// What a thread holds that another could go on with.
#[derive(Default)]
pub(super) struct Seat(Mutex<Held>);

#[derive(Default)]
struct Held {
    /// Next steps of messages, in these programs' memory.
    loads: VecDeque<(Arc<Process>, Load)>,
    /// What the thread serves, while it moves.
    service: Option<Box<Service>>,
    /// How often it has begun to move, and has taken a step, ...
    turn: u64,
    steps: u64,
    /// ... and both when the watch looked.
    seen: (u64, u64),
    /// The turn for which another thread was sent.
    sent_for: u64,
    /// The watch has found it in one step twice.
    kept: bool,
    /// The other thread has come.
    replaced: bool,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next step of a message into the seat of this thread. Gives it back if there is none.
    pub(super) fn take(process: &Arc<Process>, load: Load) -> Option<Load> {
        SEAT.with_borrow(|seat| {
            let Some(seat) = seat else { return Some(load) };
            let mut held = seat.lock();
            if held.replaced {
                return Some(load);
            }
            held.loads.push_back((Arc::clone(process), load));
            None
        })
    }

    /// Takes what `act` sets in motion. Nobody else moves that before [`Seat::move_all`]: `act` must not wait for anybody.
    pub(super) fn collect<T>(self: &Arc<Self>, act: impl FnOnce() -> T) -> T {
        let _leave = Leave;
        SEAT.set(Some(Arc::clone(self)));
        act()
    }

    /// Whether there is something to be moved.
    pub(super) fn is_laden(&self) -> bool {
        !self.lock().loads.is_empty()
    }

    /// Whether the step that this thread takes is a long one.
    pub(super) fn is_kept(&self) -> bool {
        self.lock().kept
    }

    /// Moves what was taken, and what follows from it. Returns what the thread serves, unless another thread serves it now.
    pub(super) fn move_all(
        self: &Arc<Self>,
        service: Box<Service>,
        movers: &Arc<Movers>,
    ) -> Option<Box<Service>> {
        let mut held = self.lock();
        held.service = Some(service);
        held.turn += 1;
        drop(held);
        movers.watch.begin();
        self.collect(|| {
            loop {
                let mut held = self.lock();
                let Some((process, load)) = held.loads.pop_front() else { break held.service.take() };
                held.steps += 1;
                held.kept = false;
                drop(held);
                movers.step(&process, load, self);
            }
        })
    }

    /// Takes the place of the thread, if it still is where it was when this was sent for.
    fn take_over(&self, turn: u64, movers: &Arc<Movers>) -> Option<Box<Service>> {
        let mut held = self.lock();
        if held.turn != turn {
            return None;
        }
        let service = held.service.take()?;
        held.replaced = true;
        let loads = std::mem::take(&mut held.loads);
        drop(held);
        movers.submit_all(loads);
        Some(service)
    }
}

/// The thread's seat takes nothing any more.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        SEAT.set(None);
    }
}

/// Looks for threads that have been moving for long.
pub(super) struct Watch {
    seats: Mutex<Seats>,
    patience: Duration,
    /// The thread that looks.
    thread: OnceLock<Thread>,
    /// It sleeps until something is moved.
    asleep: AtomicBool,
    closed: AtomicBool,
}

#[derive(Default)]
struct Seats {
    list: BTreeMap<u64, Arc<Seat>>,
    count: u64,
}

/// A seat that is looked at.
pub(super) struct Taken {
    pub(super) seat: Arc<Seat>,
    number: u64,
    movers: Arc<Movers>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let seat = self.movers.watch.lock().list.remove(&self.number);
        drop(seat);
    }
}

impl Watch {
    pub(super) fn new(patience: Duration) -> Self {
        let (asleep, closed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { seats: Mutex::default(), patience, thread: OnceLock::new(), asleep, closed }
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A seat for this thread.
    pub(super) fn seat(movers: &Arc<Movers>) -> Taken {
        let seat = Arc::new(Seat::default());
        let mut seats = movers.watch.lock();
        seats.count += 1;
        let number = seats.count;
        seats.list.insert(number, Arc::clone(&seat));
        drop(seats);
        Taken { seat, number, movers: Arc::clone(movers) }
    }

    /// Begins to look.
    pub(super) fn start(movers: &Arc<Movers>) -> std::io::Result<()> {
        let watching = Arc::clone(movers);
        let thread = Builder::new().name("watch".into()).spawn(move || Self::look_on(&watching))?;
        let _first = movers.watch.thread.set(thread.thread().clone());
        Ok(())
    }

    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
        self.wake();
    }

    /// Somebody begins to move. The watch finds that in the seat, or was asleep before and is woken here.
    fn begin(&self) {
        if self.asleep.load(SeqCst) && self.asleep.swap(false, SeqCst) {
            self.wake();
        }
    }

    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(SeqCst)
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn look_on(movers: &Arc<Movers>) {
        let watch = &movers.watch;
        while !watch.closed.load(SeqCst) {
            if watch.look(movers) {
                std::thread::park_timeout(watch.patience);
                continue;
            }
            watch.asleep.store(true, SeqCst);
            // Whoever has begun before knew nothing of it.
            if !watch.look(movers) {
                while watch.asleep.load(SeqCst) && !watch.closed.load(SeqCst) {
                    std::thread::park();
                }
            }
            watch.asleep.store(false, SeqCst);
        }
    }

    /// Looks once. Returns whether anybody has moved something since the last time, or does.
    fn look(&self, movers: &Arc<Movers>) -> bool {
        let (mut active, mut late) = (false, Vec::new());
        for seat in self.lock().list.values() {
            let mut held = seat.lock();
            let moves = held.service.is_some();
            let (turn, steps) = held.seen;
            active |= moves || turn != held.turn;
            if moves && turn == held.turn {
                held.kept |= steps == held.steps;
                if held.sent_for != turn {
                    late.push((Arc::clone(seat), turn));
                }
            }
            held.seen = (held.turn, held.steps);
        }
        for (seat, turn) in late {
            Self::replace(&seat, turn, movers);
        }
        active
    }

    fn replace(seat: &Arc<Seat>, turn: u64, movers: &Arc<Movers>) {
        let (place, waiting) = (Arc::clone(seat), Arc::clone(movers));
        let other = move || {
            if let Some(service) = place.take_over(turn, &waiting) {
                service.serve();
            }
        };
        // Without a thread the program waits, and nobody else does. The next look tries again.
        let sent = Builder::new().name("session".into()).spawn(other).is_ok();
        let mut held = seat.lock();
        if sent {
            held.sent_for = turn;
        }
        let loads = if held.turn == turn { std::mem::take(&mut held.loads) } else { VecDeque::new() };
        drop(held);
        movers.submit_all(loads);
    }
}
