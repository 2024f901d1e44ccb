use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Instant;

use rdma_softsim::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use softrdma_wire::{Access, Completion, Local, Op, Request, Send, Sge, Transition};

use super::memory::Process;
use super::movers::Job;
use super::service::NAME;
use super::signals::{Backlog, QueueSignal, Records};
use super::*;

#[path = "../../tests/queue/mod.rs"]
mod queue;
#[path = "../../tests/shown/mod.rs"]
mod shown;
#[path = "../../tests/userfault/mod.rs"]
mod userfault;

use userfault::{PAGE, Pages};

/// So long that no thread is replaced, however slow the machine is.
const NEVER: Duration = Duration::from_secs(1 << 30);

/// A program with some bytes that peers may write to, and a queue pair.
struct Program {
    socket: Socket,
    address: IpAddr,
    queue: queue::Queue,
    pair: u32,
    number: u32,
    at: u64,
    key: u32,
}

impl Program {
    fn new(fabric: &Arc<Fabric>, last: u8) -> Self {
        Self::with_memory(fabric, last, Vec::leak(vec![0_u8; 64]).as_ptr().expose_provenance() as u64, 64)
    }

    fn with_memory(fabric: &Arc<Fabric>, last: u8, at: u64, len: u64) -> Self {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("sockets");
        fabric.admit(Socket::new(theirs));
        let address = IpAddr::from([192, 0, 2, last]);
        let mut socket = Socket::new(ours);
        let devices = vec![vec![address]];
        let hello = Request::Hello { version: wire::VERSION, program: String::new(), devices, above: 0 };
        socket.send(&hello, None).expect("the fabric listens");
        let (Reply::Welcome { .. }, _) = socket.receive().expect("the fabric answers") else {
            panic!("no session")
        };
        let queue = queue::Queue::create(&mut socket, 8, None);
        let mut program = Self { socket, address, queue, pair: 0, number: 0, at, key: 0 };
        assert_eq!(program.ask(&shown::shown()), Reply::Done);
        let Reply::Made(domain) = program.ask(&Request::AllocateDomain(0)) else { panic!("no domain") };
        let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
        let region = Request::Register { domain, at, address: at, len, access };
        let Reply::Region { key, .. } = program.ask(&region) else { panic!("no region") };
        let pair = Request::CreatePair {
            domain,
            send_queue: program.queue.name,
            receive_queue: program.queue.name,
            shared: None,
            service: softrdma_wire::Service::Connected,
            send_depth: 4,
            receive_depth: 4,
            elements: [16; 2],
            inline: 64,
        };
        let Reply::Pair { name: pair, number, .. } = program.ask(&pair) else { panic!("no pair") };
        Self { pair, number, key, ..program }
    }

    fn ask(&mut self, request: &Request<'_>) -> Reply {
        self.socket.send(request, None).expect("the fabric listens");
        self.socket.receive().expect("the fabric answers").0
    }

    fn connect(&mut self, peer: &Self) {
        let (local, remote, number, pair) = (self.address, peer.address, peer.number, self.pair);
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote, number, timer: 12 },
            Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
        ] {
            assert_eq!(self.ask(&Request::Modify { pair, to }), Reply::Done);
        }
    }

    fn write(&mut self, id: u64, peer: &Self) {
        let posted = self.ask(&self.request(id, peer.at, peer.key, Local::Inline((&[7; 64]).into())));
        assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
    }

    fn request<'a>(&self, id: u64, address: u64, rkey: u32, local: Local<'a>) -> Request<'a> {
        let op = Op::Write { address, rkey };
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        Request::PostSend { pair: self.pair, room: 0, work }
    }

    fn completed(&mut self) -> Vec<u64> {
        let some = self.queue.take_shown();
        assert!(some.iter().all(|completion| completion.status == 0), "{some:?}");
        some.iter().map(|&Completion { id, .. }| id).collect()
    }
}

fn with_movers(movers: &Arc<Movers>) -> Arc<Fabric> {
    let bounds = Bounds::of_this_process();
    Fabric::with_movers(Parameters::default(), bounds, Arc::clone(movers)).expect("a fabric")
}

fn connected(fabric: &Arc<Fabric>) -> [Program; 2] {
    connect(fabric, [1, 2].map(|last| Program::new(fabric, last)))
}

fn connect(fabric: &Arc<Fabric>, [mut one, mut other]: [Program; 2]) -> [Program; 2] {
    one.connect(&other);
    other.connect(&one);
    // A thread that probes memory for a registration reports the result before it leaves that
    // memory.
    let infos: Vec<_> = fabric.lock().sessions.values().flatten().map(Arc::clone).collect();
    until(|| infos.iter().all(|info| info.process.lane.is_free()));
    [one, other]
}

/// This process, as a program.
fn own(movers: &Arc<Movers>) -> Arc<Process> {
    let budget = Budget::new(Bounds::of_this_process());
    let taken = budget.program(std::process::id()).expect("this process").take(SESSION).expect("a session");
    Arc::new(Process::new(taken, movers))
}

/// Blocks a thread that serves no program until the sender is dropped.
fn keep(movers: &Arc<Movers>) -> Sender<()> {
    let own = own(movers);
    let (sender, receiver) = channel();
    let wait = move |_process: &Process| {
        let _dropped = receiver.recv();
    };
    movers.submit(&own, Job::Call(Box::new(wait)));
    sender
}

/// Waits until a condition holds that will hold.
fn until(mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < deadline, "it does not become so");
        std::thread::yield_now();
    }
}

