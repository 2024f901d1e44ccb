//! What programs sleep on: descriptors of which one end is theirs, to do with as they like.
//!
//! Nothing that a program does to its end makes the fabric wait: descriptions are not shared where blocking is a flag of the
//! description, and calls that could block are told not to.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_softsim::Signal;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use softrdma_wire::{Name, RECORD};

/// Records kept for a program that does not read its completion channel. More are lost to it.
const MOST_WAITING: usize = 1 << 16;

/// A descriptor that is readable while something waits: of event channels and asynchronous events.
pub(super) struct Level {
    ours: OwnedFd,
    /// The program's end, whose flags are the program's too.
    theirs: OwnedFd,
}

impl Level {
    pub(super) fn new() -> Result<Self, Errno> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let (ours, theirs) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok(Self { ours, theirs })
    }

    /// Returns a descriptor for the program.
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
        // Fails if the socket is full, and then it is readable.
        let _sent = rustix::net::send(&self.ours, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    fn clear(&self) {
        let mut bytes = [0; 64];
        while rustix::net::recv(&self.theirs, &mut bytes, RecvFlags::DONTWAIT).is_ok_and(|(_, len)| len > 0) {
        }
    }
}

/// A completion channel: a pipe with a record for each completion event, which the program reads by itself.
pub(super) struct Records {
    pipe: OwnedFd,
    waiting: Mutex<VecDeque<Name>>,
}

impl Records {
    /// The channel, and its program's end.
    pub(super) fn new() -> Result<(Self, OwnedFd), Errno> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // The program's end blocks, as a completion channel does until it is told not to; ours never does.
        rustix::fs::fcntl_setfl(&write, rustix::fs::OFlags::NONBLOCK)?;
        Ok((Self { pipe: write, waiting: Mutex::default() }, read))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Name>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, queue: Name) {
        let mut waiting = self.lock();
        if waiting.len() < MOST_WAITING {
            waiting.push_back(queue);
        }
        self.drain(&mut waiting);
    }

    /// Writes what found no room in the pipe.
    pub(super) fn flush(&self) {
        let mut waiting = self.lock();
        if !waiting.is_empty() {
            self.drain(&mut waiting);
        }
    }

    fn drain(&self, waiting: &mut VecDeque<Name>) {
        while let Some(queue) = waiting.front() {
            let record: [u8; RECORD] = u64::from(*queue).to_le_bytes();
            // So few bytes are written whole or not at all (`pipe(7)`).
            match rustix::io::write(&self.pipe, &record) {
                Ok(_) => {
                    waiting.pop_front();
                }
                Err(Errno::INTR) => {}
                // Full; or the program has closed its end, and wants none.
                Err(_) => break,
            }
        }
    }
}

/// What one completion queue raises on its channel, or on none.
pub(super) struct QueueSignal {
    pub(super) queue: Name,
    pub(super) channel: Arc<Records>,
}

impl AsFd for QueueSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.pipe.as_fd()
    }
}

impl Signal for QueueSignal {
    fn raise(&self) {
        self.channel.tell(self.queue);
    }

    /// The program reads its records itself.
    fn clear(&self) {}
}
