use super::*;

/// The longest requests fit, so the number of requests alone limits a message.
#[test]
fn a_message_holds_the_longest_work_requests() {
    let most = Sge { address: u64::MAX, len: u32::MAX, lkey: u32::MAX };
    let nowhere = std::net::IpAddr::from([u8::MAX; 16]);
    let to = Destination { local: nowhere, remote: nowhere, number: u32::MAX, key: u32::MAX };
    let op = Op::Datagram { to, immediate: Some(u32::MAX) };
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
}

fn completion(id: u64, immediate: Option<u32>) -> Completion {
    let most = u32::MAX;
    let source = id.is_multiple_of(3).then_some(Source { number: most - 2, ip4: id.is_multiple_of(2) });
    Completion { id, pair: most, status: 1, vendor: most, opcode: 129, len: most - 1, immediate, source }
}

/// A page as the kernel provides it.
fn page() -> Box<Page> {
    Box::default()
}

#[test]
fn a_page_shows_each_completion_once_and_across_the_wrap() {
    let page = page();
    let first = u32::MAX - SHOWN / 2;
    page.show(first.wrapping_sub(1), &completion(0, None));
    for turn in 0..3 * SHOWN {
        let position = first.wrapping_add(turn);
        assert_eq!(page.at(position), None);
        let shown = completion(turn.into(), (turn % 2 == 0).then_some(turn));
        page.show(position, &shown);
        assert_eq!(page.at(position), Some(shown));
        page.give_back(position.wrapping_add(1));
        assert_eq!(page.taken(), position.wrapping_add(1));
    }
}

#[test]
fn an_arming_is_taken_once_and_never_narrowed() {
    let page = page();
    assert_eq!(page.take_arming(), None);
    page.arm(7, true);
    assert_eq!((page.take_arming(), page.take_arming()), (Some((7, true)), None));
    page.arm(8, false);
    page.arm(9, true);
    assert_eq!(page.take_arming(), Some((9, false)));
    page.arm(u32::MAX, true);
    page.arm(u32::MAX, false);
    page.set_calls(POLLS);
    assert_eq!((page.take_arming(), page.calls()), (Some((u32::MAX, false)), POLLS));
}

/// Each side writes its word and reads the other's. One of them sees what the other wrote, or a
/// program sleeps beside its completion. Miri tries what processors may do.
#[test]
fn one_side_sees_the_other() {
    let shown = |page: &Page| page.at(0).is_some();
    let asked = |page: &Page| page.calls() & POLLS != 0;
    let show = |page: &Page| {
        page.show(0, &completion(0, None));
        page.set_calls(0);
    };
    let ask = |page: &Page| page.set_calls(POLLS);
    for _ in 0..20 {
        seen_by_one(show, shown);
        seen_by_one(ask, asked);
    }
}

fn seen_by_one(publish: fn(&Page), finds: fn(&Page) -> bool) {
    let page = page();
    let (found, armed) = std::thread::scope(|scope| {
        let program = scope.spawn(|| {
            page.arm(0, false);
            finds(&page)
        });
        publish(&page);
        let armed = page.take_arming().is_some();
        (program.join().expect("a program"), armed)
    });
    assert!(found || armed);
}
