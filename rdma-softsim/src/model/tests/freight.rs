//! Messages with an end in another process while their bytes are in flight.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rdma_backend::RnrTimer;

use super::*;
use crate::model::flights::freight::Held;
use crate::request::{Atomic, Rights};

/// Where programs have their memory.
pub(super) const AT: u64 = 0x10_0000;
pub(super) const LEN: usize = 600_000;

/// Its bytes, and how many accesses of others have ended.
pub(super) struct Far(Mutex<Vec<u8>>, AtomicU64);

impl Far {
    pub(super) fn new(byte: u8) -> Self {
        Self(Mutex::new(vec![byte; LEN]), AtomicU64::new(0))
    }
}

impl ForeignMemory for Far {
    fn progress(&self) -> u64 {
        self.1.load(Relaxed)
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        into.copy_from_slice(&self.0.lock().unwrap()[offset..][..into.len()]);
        true
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.0.lock().unwrap()[offset..][..from.len()].copy_from_slice(from);
        true
    }
}

/// When a message without progress is given up, that may take this long.
fn given_up(patience: Duration) -> Duration {
    patience * 5 / 4
}

/// Two programs whose bytes the test moves, and their regions.
struct Programs {
    w: World,
    memory: [Arc<Far>; 2],
    regions: [Registration; 2],
}

impl Programs {
    fn new() -> Self {
        let mut w = World::new(&Setup::default());
        w.model.carry_bulks();
        let memory = [3, 0].map(|byte| Arc::new(Far::new(byte)));
        let mut register = |domain, far: &Arc<Far>| {
            let memory: Arc<dyn ForeignMemory> = Arc::<Far>::clone(far);
            let rights = Rights { access: Access::REMOTE_WRITE.and(Access::REMOTE_READ), atomics: true };
            w.model.register_at(domain, AT, Bytes::Foreign { memory, len: LEN }, rights).unwrap()
        };
        let regions = [register(w.a.domain, &memory[0]), register(w.b.domain, &memory[1])];
        Self { w, memory, regions }
    }

    fn post(&mut self, id: u64, op: impl FnOnce(RemoteAddress) -> SendOp, len: usize) {
        let op = op(RemoteAddress { address: AT, rkey: self.regions[1].rkey });
        let local = Part { region: self.regions[0].id, offset: 0, len };
        self.w.a.post_work(&mut self.w.model, Request::new(id, op, true), local, false).unwrap();
    }

    /// Adds 5 to the first number of the second program.
    fn add(&mut self, id: u64) {
        let op = SendOp::Read(RemoteAddress { address: AT, rkey: self.regions[1].rkey });
        let atomic = Some(Atomic::FetchAdd(5));
        let request = Request { atomic, ..Request::new(id, op, true) };
        let local = Part { region: self.regions[0].id, offset: 0, len: 8 };
        self.w.model.post_send(self.w.a.pair, request, local, false).unwrap();
        self.w.model.ring(self.w.a.pair);
        self.w.model.settle();
    }

    /// Returns the first number of each program.
    fn numbers(&self) -> [u64; 2] {
        self.memory.each_ref().map(|far| u64::from_ne_bytes(*far.0.lock().unwrap().first_chunk().unwrap()))
    }

    /// Takes the first step of a message, and no more.
    fn first_step(&mut self) -> Freight {
        let mut freight = self.w.model.next_freight().expect("a message is on its way");
        freight.step();
        freight
    }

    /// Takes all steps of a message, which then arrives.
    fn arrive(&mut self, mut freight: Freight) {
        while !freight.is_at_its_end() {
            freight.step();
        }
        self.w.model.end_freight(freight);
        self.w.model.settle();
    }

    fn completions(&mut self) -> Vec<(u64, Result<Completed, CompletionStatus>)> {
        self.w.a.completions(&mut self.w.model)
    }

    fn written(&self) -> usize {
        self.memory[1].0.lock().unwrap().iter().filter(|byte| **byte == 3).count()
    }
}

