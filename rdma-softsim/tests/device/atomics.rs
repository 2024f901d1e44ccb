//! Atomic operations.

use super::*;

const INVALID: CompletionStatus = CompletionStatus::REM_INV_REQ_ERR;

/// Registers memory with this right, in place of that without.
pub(super) fn allow(end: End, memory: Arc<dyn ForeignMemory>, atomics: bool) -> End {
    let rights = Rights { access: Access::REMOTE_WRITE, atomics };
    let region = end.domain.register_foreign(BASE, LEN, memory, rights).unwrap();
    End { region, ..end }
}

/// Memory in which one thread at a time takes its step.
struct Lane(Program, Mutex<()>);

impl ForeignMemory for Lane {
    fn carry(&self, mut load: Load) -> Option<Load> {
        let _turn = self.1.lock().unwrap();
        load.step();
        Some(load)
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let read = self.0.read(offset, into);
        // Another thread in the memory would change it now.
        std::thread::yield_now();
        read
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.0.write(offset, from)
    }
}

fn two(atomics: bool) -> (Fabric, End, End) {
    let (fabric, a, b) = connected();
    let memory = Arc::new(b.program.clone());
    (fabric, a, allow(b, memory, atomics))
}

fn at(end: &End, offset: u64) -> RemoteAddress {
    RemoteAddress { address: BASE + offset, rkey: end.region.key() }
}

fn number(end: &End, at: usize) -> u64 {
    u64::from_ne_bytes(*end.program.bytes.lock().unwrap()[at..].first_chunk().unwrap())
}

fn set(end: &End, at: usize, number: u64) {
    end.program.bytes.lock().unwrap()[at..at + 8].copy_from_slice(&number.to_ne_bytes());
}

#[test]
fn numbers_are_added_and_swapped_and_come_back() {
    let (_fabric, a, b) = two(true);
    set(&b, 64, u64::MAX);
    let swap = |compare| Atomic::CompareSwap { compare, swap: 77 };
    for (atomic, found, new) in
        [(Atomic::FetchAdd(5), u64::MAX, 4), (swap(5), 4, 4), (swap(4), 4, 77), (swap(4), 77, 77)]
    {
        // The result is the message of its elements, however long they are.
        a.try_post(Op::Atomic(at(&b, 64), atomic), Local::Memory(&[a.sge(0, 4), a.sge(8, 100)])).unwrap();
        let taken: Vec<_> = a.taken().into_iter().map(|(done, detail)| (done.result, detail)).collect();
        assert_eq!(taken, [(Ok(Completed::Read), Detail { bytes: 8, source: None, atomic: Some(atomic) })]);
        let bytes = a.program.bytes.lock().unwrap();
        assert_eq!([&bytes[..4], &bytes[8..12]].concat(), found.to_ne_bytes());
        drop(bytes);
        assert_eq!(number(&b, 64), new);
    }
    assert_eq!(b.completions(), []);
}

#[test]
fn what_is_not_allowed_is_refused_and_not_done() {
    let add = Atomic::FetchAdd(1);
    let event = |end: &End| end.device.next_event().unwrap();
    for (atomics, offset, status, told) in [
        (false, 64, CompletionStatus::REM_ACCESS_ERR, AsyncEvent::QpAccessErr),
        (true, 60, INVALID, AsyncEvent::QpReqErr),
        (true, LEN as u64, CompletionStatus::REM_ACCESS_ERR, AsyncEvent::QpAccessErr),
    ] {
        let (_fabric, a, b) = two(atomics);
        a.try_post(Op::Atomic(at(&b, offset), add), Local::Memory(&[a.sge(0, 8)])).unwrap();
        assert_eq!(a.completions(), [Err(status)]);
        assert_eq!((b.pair.state(), number(&b, 64)), (Ok(PairState::Error), 0));
        assert_eq!(event(&b), Some((told, About::Pair(9))));
    }
    // The queue pair does not allow it, nor other operations, even without bytes.
    for (write, len) in [(false, 8), (true, 8), (true, 0)] {
        let (_fabric, a, b) = two(true);
        let op = if write { SendOp::Write(at(&b, 64)).into() } else { Op::Atomic(at(&b, 64), add) };
        b.pair.set_rights(Rights { access: Access::REMOTE_READ, atomics: false }).unwrap();
        a.program.bytes.lock().unwrap()[0] = 1;
        a.try_post(op, Local::Memory(&[a.sge(0, len)])).unwrap();
        assert_eq!((a.completions(), number(&b, 64)), (vec![Err(INVALID)], 0));
        assert_eq!(event(&b), Some((AsyncEvent::QpReqErr, About::Pair(9))));
    }
    // The result has no place.
    let (_fabric, a, b) = two(true);
    for local in [Local::Memory(&[a.sge(0, 7)]), Local::Inline(&[0; 8])] {
        assert!(matches!(a.try_post(Op::Atomic(at(&b, 64), add), local), Err(Error::Argument(_))));
    }
    let wrong = Sge { lkey: a.region.key() ^ 1, ..a.sge(0, 8) };
    a.try_post(Op::Atomic(at(&b, 64), add), Local::Memory(&[wrong])).unwrap();
    assert_eq!((a.completions(), number(&b, 64)), (vec![Err(CompletionStatus::LOC_PROT_ERR)], 0));
}

/// Several queue pairs add to one number at once.
#[test]
fn they_are_atomic_among_themselves() {
    const TIMES: u64 = 200;
    let (fabric, a, b) = connected();
    let memory = Arc::new(Lane(b.program.clone(), Mutex::default()));
    let b = allow(b, memory, true);
    let others: Vec<_> = (3..6)
        .map(|last| {
            let other = end(&fabric.host(&[address(last)]));
            let queues = [&b.queue, &b.queue];
            let pair = b
                .device
                .create_queue_pair(last.into(), Service::Connected, &b.domain, queues, None, LIMITS)
                .unwrap();
            connect_pair(&pair, 2, last, other.pair.number());
            connect(&other, last, 2, pair.number());
            (other, pair)
        })
        .collect();
    std::thread::scope(|scope| {
        for end in others.iter().map(|(other, _)| other).chain([&a]) {
            let target = at(&b, 64);
            scope.spawn(move || {
                for _ in 0..TIMES {
                    let op = Op::Atomic(target, Atomic::FetchAdd(1));
                    end.try_post(op, Local::Memory(&[end.sge(0, 8)])).unwrap();
                    assert_eq!(await_completions(end), [Ok(Completed::Read)]);
                }
            });
        }
    });
    assert_eq!(number(&b, 64), 4 * TIMES);
}
