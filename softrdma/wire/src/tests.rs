use super::*;

/// A chain is cut by the number of requests alone.
#[test]
fn a_message_holds_the_longest_work_requests() {
    let most = Sge { address: u64::MAX, len: u32::MAX, lkey: u32::MAX };
    let op = Op::WriteImmediate { address: u64::MAX, rkey: u32::MAX, immediate: u32::MAX };
    let send = |local| Send { id: u64::MAX, op, signaled: true, solicited: true, local };
    let (pair, room) = (u32::MAX, u32::MAX);
    let receive = Receive { id: u64::MAX, local: vec![most; MAX_ELEMENTS] };
    let inline = send(Local::Inline(vec![u8::MAX; MAX_INLINE].into()));
    let listed = send(Local::Memory(vec![most; MAX_ELEMENTS]));
    for request in [
        Request::PostSend { pair, room, work: vec![inline; MAX_WORK] },
        Request::PostSend { pair, room, work: vec![listed; MAX_WORK] },
        Request::PostReceive { pair, work: vec![receive.clone(); MAX_WORK] },
        Request::PostShared { queue: u32::MAX, work: vec![receive; MAX_WORK] },
    ] {
        let len = postcard::to_slice(&request, &mut vec![0; MAX_MESSAGE]).map(|bytes| bytes.len());
        assert!(len.is_ok(), "{len:?}");
    }
    let completion = Completion {
        id: u64::MAX,
        pair: u32::MAX,
        status: u32::MAX,
        vendor: u32::MAX,
        opcode: u32::MAX,
        len: u32::MAX,
        immediate: Some(u32::MAX),
    };
    let completions = Reply::Completions(vec![completion; MAX_BATCH]);
    assert!(postcard::to_slice(&completions, &mut vec![0; MAX_MESSAGE]).is_ok());
}
