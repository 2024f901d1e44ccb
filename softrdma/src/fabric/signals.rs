//! Descriptors on which programs sleep, each with one end that belongs to the program.
//!
//! Nothing that a program does to its end makes the fabric wait. Where blocking is a flag of the
//! description, the ends do not share one; elsewhere calls pass a flag that prevents blocking.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_softsim::Signal;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use softrdma_wire::{Name, RECORD};

use super::vectors::Vector;

/// A descriptor that is readable while an event waits: for event channels and asynchronous events.
pub(super) struct Level {
    ours: OwnedFd,
    /// The program's end, whose flags the program can set.
    theirs: OwnedFd,
}

impl Level {
    pub(super) fn new() -> Result<Self, Errno> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let (ours, theirs) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok(Self { ours, theirs })
    }

    pub(super) fn end_for_program(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(&self.theirs, 0)
    }
}

impl AsFd for Level {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }
}

impl Signal for Level {
    fn raise(&self) {
        // Fails only if the socket is full, and so readable.
        let _sent = rustix::net::send(&self.ours, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    fn clear(&self) {
        let mut bytes = [0; 64];
        while rustix::net::recv(&self.theirs, &mut bytes, RecvFlags::DONTWAIT).is_ok_and(|(_, len)| len > 0) {
        }
    }
}

/// Tells a session that one of its completion channels is full. Readable from then on until it is
/// cleared.
pub(super) struct Backlog {
    fd: OwnedFd,
}

impl Backlog {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    fn raise(&self) {
        // Fails only if the counter is full, and so readable.
        let _raised = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        let _count = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

impl AsFd for Backlog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A completion channel: a pipe with a record for each completion event, which the program reads
/// without a request.
///
/// Records without room in the pipe wait here. The session's thread writes them when the program
/// has read.
pub(super) struct Records {
    pipe: OwnedFd,
    /// Events that found no room, counted by completion queue, so that their memory is bounded by
    /// the number of queues.
    waiting: Mutex<BTreeMap<Name, u64>>,
    backlog: Arc<Backlog>,
}

impl Records {
    /// Makes a channel, and returns the program's end with it.
    pub(super) fn new(backlog: &Arc<Backlog>) -> Result<(Self, OwnedFd), Errno> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // The program's end blocks, as a completion channel does by default. Ours never does.
        rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::NONBLOCK)?;
        let (waiting, backlog) = (Mutex::default(), Arc::clone(backlog));
        Ok((Self { pipe: write, waiting, backlog }, read))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Name, u64>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tell(&self, queue: Name) {
        let mut waiting = self.lock();
        let none = waiting.is_empty();
        *waiting.entry(queue).or_default() += 1;
        if none {
            self.drain(&mut waiting);
            if !waiting.is_empty() {
                self.backlog.raise();
            }
        }
    }

    /// Writes the records that found no room in the pipe.
    pub(super) fn flush(&self) {
        self.drain(&mut self.lock());
    }

    /// Whether records found no room.
    pub(super) fn is_full(&self) -> bool {
        !self.lock().is_empty()
    }

    fn drain(&self, waiting: &mut BTreeMap<Name, u64>) {
        while let Some(mut first) = waiting.first_entry() {
            let record: [u8; RECORD] = u64::from(*first.key()).to_le_bytes();
            // A record is short enough to be written whole or not at all (`pipe(7)`).
            match rustix::io::write(&self.pipe, &record) {
                Ok(_) => {
                    *first.get_mut() -= 1;
                    if *first.get() == 0 {
                        first.remove();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The program has closed its end, and so wants no records.
                Err(_) => waiting.clear(),
            }
        }
    }
}

impl AsFd for Records {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// The record of an event of this completion queue, and its channel.
type Record = (Arc<Records>, Name);

thread_local! {
    /// The records that this thread writes when it has left the model, if it is in [`after`].
    static LATER: RefCell<Option<Vec<Record>>> = const { RefCell::new(None) };
}

/// Calls `act`, and then writes the records of the completion events that it caused. To wake a
/// program takes longer than anything that the model does, so no thread should wait for it.
pub(super) fn after<T>(act: impl FnOnce() -> T) -> T {
    let outer = LATER.replace(Some(Vec::new()));
    let result = act();
    for (channel, queue) in LATER.replace(outer).unwrap_or_default() {
        channel.tell(queue);
    }
    result
}

/// Raises the events of one completion queue on its channel, if it has one.
pub(super) struct QueueSignal {
    pub(super) queue: Name,
    pub(super) channel: Arc<Records>,
    /// The vector whose thread raises the events; otherwise the thread that adds the completion
    /// does.
    pub(super) vector: Option<Arc<Vector>>,
}

impl AsFd for QueueSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl Signal for QueueSignal {
    fn raise(&self) {
        match &self.vector {
            Some(vector) => vector.raise(&self.channel, self.queue),
            None => LATER.with_borrow_mut(|later| match later {
                Some(later) => later.push((Arc::clone(&self.channel), self.queue)),
                None => self.channel.tell(self.queue),
            }),
        }
    }

    /// The program reads its records itself.
    fn clear(&self) {}
}
