//! A password is never printed: not by `Debug` of a public type that contains one, not by an error,
//! and not in a log. A type that gets a password is added here.

use std::io::Write as _;
use std::time::Duration;

use rdma_bridge::Place;
use rdma_conn::{Connect, Listener, Stream};
use rdma_kv::Login;
use rdma_redis::{Client, Endpoints, Reconnect};
use rdma_softsim::SoftSim;
use tokio::runtime::{Builder, Runtime};

use crate::passwords::{PASSWORD, debug, error, hidden_in_the_log, log};
use crate::user_errors::{SERVER, hosts};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// A server with one answer to everything. It serves as long as the test's process lives.
fn answers(host: &SoftSim, reply: &'static [u8]) {
    let listener = Listener::bind(host, SERVER).expect("a free port");
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let mut client = kv_store::FrameReader::new(stream);
                while let Ok(Some(_)) = client.frame() {
                    if client.stream().write_all(reply).and_then(|()| client.stream().flush()).is_err() {
                        break;
                    }
                }
            });
        }
    });
}

const WRONG: &[u8] = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n";

#[test]
fn of_rdma_redis() {
    log();
    let (_fabric, server, host) = hosts();
    for url in [
        "valkey+rdma://user:hunter2@",
        "valkey+rdma://user:hunter2@192.0.2.1:99999",
        "valkey+rdma://user:hunter2@192.0.2.1/no-number",
        "valkey+rdma://user:hunter2@192.0.2.1#fragment",
        "valkey+rdma://user:hunter2@192.0.2.1?timeout=never",
        "valkey+rdma://user:hunter2@192.0.2.1?fallback=udp",
        "valkey+rdma://192.0.2.1?password=hunter2",
        "valkey+rdma://192.0.2.1?timeout=hunter2",
        "redis://user:hunter2@192.0.2.1",
        "user:hunter2@192.0.2.1",
    ] {
        let refused = Client::open(host.clone(), url).expect_err(url);
        error(url, &refused);
    }
    let url = "valkey+rdma://user:hunter2@192.0.2.1:6379/0?timeout=20";
    let endpoints = Endpoints::from(host);
    debug("Endpoints", &endpoints);
    let client = Client::open(endpoints, url).expect("a URL");
    debug("Client", &client);
    runtime().block_on(async {
        let refused = client.get_multiplexed_async_connection().await.expect_err("where nothing listens");
        error("where nothing listens", &refused);
        answers(&server, WRONG);
        let wrong = client.get_multiplexed_async_connection().await.expect_err("it is wrong");
        error("a wrong password", &wrong);
        let how = Reconnect { deadline: Duration::from_millis(1), ..Reconnect::default() };
        debug("Reconnect", &how);
        if let Err(wrong) =
            client.get_reconnecting_connection(how).await.map(|now| debug("Reconnecting", &now))
        {
            error("a wrong password, again", &wrong);
        }
    });
    hidden_in_the_log();
}

#[test]
fn of_rdma_kv() {
    log();
    let login = Login::default().user("user", PASSWORD).database(3);
    debug("Login", &login);
    debug("Login", &Login::default().password(PASSWORD));
    let repeats = b"-ERR unknown command 'AUTH', with args beginning with: 'user' 'hunter2' \r\n";
    for reply in [WRONG, repeats, b"$7\r\nwhat is\r\n", b":1\r\n"] {
        let (_fabric, server, host) = hosts();
        answers(&server, reply);
        let stream = Stream::connect_with(&host, SERVER, &Connect::default()).expect("connects");
        let mut client = rdma_kv::Client::new(stream);
        let refused = client.log_in(&login).expect_err("refused");
        error(&String::from_utf8_lossy(reply), &refused);
        debug("rdma_kv::Client", &client);
    }
    hidden_in_the_log();
}

#[test]
fn of_rdma_bridge() {
    for place in [
        "tcp://user:hunter2@192.0.2.1:6379",
        "rdma://user:hunter2@192.0.2.1:6379",
        "redis://user:hunter2@192.0.2.1:6379",
        "user:hunter2@192.0.2.1:6379",
        "tcp://user:hunter2@192.0.2.1",
    ] {
        match place.parse::<Place>() {
            Ok(place) => debug("Place", &place),
            Err(refused) => error(place, &refused),
        }
    }
}
