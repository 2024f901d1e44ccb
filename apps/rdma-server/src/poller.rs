//! Waits for all descriptors of a loop, or for those of one transport.

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

const BATCH: usize = 256;

/// The token of the waker. No key has this value.
const WOKEN: Token = Token(usize::MAX);

// Keys are tokens, and have 64 bits (`KeyData::as_ffi`).
const _: () = assert!(usize::BITS >= 64, "tokens have no room for keys");

new_key_type! {
    pub(crate) struct SourceId;
}

/// Descriptors with their owners, watched for edges in both directions.
pub(crate) struct Poller<O> {
    poll: Poll,
    owners: SlotMap<SourceId, O>,
    events: Events,
    waker: Waker,
    /// Whether a waker was ever given out: a dropped one may have woken before.
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

    pub(crate) fn waker(&self) -> Waker {
        self.waker_given.set(true);
        self.waker.clone()
    }

    /// Returns whether it watches one descriptor, which alone can be waited for without a waker.
    pub(crate) fn has_one(&self) -> bool {
        self.owners.len() == 1 && !self.waker_given.get()
    }

    /// Watches a descriptor for `owner`. Existing readiness is reported too.
    pub(crate) fn add(&mut self, fd: BorrowedFd<'_>, owner: O) -> io::Result<SourceId> {
        let id = self.owners.insert(owner);
        let token = Token(id.data().as_ffi() as usize);
        let both = mio::Interest::READABLE | mio::Interest::WRITABLE;
        let added = self.poll.registry().register(&mut SourceFd(&fd.as_raw_fd()), token, both);
        added.map(|()| id).inspect_err(|_| {
            self.owners.remove(id);
        })
    }

    pub(crate) fn remove(&mut self, id: SourceId, fd: BorrowedFd<'_>) {
        if self.owners.remove(id).is_some() {
            // It was added; an error could only mean that it is already gone.
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd.as_raw_fd()));
        }
    }

    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<(O, Interest)>> {
        self.events.clear();
        match self.poll.poll(&mut self.events, timeout) {
            // After a signal it is a turn without events.
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        if self.events.iter().any(|event| event.token() == WOKEN) {
            self.waker.clear();
        }
        let fired = self.events.iter().filter_map(|event| {
            let id = SourceId::from(KeyData::from_ffi(event.token().0 as u64));
            let ended = event.is_error() || event.is_read_closed() && event.is_write_closed();
            // The end of the stream is read, like bytes.
            let read = ended || event.is_readable() || event.is_read_closed();
            let fired = Interest { read, write: ended || event.is_writable() };
            // An event of a descriptor that was removed has no owner.
            self.owners.get(id).map(|owner| (*owner, fired))
        });
        Ok(fired.collect())
    }
}

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
        // After a signal the caller looks at its time, and waits again.
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

    /// Also when the waker was called and dropped before.
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
