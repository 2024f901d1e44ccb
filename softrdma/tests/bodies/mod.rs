//! The body of the fuzzer: two programs send the fabric arbitrary packets, post arbitrary bytes,
//! and write others into the memory that they share with it.
//!
//! The fabric answers or ends that session, and serves others.

#[path = "../posts/mod.rs"]
mod posts;
#[path = "../shown/mod.rs"]
mod shown;

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use posts::Poster;
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, SocketType,
};
use shown::shown;
use softrdma::fabric::Fabric;
use softrdma_wire::{MAX_MESSAGE, POSTS_AT, Posts, Request, Socket, VERSION};

/// The most packets of one input.
const MOST: usize = 256;
/// How many bytes programs may register: the fabric accesses this process.
const MEMORY: usize = 4096;

fn memory() -> u64 {
    static PLACE: OnceLock<&'static mut [u8]> = OnceLock::new();
    PLACE.get_or_init(|| Vec::leak(vec![0; MEMORY])).as_ptr().expose_provenance() as u64
}

struct Program {
    socket: OwnedFd,
    /// The memory shared with the fabric, once it has a completion queue. Other descriptors are
    /// closed.
    memory: Option<OwnedFd>,
    posts: Poster,
}

impl Program {
    /// Sends a packet and returns the answer, which is empty if the request has none; `None` if the
    /// session has ended. The fuzzer's timer interrupts calls.
    fn exchange(&mut self, packet: &[u8]) -> Option<Vec<u8>> {
        retry_on_intr(|| rustix::net::send(&self.socket, packet, SendFlags::NOSIGNAL)).ok()?;
        if matches!(postcard::from_bytes(packet), Ok(Request::Doorbell)) {
            return Some(Vec::new());
        }
        let mut answer = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let mut slices = [IoSliceMut::new(&mut answer)];
            rustix::net::recvmsg(&self.socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        });
        let received = received.ok()?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.memory = rights.into_iter().find(|fd| rustix::fs::fcntl_get_seals(fd).is_ok());
            }
        }
        answer.truncate(received.bytes);
        // An empty answer means that the session has ended.
        (received.bytes > 0).then_some(answer)
    }

    /// Writes bytes into the shared memory: the first pages, or the ring of posts. Their offset is
    /// in the first two bytes of the packet; in the ring, it counts words.
    fn scribble(&self, packet: &[u8], ring: bool) {
        if let (Some(memory), [low, high, bytes @ ..]) = (&self.memory, packet) {
            let place = u64::from(u16::from_le_bytes([*low, *high]));
            let last = (POSTS_AT + size_of::<Posts>() - bytes.len()) as u64;
            let place = if ring { (POSTS_AT as u64 + place * 8).min(last) } else { place };
            let _written = rustix::io::pwrite(memory, bytes, place);
        }
    }

    /// Posts a packet, and rings the doorbell.
    fn post(&mut self, packet: &[u8]) {
        if let Some(memory) = &self.memory {
            self.posts.put_bytes(memory, packet);
            let doorbell = postcard::to_stdvec(&Request::Doorbell).expect("encodes");
            // The fabric may have ended the session.
            let _sent = retry_on_intr(|| rustix::net::send(&self.socket, &doorbell, SendFlags::NOSIGNAL));
        }
    }
}

/// Opens a session of a program on the machine with this number.
fn open(fabric: &Arc<Fabric>, machine: u8) -> Program {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
    fabric.admit(Socket::new(theirs));
    let devices = vec![vec![[192, 0, 2, machine].into()], vec![[198, 51, 100, machine].into()]];
    let hello = Request::Hello { version: VERSION, program: String::new(), devices, above: 0 };
    let hello = postcard::to_stdvec(&hello).expect("encodes");
    let mut program = Program { socket: ours, memory: None, posts: Poster::default() };
    program.exchange(&hello).expect("the fabric lets a program in");
    let shown = postcard::to_stdvec(&shown()).expect("encodes");
    program.exchange(&shown).expect("the fabric looks at its memory");
    program
}

/// Restricts a registration to some memory of this process; other requests are unchanged.
fn harmless(packet: &[u8]) -> Vec<u8> {
    match postcard::from_bytes(packet) {
        Ok(Request::Register { domain, at, address, len, access }) => {
            let begin = at % MEMORY as u64;
            let (at, len) = (memory() + begin, len.min(MEMORY as u64 - begin));
            postcard::to_stdvec(&Request::Register { domain, at, address, len, access }).expect("encodes")
        }
        _ => packet.to_vec(),
    }
}

/// Added to the program's number in the first byte of a packet, if the bytes are for the memory.
pub(crate) const SCRIBBLE: u8 = 128;
/// Added to it, if they are a post; with [`SCRIBBLE`], if they are for the ring of posts.
pub(crate) const POST: u8 = 64;

/// Runs an input. Each packet has the program, its length, and the bytes for the fabric or for the
/// memory.
pub(crate) fn run(input: &[u8]) {
    converse(input, |_memory| true);
}

/// Runs an input, and waits until the memory of the last packet's program is as `awaited` says.
///
/// Returns the fabric's last answer; `None` if it ended a session.
pub(crate) fn converse(input: &[u8], awaited: impl Fn(Option<&OwnedFd>) -> bool) -> Option<Vec<u8>> {
    let fabric = Fabric::new().expect("a fabric");
    let mut programs = [1, 2].map(|machine| open(&fabric, machine));
    let (mut rest, mut last, mut who) = (input, None, 0);
    for _ in 0..MOST {
        let [which, len, behind @ ..] = rest else { break };
        let (packet, behind) = behind.split_at(usize::from(*len).min(behind.len()));
        rest = behind;
        who = usize::from(which % 2);
        // An empty packet would look like the end of the session.
        if packet.is_empty() {
            continue;
        }
        if which & SCRIBBLE != 0 {
            programs[who].scribble(packet, which & POST != 0);
            continue;
        }
        if which & POST != 0 {
            programs[who].post(packet);
            continue;
        }
        last = programs[who].exchange(&harmless(packet));
        if last.is_none() {
            programs[who] = open(&fabric, who as u8 + 1);
        }
    }
    let begun = Instant::now();
    while !awaited(programs[who].memory.as_ref()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "what is awaited does not come");
        std::thread::yield_now();
    }
    let mut honest = open(&fabric, 3);
    let asked = postcard::to_stdvec(&Request::AllocateDomain(0)).expect("encodes");
    assert!(honest.exchange(&asked).is_some(), "an honest program is answered");

    // Waits until the programs' resources are freed, or the next inputs would find no descriptors.
    drop((programs, honest));
    let begun = Instant::now();
    while !fabric.is_deserted() {
        assert!(begun.elapsed() < Duration::from_secs(60), "sessions whose programs are gone do not end");
        std::thread::yield_now();
    }
    last
}
