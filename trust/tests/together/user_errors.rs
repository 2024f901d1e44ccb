//! Errors of users: their text says who is at fault and what to do.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::ErrorKind;
use rdma_conn::{Connect, Error, Listener, Stream};
use rdma_softsim::{Fabric, Limits, Link, SoftSim};
use rdma_verbs::Verbs;

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
pub(crate) const SERVER: SocketAddr =
    SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 6379);
const LONG: Duration = Duration::from_secs(60);

#[track_caller]
fn says(error: &Error, kind: io::ErrorKind, parts: &[&str]) {
    let text = error.to_string();
    println!("{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    let as_io = io::Error::from(error.clone());
    assert_eq!((as_io.kind(), as_io.to_string()), (kind, text));
}

fn failure(client: &SoftSim, host: &str) -> Error {
    Stream::connect_with(client, host, &Connect::default().timeout(LONG)).expect_err("this cannot work")
}

fn soon(client: &SoftSim, host: &str) -> Error {
    let impatient = Connect::default().timeout(Duration::from_millis(300));
    Stream::connect_with(client, host, &impatient).expect_err("this cannot work")
}

pub(crate) fn hosts() -> (Fabric, SoftSim, SoftSim) {
    let fabric = Fabric::new();
    let (server, client) = (fabric.host(&[SERVER.ip()]), fabric.host(&[CLIENT]));
    (fabric, server, client)
}

/// On a machine without RDMA. With a device there is nothing to see.
#[test]
fn no_device() {
    let error = match Verbs::load() {
        // Without the libraries, the message is the loader's.
        Err(error) => {
            let text = error.to_string();
            println!("{text}");
            assert!(text.contains("Install the RDMA runtime") || text.contains("rdma-core"), "{text}");
            return;
        }
        Ok(verbs) => match Listener::bind(&verbs, SocketAddr::from(([0, 0, 0, 0], 0))) {
            Ok(_) => return println!("skipped: there is an RDMA device"),
            Err(error) => error,
        },
    };
    assert!(matches!(error, Error::Backend { kind: ErrorKind::NoDevice, .. }), "{error:?}");
    says(&error, io::ErrorKind::Unsupported, &["opening RDMA: ", "rdma_create_event_channel", "modprobe"]);
}

#[test]
fn no_such_host() {
    let (_, _, client) = hosts();
    // RFC 6761: this name never has an address.
    let error = failure(&client, "valkey.invalid:6379");
    let Error::NoSuchHost { source, .. } = &error else { panic!("{error:?}") };
    says(&error, source.kind(), &["cannot find the host valkey.invalid:6379"]);
    let error = failure(&client, "no-port");
    assert!(matches!(error, Error::NoSuchHost { .. }), "{error:?}");
    says(&error, io::ErrorKind::InvalidInput, &["cannot find the host no-port", "port"]);
}

#[test]
fn refused() {
    let (_fabric, _server, client) = hosts();
    let error = failure(&client, &SERVER.to_string());
    assert!(matches!(error, Error::Refused { peer } if peer == SERVER), "{error:?}");
    let parts = ["192.0.2.1:6379 refused the connection", "nothing listens there for RDMA", "--rdma-port"];
    says(&error, io::ErrorKind::ConnectionRefused, &parts);
}

#[test]
fn unknown_address() {
    let (_, _, client) = hosts();
    let error = soon(&client, "192.0.2.77:6379");
    assert!(matches!(error, Error::Unreachable { .. } | Error::TimedOut { .. }), "{error:?}");
    says(&error, io::ErrorKind::TimedOut, &[]);
}

#[test]
fn timed_out() {
    let (fabric, server, client) = hosts();
    let _listener = Listener::bind(&server, SERVER).expect("a free port");
    fabric.set_link(SERVER.ip(), Link::Down);
    let error = soon(&client, &SERVER.to_string());
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    says(&error, io::ErrorKind::TimedOut, &[&format!("timed out after 300ms connecting ({SERVER})")]);
}

#[test]
fn address_of_another_machine() {
    let (_fabric, server, _) = hosts();
    let elsewhere = SocketAddr::from((CLIENT, 6379));
    let error = Listener::bind(&server, elsewhere).expect_err("not an address of this host");
    assert!(matches!(error, Error::Backend { kind: ErrorKind::Address, .. }), "{error:?}");
    let text = "listening: 192.0.2.2 is not an address of this host";
    says(&error, io::ErrorKind::AddrNotAvailable, &[text]);
}

#[test]
fn address_in_use() {
    let (_fabric, server, _) = hosts();
    let _first = Listener::bind(&server, SERVER).expect("a free port");
    let error = Listener::bind(&server, SERVER).expect_err("the port is taken");
    assert!(matches!(error, Error::Backend { kind: ErrorKind::Address, .. }), "{error:?}");
    says(&error, io::ErrorKind::AddrNotAvailable, &["listening: 192.0.2.1:6379 is in use"]);
}

/// The client learns what it lacks; the server why it refused one, and that client that it was.
#[test]
fn locked_memory_too_small() {
    let fabric = Fabric::new();
    let small = Limits { locked_memory: 512 << 10, ..Limits::default() };
    let (server, client) = (fabric.host(&[SERVER.ip()]), fabric.host_with(&[CLIENT], small));
    let _listener = Listener::bind(&server, SERVER).expect("a free port");
    let error = failure(&client, &SERVER.to_string());
    assert!(matches!(error, Error::Backend { kind: ErrorKind::Memory, .. }), "{error:?}");
    let parts = [
        "registering memory: cannot register 1048576 bytes",
        "of 524288 bytes of locked memory",
        "ulimit -l",
    ];
    says(&error, io::ErrorKind::OutOfMemory, &parts);
    let held = fabric.resources(CLIENT);
    assert_eq!((held.registered_bytes, held.queue_pairs), (0, 0), "nothing is left: {held:?}");
}

#[test]
fn locked_memory_too_small_for_the_server() {
    let fabric = Fabric::new();
    let small = Limits { locked_memory: 1 << 20, ..Limits::default() };
    let (server, client) = (fabric.host_with(&[SERVER.ip()], small), fabric.host(&[CLIENT]));
    let listener = Listener::bind(&server, SERVER).expect("a free port");
    let connecting = std::thread::spawn(move || failure(&client, &SERVER.to_string()));
    let error = listener.accept_timeout(LONG).expect_err("too little memory");
    assert!(matches!(error, Error::Backend { kind: ErrorKind::Memory, .. }), "{error:?}");
    says(&error, io::ErrorKind::OutOfMemory, &["registering memory", "locked memory", "ulimit -l"]);
    let error = connecting.join().expect("the client's thread");
    assert!(matches!(error, Error::Rejected { .. }), "{error:?}");
    says(&error, io::ErrorKind::ConnectionRefused, &["192.0.2.1:6379 rejected the connection (reason 28)"]);
}
