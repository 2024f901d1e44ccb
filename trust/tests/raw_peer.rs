//! The raw peer of the suites takes things in the order in which they came, however they fall between two looks.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use conformance::adversary::{Adversary, Incoming, Lurker, Shape};
use rdma_softsim::{Fabric, SoftSim};
use rustix::event::{PollFd, PollFlags, poll};
use trust::wrong::Wrong;

/// The last bytes and the disconnect both come after the queue was found empty and before the look for an event.
#[test]
fn last_bytes_come_before_the_end() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    // Whoever leaves, once there is somebody.
    let leaving: Arc<Mutex<Option<Adversary<SoftSim>>>> = Arc::default();
    let backend = Wrong::before_events(fabric.host(&[address.ip()]), {
        let leaving = Arc::clone(&leaving);
        move |events| {
            let Some(mut peer) = leaving.lock().unwrap().take() else { return };
            peer.say(b"last words").unwrap();
            peer.settle().unwrap();
            peer.disconnect().unwrap();
            let come = poll(&mut [PollFd::from_borrowed_fd(events, PollFlags::IN)], None).unwrap();
            assert_eq!(come, 1, "the disconnect is an event");
        }
    });
    let lurker = Lurker::new(&backend, address).unwrap();
    let mut peer =
        Adversary::request(&fabric.host(&[[192, 0, 2, 2].into()]), address, Shape::small()).unwrap();
    let mut server = lurker.accept(Shape::small()).unwrap();
    peer.await_established().unwrap();
    server.await_established().unwrap();
    server.register().unwrap();
    peer.handshake().unwrap();
    server.await_window().unwrap();
    *leaving.lock().unwrap() = Some(peer);
    assert_eq!(server.receive().unwrap(), Incoming::Notified(10));
    assert_eq!(server.receive().unwrap(), Incoming::Gone("disconnected"));
}
