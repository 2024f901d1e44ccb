//! Bounded waits: a server that accepts connections and does not answer, over the embedded fabric.
//!
//! The server reports what it has read, so a test knows where the client waits. It then stops
//! tokio's clock, which jumps to the next timer.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use rdma_redis::{Client, Reconnect};
use rdma_softsim::{Fabric, SoftSim};
use redis::RedisResult;
use redis::aio::ConnectionLike;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;
use tokio::time::{Instant, advance, pause, resume, timeout};

use crate::support::{Answer, Seen, URL, fabric, polite};

/// Longer than anything should take, on a clock that jumps.
const FOR_EVER: Duration = Duration::from_secs(24 * 3600);

fn client(host: SoftSim) -> Client<SoftSim> {
    Client::open(host, URL).expect("a valid URL")
}

async fn given_up<T: Send + 'static, F>(kind: &str, connect: impl FnOnce(Client<SoftSim>) -> F)
where
    F: Future<Output = RedisResult<T>> + Send + 'static,
{
    let (_fabric, host, mut seen) = fabric(|_, _| Answer::Nothing);
    let connecting = tokio::spawn(connect(client(host)));
    seen.recv().await.expect("a server");
    pause();
    let made = timeout(FOR_EVER, connecting).await.expect("an end").expect("no panic");
    let error = made.err().unwrap_or_else(|| panic!("{kind}: a server that says nothing serves no client"));
    assert!(error.is_timeout(), "{kind}: {error}");
    resume();
}

#[tokio::test]
async fn a_mute_server_ends_every_kind_of_connection_in_time() {
    given_up("multiplexed", |client| async move { client.get_multiplexed_async_connection().await }).await;
    given_up("pubsub", |client| async move { client.get_async_pubsub().await }).await;
    given_up("reconnecting", |client| async move {
        client.get_reconnecting_connection(Reconnect::default()).await
    })
    .await;
}

#[tokio::test]
async fn all_who_wait_for_a_connection_fail_together() {
    // Only the first connection is served, up to the first real command.
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
    // The attempt began before the clock stopped. Two deadlines in a row would take twice as long.
    let latest = Instant::now() + Reconnect::default().deadline * 3 / 2;
    let mut ends = Vec::new();
    for request in requests {
        let (late, at) = timeout(FOR_EVER, request).await.expect("an end").expect("no panic");
        assert!(late);
        ends.push(at);
    }
    assert!(ends.iter().all(|end| *end == ends[0]), "one after another: {ends:?}");
    assert!(ends[0] <= latest, "the deadline is for all attempts together");
}

fn hesitant() -> (Fabric, Client<SoftSim>, mpsc::Sender<()>, UnboundedReceiver<Seen>) {
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let (fabric, host, seen) = fabric(move |_, command| match command {
        "GET LARGE" => match released.lock().expect("no panic").recv() {
            Ok(()) => Answer::Say("$5\r\nvalue\r\n"),
            Err(_) => Answer::Nothing,
        },
        _ => polite(command),
    });
    (fabric, client(host), release, seen)
}

/// Requests a value. Returns when the server has read the request, with the clock stopped.
async fn asked(
    mut connection: impl ConnectionLike + Send + 'static,
    seen: &mut UnboundedReceiver<Seen>,
) -> JoinHandle<RedisResult<String>> {
    let request =
        tokio::spawn(async move { redis::cmd("GET").arg("large").query_async(&mut connection).await });
    while seen.recv().await.expect("a server").command != "GET LARGE" {}
    pause();
    request
}

#[tokio::test]
async fn a_reply_may_take_minutes_on_every_kind_of_connection() {
    let (_fabric, client, release, mut seen) = hesitant();
    let plain = client.get_multiplexed_async_connection().await.expect("connects");
    let returning = client.get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    let request = asked(plain, &mut seen).await;
    reply_after_minutes(request, &release).await;
    let request = asked(returning, &mut seen).await;
    reply_after_minutes(request, &release).await;
}

async fn reply_after_minutes(request: JoinHandle<RedisResult<String>>, release: &mpsc::Sender<()>) {
    advance(Duration::from_secs(120)).await;
    resume();
    release.send(()).expect("the server waits");
    assert_eq!(request.await.expect("no panic").expect("the value"), "value");
}

#[tokio::test]
async fn no_reply_is_awaited_for_ever_on_any_kind_of_connection() {
    let (_fabric, client, _release, mut seen) = hesitant();
    let plain = client.get_multiplexed_async_connection().await.expect("connects");
    let returning = client.get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    no_reply(plain, &mut seen).await;
    resume();
    no_reply(returning, &mut seen).await;
}

async fn no_reply(connection: impl ConnectionLike + Send + 'static, seen: &mut UnboundedReceiver<Seen>) {
    let request = asked(connection, seen).await;
    let ended = timeout(FOR_EVER, request).await.expect("an end").expect("no panic");
    assert!(ended.expect_err("no reply").is_timeout());
}
