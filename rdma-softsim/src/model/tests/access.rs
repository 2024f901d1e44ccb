//! Keys, bounds, permissions, lengths, and memory that goes away.

use super::*;
use CompletionStatus as Status;
use rdma_backend::AsyncEvent;

/// Posts `op` of four bytes from a to b. Returns both outcomes: a's completion, then b's, whose one
/// receive is 9.
fn attempt(setup: &Setup, op: impl FnOnce(&mut World) -> SendOp) -> (Vec<Ended>, Vec<Ended>) {
    let mut w = World::new(setup);
    w.b.receive(&mut w.model, 9, 32, 8).unwrap();
    let op = op(&mut w);
    w.a.post(&mut w.model, 1, op, 4).unwrap();
    let ended = (w.a.completions(&mut w.model), w.b.completions(&mut w.model));
    w.end();
    ended
}

type Ended = (u64, Result<Completed, Status>);

/// The peer refuses: the requester gets an error, and the untouched receive is flushed in the error
/// state.
fn refused() -> (Vec<Ended>, Vec<Ended>) {
    (vec![(1, Err(Status::REM_ACCESS_ERR))], vec![(9, Err(Status::WR_FLUSH_ERR))])
}

#[test]
fn a_write_may_touch_the_last_byte_and_not_the_one_behind() {
    let end = REGION as u64;
    let (a, b) = attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(end - 4)));
    assert_eq!((a, b), (vec![(1, Ok(Completed::Write))], vec![]));
    assert_eq!(attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(end - 3))), refused());
    assert_eq!(attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(end))), refused());
    assert_eq!(
        attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(u64::MAX - w.b.region.address))),
        refused()
    );
    assert_eq!(attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(0u64.wrapping_sub(1)))), refused());
}

#[test]
fn a_key_is_of_one_region_and_one_registration() {
    let with_key = |w: &World, rkey| SendOp::Write(RemoteAddress { rkey, ..w.b.remote(0) });
    for change in [1, 0x100, 0x8000_0000] {
        let other = |w: &mut World| with_key(w, w.b.region.rkey ^ change);
        assert_eq!(attempt(&Setup::default(), other), refused(), "{change:#x}");
    }
    assert_eq!(attempt(&Setup::default(), |w| with_key(w, 0)), refused());
    assert_eq!(attempt(&Setup::default(), |w| with_key(w, w.a.region.rkey)), refused());
    // Another registration in the same place has another key and another address.
    let stale = |w: &mut World| {
        let op = SendOp::Write(w.b.remote(0));
        w.model.deregister(w.b.region.id);
        let again = w.model.register(w.b.domain, Arc::clone(&w.b.memory), Access::REMOTE_WRITE).unwrap();
        assert_eq!(again.id.index(), w.b.region.id.index());
        assert_ne!((again.address, again.rkey), (w.b.region.address, w.b.region.rkey));
        w.b.region = again;
        op
    };
    assert_eq!(attempt(&Setup::default(), stale), refused());
}

#[test]
fn a_region_allows_what_it_was_registered_for() {
    for access in [Access::NONE, Access::LOCAL_WRITE, Access::REMOTE_READ] {
        let setup = Setup { access, ..Setup::default() };
        assert_eq!(attempt(&setup, |w| SendOp::Write(w.b.remote(0))), refused(), "{access:?}");
    }
    let setup = Setup { access: Access::REMOTE_WRITE, ..Setup::default() };
    assert_eq!(attempt(&setup, |w| SendOp::Read(w.b.remote(0))), refused());
}

#[test]
fn a_region_is_reached_through_its_own_domain_only() {
    let mut w = World::new(&Setup::default());
    let other = w.model.create_domain(w.b.id).unwrap();
    let memory = Arc::new(Memory::zeroed(64).unwrap());
    let region = w.model.register(other, memory, Access::REMOTE_WRITE).unwrap();
    // The own device notices when posting.
    let local = Part { region: region.id, offset: 0, len: 4 };
    let posted = w.model.post_receive(w.b.pair, &PostedReceive { id: 1, local: Parts::One(local) });
    assert!(matches!(posted, Err(Error::Argument(_))));
    // The other side notices when executing.
    let target = RemoteAddress { address: region.address, rkey: region.rkey };
    w.a.post(&mut w.model, 1, SendOp::Write(target), 4).unwrap();
    assert_eq!(w.a.completions(&mut w.model), [(1, Err(Status::REM_ACCESS_ERR))]);
    w.model.deregister(region.id);
    w.model.destroy_domain(other);
    w.end();
}

