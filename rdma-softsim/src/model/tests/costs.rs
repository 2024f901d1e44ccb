//! What a call costs does not depend on how many objects there are, of its program and of others.
//!
//! Each call holds the fabric's lock. So each is made among a few objects of every kind and among
//! many, on the same host, in the same domain and on the same queue where that is possible. It must
//! look at as many of them in either case. Faults are the exception: one that strikes a device
//! strikes all that is on it.

use rdma_backend::{AsyncEvent, RnrTimer};

use super::*;
use crate::faults::{Connections, Fault, When};
use crate::model::base::arena::visits;
use crate::model::hosts::context::About;
use crate::model::manager::identifier::MOST_UNREAD;
use crate::request::Service;

/// Memory of a program, whose bytes have no meaning.
struct Anything;

impl ForeignMemory for Anything {
    fn read(&self, _offset: usize, _into: &mut [u8]) -> bool {
        true
    }

    fn write(&self, _offset: usize, _from: &[u8]) -> bool {
        true
    }
}

/// Where each region is, and its length.
const AT: u64 = 0x1000;
const LEN: usize = 64;

/// A program that has an object of each kind, beside others.
struct Crowded {
    model: Model,
    /// The program's, and its peer's.
    ends: [End; 2],
    /// An identifier that listens, on the channel of the program.
    channel: ChannelId,
    listener: IdentifierId,
    /// A queue pair on the program's queue, in its domain.
    pair: PairId,
    /// Messages of the others that are in flight.
    _kept: Vec<Freight>,
}

/// A connected queue pair, with what belongs to it.
#[derive(Clone, Copy)]
struct End {
    host: HostId,
    context: ContextId,
    domain: DomainId,
    queue: QueueId,
    pair: PairId,
    region: Registration,
}

const LIMITS: QueuePairLimits = QueuePairLimits { send_depth: 8, recv_depth: 8, inline: 64 };
/// A dynamic port, the first one.
const DYNAMIC: u16 = 49152;

fn address(host: u32) -> IpAddr {
    IpAddr::from((u32::from_be_bytes([10, 1, 0, 0]) + host).to_be_bytes())
}

fn attributes(domain: DomainId, queue: QueueId) -> PairAttributes {
    let (send_queue, receive_queue, service) = (queue, queue, Service::Connected);
    PairAttributes { domain, send_queue, receive_queue, shared: None, service, limits: LIMITS }
}

fn region(model: &mut Model, domain: DomainId) -> Registration {
    let memory: Arc<dyn ForeignMemory> = Arc::new(Anything);
    let access = Access::REMOTE_WRITE.and(Access::REMOTE_READ).and(Access::LOCAL_WRITE);
    model.register_at(domain, AT, Bytes::Foreign { memory, len: LEN }, access).unwrap()
}

fn end(model: &mut Model, number: u32) -> End {
    let host = model.add_host(&[address(number)], Limits::default());
    let context = model.open(host).unwrap();
    let domain = model.create_domain_in(context).unwrap();
    let queue = model.create_queue_in(context, 1, 1 << 16).unwrap();
    let (pair, ..) = model.create_pair_in(context, 2, &attributes(domain, queue)).unwrap();
    End { host, context, domain, queue, pair, region: region(model, domain) }
}

fn connect(model: &mut Model, pair: PairId, [local, remote]: [IpAddr; 2], peer: PairId) {
    let number = model.pairs.number(peer);
    model.initialise(pair).unwrap();
    model.begin_receiving(pair, local, remote, number, RnrTimer::SLOWEST).unwrap();
    model.begin_sending(pair, 7, 7, 1).unwrap();
}

/// Posts a WRITE from one region to another.
fn write(model: &mut Model, pair: PairId, from: Registration, to: Registration) {
    let op = SendOp::Write(RemoteAddress { address: AT, rkey: to.rkey });
    let local = Part { region: from.id, offset: 0, len: 8 };
    model.post_send(pair, Request::new(1, op, true), local, false).unwrap();
    model.ring(pair);
    model.settle();
}

