//! The process's session with the fabric.
//!
//! The first call that needs it opens it. A forked child opens another one.

use core::ffi::c_int;
use std::ffi::OsStr;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

use softrdma_wire::{
    ADDRESSES, Error, Limits, MAX_WORK, Name, Notice, Post, Posts, Receive, Reply, Request, SOCKET, Socket,
    VERSION, Writer, parse_devices,
};

use crate::device::Opened;
use crate::process::{PerProcess, SESSION, watch_forks};
use crate::ring::{notice, posts};
use crate::room::Room;

/// An open session, and what the fabric said of the devices.
pub(crate) struct Link {
    session: Mutex<Session>,
    /// The session's socket, for checks that must not wait for a thread with a pending request. It
    /// is never closed.
    socket: RawFd,
    /// Names of this process's objects are above this one; others are of its parent.
    above: Name,
    pub(crate) devices: Vec<Attached>,
    pub(crate) limits: Limits,
}

/// The connection to the fabric.
struct Session {
    socket: Socket,
    /// Receives that the fabric was not told of yet, and their queue pair. It is in INIT, where no
    /// message takes receives.
    ///
    /// They are sent before any other request. Programs post receives one by one, a thousand for a
    /// connection.
    kept: (Name, Vec<Receive>),
    /// The memory that the fabric shares with this process, once it has a completion queue.
    shared: Option<Shared>,
}

/// The fabric's notices to this process, and the ring of its posts.
struct Shared {
    notice: &'static Notice,
    posts: &'static Posts,
    writer: Writer,
}

impl Session {
    fn tell_kept(&mut self) {
        let (pair, work) = (self.kept.0, std::mem::take(&mut self.kept.1));
        if !work.is_empty() {
            match exchange(&mut self.socket, &Request::PostReceive { pair, work }, None) {
                // The next request meets the same error.
                Ok((Reply::Posted { errno: 0, .. }, _)) | Err(_) => {}
                Ok(_) => say("the fabric refuses receives of a queue pair that is not connected"),
            }
        }
    }
}

/// Keeps receives for a queue pair in INIT until the next request of any kind.
///
/// Returns false, and keeps none, if it is not in INIT (`keeps`), or has no `room` for all of them.
pub(crate) fn keep(
    pair: Name,
    keeps: &AtomicBool,
    room: &Room,
    work: &mut Vec<Receive>,
) -> Result<bool, c_int> {
    let mut session = link()?.session.lock().unwrap_or_else(PoisonError::into_inner);
    // Under the lock: a thread that ends this makes a request next, which sends the kept receives
    // first.
    if !keeps.load(Relaxed) || !room.reserve(work.len()) {
        return Ok(false);
    }
    if session.kept.0 != pair || session.kept.1.len() + work.len() > MAX_WORK {
        session.tell_kept();
        session.kept.0 = pair;
    }
    session.kept.1.append(work);
    Ok(true)
}

pub(crate) struct Attached {
    pub(crate) addresses: Vec<IpAddr>,
    /// Readable while an asynchronous event waits.
    pub(crate) events: OwnedFd,
    /// The device and its context, once a caller has asked for them.
    pub(crate) opened: OnceLock<Opened>,
    /// The protection domain of identifiers that were given none.
    pub(crate) domain: Mutex<Option<usize>>,
}

pub(crate) static LINK: PerProcess<Result<Link, c_int>> = PerProcess::new();

/// The highest name that the fabric gave to this process or to one that it was forked from.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// Returns the session, or the `errno` that says why there is none.
pub(crate) fn link() -> Result<&'static Link, c_int> {
    LINK.get(Link::open).as_ref().map_err(|errno| *errno)
}

/// Sends a request and waits for the answer. An answer that does not fit the request is the
/// fabric's error: `EPROTO`.
pub(crate) fn call(request: &Request<'_>) -> Result<Reply, c_int> {
    exchange_with(request, None).map(|(reply, _none)| reply)
}

