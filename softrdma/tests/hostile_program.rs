//! A program may send the fabric anything. The fabric survives, and other programs are unaffected.

mod queue;
mod session;
mod userfault;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use queue::Queue;
use rdma_softsim::Parameters;
use rustix::net::SendFlags;
use session::{address, ask, come, open, raw};
use softrdma::fabric::Fabric;
use softrdma_wire::{
    Access, Completion, Connected, Connections, Destination, Fault, Local, MAX_BATCH, MAX_WORK, Op, Params,
    Receive, Reply, Request, Send, Service, Sge, Socket, Transition, VERSION, When,
};
use userfault::{PAGE, Pages};

/// Checks that an honest program is served.
fn serves(fabric: &Arc<Fabric>) {
    let mut socket = open(fabric, 250);
    assert!(matches!(ask(&mut socket, &Request::AllocateDomain(0)), Reply::Made(_)));
}

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
        any::<u64>().prop_map(|probe| Request::OfferMemory { probe }),
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
            limit
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
                let submits = work.len() % 2 == 1;
                let work = work.into_iter().map(send).collect();
                if submits {
                    Request::SubmitSend { pair, work }
                } else {
                    Request::PostSend { pair, room: pair % 3, work }
                }
            }
        ),
        (name(), sge(), 0..MAX_WORK + 2, 0..20_usize).prop_map(|(pair, sge, count, elements)| {
            let work = vec![
                Receive { id: 2, local: vec![sge; elements] };
                count.min(MOST_ELEMENTS / (elements + 1))
            ];
            if count % 2 == 1 {
                Request::SubmitReceive { pair, work }
            } else {
                Request::PostReceive { pair, work }
            }
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
        requests in proptest::collection::vec((any::<bool>(), request()), 0..200)
    ) {
        let fabric = Fabric::new().expect("a fabric");
        let mut programs = [open(&fabric, 1), open(&fabric, 2)];
        for (second, request) in &requests {
            let [one, two] = &mut programs;
            let program = if *second { two } else { one };
            if request.is_answered() {
                // The test requires an answer; the model decides which.
                ask(program, request);
            } else {
                program.send(request, None).expect("the fabric takes it");
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

/// A program with three pages that peers may write to.
struct Program {
    socket: Socket,
    last: u8,
    domain: u32,
    queue: Queue,
    key: u32,
    at: u64,
}

/// A queue pair: its name, and its number.
type Pair = (u32, u32);

impl Program {
    fn new(fabric: &Arc<Fabric>, last: u8, at: u64) -> Self {
        let mut socket = open(fabric, last);
        let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
        let queue = Queue::create(&mut socket, 8, None);
        let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
        let len = 3 * PAGE;
        let Reply::Region { key, .. } =
            ask(&mut socket, &Request::Register { domain, at, address: at, len, access })
        else {
            panic!("no region")
        };
        Self { socket, last, domain, queue, key, at }
    }

    fn pair(&mut self) -> Pair {
        self.pair_for(Service::Connected)
    }

    fn pair_for(&mut self, service: Service) -> Pair {
        let (domain, queue) = (self.domain, self.queue.name);
        let request = Request::CreatePair {
            domain,
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            service,
            send_depth: 4,
            receive_depth: 4,
            inline: 64,
        };
        let Reply::Pair { name, number, .. } = ask(&mut self.socket, &request) else { panic!("no pair") };
        (name, number)
    }

    fn connect(&mut self, (pair, _): Pair, peer: &Self, (_, number): Pair) {
        let (local, remote) = (address(self.last), address(peer.last));
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote, number, timer: 12 },
            Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
        ] {
            assert_eq!(ask(&mut self.socket, &Request::Modify { pair, to }), Reply::Done);
        }
    }

    /// Makes a queue pair for datagrams, with a receive in the middle page.
    fn for_datagrams(&mut self) -> Pair {
        let (pair, number) = self.pair_for(Service::Datagram);
        let to = |to| Request::Modify { pair, to };
        let local = vec![Sge { address: self.at + PAGE, len: 1000, lkey: self.key }];
        for request in [
            to(Transition::Initialise),
            Request::SetKey { pair, key: 1 },
            to(Transition::ReceiveDatagrams),
            to(Transition::Send { retry: 0, rnr_retry: 0, read_depth: 0 }),
        ] {
            assert_eq!(ask(&mut self.socket, &request), Reply::Done);
        }
        let receive = Request::PostReceive { pair, work: vec![Receive { id: 100, local }] };
        assert_eq!(ask(&mut self.socket, &receive), Reply::Posted { count: 1, errno: 0, room: 0 });
        (pair, number)
    }

    /// Posts one request with bytes of the first page.
    fn post(&mut self, (pair, _): Pair, id: u64, op: Op) -> Reply {
        let local = Local::Memory(vec![Sge { address: self.at, len: 8, lkey: self.key }]);
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        match ask(&mut self.socket, &Request::PostSend { pair, room: 0, work }) {
            Reply::Posted { count, errno, .. } => Reply::Posted { count, errno, room: 0 },
            other => other,
        }
    }

    /// Writes some bytes to the middle page of the peer.
    fn write(&mut self, (pair, _): Pair, id: u64, peer: &Self) {
        let op = Op::Write { address: peer.at + PAGE, rkey: peer.key };
        let local = Local::Inline(Cow::Borrowed(&[7; 64]));
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        let posted = ask(&mut self.socket, &Request::PostSend { pair, room: 0, work });
        assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
    }

    /// Waits for a completion. Returns its id and status.
    fn completion(&mut self) -> (u64, u32) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            if let Some(Completion { id, status, .. }) = self.queue.next() {
                return (id, status);
            }
            assert!(std::time::Instant::now() < deadline, "no completion");
            std::thread::yield_now();
        }
    }
}

