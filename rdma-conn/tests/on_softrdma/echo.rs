//! The server of these programs, and how they connect to it.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::{Connect, Endpoint, Event, Keepalive, Limits, Options};
use rdma_verbs::Verbs;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::fabric::{Home, Running, SERVER, role};

/// Longer than a machine may stand still.
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn patient() -> Connect {
    let mut options = Options::default().handshake_timeout(LONG);
    options.protocol.keepalive = Some(Keepalive::NONE);
    options.protocol.window = 4096;
    Connect::default().timeout(LONG).options(options)
}

pub(crate) fn verbs() -> Verbs {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).expect("as many as allowed");
    Verbs::load().expect("the libraries of softrdma")
}

/// Starts a program that echoes. Returns it and its address.
pub(crate) fn server(home: &Home) -> (Running, String) {
    let mut server = home.program(SERVER, "echo::echoes", "");
    let address = server.line("listens on ");
    (server, address)
}

/// A program that echoes what its clients send.
#[test]
fn echoes() {
    let Some(_) = role("echo::echoes") else { return };
    let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
    let address = SocketAddr::new(SERVER.parse().expect("an address"), 0);
    let listener = endpoint.listen(address, patient().options).expect("a listener");
    println!("listens on {}", endpoint.local_addr(listener).expect("it listens"));
    loop {
        endpoint.wait(None).expect("waits");
        while let Some(event) = endpoint.next_event() {
            match event {
                Event::Readable(id) => {
                    let mut bytes = [0; 64];
                    while let Ok(Some(count @ 1..)) = endpoint.read(id, &mut bytes) {
                        endpoint.write(id, &[IoSlice::new(&bytes[..count])]).expect("writes");
                    }
                }
                Event::Ended(id) => {
                    println!("ended");
                    endpoint.abort(id);
                }
                Event::AcceptFailed(listener) => {
                    panic!("{}", endpoint.take_accept_error(listener).expect("an error"));
                }
                _ => {}
            }
        }
    }
}
