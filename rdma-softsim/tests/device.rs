//! Verbs below the seam: queue pairs that find each other by number, memory of other processes, private data.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_backend::{
    Access, AsyncEvent, CmEventKind, Completed, Completion, CompletionQueue as _, CompletionStatus,
    ConnectParams, EventChannel as _, Identifier as _, Immediate, QueuePair as _, QueuePairLimits,
    RemoteAddress, RnrTimer, SendOp,
};
use rdma_softsim::{
    About, Chance, CompletionQueue, Connections, Device, Domain, Error, Fabric, Fault, ForeignMemory,
    ForeignRegion, Load, Local, NamedReceive, NamedSend, PairState, Parameters, QueuePair, Resources, Sge,
    Signal, Site, SoftSim, Transition, When,
};

const BASE: u64 = 0x1000;
const LEN: usize = 600_000;
const LIMITS: QueuePairLimits = QueuePairLimits { send_depth: 8, recv_depth: 8, inline: 64 };
const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 2, rnr_retry_count: 7 };

/// Memory of a program that may end.
#[derive(Clone)]
struct Program {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: Arc<AtomicBool>,
}

impl ForeignMemory for Program {
    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + into.len()]);
        !self.ended.load(Relaxed)
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        !self.ended.load(Relaxed)
    }
}

/// Counts.
struct CountingSignal {
    count: AtomicU32,
    fd: OwnedFd,
}

impl CountingSignal {
    fn new() -> Arc<Self> {
        let (fd, _other) = rustix::pipe::pipe().unwrap();
        Arc::new(Self { count: AtomicU32::new(0), fd })
    }
}

impl AsFd for CountingSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Signal for CountingSignal {
    fn raise(&self) {
        self.count.fetch_add(1, Relaxed);
    }

    fn clear(&self) {}
}

/// One program with a queue pair. Fields are dropped in this order.
struct End {
    pair: QueuePair,
    region: ForeignRegion,
    queue: CompletionQueue,
    domain: Domain,
    device: Device,
    signals: Arc<CountingSignal>,
    program: Program,
}

fn end(host: &SoftSim) -> End {
    let program = Program { bytes: Arc::new(Mutex::new(vec![0; LEN])), ended: Arc::default() };
    end_with(host, program.clone(), Arc::new(program))
}

fn end_with(host: &SoftSim, program: Program, memory: Arc<dyn ForeignMemory>) -> End {
    let signals = CountingSignal::new();
    let device = host.open(CountingSignal::new()).unwrap();
    let domain = device.create_domain().unwrap();
    let signal: Arc<dyn Signal> = Arc::<CountingSignal>::clone(&signals);
    let queue = device.create_completion_queue(7, 16, signal).unwrap();
    let access = Access::REMOTE_WRITE.and(Access::REMOTE_READ);
    let region = domain.register_foreign(BASE, LEN, memory, access).unwrap();
    let pair = device.create_queue_pair(9, &domain, [&queue, &queue], None, LIMITS).unwrap();
    End { pair, region, queue, domain, device, signals, program }
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

/// Moves a queue pair to RTS, with the peer's number, as programs do that exchange it themselves.
fn connect(end: &End, own: u8, peer: u8, number: u32) {
    let to = |transition| end.pair.modify(transition).unwrap();
    assert_eq!(end.pair.state(), Ok(PairState::Reset));
    to(Transition::Initialise);
    to(Transition::Receive {
        local: address(own),
        remote: address(peer),
        number,
        timer: RnrTimer::MICROS_640,
    });
    to(Transition::Send { retry: 1, rnr_retry: 7, read_depth: 1 });
    assert_eq!(end.pair.state(), Ok(PairState::Ready));
    assert_eq!(end.pair.ends(), Some((address(own), address(peer), number)));
}

/// Memory that is reached by threads of their own, and keeps those that write while its gate is shut.
struct Keeping {
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
        let _nobody_listens = self.begun.send(());
        // Without a sender it is open.
        let _open = self.leave.lock().unwrap().recv();
        let written = self.program.write(offset, from);
        self.written.store(true, Relaxed);
        written
    }
}