impl Crowded {
    /// Makes the program, and `count` further objects of each kind.
    fn new(count: u32) -> Self {
        let mut model = Model::new(Parameters::default());
        model.carry_bulks();
        let ends = [0, 1].map(|number| end(&mut model, number));
        let [own, peer] = ends;
        for (one, other, addresses) in [(own, peer, [0, 1]), (peer, own, [1, 0])] {
            connect(&mut model, one.pair, addresses.map(address), other.pair);
        }
        let channel = model.create_channel(own.host).unwrap();
        let (listener, _) = model.listen(channel, SocketAddr::new(address(0), PORT), 0).unwrap();
        let (pair, ..) = model.create_pair_in(own.context, 3, &attributes(own.domain, own.queue)).unwrap();
        let mut kept = Vec::new();
        for number in 2..2 + count {
            let other = end(&mut model, number);
            // On the host of the program, beside its own.
            model.open(own.host).unwrap();
            model.create_domain_in(own.context).unwrap();
            model.create_queue_in(own.context, 4, 8).unwrap();
            region(&mut model, own.domain);
            let (id, _) = model.create_identifier(channel).unwrap();
            model.resolve_address(id, None, SocketAddr::new(address(1), PORT), millis(1)).unwrap();
            let (awaits, _) = model.create_identifier(channel).unwrap();
            model.resolve_address(awaits, None, SocketAddr::new(ip(9), PORT), millis(1 << 30)).unwrap();
            model.listen(channel, SocketAddr::new(address(0), DYNAMIC + number as u16), 0).unwrap();
            // Its message is in flight between the regions of others, its completion waits.
            let attributes = attributes(own.domain, own.queue);
            let (beside, ..) = model.create_pair_in(own.context, 5, &attributes).unwrap();
            connect(&mut model, beside, [0, number].map(address), other.pair);
            connect(&mut model, other.pair, [number, 0].map(address), beside);
            let to = region(&mut model, own.domain);
            write(&mut model, other.pair, other.region, to);
            kept.extend(model.next_freight());
            let (ends, ..) = model.create_pair_in(own.context, 6, &attributes).unwrap();
            model.initialise(ends).unwrap();
            let receive = PostedReceive { id: 1, local: [].into_iter().collect() };
            model.post_named_receive(ends, &receive).unwrap();
            model.end_pair(ends).unwrap();
        }
        model.settle();
        assert_eq!(
            (kept.len(), model.queues.get(own.queue).unwrap().waiting()),
            (count as usize, count as usize)
        );
        Self { model, ends, channel, listener, pair, _kept: kept }
    }

    /// Writes from the program to its peer, and returns the message in flight.
    fn write(&mut self) -> Freight {
        let [own, peer] = self.ends;
        write(&mut self.model, own.pair, own.region, peer.region);
        self.model.next_freight().unwrap()
    }

    /// Lends an identifier a new queue pair of one end.
    fn lend(&mut self, end: usize, id: IdentifierId) {
        let End { context, domain, queue, .. } = self.ends[end];
        let (pair, ..) = self.model.create_pair_in(context, 9, &attributes(domain, queue)).unwrap();
        self.model.initialise(pair).unwrap();
        self.model.lend_pair(id, pair).unwrap();
    }

    /// The peer asks to be connected to the program. Returns its channel and its identifier.
    fn asks(&mut self) -> (ChannelId, IdentifierId) {
        let own = self.model.create_channel(self.ends[1].host).unwrap();
        let id = resolved(&mut self.model, own, address(0));
        self.lend(1, id);
        self.model.connect(id, &PARAMS, &[]).unwrap();
        self.model.settle();
        (own, id)
    }
}

type Call = fn(&mut Crowded);

