//! The events of a simulation as data: for oracles, for people, and to prove that two runs are
//! equal.

use core::hash::{Hash, Hasher};

use rdma_backend::time::Instant;
use rdma_backend::{Access, Completion, SendOp};

use crate::faults::Injection;

/// Bytes of a SEND that a trace keeps: a whole control message.
pub const MESSAGE: usize = 32;

/// An entry of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The event of the simulation during which it happened.
    pub event: u64,
    /// The time.
    pub at: Instant,
    /// What happened.
    pub what: EntryKind,
}

/// Kinds of trace entries. Queue pairs are named by their numbers, which are unique at one time but
/// reused later. Hosts count from 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// A queue pair was made.
    Created {
        /// On this host.
        host: u32,
        /// Its number.
        pair: u32,
        /// The key of its identifier.
        identifier: u64,
    },
    /// Memory was registered.
    Registered {
        /// On this host.
        host: u32,
        /// Its access flags.
        access: Access,
    },
    /// Send work was posted.
    Posted {
        /// By this queue pair's owner.
        pair: u32,
        /// The request.
        work: Work,
    },
    /// A receive was posted.
    Received {
        /// To this queue pair.
        pair: u32,
        /// The request's id.
        id: u64,
    },
    /// A message was executed by the receiving device.
    Executed {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// The sender's request.
        work: Work,
    },
    /// A notification found no receive.
    NotReady {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// Whether a fault caused it.
        injected: bool,
        /// Whether the sender's retries are limited.
        limited: bool,
    },
    /// Bytes of a send buffer changed while the device still owned them.
    Tampered {
        /// The owner.
        pair: u32,
        /// The request they belong to.
        id: u64,
    },
    /// A completion came.
    Completed(Completion),
    /// A completion was polled.
    Polled(Completion),
    /// A connection-manager event is waiting.
    Told {
        /// For this host.
        host: u32,
        /// For the identifier with this key.
        identifier: u64,
        /// The name of the event.
        what: &'static str,
    },
    /// A program called the connection manager.
    Called {
        /// The host.
        host: u32,
        /// The identifier's key.
        identifier: u64,
        /// Which call.
        what: &'static str,
    },
    /// A fault struck.
    Struck(Injection),
    /// An object was destroyed that another still needs: `EBUSY`, or worse.
    Busy {
        /// On this host.
        host: u32,
        /// The object that was destroyed.
        what: &'static str,
    },
}

/// A send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// Its id.
    pub id: u64,
    /// The operation.
    pub op: SendOp,
    /// The number of bytes.
    pub len: usize,
    /// Whether success is reported.
    pub signaled: bool,
    /// The first bytes of a SEND.
    pub message: Option<[u8; MESSAGE]>,
}

/// A hash that is the same everywhere: FNV-1a by words, sufficient to tell two traces apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Digest {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            // In one byte order, for the same reason as in `write_usize`.
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x0100_0000_01b3_9d27);
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_usize(&mut self, value: usize) {
        // One width on every machine, so that a hash in a report can be repeated anywhere.
        self.write_u64(value as u64);
    }
}

/// The events since the last call, and the hash of all events.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) entries: Vec<Entry>,
    pub(crate) digest: Digest,
}

impl Trace {
    pub(crate) fn push(&mut self, entry: Entry) {
        entry.hash(&mut self.digest);
        self.entries.push(entry);
    }
}
