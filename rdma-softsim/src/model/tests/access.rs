//! Keys, bounds, permissions, lengths, and memory that goes away.

use super::*;
use CompletionStatus as Status;

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
    // The end of the bytes would wrap; their start is below the region.
    assert_eq!(
        attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(u64::MAX - w.b.region.address))),
        refused()
    );
    assert_eq!(attempt(&Setup::default(), |w| SendOp::Write(w.b.remote(0u64.wrapping_sub(1)))), refused());
}

#[test]
fn a_key_is_of_one_region_and_one_registration() {
    let with_key = |w: &World, rkey| SendOp::Write(RemoteAddress { rkey, ..w.b.remote(0) });
    // A bit of the count, and the lowest and the highest one of the place.
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
        w.a.post_work(&mut w.model, Request::new(1, op, true), local, false).unwrap();
        assert_eq!(w.b.bytes(to, len), pattern[from - 3..from - 3 + len]);
        assert_eq!(w.b.bytes(to + len, 1), [0xee]);
        w.a.completions(&mut w.model);
    }
    w.end();
}
