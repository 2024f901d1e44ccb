//! Keeps idle connections alive, and sees dropped ones to their end.
//!
//! A stream whose program is busy elsewhere still has keepalives to send, receives to post again, and a peer to answer: a
//! peer that finds no receive posted waits, or gives up (VR-KEEP-008). One thread per process looks after all of them; it never touches a
//! connection that a call is using, because that call does the same.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How often idle connections are looked at: a few times per keepalive interval (3 s), and often enough that a peer cannot
/// use up 1024 receives with anything but data.
const INTERVAL: Duration = Duration::from_millis(500);

/// How often while some connection is on its way to its end.
const PARTING_INTERVAL: Duration = Duration::from_millis(2);

/// Something to look after.
pub(crate) trait Kept: Send + Sync {
    /// Called now and then. False once it has ended and needs no more care.
    fn tend(&self) -> bool;
}

static KEEPER: Keeper = Keeper {
    state: Mutex::new(State { kept: Vec::new(), parting: Vec::new(), running: false }),
    changed: Condvar::new(),
};

struct Keeper {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Connections that belong to a stream.
    kept: Vec<Weak<dyn Kept>>,
    /// Connections whose stream is gone and whose last bytes are not.
    parting: Vec<Arc<dyn Kept>>,
    running: bool,
}

/// Looks after `kept` until it is dropped.
pub(crate) fn keep(kept: Weak<dyn Kept>) {
    KEEPER.add(|state| state.kept.push(kept));
}

/// Sees `parting` to its end. It must end by itself, that is, have been closed.
#[cfg(feature = "tokio")]
pub(crate) fn see_off(parting: Arc<dyn Kept>) {
    KEEPER.add(|state| state.parting.push(parting));
}

/// From now on only calls on connections look after them, so that a test is the same each time.
#[cfg(all(test, feature = "tokio"))]
pub(crate) fn stay_away() {
    KEEPER.lock().running = true;
}

impl Keeper {
    fn add(&self, add: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        add(&mut state);
        if !state.running {
            let spawned = std::thread::Builder::new().name("rdma-keeper".into()).spawn(|| KEEPER.run());
            // Without a thread, connections are still tended by every call on them.
            state.running = spawned.is_ok();
        }
        self.changed.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            state.kept.retain(|kept| kept.strong_count() > 0);
            let tended: Vec<Arc<dyn Kept>> = state.kept.iter().filter_map(Weak::upgrade).collect();
            let parting = std::mem::take(&mut state.parting);
            drop(state);
            for kept in tended {
                kept.tend();
            }
            let parting: Vec<_> = parting.into_iter().filter(|parting| parting.tend()).collect();
            state = self.lock();
            state.parting.extend(parting);
            let interval = match (state.parting.is_empty(), state.kept.is_empty()) {
                (false, _) => PARTING_INTERVAL,
                (true, false) => INTERVAL,
                (true, true) => Duration::MAX,
            };
            // A connection that comes or goes wakes it early, which does no harm.
            state = match self.changed.wait_timeout(state, interval) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}
