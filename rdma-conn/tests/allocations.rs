//! Repeated operations allocate nothing, on any type.

use std::io::{IoSlice, Read, Write};
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use rdma_conn::Options;

use crate::world::{connected, pass, simulation, streams};

const ROUNDS: usize = 300;

/// Repeats `round` until all buffers have grown, and then counts.
fn count(mut round: impl FnMut()) -> AllocationInfo {
    for _ in 0..ROUNDS {
        round();
    }
    measure(|| (0..ROUNDS).for_each(|_| round()))
}

#[test]
fn streams_allocate_nothing() {
    let (mut one, mut other) = streams(Options::default(), Options::default());
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
    use rdma_conn::{AsyncEndpoint, AsyncListener, Connect, Limits};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let fabric = rdma_softsim::Fabric::new();
    let [server, client] = [1, 2].map(|last| fabric.host(&[[192, 0, 2, last].into()]));
    let address = std::net::SocketAddr::from(([192, 0, 2, 1], 6379));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut stream = runtime.block_on(async {
        let listener = AsyncListener::bind(&server, address).await.expect("a free address");
        let clients = AsyncEndpoint::new(&client, Limits::NONE).expect("a device");
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
    let sim = simulation();
    let ((client, at_client), (server, at_server)) = connected(&sim, Options::default(), Options::default());
    let (mut ends, ids) = ([server, client], [at_server, at_client]);
    let settle = || pass(&sim, Duration::from_micros(200));
    settle();
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
