//! Memory that blocks its writers.

use super::atomics::allow;
use super::*;

/// Memory accessed by threads of its own, which block writers while its gate is shut.
pub(super) struct Keeping {
    program: Program,
    begun: Sender<()>,
    leave: Mutex<Receiver<()>>,
    written: AtomicBool,
}

impl ForeignMemory for Keeping {
    fn carry(&self, mut load: Load) -> Option<Load> {
        std::thread::spawn(move || {
            load.step();
            load.go();
        });
        None
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.program.read(offset, into)
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        let _no_receiver = self.begun.send(());
        // Without a sender it is open.
        let _open = self.leave.lock().unwrap().recv();
        let written = self.program.write(offset, from);
        self.written.store(true, Relaxed);
        written
    }
}

/// Such memory, with its program; the threads in it, and the gate.
pub(super) fn keeping() -> (Program, Arc<Keeping>, Receiver<()>, Sender<()>) {
    let ((begun, has_begun), (leave, may_leave)) = (channel(), channel());
    let program = Program { bytes: Arc::new(Mutex::new(vec![0; LEN])), ended: Arc::default() };
    let (leave_in, written) = (Mutex::new(may_leave), AtomicBool::new(false));
    let memory = Arc::new(Keeping { program: program.clone(), begun, leave: leave_in, written });
    (program, memory, has_begun, leave)
}

/// Two ends, the second with such memory; the threads in it, and the gate.
fn connected_to_keeping(fabric: Fabric) -> (Fabric, End, End, Arc<Keeping>, Receiver<()>, Sender<()>) {
    let (program, memory, has_begun, leave) = keeping();
    let a = end(&fabric.host(&[address(1)]));
    let b = end_with(&fabric.host(&[address(2)]), program, Arc::<Keeping>::clone(&memory) as _);
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    (fabric, a, b, memory, has_begun, leave)
}

/// A thread blocked in one program's memory blocks no other: other queue pairs of the same peer,
/// and other programs, continue.
#[test]
fn memory_that_keeps_its_writer_stops_no_other_message() {
    let (fabric, a, b, _memory, begun, leave) = connected_to_keeping(Fabric::new());
    let remote = |end: &End| RemoteAddress { address: BASE, rkey: end.region.key() };
    a.post(SendOp::Write(remote(&b)), a.sge(0, 10));
    begun.recv().unwrap();
    // Of the same machine, and of others.
    for (own, peer) in [(1, 4), (5, 6)] {
        let [one, other] = [own, peer].map(|last| end(&fabric.host(&[address(last)])));
        connect(&one, own, peer, other.pair.number());
        connect(&other, peer, own, one.pair.number());
        one.post(SendOp::Write(remote(&other)), one.sge(0, 500_000));
        assert_eq!(await_completions(&one), [Ok(Completed::Write)]);
    }
    assert_eq!(a.completions(), []);
    leave.send(()).unwrap();
    assert_eq!(await_completions(&a), [Ok(Completed::Write)]);
}

/// Returned memory is not written to: a thread that destroys a queue pair or a region waits for
/// writers in its own memory.
#[test]
fn memory_is_given_back_when_no_write_to_it_is_under_way() {
    for (takes_region, is_atomic) in [(false, false), (false, true), (true, false), (true, true)] {
        let (fabric, a, b, memory, begun, leave) = connected_to_keeping(Fabric::new());
        let b = allow(b, Arc::<Keeping>::clone(&memory) as _, true);
        let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
        let op = match is_atomic {
            true => Op::Atomic(remote, Atomic::FetchAdd(1)),
            false => SendOp::Write(remote).into(),
        };
        a.try_post(op, Local::Memory(&[a.sge(0, 10)])).unwrap();
        begun.recv().unwrap();
        let End { pair, region, queue, .. } = b;
        let number = pair.number();
        let taking = std::thread::spawn(move || {
            let taken = if takes_region { region.deregister() } else { pair.destroy() };
            assert_eq!(taken, Ok(()));
            (memory.written.load(Relaxed), pair, region)
        });
        // It has begun: the queue pair is reset, or the region is gone.
        loop {
            let found = fabric.connections(0, 9).into_iter().find(|connection| connection.pair == number);
            let state = found.map(|connection| connection.state);
            let begun = match takes_region {
                true => fabric.resources(address(2)).regions == 0,
                false => state == Some(PairState::Reset),
            };
            if begun {
                break;
            }
            assert!(state.is_some(), "the queue pair is gone while somebody writes for it");
            std::thread::yield_now();
        }
        assert!(!taking.is_finished(), "it waits");
        leave.send(()).unwrap();
        assert!(taking.join().unwrap().0, "the bytes were written before");
        drop(queue);
    }
}

/// A page that does not come: the writer gives up in time. The memory is not given back until the
/// page has come, and who gives up the fabric's objects does not wait for it.
#[test]
fn a_page_that_does_not_come_is_given_up() {
    for comes in [true, false] {
        let (reach, ack_timeout) = (Duration::from_millis(20), Duration::from_millis(1));
        let parameters = Parameters { reach, ack_timeout, ..Parameters::default() };
        let (_fabric, a, b, memory, begun, leave) = connected_to_keeping(Fabric::with_parameters(parameters));
        let op = SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() });
        // Not from its own memory, which may be accessed too late on a busy machine.
        let local = Local::Inline(&[7; 10]);
        a.pair
            .post_named(&[NamedSend { id: 1, op: op.into(), local, signaled: true, solicited: false }])
            .unwrap();
        begun.recv().unwrap();
        assert_eq!(await_completions(&a), [Err(CompletionStatus::RETRY_EXC_ERR)]);
        assert_eq!(b.region.deregister(), Err(Error::Landing));
        assert_eq!(b.pair.modify(Transition::Reset), Err(Error::Landing));
        assert_eq!(b.pair.destroy(), Err(Error::Landing));
        if !comes {
            drop(b);
            assert!(!memory.written.load(Relaxed));
            continue;
        }
        drop(leave);
        // However slow this machine is, the call that succeeds is after the write.
        while b.region.deregister() != Ok(()) {}
        assert!(memory.written.load(Relaxed));
        assert_eq!((b.pair.modify(Transition::Reset), b.pair.destroy()), (Ok(()), Ok(())));
    }
}
