//! Making the connections of tasks: accepted, requested, converted.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rdma_conn::{AsyncEndpoint, AsyncListener, AsyncStream, Connect, Limits, Listener, Options, Stream};
use rdma_softsim::Fabric;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{LONG, polled};
use crate::world::pattern;

#[tokio::test]
async fn an_accept_that_is_dropped_takes_no_wake_up_along() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("free");
    let listener = Arc::new(AsyncListener::try_from(listener).expect("is watched"));
    let first = tokio::spawn({
        let listener = Arc::clone(&listener);
        async move { listener.accept().await.map(|(stream, _)| stream) }
    });
    tokio::task::yield_now().await;
    {
        let mut second = pin!(listener.accept());
        assert!(polled(second.as_mut()).await.is_none(), "no peer has asked");
    }
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let dial = tokio::spawn(async move { AsyncStream::connect(&host, address).await });
    let accepted = timeout(LONG, first).await.expect("the first one hears of it").expect("does not panic");
    drop((accepted.expect("accepted"), dial));
}

#[tokio::test]
async fn a_cancelled_connect_is_gone() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let _unanswered = Listener::bind(&server, address).expect("a free address");
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let connect = AsyncStream::connect(&client, address);
    assert!(timeout(Duration::from_millis(50), connect).await.is_err(), "no task accepts");
    assert_eq!(fabric.resources([192, 0, 2, 2].into()), Default::default());
}

#[tokio::test]
async fn connections_come_about_without_anybody_reading() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = AsyncListener::bind(&fabric.host(&[address.ip()]), address).await.expect("free");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    // The client is connected when the server has registered its window, after the accept.
    let both = async { tokio::join!(AsyncStream::connect(&host, address), listener.accept()) };
    let (client, accepted) = timeout(LONG, both).await.expect("ends");
    let (mut client, (mut server, peer)) = (client.expect("connects"), accepted.expect("accepted"));
    client.write_all(b"early").await.expect("written");
    drop(client);
    assert_eq!(peer.ip(), std::net::IpAddr::from([192, 0, 2, 2]));
    let mut bytes = Vec::new();
    timeout(LONG, server.read_to_end(&mut bytes)).await.expect("in time").expect("in order");
    assert_eq!(bytes, b"early");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_one_endpoint_do_not_disturb_each_other() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut options = Options::default();
    options.protocol.window = 1000;
    let listener =
        AsyncListener::bind_with(&fabric.host(&[address.ip()]), address, options, Limits::default())
            .await
            .expect("free");
    let endpoint =
        AsyncEndpoint::new(&fabric.host(&[[192, 0, 2, 2].into()]), Limits::default()).expect("a device");
    let server = tokio::spawn(async move {
        for _ in 0..100 {
            let (stream, _) = listener.accept().await.expect("accepts");
            tokio::spawn(async move {
                let (mut from, mut to) = tokio::io::split(stream);
                tokio::io::copy(&mut from, &mut to).await
            });
        }
    });
    let mut clients = Vec::new();
    for seed in 0..100 {
        let mut stream = endpoint.connect(address, &Connect::default()).await.expect("connects");
        clients.push(tokio::spawn(async move {
            let sent: Vec<u8> = pattern(20_000).iter().map(|byte| byte ^ seed).collect();
            for chunk in sent.chunks(700) {
                stream.write_all(chunk).await.expect("written");
                let mut answer = vec![0; chunk.len()];
                stream.read_exact(&mut answer).await.expect("answered");
                assert!(answer == chunk);
            }
        }));
    }
    server.await.expect("does not panic");
    for client in clients {
        timeout(LONG, client).await.expect("every wait ends").expect("does not panic");
    }
}