/// Allocates ordinary memory of three pages.
fn pages() -> u64 {
    Vec::leak(vec![0_u8; 3 * PAGE as usize]).as_ptr().expose_provenance() as u64
}

fn connected(one: &mut Program, other: &mut Program) -> (Pair, Pair) {
    let (own, theirs) = (one.pair(), other.pair());
    one.connect(own, other, theirs);
    other.connect(theirs, one, own);
    (own, theirs)
}

/// A page that does not come stops only what is written to it: neither the writer's other queue
/// pairs, nor other programs, nor the requests of the program itself.
#[test]
fn a_page_that_does_not_come_stops_no_other_program() {
    let Some(stuck) = Pages::new() else { return };
    let fabric = Fabric::new().expect("a fabric");
    let mut writer = Program::new(&fabric, 1, pages());
    let mut owner = Program::new(&fabric, 2, stuck.at);
    let mut other = Program::new(&fabric, 3, pages());
    let (to_owner, _) = connected(&mut writer, &mut owner);
    let (to_other, from_other) = connected(&mut writer, &mut other);
    writer.write(to_owner, 1, &owner);
    stuck.is_wanted();
    for id in 2..20 {
        writer.write(to_other, id, &other);
        assert_eq!(writer.completion(), (id, 0));
        other.write(from_other, id, &writer);
        assert_eq!(other.completion(), (id, 0));
    }
    serves(&fabric);
    assert!(matches!(ask(&mut owner.socket, &Request::AllocateDomain(0)), Reply::Made(_)));
    stuck.let_go();
    assert_eq!(writer.completion(), (1, 0));
}

/// A writer to a page that never comes gets the error of a peer that does not answer, and its other
/// connections continue. Programs whose memory blocks the fabric can leave.
#[test]
fn a_page_that_never_comes_is_a_peer_that_does_not_answer() {
    /// `IBV_WC_RETRY_EXC_ERR`.
    const RETRY_EXCEEDED: u32 = 12;
    let Some(stuck) = Pages::new() else { return };
    let (reach, ack_timeout) = (std::time::Duration::from_millis(20), std::time::Duration::from_millis(1));
    let parameters = Parameters { reach, ack_timeout, ..Parameters::default() };
    let fabric = Fabric::with_parameters(parameters).expect("a fabric");
    let mut writer = Program::new(&fabric, 1, pages());
    let mut owner = Program::new(&fabric, 2, stuck.at);
    let (to_owner, _) = connected(&mut writer, &mut owner);
    writer.write(to_owner, 1, &owner);
    stuck.is_wanted();
    assert_eq!(writer.completion(), (1, RETRY_EXCEEDED));
    drop((writer, owner));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !fabric.is_deserted() {
        assert!(std::time::Instant::now() < deadline, "a session did not end");
        std::thread::yield_now();
    }
    stuck.let_go();
}

/// Such pages of several programs stop nothing else either, though one program writes to all of
/// them.
#[test]
fn pages_of_several_programs_that_do_not_come_stop_nobody_else() {
    let stuck: Option<Vec<_>> = (0..3).map(|_| Pages::new()).collect();
    let Some(stuck) = stuck else { return };
    let fabric = Fabric::new().expect("a fabric");
    let mut writer = Program::new(&fabric, 1, pages());
    let mut other = Program::new(&fabric, 2, pages());
    let (to_other, from_other) = connected(&mut writer, &mut other);
    let mut owners = Vec::new();
    for (last, stuck) in (3..).zip(&stuck) {
        let mut owner = Program::new(&fabric, last, stuck.at);
        let (to_owner, _) = connected(&mut writer, &mut owner);
        writer.write(to_owner, last.into(), &owner);
        stuck.is_wanted();
        owners.push((owner, to_owner));
        for id in 10..20 {
            writer.write(to_other, id, &other);
            assert_eq!(writer.completion(), (id, 0));
            other.write(from_other, id, &writer);
            assert_eq!(other.completion(), (id, 0));
        }
    }
    for ((owner, to_owner), (last, stuck)) in owners.iter().zip((3..).zip(stuck)) {
        stuck.let_go();
        assert_eq!(writer.completion(), (last, 0));
        writer.write(*to_owner, last + 100, owner);
        assert_eq!(writer.completion(), (last + 100, 0));
    }
    serves(&fabric);
}

