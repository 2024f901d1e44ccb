//! Memory of programs that does not come, and datagrams: nothing waits but what needs the memory.

mod pairs;
mod session;
mod userfault;

use std::sync::Arc;

use pairs::{POSTED, Pair, Program, connected, pages};
use rdma_softsim::Parameters;
use rustix::io::Errno;
use session::{address, ask, serves};
use softrdma::fabric::Fabric;
use softrdma_wire::{Destination, Op, Reply, Request};
use userfault::{PAGE, Pages};

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
    let (to_owner, from_writer) = connected(&mut writer, &mut owner);
    writer.write(to_owner, 1, &owner);
    stuck.is_wanted();
    assert_eq!(writer.completion(), (1, RETRY_EXCEEDED));
    // The owner's memory may still be written to, and is not given back.
    let busy = Reply::Refused(Errno::BUSY.raw_os_error());
    assert_eq!(ask(&mut owner.socket, &Request::Deregister(owner.region)), busy);
    assert_eq!(ask(&mut owner.socket, &Request::DestroyPair(from_writer.0)), busy);
    assert!(matches!(ask(&mut owner.socket, &Request::AllocateDomain(0)), Reply::Made(_)));
    drop((writer, owner));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !fabric.is_deserted() {
        assert!(std::time::Instant::now() < deadline, "a session did not end");
        std::thread::yield_now();
    }
    stuck.let_go();
}

/// Memory is given back once its page has come and was written.
#[test]
fn memory_is_given_back_when_nothing_is_written_there_any_more() {
    let Some(stuck) = Pages::new() else { return };
    let (reach, ack_timeout) = (std::time::Duration::from_millis(20), std::time::Duration::from_millis(1));
    let parameters = Parameters { reach, ack_timeout, ..Parameters::default() };
    let fabric = Fabric::with_parameters(parameters).expect("a fabric");
    let mut writer = Program::new(&fabric, 1, pages());
    let mut owner = Program::new(&fabric, 2, stuck.at);
    let (to_owner, _) = connected(&mut writer, &mut owner);
    writer.write(to_owner, 1, &owner);
    stuck.is_wanted();
    let gives_back = Request::Deregister(owner.region);
    let busy = Reply::Refused(Errno::BUSY.raw_os_error());
    assert_eq!(ask(&mut owner.socket, &gives_back), busy);
    stuck.let_go();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while ask(&mut owner.socket, &gives_back) != Reply::Done {
        assert!(std::time::Instant::now() < deadline, "it is not given back");
    }
    assert_ne!(writer.completion().1, 0);
}

/// Such pages of several programs stop nothing else either, though one program writes to all of
/// them.
#[test]
fn pages_of_several_programs_that_do_not_come_stop_no_other_program() {
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