/// A queue pair that is destroyed while a message arrives gives back the receive it has reserved.
#[test]
fn a_reserved_receive_outlives_its_queue_pair() {
    let (mut model, a, b) = hosts(Parameters::default());
    model.carry_bulks();
    let [sends, receives] = [a, b].map(|host| {
        let context = model.open(host).unwrap();
        let domain = model.create_domain_in(context).unwrap();
        let queue = model.create_queue_in(context, 1, 64).unwrap();
        let memory: Arc<dyn ForeignMemory> = Arc::new(Far::new(3));
        let rights = Rights { access: Access::REMOTE_WRITE, atomics: false };
        let region = model.register_at(domain, AT, Bytes::Foreign { memory, len: LEN }, rights).unwrap();
        (context, domain, queue, Part { region: region.id, offset: 0, len: 4096 })
    });
    let shared = model.create_shared(receives.0, 10, receives.1, 8, 0).unwrap();
    for id in [1, 2] {
        model.post_shared(shared, &PostedReceive { id, local: Parts::One(receives.3) }).unwrap();
    }
    let pairs = [1, 2].map(|name| {
        let ends = [(sends, None), (receives, Some(shared))].map(|((context, domain, queue, _), shared)| {
            let (send_queue, receive_queue) = (queue, queue);
            let (service, limits) = (crate::Service::Connected, Setup::default().limits);
            let attributes = PairAttributes { domain, send_queue, receive_queue, shared, service, limits };
            model.create_pair_in(context, name, &attributes).unwrap().0
        });
        for (own, peer, [local, remote]) in [(0, 1, [ip(1), ip(2)]), (1, 0, [ip(2), ip(1)])] {
            let number = model.pairs.number(ends[peer]);
            model.initialise(ends[own]).unwrap();
            model.begin_receiving(ends[own], local, remote, number, RnrTimer::SLOWEST).unwrap();
            model.begin_sending(ends[own], 7, 7, 1).unwrap();
        }
        ends
    });
    for [sender, receiver] in pairs {
        model.post_send(sender, Request::new(9, SendOp::Send, true), sends.3, false).unwrap();
        model.ring(sender);
        model.settle();
        let mut freight = model.next_freight().expect("a message is on its way");
        if receiver == pairs[0][1] {
            model.destroy_pair(receiver);
        }
        while !freight.is_at_its_end() {
            freight.step();
        }
        model.end_freight(freight);
        model.settle();
    }
    let mut into = [Completion::EMPTY; 4];
    assert_eq!(model.poll(receives.2, &mut into), Ok(1));
    assert_eq!((into[0].id, into[0].result), (1, Ok(recv(4096))));
}

#[test]
fn what_is_behind_a_message_waits_until_its_bytes_are_there() {
    let mut p = Programs::new();
    p.post(1, SendOp::Write, 500_000);
    p.post(2, SendOp::Write, 0);
    p.post(3, SendOp::Read, 10);
    let first = p.first_step();
    assert!(p.w.model.next_freight().is_none(), "one message at a time");
    assert_eq!((p.completions(), p.written()), (vec![], 0));
    p.arrive(first);
    assert_eq!(p.completions(), [(1, Ok(Completed::Write)), (2, Ok(Completed::Write))]);
    assert_eq!(p.written(), 500_000);
    let read = p.first_step();
    assert_eq!(p.completions(), []);
    p.arrive(read);
    assert_eq!(p.completions(), [(3, Ok(Completed::Read))]);
}

/// A message that waits for others in the same memory is not late, and neither is a long one whose
/// own steps take long, together.
#[test]
fn a_message_is_late_only_without_progress() {
    let reach = Parameters::default().reach;
    for reads in [false, true] {
        let mut p = Programs::new();
        p.post(1, if reads { SendOp::Read } else { SendOp::Write }, LEN);
        let mut freight = if reads { p.w.model.next_freight().expect("a message") } else { p.first_step() };
        for _ in 0..10 {
            p.w.pass(reach);
            p.memory[1].1.fetch_add(1, Relaxed);
        }
        for _ in 0..4 {
            p.w.pass(reach);
            freight.step();
        }
        assert_eq!(p.completions(), []);
        p.arrive(freight);
        let done = if reads { Completed::Read } else { Completed::Write };
        assert_eq!(p.completions(), [(1, Ok(done))]);
        // Accesses to the memory that it does not wait for do not count.
        p.post(2, SendOp::Write, LEN);
        let kept = p.w.model.next_freight().expect("a message");
        // Five looks, a quarter of the time apart. The first only begins to count.
        for _ in 0..5 {
            p.memory[1].1.fetch_add(1, Relaxed);
            p.w.pass(reach / 4);
        }
        assert_eq!(p.completions(), [(2, Err(CompletionStatus::LOC_PROT_ERR))]);
        p.arrive(kept);
    }
}