/// The calls, each on a program of its own. What one needs that was not there is made by it.
const CALLS: &[(&str, Call)] = &[
    ("ibv_open_device", |c| {
        let opened = c.model.open(c.ends[0].host).unwrap();
        c.model.close(opened);
    }),
    ("ibv_alloc_pd", |c| {
        c.model.create_domain_in(c.ends[0].context).unwrap();
    }),
    ("ibv_dealloc_pd", |c| {
        let domain = c.model.create_domain_in(c.ends[0].context).unwrap();
        c.model.destroy_domain(domain);
    }),
    ("ibv_reg_mr", |c| {
        region(&mut c.model, c.ends[0].domain);
    }),
    ("ibv_dereg_mr", |c| {
        c.model.deregister(c.ends[0].region.id);
        assert!(!c.model.lands_in(c.ends[0].region.id));
    }),
    ("ibv_dereg_mr of a target", |c| {
        let _kept = c.write();
        c.model.deregister(c.ends[1].region.id);
        c.model.settle();
    }),
    ("ibv_create_cq", |c| {
        c.model.create_queue_in(c.ends[0].context, 7, 8).unwrap();
    }),
    ("ibv_destroy_cq", |c| {
        let queue = c.model.create_queue_in(c.ends[0].context, 7, 8).unwrap();
        c.model.destroy_queue(queue);
    }),
    ("ibv_destroy_cq of a used one", |c| c.model.destroy_queue(c.ends[0].queue)),
    ("ibv_poll_cq", |c| {
        c.model.poll_each(c.ends[0].queue, 1, drop).unwrap();
    }),
    ("ibv_req_notify_cq", |c| c.model.arm(c.ends[0].queue).unwrap()),
    ("a call about a queue", |c| c.model.called(c.ends[0].queue).unwrap()),
    ("ibv_create_qp", |c| {
        let attributes = attributes(c.ends[0].domain, c.ends[0].queue);
        c.model.create_pair_in(c.ends[0].context, 8, &attributes).unwrap();
    }),
    ("ibv_destroy_qp", |c| assert!(c.model.retire_pair(c.pair))),
    ("ibv_destroy_qp with a message in flight", |c| {
        let _kept = c.write();
        assert!(c.model.retire_pair(c.ends[1].pair));
    }),
    ("ibv_modify_qp", |c| {
        connect(&mut c.model, c.pair, [0, 1].map(address), c.ends[1].pair);
        c.model.drain(c.pair, true).unwrap();
        c.model.end_pair(c.pair).unwrap();
        c.model.reset(c.pair).unwrap();
        c.model.settle();
    }),
    ("ibv_modify_qp to RESET with a message in flight", |c| {
        let _kept = c.write();
        c.model.reset(c.ends[0].pair).unwrap();
        assert!(!c.model.lands_for(c.ends[0].pair));
    }),
    ("ibv_query_qp", |c| {
        c.model.state_of(c.pair).unwrap();
        c.model.ends_of(c.ends[0].pair).unwrap();
    }),
    ("ibv_post_send", |c| {
        let mut freight = c.write();
        while !freight.is_at_its_end() {
            freight.step();
        }
        c.model.end_freight(freight);
        c.model.settle();
    }),
    ("a message that is lost", |c| {
        let freight = c.write();
        c.model.lose_freight(&freight);
    }),
    ("rdma_create_event_channel", |c| {
        let channel = c.model.create_channel(c.ends[0].host).unwrap();
        c.model.destroy_channel(channel);
    }),
    ("rdma_create_id", |c| {
        c.model.create_identifier(c.channel).unwrap();
    }),
    ("rdma_bind_addr", |c| {
        let (id, _) = c.model.create_identifier(c.channel).unwrap();
        c.model.bind(id, SocketAddr::new(address(0), 0)).unwrap();
    }),
    ("rdma_listen", |c| {
        c.model.listen(c.channel, SocketAddr::new(address(0), PORT + 1), 0).unwrap();
        let (id, _) = c.model.create_identifier(c.channel).unwrap();
        c.model.bind(id, SocketAddr::from(([0; 4], 0))).unwrap();
        c.model.listen_on(id, 0).unwrap();
    }),
    ("rdma_resolve_addr", |c| {
        let (id, _) = c.model.create_identifier(c.channel).unwrap();
        c.model.resolve_address(id, None, SocketAddr::new(address(1), PORT), millis(1)).unwrap();
        c.model.settle();
        c.model.resolve_route(id).unwrap();
        c.model.settle();
    }),
    ("rdma_resolve_addr where no host is", |c| {
        let (id, _) = c.model.create_identifier(c.channel).unwrap();
        c.model.resolve_address(id, None, SocketAddr::new(ip(8), PORT), millis(1)).unwrap();
        pass(&mut c.model, millis(1));
    }),
    ("rdma_connect and rdma_disconnect", |c| {
        let (own, id) = c.asks();
        assert_eq!(c.model.manager.unread_requests(c.listener), 1);
        let to = c.model.create_channel(c.ends[0].host).unwrap();
        c.model.migrate(c.listener, to).unwrap();
        let Some(NoticeKind::ConnectRequest { id: child, .. }) = notice(&mut c.model, to) else {
            panic!("no request")
        };
        c.lend(0, child);
        c.model.accept(child, &PARAMS, &[]).unwrap();
        c.model.settle();
        assert!(matches!(notice(&mut c.model, own), Some(NoticeKind::Established(_))));
        c.model.settle();
        c.model.disconnect(id).unwrap();
        c.model.settle();
        c.model.disconnect(child).unwrap();
        c.model.settle();
        c.model.destroy_identifier(child);
    }),
    ("a connect request that is not read", |c| {
        c.asks();
        c.model.destroy_identifier(c.listener);
        c.model.settle();
    }),
    ("rdma_destroy_id", |c| c.model.destroy_identifier(c.listener)),
    ("rdma_get_cm_event", |c| {
        notice(&mut c.model, c.channel).unwrap();
    }),
    ("ibv_get_async_event", |c| {
        c.model.contexts.tell(&mut c.model.env, c.ends[0].context, AsyncEvent::PortErr, About::Device);
        c.model.take_async(c.ends[0].context).unwrap();
    }),
    ("ibv_create_srq", |c| {
        let shared = c.model.create_shared(c.ends[0].context, 10, c.ends[0].domain, 8, 0).unwrap();
        c.model.post_shared(shared, &PostedReceive { id: 1, local: [].into_iter().collect() }).unwrap();
        c.model.destroy_shared(shared);
    }),
    ("a program that joins", |c| {
        c.model.add_host(&[ip(7)], Limits::default());
    }),
    ("what a host has", |c| {
        c.model.resources(c.ends[0].host);
    }),
    ("a fault of a queue pair", |c| {
        let target = Connections::Pair(c.model.pairs.number(c.ends[0].pair));
        c.model.inject(c.ends[0].host, target, Fault::LinkDown { micros: 1 }, Ok(When::Event(0)));
        // It strikes at the next event, and ends.
        write(&mut c.model, c.ends[0].pair, c.ends[0].region, c.ends[1].region);
        pass(&mut c.model, millis(1));
        assert_eq!(c.model.faults_struck(), 1);
    }),
];