/// Two ends, of which the second has such memory; who is in it, and the gate.
fn connected_to_keeping(fabric: Fabric) -> (Fabric, End, End, Arc<Keeping>, Receiver<()>, Sender<()>) {
    let ((begun, has_begun), (leave, may_leave)) = (channel(), channel());
    let program = Program { bytes: Arc::new(Mutex::new(vec![0; LEN])), ended: Arc::default() };
    let (leave_in, written) = (Mutex::new(may_leave), AtomicBool::new(false));
    let memory = Arc::new(Keeping { program: program.clone(), begun, leave: leave_in, written });
    let a = end(&fabric.host(&[address(1)]));
    let b = end_with(&fabric.host(&[address(2)]), program, Arc::<Keeping>::clone(&memory) as _);
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    (fabric, a, b, memory, has_begun, leave)
}

/// Waits for completions.
fn await_completions(end: &End) -> Vec<Result<Completed, CompletionStatus>> {
    loop {
        let completions = end.completions();
        if !completions.is_empty() {
            return completions;
        }
        std::thread::yield_now();
    }
}

/// Whoever is kept in one program's memory keeps nobody else: other queue pairs of the same peer, and other programs, go on.
#[test]
fn memory_that_keeps_who_writes_to_it_stops_nobody_else() {
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

/// Nobody writes to memory that was given back: who takes a queue pair or a region away waits for whoever is in its own memory for it.
#[test]
fn memory_is_given_back_when_nobody_writes_to_it() {
    for takes_region in [false, true] {
        let (fabric, a, b, memory, begun, leave) = connected_to_keeping(Fabric::new());
        a.post(SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() }), a.sge(0, 10));
        begun.recv().unwrap();
        let End { pair, region, queue, .. } = b;
        let number = pair.number();
        let (kept_pair, taken): (_, Box<dyn Send>) = match takes_region {
            true => (Some(pair), Box::new(region)),
            false => (None, Box::new((pair, region))),
        };
        let taking = std::thread::spawn(move || {
            drop(taken);
            memory.written.load(Relaxed)
        });
        // It has begun: the queue pair is reset, or the region is no more.
        loop {
            let found = fabric.connections().into_iter().find(|connection| connection.pair == number);
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
        assert!(taking.join().unwrap(), "the bytes were written before");
        drop((kept_pair, queue));
    }
}

/// A page that never comes: the writer gives up in time, and so does who takes the memory away.
#[test]
fn a_page_that_never_comes_is_given_up() {
    let (reach, ack_timeout) = (Duration::from_millis(20), Duration::from_millis(1));
    let parameters = Parameters { reach, ack_timeout, ..Parameters::default() };
    let (_fabric, a, b, _memory, begun, leave) = connected_to_keeping(Fabric::with_parameters(parameters));
    let op = SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() });
    // Not from its own memory, which may be reached too late on a busy machine.
    let local = Local::Inline(&[7; 10]);
    a.pair.post_named(&[NamedSend { id: 1, op, local, signaled: true, solicited: false }]).unwrap();
    begun.recv().unwrap();
    assert_eq!(await_completions(&a), [Err(CompletionStatus::RETRY_EXC_ERR)]);
    drop(b);
    drop(leave);
}

fn connected() -> (Fabric, End, End) {
    connected_on(Fabric::new())
}

fn connected_on(fabric: Fabric) -> (Fabric, End, End) {
    let ends = [1, 2].map(|last| end(&fabric.host(&[address(last)])));
    let [a, b] = ends;
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    (fabric, a, b)
}

