//! Waiting: for all descriptors of a loop, and for those of one transport alone.

use std::cell::Cell;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Poll, Token};
use rdma_conn::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use slotmap::{Key, KeyData, SlotMap, new_key_type};

use crate::transport::{Interest, Source, Transport};

/// Events taken at once.
const BATCH: usize = 256;

/// The token of the waker, which no key has.
const WOKEN: Token = Token(usize::MAX);

// A key is 64 bits wide, and is the token.
const _: () = assert!(usize::BITS >= 64, "tokens have no room for keys");

new_key_type! {
    /// A descriptor that is watched.
    pub(crate) struct SourceId;
}

/// Descriptors, each watched for an owner, for edges in both directions.
pub(crate) struct Poller<O> {
    poll: Poll,
    owners: SlotMap<SourceId, O>,
    events: Events,
    waker: Waker,
    /// Somebody was given the waker. One that is gone may have woken before, so it counts like one
    /// that is there.
    waker_given: Cell<bool>,
}

impl<O: Copy> Poller<O> {
    pub(crate) fn new() -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new()?;
        poll.registry().register(
            &mut SourceFd(&waker.as_fd().as_raw_fd()),
            WOKEN,
            mio::Interest::READABLE,
        )?;
        Ok(Self {
            poll,
            owners: SlotMap::with_key(),
            events: Events::with_capacity(BATCH),
            waker,
            waker_given: Cell::new(false),
        })
    }

    /// Returns a waker that ends a wait, from any thread.
    pub(crate) fn waker(&self) -> Waker {
        self.waker_given.set(true);
        self.waker.clone()
    }

    /// Returns whether it watches one descriptor, and nobody was ever given a waker: a wait for
    /// that descriptor alone misses nothing.
    pub(crate) fn has_one(&self) -> bool {
        self.owners.len() == 1 && !self.waker_given.get()
    }

    /// Watches a descriptor for `owner`. What it has to say already is said.
    pub(crate) fn add(&mut self, fd: BorrowedFd<'_>, owner: O) -> io::Result<SourceId> {
        let id = self.owners.insert(owner);
        let token = Token(id.data().as_ffi() as usize);
        let both = mio::Interest::READABLE | mio::Interest::WRITABLE;
        let added = self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), token, both);
        added.map(|()| id).inspect_err(|_| {
            self.owners.remove(id);
        })
    }

    /// Watches a descriptor no more.
    pub(crate) fn remove(&mut self, id: SourceId, fd: BorrowedFd<'_>) {
        if self.owners.remove(id).is_some() {
            // It was added; an error could only mean that it is not there.
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd.as_raw_fd()));
        }
    }

    /// Waits until something has happened, for at most `timeout`. Returns whose descriptors have fired, and for what.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<(O, Interest)>> {
        self.events.clear();
        match self.poll.poll(&mut self.events, timeout) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        if self.events.iter().any(|event| event.token() == WOKEN) {
            self.waker.clear();
        }
        let fired = self.events.iter().filter_map(|event| {
            let id = SourceId::from(KeyData::from_ffi(event.token().0 as u64));
            let ended = event.is_error() || event.is_read_closed() && event.is_write_closed();
            let read = ended || event.is_readable() || event.is_read_closed();
            let fired = Interest { read, write: ended || event.is_writable() };
            self.owners.get(id).map(|owner| (*owner, fired))
        });
        Ok(fired.collect())
    }
}

/// Waits for one transport alone, for at most `timeout`, and drives it.
pub(crate) fn wait_for(
    transport: &mut dyn Transport,
    want: Interest,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let fired = match transport.source(want) {
        Source::Own(fd, interest) => wait_one(fd, interest, timeout)?,
        Source::Shared(driver) => {
            driver.wait(timeout)?;
            Interest::NONE
        }
    };
    transport.drive(fired);
    Ok(())
}

/// Waits for one descriptor. Returns what it has to say.
pub(crate) fn wait_one(
    fd: BorrowedFd<'_>,
    interest: Interest,
    timeout: Option<Duration>,
) -> io::Result<Interest> {
    // A time that does not fit never comes.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, interest.read);
    flags.set(PollFlags::OUT, interest.write);
    let mut polled = [PollFd::from_borrowed_fd(fd, flags)];
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let [polled] = polled;
    let flags = polled.revents();
    let ended = flags.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
    Ok(Interest {
        read: ended || flags.contains(PollFlags::IN),
        write: ended || flags.contains(PollFlags::OUT),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also when whoever was given the waker has woken and is gone.
    #[test]
    fn a_wake_up_is_waited_for_beside_the_only_descriptor() {
        let (quiet, _never) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let mut poller = Poller::new().expect("descriptors");
        poller.add(quiet.as_fd(), ()).expect("room");
        assert!(poller.has_one());
        let waker = poller.waker();
        assert!(!poller.has_one());
        waker.wake();
        drop(waker);
        assert!(!poller.has_one());
    }
}
