//! The descriptor of a device's asynchronous events, which other code of the process may read, too.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use libloading::Library;
use rdma_backend::{AsyncEvent, CmEventKind, Identifier as _, SendOp};

use crate::harness::{Pair, await_some, event, lab, readable};

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::use_self,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unused_imports,
    reason = "as in rdma-verbs"
)]
#[path = "../../src/sys/generated/mod.rs"]
mod generated;

/// Returns the descriptors of the devices that librdmacm has opened, which are all of them.
fn descriptors() -> Vec<BorrowedFd<'static>> {
    type GetDevices = unsafe extern "C" fn(*mut i32) -> *mut *mut generated::ibv_context;
    // SAFETY: loaded already: nothing of it runs.
    let library = unsafe { Library::new("librdmacm.so.1") }.unwrap();
    let mut count = 0;
    // SAFETY: rdma_get_devices(3): that is its type, and the pointer is to a live integer.
    let list = unsafe { library.get::<GetDevices>("rdma_get_devices").unwrap()(&raw mut count) };
    assert!(!list.is_null());
    let of = |index| {
        // SAFETY: the list has `count` contexts. As it is never freed, they stay open.
        unsafe { BorrowedFd::borrow_raw((**list.add(index)).async_fd) }
    };
    (0..usize::try_from(count).unwrap()).map(of).collect()
}

#[test]
fn the_descriptor_of_asynchronous_events_blocks_and_all_are_taken() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, clients, .. } = &lab.pair_with_room(4);
    let descriptors = descriptors();
    assert!(!descriptors.is_empty());
    let blocks = || {
        for descriptor in &descriptors {
            // SAFETY: fcntl(2) with F_GETFL takes no pointer.
            let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFL) };
            assert!(flags >= 0 && flags & libc::O_NONBLOCK == 0, "{descriptor:?}: {flags:#o}");
        }
    };
    blocks();
    // More than the completion queue has room for.
    for _ in 0..60 {
        client.post(SendOp::Write(server.remote(0)), 0, 4);
    }
    let lost = event(clients);
    assert_eq!(lost.id, client.id.key());
    assert!(matches!(lost.kind, CmEventKind::Async(AsyncEvent::CqErr)), "{:?}", lost.kind);
    let all_taken = || descriptors.iter().all(|descriptor| !readable(descriptor, Duration::ZERO));
    await_some("the last event", || all_taken().then_some(()));
    blocks();
}