impl End {
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: BASE + offset, len, lkey: self.region.key() }
    }

    fn post(&self, op: SendOp, local: Sge) {
        self.post_list(op, &[local]);
    }

    fn post_list(&self, op: SendOp, local: &[Sge]) {
        self.pair
            .post_named(&[NamedSend {
                id: 1,
                op,
                local: Local::Memory(local),
                signaled: true,
                solicited: false,
            }])
            .unwrap();
    }

    fn completions(&self) -> Vec<Result<Completed, CompletionStatus>> {
        let mut into = [Completion::EMPTY; 16];
        let count = self.queue.poll(&mut into).unwrap();
        into[..count].iter().map(|completion| completion.result.map_err(|error| error.status)).collect()
    }
}

#[test]
fn queue_pairs_find_each_other_by_number() {
    let (fabric, a, b) = connected();
    let sent: Vec<u8> = (0..500_000_u32).map(|place| (place % 251) as u8).collect();
    a.program.bytes.lock().unwrap()[..sent.len()].copy_from_slice(&sent);
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 0)] }]).unwrap();
    b.queue.arm().unwrap();
    let remote = RemoteAddress { address: BASE + 50_000, rkey: b.region.key() };
    a.post(SendOp::WriteImmediate(remote, Immediate(5)), a.sge(0, 500_000));
    assert_eq!(a.completions(), [Ok(Completed::Write)]);
    let mut taken = Vec::new();
    b.queue.poll_with_bytes(16, |completion, bytes| taken.push((completion.result, bytes))).unwrap();
    assert_eq!(taken, [(Ok(Completed::RecvWrite { immediate: Immediate(5) }), 500_000)]);
    assert_eq!(b.signals.count.load(Relaxed), 1, "the signal that was given");
    assert_eq!(b.program.bytes.lock().unwrap()[50_000..550_000], sent, "more than one reach");
    drop((a, b));
    assert_eq!(fabric.resources(address(1)), Resources::default());
}

/// A message is what its elements hold, one after the other, whatever those of the other side are (`ibv_post_send(3)`).
#[test]
fn elements_of_a_request_make_one_message() {
    let (_fabric, a, b) = connected();
    let sent: Vec<u8> = (0..60_u8).collect();
    a.program.bytes.lock().unwrap()[..60].copy_from_slice(&sent);
    // 10 and 30 bytes, and one that is empty and of no region.
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

/// One element of a wrong key is enough.
#[test]
fn an_element_of_a_wrong_key_fails_the_request() {
    let (_fabric, a, b) = connected();
    b.pair.post_named_receives(&[NamedReceive { id: 2, local: &[b.sge(0, 64)] }]).unwrap();
    a.post_list(SendOp::Send, &[a.sge(0, 8), Sge { lkey: a.region.key() ^ 1, ..a.sge(8, 8) }]);
    assert_eq!(a.completions(), [Err(CompletionStatus::LOC_PROT_ERR)]);
    assert_eq!(b.completions(), []);
}

/// Which of 64 requests are refused, by a fault that comes half of the time.
fn refused(seed: u64) -> Vec<bool> {
    let (fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    fabric.seed_faults(seed);
    let half = Chance { times: 500_000 };
    assert!(fabric.inject(address(1), Connections::All, Fault::QueueFull, Err(half)));
    let refused: Vec<_> = (0..64)
        .map(|_| {
            let work = NamedSend {
                id: 1,
                op: SendOp::Write(remote),
                local: Local::Inline(&[]),
                signaled: true,
                solicited: false,
            };
            while !a.completions().is_empty() {}
            a.pair.post_named(&[work]).is_err()
        })
        .collect();
    assert_eq!(fabric.faults_struck(), refused.iter().filter(|refused| **refused).count() as u64);
    refused
}

#[test]
fn faults_by_chance_follow_their_seed() {
    let first = refused(1);
    assert!(first.contains(&true) && first.contains(&false));
    assert_eq!(refused(1), first);
    assert_ne!(refused(2), first);
}

/// In real time, on a fabric without faults so far: times count from the injection.
#[test]
fn a_fault_strikes_a_fabric_in_real_time() {
    let (fabric, a, b) = connected();
    let remote = || RemoteAddress { address: BASE, rkey: b.region.key() };
    for _ in 0..3 {
        a.post(SendOp::Write(remote()), a.sge(0, 8));
    }
    assert!(
        !fabric.inject(address(3), Connections::All, Fault::KeyRefused, Ok(When::Event(0))),
        "there is no such host"
    );
    assert!(
        !fabric.inject(address(2), Connections::All, Fault::PairFatal, Err(Chance { times: 1 })),
        "it strikes by itself"
    );
    assert!(fabric.inject(address(2), Connections::All, Fault::KeyRefused, Ok(When::Pass(Site::Arrive, 2))));
    for _ in 0..2 {
        a.post(SendOp::Write(remote()), a.sge(0, 8));
    }
    let mut expected = vec![Ok(Completed::Write); 4];
    expected.push(Err(CompletionStatus::REM_ACCESS_ERR));
    assert_eq!(a.completions(), expected);
    assert_eq!(fabric.faults_struck(), 1);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::QpAccessErr, About::Pair(9))));
}

