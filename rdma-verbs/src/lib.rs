//! The real backend: [`rdma_backend`] over librdmacm and libibverbs.
//!
//! ```no_run
//! use rdma_backend::{Backend, EventChannel, Identifier};
//! use std::time::Duration;
//!
//! let verbs = rdma_verbs::Verbs::load()?;
//! let channel = verbs.event_channel()?;
//! let id = channel.create_id()?;
//! id.resolve_address(None, "192.0.2.1:6379".parse().unwrap(), Duration::from_secs(2))?;
//! // … wait until the channel's descriptor is readable, then:
//! while let Some(event) = channel.next_event()? {
//!     println!("{:?}", event.kind);
//! }
//! # Ok::<(), rdma_verbs::Error>(())
//! ```
//!
//! # What it needs
//!
//! To build: Rust and a linker. To run: `librdmacm.so.1` and `libibverbs.so.1` of rdma-core (run
//! with version 44), which [`Verbs::load`] opens by `dlopen`, and an RDMA device with reliable
//! connections and WRITE WITH IMMEDIATE: InfiniBand, RoCE, or soft-RoCE (`rdma_rxe`). If one is
//! missing, [`Verbs::load`] or [`event_channel`](rdma_backend::Backend::event_channel) fails with
//! [`ErrorKind::NoDevice`](rdma_backend::ErrorKind::NoDevice), and its text says what to install or
//! load. Regions are locked memory: the limit (`ulimit -l`) must have room for them.
//!
//! # Fork
//!
//! This library does not call `ibv_fork_init(3)`. If a process forks while it has regions, a later
//! write of the parent can move a page away from where the device reads and writes (VR-RES-010). To
//! prevent that, use a kernel that copies pinned pages at the fork (Linux 5.12 and later;
//! `ibv_is_fork_initialized(3)` reports `IBV_FORK_UNNEEDED`), or set `RDMAV_FORK_SAFE=1`, which has
//! the same effect as that call, before [`Verbs::load`]. The child then lacks the pages of regions
//! and dies if it touches them. So registered memory
//! ([`register_memory`](rdma_backend::Domain::register_memory)) should begin and end with a page of
//! its own. A child that only runs `exec` is always safe.
//!
//! In a child of `fork(3)`, after its parent has opened a channel, every call fails with
//! [`Error::Forked`] and does nothing, and a drop leaves the device alone. The child does not have
//! the descriptors either: at the fork they are replaced by others, under the same numbers. So a
//! child that lives on keeps none of the objects of a dead parent.
//!
//! # From the seam to C
//!
//! | seam | C |
//! |---|---|
//! | [`Verbs::load`] | `dlopen(3)`, `dlsym(3)` |
//! | `Backend::event_channel` | `rdma_create_event_channel(3)`, then `O_NONBLOCK` |
//! | `EventChannel::create_id` | `rdma_create_id(3)` in `RDMA_PS_TCP` (VR-CONN-001, VR-CONN-015) |
//! | `EventChannel::listen` | `rdma_create_id`, `rdma_set_option(3)` (`AFONLY` for IPv6, `REUSEADDR`), `rdma_bind_addr(3)`, `rdma_listen(3)` |
//! | `EventChannel::next_event` | `rdma_get_cm_event(3)` and at once `rdma_ack_cm_event(3)` |
//! | a thread for each device in use | `ibv_get_async_event(3)` and at once `ibv_ack_async_event(3)` |
//! | `Identifier::resolve_address`, `resolve_route` | `rdma_resolve_addr(3)`, `rdma_resolve_route(3)` |
//! | `Identifier::device`, `capabilities` | the context in the identifier, `ibv_query_device(3)` |
//! | `Identifier::create_domain` | `ibv_alloc_pd(3)` |
//! | `Identifier::create_completion_queue` | `ibv_create_comp_channel(3)`, `ibv_create_cq(3)`, then `O_NONBLOCK` |
//! | `Identifier::create_queue_pair` | `rdma_create_qp(3)`: RC, `sq_sig_all` 0, one element per request |
//! | `Identifier::connect`, `accept`, `reject`, `disconnect` | `rdma_connect(3)`, `rdma_accept(3)`, `rdma_reject(3)`, `rdma_disconnect(3)` |
//! | `Identifier::notify_established` | `rdma_notify(3)` with `IBV_EVENT_COMM_EST` |
//! | `Identifier::migrate` | `rdma_migrate_id(3)` |
//! | `Identifier::local_addr`, `peer_addr` | `rdma_get_local_addr(3)`, `rdma_get_peer_addr(3)` |
//! | `Domain::register` | `mmap(2)`, `ibv_reg_mr(3)` |
//! | `Domain::register_memory` | `ibv_reg_mr(3)`, or `ibv_reg_dmabuf_mr(3)` for memory with a [`DmaBuf`](rdma_backend::memory::DmaBuf) |
//! | `QueuePair::post_send`, `post_recv` | `ibv_post_send(3)`, `ibv_post_recv(3)`, one call for up to 32 requests |
//! | `QueuePair::set_min_rnr_timer` | `ibv_modify_qp(3)` with `IBV_QP_MIN_RNR_TIMER` |
//! | `QueuePair::is_loopback` | `ibv_query_qp(3)` with `IBV_QP_AV`; `ibv_query_gid(3)`, or `ibv_query_port(3)` without a GRH |
//! | `QueuePair::has_failed` | `ibv_query_qp(3)` with `IBV_QP_STATE` |
//! | `CompletionQueue::poll`, `arm` | `ibv_poll_cq(3)`, `ibv_req_notify_cq(3)` |
//! | `CompletionQueue::take_events` | `ibv_get_cq_event(3)` until `EAGAIN`, or as many as were asked for, then one `ibv_ack_cq_events(3)` |
//! | drop | `rdma_destroy_qp(3)`, `ibv_destroy_cq(3)`, `ibv_destroy_comp_channel(3)`, `ibv_dereg_mr(3)`, `munmap(2)`, `ibv_dealloc_pd(3)`, `rdma_destroy_id(3)`, `rdma_destroy_event_channel(3)` |
//!
//! [`EventChannel`] and [`CompletionQueue`] implement [`AsFd`](std::os::fd::AsFd): poll the
//! descriptors for reading, and do nothing else with them. An event channel's is an epoll(7)
//! instance over librdmacm's descriptor and an eventfd(2) for the events of devices. No descriptor
//! is in the epoll instances of two channels, so Linux sets no limit on the number of channels.
//!
//! # Threads
//!
//! Everything is [`Send`] and [`Sync`]. Posting, polling, arming and taking events take no lock of
//! ours and allocate nothing. The provider has locks; do not set a variable that turns them off,
//! such as `MLX5_SINGLE_THREADED`. Calls on identifiers and [`next_event`](EventChannel) exclude
//! each other per channel: `rdma_get_cm_event` writes to identifiers. None of this blocks, except
//! that `next_event` waits for asynchronous events that the device has raised: until the thread
//! below has taken them, and at most a second for each device.
//!
//! # Inline bytes
//!
//! An inline slice may be written again at once ([`SendRequest`](rdma_backend::SendRequest)):
//! providers copy it. `mana` (as of rdma-core 55) ignores `IBV_SEND_INLINE` and reads it later.
//! Where its kernel refuses inline bytes, [`max_inline`](rdma_backend::QueuePair::max_inline) is 0;
//! with older kernels ask for none, or leave the slice as it is until the request has completed.
//!
//! # The order of destruction
//!
//! C wants a queue pair destroyed before its completion queue and its identifier, a completion
//! queue before its channel, regions before their domain, identifiers before their event channel,
//! and all before the device is closed. `rdma_destroy_id` and `ibv_destroy_cq` wait for ever for an
//! unacknowledged event. Here each object holds what must outlive it, and events are acknowledged
//! before they are handed out: drop handles in any order, on any thread.
//!
//! # Asynchronous events
//!
//! A device's asynchronous event (`ibv_get_async_event(3)`) arrives on the event channel of its
//! identifier, as [`CmEventKind::Async`](rdma_backend::CmEventKind::Async). librdmacm opens a
//! device once for the process, so the identifiers of all channels share one descriptor of such
//! events. A thread for each device in use, `rdma-events`, takes and acknowledges them and hands
//! them to the right channels. It sleeps otherwise, handles no signals, and ends with the process.
//! Two readers of that descriptor divide its events: if another library of the process reads it,
//! too, each misses what the other has read.
//!
//! # The bindings
//!
//! `src/sys/generated/mod.rs` is bindgen's translation of the headers for Linux on x86_64 and
//! aarch64, checked in, reduced to what is used, with its layout assertions evaluated at compile
//! time; `bindings.sh` makes it. Its structures are the same in rdma-core 44, 56 and 65. C enums
//! are integers, because newer libraries add values. `ibv_post_send` and its like, inline functions
//! in C, go through the table in the device's context.
//!
//! The feature `rdma-sys` uses the declarations of that crate instead, and compares both layouts in
//! its tests. It links the libraries at build time, needs their headers, libclang and pkg-config,
//! and does not build with clang 16 or newer. The feature `ibverbs` adds the module `devices`, a
//! listing of devices and GIDs by the crate of that name.

