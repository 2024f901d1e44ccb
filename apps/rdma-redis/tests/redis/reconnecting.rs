use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::mpsc;
use std::task::Poll;

use rdma_redis::{Client, Reconnect};
use redis::{ErrorKind, PushKind};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::support::{Answer, Seen, URL, fabric, polite};

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

async fn commands(seen: &mut UnboundedReceiver<Seen>, connection: usize, last: &str) -> Vec<String> {
    let mut commands = Vec::new();
    while commands.last().is_none_or(|command| command != last) {
        let next = seen.recv().await.expect("a server");
        if next.connection == connection {
            commands.push(next.command);
        }
    }
    commands
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_under_way_fails_and_is_not_repeated() {
    let (_fabric, host, mut seen) = fabric(|connection, command| match (connection, command) {
        (0, "INCR COUNTER") => Answer::Leave,
        _ => polite(command),
    });
    let client = Client::open(host, URL).expect("a valid URL");
    let mut connection = client.get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    redis::cmd("INCR").arg("counter").exec_async(&mut connection).await.expect_err("executed or not");
    redis::cmd("PING").exec_async(&mut connection).await.expect("a new connection");
    let after = commands(&mut seen, 1, "PING").await;
    assert!(!after.iter().any(|command| command.starts_with("INCR")), "{after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_database_of_the_url_comes_back_and_one_selected_by_hand_does_not() {
    let (_fabric, host, mut seen) = fabric(|connection, command| match (connection, command) {
        (0, "GET LEAVE") => Answer::Leave,
        _ => polite(command),
    });
    let client = Client::open(host, format!("{URL}/2")).expect("a valid URL");
    let mut connection = client.get_reconnecting_connection(Reconnect::default()).await.expect("connects");
    redis::cmd("SELECT").arg(3).exec_async(&mut connection).await.expect("SELECT");
    redis::cmd("GET").arg("leave").exec_async(&mut connection).await.expect_err("left");
    redis::cmd("PING").exec_async(&mut connection).await.expect("a new connection");
    let before = commands(&mut seen, 0, "GET LEAVE").await;
    let selected = |commands: &[String]| -> Vec<String> {
        commands.iter().filter(|command| command.starts_with("SELECT")).cloned().collect()
    };
    assert_eq!(selected(&before), ["SELECT 2", "SELECT 3"]);
    let mut connection = connection.clone();
    redis::cmd("ECHO").arg("end").exec_async(&mut connection).await.expect("ECHO");
    assert_eq!(selected(&commands(&mut seen, 1, "ECHO END").await), ["SELECT 2"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_come_back_by_themselves() {
    const SUBSCRIBED: &str =
        ">3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n>3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$2\r\nhi\r\n";
    const BY_PATTERN: &str = ">3\r\n$10\r\npsubscribe\r\n$2\r\nn*\r\n:2\r\n";
    let (leave, told) = mpsc::channel::<()>();
    let told = Mutex::new(told);
    let (_fabric, host, _seen) = fabric(move |connection, command| match (connection, command) {
        (_, "SUBSCRIBE NEWS") => Answer::Say(SUBSCRIBED),
        (_, "PSUBSCRIBE N*") => Answer::Say(BY_PATTERN),
        (0, "GET LEAVE") => {
            let _told = told.lock().expect("no panic").recv();
            Answer::Leave
        }
        _ => polite(command),
    });
    let client = Client::open(host, format!("{URL}?protocol=resp3")).expect("a valid URL");
    let (sender, mut pushed) = unbounded_channel();
    let how = Reconnect::default().with_push_sender(sender);
    let mut connection = client.get_reconnecting_connection(how).await.expect("connects");
    connection.subscribe("news").await.expect("SUBSCRIBE");
    connection.psubscribe("n*").await.expect("PSUBSCRIBE");
    // An unawaited request, which tells the server when to leave.
    let mut elsewhere = connection.clone();
    let asked = tokio::spawn(async move { redis::cmd("GET").arg("leave").exec_async(&mut elsewhere).await });
    drop(leave);
    let mut kinds = Vec::new();
    while kinds.len() < 7 {
        kinds.push(pushed.recv().await.expect("a connection").kind);
    }
    use PushKind::{Disconnection, Message, PSubscribe, Subscribe};
    assert_eq!(kinds, [Subscribe, Message, PSubscribe, Disconnection, Subscribe, Message, PSubscribe]);
    asked.await.expect("no panic").expect_err("was under way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_unsubscribed_does_not_come_back() {
    let (_fabric, host, mut seen) = fabric(|connection, command| match (connection, command) {
        (_, "SUBSCRIBE A B") => Answer::Say(
            ">3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n>3\r\n$9\r\nsubscribe\r\n$1\r\nb\r\n:2\r\n",
        ),
        (_, "UNSUBSCRIBE A") => Answer::Say(">3\r\n$11\r\nunsubscribe\r\n$1\r\na\r\n:1\r\n"),
        (_, "SUBSCRIBE B") => Answer::Say(">3\r\n$9\r\nsubscribe\r\n$1\r\nb\r\n:1\r\n"),
        (0, "GET LEAVE") => Answer::Leave,
        _ => polite(command),
    });
    let client = Client::open(host, format!("{URL}?protocol=resp3")).expect("a valid URL");
    let how = Reconnect::default().with_push_sender(|_| Ok::<_, ()>(()));
    let mut connection = client.get_reconnecting_connection(how).await.expect("connects");
    connection.subscribe(&["a", "b"]).await.expect("SUBSCRIBE");
    connection.unsubscribe("a").await.expect("UNSUBSCRIBE");
    redis::cmd("GET").arg("leave").exec_async(&mut connection).await.expect_err("left");
    redis::cmd("PING").exec_async(&mut connection).await.expect("a new connection");
    let after = commands(&mut seen, 1, "PING").await;
    assert!(after.iter().any(|command| command == "SUBSCRIBE B"), "{after:?}");
}
