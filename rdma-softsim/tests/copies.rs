//! Long messages whose bytes are copied while other threads use the fabric.

// Miri has no poll(2).
#![cfg(not(miri))]

use core::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use core::time::Duration;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{
    Access, Completed, Completion, CompletionQueue as _, CompletionStatus, Domain as _, Immediate,
    Region as _, RemoteAddress, SendOp, Slice,
};
use rdma_softsim::{Fabric, Region};

use crate::common::{Peer, ip, pair};

const LONG: usize = 64 << 10;
/// The longest wait.
const LIMIT: Duration = Duration::from_secs(20);

/// Memory with a gate. While it is shut, copies begin and then wait.
struct Gated {
    bytes: Arc<[AtomicU8]>,
    shut: Arc<AtomicBool>,
    begun: Sender<()>,
    leave: Mutex<Receiver<()>>,
}

impl CallerMemory for Gated {
    fn shared(&self) -> SharedMemory<'_> {
        if self.shut.swap(false, Relaxed) {
            self.begun.send(()).unwrap();
            self.leave.lock().unwrap().recv_timeout(LIMIT).expect("leave");
        }
        SharedMemory::new(&self.bytes)
    }
}

/// Two ends, and an open-gated window of the second one.
struct Ends {
    a: Peer,
    b: Peer,
    source: Region,
    window: Region,
    bytes: Arc<[AtomicU8]>,
    shut: Arc<AtomicBool>,
    begun: Mutex<Receiver<()>>,
    leave: Sender<()>,
}

impl Ends {
    fn new(fabric: &Fabric) -> Self {
        let (a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
        let bytes: Arc<[AtomicU8]> = (0..2 * LONG).map(|_| AtomicU8::new(0)).collect();
        let shut = Arc::new(AtomicBool::new(false));
        let ((begun, has_begun), (leave, may_go)) = (channel(), channel());
        let memory =
            Gated { bytes: Arc::clone(&bytes), shut: Arc::clone(&shut), begun, leave: Mutex::new(may_go) };
        let window = b.domain.register_memory(memory, Access::REMOTE_WRITE).unwrap();
        let source = a.domain.register(LONG, Access::NONE).unwrap();
        assert!(source.write(0, &[7; LONG]));
        Self { a, b, source, window, bytes, shut, begun: Mutex::new(has_begun), leave }
    }

    /// Writes the source to half `half` of the window, with a notification.
    fn write(&self, half: usize) {
        let address = self.window.address() + (half * LONG) as u64;
        let to = RemoteAddress { address, rkey: self.window.rkey() };
        let local = Slice { region: &self.source, offset: 0, len: LONG };
        self.a.send(half as u64, SendOp::WriteImmediate(to, Immediate(half as u32)), local);
    }

    /// Calls `meanwhile` while another thread copies the first half.
    fn during_a_copy(&self, meanwhile: impl FnOnce()) {
        thread::scope(|scope| {
            self.shut.store(true, Relaxed);
            scope.spawn(|| self.write(0));
            self.begun.lock().unwrap().recv_timeout(LIMIT).expect("the copy begins");
            meanwhile();
            self.leave.send(()).unwrap();
        });
    }

    fn polled(peer: &Peer) -> usize {
        peer.completions.poll(&mut [Completion::EMPTY; 8]).unwrap()
    }
}

#[test]
fn others_go_on_while_a_message_is_copied() {
    let fabric = Fabric::new();
    let mut ends = Ends::new(&fabric);
    let (c, d) = pair(&fabric.host(&[ip(3)]), &fabric.host(&[ip(4)]), ip(4));
    let short = c.domain.register(4, Access::NONE).unwrap();
    ends.during_a_copy(|| {
        c.send(1, SendOp::Send, Slice { region: &short, offset: 0, len: 4 });
        assert_eq!((Ends::polled(&c), Ends::polled(&d)), (1, 1));
        // At the very ends of the copy, too.
        ends.b.receive(0);
        assert_eq!(Ends::polled(&ends.b), 0);
        assert!(ends.bytes.iter().all(|byte| byte.load(Relaxed) == 0));
    });
    let arrived = ends.b.next("the long message").result;
    assert_eq!(arrived, Ok(Completed::RecvWrite { immediate: Immediate(0) }));
    assert_eq!(ends.a.next("its end").result, Ok(Completed::Write));
    assert!(ends.bytes[..LONG].iter().all(|byte| byte.load(Relaxed) == 7));
}

#[test]
fn what_is_behind_a_copy_stays_behind_it() {
    let fabric = Fabric::new();
    let mut ends = Ends::new(&fabric);
    ends.during_a_copy(|| {
        ends.write(1);
        ends.a.send(2, SendOp::Send, Slice { region: &ends.source, offset: 0, len: 4 });
        assert_eq!(Ends::polled(&ends.a) + Ends::polled(&ends.b), 0);
    });
    for half in 0..2 {
        let arrived = ends.b.next("a long message").result;
        assert_eq!(arrived, Ok(Completed::RecvWrite { immediate: Immediate(half) }));
    }
    assert!(matches!(ends.b.next("a short one").result, Ok(Completed::Recv { len: 4, .. })));
    let ended: Vec<_> = (0..3).map(|_| ends.a.next("an end").id).collect();
    assert_eq!(ended, [0, 1, 2]);
    assert!(ends.bytes.iter().all(|byte| byte.load(Relaxed) == 7));
}

/// A queue pair that fails meanwhile returns the bytes after the copy.
#[test]
fn what_is_copied_is_flushed_after_the_copy() {
    let fabric = Fabric::new();
    let mut ends = Ends::new(&fabric);
    let nowhere = RemoteAddress { address: 0, rkey: 1 };
    let short = ends.b.domain.register(4, Access::NONE).unwrap();
    ends.during_a_copy(|| {
        ends.b.send(9, SendOp::Write(nowhere), Slice { region: &short, offset: 0, len: 4 });
        assert_eq!(Ends::polled(&ends.a), 0);
    });
    let ended = ends.a.next("the flush");
    assert_eq!((ended.id, ended.result.unwrap_err().status), (0, CompletionStatus::WR_FLUSH_ERR));
    let refused = ends.b.next("the refusal");
    assert_eq!((refused.id, refused.result.unwrap_err().status), (9, CompletionStatus::REM_ACCESS_ERR));
}

/// A thread that takes memory away has it for itself afterwards. The copy ends meanwhile, or
/// before.
#[test]
fn memory_goes_after_the_copy() {
    let fabric = Fabric::new();
    let ends = Ends::new(&fabric);
    let spare = ends.b.domain.register(LONG, Access::NONE).unwrap();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let (begin, begins) = channel();
        let ended = &ended;
        let going = scope.spawn(move || {
            begins.recv_timeout(LIMIT).unwrap();
            drop(spare);
            assert!(ended.load(Relaxed), "the copy was under way");
        });
        ends.during_a_copy(|| {
            begin.send(()).unwrap();
            for _ in 0..1000 {
                thread::yield_now();
                assert!(!going.is_finished());
            }
            ended.store(true, Relaxed);
        });
        going.join().unwrap();
    });
}

