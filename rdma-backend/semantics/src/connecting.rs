//! Addresses, requests and answers: making a connection, or failing to.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use crate::Descriptors;
use rdma_backend::{
    CmEvent, CmEventKind, ConnectParams, ErrorKind, EventChannel as _, Failure as _, Identifier as _,
    QueuePair as _, RnrTimer, SendOp, reject,
};

use super::Setting;
use super::ends::{
    Called, End, ONE, PARAMS, PATIENCE, Pair, Requesting, Shape, equal, event, expect, holds, next_event,
    readable, requested, resolved,
};
use crate::Failure;

super::table! {
    "verbs.connect.both-ends", "on every address, both ends are told of the connection and its addresses",
        "rdma_get_cm_event(3), rdma_get_local_addr(3)", both_ends;
    "verbs.connect.path", "a queue pair knows whether its path leads back to where it starts",
        "ibv_query_qp(3)", path;
    "verbs.connect.parameters", "each side is told the other's parameters, from its own point of view",
        "rdma_get_cm_event(3)", parameters;
    "verbs.connect.no-event-yet", "a channel without events reports that at once",
        "rdma_get_cm_event(3)", no_event;
    "verbs.connect.rejected", "a rejected request is reported as Rejected(28)", "rdma_reject(3)", rejected;
    "verbs.connect.rejected-flushes", "a rejected request flushes what its sender has posted",
        "rdma_get_cm_event(3)", rejected_flushes;
    "verbs.connect.no-listener", "a request to a port without a listener is answered by Rejected(8)",
        "IBA 12.6.7.2", no_listener;
    "verbs.connect.request-dropped", "a request whose identifier is destroyed is rejected",
        "rdma_destroy_id(3)", request_dropped;
    "verbs.connect.listener-dropped", "an unread request is rejected when its listener is destroyed",
        "rdma_destroy_id(3)", listener_dropped;
    "verbs.connect.port-taken", "a port has one listener at a time", "rdma_bind_addr(3)", port_taken;
    "verbs.connect.foreign-address", "listening on an address of another machine is refused",
        "rdma_bind_addr(3)", foreign_address;
    "verbs.connect.no-route", "an address that cannot be reached is an address error", "rdma_resolve_addr(3)",
        no_route;
    "verbs.connect.out-of-order", "calls in the wrong state are errors and do nothing",
        "rdma_connect(3), rdma_accept(3), rdma_resolve_route(3)", out_of_order;
    "verbs.connect.send-too-early", "a queue pair that is not connected sends nothing", "ibv_modify_qp(3)",
        send_too_early;
    "verbs.connect.wildcard", "a wildcard has no device", "rdma_bind_addr(3)", wildcard;
    "verbs.connect.private-data", "private data arrives, with zeros behind it; more than fits is refused",
        "rdma_get_cm_event(3), rdma_connect(3)", private_data;
    "verbs.migrate.waiting-event", "an unread event moves along with its identifier",
        "rdma_migrate_id(3)", migrate_waiting;
    "verbs.migrate.listener", "requests to a listener that has moved arrive on its new channel",
        "rdma_migrate_id(3)", migrate_listener;
    "verbs.migrate.waiting-request", "an unread request and its identifier move along with their listener",
        "rdma_migrate_id(3)", migrate_request;
}

fn both_ends<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    for address in &setting.addresses {
        let requesting = setting.requesting_at(*address, Shape::USUAL)?;
        let listening = requesting.address()?;
        equal("the listener's address", listening.ip(), address.ip())?;
        holds("it has no port", listening.port() != 0)?;
        let Pair { server, client, listener, .. } = &requesting.accepted(Shape::USUAL)?.established()?;
        holds("the request has the listener's key", server.id.key() != listener.key())?;
        equal("the client's peer", client.id.peer_addr(), Some(listening))?;
        equal("the server's own address", server.id.local_addr(), Some(listening))?;
        equal("the server's peer", server.id.peer_addr(), client.id.local_addr())?;
        holds("the client has no port", client.id.local_addr().is_some_and(|own| own.port() != 0))?;
    }
    let addresses = setting.addresses.iter().map(|address| address.ip().to_string()).collect::<Vec<_>>();
    Ok(addresses.join(", "))
}