#[test]
fn no_call_looks_at_the_objects_of_others() {
    let [few, many] = if cfg!(miri) { [2, 8] } else { [10, 500] };
    let mut different = Vec::new();
    for (name, call) in CALLS {
        let [few, many] = [few, many].map(|count| {
            let mut crowded = Crowded::new(count);
            visits(|| call(&mut crowded)).0
        });
        if few != many {
            different.push((name, few, many));
        }
    }
    assert!(different.is_empty(), "{different:?}");
}

/// What is about many objects is done in pieces, between which other calls have their turn.
#[cfg(not(miri))]
#[test]
fn long_work_gives_the_lock_back() {
    type Pieces = (&'static str, Call, fn(&Crowded) -> usize);
    let lost = |c: &Crowded| {
        let pairs = c.model.queues.get(c.ends[0].queue).unwrap().pairs.iter();
        pairs.filter(|pair| !c.model.has_failed(**pair).unwrap()).count()
    };
    let pieces: &[Pieces] = &[
        ("the list of queue pairs", |c| assert!(c.model.connections(0, usize::MAX).1.is_some()), |_| 0),
        ("a look at all queues", |c| assert!(c.model.look_at_some(0).is_some()), |_| 0),
        (
            "a program that joins, and whose address others await",
            |c| {
                c.model.add_host(&[ip(9)], Limits::default());
                c.model.settle();
            },
            |c| c.model.manager.awaiting(),
        ),
        ("the queue pairs of a lost queue", |c| c.model.overrun(c.ends[0].queue, None), lost),
        (
            "messages that are late",
            |c| pass(&mut c.model, Parameters::default().reach / 4),
            |c| usize::from(c.model.flights.next_look().is_some()),
        ),
    ];
    for (name, piece, left) in pieces {
        let [many, more] = [300, 600].map(|count| {
            let mut crowded = Crowded::new(count);
            let (visits, ()) = visits(|| piece(&mut crowded));
            (visits, crowded)
        });
        assert_eq!(many.0, more.0, "{name}");
        for (_, mut crowded) in [many, more] {
            pass(&mut crowded.model, Parameters::default().reach * 2);
            assert_eq!(left(&crowded), 0, "{name}");
        }
    }
}

/// Timers that end together end in pieces, in order.
#[test]
fn a_call_executes_some_of_what_is_due() {
    // More than three times what one call executes (`Model::advance_some`).
    const COUNT: usize = 200;
    let (mut model, host, _) = hosts(Parameters::default());
    let channel = model.create_channel(host).unwrap();
    for _ in 0..COUNT {
        let (id, _) = model.create_identifier(channel).unwrap();
        model.resolve_address(id, None, SocketAddr::new(ip(9), PORT), millis(1)).unwrap();
    }
    let (end, mut read) = (Instant::from_start(millis(2)), Vec::new());
    while !model.advance_some(end) {
        let before = read.len();
        read.extend(keys(&mut model, channel));
        assert!(read.len() > before);
        assert_eq!(model.now(), Instant::from_start(millis(1)), "time stands still until the rest is done");
    }
    let last: Vec<_> = keys(&mut model, channel).collect();
    assert!(last.len() < COUNT / 2, "{} events at once", last.len());
    read.extend(last);
    assert_eq!(model.now(), end);
    assert_eq!(read, (1..=COUNT as u64).collect::<Vec<_>>());
}

/// The identifiers of all unread events.
fn keys(model: &mut Model, channel: ChannelId) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || Some(model.take_notice(channel).unwrap().notice?.key.0))
}

