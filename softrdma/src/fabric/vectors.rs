//! Completion vectors, each with a thread that raises the events of its completion queues.
//!
//! They are like the interrupts of a card: each can be pinned to a processor. By default there are
//! no such threads, and the thread that adds a completion raises its event.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use softrdma_wire::Name;

use super::signals::Records;

/// The most vectors of a fabric.
pub(super) const MOST: u32 = 64;

/// The threads of a fabric's vectors. Each is started when vectors with its number are first asked
/// for, and serves all sessions whose devices have that vector. So there are never more than
/// [`MOST`] of them.
#[derive(Default)]
pub(super) struct Pool(Vec<Arc<Vector>>);

/// The vectors of the devices of some sessions.
pub(super) struct Vectors {
    each: Vec<Arc<Vector>>,
}

/// One completion vector.
pub(super) struct Vector {
    state: Mutex<State>,
    more: Condvar,
    /// How many completion events its thread has raised.
    raised: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Completion queues whose event is not raised yet, each at most once. However slow the thread
    /// is, the list has one entry for each queue.
    waiting: Vec<(Arc<Records>, Name)>,
    /// Which they are, by the address of the channel: this is looked up under the model's lock.
    known: BTreeSet<(usize, Name)>,
    over: bool,
}

impl Vector {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the vector's thread report a queue's event on the channel.
    pub(super) fn raise(&self, channel: &Arc<Records>, queue: Name) {
        let mut state = self.lock();
        if state.known.insert((Arc::as_ptr(channel).addr(), queue)) {
            state.waiting.push((Arc::clone(channel), queue));
        }
        drop(state);
        self.more.notify_one();
    }

    fn run(&self) {
        loop {
            let mut state = self.lock();
            while state.waiting.is_empty() && !state.over {
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.over {
                return;
            }
            let waiting = std::mem::take(&mut state.waiting);
            state.known.clear();
            drop(state);
            for (channel, queue) in waiting {
                // Counted before a program can see the event and ask for the count.
                self.raised.fetch_add(1, Relaxed);
                channel.tell(queue);
            }
        }
    }
}

impl Pool {
    /// Returns so many vectors, whose threads are `vector-0`, `vector-1` and so on.
    pub(super) fn vectors(&mut self, count: u32) -> Result<Vectors, Errno> {
        if !(1..=MOST).contains(&count) {
            return Err(Errno::INVAL);
        }
        for number in self.0.len()..count as usize {
            let vector =
                Arc::new(Vector { state: Mutex::default(), more: Condvar::new(), raised: AtomicU64::new(0) });
            let thread = Arc::clone(&vector);
            std::thread::Builder::new()
                .name(format!("vector-{number}"))
                .spawn(move || thread.run())
                .map_err(|_no_thread| Errno::AGAIN)?;
            self.0.push(vector);
        }
        Ok(Vectors { each: self.0.iter().take(count as usize).map(Arc::clone).collect() })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for vector in &self.0 {
            vector.lock().over = true;
            vector.more.notify_one();
        }
    }
}

impl Vectors {
    pub(super) fn count(&self) -> u32 {
        self.each.len() as u32
    }

    pub(super) fn get(&self, number: u32) -> Option<Arc<Vector>> {
        self.each.get(number as usize).map(Arc::clone)
    }

    pub(super) fn raised(&self) -> Vec<u64> {
        self.each.iter().map(|vector| vector.raised.load(Relaxed)).collect()
    }
}
