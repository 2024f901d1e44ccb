//! An RDMA fabric inside one process, with the semantics of reliable connections.
//!
//! [`Fabric`] is a network, [`SoftSim`] a host on it with an RDMA device and one process.
//! [`SoftSim::add_device`] adds further devices.
//! `SoftSim` implements [`Backend`](rdma_backend::Backend), so a program written against that trait
//! runs here as it runs on libibverbs: in tests, in programs without a device, and in a simulator.
//!
//! ```
//! use rdma_backend::{Backend, CmEventKind, EventChannel, Identifier};
//! use rdma_softsim::{Fabric, Resources};
//!
//! let fabric = Fabric::new();
//! let (server, client) = ("10.0.0.1".parse()?, "10.0.0.2".parse()?);
//! let listening = fabric.host(&[server]).event_channel()?;
//! let listener = listening.listen((server, 6379).into(), 0)?;
//!
//! let channel = fabric.host(&[client]).event_channel()?;
//! let id = channel.create_id()?;
//! id.resolve_address(None, (server, 6379).into(), std::time::Duration::from_secs(1))?;
//! let event = channel.next_event()?.expect("without latency it is there at once");
//! assert!(matches!(event.kind, CmEventKind::AddressResolved));
//!
//! drop((listener, listening, id, channel));
//! assert_eq!(fabric.resources(server), Resources::default());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # One model, two ways to run it
//!
//! The fabric itself is the private module `model`: deterministic, single-threaded, without clock,
//! thread or descriptor. Calls change it and schedule events, in one total order by time and then
//! by decision. Advancing it executes what is due.
//!
//! * **In real time**, as a [`Fabric`]: a lock around the model, the machine's clock, an eventfd
//!   for each event channel and completion queue ([`AsFd`](std::os::fd::AsFd); readable while
//!   something waits), and one thread that sleeps until the model's next deadline. A caller
//!   executes what is due, so without latency data moves in the calling thread: a message is in the
//!   peer's memory and its completion in the queue when
//!   [`post_send`](rdma_backend::QueuePair::post_send) returns. The thread starts with the first
//!   deadline and ends with the last handle. `softrdma` connects programs of other processes
//!   through [`Device`]. What a call costs does not depend on how many objects others have, and a
//!   call executes a bounded part of what others have scheduled. Repetitions of messages of one
//!   [`Device`] keep a distance of 50 µs, so that many of them leave time for others.
//! * **In virtual time**, as a [`Simulation`]: the same model and the same handles, a clock that
//!   moves from event to event, and one seed that determines everything. A [`DeviceKind`] decides
//!   where verbs leaves devices a choice (when bytes land, when a failed queue pair flushes, what a
//!   refused key looks like, how late and in which order completions come). A [`FaultPlan`] lists
//!   faults with their targets and times. [`trace`] has the events, and their hash. There are no
//!   threads, and descriptors cannot be slept on: [`EventChannel::is_readable`] returns their
//!   readiness.
//!
//! ```
//! use rdma_backend::{Backend, EventChannel, Identifier};
//! use rdma_softsim::{Fault, Injection, SimulationSettings, Limits, DeviceKind, Simulation, When};
//!
//! let plan = vec![Injection { when: When::Event(0), host: 0, fault: Fault::AddressError }];
//! let sim = Simulation::new(42, DeviceKind::Rxe, SimulationSettings::default(), plan);
//! let events = sim.host(&["10.0.0.1".parse()?], Limits::default()).event_channel()?;
//! let id = events.create_id()?;
//! id.resolve_address(None, "10.0.0.1:6379".parse()?, std::time::Duration::from_secs(1))?;
//! assert!(!events.is_readable());
//! while sim.step() {}
//! assert!(events.is_readable());
//! assert_eq!(sim.now().since_start().as_secs(), 1, "as long as resolving may take");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does
//!
//! Messages are whole: there are no packets, and order is by message. Each rule has a test in
//! virtual time.
//!
//! | Rule | Source |
//! |---|---|
//! | SEND and WRITE with immediate consume a receive, also when empty; WRITE and READ never do | `ibv_post_send(3)` |
//! | No receive: the requester retries after the responder's `min_rnr_timer`, `rnr_retry_count` times, 7 is endless; then `RNR_RETRY_EXC_ERR`. Later requests wait. Success restores the retries | `rdma_connect(3)`, IBA 9.7.5.2.8 |
//! | Each side's `rnr_retry_count` is the one that the *other* side passed. `retry_count` is the active side's | `rdma_accept(3)` |
//! | No answer: retried after [`Parameters::ack_timeout`], `retry_count` times, then `RETRY_EXC_ERR`. An executed message is acknowledged and not executed again. Idle connections notice nothing | IBA 9.7.6.1.3, 9.4.4 |
//! | Key, bounds, domain or permission wrong at the responder: `REM_ACCESS_ERR`, both queue pairs in error; a receive consumed by it ends in `LOC_ACCESS_ERR` | `ibv_poll_cq(3)`, IBA 9.9.3 |
//! | A request without bytes has no key check | IBA 9.7.4.1.2 |
//! | SEND longer than its receive: `REM_INV_REQ_ERR` here, `LOC_LEN_ERR` there; receive memory gone or read-only: `REM_OP_ERR` and `LOC_PROT_ERR` | `ibv_poll_cq(3)` |
//! | Own memory deregistered under a request: `LOC_PROT_ERR`; the peer does not notice | `ibv_dereg_mr(3)` |
//! | Bytes are read when a message is executed, inline bytes when it is posted | `ibv_post_send(3)` |
//! | Completions keep the order of their queue. Unsignaled success is silent, failure never is | `ibv_post_send(3)`, IBA 10.7.3.1 |
//! | A send slot is free when the completion of a later-or-equal request was *polled*; a receive slot when a message has consumed it (a device may take until that is polled) | `ibv_post_send(3)` |
//! | In the error state, posted requests end with `WR_FLUSH_ERR`, in order, and so do those posted later | `ibv_modify_qp(3)` |
//! | One event per arming, for a completion that comes after it. Armed for solicited events, only for one whose message asked for it, or that failed | `ibv_req_notify_cq(3)` |
//! | Queue pairs may take their receives from one shared queue. Its limit raises one event. Its receives are not flushed with a queue pair | `ibv_create_srq(3)`, `ibv_modify_srq(3)` |
//! | In SQD, requests in flight are completed, which an event reports, and later ones wait | `ibv_modify_qp(3)` |
//! | One completion too many loses the queue and its queue pairs. `CqErr` reports it to each of them | `ibv_create_cq(3)`, `ibv_get_async_event(3)` |
//! | `QpAccessErr` or `QpReqErr` reports a refusal without a receive to the responder | IBA 9.9.3.1.3 |
//! | `CommEst` reports a first message that precedes the peer's RTU. A program that passes it on with `rdma_notify` is connected | `rdma_notify(3)` |
//! | The number of a destroyed queue pair is reused, for the next one | `rdma_create_qp(3)` |
//! | READs in flight are at most our `initiator_depth` and the peer's `responder_resources` | `rdma_connect(3)` |
//! | The active side is ready when `Established` is *read*, and only then is the passive one connected | `rdma_get_cm_event(3)` |
//! | No listener: `Rejected(8)`. Rejected, dropped or beyond the backlog of unread requests: `Rejected(28)` | `rdma_reject(3)`, `rdma_listen(3)` |
//! | Nothing is told of a request that is unread. If its sender gives up before it is accepted, only the accept fails | `rdma_get_cm_event(3)`, `ucma_event_handler` of Linux |
//! | Datagrams ([`Op::Datagram`]): 40 bytes of header come in front. Lost in silence without a queue pair of that Q_Key, or a receive. At most 4096 bytes, else `LOC_LEN_ERR` | `ibv_post_send(3)`, IBA 9.8.3 |
//! | Atomic operations ([`Op::Atomic`]) are done once, however often they are repeated, and count as READs. Not aligned, or not allowed by the queue pair: `REM_INV_REQ_ERR`; by the region: `REM_ACCESS_ERR` | `ibv_post_send(3)`, IBA 9.4.5, 9.7.4.1 |
//! | Disconnecting flushes our queue pair and leaves the peer's unchanged. Our own `Disconnected` comes when the peer has disconnected too or [`Parameters::cm_timeout`] has passed; `TimewaitExit` follows | `rdma_disconnect(3)` |
//! | Dropping a connected identifier disconnects. Dropping only the queue pair notifies neither side | `rdma_destroy_id(3)`, `rdma_destroy_qp(3)` |
//!
//! # Faults
//!
//! [`Fabric::set_link`], [`Fabric::kill_host`], small [`Limits`] and [`Fabric::inject`] cause
//! faults at any time. A simulation has every [`Fault`], and its [`FailureCounts`] say which
//! classes of failure ([`FailureClass`]) were met. [`Fabric::resources`] counts what a host holds,
//! for tests that look for leaks.
//!
//! # Not modelled
//!
//! Packets, path MTU, bandwidth and congestion; reordering and corruption of messages; fences; the
//! state SQE; multicast; the hours after which a real connection manager gives up on an
//! application that never decides on a request.
//!
//! The bytes of a READ in this process are read when its answer arrives, which is late but allowed
//! without a fence. Completions of a dropped queue pair stay in their queue. Soft-RoCE leaves them
//! there too; some devices do not.
#![forbid(unsafe_code)]