/// However many queue pairs of a host repeat messages without an end, and however often each of
/// them may, they repeat no more together.
#[test]
fn endless_repetitions_leave_time_for_others() {
    let events = |count: usize| {
        let mut model = Model::new(Parameters::default());
        let [own, peer] = [0, 1].map(|number| end(&mut model, number));
        for _ in 0..count {
            send(&mut model, [own, peer]);
        }
        let mut events = 0;
        while model.deadline().is_some_and(|at| at <= Instant::from_start(millis(100))) {
            model.step();
            events += 1;
        }
        events
    };
    let [few, many] = if cfg!(miri) { [10, 20] } else { [100, 500] }.map(events);
    // Each sends once in any case.
    assert!(many < few + 3 * 500, "{few} with few, {many} with many");
}

/// Makes two queue pairs, and sends a message from the first to the second, which has no receive.
fn send(model: &mut Model, ends: [End; 2]) -> [PairId; 2] {
    let pairs =
        ends.map(|end| model.create_pair_in(end.context, 9, &attributes(end.domain, end.queue)).unwrap().0);
    let [from, to] = pairs;
    connect(model, from, [0, 1].map(address), to);
    connect(model, to, [1, 0].map(address), from);
    model.set_min_rnr_timer(to, RnrTimer::from_code(1).unwrap()).unwrap();
    let request = Request::new(1, SendOp::Send, true);
    model.post_named(from, request, Payload::Inline(&[]), true).unwrap();
    model.ring(from);
    model.settle();
    pairs
}

/// A timer goes with its object, and unread events are bounded: neither is a way to fill memory.
#[test]
fn what_is_gone_leaves_no_timer() {
    let mut model = Model::new(Parameters::default());
    let ends = [0, 1].map(|number| end(&mut model, number));
    let channel = model.create_channel(ends[0].host).unwrap();
    let resolve = |model: &mut Model, id, last, timeout| {
        model.resolve_address(id, None, SocketAddr::new(ip(last), PORT), timeout)
    };
    for last in 1..20 {
        // One awaits a host, which comes; the other one's does not.
        for to in [last, 250] {
            let (id, _) = model.create_identifier(channel).unwrap();
            resolve(&mut model, id, to, Duration::from_secs(3600)).unwrap();
            let _joined = model.add_host(&[ip(last)], Limits::default());
            model.settle();
            model.destroy_identifier(id);
        }
        // One waits to send again, and one for an answer that does not come.
        let [from, to] = send(&mut model, ends);
        model.set_ack_timeout(from, 31).unwrap();
        if last % 2 == 0 {
            model.destroy_pair(to);
            pass(&mut model, millis(1));
        }
        model.end_pair(from).unwrap();
        model.destroy_pair(from);
        let end = model.contexts.all().get(ends[0].context).unwrap();
        assert_eq!((model.env.scheduled(), end.repeats), (0, 0));
    }
    let (id, _) = model.create_identifier(channel).unwrap();
    let refused = (0..100).find_map(|count| {
        let error = resolve(&mut model, id, 251, millis(1)).err();
        pass(&mut model, millis(1));
        error.map(|error| (count, error))
    });
    assert!(matches!(refused, Some((MOST_UNREAD, Error::State(_)))), "{refused:?}");
    while notice(&mut model, channel).is_some() {}
    resolve(&mut model, id, 251, millis(1)).unwrap();
}
