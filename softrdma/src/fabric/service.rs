//! Serves one program's connection: takes requests and sends answers.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Error, Reply, Request, Socket};

use super::budget::Taken;
use super::memory::Process;
use super::pages;
use super::seats::Watch;
use super::session::{Answer, Info, Refusal, Session};
use super::{Fabric, LIMITS};

/// The most characters of a program's name.
pub(super) const NAME: usize = 64;

/// How often the thread looks for posts before it looks whether the program sends a request or has
/// ended. A program may post without an end.
const LOOKS: u32 = 16;

/// How often the thread yields the processor and looks for posts again before it sleeps. A post
/// wakes no thread then. Measured on two processors with `valkey-benchmark -c 1`: the median is 39
/// to 47 µs with 4, and 55 to 63 µs without. 32 are no better.
const YIELDS: u32 = 4;

/// A yield that takes this long took longer than a wake-up would: others want the processor for
/// long. A thread that sleeps gets it back sooner than one that yields.
const LONG_YIELD: Duration = Duration::from_millis(1);

/// Counts a connection for as long as it lasts.
pub(super) struct Presence {
    pub(super) fabric: Arc<Fabric>,
    pub(super) number: u64,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.fabric.lock().sessions.remove(&self.number);
        self.fabric.tell_end();
    }
}

/// A program's connection. One thread at a time serves it. The fields are dropped in this order
/// when it has ended.
pub(super) struct Service {
    session: Option<Session>,
    /// The answer to send when all bytes are moved.
    answer: Option<Answer>,
    /// What follows the posts that were seen.
    then: Then,
    socket: Socket,
    process: Arc<Process>,
    presence: Presence,
}

/// What follows the posts of a program that were seen.
enum Then {
    /// The thread looks for more, for so many times before it looks for a request, too.
    Look(u32),
    /// A request that the program made later.
    Receive,
    /// The end: the program has ended.
    End,
}