/// A fault of one connection spares the others of its host.
#[test]
fn a_fault_strikes_the_connection_that_it_names() {
    let (fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let now = Ok(When::Event(0));
    let inject = |connections| fabric.inject(address(2), connections, Fault::KeyRefused, now);
    for other in [
        Connections::Pair(a.pair.number()),
        Connections::Peer(address(3)),
        Connections::PeerAt((address(1), 1).into()),
    ] {
        assert!(inject(other));
        a.post(SendOp::Write(remote), a.sge(0, 8));
        assert_eq!(a.completions(), [Ok(Completed::Write)], "{other:?}");
    }
    let ours = Connections::Pair(b.pair.number());
    assert!(!fabric.inject(address(2), ours, Fault::DeviceFatal, now), "it strikes a device");
    let seen: Vec<_> = fabric.connections().into_iter().map(|seen| (seen.pair, seen.peer)).collect();
    assert_eq!(seen, [(a.pair.number(), Some(b.pair.number())), (b.pair.number(), Some(a.pair.number()))]);
    // The link of one connection: what is sent meanwhile comes later, and nobody is told of a port.
    assert!(fabric.inject(address(2), ours, Fault::LinkDown { micros: 1000 }, now));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), [], "it is lost");
    assert_eq!(b.device.next_event().unwrap(), None, "the port is as it was");
    let late = loop {
        match a.completions() {
            none if none.is_empty() => std::thread::yield_now(),
            some => break some,
        }
    };
    assert_eq!(late, [Ok(Completed::Write)]);
    assert!(inject(ours));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), [Err(CompletionStatus::REM_ACCESS_ERR)]);
    assert_eq!(fabric.faults_struck(), 2);
}

/// What happens to the device is told to everybody who opened it.
#[test]
fn a_link_that_goes_down_is_told_to_who_opened_the_device() {
    let (fabric, a, b) = connected();
    assert!(fabric.inject(address(1), Connections::All, Fault::LinkDown { micros: 1 }, Ok(When::Event(0))));
    a.post(SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() }), a.sge(0, 8));
    assert_eq!(a.device.next_event().unwrap(), Some((AsyncEvent::PortErr, About::Device)));
    assert_eq!(b.device.next_event().unwrap(), None);
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

