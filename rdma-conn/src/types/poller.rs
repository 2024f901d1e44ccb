//! Waiting for descriptors: many with epoll, those of one transport with poll.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use slotmap::{Key, KeyData, SlotMap, new_key_type};

use super::{Interest, SOURCES, Transport};

/// Events taken at once.
const BATCH: usize = 256;

new_key_type! { struct SourceId; }

/// Descriptors, each watched for an owner.
pub(super) struct Poller<O> {
    epoll: OwnedFd,
    owners: SlotMap<SourceId, O>,
    events: Vec<epoll::Event>,
}

/// How a descriptor is watched.
#[derive(Clone, Copy)]
pub(super) struct Watched {
    id: SourceId,
    interest: Interest,
}

impl<O: Copy> Poller<O> {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, owners: SlotMap::with_key(), events: Vec::with_capacity(BATCH) })
    }

    /// Watches a descriptor of `owner` for `interest`, which may be none. `watched` is how it was watched before.
    pub(super) fn watch(
        &mut self,
        watched: &mut Option<Watched>,
        fd: BorrowedFd<'_>,
        interest: Interest,
        owner: O,
    ) -> io::Result<()> {
        match watched {
            Some(old) if old.interest == interest => {}
            // Not watched at all: hang-ups would be reported whatever it is watched for.
            Some(old) if interest.is_none() => {
                self.owners.remove(old.id);
                *watched = None;
                epoll::delete(&self.epoll, fd)?;
            }
            Some(old) => {
                epoll::modify(&self.epoll, fd, data(old.id), flags(interest))?;
                old.interest = interest;
            }
            None if interest.is_none() => {}
            None => {
                let id = self.owners.insert(owner);
                if let Err(errno) = epoll::add(&self.epoll, fd, data(id), flags(interest)) {
                    self.owners.remove(id);
                    return Err(errno.into());
                }
                *watched = Some(Watched { id, interest });
            }
        }
        Ok(())
    }

    /// Waits until something has happened, for at most `timeout`. Whose descriptors have fired, and for what.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<(O, Interest)>> {
        self.events.clear();
        let timeout = timeout.map(timespec);
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let fired = self.events.iter().filter_map(|event| {
            let id = SourceId::from(KeyData::from_ffi(event.data.u64()));
            let flags = event.flags;
            let ended = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            let fired = Interest {
                read: ended || flags.contains(EventFlags::IN),
                write: ended || flags.contains(EventFlags::OUT),
            };
            self.owners.get(id).map(|owner| (*owner, fired))
        });
        Ok(fired.collect())
    }
}

fn data(id: SourceId) -> EventData {
    EventData::new_u64(id.data().as_ffi())
}

fn flags(interest: Interest) -> EventFlags {
    let mut flags = EventFlags::empty();
    flags.set(EventFlags::IN, interest.read);
    flags.set(EventFlags::OUT, interest.write);
    flags
}

/// Rounded up to milliseconds, which is what older kernels wait in: waking too early would only spin.
fn timespec(timeout: Duration) -> Timespec {
    let millis = timeout.saturating_add(Duration::from_nanos(999_999)).as_millis();
    Timespec {
        tv_sec: i64::try_from(millis / 1000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(millis % 1000 * 1_000_000).unwrap_or(0),
    }
}

/// Waits for one transport alone, for at most `timeout`, and drives it.
pub(super) fn wait_for(
    transport: &mut dyn Transport,
    want: Interest,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let timeout = [timeout, transport.next_timeout()].into_iter().flatten().min().map(timespec);
    let mut fired = [Interest::NONE; SOURCES];
    let sources = transport.sources(want);
    let mut polled: Vec<PollFd<'_>> = sources
        .iter()
        .flatten()
        .map(|(fd, interest)| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.read);
            flags.set(PollFlags::OUT, interest.write);
            PollFd::from_borrowed_fd(*fd, flags)
        })
        .collect();
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let present =
        sources.iter().zip(&mut fired).filter_map(|(source, fired)| source.is_some().then_some(fired));
    for (fired, fd) in present.zip(&polled) {
        let flags = fd.revents();
        let ended = flags.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        *fired = Interest {
            read: ended || flags.contains(PollFlags::IN),
            write: ended || flags.contains(PollFlags::OUT),
        };
    }
    transport.drive(fired);
    Ok(())
}
