//! Many idle connections of one tokio endpoint, alone in this process to count its descriptors.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::{AsyncListener, AsyncStream, ConnectionId, Endpoint, Event, Keepalive, Limits, Options};
use rdma_softsim::{Fabric, SoftSim};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(60);
const MANY: usize = 2000;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("there is a /proc").count()
}

fn small(usual: Options) -> Options {
    let mut options = usual;
    options.protocol.window = 4 << 10;
    options.protocol.send_buffer = 4 << 10;
    options.receives = 64;
    options.protocol.keepalive = Some(Keepalive::NONE);
    options
}

async fn turn(endpoint: &mut Endpoint<SoftSim>) {
    endpoint.progress().expect("the fabric stays");
    tokio::task::yield_now().await;
}

/// Completion queue polls that a request and its answer cost the server.
async fn polls(
    listener: &AsyncListener<SoftSim>,
    clients: &mut Endpoint<SoftSim>,
    (id, server): (ConnectionId, &mut AsyncStream<SoftSim>),
) -> u64 {
    const ROUNDS: u64 = 50;
    let before = listener.endpoint().usage().polls;
    let mut byte = [0; 1];
    for _ in 0..ROUNDS {
        assert_eq!(clients.write(id, &[std::io::IoSlice::new(b"?")]).expect("is open"), Some(1));
        let served = async {
            server.read_exact(&mut byte).await.expect("asked");
            server.write_all(b"!").await.expect("answered");
        };
        timeout(LONG, served).await.expect("nobody waits for ever");
        while !matches!(clients.read(id, &mut byte), Ok(Some(1))) {
            turn(clients).await;
            while clients.next_event().is_some() {}
        }
    }
    (listener.endpoint().usage().polls - before) / ROUNDS
}

/// 2000 idle connections through one listener need few descriptors, and cost busy ones nothing.
#[tokio::test]
async fn idle_connections_cost_what_they_cost_on_an_endpoint() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let mut clients =
        Endpoint::new(&fabric.host(&[[192, 0, 2, 2].into()]), Limits::default()).expect("a device");
    let listener = AsyncListener::bind_with(&server, address, small(Options::default()), Limits::default())
        .await
        .expect("a free address");
    let before = descriptors();
    let (mut ids, mut streams) = (Vec::new(), Vec::new());
    let mut alone = None;
    for wanted in [1, MANY] {
        while streams.len() < wanted {
            while ids.len() < wanted.min(streams.len() + 100) {
                ids.push(clients.connect(address, None, LONG, small(Options::default())).expect("begins"));
            }
            turn(&mut clients).await;
            while let Some(event) = clients.next_event() {
                assert!(matches!(event, Event::Opened { .. }), "{event:?}");
            }
            while let Ok(accepted) = timeout(Duration::ZERO, listener.accept()).await {
                streams.push(accepted.expect("accepted"));
            }
        }
        while !ids.iter().all(|id| clients.is_open(*id)) {
            turn(&mut clients).await;
        }
        while clients.next_event().is_some() {}
        let (first, peer) = &mut streams[0];
        let own = |id: &&ConnectionId| {
            clients.connection(**id).and_then(|connection| connection.local_addr()) == Some(*peer)
        };
        let id = *ids.iter().find(own).expect("it has a client");
        let polls = polls(&listener, &mut clients, (id, first)).await;
        let alone = *alone.get_or_insert(polls);
        assert!(polls <= alone + 2, "{polls} polls a request with {wanted} connections, {alone} with one");
    }
    let (ours, theirs) = (listener.endpoint().usage(), clients.usage());
    println!("{ours:?}, {} descriptors for both sides", descriptors() - before);
    assert_eq!((ours.connections, ours.completion_queues), (MANY, MANY.div_ceil(64)));
    // One of each side has written, and keeps its send buffer for a while.
    assert_eq!(ours.registered_bytes, theirs.registered_bytes);
    assert!(descriptors() - before <= 2 * MANY.div_ceil(64) + 8);
}
