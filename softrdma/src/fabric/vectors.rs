//! Completion vectors, each with a thread that raises the events of its completion queues.
//!
//! They are like the interrupts of a card: each can be pinned to a processor. By default there are
//! no such threads, and the thread that adds a completion raises its event.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use softrdma_wire::Name;

use super::signals::Records;

/// The most vectors of a fabric.
pub(super) const MOST: u32 = 64;

/// The vectors of a fabric.
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
    over: bool,
}

impl Vector {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the vector's thread report a queue's event on the channel.
    pub(super) fn raise(&self, channel: &Arc<Records>, queue: Name) {
        let mut state = self.lock();
        let same = |(other, name): &(Arc<Records>, Name)| *name == queue && Arc::ptr_eq(other, channel);
        if !state.waiting.iter().any(same) {
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
            drop(state);
            for (channel, queue) in waiting {
                // Counted before a program can see the event and ask for the count.
                self.raised.fetch_add(1, Relaxed);
                channel.tell(queue);
            }
        }
    }
}

impl Vectors {
    /// Starts the threads `vector-0`, `vector-1` and so on.
    pub(super) fn start(count: u32) -> Result<Self, Errno> {
        if !(1..=MOST).contains(&count) {
            return Err(Errno::INVAL);
        }
        let mut started = Self { each: Vec::new() };
        for number in 0..count {
            let vector =
                Arc::new(Vector { state: Mutex::default(), more: Condvar::new(), raised: AtomicU64::new(0) });
            let thread = Arc::clone(&vector);
            // If a thread cannot be started, those before it end.
            std::thread::Builder::new()
                .name(format!("vector-{number}"))
                .spawn(move || thread.run())
                .map_err(|_no_thread| Errno::AGAIN)?;
            started.each.push(vector);
        }
        Ok(started)
    }

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

impl Drop for Vectors {
    fn drop(&mut self) {
        for vector in &self.each {
            vector.lock().over = true;
            vector.more.notify_one();
        }
    }
}
