//! Tests that the soak finds changed bytes, lost keys, calls that hang, and resources that stay.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kv_store::Store;
use rdma_conn::Listener;
use rdma_softsim::Fabric;
use resp_rs::resp2::Frame;

use super::client::{LoadClient, LoadState, Work};
use super::face::{Blocking, ExchangeError, Face, Redis, SessionEnd, Tasks};
use super::figures::{Clients, Line, Objects, growth, more};
use super::keys::Command;
use super::{chart, faults};

/// How a server treats data that it has acknowledged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// A byte of a long value changes.
    Changes,
    /// A key is gone when the client returns.
    Forgets,
    /// All keys are gone then, as on a server that was killed.
    Killed,
    /// All keys are gone within a session; a connection that reconnects does not tell.
    KilledUnseen,
}

struct FakeServer {
    store: Store,
    wrong: Wrong,
    exchanges: u32,
}

impl FakeServer {
    fn new(wrong: Wrong) -> Self {
        Self { store: Store::default(), wrong, exchanges: 0 }
    }

    fn ask(&self, words: &[&[u8]]) -> Frame {
        let words = words.iter().map(|word| Frame::BulkString(Some(Bytes::copy_from_slice(word))));
        let mut reply = bytes::BytesMut::new();
        self.store.answer(Frame::Array(Some(words.collect())), &mut reply);
        resp_rs::resp2::parse_frame(reply.freeze()).expect("a reply").0
    }
}

impl Face for FakeServer {
    fn connect(&mut self) -> Result<(), ExchangeError> {
        match self.wrong {
            Wrong::Killed => drop(self.ask(&[b"FLUSHALL"])),
            // It does not know which session was the last.
            Wrong::Forgets => (1..200).for_each(|session| {
                let _count = self.ask(&[b"DEL", format!("soak:client:{session}:3").as_bytes()]);
            }),
            Wrong::Nothing | Wrong::Changes | Wrong::KilledUnseen => {}
        }
        Ok(())
    }

    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Frame>, ExchangeError> {
        self.exchanges += 1;
        if self.wrong == Wrong::KilledUnseen && self.exchanges.is_multiple_of(40) {
            let _ok = self.ask(&[b"FLUSHALL"]);
        }
        let replies = commands.iter().map(|command| match self.ask(&command.words()) {
            Frame::BulkString(Some(value)) if self.wrong == Wrong::Changes && value.len() > 1000 => {
                let mut value = value.to_vec();
                value[999] ^= 4;
                Frame::BulkString(Some(value.into()))
            }
            reply => reply,
        });
        Ok(replies.collect())
    }

    fn leave(&mut self, _: SessionEnd) -> Result<(), ExchangeError> {
        Ok(())
    }
}

fn client(face: impl Face + Send + 'static, server_is_killed: bool) -> LoadClient {
    let name = "client".to_string();
    let (face, server) = (Box::new(face), "server".to_string());
    LoadClient { name, face, work: Work::Keys, server, server_is_killed, idles: false, seed: 5 }
}

/// Lets a client run until it has completed some sessions or failed, and returns its failures.
fn complaints(client: LoadClient) -> Vec<String> {
    let (failures, conditional_failures) = all_failures(client);
    assert_eq!(conditional_failures, [""; 0]);
    failures
}

/// Runs the client. Returns its failures, and those that are excused if the server has ended.
fn all_failures(client: LoadClient) -> (Vec<String>, Vec<String>) {
    let progress = Arc::new(LoadState::new());
    let number = progress.watch(&client.name);
    let working = std::thread::spawn({
        let progress = Arc::clone(&progress);
        move || client.run(&progress, number)
    });
    let mut connected = 0;
    // Some losses are only found when the next session begins.
    while connected < 4 && progress.failures().is_empty() && progress.conditional_failures().is_empty() {
        connected += progress.take_tally().connected;
        std::thread::sleep(Duration::from_millis(5));
    }
    progress.stop.store(true, Ordering::Relaxed);
    working.join().expect("no panic");
    assert_eq!(progress.hung(), 0);
    (progress.failures(), progress.conditional_failures().into_iter().map(|doubt| doubt.what).collect())
}

