//! Queue pairs for datagrams.

use super::kept_memory::keeping;
use super::*;

const KEY: u32 = 0x1234;

/// Gives a program a queue pair for datagrams, ready to send.
fn for_datagrams(end: End) -> End {
    let End { device, domain, queue, .. } = &end;
    let pair = device.create_queue_pair(9, Service::Datagram, domain, [queue, queue], None, LIMITS).unwrap();
    let receive =
        Transition::Receive { local: address(1), remote: address(2), number: 2, timer: RnrTimer::MICROS_640 };
    pair.modify(Transition::Initialise).unwrap();
    pair.set_key(KEY).unwrap();
    assert!(matches!(pair.modify(receive), Err(Error::Argument(_))), "it has no peer");
    pair.modify(Transition::ReceiveDatagrams).unwrap();
    pair.modify(Transition::Send { retry: 0, rnr_retry: 0, read_depth: 0 }).unwrap();
    End { pair, ..end }
}

fn two() -> (Fabric, End, End) {
    let fabric = Fabric::new();
    let [a, b] = [1, 2].map(|last| for_datagrams(end(&fabric.host(&[address(last)]))));
    (fabric, a, b)
}

/// From machine 1 to a queue pair of machine 2.
fn to(end: &End) -> Destination {
    Destination { local: address(1), remote: address(2), number: end.pair.number(), key: KEY }
}

fn receives(end: &End, count: u64, len: u32) {
    for id in 0..count {
        end.pair.post_named_receives(&[NamedReceive { id, local: &[end.sge(1000 * id, len)] }]).unwrap();
    }
}

fn held(end: &End, at: usize, len: usize) -> Vec<u8> {
    end.program.bytes.lock().unwrap()[at..at + len].to_vec()
}

#[test]
fn datagrams_come_from_anyone_behind_a_header() {
    let (fabric, a, b) = two();
    let c = for_datagrams(end(&fabric.host(&[address(3)])));
    receives(&b, 3, 1000);
    a.program.bytes.lock().unwrap()[..5].copy_from_slice(b"hello");
    let immediate = Some(Immediate(7));
    a.try_post(Op::Datagram(to(&b), immediate), Local::Memory(&[a.sge(0, 2), a.sge(2, 3)])).unwrap();
    let from_c = Destination { local: address(3), ..to(&b) };
    c.try_post(Op::Datagram(from_c, None), Local::Inline(b"more")).unwrap();
    c.try_post(Op::Datagram(from_c, None), Local::Memory(&[])).unwrap();
    assert_eq!(a.completions(), [Ok(Completed::Send)]);
    assert_eq!(c.completions(), [Ok(Completed::Send), Ok(Completed::Send)]);
    let taken: Vec<_> =
        b.taken().into_iter().map(|(completion, detail)| (completion.result, detail)).collect();
    let told = |len, immediate, from: &End| {
        let detail = Detail {
            bytes: len,
            source: Some(Source { number: from.pair.number(), ip4: true }),
            atomic: None,
        };
        (Ok(Completed::Recv { len, immediate }), detail)
    };
    assert_eq!(taken, [told(45, immediate, &a), told(44, None, &c), told(40, None, &c)]);
    assert_eq!([held(&b, 40, 5), held(&b, 1040, 4)], [b"hello".to_vec(), b"more".to_vec()]);
    let header = held(&b, 20, 20);
    assert_eq!([&header[..1], &header[12..]].concat(), [0x45, 192, 0, 2, 1, 192, 0, 2, 2]);
    // IPv4, UDP, BTH, DETH, the immediate, five bytes padded to eight, and the CRC.
    assert_eq!(header[2..4], [0, 20 + 8 + 12 + 8 + 4 + 8 + 4]);
    let sum = header.chunks(2).fold(0, |sum, pair| sum + u32::from(pair[0]) * 256 + u32::from(pair[1]));
    assert_eq!(sum % 0xffff, 0, "its checksum");
}

#[test]
fn of_ipv6_the_header_is_the_whole_one() {
    let fabric = Fabric::new();
    let [one, other]: [IpAddr; 2] = ["2001:db8::1", "2001:db8::2"].map(|ip| ip.parse().unwrap());
    let [a, b] = [one, other].map(|ip| for_datagrams(end(&fabric.host(&[ip]))));
    receives(&b, 1, 1000);
    let destination = Destination { local: one, remote: other, ..to(&b) };
    a.try_post(Op::Datagram(destination, None), Local::Inline(b"hello")).unwrap();
    let (IpAddr::V6(one), IpAddr::V6(other)) = (one, other) else { panic!() };
    assert_eq!([held(&b, 0, 1), held(&b, 4, 2)].concat(), [0x60, 0, 8 + 12 + 8 + 8 + 4]);
    let sources: Vec<_> = b.taken().into_iter().map(|(_, detail)| detail.source).collect();
    assert_eq!(sources, [Some(Source { number: a.pair.number(), ip4: false })]);
    assert_eq!(held(&b, 8, 37), [&one.octets()[..], &other.octets(), b"hello"].concat());
}

