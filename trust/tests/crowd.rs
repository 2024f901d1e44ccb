//! The cost of connections on each interface, alone in its process to count what that holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use trust::crowd::{Exchange, Face, on_softsim, resident};

static ALONE: Mutex<()> = Mutex::new(());

/// Bytes that are allocated now.
static LIVE: AtomicU64 = AtomicU64::new(0);

struct Counted;

// SAFETY: the system's allocator does all of it; a count beside it changes nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps to the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        LIVE.fetch_add(len as u64, Ordering::Relaxed);
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, len) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Idle connections cost no more registered memory, completion queues or descriptors on a `Server`
/// or on tokio than on an `Endpoint`.
#[test]
fn every_face_has_its_connections_for_the_price_of_an_endpoint() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let exchange = Exchange { connections: 400, window: 128 << 10, bytes: 0 };
    let [endpoint, server, tokio] = [Face::Endpoint, Face::Server, Face::Tokio].map(|face| {
        let [kept, _] = on_softsim(face, exchange, resident).expect("serves");
        println!("{face:?}: {kept:?}");
        kept
    });
    assert!(endpoint.registered <= 400 * (172 << 10), "{endpoint:?}");
    assert!(endpoint.descriptors <= 2 * 400_usize.div_ceil(64) + 4, "{endpoint:?}");
    for face in [server, tokio] {
        assert!(face.registered <= endpoint.registered, "{face:?}, {endpoint:?}");
        assert!(face.completion_queues <= endpoint.completion_queues, "{face:?}, {endpoint:?}");
        assert!(face.descriptors <= endpoint.descriptors, "{face:?}, {endpoint:?}");
    }
}

/// What a connection may hold beside its registered memory, on each side, with the device model.
const BESIDE: u64 = 64 << 10;

fn idle_clients_keep_little(exchange: Exchange) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let clients = exchange.connections as u64;
    for face in [Face::Endpoint, Face::Server, Face::Tokio] {
        let [before, after] = on_softsim(face, exchange, || LIVE.load(Ordering::Relaxed)).expect("serves");
        println!(
            "{face:?}: {} bytes allocated for each, {} before; {} resident in all",
            after.beside / clients,
            before.beside / clients,
            resident(),
        );
        assert!(after.beside <= 2 * clients * BESIDE, "{face:?}: {before:?}, {after:?}");
        // Little of that is left from the exchange.
        assert!(after.beside <= before.beside + clients * BESIDE / 2, "{face:?}: {before:?}, {after:?}");
    }
}

/// VR-RES-008: what a client keeps does not depend on what it did.
#[test]
fn idle_clients_keep_little_of_what_they_exchanged() {
    idle_clients_keep_little(Exchange { connections: 48, window: 128 << 10, bytes: 2 << 20 });
}

#[test]
#[ignore = "takes a minute; .ci/nightly runs it"]
fn a_thousand_clients_keep_little_of_what_they_exchanged() {
    idle_clients_keep_little(Exchange { connections: 1000, window: 128 << 10, bytes: 16 << 20 });
}
