//! Bytes that are copied, and lent ones between them.

use std::io::IoSlice;
use std::sync::Arc;

use rdma_conn::{ConnectionId, Endpoint, Options};
use rdma_softsim::{DeviceKind, FaultPlan, Simulation, SimulationSettings, SoftSim};

use crate::world::{connected, pattern};

const BEFORE: usize = 700;
const AFTER: usize = 90;

/// A client with a send buffer of 64 KiB, and a server with a window of a MiB.
struct Pair {
    sim: Simulation,
    server: Endpoint<SoftSim>,
    client: Endpoint<SoftSim>,
    id: ConnectionId,
    there: ConnectionId,
}

impl Pair {
    fn new() -> Self {
        let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
        let mut options = Options::default();
        options.protocol.send_buffer = 64 << 10;
        let ((client, id), (server, there)) = connected(&sim, options, Options::default());
        let mut pair = Self { sim, server, client, id, there };
        // The first window comes, and the full send buffer is registered.
        pair.send(&[1; 5000]);
        pair
    }

    fn step(&mut self, got: &mut Vec<u8>) {
        self.server.progress().expect("the fabric stays");
        self.client.progress().expect("the fabric stays");
        let mut some = [0; 8192];
        while let Some(read) = self.server.read(self.there, &mut some).expect("the client is there") {
            got.extend(&some[..read]);
        }
        self.sim.step();
    }

    fn send(&mut self, bytes: &[u8]) {
        let (mut sent, mut got) = (0, Vec::new());
        while got.len() < bytes.len() {
            sent += self.client.write(self.id, &[IoSlice::new(&bytes[sent..])]).expect("open").unwrap_or(0);
            self.step(&mut got);
        }
        assert!(got == bytes);
    }

    /// Sends two pieces, the second of which is lent, and a third. Returns the doorbells and
    /// notifications of the first call, and the bytes that it took.
    fn send_framed(&mut self, lent: usize) -> (u64, u64, usize) {
        let bytes = pattern(BEFORE + lent + AFTER);
        let connection = self.client.connection(self.id).expect("is there");
        let mut buffer = connection.register_buffer(lent).expect("registered");
        assert!(buffer.write(0, &bytes[BEFORE..BEFORE + lent]));
        let buffer = Arc::new(buffer);
        let counts = |client: &Endpoint<SoftSim>, id| {
            let connection = client.connection(id).expect("is there");
            (connection.work().doorbells, connection.counters().data_notifications_sent)
        };
        let before = counts(&self.client, self.id);
        let (mut sent, mut got, mut first) = (0, Vec::new(), None);
        while got.len() < bytes.len() {
            let [one, two] = [&bytes[..BEFORE], &bytes[BEFORE + lent..]];
            let of_lent = sent.clamp(BEFORE, BEFORE + lent) - BEFORE..lent;
            let one = IoSlice::new(&one[sent.min(BEFORE)..]);
            let two = IoSlice::new(&two[sent.saturating_sub(BEFORE + lent)..]);
            sent += self
                .client
                .lend_framed(self.id, &[one], &buffer, of_lent, &[two])
                .expect("open")
                .unwrap_or(0);
            let now = counts(&self.client, self.id);
            first.get_or_insert((now.0 - before.0, now.1 - before.1, sent));
            self.step(&mut got);
        }
        assert!(got == bytes, "as if all of them had been written");
        while Arc::strong_count(&buffer) > 1 {
            self.step(&mut got);
        }
        first.expect("there was a call")
    }
}

/// VR-XFER-004: although the lent bytes are more than the send buffer has.
#[test]
fn one_doorbell_and_one_notification_carry_all_three() {
    let mut pair = Pair::new();
    assert_eq!(pair.send_framed(300_000), (1, 1, BEFORE + 300_000 + AFTER));
}

#[test]
fn what_the_window_does_not_take_follows() {
    let mut pair = Pair::new();
    // What is behind the loan is taken, and waits for the next window.
    assert_eq!(pair.send_framed(3 << 20), (1, 1, BEFORE + (3 << 20) + AFTER));
    assert_eq!(pair.send_framed(1000).2, BEFORE + 1000 + AFTER);
}

#[test]
fn nothing_is_taken_for_a_range_outside_the_buffer() {
    let mut pair = Pair::new();
    let buffer = pair.client.connection(pair.id).expect("is there").register_buffer(10).expect("registered");
    let refused = pair.client.lend_framed(pair.id, &[IoSlice::new(b"abc")], &Arc::new(buffer), 5..11, &[]);
    refused.expect_err("not inside");
    pair.send(b"what comes next");
}
