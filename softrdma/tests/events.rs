//! Events of the connection manager, as a program reads them.

mod queue;
mod session;

use queue::Queue;
use session::{address, ask, open};
use softrdma::fabric::Fabric;
use softrdma_wire::{Connected, Event, Name, Params, Reply, Request, Socket};

const PORT: u16 = 6379;

fn make(socket: &mut Socket, request: &Request<'_>) -> Name {
    match ask(socket, request) {
        Reply::Made(name) | Reply::Pair { name, .. } => name,
        other => panic!("{request:?}: {other:?}"),
    }
}

fn done(socket: &mut Socket, request: &Request<'_>) {
    let reply = ask(socket, request);
    assert!(matches!(reply, Reply::Done | Reply::Bound(_)), "{request:?}: {reply:?}");
}

fn next(socket: &mut Socket, channel: Name) -> Option<Event> {
    match ask(socket, &Request::TakeEvent(channel)) {
        Reply::Event(event) => event.map(|event| *event),
        other => panic!("{other:?}"),
    }
}

/// Returns the `enum rdma_cm_event_type` of the next event, if there is one.
fn kind(socket: &mut Socket, channel: Name) -> Option<u32> {
    next(socket, channel).map(|event| event.kind)
}

fn pair(socket: &mut Socket) -> Name {
    let domain = make(socket, &Request::AllocateDomain(0));
    let queue = Queue::create(socket, 4, None).name;
    let (send_depth, receive_depth, inline) = (1, 1, 0);
    let request = Request::CreatePair {
        domain,
        send_queue: queue,
        receive_queue: queue,
        shared: None,
        service: softrdma_wire::Service::Connected,
        send_depth,
        receive_depth,
        elements: [16; 2],
        inline,
    };
    let pair = make(socket, &request);
    done(socket, &Request::Modify { pair, to: softrdma_wire::Transition::Initialise });
    pair
}

/// Makes a program ask to be connected. Returns its channel and its identifier.
fn connect(socket: &mut Socket) -> (Name, Name) {
    let channel = make(socket, &Request::CreateEventChannel);
    let id = make(socket, &Request::CreateIdentifier { channel });
    let destination = (address(1), PORT).into();
    done(socket, &Request::ResolveAddress { id, source: None, destination, milliseconds: 1000 });
    assert_eq!(kind(socket, channel), Some(0), "the address is resolved");
    done(socket, &Request::ResolveRoute(id));
    assert_eq!(kind(socket, channel), Some(2), "the route is resolved");
    let pair = pair(socket);
    done(
        socket,
        &Request::Connect { id, pair: Connected::Managed(pair), params: Params::default(), data: &[] },
    );
    (channel, id)
}

/// A program reads its events until there are none, and handles each. It does not find among them
/// that connecting failed: in a network that would take a round trip.
#[test]
fn a_reject_is_no_event_of_the_batch_that_connected() {
    let fabric = Fabric::new().expect("a fabric");
    let _peer = open(&fabric, 1);
    let mut program = open(&fabric, 2);
    let (channel, _id) = connect(&mut program);
    assert_eq!(kind(&mut program, channel), None, "the batch ends");
    assert_eq!(kind(&mut program, channel), Some(8), "rejected: there is no listener");
    assert_eq!(kind(&mut program, channel), None);
}

/// The batch with the event that it is connected does not have the peer's disconnection either.
#[test]
fn a_disconnection_is_no_event_of_the_batch_that_connected() {
    let fabric = Fabric::new().expect("a fabric");
    let (mut server, mut client) = (open(&fabric, 1), open(&fabric, 2));
    let listening = make(&mut server, &Request::CreateEventChannel);
    let listener = make(&mut server, &Request::CreateIdentifier { channel: listening });
    done(&mut server, &Request::Bind { id: listener, address: (address(1), PORT).into() });
    done(&mut server, &Request::Listen { id: listener, backlog: 1 });
    let (channel, id) = connect(&mut client);
    let request = next(&mut server, listening).expect("a request");
    let own = pair(&mut server);
    done(
        &mut server,
        &Request::Accept {
            id: request.id,
            pair: Connected::Managed(own),
            params: Params::default(),
            data: &[],
        },
    );
    assert_eq!(kind(&mut client, channel), Some(9), "established");
    assert_eq!(kind(&mut server, listening), Some(9), "established");
    done(&mut server, &Request::Disconnect(request.id));
    assert_eq!(kind(&mut client, channel), None, "the batch ends");
    assert_eq!(kind(&mut client, channel), Some(10), "disconnected");
    done(&mut client, &Request::Disconnect(id));
}

/// A program that only reads its completion channel finds every event, even if they are more than a
/// pipe holds. Other programs are served, and its session too.
#[test]
fn events_that_find_no_room_in_the_pipe_come_later() {
    const EVENTS: usize = 9000;
    let fabric = Fabric::new().expect("a fabric");
    let mut program = open(&fabric, 1);
    program.send(&Request::CreateCompletionChannel, None).expect("the fabric listens");
    let (Reply::Made(channel), Some(pipe)) = program.receive().expect("the fabric answers") else {
        panic!("no channel")
    };
    let domain = make(&mut program, &Request::AllocateDomain(0));
    let mut shown = Queue::create(&mut program, 4, Some(channel));
    let queue = shown.name;
    let request = Request::CreatePair {
        domain,
        send_queue: queue,
        receive_queue: queue,
        shared: None,
        service: softrdma_wire::Service::Connected,
        send_depth: 1,
        receive_depth: 1,
        elements: [16; 2],
        inline: 0,
    };
    let pair = make(&mut program, &request);
    for to in [softrdma_wire::Transition::Initialise, softrdma_wire::Transition::Fail] {
        done(&mut program, &Request::Modify { pair, to });
    }
    for id in 0..EVENTS as u64 {
        shown.arm();
        // The queue pair has failed, so the receive is flushed.
        let work = vec![softrdma_wire::Receive { id, local: Vec::new() }];
        let posted = ask(&mut program, &Request::PostReceive { pair, work });
        assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
        assert_eq!(shown.take_shown().len(), 1);
    }
    let _other = open(&fabric, 2);
    let patience = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    for event in 0..EVENTS {
        let mut fds = [rustix::event::PollFd::new(&pipe, rustix::event::PollFlags::IN)];
        let ready = rustix::event::poll(&mut fds, Some(&patience));
        assert_eq!(ready, Ok(1), "{event} events, and no more");
        let mut record = [0; softrdma_wire::RECORD];
        assert_eq!(rustix::io::read(&pipe, &mut record), Ok(record.len()));
        assert_eq!(record, u64::from(queue).to_le_bytes());
    }
}