/// What a user of `tokio::net` tries first.
#[tokio::test]
async fn a_listener_as_of_tokio() {
    let fabric = Fabric::new();
    let (server, host) = (fabric.host(&[[192, 0, 2, 1].into()]), fabric.host(&[[192, 0, 2, 2].into()]));
    // The first address has no host here.
    let elsewhere = SocketAddr::from(([203, 0, 113, 1], 6379));
    let here = SocketAddr::from(([192, 0, 2, 1], 6379));
    AsyncListener::bind(&server, elsewhere).await.expect_err("no device has it");
    let listener = AsyncListener::bind(&server, &[elsewhere, here][..]).await.expect("the second is free");
    listener.set_options(Options::default().receives(0)).expect_err("none at all are out of bounds");
    listener.set_options(Options::default().linger(LONG)).expect("within bounds");
    assert!(poll_fn(|cx| Poll::Ready(listener.poll_accept(cx).is_pending())).await, "no peer has come");

    let (client, accepted) =
        tokio::join!(AsyncStream::connect(&host, ("192.0.2.1", 6379)), listener.accept());
    let (mut client, (mut server, _)) = (client.expect("connects"), accepted.expect("accepts"));
    let told = format!("{client:?}");
    assert!(told.contains("192.0.2.1:6379") && told.contains("192.0.2.2:"), "{told}");
    for line in [
        format!("{listener:?}"),
        format!("{client:?}"),
        format!("{:?}", listener.endpoint()),
        format!("{:?}", listener.endpoint().downgrade()),
    ] {
        assert!(line.len() < 100 && !line.contains('\n'), "{line}");
    }
    assert_ne!(client.as_fd().as_raw_fd(), listener.as_fd().as_raw_fd());
    assert_eq!(server.as_fd().as_raw_fd(), listener.endpoint().as_fd().as_raw_fd());

    client.write_all(b"all of it").await.expect("written");
    let mut all = Vec::new();
    let (closed, read) = tokio::join!(client.close(LONG), server.read_to_end(&mut all));
    closed.expect("everything has arrived");
    read.expect("in order");
    assert_eq!(all, b"all of it");
}

#[tokio::test]
async fn streams_become_asynchronous() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("a free address");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let served = std::thread::spawn(move || listener.accept().map(|(stream, _)| (stream, listener)));
    let (dialed, host) = tokio::task::spawn_blocking(move || (Stream::connect(&host, address), host))
        .await
        .expect("does not panic");
    let mut dialed = dialed.expect("connects");
    let (accepted, listener) = served.join().expect("does not panic").expect("accepts");
    let line = format!("{dialed:?}");
    assert!(line.len() < 100, "{line}");
    std::io::Write::write_all(&mut dialed, b"before").expect("written");

    let mut server = AsyncStream::try_from(accepted).expect("is watched");
    let mut client = AsyncStream::try_from(dialed).expect("is watched");
    client.write_all(b" and after").await.expect("written");
    let mut bytes = [0; 16];
    timeout(LONG, server.read_exact(&mut bytes)).await.expect("in time").expect("comes");
    assert_eq!(&bytes, b"before and after");
    // A sleeping task is woken: a blocking stream has events turned off.
    let waits = tokio::spawn(async move { client.read_u8().await });
    tokio::task::yield_now().await;
    server.write_u8(7).await.expect("written");
    assert_eq!(timeout(LONG, waits).await.expect("in time").expect("does not panic").expect("comes"), 7);

    // One that is still being established.
    let dial = || {
        let host = host.clone();
        tokio::spawn(async move { AsyncStream::connect(&host, address).await })
    };
    let accept = async || loop {
        if let Some(accepted) = listener.try_accept().expect("accepts") {
            break accepted;
        }
        tokio::task::yield_now().await;
    };
    let dials = dial();
    let (endpoint, id) = accept().await;
    let mut server = AsyncStream::from_endpoint(endpoint, id).expect("is watched");
    let mut client = timeout(LONG, dials).await.expect("in time").expect("no panic").expect("connects");
    client.write_u8(8).await.expect("written");
    assert_eq!(timeout(LONG, server.read_u8()).await.expect("in time").expect("comes"), 8);

    // One whose endpoint has events that were never taken.
    let dials = dial();
    let (mut endpoint, id) = accept().await;
    while !endpoint.is_open(id) {
        endpoint.progress().expect("goes on");
        tokio::task::yield_now().await;
    }
    let mut server = AsyncStream::try_from(Stream::from_endpoint(endpoint, id)).expect("is watched");
    let mut client = timeout(LONG, dials).await.expect("in time").expect("no panic").expect("connects");
    let waits = tokio::spawn(async move { server.read_u8().await });
    tokio::task::yield_now().await;
    client.write_u8(9).await.expect("written");
    assert_eq!(timeout(LONG, waits).await.expect("in time").expect("does not panic").expect("comes"), 9);
}

#[test]
fn no_runtime() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let host = fabric.host(&[address.ip()]);
    let listener = Listener::bind(&host, address).expect("a free address");
    AsyncListener::try_from(listener).expect_err("it would have no driver");
}
