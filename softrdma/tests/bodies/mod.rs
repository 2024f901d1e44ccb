//! What the fuzzer runs: two programs that send the fabric packets of any bytes. The fabric answers or ends that session, and serves
//! others.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use softrdma::fabric::Fabric;
use softrdma_wire::{MAX_MESSAGE, Request, Socket, VERSION};

/// Packets of one input.
const MOST: usize = 256;
/// Bytes that programs may register: the fabric reaches into this process.
const MEMORY: usize = 4096;

fn memory() -> u64 {
    static PLACE: OnceLock<&'static mut [u8]> = OnceLock::new();
    PLACE.get_or_init(|| Vec::leak(vec![0; MEMORY])).as_ptr().expose_provenance() as u64
}

/// Sends a packet and returns the answer; `None` if the session has ended. The fuzzer's timer interrupts calls.
fn exchange(socket: &OwnedFd, packet: &[u8]) -> Option<Vec<u8>> {
    retry_on_intr(|| rustix::net::send(socket, packet, SendFlags::NOSIGNAL)).ok()?;
    let mut answer = vec![0; MAX_MESSAGE];
    let receive = || rustix::net::recv(socket, answer.as_mut_slice(), RecvFlags::empty());
    let (len, _) = retry_on_intr(receive).ok()?;
    answer.truncate(len);
    // Without bytes the session has ended.
    (len > 0).then_some(answer)
}

/// A session of a program on the machine with this number.
fn open(fabric: &Arc<Fabric>, machine: u8) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
    fabric.admit(Socket::new(theirs));
    let devices = vec![vec![[192, 0, 2, machine].into()], vec![[198, 51, 100, machine].into()]];
    let hello = Request::Hello { version: VERSION, program: String::new(), devices, above: 0 };
    let hello = postcard::to_stdvec(&hello).expect("encodes");
    exchange(&ours, &hello).expect("the fabric lets a program in");
    ours
}

/// A request as it may be sent: of this process only some memory may be registered.
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

/// Each packet: which program, how long, and the bytes.
pub(crate) fn run(input: &[u8]) {
    let _last = converse(input, |_any| true);
}

/// As [`run`]. Returns the answer to the last packet, which is sent until it has one that is `awaited`; `None` if that ended its session.
pub(crate) fn converse(input: &[u8], awaited: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
    let fabric = Fabric::new().expect("a fabric");
    let mut programs = [1, 2].map(|machine| open(&fabric, machine));
    let (mut rest, mut last) = (input, None);
    for _ in 0..MOST {
        let [which, len, behind @ ..] = rest else { break };
        let (packet, behind) = behind.split_at(usize::from(*len).min(behind.len()));
        rest = behind;
        let which = usize::from(which % 2);
        // An empty packet would look like the end.
        if packet.is_empty() {
            continue;
        }
        let begun = Instant::now();
        loop {
            last = exchange(&programs[which], &harmless(packet));
            if !rest.is_empty() || last.as_deref().is_none_or(&awaited) {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the answer does not come");
        }
        if last.is_none() {
            programs[which] = open(&fabric, which as u8 + 1);
        }
    }
    let honest = open(&fabric, 3);
    let asked = postcard::to_stdvec(&Request::AllocateDomain(0)).expect("encodes");
    assert!(exchange(&honest, &asked).is_some(), "an honest program is answered");

    // What they had is given back, or the next inputs would find no descriptors.
    drop((programs, honest));
    let begun = Instant::now();
    while !fabric.is_deserted() {
        assert!(begun.elapsed() < Duration::from_secs(60), "sessions whose programs are gone do not end");
        std::thread::yield_now();
    }
    last
}