mod capture;
mod connection;
mod device;
mod device_kind;
mod driver;
mod error;
mod fabric;
mod failure_class;
mod faults;
pub mod footprint;
mod load;
mod model;
mod random;
mod request;
mod settings;
mod shared;
mod simulation;
mod state;
mod sync;
pub mod trace;
mod verbs;

pub use capture::{Capture, Content, Transfer};
pub use connection::{EventChannel, Identifier};
pub use device::{Device, ForeignRegion};
pub use device_kind::{DeviceKind, SimulationSettings};
pub use driver::Signal;
pub use error::Error;
pub use fabric::{Fabric, SoftSim};
pub use failure_class::{FailureClass, FailureCounts};
pub use faults::{Chance, Connections, Fault, FaultPlan, Injection, Site, When};
pub use load::Load;
pub use model::listen_backlog;
pub use model::{About, Arming, Calls, Detail, ForeignMemory, Look, Mirror, Source};
pub use random::Random;
pub use request::{
    Atomic, Destination, Local, NamedReceive, NamedSend, Op, Rights, Service, Sge, Transition,
};
pub use settings::{Limits, Link, Parameters, Resources};
pub use shared::SharedReceives;
pub use simulation::Simulation;
pub use state::{Connection, Offered, PairState};
pub use verbs::{CompletionQueue, Domain, QueuePair, Region};