/// Memory of a program whose code panics, once set, when it is asked for its bytes.
struct Panics(Arc<AtomicBool>, [AtomicU8; LONG]);

impl CallerMemory for Panics {
    fn shared(&self) -> SharedMemory<'_> {
        assert!(!self.0.load(Relaxed), "as it was told");
        SharedMemory::new(&self.1)
    }
}

/// A panic in a program's memory affects only that program: its bytes cannot be accessed, and a
/// peer that writes to them continues, like all others.
#[test]
fn memory_that_panics_is_out_of_reach() {
    for len in [4, LONG] {
        let fabric = Fabric::new();
        let (mut a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
        let (c, d) = pair(&fabric.host(&[ip(3)]), &fabric.host(&[ip(4)]), ip(4));
        let panics = Arc::new(AtomicBool::new(false));
        let memory = Panics(Arc::clone(&panics), [const { AtomicU8::new(0) }; LONG]);
        let window = b.domain.register_memory(memory, Access::REMOTE_WRITE).unwrap();
        let source = a.domain.register(LONG, Access::NONE).unwrap();
        panics.store(true, Relaxed);
        let to = RemoteAddress { address: window.address(), rkey: window.rkey() };
        a.send(7, SendOp::Write(to), Slice { region: &source, offset: 0, len });
        let ended = a.next("its end");
        assert!(ended.id == 7 && ended.result.is_err(), "{ended:?}");
        let short = c.domain.register(4, Access::NONE).unwrap();
        c.send(1, SendOp::Send, Slice { region: &short, offset: 0, len: 4 });
        assert_eq!((Ends::polled(&c), Ends::polled(&d)), (1, 1), "others go on");
    }
}