/// Private data reaches the other side, padded to its field.
#[test]
fn the_connection_manager_connects_queue_pairs_of_the_device_and_brings_private_data() {
    let fabric = Fabric::new();
    let [a, b] = [1, 2].map(|last| fabric.host(&[address(last)]));
    let (active, passive) = (end(&a), end(&b));
    let listening = b.event_channel_with(CountingSignal::new()).unwrap();
    let listener = listening.create_id().unwrap();
    listener.bind((address(2), 0).into()).unwrap();
    listener.listen(0).unwrap();
    let channel = a.event_channel_with(CountingSignal::new()).unwrap();
    let id = channel.create_id().unwrap();
    id.resolve_address(None, listener.local_addr().unwrap(), Duration::from_secs(1)).unwrap();
    assert!(channel.next_event().unwrap().is_some());
    id.resolve_route(Duration::from_secs(1)).unwrap();
    assert!(channel.next_event().unwrap().is_some());
    assert!(id.connect_pair(&active.pair, &PARAMS, &[]).is_err(), "from INIT only");
    for end in [&active, &passive] {
        end.pair.modify(Transition::Initialise).unwrap();
    }
    id.connect_pair(&active.pair, &PARAMS, b"hello").unwrap();
    let told = listening.next_with_data().unwrap().unwrap();
    assert_eq!((told.data.len(), &told.data[..6]), (56, &b"hello\0"[..]));
    let CmEventKind::ConnectRequest { id: child, .. } = told.event.kind else { panic!("a request") };
    child.accept_pair(&passive.pair, &PARAMS, b"welcome").unwrap();
    let told = channel.next_with_data().unwrap().unwrap();
    assert!(matches!(told.event.kind, CmEventKind::Established { .. }));
    assert_eq!((told.data.len(), &told.data[..8]), (196, &b"welcome\0"[..]));
    passive.pair.post_named_receives(&[NamedReceive { id: 2, local: &[passive.sge(0, 64)] }]).unwrap();
    let inline = NamedSend {
        id: 1,
        op: SendOp::Send,
        local: Local::Inline(b"inline"),
        signaled: false,
        solicited: false,
    };
    active.pair.post_named(&[inline]).unwrap();
    assert_eq!(passive.completions(), [Ok(Completed::Recv { len: 6, immediate: None })]);
    assert_eq!(&passive.program.bytes.lock().unwrap()[..6], b"inline");
}

/// Two queue pairs take their receives from one queue, whose limit is told once.
#[test]
fn a_shared_queue_gives_its_receives_to_whoever_comes() {
    let (_fabric, a, b) = connected();
    let shared = b.device.create_shared_receives(11, &b.domain, 2, 0).unwrap();
    assert!(!shared.is_used());
    let queues = [&b.queue, &b.queue];
    let pair = b.device.create_queue_pair(12, &b.domain, queues, Some(&shared), LIMITS).unwrap();
    assert!(shared.is_used());
    // The peer of `a` is this one now.
    let b = End { pair, ..b };
    a.pair.modify(Transition::Reset).unwrap();
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    let receive = |id| NamedReceive { id, local: &[] };
    assert!(b.pair.post_named_receives(&[receive(1)]).is_err(), "it has no queue of its own");
    let full = shared.post(&[receive(1), receive(2), receive(3)]).unwrap_err();
    assert_eq!(full.posted, 2);
    shared.set_limit(2).unwrap();
    assert!(shared.set_limit(3).is_err());
    a.post_list(SendOp::Send, &[]);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::Other(15), About::Shared(11))));
    assert_eq!(shared.limit(), Ok(0), "the limit is told once");
    a.post_list(SendOp::Send, &[]);
    let received = Completed::Recv { len: 0, immediate: None };
    assert_eq!(b.completions(), [Ok(received); 2]);
    assert_eq!(b.device.next_event().unwrap(), None);
    // Receives that are shared are not flushed with one of those who share them.
    shared.post(&[receive(4)]).unwrap();
    b.pair.modify(Transition::Fail).unwrap();
    assert_eq!(b.completions(), []);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::Other(16), About::Pair(12))));
}