/// A page of the peer's that never comes makes the peer unresponsive: the requester retries, and
/// gives up.
#[test]
fn a_peer_whose_memory_is_not_reached_does_not_answer() {
    let mut p = Programs::new();
    let parameters = Parameters::default();
    p.post(1, SendOp::Write, 10);
    // Read, and not written.
    let mut kept = vec![p.first_step()];
    p.w.pass(given_up(parameters.reach) - millis(1));
    assert_eq!(p.completions(), []);
    p.w.pass(millis(1));
    for _ in 0..PARAMS.retry_count {
        assert!(p.w.model.next_freight().is_none(), "the requester waits for the acknowledgement");
        p.w.pass(parameters.ack_timeout);
        // A repetition has no more time than that.
        kept.push(p.first_step());
        assert_eq!(p.completions(), []);
        p.w.pass(given_up(parameters.ack_timeout));
    }
    p.w.pass(parameters.ack_timeout);
    assert_eq!(p.completions(), [(1, Err(CompletionStatus::RETRY_EXC_ERR))]);
    // Late arrivals cause no event.
    for freight in kept {
        p.arrive(freight);
    }
    assert_eq!((p.completions(), p.written()), (vec![], 0));
}

#[test]
fn a_repetition_that_is_reached_is_acknowledged() {
    let mut p = Programs::new();
    let parameters = Parameters::default();
    p.post(1, SendOp::Write, 10);
    let late = p.first_step();
    p.w.pass(given_up(parameters.reach));
    p.w.pass(parameters.ack_timeout);
    p.arrive(late);
    assert_eq!(p.completions(), []);
    let again = p.w.model.next_freight().expect("again");
    p.arrive(again);
    assert_eq!((p.completions(), p.written()), (vec![(1, Ok(Completed::Write))], 10));
    // From then on there is as much time as before.
    p.post(2, SendOp::Write, 10);
    let kept = p.first_step();
    p.w.pass(parameters.reach - millis(1));
    p.arrive(kept);
    assert_eq!(p.completions(), [(2, Ok(Completed::Write))]);
}

/// A page of the requester's own that never comes is one that its device cannot access, in either
/// direction.
#[test]
fn own_memory_that_is_not_reached_is_a_local_error() {
    for reads in [false, true] {
        let mut p = Programs::new();
        p.post(1, if reads { SendOp::Read } else { SendOp::Write }, 10);
        let kept = match reads {
            true => p.first_step(),
            false => p.w.model.next_freight().expect("a message"),
        };
        p.w.pass(given_up(Parameters::default().reach));
        assert_eq!(p.completions(), [(1, Err(CompletionStatus::LOC_PROT_ERR))]);
        p.arrive(kept);
        assert_eq!(p.written(), 0);
    }
}

/// A message that ends before its bytes are there is not executed, and nothing waits for it.
#[test]
fn a_message_ends_with_its_queue_pairs_and_its_target() {
    // The requester's queue pair fails: flushed at once.
    let mut p = Programs::new();
    p.post(1, SendOp::Write, 10);
    let kept = p.first_step();
    p.w.model.end_pair(p.w.a.pair).unwrap();
    assert_eq!(p.completions(), [(1, Err(CompletionStatus::WR_FLUSH_ERR))]);
    p.arrive(kept);
    assert_eq!(p.written(), 0);
    // The responder's is gone: there is no answer.
    let mut p = Programs::new();
    p.post(1, SendOp::Write, 10);
    let kept = p.first_step();
    p.w.model.destroy_pair(p.w.b.pair);
    p.arrive(kept);
    assert_eq!((p.completions(), p.written()), (vec![], 0));
    p.w.pass(Parameters::default().ack_timeout * 8);
    assert_eq!(p.completions(), [(1, Err(CompletionStatus::RETRY_EXC_ERR))]);
    // The target is deregistered.
    let mut p = Programs::new();
    p.post(1, SendOp::Write, 10);
    let kept = p.first_step();
    p.w.model.deregister(p.regions[1].id);
    p.w.model.settle();
    assert_eq!(p.completions(), [(1, Err(CompletionStatus::REM_ACCESS_ERR))]);
    p.arrive(kept);
    assert_eq!(p.written(), 0);
}

/// The bytes held for messages in flight are bounded: beyond that each has a page.
#[test]
fn what_is_held_on_the_way_is_given_back() {
    let mut p = Programs::new();
    p.post(1, SendOp::Write, LEN);
    let kept = p.first_step();
    assert_eq!(p.w.model.flights.store.held.load(Relaxed), 256 * 1024);
    p.arrive(kept);
    assert_eq!(p.w.model.flights.store.held.load(Relaxed), 0);
    assert_eq!(p.written(), LEN);
    p.w.model.flights.store.held.store(64 << 20, Relaxed);
    p.post(2, SendOp::Write, LEN);
    let kept = p.first_step();
    assert_eq!(p.w.model.flights.store.held.load(Relaxed), (64 << 20) + 4096);
    p.arrive(kept);
    assert_eq!(p.completions(), [(1, Ok(Completed::Write)), (2, Ok(Completed::Write))]);
}

