//! A program may send the fabric anything. The fabric survives, and other programs are unaffected.

mod posts;
mod queue;
mod session;

use std::borrow::Cow;
use std::net::IpAddr;

use posts::Poster;
use proptest::prelude::*;
use queue::Queue;
use rustix::net::SendFlags;
use session::{address, ask, come, open, raw, serves};
use softrdma::fabric::Fabric;
use softrdma_wire::{
    Access, Connected, Connections, Destination, Fault, Local, MAX_BATCH, MAX_WORK, Op, Params, Post,
    Receive, Reply, Request, Send, Service, Sge, Transition, VERSION, When,
};

/// How many elements fit in a message.
const MOST_ELEMENTS: usize = 1200;

fn name() -> impl Strategy<Value = u32> {
    prop_oneof![0_u32..24, any::<u32>()]
}

fn sge() -> impl Strategy<Value = Sge> {
    (any::<u64>(), any::<u32>(), prop_oneof![0_u32..4096, any::<u32>()])
        .prop_map(|(address, len, lkey)| Sge { address, len, lkey })
}

fn op() -> impl Strategy<Value = Op> {
    (0..9, any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(kind, at, rkey, immediate)| match kind {
        0 => Op::Send,
        1 => Op::SendImmediate(immediate),
        2 => Op::Write { address: at, rkey },
        3 => Op::WriteImmediate { address: at, rkey, immediate },
        4 => Op::Read { address: at, rkey },
        5 => Op::FetchAdd { address: at, rkey, add: at },
        6 => Op::CompareSwap { address: at, rkey, compare: 0, swap: at },
        // Of any address, its own or not, to any queue pair.
        _ => {
            let to = Destination {
                local: address(at as u8 % 4),
                remote: address(immediate as u8 % 4),
                number: rkey % 8,
                key: rkey & 1,
            };
            Op::Datagram { to, immediate: (kind == 8).then_some(immediate) }
        }
    })
}

fn params() -> impl Strategy<Value = Params> {
    any::<[u8; 4]>().prop_map(|[responder_resources, initiator_depth, retry_count, rnr_retry_count]| Params {
        responder_resources,
        initiator_depth,
        retry_count,
        rnr_retry_count,
    })
}

fn transition() -> impl Strategy<Value = Transition> {
    prop_oneof![
        Just(Transition::Reset),
        Just(Transition::Initialise),
        Just(Transition::Fail),
        Just(Transition::ReceiveDatagrams),
        any::<bool>().prop_map(|notify| Transition::Drain { notify }),
        any::<u8>().prop_map(Transition::Timer),
        (any::<u8>(), any::<u8>(), any::<u8>()).prop_map(|(retry, rnr_retry, read_depth)| Transition::Send {
            retry,
            rnr_retry,
            read_depth
        }),
        (0..4_u8, 0..4_u8, 0..8_u32, any::<u8>()).prop_map(|(local, remote, number, timer)| {
            Transition::Receive { local: address(local), remote: address(remote), number, timer }
        }),
    ]
}

/// The data of a request, as long as a message allows.
static DATA: [u8; 300] = [9; 300];

