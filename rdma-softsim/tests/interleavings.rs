//! Interleavings of threads on one fabric, tried one after another: `.ci/run interleavings`, which
//! is `RUSTFLAGS='--cfg shuttle' cargo test -p rdma-softsim --test fabric`, and then the same with
//! injected races.

use core::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{
    Access, Completed, Completion, CompletionQueue as _, Domain as _, QueuePair as _, QueuePairLimits,
    Region as _, RemoteAddress, RnrTimer, SendOp, Slice,
};
use rdma_softsim::{
    Arming, Calls, Detail, Fabric, Local, Look, Mirror, NamedSend, Resources, Service, Signal, Transition,
};
use shuttle::sync::atomic::{AtomicU32 as Word, Ordering::SeqCst};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use crate::common::{Peer, SLOTS, ip, pair, wait};

/// At random, and with few but well-placed changes between threads (PCT).
fn check(test: fn()) {
    shuttle::check_random(test, 200);
    shuttle::check_pct(test, 200, 3);
}

fn peers(fabric: &Fabric) -> (Peer, Peer) {
    pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2))
}

fn send(from: &Peer, count: u64) {
    let source = from.domain.register(4, Access::NONE).unwrap();
    for id in 0..count {
        from.send(id, SendOp::Send, Slice { region: &source, offset: 0, len: 4 });
    }
    // A thread that leaves with pending work takes it along.
    while from.completions.poll(&mut [Completion::EMPTY; 64]).unwrap() == 0 {
        thread::yield_now();
    }
}

/// Poll, arm, poll, sleep: whatever comes in between, no thread sleeps through it. Messages come
/// before and after the first look, which shows that interleavings are tried.
#[test]
fn a_sleeper_is_woken() {
    static EARLY: AtomicU32 = AtomicU32::new(0);
    static LATE: AtomicU32 = AtomicU32::new(0);
    check(|| {
        let fabric = Fabric::new();
        let (a, mut b) = peers(&fabric);
        let sender = thread::spawn(move || send(&a, 1));
        let mut early = [Completion::EMPTY];
        let (arrived, when) = match b.completions.poll(&mut early).unwrap() {
            0 => (b.next("a message"), &LATE),
            _ => (early[0], &EARLY),
        };
        assert!(matches!(arrived.result, Ok(Completed::Recv { len: 4, .. })), "{arrived:?}");
        when.fetch_add(1, Relaxed);
        sender.join().unwrap();
    });
    let (early, late) = (EARLY.load(Relaxed), LATE.load(Relaxed));
    println!("arrived before the first look {early} times, after it {late} times");
    assert!(early > 0 && late > 0);
}

/// The fabric's own thread, which sleeps until it is needed, retries a SEND without a receive.
#[test]
fn what_waits_for_its_turn_gets_it() {
    check(|| {
        let fabric = Fabric::new();
        let (mut a, mut b) = peers(&fabric);
        let source = a.domain.register(4, Access::NONE).unwrap();
        let receiver = thread::spawn(move || {
            for place in 0..=SLOTS {
                let arrived = b.next("a message");
                if place == 0 {
                    b.receive(arrived.id);
                }
            }
            b.receive(0);
            b.next("a message when the thread had nothing to do before");
            b
        });
        for id in 0..=SLOTS {
            a.send(id, SendOp::Send, Slice { region: &source, offset: 0, len: 4 });
        }
        for _ in 0..=SLOTS {
            assert!(a.next("a completion").result.is_ok());
        }
        a.send(0, SendOp::Send, Slice { region: &source, offset: 0, len: 4 });
        assert!(a.next("the last completion").result.is_ok());
        drop(receiver.join().unwrap());
    });
}