#[test]
fn a_right_server_is_right() {
    assert_eq!(complaints(client(FakeServer::new(Wrong::Nothing), false)), [""; 0]);
}

#[test]
fn a_byte_that_changed_is_found() {
    let failures = complaints(client(FakeServer::new(Wrong::Changes), false));
    assert!(failures[0].contains("byte 999 of "), "{failures:?}");
}

#[test]
fn a_key_that_was_lost_is_found() {
    let failures = complaints(client(FakeServer::new(Wrong::Forgets), false));
    assert!(failures[0].contains(":3: nothing came back and not "), "{failures:?}");
}

#[test]
fn only_a_server_that_ended_may_lose_everything() {
    for wrong in [Wrong::Killed, Wrong::KilledUnseen] {
        assert_eq!(complaints(client(FakeServer::new(wrong), true)), [""; 0]);
        let (failures, conditional_failures) = all_failures(client(FakeServer::new(wrong), false));
        assert_eq!(failures, [""; 0]);
        assert!(
            conditional_failures[0].contains("has lost what it had answered with OK"),
            "{conditional_failures:?}"
        );
    }
}

#[test]
fn every_kind_of_client_works() {
    let fabric = Fabric::new();
    let server = std::net::SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[server.ip()]), server).expect("a listener");
    let store = Arc::new(Store::default());
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let store = Arc::clone(&store);
            std::thread::spawn(move || store.serve(stream));
        }
    });
    let backend = fabric.host(&[[192, 0, 2, 2].into()]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let handle = runtime.handle().clone();
    assert_eq!(complaints(client(Blocking::new(backend.clone(), server), false)), [""; 0]);
    assert_eq!(complaints(client(Tasks::new(backend.clone(), server, handle.clone()), false)), [""; 0]);
    let redis = Redis::new(backend, server, handle).expect("a valid address");
    assert_eq!(complaints(client(redis, false)), [""; 0]);
}

#[test]
fn what_is_left_behind_is_told() {
    let objects = |qp, mr| Objects::from([("qp".into(), qp), ("mr".into(), mr)]);
    assert_eq!(more(&objects(1, 2), &objects(1, 2)), None);
    assert_eq!(more(&objects(0, 2), &objects(1, 2)), None);
    assert_eq!(more(&objects(1, 5), &objects(1, 2)).as_deref(), Some("5 mr, at the beginning 2"));
    // A quarter and 16 MiB more than in the first half are allowed.
    assert_eq!(growth(&[30_000, 90_000, 80_000, 95_000]), None);
    assert!(growth(&[90_000, 95_000, 120_000, 150_000]).is_some());
}

#[test]
fn a_schedule_has_every_fault_again_and_again() {
    let count = faults::ALL.len();
    let twice: Vec<_> = faults::schedule(3).take(2 * count).collect();
    for part in twice.chunks(count) {
        for fault in faults::ALL {
            assert!(part.contains(fault), "{fault:?}");
        }
    }
    assert_eq!(twice, faults::schedule(3).take(2 * count).collect::<Vec<_>>());
    assert_ne!(twice, faults::schedule(4).take(2 * count).collect::<Vec<_>>());
}

#[test]
fn a_chart_shows_figures_and_faults() {
    let clients = |at, operations| {
        Line::Clients(Clients {
            at,
            seconds: 10.0,
            operations,
            p50: 900,
            p99: 4000,
            max: 2_000_000,
            ..Clients::default()
        })
    };
    let fault = |at, what: &str| Line::Fault { at, side: "servers".into(), what: what.into() };
    let lines = [
        clients(1010.0, 500),
        clients(1020.0, 0),
        fault(1003.0, "outage 3 s"),
        fault(1006.0, "none"),
        fault(1008.0, "kv_server is killed"),
    ];
    let svg = chart::draw(&lines).expect("a chart");
    assert!(svg.starts_with("<svg") && svg.contains("<polyline") && svg.contains("operations a second"));
    assert!(chart::draw(&[]).is_err());
}