mod asynchronous;
mod chain;
mod channel;
mod completion;
mod device;
#[cfg(feature = "ibverbs")]
pub mod devices;
mod error;
mod identifier;
pub mod locality;
mod mapping;
mod queue_pair;
mod region;
mod sockaddr;
mod sys;

use std::os::fd::RawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_backend::Backend;
use rdma_backend::time::Instant;

pub use self::channel::EventChannel;
pub use self::completion::{Batch, CompletionQueue};
pub use self::error::{Error, Stage};
pub use self::identifier::Identifier;
pub use self::queue_pair::QueuePair;
pub use self::region::{Domain, Region};

/// The backend on librdmacm and libibverbs.
#[derive(Clone, Debug)]
pub struct Verbs {
    api: &'static sys::Api,
}

impl Verbs {
    /// Loads the run-time libraries, once for the process.
    ///
    /// # Errors
    /// [`Error::Library`] or [`Error::Symbol`], of the kind
    /// [`NoDevice`](rdma_backend::ErrorKind::NoDevice), when they are missing or too old.
    pub fn load() -> Result<Self, Error> {
        Ok(Self { api: sys::Api::get()? })
    }

    /// Returns whether the libraries can be asked for
    /// [`Access::RELAXED_ORDERING`](rdma_backend::Access::RELAXED_ORDERING). They do not tell
    /// whether kernel and device do it.
    #[must_use]
    pub const fn has_relaxed_ordering(&self) -> bool {
        self.api.ibv_reg_mr_iova2.is_some()
    }
}

