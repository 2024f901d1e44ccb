//! A loop, a device, a connection manager and a waker, in all orders that shuttle tries: `.ci/run
//! interleavings`. The loop takes everything that arrives while it turns, arms and sleeps. A loop
//! that sleeps while there is work is a deadlock.

use std::convert::Infallible;
use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use super::*;

/// Completions that a look takes at most.
const BATCH: u32 = 2;
/// Completions of a run: more than one look takes.
const COMPLETIONS: u32 = 3;
const EVENTS: u32 = 2;

/// The kernel and the device.
#[derive(Default)]
struct Below {
    completions: u32,
    armed: bool,
    /// A completion has raised a wake-up.
    wakeup: bool,
    events: u32,
    waker: bool,
    /// Something became readable since the last sleep. An edge-triggered watcher is told once.
    edge: bool,
}

impl Below {
    const fn is_readable(&self) -> bool {
        self.wakeup || self.events > 0 || self.waker
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<(Mutex<Below>, Condvar)>);

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut Below) -> T) -> T {
        let (below, changed) = &*self.0;
        let mut below = below.lock().unwrap();
        let done = act(&mut below);
        changed.notify_all();
        done
    }

    fn sleep_until(&self, woken: impl Fn(&Below) -> bool) {
        let (below, changed) = &*self.0;
        let mut below = below.lock().unwrap();
        while !woken(&below) {
            below = changed.wait(below).unwrap();
        }
        below.edge = false;
    }
}

struct Loop {
    awake: Awake,
    below: Shared,
    armed: bool,
    micros: u64,
    completions: u32,
    events: u32,
    woken: bool,
}

impl Loop {
    fn take(&mut self) -> Found {
        let taken = self.below.with(|below| {
            let taken = below.completions.min(BATCH);
            below.completions -= taken;
            taken
        });
        self.completions += taken;
        match taken {
            0 => Found::Nothing,
            BATCH => Found::More,
            _ => Found::All,
        }
    }

    const fn has_all(&self) -> bool {
        self.completions == COMPLETIONS && self.events == EVENTS && self.woken
    }
}

impl Turns for Loop {
    type Error = Infallible;

    fn awake(&mut self) -> &mut Awake {
        &mut self.awake
    }

    fn ask(&mut self, limit: Option<Duration>) -> Result<bool, Infallible> {
        self.awake.asks();
        if limit.is_none() {
            self.below.sleep_until(Below::is_readable);
        }
        let (wakeup, events, waker) = self.below.with(|below| {
            let waker = std::mem::take(&mut below.waker);
            (std::mem::take(&mut below.wakeup), below.events > 0, waker)
        });
        self.armed &= !wakeup;
        if events {
            self.awake.set_events_wait(true);
        }
        self.woken |= waker;
        Ok(waker)
    }

    fn look(&mut self, arms: bool) -> Result<Found, Infallible> {
        if arms && !std::mem::replace(&mut self.armed, true) {
            self.below.with(|below| below.armed = true);
        }
        self.micros += 1;
        self.awake.looks(Instant::from_start(Duration::from_micros(self.micros)));
        let found = self.take();
        if !self.awake.events_wait() {
            return Ok(found);
        }
        self.events += self.below.with(|below| std::mem::take(&mut below.events));
        self.awake.set_events_wait(false);
        Ok(Found::More)
    }

    fn any_armed(&self) -> bool {
        self.armed
    }

    fn any_deaf(&self) -> bool {
        !self.armed
    }

    fn idle_for(&self) -> Option<Duration> {
        (self.awake.is_unfinished() || self.awake.events_wait()).then_some(Duration::ZERO)
    }
}

fn run(spin: Duration, step: fn(&mut Loop)) {
    let below = Shared::default();
    let device = below.clone();
    let device = thread::spawn(move || {
        for _ in 0..COMPLETIONS {
            device.with(|below| {
                below.completions += 1;
                below.wakeup |= below.armed;
                below.edge |= std::mem::take(&mut below.armed);
            });
        }
    });
    let manager = below.clone();
    let manager = thread::spawn(move || {
        for _ in 0..EVENTS {
            manager.with(|below| {
                below.events += 1;
                below.edge = true;
            });
        }
    });
    let waker = below.clone();
    let waker = thread::spawn(move || {
        waker.with(|below| {
            below.waker = true;
            below.edge = true;
        });
    });
    let mut awake = Awake::new();
    awake.spin.limit(spin);
    // A queue is new.
    awake.has_more();
    let mut one = Loop { awake, below, armed: false, micros: 0, completions: 0, events: 0, woken: false };
    while !one.has_all() {
        step(&mut one);
        thread::yield_now();
    }
    for other in [device, manager, waker] {
        other.join().unwrap();
    }
}

fn check(step: fn(&mut Loop)) {
    for spin in [0, 5, 50].map(Duration::from_micros) {
        shuttle::check_random(move || run(spin, step), 2000);
        shuttle::check_pct(move || run(spin, step), 2000, 4);
    }
}

/// An event loop that watches the descriptor for edges, and consumes them before a turn.
#[test]
fn a_loop_that_turns_never_sleeps_on_work() {
    check(|one| {
        one.below.with(|below| below.edge = false);
        let Ok(()) = one.turn();
        if !one.awake.is_unfinished() && !one.awake.events_wait() && !one.has_all() {
            one.below.sleep_until(|below| below.edge);
        }
    });
}

/// A thread that sleeps in the endpoint.
#[test]
fn a_loop_that_sleeps_never_sleeps_on_work() {
    check(|one| {
        let Ok(()) = one.sleep(None, true);
    });
}