/// A program's datagrams come from addresses of its own, and a queue pair sends what it is for.
#[test]
fn datagrams_name_their_sender() {
    use rustix::io::Errno;
    let fabric = Fabric::new().expect("a fabric");
    let mut sender = Program::new(&fabric, 1, pages());
    let mut receiver = Program::new(&fabric, 2, pages());
    let (own, theirs) = (sender.for_datagrams(), receiver.for_datagrams());
    let connected = sender.pair();
    let to = |local: u8| Op::Datagram {
        to: Destination { local: address(local), remote: address(2), number: theirs.1, key: 1 },
        immediate: None,
    };
    let refused = |errno: Errno| Reply::Posted { count: 0, errno: errno.raw_os_error(), room: 0 };
    assert_eq!(sender.post(own, 1, to(2)), refused(Errno::ADDRNOTAVAIL));
    assert_eq!(sender.post(own, 1, Op::Send), refused(Errno::INVAL));
    assert_eq!(sender.post(connected, 1, to(1)), refused(Errno::INVAL));
    // Of a queue pair of another program there is no name here.
    let key = Request::SetKey { pair: 1000, key: 1 };
    assert_eq!(ask(&mut sender.socket, &key), Reply::Refused(Errno::INVAL.raw_os_error()));
    assert_eq!(sender.post(own, 1, to(1)), Reply::Posted { count: 1, errno: 0, room: 0 });
    assert_eq!((sender.completion(), receiver.completion()), ((1, 0), (100, 0)));
}

/// A receiver of datagrams whose page does not come costs their sender nothing.
#[test]
fn a_datagram_waits_for_its_receiver_alone() {
    let Some(stuck) = Pages::new() else { return };
    let fabric = Fabric::new().expect("a fabric");
    let mut sender = Program::new(&fabric, 1, pages());
    let mut owner = Program::new(&fabric, 2, stuck.at);
    let mut other = Program::new(&fabric, 3, pages());
    let own = sender.for_datagrams();
    let (to_owner, to_other) = (owner.for_datagrams(), other.for_datagrams());
    let to = |last: u8, (_, number): Pair| Op::Datagram {
        to: Destination { local: address(1), remote: address(last), number, key: 1 },
        immediate: None,
    };
    assert_eq!(sender.post(own, 1, to(2, to_owner)), Reply::Posted { count: 1, errno: 0, room: 0 });
    stuck.is_wanted();
    assert_eq!(sender.completion(), (1, 0));
    for id in 2..200 {
        assert_eq!(sender.post(own, id, to(2, to_owner)), Reply::Posted { count: 1, errno: 0, room: 0 });
        assert_eq!(sender.completion(), (id, 0));
    }
    assert_eq!(sender.post(own, 200, to(3, to_other)), Reply::Posted { count: 1, errno: 0, room: 0 });
    assert_eq!((sender.completion(), other.completion()), ((200, 0), (100, 0)));
    serves(&fabric);
    stuck.let_go();
    assert_eq!(owner.completion(), (100, 0));
}

/// An atomic operation on a page that does not come is done once it has come, and nothing else
/// waits for it.
#[test]
fn an_atomic_operation_waits_for_its_page() {
    let Some(stuck) = Pages::new() else { return };
    let fabric = Fabric::new().expect("a fabric");
    let mut writer = Program::new(&fabric, 1, pages());
    let mut owner = Program::new(&fabric, 2, stuck.at);
    let mut other = Program::new(&fabric, 3, pages());
    let (to_owner, _) = connected(&mut writer, &mut owner);
    let (to_other, _) = connected(&mut writer, &mut other);
    let add = |peer: &Program| Op::FetchAdd { address: peer.at + PAGE, rkey: peer.key, add: 1 };
    assert_eq!(writer.post(to_owner, 1, add(&owner)), Reply::Posted { count: 1, errno: 0, room: 0 });
    stuck.is_wanted();
    assert_eq!(writer.post(to_other, 2, add(&other)), Reply::Posted { count: 1, errno: 0, room: 0 });
    assert_eq!(writer.completion(), (2, 0));
    stuck.let_go();
    assert_eq!(writer.completion(), (1, 0));
}