/// The last thread to leave ends the fabric's thread, and nothing is left.
#[test]
fn all_leave_at_once() {
    check(|| {
        let fabric = Fabric::new();
        let (a, b) = peers(&fabric);
        // A message without a receive keeps the thread busy.
        let source = a.domain.register(4, Access::NONE).unwrap();
        for id in 0..=SLOTS {
            a.send(id, SendOp::Send, Slice { region: &source, offset: 0, len: 4 });
        }
        drop(source);
        let leaving = [thread::spawn(move || drop(a)), thread::spawn(move || drop(b))];
        for left in leaving {
            left.join().unwrap();
        }
        for host in [1, 2] {
            assert_eq!(fabric.resources(ip(host)), Resources::default());
        }
        thread::spawn(move || drop(fabric)).join().unwrap();
    });
}

/// A host is killed while its peer sleeps: the peer is notified.
#[test]
fn a_death_is_told() {
    check(|| {
        let fabric = Fabric::new();
        let (a, b) = peers(&fabric);
        let killer = thread::spawn({
            let fabric = fabric.clone();
            move || fabric.kill_host(ip(1))
        });
        wait(&b.channel, "the end");
        killer.join().unwrap();
        drop((a, b));
    });
}

/// Memory that a program reads after it was deregistered.
struct Kept(Arc<[AtomicU8]>);

impl CallerMemory for Kept {
    fn shared(&self) -> SharedMemory<'_> {
        // Other threads run before each copy.
        thread::yield_now();
        SharedMemory::new(&self.0)
    }
}

/// A long message is copied while other threads have the fabric's lock. None of it lands in memory
/// that its owner has taken away.
#[test]
fn nothing_lands_in_memory_that_is_gone() {
    static LANDED: AtomicU32 = AtomicU32::new(0);
    static REFUSED: AtomicU32 = AtomicU32::new(0);
    const LONG: usize = 16 << 10;
    check(|| {
        let fabric = Fabric::new();
        let (a, b) = peers(&fabric);
        let bytes: Arc<[AtomicU8]> = (0..LONG).map(|_| AtomicU8::new(0)).collect();
        let window = b.domain.register_memory(Kept(Arc::clone(&bytes)), Access::REMOTE_WRITE).unwrap();
        let to = RemoteAddress { address: window.address(), rkey: window.rkey() };
        let sender = thread::spawn(move || {
            let source = a.domain.register(LONG, Access::NONE).unwrap();
            assert!(source.write(0, &[7; LONG]));
            for id in 0..2 {
                a.send(id, SendOp::Write(to), Slice { region: &source, offset: 0, len: LONG });
            }
            drop(source);
        });
        thread::yield_now();
        drop(window);
        let seen = bytes[0].load(Relaxed);
        if seen == 0 { &REFUSED } else { &LANDED }.fetch_add(1, Relaxed);
        bytes.iter().for_each(|byte| byte.store(0, Relaxed));
        sender.join().unwrap();
        assert!(bytes.iter().all(|byte| byte.load(Relaxed) == 0), "written after it was deregistered");
    });
    let (landed, refused) = (LANDED.load(Relaxed), REFUSED.load(Relaxed));
    println!("the bytes landed {landed} times, and came too late {refused} times");
    assert!(landed > 0 && refused > 0);
}

/// A queue's memory that a program shares with the fabric: room for one completion.
#[derive(Default)]
struct Page {
    shown: Word,
    calls: Word,
    taken: Word,
    /// One more than what was taken before the queue was armed; 0 if it is not armed.
    armed: Word,
    /// What the fabric knows to be taken.
    seen: AtomicU32,
}

struct Shown(Arc<Page>);

impl Mirror for Shown {
    fn look(&self) -> Look {
        let (armed, taken) = (self.0.armed.swap(0, SeqCst), self.0.taken.load(SeqCst));
        // An arming may be seen later than what was taken after it.
        let advance = |to: u32| to.saturating_sub(self.0.seen.fetch_max(to, Relaxed)) as usize;
        let before = armed.checked_sub(1).map_or(0, advance);
        Look { before, armed: (armed > 0).then_some(Arming::All), after: advance(taken) }
    }

