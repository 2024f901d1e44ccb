//! Resources that connections share, alone in this process so that its descriptors can be counted.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use kv_store::{Server, Store};
use rdma_conn::{Endpoint, Limits, Options};
use rdma_redis::{Client, Endpoints};
use rdma_softsim::{Fabric, Resources, SoftSim};
use redis::aio::MultiplexedConnection;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(60);
const MANY: usize = 200;
const SERVERS: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
const CLIENT: [u8; 4] = [192, 0, 2, 9];

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("there is a /proc").count()
}

fn held(fabric: &Fabric) -> Resources {
    fabric.resources(CLIENT.into())
}

fn listen(fabric: &Fabric, ip: IpAddr) -> Endpoint<SoftSim> {
    let mut endpoint = Endpoint::new(&fabric.host(&[ip]), Limits::default()).expect("a device");
    let _listener = endpoint.listen(SocketAddr::new(ip, 6379), Options::default()).expect("a free address");
    endpoint
}

fn serve(endpoint: Endpoint<SoftSim>, over: &AtomicBool) {
    let store = Store::default();
    let mut server = Server::new(endpoint, &store);
    while !over.load(Ordering::Relaxed) {
        server.turn().expect("the fabric stays");
        server.endpoint.wait(Some(Duration::from_millis(20))).expect("waits");
    }
}

/// Stops the servers, even if the test fails.
struct StopServers<'a>(&'a AtomicBool);

impl Drop for StopServers<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

async fn connected(client: &Client<SoftSim>) -> MultiplexedConnection {
    client.get_multiplexed_async_connection().await.expect("connects")
}

async fn ping(mut connection: MultiplexedConnection) -> MultiplexedConnection {
    let command = redis::cmd("PING");
    timeout(LONG, command.exec_async(&mut connection)).await.expect("in time").expect("PING");
    connection
}

/// A runtime that does not run delays no other. Nothing is left.
#[test]
fn connections_of_a_runtime_share_an_endpoint() {
    let (fabric, over) = (Fabric::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for ip in SERVERS {
            let (endpoint, over) = (listen(&fabric, ip.into()), &over);
            scope.spawn(move || serve(endpoint, over));
        }
        let _over = StopServers(&over);
        let endpoints = Endpoints::from(fabric.host(&[CLIENT.into()]));
        let clients = SERVERS.map(|[a, b, c, d]| {
            let url = format!("valkey+rdma://{a}.{b}.{c}.{d}:6379/0");
            Client::open(endpoints.clone(), &url).expect("a valid URL")
        });
        let (busy, still) = (runtime(), runtime());
        busy.block_on(async {
            let first = connected(&clients[0]).await;
            let (before, each) = (descriptors(), held(&fabric).registered_bytes);
            let more = try_join_all((1..MANY).map(|number| {
                let client = clients[number % 2].clone();
                async move { client.get_multiplexed_async_connection().await }
            }));
            let mut all = more.await.expect("connects");
            all.push(first);
            let now = held(&fabric);
            // A first one for four connections, and one for each 64.
            let queues = 1 + (MANY - 4).div_ceil(64);
            assert_eq!((now.event_channels, now.completion_queues), (1, queues));
            assert_eq!(now.registered_bytes, each * MANY as u64);
            // A completion channel for each queue, on both sides: the servers have 100 each.
            let grown = descriptors() - before;
            assert!(grown <= 2 * queues, "{grown} descriptors for {MANY} connections");
        });
        // This runtime drives nothing from now on, and the other finds its own endpoint.
        let kept = busy.block_on(async { ping(connected(&clients[0]).await).await });
        still.block_on(async {
            let connection = ping(connected(&clients[0]).await).await;
            assert_eq!(held(&fabric).event_channels, 2);
            drop(connection);
        });
        drop((kept, clients, endpoints, busy, still));
    });
    let begun = std::time::Instant::now();
    while held(&fabric) != Resources::default() {
        assert!(begun.elapsed() < LONG, "{:?} are left", held(&fabric));
        std::thread::yield_now();
    }
}