fn parameters<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let asked =
        ConnectParams { responder_resources: 3, initiator_depth: 2, retry_count: 6, rnr_retry_count: 5 };
    let Requesting { client, listener, servers, clients } =
        setting.requesting_at(setting.address(), Shape { params: asked, ..Shape::USUAL })?;
    let (id, offered) = requested::<B>(&servers, &listener)?;
    // What the other side may have outstanding is what this one must answer.
    let seen = |params: ConnectParams| (params.responder_resources, params.initiator_depth);
    equal("READs, to the passive side", seen(offered), (2, 3))?;
    equal("retries", (offered.retry_count, offered.rnr_retry_count), (6, 5))?;
    let server = End::<B>::new(id, Shape::USUAL)?;
    let answer = ConnectParams { responder_resources: 2, initiator_depth: 1, rnr_retry_count: 4, ..PARAMS };
    server.id.accept(&answer, &[]).called("accept")?;
    let CmEventKind::Established { peer } = event::<B>(&clients, &client.id)? else {
        return Err(Failure::wrong("the client is not connected"));
    };
    equal("READs, to the active side", seen(peer), (1, 2))?;
    equal("the answer's RNR retries", peer.rnr_retry_count, 4)?;
    let CmEventKind::Established { peer } = event::<B>(&servers, &server.id)? else {
        return Err(Failure::wrong("the server is not connected"));
    };
    equal("the request, once more", peer, offered)
}

fn path<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let neighbours = Setting { client: setting.server.clone(), ..setting.clone() };
    for (setting, what) in [(setting, "as the setting is"), (&neighbours, "from the server's own host")] {
        let Pair { server, client, .. } = &setting.pair()?;
        let ip = |address: Option<SocketAddr>| address.map(|address| address.ip());
        let same = ip(server.id.local_addr()) == ip(server.id.peer_addr());
        for end in [server, client] {
            equal(what, end.qp.is_loopback().called("is_loopback")?, same)?;
        }
        // The path is still known after the peer has left.
        client.id.disconnect().called("disconnect")?;
        equal(what, client.qp.is_loopback().called("is_loopback")?, same)?;
    }
    Ok(())
}

fn no_event<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let channel = setting.client.event_channel().called("event_channel")?;
    holds("an event", next_event::<B>(&channel, Duration::ZERO)?.is_none())?;
    holds("readable", !readable(channel.as_fd(), Duration::ZERO))
}

fn refused<B: Descriptors>(clients: &B::EventChannel, client: &End<B>, expected: i32) -> Result<(), Failure> {
    match event::<B>(clients, &client.id)? {
        CmEventKind::Rejected { reason } => equal("the reason", reason, expected),
        other => Err(Failure::wrong(format!("the event: {other:?}, not Rejected"))),
    }
}

fn rejected<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Requesting { client, listener, servers, clients } = &setting.requesting()?;
    let (id, _) = requested::<B>(servers, listener)?;
    id.reject(b"no").called("reject")?;
    refused::<B>(clients, client, reject::CONSUMER_DEFINED)
}

fn rejected_flushes<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Requesting { client, listener, servers, clients } = &setting.requesting()?;
    let (id, _) = requested::<B>(servers, listener)?;
    id.reject(&[]).called("reject")?;
    refused::<B>(clients, client, reject::CONSUMER_DEFINED)?;
    client.flushes("the receives", 0..8)
}

fn no_listener<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let clients = setting.client.event_channel().called("event_channel")?;
    let free = SocketAddr::new(setting.address().ip(), 9);
    let client = End::<B>::new(resolved::<B>(&clients, free)?, Shape::USUAL)?;
    client.id.connect(&PARAMS, &[]).called("connect")?;
    refused::<B>(&clients, &client, reject::INVALID_SERVICE_ID)
}

fn request_dropped<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Requesting { client, listener, servers, clients } = &setting.requesting()?;
    drop(requested::<B>(servers, listener)?);
    refused::<B>(clients, client, reject::CONSUMER_DEFINED)
}