    fn show(&self, _completion: &Completion, _detail: Detail) -> bool {
        let room = self.0.shown.load(SeqCst) == self.0.seen.load(Relaxed);
        if room {
            self.0.shown.fetch_add(1, SeqCst);
        }
        room
    }

    fn ask(&self, calls: Calls) {
        self.0.calls.store(calls.polls.into(), SeqCst);
    }
}

/// The events of a queue, for which a thread can sleep.
struct Raised {
    count: Mutex<u32>,
    changed: Condvar,
    fd: OwnedFd,
}

impl Raised {
    fn new() -> Arc<Self> {
        let (fd, _other) = rustix::pipe::pipe().unwrap();
        Arc::new(Self { count: Mutex::new(0), changed: Condvar::new(), fd })
    }

    fn sleep(&self) {
        let mut count = self.count.lock().unwrap();
        while *count == 0 {
            count = self.changed.wait(count).unwrap();
        }
        *count -= 1;
    }
}

impl AsFd for Raised {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Signal for Raised {
    fn raise(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_one();
    }

    fn clear(&self) {}
}

/// A program that polls and arms its queue in memory that it shares with the fabric finds each
/// completion, or is woken: those that have room there, and those that have none.
#[test]
fn a_program_beside_a_page_is_woken() {
    static WOKEN: AtomicU32 = AtomicU32::new(0);
    static CALLED: AtomicU32 = AtomicU32::new(0);
    const COMPLETIONS: u32 = 3;
    check(|| {
        let (page, raised) = (Arc::new(Page::default()), Raised::new());
        let device = Fabric::new().host(&[ip(1)]).open(Raised::new()).unwrap();
        let domain = device.create_domain().unwrap();
        let signal: Arc<dyn Signal> = Arc::<Raised>::clone(&raised);
        let queue = device.create_completion_queue(1, 8, signal, Box::new(Shown(Arc::clone(&page)))).unwrap();
        let limits = QueuePairLimits { send_depth: 8, recv_depth: 1, inline: 0 };
        let pair =
            device.create_queue_pair(2, Service::Connected, &domain, [&queue, &queue], None, limits).unwrap();
        let (local, timer) = (ip(1), RnrTimer::MICROS_640);
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote: local, number: pair.number(), timer },
            Transition::Send { retry: 1, rnr_retry: 7, read_depth: 1 },
        ] {
            pair.modify(to).unwrap();
        }
        let poster = thread::spawn(move || {
            let op = SendOp::Write(RemoteAddress { address: 0, rkey: 0 });
            for id in 0..COMPLETIONS.into() {
                let local = Local::Inline(&[]);
                pair.post_named(&[NamedSend { id, op: op.into(), local, signaled: true, solicited: false }])
                    .unwrap();
            }
            pair
        });
        let call = || {
            CALLED.fetch_add(1, Relaxed);
            queue.called().unwrap();
        };
        let poll = |taken: u32| {
            let calls = page.calls.load(SeqCst);
            if page.shown.load(SeqCst) == taken && calls > 0 {
                call();
            }
            let found = page.shown.load(SeqCst) != taken;
            if found {
                page.taken.store(taken + 1, SeqCst);
            }
            found
        };
        let mut taken = 0;
        while taken < COMPLETIONS {
            if poll(taken) {
                taken += 1;
                continue;
            }
            page.armed.store(taken + 1, SeqCst);
            if page.calls.load(SeqCst) > 0 {
                call();
            }
            if poll(taken) {
                taken += 1;
            } else {
                raised.sleep();
                WOKEN.fetch_add(1, Relaxed);
            }
        }
        drop(poster.join().unwrap());
    });
    let (woken, called) = (WOKEN.load(Relaxed), CALLED.load(Relaxed));
    println!("the program was woken {woken} times, and called {called} times");
    assert!(woken > 0 && called > 0);
}