fn request() -> impl Strategy<Value = Request<'static>> {
    let objects = prop_oneof![
        Just(Request::Status),
        (0..3_u32).prop_map(Request::AllocateDomain),
        any::<[u64; 2]>().prop_map(|[at, number]| Request::ShowMemory { at, number }),
        Just(Request::OfferMemory),
        name().prop_map(Request::FreeDomain),
        (name(), any::<u64>(), any::<u64>(), any::<u64>(), any::<[bool; 4]>()).prop_map(
            |(domain, at, address, len, [local_write, remote_write, remote_read, remote_atomic])| {
                let access = Access { local_write, remote_write, remote_read, remote_atomic };
                Request::Register { domain, at, address, len, access }
            }
        ),
        name().prop_map(Request::Deregister),
        Just(Request::CreateCompletionChannel),
        name().prop_map(Request::DestroyCompletionChannel),
        (0..3_u32, prop_oneof![1_u32..64, any::<u32>()], proptest::option::of(name())).prop_map(
            |(device, depth, channel)| Request::CreateQueue { device, depth, channel, vector: depth % 3 }
        ),
        name().prop_map(Request::DestroyQueue),
        name().prop_map(Request::Poll),
        (name(), 0_u32..64, 0_u32..64).prop_map(|(domain, depth, limit)| Request::CreateShared {
            domain,
            depth,
            limit,
            elements: 16,
        }),
        name().prop_map(Request::DestroyShared),
        (name(), any::<u32>()).prop_map(|(queue, limit)| Request::SetSharedLimit { queue, limit }),
        name().prop_map(Request::QueryShared),
        (name(), name(), name(), proptest::option::of(name()), 0_u32..64, 0_u32..64, any::<u32>()).prop_map(
            |(domain, send_queue, receive_queue, shared, send_depth, receive_depth, inline)| {
                Request::CreatePair {
                    domain,
                    send_queue,
                    receive_queue,
                    shared,
                    service: if inline % 2 == 0 { Service::Connected } else { Service::Datagram },
                    send_depth,
                    receive_depth,
                    elements: [16; 2],
                    inline,
                }
            }
        ),
        name().prop_map(Request::DestroyPair),
        (name(), transition()).prop_map(|(pair, to)| Request::Modify { pair, to }),
        (name(), any::<u8>()).prop_map(|(pair, timeout)| Request::SetTimeout { pair, timeout }),
        (name(), 0..2_u32).prop_map(|(pair, key)| Request::SetKey { pair, key }),
        (name(), any::<bool>()).prop_map(|(pair, set)| {
            let access =
                Access { local_write: false, remote_write: set, remote_read: !set, remote_atomic: set };
            Request::SetAccess { pair, access }
        }),
        (name(), any::<u8>()).prop_map(|(id, class)| Request::SetTrafficClass { id, class }),
        name().prop_map(Request::QueryPair),
        (0..3_u32).prop_map(Request::TakeAsyncEvent),
        (0..3_u32).prop_map(Request::AsyncEvents),
        // With a session this request is refused.
        (0..3_u8, any::<u32>()).prop_map(|(last, times)| Request::Inject {
            seed: None,
            faults: vec![Fault {
                address: address(last),
                connections: Connections::Pair(times),
                what: "lose".into(),
                when: When::Chance(times),
            }],
        }),
    ];
    let work = prop_oneof![
        (name(), proptest::collection::vec((op(), sge(), any::<[bool; 2]>(), 0_usize..300), 0..8)).prop_map(
            |(pair, work)| {
                let send = |(op, sge, [signaled, inline], len): (Op, Sge, [bool; 2], usize)| {
                    let local = if inline {
                        Local::Inline(Cow::Borrowed(&DATA[..len]))
                    } else {
                        Local::Memory(vec![sge; len % 20])
                    };
                    Send { id: 1, op, signaled, solicited: inline, local }
                };
                let work = work.into_iter().map(send).collect();
                Request::PostSend { pair, room: pair % 3, work }
            }
        ),
        (name(), sge(), 0..MAX_WORK + 2, 0..20_usize).prop_map(|(pair, sge, count, elements)| {
            let work = vec![
                Receive { id: 2, local: vec![sge; elements] };
                count.min(MOST_ELEMENTS / (elements + 1))
            ];
            Request::PostReceive { pair, work }
        }),
    ];
    let manager = prop_oneof![
        Just(Request::CreateEventChannel),
        name().prop_map(Request::DestroyEventChannel),
        name().prop_map(Request::TakeEvent),
        name().prop_map(|channel| Request::CreateIdentifier { channel }),
        name().prop_map(Request::DestroyIdentifier),
        (name(), 0..3_u8, 0..3_u16)
            .prop_map(|(id, last, port)| Request::Bind { id, address: (address(last), port).into() }),
        (name(), any::<u32>()).prop_map(|(id, backlog)| Request::Listen { id, backlog }),
        (name(), 0..3_u8, 0..3_u16, any::<u32>()).prop_map(|(id, last, port, milliseconds)| {
            let destination = (address(last), port).into();
            Request::ResolveAddress { id, source: None, destination, milliseconds }
        }),
        name().prop_map(Request::ResolveRoute),
        (name(), name(), params(), 0_usize..300).prop_map(|(id, pair, params, len)| Request::Connect {
            id,
            pair: if len % 2 == 0 { Connected::Managed(pair) } else { Connected::External(pair) },
            params,
            data: &DATA[..len]
        }),
        (name(), name(), params(), 0_usize..300).prop_map(|(id, pair, params, len)| Request::Accept {
            id,
            pair: if len % 2 == 0 { Connected::Managed(pair) } else { Connected::External(pair) },
            params,
            data: &DATA[..len]
        }),
        (name(), 0_usize..300).prop_map(|(id, len)| Request::Reject { id, data: &DATA[..len] }),
        name().prop_map(Request::Notify),
        name().prop_map(Request::Establish),
        name().prop_map(Request::Offered),
        name().prop_map(Request::Disconnect),
        (name(), name()).prop_map(|(id, channel)| Request::Migrate { id, channel }),
    ];
    prop_oneof![objects, work, manager]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Two programs send well-formed requests of any content in turn.
    #[test]
    fn requests_of_any_kind_are_answered(
        requests in proptest::collection::vec((any::<[bool; 2]>(), request()), 0..200)
    ) {
        let fabric = Fabric::new().expect("a fabric");
        let mut programs = [1, 2].map(|last| {
            let mut socket = open(&fabric, last);
            let queue = Queue::create(&mut socket, 8, None);
            (socket, queue.memory, Poster::default())
        });
        for ([second, posts], request) in requests {
            let [one, two] = &mut programs;
            let (socket, memory, poster) = if second { two } else { one };
            let post = match request {
                Request::PostSend { pair, work, .. } if posts => Post::Send { pair, work },
                Request::PostReceive { pair, work } if posts => Post::Receive { pair, work },
                request => {
                    // The test requires an answer; the model decides which.
                    ask(socket, &request);
                    continue;
                }
            };
            if poster.put(memory, &post) {
                socket.send(&Request::Doorbell, None).expect("the fabric takes it");
            }
        }
        serves(&fabric);
    }

    /// Bytes that are no request end the session that sent them, and no other.
    #[test]
    fn bytes_that_mean_nothing_end_their_session_alone(
        packets in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..300), 1..20)
    ) {
        let fabric = Fabric::new().expect("a fabric");
        let socket = raw(&fabric);
        for packet in &packets {
            // The fabric may have closed the session.
            let _sent = rustix::net::send(&socket, packet, SendFlags::NOSIGNAL);
        }
        serves(&fabric);
    }
}

