use std::io;
use std::sync::{Arc, Mutex};

use rdma_redis::{Client, Settings, Transport};
use rdma_softsim::{Fabric, SoftSim};
use redis::ErrorKind;
use tracing::Level;

use crate::support::{Answer, URL, fabric, polite, serve_tcp};

async fn pinged(client: &Client<SoftSim>) -> Transport {
    assert_eq!(client.transport(), None, "before the first connection");
    let mut connection = client.get_multiplexed_async_connection().await.expect("connects");
    redis::cmd("PING").exec_async(&mut connection).await.expect("PING");
    client.transport().expect("there is a connection")
}

fn lonely() -> SoftSim {
    Fabric::new().host(&[[192, 0, 2, 2].into()])
}

#[tokio::test]
async fn tcp_is_used_where_nothing_listens_for_rdma() {
    let (port, _seen) = serve_tcp(|_, command| polite(command));
    let url = format!("valkey+rdma://127.0.0.1:{port}?timeout=2&fallback=tcp");
    assert_eq!(pinged(&Client::open(lonely(), &url).expect("a valid URL")).await, Transport::Tcp);

    let another_port = format!("valkey+rdma://127.0.0.1:1?timeout=2&fallback=tcp:{port}");
    assert_eq!(pinged(&Client::open(lonely(), &another_port).expect("a valid URL")).await, Transport::Tcp);

    let mut subscriber =
        Client::open(lonely(), &url).expect("a valid URL").get_async_pubsub().await.expect("by TCP");
    drop(subscriber.on_message());
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_fallback_is_warned_of_once() {
    let lines = Lines::default();
    let (log, to) = (tracing_subscriber::fmt(), lines.clone());
    let log = log.with_ansi(false).with_max_level(Level::DEBUG).with_writer(move || to.clone()).finish();
    // For all threads: one without a subscriber may switch off an event for the others.
    tracing::subscriber::set_global_default(log).expect("the only one");
    let (port, _seen) = serve_tcp(|_, command| polite(command));
    let url = format!("valkey+rdma://127.0.0.1:{port}?timeout=2&fallback=tcp");
    let client = Client::open(lonely(), &url).expect("a valid URL");
    for _ in 0..3 {
        client.clone().get_multiplexed_async_connection().await.expect("by TCP");
    }
    let said = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
    // Other tests log as well.
    let ours = format!("port={port} ");
    let at = |level: &str| {
        let told = |line: &&str| [level, "using TCP", &ours].iter().all(|part| line.contains(part));
        said.lines().filter(told).count()
    };
    assert_eq!((at(" WARN "), at("DEBUG ")), (1, 2), "{said}");
}

#[tokio::test]
async fn without_the_option_there_is_no_tcp() {
    let (port, mut seen) = serve_tcp(|_, command| polite(command));
    let client = Client::open(lonely(), format!("valkey+rdma://127.0.0.1:{port}")).expect("a valid URL");
    let error = client.get_multiplexed_async_connection().await.expect_err("no RDMA");
    assert!(error.is_io_error(), "{error}");
    assert!(seen.try_recv().is_err(), "nothing came by TCP");
}

#[tokio::test]
async fn rdma_is_used_where_it_is() {
    let (_fabric, host, _seen) = fabric(|_, command| polite(command));
    let client = Client::open(host, format!("{URL}?fallback=tcp")).expect("a valid URL");
    assert_eq!(pinged(&client).await, Transport::Rdma);
}

#[tokio::test]
async fn a_machine_without_rdma_takes_the_fallback_or_says_so() {
    let missing = || Err::<SoftSim, _>(io::Error::other("librdmacm.so.1 is not installed"));
    let (port, _seen) = serve_tcp(|_, command| polite(command));
    let url = format!("valkey+rdma://127.0.0.1:{port}");
    let error =
        Client::with_fallback(missing(), &url, Settings::default()).expect_err("nothing to connect with");
    assert!(error.to_string().contains("librdmacm"), "{error}");
    let url = format!("{url}?timeout=2&fallback=tcp");
    let client = Client::with_fallback(missing(), &url, Settings::default()).expect("TCP will do");
    assert_eq!(pinged(&client).await, Transport::Tcp);
}

#[tokio::test]
async fn who_is_refused_by_rdma_does_not_try_by_tcp() {
    let (port, mut seen) = serve_tcp(|_, command| polite(command));
    let (_fabric, host, _by_rdma) = fabric(|_, _| Answer::Say("-WRONGPASS wrong\r\n"));
    let url = format!("valkey+rdma://:secret@192.0.2.1:6379?fallback=tcp:{port}");
    let client = Client::open(host, &url).expect("a valid URL");
    let error = client.get_multiplexed_async_connection().await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::AuthenticationFailed, "{error}");
    assert!(seen.try_recv().is_err(), "nothing came by TCP");
}

#[tokio::test]
async fn an_error_says_what_failed_by_each() {
    let client = Client::open(lonely(), "valkey+rdma://127.0.0.1:1?fallback=tcp").expect("a valid URL");
    let error =
        client.get_multiplexed_async_connection().await.expect_err("nothing listens there").to_string();
    assert!(error.contains("by RDMA: ") && error.contains("by TCP to port 1: "), "{error}");
}