#[test]
fn a_refused_write_with_immediate_spoils_its_receive() {
    let bad = RemoteAddress { address: 1, rkey: 2 };
    let (a, b) = attempt(&Setup::default(), |_| SendOp::WriteImmediate(bad, Immediate(1)));
    assert_eq!((a, b), (vec![(1, Err(Status::REM_ACCESS_ERR))], vec![(9, Err(Status::LOC_ACCESS_ERR))]));
}

#[test]
fn both_ends_of_a_refusal_are_in_the_error_state() {
    let mut w = World::new(&Setup::default());
    let bad = SendOp::Write(RemoteAddress { address: 1, rkey: 2 });
    w.a.post(&mut w.model, 1, bad, 4).unwrap();
    for side in [&w.a, &w.b] {
        side.post(&mut w.model, 7, SendOp::Send, 4).unwrap();
        side.receive(&mut w.model, 8, 0, 4).unwrap();
    }
    let flushed = [(7, Err(Status::WR_FLUSH_ERR)), (8, Err(Status::WR_FLUSH_ERR))];
    assert_eq!(w.a.completions(&mut w.model)[1..], flushed);
    assert_eq!(w.b.completions(&mut w.model), flushed);
    // Neither side is disconnected by that.
    assert_eq!(notice(&mut w.model, w.a.channel), None);
    let told = NoticeKind::Async(AsyncEvent::QpAccessErr);
    assert_eq!([(); 2].map(|()| notice(&mut w.model, w.b.channel)), [Some(told), None]);
    w.end();
}

#[test]
fn without_bytes_no_key_is_checked() {
    let nowhere = RemoteAddress { address: 0xdead, rkey: 0xbeef };
    let mut w = World::new(&Setup { access: Access::NONE, ..Setup::default() });
    w.b.receive(&mut w.model, 9, 0, 0).unwrap();
    w.b.receive(&mut w.model, 10, 0, 0).unwrap();
    w.a.post(&mut w.model, 1, SendOp::Write(nowhere), 0).unwrap();
    w.a.post(&mut w.model, 2, SendOp::WriteImmediate(nowhere, Immediate(6)), 0).unwrap();
    w.a.post(&mut w.model, 3, SendOp::Read(nowhere), 0).unwrap();
    w.a.post(&mut w.model, 4, SendOp::Send, 0).unwrap();
    let written = |id| (id, Ok(Completed::Write));
    assert_eq!(
        w.a.completions(&mut w.model),
        [written(1), written(2), (3, Ok(Completed::Read)), (4, Ok(Completed::Send))]
    );
    assert_eq!(w.b.completions(&mut w.model), [(9, Ok(recv_write(6))), (10, Ok(recv(0)))]);
    w.end();
}

#[test]
fn a_send_longer_than_its_receive_ends_both_sides() {
    let mut w = World::new(&Setup::default());
    w.b.receive(&mut w.model, 9, 0, 32).unwrap();
    w.b.receive(&mut w.model, 10, 0, 32).unwrap();
    w.b.receive(&mut w.model, 11, 0, 32).unwrap();
    w.a.post(&mut w.model, 1, SendOp::Send, 32).unwrap();
    w.a.post(&mut w.model, 2, SendOp::Send, 33).unwrap();
    w.a.post(&mut w.model, 3, SendOp::Send, 1).unwrap();
    assert_eq!(
        w.a.completions(&mut w.model),
        [(1, Ok(Completed::Send)), (2, Err(Status::REM_INV_REQ_ERR)), (3, Err(Status::WR_FLUSH_ERR))]
    );
    assert_eq!(
        w.b.completions(&mut w.model),
        [(9, Ok(recv(32))), (10, Err(Status::LOC_LEN_ERR)), (11, Err(Status::WR_FLUSH_ERR))]
    );
    w.end();
}

