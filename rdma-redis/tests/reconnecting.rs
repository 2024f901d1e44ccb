//! `Reconnecting`, over the embedded fabric.

mod support;

use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::mpsc;
use std::task::Poll;

use rdma_redis::{Client, Reconnect};
use redis::ErrorKind;

use support::{Answer, Seen, fabric, polite};

/// A server that asks for a password and knows no right one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_tried_once() {
    let (_fabric, host, mut seen) = fabric(|_, command| match command {
        "AUTH SECRET" => Answer::Say("-WRONGPASS invalid username-password pair or user is disabled.\r\n"),
        _ => polite(command),
    });
    let client = Client::open(host, "valkey+rdma://:secret@192.0.2.1:6379").expect("a valid URL");
    let error = client.get_reconnecting_connection(Reconnect::default()).await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::AuthenticationFailed, "{error}");
    seen.close();
    let mut tries = 0;
    while let Some(Seen { command, .. }) = seen.recv().await {
        tries += usize::from(command == "AUTH SECRET");
    }
    assert_eq!(tries, 1);
}

/// Twenty requests queue behind one attempt to connect, which fails for good: nobody else tries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_queued_behind_an_attempt_shares_its_failure() {
    let (refuse, refused) = mpsc::channel::<()>();
    let refused = Mutex::new(refused);
    let (_fabric, host, mut seen) = fabric(move |connection, command| match (connection, command) {
        (0, "GET LEAVE") => Answer::Leave,
        (0, "AUTH SECRET") => Answer::Say("+OK\r\n"),
        (_, "AUTH SECRET") => {
            let _waited = refused.lock().expect("no panic").recv();
            Answer::Say("-WRONGPASS invalid username-password pair or user is disabled.\r\n")
        }
        _ => polite(command),
    });
    let client = Client::open(host, "valkey+rdma://:secret@192.0.2.1:6379").expect("a valid URL");
    let mut connection = client.get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    redis::cmd("GET").arg("leave").exec_async(&mut connection).await.expect_err("left");

    let (queued, mut all_queued) = tokio::sync::mpsc::channel::<()>(1);
    let requests: Vec<_> = (0..20)
        .map(|_| {
            let (mut connection, queued) = (connection.clone(), queued.clone());
            tokio::spawn(async move {
                let command = redis::cmd("PING");
                let mut request = std::pin::pin!(command.exec_async(&mut connection));
                // Polled once, a request waits for the connection.
                let pending = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending())).await;
                assert!(pending);
                drop(queued);
                request.await
            })
        })
        .collect();
    drop(queued);
    assert_eq!(all_queued.recv().await, None, "all have dropped theirs");
    drop(refuse);
    for request in requests {
        let error = request.await.expect("no panic").expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::AuthenticationFailed, "{error}");
    }
    seen.close();
    let mut tries = 0;
    while let Some(Seen { connection, .. }) = seen.recv().await {
        tries = tries.max(connection);
    }
    assert_eq!(tries, 1, "connections after the first");
}