fn listener_dropped<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Requesting { client, listener, servers, clients } = setting.requesting()?;
    holds("the request does not come", readable(servers.as_fd(), PATIENCE))?;
    drop(listener);
    refused::<B>(&clients, &client, reject::CONSUMER_DEFINED)?;
    holds("the request is still there", next_event::<B>(&servers, Duration::ZERO)?.is_none())
}

fn port_taken<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let channel = setting.server.event_channel().called("event_channel")?;
    let listener = channel.listen(setting.address(), 8).called("listen")?;
    let address = listener.local_addr().ok_or_else(|| Failure::wrong("no address"))?;
    equal("again", channel.listen(address, 8).err().map(|error| error.kind()), Some(ErrorKind::Address))?;
    drop(listener);
    channel.listen(address, 8).called("listen, when it is free again").map(drop)
}

fn foreign_address<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let channel = setting.server.event_channel().called("event_channel")?;
    let foreign = SocketAddr::from(([203, 0, 113, 7], 0));
    equal("listen", channel.listen(foreign, 8).err().map(|error| error.kind()), Some(ErrorKind::Address))
}

fn no_route<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let channel = setting.client.event_channel().called("event_channel")?;
    let id = channel.create_id().called("create_id")?;
    let nowhere = SocketAddr::from(([203, 0, 113, 7], 6379));
    match id.resolve_address(None, nowhere, Duration::from_millis(300)) {
        Err(error) => equal("the call", error.kind(), ErrorKind::Address).map(|()| error.to_string()),
        Ok(()) => match event::<B>(&channel, &id)? {
            CmEventKind::AddressError { status } if status < 0 => Ok(format!("AddressError({status})")),
            other => Err(Failure::wrong(format!("the event: {other:?}, not AddressError"))),
        },
    }
}

fn out_of_order<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let requesting = setting.requesting()?;
    let id = requesting.clients.create_id().called("create_id")?;
    equal("addresses of a new identifier", (id.local_addr(), id.peer_addr()), (None, None))?;
    let state = |what: &str, result: Result<(), B::Error>| {
        equal(what, result.err().map(|error| error.kind()), Some(ErrorKind::State))
    };
    state("capabilities", id.capabilities().map(drop))?;
    state("create_domain", id.create_domain().map(drop))?;
    state("resolve_route", id.resolve_route(PATIENCE))?;
    state("connect", id.connect(&PARAMS, &[]))?;
    state("accept", id.accept(&PARAMS, &[]))?;
    state("reject", id.reject(&[]))?;
    state("disconnect", id.disconnect())?;

    let id = resolved::<B>(&requesting.clients, requesting.address()?)?;
    state("connect without a queue pair", id.connect(&PARAMS, &[]))?;
    let end = End::<B>::new(id, Shape::USUAL)?;
    let second = end.id.create_queue_pair(&end.domain, &end.cq, Shape::USUAL.limits);
    state("a second queue pair", second.map(drop))?;
    state("accept without a request", end.id.accept(&PARAMS, &[]))?;
    state("the timer before the connection", end.qp.set_min_rnr_timer(RnrTimer::MICROS_640))?;
    state("the path before the connection", end.qp.is_loopback().map(drop))
}

fn send_too_early<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let requesting = setting.requesting()?;
    let id = resolved::<B>(&requesting.clients, requesting.address()?)?;
    let end = End::<B>::new(id, Shape::USUAL)?;
    let result = end.qp.post_send(&[end.request(ONE, SendOp::Send, 0, 4)]);
    equal(
        "the error",
        result.err().map(|error| (error.posted, error.error.kind())),
        Some((0, ErrorKind::State)),
    )
}

fn wildcard<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let channel = setting.server.event_channel().called("event_channel")?;
    let any = channel.listen(SocketAddr::from(([0, 0, 0, 0], 0)), 8).called("listen")?;
    equal("its device", any.capabilities().err().map(|error| error.kind()), Some(ErrorKind::State))?;
    let port = any.local_addr().ok_or_else(|| Failure::wrong("no address"))?.port();
    let both =
        channel.listen(SocketAddr::from(([0_u16; 8], port)), 8).called("listen on the same port, IPv6")?;
    equal("its port", both.local_addr().map(|address| address.port()), Some(port))
}