/// A datagram that finds no queue pair, another Q_Key or no receive: neither side is told.
#[test]
fn what_does_not_arrive_is_lost_in_silence() {
    let (_fabric, a, b) = two();
    let queues = [&b.queue, &b.queue];
    let connected =
        b.device.create_queue_pair(8, Service::Connected, &b.domain, queues, None, LIMITS).unwrap();
    let good = to(&b);
    receives(&b, 1, 1000);
    for lost in [
        Destination { key: KEY + 1, ..good },
        Destination { number: 1000, ..good },
        Destination { number: 0, ..good },
        Destination { remote: address(1), ..good },
        Destination { number: connected.number(), ..good },
    ] {
        a.try_post(Op::Datagram(lost, None), Local::Inline(b"lost")).unwrap();
        assert_eq!((a.completions(), b.completions()), (vec![Ok(Completed::Send)], vec![]), "{lost:?}");
    }
    // With the highest bit, the sender's own key counts.
    let own = Destination { key: 1 << 31, ..good };
    for received in [vec![Ok(Completed::Recv { len: 44, immediate: None })], vec![]] {
        a.try_post(Op::Datagram(own, None), Local::Inline(b"sent")).unwrap();
        assert_eq!((a.completions(), b.completions()), (vec![Ok(Completed::Send)], received));
    }
    assert_eq!((a.pair.state(), b.pair.state()), (Ok(PairState::Ready), Ok(PairState::Ready)));
}

#[test]
fn a_datagram_is_no_longer_than_a_packet_and_its_receive() {
    let (_fabric, a, b) = two();
    receives(&b, 1, 4135);
    a.try_post(Op::Datagram(to(&b), None), Local::Memory(&[a.sge(0, 4096)])).unwrap();
    assert_eq!(a.completions(), [Ok(Completed::Send)]);
    assert_eq!(b.completions(), [Err(CompletionStatus::LOC_LEN_ERR)], "one byte too many");
    assert_eq!(b.pair.state(), Ok(PairState::Error));
    a.try_post(Op::Datagram(to(&b), None), Local::Memory(&[a.sge(0, 4097)])).unwrap();
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_LEN_ERR)]);
}

#[test]
fn memory_that_is_not_there_fails_its_own_side() {
    let (_fabric, a, b) = two();
    receives(&b, 1, 1000);
    b.program.ended.store(true, Relaxed);
    a.try_post(Op::Datagram(to(&b), None), Local::Memory(&[a.sge(0, 8)])).unwrap();
    assert_eq!(a.completions(), [Ok(Completed::Send)]);
    assert_eq!(b.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    a.program.ended.store(true, Relaxed);
    a.try_post(Op::Datagram(to(&b), None), Local::Memory(&[a.sge(0, 8)])).unwrap();
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    let (_fabric, a, b) = two();
    a.try_post(Op::Datagram(to(&b), None), Local::Memory(&[Sge { lkey: 5, ..a.sge(0, 8) }])).unwrap();
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
}

#[test]
fn a_queue_pair_sends_what_it_is_for() {
    let (_fabric, a, b) = two();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    for op in [SendOp::Send, SendOp::Write(remote), SendOp::Read(remote)] {
        assert!(matches!(a.try_post(op.into(), Local::Memory(&[])), Err(Error::Argument(_))));
    }
    let foreign = Destination { local: address(2), ..to(&b) };
    let refused = a.try_post(Op::Datagram(foreign, None), Local::Memory(&[]));
    assert_eq!(refused, Err(Error::NotLocal(address(2))));
    let (_fabric, c, _d) = connected();
    let refused = c.try_post(Op::Datagram(to(&b), None), Local::Memory(&[]));
    assert!(matches!(refused, Err(Error::Argument(_))));
    assert!(matches!(c.pair.set_key(1), Err(Error::Argument(_))));
}

/// A receiver whose memory blocks the fabric costs its senders nothing. Its datagrams are stored in
/// order.
#[test]
fn a_receiver_whose_memory_is_kept_stops_no_sender() {
    let fabric = Fabric::new();
    let [a, c] = [1, 3].map(|last| for_datagrams(end(&fabric.host(&[address(last)]))));
    let (program, memory, begun, leave) = keeping();
    let b = for_datagrams(end_with(&fabric.host(&[address(2)]), program, memory));
    receives(&b, 8, 1000);
    for turn in 0..74 {
        let (sender, local) = if turn % 2 == 0 { (&a, 1) } else { (&c, 3) };
        let destination = Destination { local: address(local), ..to(&b) };
        let op = Op::Datagram(destination, Some(Immediate(turn)));
        sender.try_post(op, Local::Memory(&[sender.sge(0, 8)])).unwrap();
        assert_eq!(sender.completions(), [Ok(Completed::Send)]);
    }
    begun.recv().unwrap();
    assert_eq!(b.completions(), []);
    drop(leave);
    let mut received = Vec::new();
    let mut expected: Vec<_> = (0..8).collect();
    while received.len() < expected.len() {
        received.extend(b.taken().into_iter().map(|(completion, _)| completion.result));
    }
    // The others found no receive.
    let told = |number| Ok(Completed::Recv { len: 48, immediate: Some(Immediate(number)) });
    assert_eq!(received, expected.drain(..).map(told).collect::<Vec<_>>());
    drop((a, b, c));
    assert_eq!(fabric.resources(address(2)), Resources::default());
}