pub(crate) fn ask(request: &Request<'_>) -> Result<(), c_int> {
    call(request).map(drop)
}

/// Sends a request with a descriptor; its answer has no contents.
pub(crate) fn ask_with(request: &Request<'_>, descriptor: Option<BorrowedFd<'_>>) -> Result<(), c_int> {
    exchange_with(request, descriptor).map(drop)
}

pub(crate) fn make(request: &Request<'_>) -> Result<Name, c_int> {
    match call(request)? {
        Reply::Made(name) => Ok(name),
        _ => Err(libc::EPROTO),
    }
}

/// Asks the fabric to make a channel. Without room for its descriptor, which comes with the answer
/// and is then lost (recvmsg(2), MSG_CTRUNC), the channel is destroyed by `undo`.
pub(crate) fn make_channel(
    request: &Request<'_>,
    undo: impl FnOnce(Name) -> Request<'static>,
) -> Result<(Name, OwnedFd), c_int> {
    match exchange_with(request, None)? {
        (Reply::Made(name), Some(descriptor)) => Ok((name, descriptor)),
        (Reply::Made(name), None) => {
            // If the fabric is gone, so is its channel.
            let _gone = ask(&undo(name));
            Err(libc::EMFILE)
        }
        _ => Err(libc::EPROTO),
    }
}

/// Asks the fabric to make a completion queue. Returns its name, its page's number, and the memory
/// with that page.
pub(crate) fn make_queue(request: &Request<'_>) -> Result<(Name, u32, OwnedFd), c_int> {
    match exchange_with(request, None)? {
        (Reply::Queue { name, page }, Some(memory)) => Ok((name, page, memory)),
        (Reply::Queue { name, .. }, None) => {
            // As for a channel.
            let _gone = ask(&Request::DestroyQueue(name));
            Err(libc::EMFILE)
        }
        _ => Err(libc::EPROTO),
    }
}

/// Returns the name of the object that the fabric made for this answer, if any: a connect request
/// makes an identifier.
const fn made_in(reply: &Reply) -> Option<Name> {
    match reply {
        Reply::Made(name)
        | Reply::Region { name, .. }
        | Reply::Queue { name, .. }
        | Reply::Pair { name, .. } => Some(*name),
        Reply::Event(Some(event)) => Some(event.id),
        _ => None,
    }
}

/// Reads the fabric's notices from now on, and posts in the memory that it shares with this
/// process.
pub(crate) fn share(memory: &OwnedFd) -> Result<(), c_int> {
    let mut session = link()?.session.lock().unwrap_or_else(PoisonError::into_inner);
    if session.shared.is_none() {
        let (notice, posts) = (notice(memory)?, posts(memory)?);
        session.shared = Some(Shared { notice, posts, writer: Writer::default() });
    }
    Ok(())
}

/// Posts work requests to a queue pair, in as many posts as they need. No other thread of this
/// process makes a request in between.
///
/// If they are `certain` to be taken once they find room, and `room` says that they do, the fabric
/// gives no answer, unless its ring is full. Otherwise it does, and with a `demand` refuses all of
/// them unless so many find room. `build` makes a post of some of them.
pub(crate) fn post<'a, W>(
    pair: Name,
    room: &Room,
    certain: bool,
    mut demand: u32,
    work: Vec<W>,
    build: impl Fn(Vec<W>) -> Post<'a>,
) -> Result<Reply, c_int> {
    let link = link()?;
    let mut session = link.session.lock().unwrap_or_else(PoisonError::into_inner);
    let reserved = certain
        && pair > link.above
        && session.shared.as_ref().is_some_and(|shared| !shared.notice.demands_answers())
        && room.reserve(work.len());
    let (mut work, mut posted) = (work.into_iter(), 0);
    loop {
        let batch: Vec<_> = work.by_ref().take(MAX_WORK).collect();
        let len = batch.len() as u32;
        if batch.is_empty() {
            return Ok(Reply::Posted { count: posted, errno: 0, room: 0 });
        }
        let post = build(batch);
        if !reserved || !session.put(&post)? {
            // A reserved place was counted with those of the earlier batches.
            let demand = if reserved { 0 } else { std::mem::take(&mut demand) };
            let request = post.answered(demand);
            let Reply::Posted { count, errno, room: left } = session.exchange(&request, None)?.0 else {
                return Err(libc::EPROTO);
            };
            // Also after a refusal: the requests before the refused one have taken their places.
            match request {
                _ if reserved => {}
                // Not each send has a completion that gives its place back.
                Request::PostSend { .. } => room.count_anew(left),
                _ => room.owe(count),
            }
            if errno != 0 {
                return Ok(Reply::Posted { count: posted + count, errno, room: 0 });
            }
        }
        posted += len;
    }
}