#[test]
fn what_a_program_leaves_behind_goes_with_it() {
    let fabric = Fabric::new().expect("a fabric");
    let mut socket = open(&fabric, 1);
    for request in
        [Request::AllocateDomain(0), Request::CreateQueue { device: 0, depth: 4, channel: None, vector: 0 }]
    {
        assert!(matches!(ask(&mut socket, &request), Reply::Made(_) | Reply::Queue { .. }));
    }
    assert!(!fabric.is_deserted());
    drop(socket);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !fabric.is_deserted() {
        assert!(std::time::Instant::now() < deadline, "its session did not end");
        std::thread::yield_now();
    }
}

/// A program that reads no answers loses its session. Otherwise the thread that serves it would
/// wait as long as any process holds the socket, also one that does not know of it.
#[test]
fn a_program_that_reads_no_answers_is_not_waited_for() {
    let fabric = Fabric::new().expect("a fabric");
    let socket = raw(&fabric);
    let request = postcard::to_stdvec(&Request::Status).expect("encodes");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    while matches!(rustix::net::send(&socket, &request, flags), Ok(_) | Err(rustix::io::Errno::AGAIN)) {
        assert!(std::time::Instant::now() < deadline, "the fabric waits until its answers are read");
        std::thread::yield_now();
    }
}

#[test]
fn an_address_is_on_one_machine() {
    let fabric = Fabric::new().expect("a fabric");
    let _first = open(&fabric, 1);
    let mut second = come(&fabric);
    let mut come_with = |devices: Vec<Vec<IpAddr>>| {
        ask(&mut second, &Request::Hello { version: VERSION, program: String::new(), devices, above: 0 })
    };
    let refused = |errno: rustix::io::Errno| Reply::Refused(errno.raw_os_error());
    for taken in [vec![vec![address(1), address(2)]], vec![vec![address(2)], vec![address(1)]]] {
        assert_eq!(come_with(taken), refused(rustix::io::Errno::ADDRINUSE));
    }
    // A machine has devices and each has addresses, a bounded number of them; each address is on
    // one device, once.
    let many = (2..19).map(|last| vec![address(last)]).collect();
    let (twice, on_two) = (vec![vec![address(2); 2]], vec![vec![address(2)], vec![address(3), address(2)]]);
    for wrong in [vec![], vec![vec![]], twice, on_two, many] {
        assert_eq!(come_with(wrong), refused(rustix::io::Errno::INVAL));
    }
}

#[test]
fn faults_are_bounded() {
    let fabric = Fabric::new().expect("a fabric");
    let _machine = open(&fabric, 1);
    let mut socket = come(&fabric);
    let mut inject = |what: &str, count: usize, last: u8| {
        let when = if what == "kill" { When::Event(0) } else { When::Chance(1) };
        let fault = Fault { address: address(last), connections: Connections::All, what: what.into(), when };
        ask(&mut socket, &Request::Inject { seed: None, faults: vec![fault; count] })
    };
    let refused = |errno: rustix::io::Errno| Reply::Refused(errno.raw_os_error());
    assert_eq!(inject("lose", MAX_BATCH + 1, 1), refused(rustix::io::Errno::INVAL));
    // Pending faults count whether their machine exists or is awaited.
    for last in [1, 2, 1, 2] {
        assert_eq!(inject("lose", MAX_BATCH, last), Reply::Done);
    }
    assert_eq!(inject("lose", 1, 1), refused(rustix::io::Errno::NOMEM));
    assert_eq!(inject("lose", 1, 2), refused(rustix::io::Errno::NOMEM));
    // `kill` is never pending. No machine has this address.
    assert_eq!(inject("kill", MAX_BATCH, 2), Reply::Done);
}
