//! Requests and their elements, wrong keys, and memory that is gone.

use super::*;

#[test]
fn queue_pairs_find_each_other_by_number() {
    let (fabric, a, b) = connected();
    let sent: Vec<u8> = (0..500_000_u32).map(|place| (place % 251) as u8).collect();
    a.program.bytes.lock().unwrap()[..sent.len()].copy_from_slice(&sent);
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 0)] }]).unwrap();
    b.arm(Arming::All);
    let remote = RemoteAddress { address: BASE + 50_000, rkey: b.region.key() };
    a.post(SendOp::WriteImmediate(remote, Immediate(5)), a.sge(0, 500_000));
    assert_eq!(a.completions(), [Ok(Completed::Write)]);
    let taken: Vec<_> =
        b.taken().into_iter().map(|(completion, detail)| (completion.result, detail.bytes)).collect();
    assert_eq!(taken, [(Ok(Completed::RecvWrite { immediate: Immediate(5) }), 500_000)]);
    assert_eq!(b.signals.count.load(Relaxed), 1, "the signal that was given");
    assert_eq!(b.program.bytes.lock().unwrap()[50_000..550_000], sent, "more than one reach");
    drop((a, b));
    assert_eq!(fabric.resources(address(1)), Resources::default());
}

/// A message consists of its elements, one after another, whatever those of the other side are
/// (`ibv_post_send(3)`).
#[test]
fn elements_of_a_request_make_one_message() {
    let (_fabric, a, b) = connected();
    let sent: Vec<u8> = (0..60_u8).collect();
    a.program.bytes.lock().unwrap()[..60].copy_from_slice(&sent);
    // 10 and 30 bytes, and an empty one of no region.
    let gathered = [a.sge(50, 10), Sge::default(), a.sge(0, 30)];
    let message: Vec<u8> = (50..60).chain(0..30).collect();
    let scattered = [b.sge(1000, 7), b.sge(2000, 30), b.sge(3000, 100)];
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &scattered }]).unwrap();
    a.post_list(SendOp::Send, &gathered);
    assert_eq!(a.completions(), [Ok(Completed::Send)]);
    assert_eq!(b.completions(), [Ok(Completed::Recv { len: 40, immediate: None })]);
    let held = |end: &End, at: usize, len: usize| end.program.bytes.lock().unwrap()[at..at + len].to_vec();
    assert_eq!([held(&b, 1000, 7), held(&b, 2000, 30), held(&b, 3000, 3)].concat(), message);
    assert_eq!(
        [held(&b, 1007, 1), held(&b, 2030, 1), held(&b, 3003, 1)].concat(),
        [0; 3],
        "no more than that"
    );

    let remote = RemoteAddress { address: BASE + 4000, rkey: b.region.key() };
    a.post_list(SendOp::Write(remote), &gathered);
    assert_eq!(held(&b, 4000, 40), message);
    a.post_list(SendOp::Read(remote), &[a.sge(5000, 1), a.sge(6000, 39)]);
    assert_eq!(a.completions(), [Ok(Completed::Write), Ok(Completed::Read)]);
    assert_eq!([held(&a, 5000, 1), held(&a, 6000, 39)].concat(), message);

    let receive = NamedReceive { id: 2, local: &[b.sge(0, 20), b.sge(100, 19)] };
    b.pair.post_named_receives(&[receive]).unwrap();
    a.post_list(SendOp::Send, &gathered);
    assert_eq!(
        a.completions(),
        [Err(CompletionStatus::REM_INV_REQ_ERR)],
        "one byte more than there is room for"
    );
}

/// One element with a wrong key is enough.
#[test]
fn an_element_of_a_wrong_key_fails_the_request() {
    let (_fabric, a, b) = connected();
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 64)] }]).unwrap();
    a.post_list(SendOp::Send, &[a.sge(0, 8), Sge { lkey: a.region.key() ^ 1, ..a.sge(8, 8) }]);
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    assert_eq!(b.completions(), []);
}

#[test]
fn a_wrong_local_key_fails_when_the_work_is_executed() {
    let (_fabric, a, _b) = connected();
    a.post(SendOp::Send, Sge { lkey: a.region.key() ^ 1, ..a.sge(0, 8) });
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    assert_eq!(a.pair.state(), Ok(PairState::Error));
}

#[test]
fn memory_out_of_reach_fails_as_memory_that_is_gone() {
    let (_fabric, a, b) = connected();
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 64)] }]).unwrap();
    b.program.ended.store(true, Relaxed);
    a.post(SendOp::Send, a.sge(0, 8));
    assert_eq!(a.completions(), [Err(CompletionStatus::REM_OP_ERR)]);
    assert_eq!(b.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);

    let (_fabric, a, b) = connected();
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 64)] }]).unwrap();
    a.program.ended.store(true, Relaxed);
    a.post(SendOp::Send, a.sge(0, 8));
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    assert_eq!(b.completions(), [], "the peer does not learn");
}

#[test]
fn a_queue_pair_hears_its_peer_alone() {
    let (fabric, a, b) = connected();
    let stranger = end(&fabric.host(&[address(3)]));
    connect(&stranger, 3, 2, b.pair.number());
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 64)] }]).unwrap();
    stranger.post(SendOp::Send, stranger.sge(0, 8));
    while stranger.pair.state() == Ok(PairState::Ready) {
        std::thread::yield_now();
    }
    assert_eq!(stranger.completions(), [Err(CompletionStatus::RETRY_EXC_ERR)]);
    assert_eq!(b.completions(), []);
    a.post(SendOp::Send, a.sge(0, 8));
    assert_eq!(a.completions(), [Ok(Completed::Send)]);
}

#[test]
fn asynchronous_events_name_the_object() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() ^ 1 };
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), [Err(CompletionStatus::REM_ACCESS_ERR)]);
    assert_eq!(b.device.next_event(), Ok(Some((AsyncEvent::QpAccessErr, About::Pair(9)))));
    assert_eq!(b.device.next_event(), Ok(None));
}

#[test]
fn states_come_in_order() {
    let fabric = Fabric::new();
    let end = end(&fabric.host(&[address(1)]));
    let send = Transition::Send { retry: 1, rnr_retry: 1, read_depth: 1 };
    assert!(matches!(end.pair.modify(send), Err(Error::State(_))));
    assert!(matches!(end.pair.modify(Transition::Fail), Err(Error::State(_))));
    let receive = NamedReceive { id: 1, local: &[end.sge(0, 8)] };
    assert!(end.pair.post_named_receives(&[receive]).is_err(), "a queue pair that is reset takes nothing");
    end.pair.modify(Transition::Initialise).unwrap();
    end.pair.post_named_receives(&[receive]).unwrap();
    end.pair.modify(Transition::Fail).unwrap();
    assert_eq!(end.completions(), [Err(CompletionStatus::WR_FLUSH_ERR)]);
    end.pair.modify(Transition::Reset).unwrap();
    assert_eq!(end.pair.state(), Ok(PairState::Reset));
    assert!(end.domain.is_used() && end.queue.is_used());
}