#[test]
fn the_thread_that_serves_a_program_moves_its_bytes() {
    let movers = Movers::new(1, NEVER);
    let fabric = with_movers(&movers);
    let [mut one, other] = connected(&fabric);
    let kept = keep(&movers);
    for id in 0..50 {
        one.write(id, &other);
        assert_eq!(one.completed(), [id]);
    }
    drop(kept);
}

/// The thread that is in a program's memory takes the steps that others add there meanwhile.
#[test]
fn a_thread_takes_the_steps_of_others_in_the_same_memory() {
    let Some(pages) = Pages::new() else { return };
    let movers = Movers::new(1, NEVER);
    let fabric = with_movers(&movers);
    let programs = [Program::new(&fabric, 1), Program::with_memory(&fabric, 2, pages.at, 3 * PAGE)];
    let [mut one, mut stuck] = connect(&fabric, programs);
    let kept = keep(&movers);
    let write = one.request(1, stuck.at + PAGE, stuck.key, Local::Inline((&[7; 64]).into()));
    one.socket.send(&write, None).expect("the fabric listens");
    pages.is_wanted();
    let from = vec![Sge { address: stuck.at, len: 64, lkey: stuck.key }];
    let posted = stuck.ask(&stuck.request(2, one.at, one.key, Local::Memory(from)));
    assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
    assert_eq!(stuck.completed(), []);
    pages.let_go();
    until(|| stuck.completed() == [2]);
    until(|| one.completed() == [1]);
    drop(kept);
}

/// A program is woken when the thread has left the model.
#[test]
fn records_are_written_after_what_caused_them() {
    let (channel, end) = Records::new(&Arc::new(Backlog::new().expect("a backlog"))).expect("a channel");
    let signal = QueueSignal { queue: 7, channel: Arc::new(channel), vector: None };
    let is_readable = || {
        let mut fds = [PollFd::new(&end, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
    };
    signals::after(|| {
        signals::after(|| signal.raise());
        assert!(is_readable());
        assert_eq!(rustix::io::read(&end, &mut [0; wire::RECORD]), Ok(wire::RECORD));
        signal.raise();
        assert!(!is_readable());
    });
    assert!(is_readable());
}

/// For some time, only threads that serve no program take the steps of a slow program.
#[test]
fn bytes_of_a_slow_program_are_left_to_others() {
    let movers = Movers::new(1, NEVER);
    let fabric = with_movers(&movers);
    let [mut one, other] = connected(&fabric);
    for info in fabric.lock().sessions.values().flatten() {
        info.process.lane.distrust(1);
    }
    let kept = keep(&movers);
    one.write(1, &other);
    assert_eq!(one.completed(), []);
    drop(kept);
    until(|| one.completed() == [1]);
    // Its last step was fast.
    let kept = keep(&movers);
    one.write(2, &other);
    assert_eq!(one.completed(), [2]);
    drop(kept);
}

/// Who waits for a job in a program's memory waits as long as other jobs end there.
#[test]
fn a_job_behind_others_is_not_late() {
    let movers = Movers::new(1, NEVER);
    let own = own(&movers);
    let mut others = 0..5;
    let answer = own.lane.answer(|| {
        if others.next().is_none() {
            return Ok(7);
        }
        let before = own.lane.progress();
        movers.submit(&own, Job::Call(Box::new(|_process| {})));
        until(|| own.lane.progress() > before);
        Err(RecvTimeoutError::Timeout)
    });
    assert_eq!((answer, others.len()), (Some(7), 0));
    let mut times = 0;
    let answer = own.lane.answer(|| {
        times += 1;
        if times == 1 { Err(RecvTimeoutError::Timeout) } else { Ok(7) }
    });
    assert_eq!((answer, times), (None, 1));
}

/// The watch stays asleep while no bytes are moved.
#[test]
fn the_watch_sleeps_when_nothing_moves() {
    let movers = Movers::new(1, Duration::from_millis(1));
    let fabric = with_movers(&movers);
    let [mut one, other] = connected(&fabric);
    for id in 0..3 {
        until(|| movers.watch.is_asleep());
        one.write(id, &other);
        until(|| one.completed() == [id]);
    }
}

#[test]
fn a_message_holds_the_status_of_all_sessions_that_are_shown() {
    let session = wire::Session {
        program: "\u{10ffff}".repeat(NAME),
        pid: u32::MAX,
        devices: vec![vec![IpAddr::from([u8::MAX; 16])]; MOST_ADDRESSES],
        domains: u32::MAX,
        regions: u32::MAX,
        registered_bytes: u64::MAX,
        completion_queues: u32::MAX,
        queue_pairs: u32::MAX,
        identifiers: u32::MAX,
        requests: u64::MAX,
    };
    let failures = FailureClass::ALL.iter().map(|class| wire::Failure {
        words: class.words().into(),
        injected: u64::MAX,
        observed: u64::MAX,
    });
    let (sessions, failures) = (vec![session; SHOWN], failures.collect());
    let vectors = vec![u64::MAX; vectors::MOST as usize];
    let amounts = Amounts { memory: u64::MAX, descriptors: u64::MAX, sessions: u64::MAX };
    let exceeded = wire::Exceeded { resource: wire::Resource::Sessions, each: true, most: u64::MAX };
    let status = Reply::Status {
        sessions,
        struck: u64::MAX,
        failures,
        vectors,
        used: amounts,
        most: amounts,
        refused: vec![(exceeded, u64::MAX); 2 * wire::Resource::ALL.len()],
    };
    let len = postcard::to_allocvec(&status).expect("a message").len();
    assert!(len <= wire::MAX_MESSAGE, "{len}");
}
