//! redis-rs over the embedded fabric, against the example server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kv_store::Store;
use rdma_conn::Listener;
use rdma_redis::{Client, Reconnect};
use rdma_softsim::{Fabric, SoftSim};
use redis::{AsyncCommands, RedisResult};

const URL: &str = "valkey+rdma://192.0.2.1:6379/0";

fn address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 6379))
}

fn serve(host: &SoftSim, clients: usize) -> std::thread::JoinHandle<()> {
    let listener = Listener::bind(host, address()).expect("a free address");
    let store = Arc::new(Store::default());
    std::thread::spawn(move || {
        for _ in 0..clients {
            let (stream, _) = listener.accept().expect("accepts");
            let store = Arc::clone(&store);
            std::thread::spawn(move || store.serve(stream));
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_and_pipelines_from_many_tasks() {
    let fabric = Fabric::new();
    let _server = serve(&fabric.host(&[address().ip()]), 1);
    let client = Client::open(fabric.host(&[[192, 0, 2, 2].into()]), URL).expect("a valid URL");
    let connection = client.get_multiplexed_async_connection().await.expect("connects");
    let tasks = (0..8_usize).map(|task| {
        let mut connection = connection.clone();
        tokio::spawn(async move {
            for number in 0..200_usize {
                let (key, value) = (format!("{task}:{number}"), vec![task as u8; number * 97]);
                let () = connection.set(&key, &value).await.expect("SET");
                let found: Vec<u8> = connection.get(&key).await.expect("GET");
                assert!(found == value, "{key}");
                let (first, second): (String, usize) = redis::pipe()
                    .cmd("PING")
                    .arg("pong")
                    .del(&key)
                    .query_async(&mut connection)
                    .await
                    .expect("two");
                assert_eq!((first.as_str(), second), ("pong", 1));
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("does not panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_comes_back() {
    let fabric = Fabric::new();
    let first = serve(&fabric.host(&[address().ip()]), 1);
    let client = Client::open(fabric.host(&[[192, 0, 2, 2].into()]), URL).expect("a valid URL");
    let how = Reconnect { first_pause: Duration::from_millis(5), ..Reconnect::default() };
    let mut connection = client.get_reconnecting_connection(how).await.expect("connects");
    let () = connection.set("key", "value").await.expect("SET");
    first.join().expect("has served its client");

    fabric.kill_host(address().ip());
    let _second = serve(&fabric.host(&[address().ip()]), 1);
    // A request on the lost connection fails. If the loss was noticed before, none does.
    let value: RedisResult<Option<String>> = connection.get("key").await;
    let value = if value.is_ok() { value } else { connection.get("key").await };
    assert_eq!(value.expect("a new connection"), None, "of a new server");
}

#[test]
fn other_urls_are_refused() {
    let fabric = Fabric::new();
    let ends = [
        "/zero",
        "#insecure",
        "?tiemout=1",
        "?timeout=0",
        "?timeout=-1",
        "?timeout=inf",
        "?timeout=1s",
        "?timeout=1&timeout=2",
        "?fallback=unix",
        "?fallback=tcp:0",
        "?response_timeout=",
        "?protocol=4",
    ]
    .map(|end| format!("valkey+rdma://192.0.2.1{end}"));
    let others = ["redis://192.0.2.1", "192.0.2.1:6379", "valkey+rdma://", "valkey+rdma+unix:///run/valkey"];
    for url in ends.iter().map(String::as_str).chain(others) {
        let error = Client::open(fabric.host(&[[192, 0, 2, 2].into()]), url).expect_err(url);
        assert_eq!(error.kind(), redis::ErrorKind::InvalidClientConfig, "{url}: {error}");
    }
}
