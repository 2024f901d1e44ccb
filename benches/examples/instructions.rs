//! Instructions that a stream spends on a write and a read of 64 bytes, without the device: what `benches/instructions` counts.
//!
//! Both ends and the device run on one thread in virtual time, so that a read finds its bytes and every run counts the same.
//! [`measured_write`] and [`measured_read`] are the only functions that callgrind collects.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::thread;

use rdma_conn::{Listener, Options, Stream};
use rdma_softsim::{FaultPlan, Knobs, Limits, Personality, Simulation, SoftSim};

const LEN: usize = 64;

#[inline(never)]
fn measured_write(stream: &mut Stream<SoftSim>, bytes: &[u8; LEN]) {
    assert_eq!(stream.write(bytes).expect("written"), LEN);
}

#[inline(never)]
fn measured_read(stream: &mut Stream<SoftSim>, bytes: &mut [u8; LEN]) {
    assert_eq!(stream.read(bytes).expect("read"), LEN);
}

/// Lets everything happen that follows from what was posted, and no more time pass than that takes.
fn settle(sim: &Simulation) {
    let until = sim.now().after(std::time::Duration::from_millis(1));
    while sim.deadline().is_some_and(|at| at <= until) {
        sim.step();
    }
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|rounds| rounds.parse().ok()).unwrap_or(1000);
    let sim = Simulation::new(1, Personality::Ibta, Knobs::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
    let [mut one, mut other] = thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect(&client, address).expect("connects"));
        let accepted = scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accepts");
            stream.flush().expect("is established");
            stream
        });
        while !(dial.is_finished() && accepted.is_finished()) {
            settle(&sim);
            thread::yield_now();
        }
        [dial, accepted].map(|end| end.join().expect("does not panic"))
    });
    let mut bytes = [0x5a; LEN];
    // The first write of each side registers its send buffer.
    for stream in [&mut one, &mut other] {
        stream.write_all(&bytes).expect("written");
    }
    settle(&sim);
    for stream in [&mut one, &mut other] {
        stream.read_exact(&mut bytes).expect("read");
    }
    for _ in 0..rounds {
        for from_one in [true, false] {
            let (from, to) = if from_one { (&mut one, &mut other) } else { (&mut other, &mut one) };
            measured_write(from, &bytes);
            settle(&sim);
            measured_read(to, &mut bytes);
        }
    }
    // Nothing happens any more that could deliver the last bytes.
    std::mem::forget((one, other));
}