impl Service {
    pub(super) fn new(presence: Presence, socket: Socket, taken: Taken) -> Result<Self, Error> {
        let process = Arc::new(Process::new(taken, &presence.fabric.movers));
        // If the program had ended before, the number might mean another process by now.
        let mut fds = [PollFd::new(&socket, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        if fds[0].revents().contains(PollFlags::HUP) {
            return Err(Error::Closed);
        }
        Ok(Self { session: None, answer: None, then: Then::Look(0), socket, process, presence })
    }

    /// Serves the program until it has ended, or another thread takes over.
    pub(super) fn serve(self: Box<Self>) {
        let movers = Arc::clone(&self.presence.fabric.movers);
        let place = Watch::seat(&movers);
        let mut service = self;
        loop {
            if let Some(Answer { reply, descriptor }) = service.answer.take()
                && service.socket.answer(&reply, descriptor.as_ref().map(AsFd::as_fd)).is_err()
            {
                return;
            }
            if service.next(&place.seat).is_err() {
                return;
            }
            if place.seat.is_laden() {
                let Some(back) = place.seat.move_all(service, &movers) else { return };
                service = back;
            }
        }
    }

    fn next(&mut self, seat: &Arc<super::seats::Seat>) -> Result<(), Error> {
        let Self { session, answer, then, socket, process, presence } = self;
        let fabric = &presence.fabric;
        loop {
            if let Some(session) = session
                && session.posts.has_seen()
            {
                fabric.stall(session.devices());
                return seat.collect(|| session.perform_post());
            }
            *then = match then {
                Then::Look(times) => look(*times, socket, process, session.as_mut())?,
                Then::Receive => break,
                Then::End => return Err(Error::Closed),
            };
        }
        let (request, descriptor): (Request<'_>, _) = socket.receive()?;
        *then = Then::Look(if announces_posts(&request) { LOOKS } else { 0 });
        let reply = match (&mut *session, request) {
            (_, Request::Doorbell) => return Ok(()),
            (Some(session), request) => {
                fabric.stall(session.devices());
                let given = if moves(&request) {
                    seat.collect(|| session.answer(request, descriptor))
                } else {
                    session.answer(request, descriptor)
                };
                *answer = Some(given);
                return Ok(());
            }
            (None, Request::Status) => fabric.status(),
            (None, Request::Pairs { above }) => fabric.pairs(above),
            (None, Request::Inject { seed, faults }) => fabric.inject(seed, &faults),
            (None, Request::Configure { latency, device_kind, vectors }) => {
                fabric.configure(latency, device_kind.as_deref(), vectors)
            }
            (None, Request::Record) => fabric.record(descriptor),
            (None, Request::Stay) => fabric.outlive(process).map_or_else(Reply::from, |()| Reply::Done),
            (none, Request::Hello { version, program, devices, above }) => {
                match open(presence, version, program, devices, above, process) {
                    Ok((opened, reply)) => {
                        *none = Some(opened);
                        reply
                    }
                    Err(refusal) => refusal.into(),
                }
            }
            (None, _) => Reply::Refused(Errno::INVAL.raw_os_error()),
        };
        *answer = Some(Answer { reply, descriptor: None });
        Ok(())
    }
}

/// Whether posts are to be expected after a request. A queue pair's receives are mostly posted
/// before it is used; those of a shared receive queue are posted between sends.
const fn announces_posts(request: &Request<'_>) -> bool {
    matches!(request, Request::Doorbell)
        || (moves(request) && !matches!(request, Request::PostReceive { .. }))
}

/// Whether a request may cause bytes to be moved, and waits for no other thread.
const fn moves(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::PostSend { .. }
            | Request::PostReceive { .. }
            | Request::PostShared { .. }
            | Request::Poll(_)
    )
}

fn open(
    presence: &Presence,
    version: u32,
    program: String,
    devices: Vec<Vec<IpAddr>>,
    above: wire::Name,
    process: &Arc<Process>,
) -> Result<(Session, Reply), Refusal> {
    let Presence { fabric, number } = presence;
    if version != wire::VERSION {
        return Err(Errno::PROTO.into());
    }
    fabric.outlive(process)?;
    let program = program.chars().take(NAME).collect();
    let machine = fabric.machine(devices.clone())?;
    let info = Arc::new(Info::new(program, Arc::clone(process), devices.clone())?);
    let vectors = fabric.lock().vectors.clone();
    let count = vectors.as_ref().map_or(LIMITS.completion_vectors, |vectors| vectors.count());
    let session = Session::new(&machine, Arc::clone(&info), above, vectors)?;
    fabric.lock().sessions.insert(*number, Some(Arc::clone(&info)));
    // Faults that were injected before it was in the list.
    if fabric.faulty.load(Relaxed) {
        info.demand_answers();
    }
    let limits = wire::Limits {
        max_mr_size: LIMITS.max_region,
        max_mr: LIMITS.max_regions,
        max_qp: LIMITS.max_queue_pairs,
        max_qp_wr: LIMITS.max_queue_depth,
        max_cq: LIMITS.max_completion_queues.min(pages::MOST_QUEUES),
        max_cqe: LIMITS.max_completions,
        max_qp_rd_atom: LIMITS.max_read_depth,
        vectors: count,
    };
    Ok((session, Reply::Welcome { devices, limits, fabric: std::process::id() }))
}

/// Looks for posts, so many times without a system call. Then sleeps until there are posts, or a
/// request, or the program has ended. What it posted before is still served.
///
/// A child of a program that has ended may still hold the socket and the ring: that ends a session.
/// Without one, the child keeps the fabric: `softrdma run` has become a daemon's first parent.
fn look(
    times: u32,
    socket: &Socket,
    process: &Process,
    mut session: Option<&mut Session>,
) -> Result<Then, Error> {
    if let (Some(times), Some(session)) = (times.checked_sub(1), &mut session) {
        for turn in 0..=YIELDS {
            let before = Instant::now();
            if turn > 0 {
                // Others run meanwhile, and may post.
                std::thread::yield_now();
            }
            if session.posts.look()? {
                return Ok(Then::Look(times));
            }
            if before.elapsed() >= LONG_YIELD {
                break;
            }
        }
    }
    loop {
        let found = session.as_mut().map_or(Ok(false), |session| session.posts.fall_asleep())?;
        // In this order: the socket of a program that has ended gets nothing more.
        let alive = session.as_ref().map(|_| PollFd::new(process.descriptor(), PollFlags::IN));
        let ends = alive.is_some();
        let mut fds: Vec<_> = alive.into_iter().chain([PollFd::new(socket, PollFlags::IN)]).collect();
        fds.extend(session.iter().flat_map(|session| session.awaited()));
        let limit = found.then_some(Timespec { tv_sec: 0, tv_nsec: 0 });
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let ended = ends && ready.next() == Some(true);
        let asks = ready.next() == Some(true);
        let others = ready.any(|ready| ready);
        if let Some(session) = &mut session {
            session.posts.wake_up();
            if others {
                session.catch_up();
            }
            if asks || ended {
                // The program posted these before.
                session.posts.look()?;
            }
        }
        if asks {
            return Ok(Then::Receive);
        }
        if ended {
            return Ok(Then::End);
        }
        if found {
            return Ok(Then::Look(LOOKS));
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use softrdma_wire::{Post, Writer};

    use super::*;

    /// A program that posts whenever the thread looks does not keep it from requests.
    #[test]
    fn a_request_is_heard_among_posts() {
        let fabric = Fabric::new().expect("a fabric");
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("sockets");
        let (mut program, socket) = (Socket::new(ours), Socket::new(theirs));
        let taken = fabric.taken_by(&socket).expect("a process");
        let process = Arc::new(Process::new(taken, &fabric.movers));
        let devices = vec![vec![IpAddr::from([192, 0, 2, 1])]];
        let machine = fabric.machine(devices.clone()).expect("a machine");
        let info = Info::new(String::new(), Arc::clone(&process), devices).expect("memory");
        let mut session = Session::new(&machine, Arc::new(info), 0, None).expect("a session");
        program.send(&Request::Status, None).expect("sent");
        let (mut writer, post) = (Writer::default(), Post::Receive { pair: 1, work: Vec::new() });
        let (mut then, mut looks) = (Then::Look(LOOKS), 0);
        while let Then::Look(times) = then {
            assert!(looks <= LOOKS);
            looks += 1;
            session.posts.put(&mut writer, &post);
            then = look(times, &socket, &process, Some(&mut session)).expect("goes on");
            assert!(session.posts.has_seen());
            session.perform_post().expect("a post");
        }
        assert!(matches!(then, Then::Receive));
    }

    /// A yield lets a busy machine run others first, for a whole slice of time each.
    #[test]
    fn the_thread_yields_after_requests_that_announce_posts() {
        let fabric = Arc::new(Fabric::new().expect("a fabric"));
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("sockets");
        let mut program = Socket::new(ours);
        let place = Watch::seat(&fabric.movers);
        let presence = Presence { fabric: Arc::clone(&fabric), number: 1 };
        let socket = Socket::new(theirs);
        let taken = fabric.taken_by(&socket).expect("a process");
        let mut service = Service::new(presence, socket, taken).expect("a service");
        let mut looks_after = |request| {
            program.send(&request, None).expect("sent");
            service.next(&place.seat).expect("goes on");
            match service.then {
                Then::Look(times) => times,
                Then::Receive | Then::End => panic!("the thread looks for posts first"),
            }
        };
        assert_eq!(looks_after(Request::Status), 0);
        assert_eq!(looks_after(Request::Doorbell), LOOKS);
        assert_eq!(looks_after(Request::Poll(1)), LOOKS);
        assert_eq!(looks_after(Request::PostReceive { pair: 1, work: Vec::new() }), 0);
    }
}