#[test]
fn a_receive_whose_memory_is_gone_or_read_only_ends_both_sides() {
    let ended = (vec![(1, Err(Status::REM_OP_ERR))], vec![(9, Err(Status::LOC_PROT_ERR))]);
    let gone = |w: &mut World| {
        w.model.deregister(w.b.region.id);
        SendOp::Send
    };
    assert_eq!(attempt(&Setup::default(), gone), ended);
    assert_eq!(attempt(&Setup { access: Access::NONE, ..Setup::default() }, |_| SendOp::Send), ended);
}

#[test]
fn memory_deregistered_under_a_send_is_our_own_fault_and_the_peer_learns_nothing() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    let target = w.b.remote(0);
    let other = Arc::new(Memory::zeroed(64).unwrap());
    let region = w.model.register(w.a.domain, other, Access::NONE).unwrap();
    let local = Part { region: region.id, offset: 0, len: 4 };
    w.a.post(&mut w.model, 1, SendOp::Write(target), 4).unwrap();
    let work = PostedSend { id: 2, op: SendOp::Send, local, signaled: true, inline: false };
    w.a.post_work(&mut w.model, work).unwrap();
    w.a.post(&mut w.model, 3, SendOp::Write(target), 4).unwrap();
    w.model.deregister(region.id);
    w.pass(millis(2));
    assert_eq!(
        w.a.completions(&mut w.model),
        [(1, Ok(Completed::Write)), (2, Err(Status::LOC_PROT_ERR)), (3, Err(Status::WR_FLUSH_ERR))]
    );
    w.pass(Duration::from_secs(60));
    assert_eq!(w.b.completions(&mut w.model), []);
    assert_eq!(notice(&mut w.model, w.b.channel), None);
    // Until it sends something itself.
    w.b.post(&mut w.model, 4, SendOp::Write(w.a.remote(0)), 4).unwrap();
    w.pass(Duration::from_secs(1));
    assert_eq!(w.b.completions(&mut w.model)[0], (4, Err(Status::RETRY_EXC_ERR)));
    w.end();
}

#[test]
fn a_slice_outside_its_region_is_not_posted() {
    let mut w = World::new(&Setup::default());
    for (offset, len) in [(REGION, 1), (0, REGION + 1), (usize::MAX, 2), (REGION + 1, 0)] {
        let local = w.a.part(offset, len);
        let work = PostedSend { id: 1, op: SendOp::Send, local, signaled: true, inline: false };
        assert!(matches!(w.a.post_work(&mut w.model, work), Err(Error::Argument(_))), "{offset}+{len}");
        assert!(
            matches!(w.b.receive(&mut w.model, 1, offset, len), Err(Error::Argument(_))),
            "{offset}+{len}"
        );
    }
    w.end();
}

#[test]
fn messages_of_any_length_and_alignment_arrive_whole() {
    let mut w = World::new(&Setup::default());
    let pattern: Vec<u8> = (0..REGION as u32 / 2).map(|i| (i ^ (i >> 8)) as u8).collect();
    w.a.fill(3, &pattern);
    for (from, to, len) in [(3, 0, 1), (3, 9, 4096), (4, 8, 4097), (8, 5, 12_289), (3, 17, 19_000)] {
        if len > pattern.len() {
            // For Miri; two chunks are enough.
            continue;
        }
        w.b.fill(to, &vec![0xee; len + 1]);
        let op = SendOp::Write(w.b.remote(to as u64));
        let local = w.a.part(from, len);
        w.a.post_work(&mut w.model, PostedSend { id: 1, op, local, signaled: true, inline: false }).unwrap();
        assert_eq!(w.b.bytes(to, len), pattern[from - 3..from - 3 + len]);
        assert_eq!(w.b.bytes(to + len, 1), [0xee]);
        w.a.completions(&mut w.model);
    }
    w.end();
}
