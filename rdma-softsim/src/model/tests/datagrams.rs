//! Datagrams that wait for the memory of their receiver.

use std::sync::atomic::Ordering::Relaxed;

use super::freight::{AT, Far, LEN};
use super::*;
use crate::request::{Destination, Service};

/// Two queue pairs for datagrams. The memory of the second is in another process.
struct Two {
    model: Model,
    from: PairId,
    to: PairId,
    queue: QueueId,
    destination: Destination,
}

impl Two {
    fn new() -> Self {
        let (mut model, a, b) = hosts(Parameters::default());
        model.carry_bulks();
        let mut pair = |host| {
            let context = model.open(host).unwrap();
            let domain = model.create_domain_in(context).unwrap();
            let queue = model.create_queue_in(context, 1, 64).unwrap();
            let (send_queue, receive_queue, shared) = (queue, queue, None);
            let (service, limits) = (Service::Datagram, Setup::default().limits);
            let attributes = PairAttributes { domain, send_queue, receive_queue, shared, service, limits };
            let (pair, number, _) = model.create_pair_in(context, 2, &attributes).unwrap();
            model.initialise(pair).unwrap();
            model.begin_receiving_datagrams(pair).unwrap();
            model.begin_sending(pair, 0, 0, 0).unwrap();
            (pair, number, queue, domain)
        };
        let ((from, _, queue, _), (to, number, _, domain)) = (pair(a), pair(b));
        let memory: Arc<dyn ForeignMemory> = Arc::new(Far::new(0));
        let far = Bytes::Foreign { memory, len: LEN };
        let region = model.register_at(domain, AT, far, Access::LOCAL_WRITE).unwrap();
        let local = Parts::One(Part { region: region.id, offset: 0, len: 100 });
        model.post_named_receive(to, &PostedReceive { id: 1, local }).unwrap();
        let destination = Destination { local: ip(1), remote: ip(2), number, key: 0 };
        Self { model, from, to, queue, destination }
    }

    /// Sends eight bytes, which become 48.
    fn send(&mut self) {
        let request = Request { to: Some(self.destination), ..Request::new(1, SendOp::Send, true) };
        self.model.post_named(self.from, request, Payload::Inline(&[0; 8]), true).unwrap();
        self.model.ring(self.from);
        self.model.settle();
        assert_eq!(self.model.poll(self.queue, &mut [Completion::EMPTY; 2]).unwrap(), 1);
    }

    fn waiting(&self) -> usize {
        self.model.pairs.get(self.to).map_or(0, |pair| pair.responder.arrived.len())
    }

    fn held(&self) -> usize {
        self.model.flights.store.held.load(Relaxed)
    }
}

/// One queue pair has 64, and all together have 64 MiB and not much more. They end with it.
#[test]
fn waiting_datagrams_are_bounded_and_end_with_their_queue_pair() {
    let ends: [fn(&mut Model, PairId); 3] = [
        |model, id| model.reset(id).unwrap(),
        |model, id| model.end_pair(id).unwrap(),
        |model, id| model.destroy_pair(id),
    ];
    for end in ends {
        let mut two = Two::new();
        for _ in 0..80 {
            two.send();
        }
        // One is being stored. Those that found no place to wait are lost.
        assert_eq!((two.waiting(), two.held()), (64, 65 * 48));
        let stored = two.model.next_freight().expect("the first one");
        end(&mut two.model, two.to);
        assert_eq!((two.waiting(), two.held()), (0, 0));
        two.model.end_freight(stored);
        assert!(two.model.next_freight().is_none());
    }
    let mut two = Two::new();
    two.model.flights.store.held.store((64 << 20) - 100, Relaxed);
    for _ in 0..10 {
        two.send();
    }
    // The first is being stored. The third finds the last of the room, and passes the limit.
    assert_eq!((two.waiting(), two.held()), (2, (64 << 20) + 44));
}
