//! Repeated operations allocate nothing, on any type.

use std::io::{IoSlice, Read, Write};
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use rdma_conn::{Endpoint, Event, Limits, Listener, Options, Stream};
use rdma_softsim::{DeviceKind, Fabric, FaultPlan, Simulation, SimulationSettings, SoftSim};

const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];
const ROUNDS: usize = 300;

/// Repeats `round` until all buffers have grown, and then counts.
fn count(mut round: impl FnMut()) -> AllocationInfo {
    for _ in 0..ROUNDS {
        round();
    }
    measure(|| (0..ROUNDS).for_each(|_| round()))
}

fn streams() -> [Stream<SoftSim>; 2] {
    let fabric = Fabric::new();
    let address = SocketAddr::from((SERVER, 6379));
    let listener = Listener::bind(&fabric.host(&[SERVER.into()]), address).expect("a free address");
    let client = fabric.host(&[CLIENT.into()]);
    thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect(&client, address).expect("connects"));
        let (mut accepted, _) = listener.accept().expect("accepts");
        accepted.flush().expect("is established");
        [dial.join().expect("does not panic"), accepted]
    })
}

#[test]
fn streams_allocate_nothing() {
    let [mut one, mut other] = streams();
    let (piece, mut all) = ([0x5a; 64], [0; 256]);
    let counted = count(|| {
        assert_eq!(one.write_vectored(&[IoSlice::new(&piece); 4]).expect("written"), all.len());
        other.read_exact(&mut all).expect("read");
        other.write_all(&all[..64]).expect("written");
        one.read_exact(&mut all[..64]).expect("read");
    });
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

/// Both ends are tasks of one thread, which also runs the reactor and the driver.
#[cfg(feature = "tokio")]
#[test]
fn tasks_allocate_nothing() {
    use rdma_conn::{AsyncEndpoint, AsyncListener, Connect};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let fabric = Fabric::new();
    let address = SocketAddr::from((SERVER, 6379));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut stream = runtime.block_on(async {
        let server = fabric.host(&[SERVER.into()]);
        let listener = AsyncListener::bind(&server, address).await.expect("a free address");
        let clients = AsyncEndpoint::new(&fabric.host(&[CLIENT.into()]), Limits::NONE).expect("a device");
        let connect = Connect::default();
        let (dialed, accepted) = tokio::join!(clients.connect(address, &connect), listener.accept());
        let (mut echo, _) = accepted.expect("accepts");
        tokio::spawn(async move {
            let mut bytes = [0; 64];
            while echo.read_exact(&mut bytes).await.is_ok() && echo.write_all(&bytes).await.is_ok() {}
        });
        dialed.expect("connects")
    });
    let mut rounds = || {
        runtime.block_on(async {
            let mut bytes = [0x5a; 64];
            for _ in 0..ROUNDS {
                stream.write_all(&bytes).await.expect("written");
                stream.read_exact(&mut bytes).await.expect("read");
            }
        });
    };
    rounds();
    let counted = measure(rounds);
    assert_eq!(counted.count_total, 0, "{counted:?}");
}

#[test]
fn endpoints_allocate_nothing() {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let settle = || {
        let until = sim.now().after(Duration::from_micros(200));
        while sim.deadline().is_some_and(|at| at <= until) {
            sim.step();
        }
    };
    let host = |address: [u8; 4]| sim.host(&[address.into()], rdma_softsim::Limits::default());
    let mut ends =
        [SERVER, CLIENT].map(|address| Endpoint::new(&host(address), Limits::default()).expect("a device"));
    ends[0].listen((SERVER, 6379).into(), Options::default()).expect("a free address");
    let address = (SERVER, 6379).into();
    ends[1].connect(address, None, Duration::from_secs(5), Options::default()).expect("begins");
    let mut opened = [None; 2];
    while opened.contains(&None) {
        for (end, opened) in ends.iter_mut().zip(&mut opened) {
            end.progress().expect("the fabric stays");
            while let Some(event) = end.next_event() {
                if let Event::Opened { id, .. } = event {
                    *opened = Some(id);
                }
            }
        }
        settle();
    }
    let ids = opened.map(|id| id.expect("is open"));
    let mut own = AllocationInfo::default();
    for round in 0..2 * ROUNDS {
        for (from, to) in [(0, 1), (1, 0)] {
            // The fabric's own allocations do not count.
            let mut counted = measure(|| {
                assert_eq!(ends[from].write(ids[from], &[IoSlice::new(b"ping")]).expect("open"), Some(4));
            });
            settle();
            counted += measure(|| {
                ends[to].progress().expect("the fabric stays");
                while ends[to].next_event().is_some() {}
                assert_eq!(ends[to].read(ids[to], &mut [0; 8]).expect("open"), Some(4));
            });
            if round >= ROUNDS {
                own += counted;
            }
        }
    }
    assert_eq!(own.count_total, 0, "{own:?}");
}