fn private_data<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let requesting = setting.requesting()?;
    let end = End::<B>::new(resolved::<B>(&requesting.clients, requesting.address()?)?, Shape::USUAL)?;
    let refused = end.id.connect(&PARAMS, &[0; 57]).err().map(|error| error.kind());
    equal("57 bytes", refused, Some(ErrorKind::Argument))?;

    let servers = setting.server.event_channel().called("event_channel")?;
    let listener = servers.listen(setting.address(), 8).called("listen")?;
    let to = listener.local_addr().ok_or_else(|| Failure::wrong("the listener has no address"))?;
    for (given, answer) in [(&[0xa5; 56][..], &b""[..]), (b"hello", &[0x5a; 196])] {
        let clients = setting.client.event_channel().called("event_channel")?;
        let client = End::<B>::new(resolved::<B>(&clients, to)?, Shape::USUAL)?;
        client.id.connect(&PARAMS, given).called("connect")?;
        let event = next_event::<B>(&servers, PATIENCE)?;
        let Some(CmEvent { kind: CmEventKind::ConnectRequest { id, .. }, private_data, .. }) = event else {
            return Err(Failure::wrong("no request came"));
        };
        equal("private data of the request", stripped(&private_data), given)?;
        let server = End::<B>::new(id, Shape::USUAL)?;
        server.id.accept(&PARAMS, answer).called("accept")?;
        let event = next_event::<B>(&clients, PATIENCE)?;
        let Some(CmEvent { kind: CmEventKind::Established { .. }, private_data, .. }) = event else {
            return Err(Failure::wrong("the client is not connected"));
        };
        equal("private data of the answer", stripped(&private_data), answer)?;
        expect::<B>(&servers, &server.id, "Established")?;
    }
    Ok(())
}

fn stripped(data: &[u8]) -> &[u8] {
    let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &data[..end]
}

fn migrate_waiting<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, .. } = &setting.pair()?;
    client.id.disconnect().called("disconnect")?;
    holds("the event does not come", readable(servers.as_fd(), PATIENCE))?;
    let own = setting.server.event_channel().called("event_channel")?;
    server.id.migrate(&own).called("migrate")?;
    // Migrating to the current channel changes nothing.
    server.id.migrate(&own).called("migrate")?;
    holds("the event has stayed", next_event::<B>(servers, Duration::ZERO)?.is_none())?;
    holds("the other channel sleeps", readable(own.as_fd(), PATIENCE))?;
    expect::<B>(&own, &server.id, "Disconnected")
}

fn requested_at<B: Descriptors>(requesting: Requesting<B>) -> Result<(), Failure> {
    let pair = requesting.accepted(Shape::USUAL)?.established()?;
    pair.client.id.disconnect().called("disconnect")?;
    expect::<B>(&pair.servers, &pair.server.id, "Disconnected")
}

fn migrate_listener<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let servers = setting.server.event_channel().called("event_channel")?;
    let clients = setting.client.event_channel().called("event_channel")?;
    let listener = servers.listen(setting.address(), 8).called("listen")?;
    let own = setting.server.event_channel().called("event_channel")?;
    listener.migrate(&own).called("migrate")?;
    drop(servers);
    let to = listener.local_addr().ok_or_else(|| Failure::wrong("no address"))?;
    let client = End::<B>::new(resolved::<B>(&clients, to)?, Shape::USUAL)?;
    client.id.connect(&PARAMS, &[]).called("connect")?;
    requested_at(Requesting { client, listener, servers: own, clients })
}

fn migrate_request<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Requesting { client, listener, servers, clients } = setting.requesting()?;
    holds("the request does not come", readable(servers.as_fd(), PATIENCE))?;
    let own = setting.server.event_channel().called("event_channel")?;
    listener.migrate(&own).called("migrate")?;
    drop(servers);
    requested_at(Requesting { client, listener, servers: own, clients })
}