/// SQD: what is posted waits, and an event says that nothing is on its way; RTS lets it go on.
#[test]
fn a_drained_send_queue_waits() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    assert!(a.pair.modify(Transition::Drain { notify: true }).is_ok());
    assert_eq!(a.pair.state(), Ok(PairState::Draining));
    assert_eq!(a.device.next_event().unwrap(), Some((AsyncEvent::Other(5), About::Pair(9))));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), []);
    // It answers all the same.
    let back = RemoteAddress { address: BASE, rkey: a.region.key() };
    b.post(SendOp::Write(back), b.sge(0, 8));
    assert_eq!(b.completions(), [Ok(Completed::Write)]);
    a.pair.modify(Transition::Send { retry: 1, rnr_retry: 7, read_depth: 1 }).unwrap();
    assert_eq!(a.completions(), [Ok(Completed::Write)]);
    assert_eq!(a.device.next_event().unwrap(), None, "it was told once");
}

/// Of what was on its way the event waits for the end.
#[test]
fn draining_waits_for_what_is_on_its_way() {
    let (fabric, a, b) = connected();
    fabric.set_latency(Duration::from_millis(2));
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    a.post(SendOp::Write(remote), a.sge(0, 8));
    a.pair.modify(Transition::Drain { notify: true }).unwrap();
    a.post(SendOp::Write(remote), a.sge(0, 8));
    let told = loop {
        match a.device.next_event().unwrap() {
            None => std::thread::yield_now(),
            told => break told,
        }
    };
    assert_eq!(told, Some((AsyncEvent::Other(5), About::Pair(9))));
    assert_eq!(a.completions(), [Ok(Completed::Write)], "the first one, and not the second");
}

/// `ibv_req_notify_cq(3)`: who waits for solicited events is woken by such, and by what fails.
#[test]
fn solicited_events_come_when_they_are_asked_for() {
    let (_fabric, a, b) = connected();
    let receives: Vec<_> = (0..4).map(|id| NamedReceive { id, local: &[] }).collect();
    b.pair.post_named_receives(&receives).unwrap();
    let send = |solicited| {
        let local = Local::Inline(&[]);
        let work = NamedSend { id: 1, op: SendOp::Send, local, signaled: false, solicited };
        a.pair.post_named(&[work]).unwrap();
    };
    let raised = || b.signals.count.load(Relaxed);
    b.queue.arm_solicited().unwrap();
    send(false);
    assert_eq!(raised(), 0);
    send(true);
    assert_eq!(raised(), 1);
    b.queue.take_events().unwrap();
    b.queue.arm_solicited().unwrap();
    // Who asks for all is not asked to wait for fewer (`ibv_req_notify_cq(3)` has no way back).
    b.queue.arm().unwrap();
    b.queue.arm_solicited().unwrap();
    send(false);
    assert_eq!(raised(), 2);
    b.queue.take_events().unwrap();
    b.queue.arm_solicited().unwrap();
    b.pair.modify(Transition::Fail).unwrap();
    assert_eq!(raised(), 3, "the flush of the last receive");
}

/// `timeout` of a queue pair: for how long its retries last.
#[test]
fn a_queue_pair_has_a_time_out_of_its_own() {
    // The fabric's own ends nothing while this runs.
    let ack_timeout = Duration::from_secs(1 << 20);
    let parameters = Parameters { ack_timeout, ..Parameters::default() };
    let (fabric, a, b) = connected_on(Fabric::with_parameters(parameters));
    assert!(a.pair.set_ack_timeout(32).is_err());
    // 8 µs, and one retry.
    a.pair.set_ack_timeout(1).unwrap();
    fabric.set_link(address(2), rdma_softsim::Link::Down);
    a.post(SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() }), a.sge(0, 8));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let failed = loop {
        match a.completions() {
            none if none.is_empty() => {
                assert!(std::time::Instant::now() < deadline, "nothing ends the retries");
                std::thread::yield_now();
            }
            some => break some,
        }
    };
    assert_eq!(failed, [Err(CompletionStatus::RETRY_EXC_ERR)]);
}
