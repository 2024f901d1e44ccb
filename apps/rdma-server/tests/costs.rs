//! The cost of an idle client to a server. Alone in its process, because it counts descriptors.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rdma_conn::{Config, ConnectionId, Endpoint, Event, Limits, Options};
use rdma_server::{
    ConnectionType, Flow, Rdma, RdmaSettings, Replies, Server, ServerSettings, Service, SessionId, Vector,
};
use rdma_softsim::{Fabric, Limits as HostLimits, SoftSim};

const CLIENTS: usize = 2000;
const PATIENCE: Duration = Duration::from_secs(120);
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

struct SilentService;

impl Service for SilentService {
    type Client = ();

    fn serve(&mut self, _: SessionId, (): &mut (), input: &mut BytesMut, _: &mut Replies) -> Flow {
        input.clear();
        Flow::Stay
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

fn options() -> Options {
    let mut options = Options::default();
    options.protocol.window = 4096;
    options
}

fn host(fabric: &Fabric, ip: IpAddr) -> SoftSim {
    fabric.host_with(&[ip], HostLimits { locked_memory: u64::MAX, ..HostLimits::default() })
}

/// Connects clients. Returns the descriptors added, and what the server's host holds.
fn gather(fabric: &Fabric, before: usize, mut turn: impl FnMut()) -> (usize, rdma_softsim::Resources) {
    let mut clients = Endpoint::new(&host(fabric, CLIENT), Limits::default()).expect("an endpoint");
    let options = Options::default().protocol(Config::client().window(4096));
    let mut members: Vec<ConnectionId> = Vec::new();
    let (begun, mut asked) = (Instant::now(), 0);
    while members.len() < CLIENTS {
        assert!(begun.elapsed() < PATIENCE, "{} of {CLIENTS} are in", members.len());
        while asked < CLIENTS && asked - members.len() < 64 {
            clients.connect((SERVER, 6379).into(), None, PATIENCE, options).expect("begins to connect");
            asked += 1;
        }
        turn();
        clients.wait(Some(Duration::from_millis(1))).expect("progress");
        while let Some(event) = clients.next_event() {
            match event {
                Event::Opened { id, .. } => members.push(id),
                Event::Ended(id) => panic!("{:?}", clients.check(id)),
                _ => {}
            }
        }
    }
    (descriptors() - before, fabric.resources(SERVER))
}

#[test]
fn idle_clients_cost_what_they_cost_on_an_endpoint() {
    let at = SocketAddr::from((SERVER, 6379));
    let limits = Limits::default().connections(usize::MAX);

    let fabric = Fabric::new();
    let before = descriptors();
    let mut endpoint = Endpoint::new(&host(&fabric, SERVER), limits).expect("an endpoint");
    endpoint.listen(at, options()).expect("a free address");
    let (alone, bare) = gather(&fabric, before, || {
        endpoint.wait(Some(Duration::from_millis(1))).expect("progress");
        while endpoint.next_event().is_some() {}
    });
    drop(endpoint);
    drop(fabric);

    let fabric = Fabric::new();
    let before = descriptors();
    let rdma = Rdma::new(host(&fabric, SERVER));
    let settings = RdmaSettings::default();
    let vector = Vector::Fixed(0);
    rdma.configure(settings.server(options()).vector(vector).limits(limits)).expect("settings");
    let settings = ServerSettings::default().protected(false);
    let mut server = Server::new(SilentService, settings).expect("a loop");
    server.bind(rdma, &[at.into()]).expect("a free address");
    let (through, held) =
        gather(&fabric, before, || server.turn(Some(Duration::from_millis(1))).expect("a turn"));

    while server.counters().admitted < CLIENTS as u64 {
        server.turn(Some(Duration::from_millis(1))).expect("a turn");
    }
    println!(
        "{CLIENTS} idle clients: {alone} descriptors on an endpoint, {through} through a server; {} bytes registered for each",
        held.registered_bytes / CLIENTS as u64
    );
    // The loop's own: epoll, waker, the listener's channel, a copy of the endpoint's descriptor.
    assert!(through <= alone + 8, "{through} descriptors through a server, {alone} on an endpoint");
    assert_eq!(held.registered_bytes, bare.registered_bytes);
    assert_eq!(held.completion_queues, bare.completion_queues);
}