/// A long message uses the buffer of an earlier one, and eight buffers are kept.
#[test]
fn a_few_buffers_are_kept_for_later_messages() {
    let mut p = Programs::new();
    for id in 1..4 {
        p.post(id, SendOp::Write, LEN);
        let kept = p.first_step();
        assert_eq!(p.w.model.flights.store.spare().len(), 0, "message {id}");
        p.arrive(kept);
        assert_eq!(p.w.model.flights.store.spare().len(), 1, "message {id}");
    }
    let mut many = [(); 10].map(|()| Held::new(&p.w.model.flights.store));
    many.iter_mut().for_each(|held| held.widen(256 * 1024));
    drop(many);
    assert_eq!(p.w.model.flights.store.spare().len(), 8);
    // Shorter ones are not kept.
    Held::new(&p.w.model.flights.store).widen(4096);
    assert_eq!(p.w.model.flights.store.spare().iter().map(Vec::len).sum::<usize>(), 8 * 256 * 1024);
}

/// An atomic operation whose answer the link loses is done once, and its repetition is answered.
#[test]
fn an_atomic_operation_is_not_done_again() {
    let mut p = Programs::new();
    p.add(1);
    let freight = p.first_step();
    p.w.model.set_link(ip(2), Link::Down);
    p.arrive(freight);
    assert_eq!(p.completions(), []);
    p.w.model.set_link(ip(2), Link::Up);
    p.w.pass(Parameters::default().ack_timeout);
    assert!(p.w.model.next_freight().is_none(), "it is not moved again");
    assert_eq!((p.completions(), p.numbers()), (vec![(1, Ok(Completed::Read))], [0, 5]));
}

/// Nor if the timer of a message before it ends meanwhile, whether its page comes or not.
#[test]
fn an_atomic_operation_outlasts_a_timer_and_is_not_done_again() {
    let parameters = Parameters::default();
    for comes in [true, false] {
        let mut p = Programs::new();
        p.post(1, SendOp::Write, 1);
        let mut write = p.first_step();
        write.step();
        p.w.model.end_freight(write);
        // The answer is lost.
        p.w.model.set_link(ip(2), Link::Down);
        p.w.model.settle();
        p.w.model.set_link(ip(2), Link::Up);
        p.add(2);
        let kept = p.w.model.next_freight().expect("the operation");
        p.w.pass(parameters.ack_timeout);
        if !comes {
            p.w.pass(given_up(parameters.reach));
        }
        p.arrive(kept);
        assert!(p.w.model.next_freight().is_none(), "it is not moved again");
        // The WRITE has made the number 3. The requester's own was all threes, until 3 is stored.
        let (result, numbers) = match comes {
            true => (Ok(Completed::Read), [3, 8]),
            false => (Err(CompletionStatus::REM_OP_ERR), [0x0303_0303_0303_0303, 3]),
        };
        assert_eq!(p.completions(), [(1, Ok(Completed::Write)), (2, result)]);
        assert_eq!(p.numbers(), numbers);
    }
}

/// Nor if its result cannot be stored, even behind a message that was repeated.
#[test]
fn an_atomic_operation_without_a_result_is_not_done_again() {
    let parameters = Parameters::default();
    let latency = millis(1);
    let mut p = Programs::new();
    p.w.model.set_latency(latency);
    p.post(1, SendOp::Write, 1);
    p.add(2);
    p.w.pass(latency);
    // Given up, and repeated. From then on each message has only the time of an answer.
    let _late = p.first_step();
    p.w.pass(given_up(parameters.reach));
    p.w.pass(parameters.ack_timeout);
    p.w.pass(latency);
    let again = p.w.model.next_freight().expect("the repetition");
    p.arrive(again);
    // The number is changed, and the old one does not reach its own program in time.
    let done = p.first_step();
    p.w.pass(parameters.ack_timeout);
    p.w.pass(parameters.ack_timeout);
    p.arrive(done);
    assert!(p.w.model.next_freight().is_none(), "it is not moved again");
    let result = Err(CompletionStatus::LOC_PROT_ERR);
    assert_eq!(p.completions(), [(1, Ok(Completed::Write)), (2, result)]);
    assert_eq!(p.numbers()[1], 8);
}

/// A number in memory that was taken away is not changed.
#[test]
fn an_atomic_operation_ends_with_its_region() {
    let mut p = Programs::new();
    p.add(1);
    let kept = p.w.model.next_freight().expect("the operation");
    p.w.model.deregister(p.regions[1].id);
    p.w.model.settle();
    assert_eq!(p.completions(), [(1, Err(CompletionStatus::REM_ACCESS_ERR))]);
    p.arrive(kept);
    assert_eq!(p.numbers()[1], 0);
}
