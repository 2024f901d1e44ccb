//! Memory of programs in which windows lie: from when it is the program's again, nobody else changes a byte of it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_conn::{CallerMemory, SharedMemory};

/// As many pieces are watched, the newest.
const WATCHED: usize = 4;

/// The memory of one program.
#[derive(Clone, Default)]
pub struct Memory {
    /// What was deregistered.
    returned: Arc<Mutex<VecDeque<Returned>>>,
}

struct Returned {
    bytes: Arc<[AtomicU8]>,
    /// What they were when the program got them back.
    then: Vec<u8>,
}

/// A piece of it, to be registered. It is the program's again when it is dropped.
pub struct Piece {
    bytes: Arc<[AtomicU8]>,
    of: Memory,
}

impl Memory {
    /// Returns `len` bytes.
    pub fn piece(&self, len: usize) -> Piece {
        Piece { bytes: (0..len).map(|_| AtomicU8::new(0)).collect(), of: self.clone() }
    }

    /// Returns whether any byte was written that is the program's again.
    pub fn is_violated(&self) -> bool {
        let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.iter().any(|Returned { bytes, then }| content(bytes) != *then)
    }
}

impl CallerMemory for Piece {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.bytes)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut returned = self.of.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.push_back(Returned { bytes: Arc::clone(&self.bytes), then: content(&self.bytes) });
        if returned.len() > WATCHED {
            returned.pop_front();
        }
    }
}

fn content(bytes: &[AtomicU8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
}
