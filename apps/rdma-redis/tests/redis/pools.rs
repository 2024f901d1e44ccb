use rdma_redis::Client;
use rdma_softsim::SoftSim;
use redis::aio::MultiplexedConnection;

use crate::support::{Answer, URL, fabric, polite};

fn client() -> (rdma_softsim::Fabric, Client<SoftSim>) {
    let (fabric, host, _seen) = fabric(|connection, command| match (connection, command) {
        (0, "GET LEAVE") => Answer::Leave,
        _ => polite(command),
    });
    (fabric, Client::open(host, URL).expect("a valid URL"))
}

async fn works(connection: &mut MultiplexedConnection) {
    let end: String = redis::cmd("ECHO").arg("end").query_async(connection).await.expect("ECHO");
    assert_eq!(end, "end");
}

async fn breaks(connection: &mut MultiplexedConnection) {
    redis::cmd("GET").arg("leave").exec_async(connection).await.expect_err("left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bb8_replaces_a_broken_connection() {
    let (_fabric, client) = client();
    let pool = bb8::Pool::builder().max_size(1).build(client).await.expect("a pool");
    breaks(&mut pool.get().await.expect("connects")).await;
    works(&mut pool.get().await.expect("connects again")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadpool_replaces_a_broken_connection() {
    let (_fabric, client) = client();
    let pool: deadpool::managed::Pool<_> =
        deadpool::managed::Pool::builder(client).max_size(1).build().expect("a pool");
    breaks(&mut pool.get().await.expect("connects")).await;
    works(&mut pool.get().await.expect("connects again")).await;
}
