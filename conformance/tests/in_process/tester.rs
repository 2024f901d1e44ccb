//! The suite's raw peer handles input in the order of arrival, however it falls between two polls.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use conformance::tester::{Incoming, Listener, Peer, Shape};
use intercept::{Intercepted, Interceptor, Origin};
use rdma_backend::{Backend, QueuePairLimits};
use rdma_softsim::{Error, Fabric, SoftSim};
use rustix::event::{PollFd, PollFlags, poll};

/// Calls a function before each poll for an event, with the channel's descriptor.
struct BeforeEvents<F>(F);

impl<F: Fn(BorrowedFd<'_>) + Send + Sync + 'static> Interceptor<SoftSim> for BeforeEvents<F> {
    type Identifier = ();
    type QueuePair = ();

    fn identifier(&self, _: &Arc<<SoftSim as Backend>::Identifier>, _: Origin) {}

    fn queue_pair(
        &self,
        (): &(),
        _: &Arc<<SoftSim as Backend>::QueuePair>,
        _: &<SoftSim as Backend>::Domain,
        _: QueuePairLimits,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn before_events(&self, events: &<SoftSim as Backend>::EventChannel) {
        (self.0)(events.as_fd());
    }
}

/// The last bytes and the disconnect arrive between a poll of the queue and one for an event.
#[test]
fn last_bytes_come_before_the_end() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let leaving: Arc<Mutex<Option<Peer<SoftSim>>>> = Arc::default();
    let what = {
        let leaving = Arc::clone(&leaving);
        move |events: BorrowedFd<'_>| {
            let Some(mut peer) = leaving.lock().unwrap().take() else { return };
            peer.relays();
            peer.send_bytes(b"last words").unwrap();
            peer.settle().unwrap();
            peer.disconnect().unwrap();
            let come = poll(&mut [PollFd::from_borrowed_fd(events, PollFlags::IN)], None).unwrap();
            assert_eq!(come, 1, "the disconnect is an event");
        }
    };
    let backend = Intercepted::by(fabric.host(&[address.ip()]), BeforeEvents(what));
    let listener = Listener::new(&backend, address).unwrap();
    let mut peer = Peer::request(&fabric.host(&[[192, 0, 2, 2].into()]), address, Shape::small()).unwrap();
    let mut server = listener.accept(Shape::small()).unwrap();
    peer.await_established().unwrap();
    server.await_established().unwrap();
    server.register().unwrap();
    peer.handshake().unwrap();
    server.await_window().unwrap();
    *leaving.lock().unwrap() = Some(peer);
    assert_eq!(server.receive().unwrap(), Incoming::Notified(10));
    assert_eq!(server.receive().unwrap(), Incoming::Gone("disconnected"));
}