impl Backend for Verbs {
    type Error = Error;
    type EventChannel = EventChannel;
    type Identifier = Identifier;
    type Domain = Domain;
    type Region = Region;
    type CompletionQueue = CompletionQueue;
    type QueuePair = QueuePair;

    fn event_channel(&self) -> Result<EventChannel, Error> {
        EventChannel::open(self.api)
    }

    #[inline]
    fn now(&self) -> Instant {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: clock_gettime(2): a clock that every Linux has, and a live structure to fill.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        // Since some moment before the process began, and never negative: 136 years fit.
        Instant::from_parts(time.tv_sec as u32, time.tv_nsec as u32)
    }
}

/// Locks, also a poisoned lock: a panic leaves nothing half done behind these.
fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_nonblocking(fd: RawFd) -> Result<(), Error> {
    // SAFETY: fcntl(2) with F_GETFL takes no pointer; a descriptor that is not open is an error.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above, with F_SETFL.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(Error::last("fcntl", Stage::Open));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn everything_may_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<Verbs>();
        crosses::<Error>();
        crosses::<EventChannel>();
        crosses::<Identifier>();
        crosses::<Domain>();
        crosses::<Region>();
        crosses::<CompletionQueue>();
        crosses::<QueuePair>();
    }

    #[test]
    fn without_a_device_the_error_says_so() {
        use rdma_backend::{ErrorKind, Failure};
        match Verbs::load().and_then(|verbs| verbs.event_channel().map(drop)) {
            Ok(()) => println!("skipped: there is an RDMA device"),
            Err(error) => {
                println!("{error}");
                assert_eq!(error.kind(), ErrorKind::NoDevice);
            }
        }
    }

    #[test]
    fn the_clock_goes_forward() {
        if let Ok(verbs) = Verbs::load() {
            let before = verbs.now();
            std::thread::sleep(Duration::from_millis(2));
            assert!(verbs.now().since(before) >= Duration::from_millis(2));
        }
    }
}
