//! Memory of programs that does not come, and datagrams: nothing waits but what needs the memory.

mod queue;
mod session;
mod userfault;

use std::borrow::Cow;
use std::sync::Arc;

use queue::Queue;
use rdma_softsim::Parameters;
use rustix::io::Errno;
use session::{address, ask, open, serves};
use softrdma::fabric::Fabric;
use softrdma_wire::{
    Access, Completion, Destination, Local, Op, Receive, Reply, Request, Send, Service, Sge, Socket,
    Transition,
};
use userfault::{PAGE, Pages};

/// One request was posted.
const POSTED: Reply = Reply::Posted { count: 1, errno: 0, room: 0 };

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
        assert_eq!(ask(&mut self.socket, &receive), POSTED);
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

/// Makes three programs. The pages of the second one do not come until they are let go.
fn with_stuck_pages() -> Option<(Arc<Fabric>, Pages, [Program; 3])> {
    let stuck = Pages::new()?;
    let fabric = Fabric::new().expect("a fabric");
    let programs =
        [(1, pages()), (2, stuck.at), (3, pages())].map(|(last, at)| Program::new(&fabric, last, at));
    Some((fabric, stuck, programs))
}

/// A page that does not come stops only what is written to it: neither the writer's other queue
/// pairs, nor other programs, nor the requests of the program itself.
#[test]
fn a_page_that_does_not_come_stops_no_other_program() {
    let Some((fabric, stuck, [mut writer, mut owner, mut other])) = with_stuck_pages() else { return };
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
    assert_eq!(sender.post(own, 1, to(1)), POSTED);
    assert_eq!((sender.completion(), receiver.completion()), ((1, 0), (100, 0)));
}

/// A receiver of datagrams whose page does not come costs their sender nothing.
#[test]
fn a_datagram_waits_for_its_receiver_alone() {
    let Some((fabric, stuck, [mut sender, mut owner, mut other])) = with_stuck_pages() else { return };
    let own = sender.for_datagrams();
    let (to_owner, to_other) = (owner.for_datagrams(), other.for_datagrams());
    let to = |last: u8, (_, number): Pair| Op::Datagram {
        to: Destination { local: address(1), remote: address(last), number, key: 1 },
        immediate: None,
    };
    assert_eq!(sender.post(own, 1, to(2, to_owner)), POSTED);
    stuck.is_wanted();
    assert_eq!(sender.completion(), (1, 0));
    for id in 2..200 {
        assert_eq!(sender.post(own, id, to(2, to_owner)), POSTED);
        assert_eq!(sender.completion(), (id, 0));
    }
    assert_eq!(sender.post(own, 200, to(3, to_other)), POSTED);
    assert_eq!((sender.completion(), other.completion()), ((200, 0), (100, 0)));
    serves(&fabric);
    stuck.let_go();
    assert_eq!(owner.completion(), (100, 0));
}

/// An atomic operation on a page that does not come is done once it has come, and nothing else
/// waits for it.
#[test]
fn an_atomic_operation_waits_for_its_page() {
    let Some((_fabric, stuck, [mut writer, mut owner, mut other])) = with_stuck_pages() else { return };
    let (to_owner, _) = connected(&mut writer, &mut owner);
    let (to_other, _) = connected(&mut writer, &mut other);
    let add = |peer: &Program| Op::FetchAdd { address: peer.at + PAGE, rkey: peer.key, add: 1 };
    assert_eq!(writer.post(to_owner, 1, add(&owner)), POSTED);
    stuck.is_wanted();
    assert_eq!(writer.post(to_other, 2, add(&other)), POSTED);
    assert_eq!(writer.completion(), (2, 0));
    stuck.let_go();
    assert_eq!(writer.completion(), (1, 0));
}
