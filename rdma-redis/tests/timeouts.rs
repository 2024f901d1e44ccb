//! Waits that end: a server that takes connections and says nothing, over the embedded fabric.
//!
//! The server tells what it has read, so a test knows where the client waits; then it stops tokio's clock, which from there on
//! jumps to whatever is due next.

mod support;

use std::time::Duration;

use rdma_redis::{Client, Reconnect};
use rdma_softsim::SoftSim;
use redis::RedisError;
use tokio::time::{Instant, pause, timeout};

use support::{Answer, URL, fabric, polite};

/// Longer than anything should take, on a clock that jumps.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

fn client(host: SoftSim) -> Client<SoftSim> {
    Client::open(host, URL).expect("a valid URL")
}

/// The error that `connecting` ends with, after the server has read the first command of it.
async fn given_up<T: Send + 'static>(
    connecting: impl Future<Output = Result<T, RedisError>> + Send + 'static,
    seen: &mut tokio::sync::mpsc::UnboundedReceiver<support::Seen>,
) -> RedisError {
    let connecting = tokio::spawn(connecting);
    seen.recv().await.expect("a server");
    pause();
    let made = timeout(FOR_EVER, connecting).await.expect("an end").expect("no panic");
    made.err().expect("a server that says nothing serves nobody")
}

#[tokio::test]
async fn a_mute_server_ends_a_multiplexed_connection_in_time() {
    let (_fabric, host, mut seen) = fabric(|_, _| Answer::Nothing);
    let client = client(host);
    let error = given_up(async move { client.get_multiplexed_async_connection().await }, &mut seen).await;
    assert!(error.is_timeout(), "{error}");
}

#[tokio::test]
async fn a_mute_server_ends_a_subscriber_in_time() {
    let (_fabric, host, mut seen) = fabric(|_, _| Answer::Nothing);
    let client = client(host);
    let error = given_up(async move { client.get_async_pubsub().await }, &mut seen).await;
    assert!(error.is_timeout(), "{error}");
}

#[tokio::test]
async fn a_mute_server_ends_a_reconnecting_connection_in_time() {
    let (_fabric, host, mut seen) = fabric(|_, _| Answer::Nothing);
    let client = client(host);
    let connecting = async move { client.get_reconnecting_connection(Reconnect::default()).await };
    let error = given_up(connecting, &mut seen).await;
    assert!(error.is_timeout(), "{error}");
}

#[tokio::test]
async fn all_who_wait_for_a_connection_fail_together() {
    // The first connection is served up to the first real command; no later one is.
    let (_fabric, host, mut seen) = fabric(|connection, command| match (connection, command) {
        (0, "GET LEAVE") => Answer::Leave,
        (0, _) => polite(command),
        _ => Answer::Nothing,
    });
    let mut connection =
        client(host).get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    redis::cmd("GET").arg("leave").exec_async(&mut connection).await.expect_err("left");

    let requests: Vec<_> = (0..20)
        .map(|_| {
            let mut connection = connection.clone();
            tokio::spawn(async move {
                let failed = redis::cmd("PING").exec_async(&mut connection).await.expect_err("mute");
                (failed.is_timeout(), Instant::now())
            })
        })
        .collect();
    while seen.recv().await.expect("a server").connection == 0 {}
    pause();
    let mut ends = Vec::new();
    for request in requests {
        let (late, at) = timeout(FOR_EVER, request).await.expect("an end").expect("no panic");
        assert!(late);
        ends.push(at);
    }
    assert!(ends.iter().all(|end| *end == ends[0]), "one after another: {ends:?}");
}
