//! Threads that serve programs, and move bytes meanwhile.
//!
//! Passing bytes to another thread takes longer than copying a few. So the thread that serves a
//! program moves the bytes of the program's request before it answers. Meanwhile the service lies
//! in the thread's [`Seat`]. If the memory of some program blocks the thread, the [`Watch`] starts
//! another thread, which takes everything from the seat and continues. The first thread ends when
//! its access returns. So a page that does not come costs a thread for each program that has such a
//! page, and [`PATIENCE`].
//!
//! The watch looks at the seats periodically while bytes are moved. Otherwise it sleeps.

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
use super::signals;

/// How long a thread may move bytes before it is replaced. The replacement comes after at most
/// twice this time.
pub(super) const PATIENCE: Duration = Duration::from_millis(20);

thread_local! {
    /// The seat of this thread, while it collects steps to take.
    static SEAT: RefCell<Option<Arc<Seat>>> = const { RefCell::new(None) };
}

/// The state of a thread with which another one can continue.
#[derive(Default)]
pub(super) struct Seat(Mutex<Held>);

#[derive(Default)]
struct Held {
    /// The next steps of messages, with the programs in whose memory they are.
    loads: VecDeque<(Arc<Process>, Load)>,
    /// The service, while the thread moves bytes.
    service: Option<Box<Service>>,
    /// How often the thread has begun to move bytes; below, how many steps it has taken.
    turn: u64,
    steps: u64,
    /// Turn and steps when the watch last looked.
    seen: (u64, u64),
    /// The turn for which another thread was started.
    sent_for: u64,
    /// Whether the watch has found the thread in the same step twice.
    kept: bool,
    /// Whether the other thread has taken over.
    replaced: bool,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next step of a message into the seat of this thread. Returns it if the thread has
    /// no seat, or was replaced.
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

    /// Collects the steps that `act` causes. No thread takes them before [`Seat::move_all`], so
    /// `act` must not wait for another thread.
    pub(super) fn collect<T>(self: &Arc<Self>, act: impl FnOnce() -> T) -> T {
        signals::after(|| self.seated(act))
    }

    fn seated<T>(self: &Arc<Self>, act: impl FnOnce() -> T) -> T {
        let _leave = Leave;
        SEAT.set(Some(Arc::clone(self)));
        act()
    }

    pub(super) fn is_laden(&self) -> bool {
        !self.lock().loads.is_empty()
    }

    /// Notes a further step. Returns false if the thread may take none, because the last one took
    /// long, or because another thread has taken over.
    pub(super) fn continues(&self) -> bool {
        let mut held = self.lock();
        let may = !held.kept && !held.replaced;
        held.steps += u64::from(may);
        may
    }

    /// Whether the current step takes long.
    pub(super) fn is_kept(&self) -> bool {
        self.lock().kept
    }

    /// Takes the collected steps, and those that follow from them. Returns the service, unless
    /// another thread serves it now.
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
        self.seated(|| {
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

    /// Takes over from the thread, if it is still in the turn for which this was started.
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

/// Makes the thread collect no more steps when dropped.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        SEAT.set(None);
    }
}

/// Looks for threads that have been moving bytes for long.
pub(super) struct Watch {
    seats: Mutex<Seats>,
    patience: Duration,
    /// The thread of the watch.
    thread: OnceLock<Thread>,
    /// Whether the watch sleeps until bytes are moved.
    asleep: AtomicBool,
    closed: AtomicBool,
}

#[derive(Default)]
struct Seats {
    list: BTreeMap<u64, Arc<Seat>>,
    count: u64,
}

/// A seat that the watch looks at.
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

    pub(super) fn seat(movers: &Arc<Movers>) -> Taken {
        let seat = Arc::new(Seat::default());
        let mut seats = movers.watch.lock();
        seats.count += 1;
        let number = seats.count;
        seats.list.insert(number, Arc::clone(&seat));
        drop(seats);
        Taken { seat, number, movers: Arc::clone(movers) }
    }

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

    /// Notes that a thread begins to move bytes. The watch sees that in the seat, or is woken here
    /// if it sleeps.
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
            // A thread that began before `asleep` was set did not wake the watch.
            if !watch.look(movers) {
                while watch.asleep.load(SeqCst) && !watch.closed.load(SeqCst) {
                    std::thread::park();
                }
            }
            watch.asleep.store(false, SeqCst);
        }
    }

    /// Looks once. Returns whether a thread is moving bytes, or has done so since the last time.
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
        // If no thread can be started, only this program waits. The next look tries again.
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