fn exchange_with(
    request: &Request<'_>,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<OwnedFd>), c_int> {
    let mut session = link()?.session.lock().unwrap_or_else(PoisonError::into_inner);
    session.exchange(request, descriptor)
}

impl Session {
    /// Sends a request and waits for its answer. Kept receives are sent first.
    fn exchange(
        &mut self,
        request: &Request<'_>,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Option<OwnedFd>), c_int> {
        self.tell_kept();
        outcome(exchange(&mut self.socket, request, descriptor))
    }

    /// Puts a post into the ring, and wakes the fabric if it sleeps. Kept receives are sent first.
    /// Returns false if the ring has no room.
    fn put(&mut self, post: &Post<'_>) -> Result<bool, c_int> {
        self.tell_kept();
        let Some(Shared { posts, writer, .. }) = &mut self.shared else { return Ok(false) };
        let put = writer.put(posts, post).and_then(|put| {
            if put && posts.needs_doorbell() {
                self.socket.send(&Request::Doorbell, None)?;
            }
            Ok(put)
        });
        put.or_else(|error| outcome(Err(error)).map(|_| false))
    }
}

/// Converts the result of an exchange to an `errno`.
fn outcome(exchanged: Result<(Reply, Option<OwnedFd>), Error>) -> Result<(Reply, Option<OwnedFd>), c_int> {
    match exchanged {
        Ok((Reply::Refused(errno), _)) => Err(errno),
        Ok((Reply::Exceeded(exceeded), _)) => {
            // Once for each resource.
            static TOLD: AtomicU32 = AtomicU32::new(0);
            let bit = 1 << exceeded.resource as u32;
            if TOLD.fetch_or(bit, Relaxed) & bit == 0 {
                say(&format!("the fabric refuses a request: {exceeded}"));
            }
            Err(exceeded.errno())
        }
        Ok(answer) => {
            if let Some(name) = made_in(&answer.0) {
                HIGHEST.fetch_max(name, Relaxed);
            }
            Ok(answer)
        }
        Err(error) => {
            static TOLD: AtomicBool = AtomicBool::new(false);
            if !TOLD.swap(true, Relaxed) {
                say(&format!("the fabric is gone: {error}"));
            }
            Err(libc::EIO)
        }
    }
}

fn exchange(
    socket: &mut Socket,
    request: &Request<'_>,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<OwnedFd>), Error> {
    socket.send(request, descriptor)?;
    socket.receive()
}

impl Link {
    /// Returns `EIO` if the fabric is gone.
    pub(crate) fn is_alive(&self) -> Result<(), c_int> {
        let mut entry = libc::pollfd { fd: self.socket, events: 0, revents: 0 };
        // SAFETY: poll(2): one entry, which is written; it does not wait.
        match unsafe { libc::poll(&raw mut entry, 1, 0) } {
            1.. => outcome(Err(Error::Closed)).map(drop),
            _ => Ok(()),
        }
    }

