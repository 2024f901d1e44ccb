//! Options for cards and their networks reach the device.

use std::io::IoSlice;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_conn::{Access, Error, Options, Pages};
use rdma_softsim::trace::EntryKind;
use rdma_softsim::{Capture, Link, Simulation, Transfer};

use crate::world::{connected, simulation};

const SERVER: [u8; 4] = [192, 0, 2, 1];

#[derive(Clone, Default)]
struct Classes(Arc<Mutex<Vec<u8>>>);

impl Capture for Classes {
    fn pass(&mut self, transfer: &Transfer<'_>) -> ControlFlow<()> {
        self.0.lock().expect("is held for a push").push(transfer.traffic_class);
        ControlFlow::Continue(())
    }

    fn end(&mut self, _connection: u64) {}
}

#[test]
fn the_class_of_the_side_that_dials_is_that_of_both() {
    let classed = Options::default().traffic_class(Some(104));
    let none = Options::default();
    // The option of the accepting side changes nothing.
    for (ours, theirs, class) in [(classed, none, 104), (none, classed, 0)] {
        let (sim, classes) = (simulation(), Classes::default());
        assert!(sim.fabric().capture(Box::new(classes.clone())));
        let ((mut client, own), (mut server, id)) = connected(&sim, ours, theirs);
        client.write(own, &[IoSlice::new(b"there")]).expect("is open");
        server.write(id, &[IoSlice::new(b"and back")]).expect("is open");
        sim.advance(sim.now().after(Duration::from_millis(1)));
        let seen = classes.0.lock().expect("is held for a push").clone();
        // Each side sends its window, its bytes, and the answers.
        assert!(seen.len() >= 8 && seen.iter().all(|found| *found == class), "{seen:?}");
    }
}

#[test]
fn the_time_out_of_acknowledgements_says_when_a_peer_is_gone() {
    // 4.096 µs · 2^10, and seven attempts. The simulated device waits 67 ms by default.
    let waited = |options: Options| {
        let sim = simulation();
        let ((mut client, own), _server) = connected(&sim, options, Options::default());
        sim.fabric().set_link(SERVER.into(), Link::Down);
        client.write(own, &[IoSlice::new(b"unheard")]).expect("has heard of nothing");
        let before = sim.now();
        while client.check(own).is_ok() {
            assert!(sim.step(), "nothing more happens");
            client.progress().expect("the fabric stays");
        }
        sim.now().since(before)
    };
    let (brief, usual) = (waited(Options::default().ack_timeout(Some(10))), waited(Options::default()));
    assert!((28..40).contains(&brief.as_millis()), "{brief:?}");
    assert!(usual > 10 * brief, "{usual:?}");
}

#[test]
fn a_time_out_has_five_bits() {
    assert!(Options::default().ack_timeout(Some(31)).check().is_ok());
    let error = Options::default().ack_timeout(Some(32)).check().expect_err("is out of bounds");
    assert!(matches!(error, Error::Options { field: "ack_timeout", .. }), "{error}");
}

/// Returns the rights of each host's regions, the server's first.
fn registered(sim: &Simulation) -> [Vec<Access>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    for entry in sim.take_trace() {
        if let EntryKind::Registered { host, access } = entry.what {
            found[host as usize].push(access);
        }
    }
    found
}

#[test]
fn received_bytes_alone_are_written_in_any_order_and_only_if_asked() {
    let sim = simulation();
    let ours = Options::default().relaxed_ordering(true).eager_send_buffer(true);
    let ((client, own), _server) = connected(&sim, ours, Options::default());
    let connection = client.connection(own).expect("is open");
    let _landing = connection.register_landing(1 << 16).expect("there is room");
    let _sending = connection.register_buffer(1 << 16).expect("there is room");
    let [server, client] = registered(&sim);
    assert!(server.iter().all(|access| !access.allows(Access::RELAXED_ORDERING)), "{server:?}");
    // Two windows at least, and the memory to receive into. Messages and the send buffer do not.
    let relaxed = |access: &&Access| access.allows(Access::RELAXED_ORDERING);
    assert!(client.iter().filter(relaxed).count() >= 2, "{client:?}");
    for access in client {
        let [any_order, written] =
            [Access::RELAXED_ORDERING, Access::REMOTE_WRITE].map(|right| access.allows(right));
        assert_eq!(any_order, written, "{access:?}");
    }
}

/// A fabric in a process cannot choose its pages. It says so, and the connection works as usual.
#[test]
fn without_huge_pages_there_are_usual_ones() {
    let sim = simulation();
    let mut ours = Options::default().huge_pages(true);
    ours.protocol.window = 4 << 20;
    let ((client, own), _server) = connected(&sim, ours, Options::default());
    assert_eq!(client.connection(own).map(|connection| connection.pages()), Some(Pages::Usual));
}