    fn open() -> Result<Self, c_int> {
        let (Some(path), Some(addresses)) = (std::env::var_os(SOCKET), std::env::var_os(ADDRESSES)) else {
            say("not started by `softrdma run`: there is no RDMA device");
            return Err(libc::ENODEV);
        };
        watch_forks();
        Self::greet(Path::new(&path), &addresses).map_err(|reason| {
            say(&reason);
            libc::ENODEV
        })
    }

    fn greet(path: &Path, addresses: &OsStr) -> Result<Self, String> {
        let devices = parse_devices(&addresses.to_string_lossy());
        let devices = devices.map_err(|error| format!("{ADDRESSES}: {error}"))?;
        let unreachable = |error: Error| format!("no fabric at {}: {error}", path.display());
        let mut socket = Socket::connect(path).map_err(unreachable)?;
        let program = std::env::current_exe().ok();
        let program = program.as_deref().and_then(|path| path.file_name()).unwrap_or_default();
        let program = program.to_string_lossy().into_owned();
        // The child's names must differ from its parent's, so that no call on the parent's objects
        // affects its own.
        let above = HIGHEST.load(Relaxed);
        let hello = Request::Hello { version: VERSION, program, devices, above };
        match exchange(&mut socket, &hello, None).map_err(unreachable)? {
            (Reply::Welcome { devices, limits, fabric }, _none) => {
                // Yama may restrict which processes may access which (`PR_SET_PTRACER(2const)`):
                // this allows the fabric. Elsewhere the call fails, and is not needed.
                let fabric = i32::try_from(fabric).ok().and_then(rustix::process::Pid::from_raw);
                let tracer =
                    fabric.map_or(rustix::process::PTracer::None, rustix::process::PTracer::ProcessID);
                let _not_needed = rustix::process::set_ptracer(tracer);
                let mut attached = Vec::new();
                for (device, addresses) in (0..).zip(devices) {
                    let request = Request::AsyncEvents(device);
                    let (_, events) = exchange(&mut socket, &request, None).map_err(unreachable)?;
                    let events = events.ok_or("the fabric has no descriptors left")?;
                    let (opened, domain) = (OnceLock::new(), Mutex::new(None));
                    attached.push(Attached { addresses, events, opened, domain });
                }
                SESSION.keep_from_children(socket.as_fd());
                let descriptor = socket.as_fd().as_raw_fd();
                let session = Mutex::new(Session { socket, kept: (0, Vec::new()), shared: None });
                Ok(Self { session, socket: descriptor, above, devices: attached, limits })
            }
            (Reply::Exceeded(exceeded), _) => Err(format!("the fabric refuses this program: {exceeded}")),
            (Reply::Refused(errno), _) => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(format!("the fabric refuses this program: {error}"))
            }
            _ => Err("the fabric speaks another language: it is of another version".into()),
        }
    }
}

pub(crate) fn say(what: &str) {
    // If this fails, there is no other stream to report it on.
    let _said = writeln!(std::io::stderr().lock(), "softrdma: {what}");
}

pub(crate) fn last_errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: errno(3): the calling thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// Returns 0 or an `errno`, for functions that return their error.
pub(crate) fn returned(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// Returns 0, or -1 with `errno` set.
pub(crate) fn concluded(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Returns a pointer, or null with `errno` set.
pub(crate) fn pointer<T>(result: Result<*mut T, c_int>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        core::ptr::null_mut()
    })
}

#[cfg(test)]
mod tests {
    use softrdma_wire::Event;

    use super::*;

    /// A forked child takes names above all of these.
    #[test]
    fn a_connect_request_brings_a_name() {
        let (params, data, local, remote) = (None, Vec::new(), None, None);
        let event = Event { id: 7, listener: Some(3), kind: 4, status: 0, params, data, local, remote };
        assert_eq!(made_in(&Reply::Event(Some(Box::new(event)))), Some(7));
        assert_eq!(made_in(&Reply::Made(8)), Some(8));
        assert_eq!(made_in(&Reply::Event(None)), None);
    }
}
