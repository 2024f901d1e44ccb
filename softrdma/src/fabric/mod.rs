//! The fabric: one process that owns the model, and serves the programs.
//!
//! Each program has a session on a thread of its own. The thread sleeps until the program sends a
//! request or has ended. At the end it drops the program's objects, and the peers are notified, as
//! a kernel would do. This thread also moves the data that its program sends (`seats`); other
//! threads do the rest (`movers`).

mod inject;
mod memory;
mod movers;
mod offered;
mod pages;
mod record;
mod seats;
mod service;
mod session;
mod signals;
#[cfg(test)]
mod tests;
mod translate;
mod vectors;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_softsim::{DeviceKind, FailureClass, Limits, Parameters, SoftSim};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Error, Listener, Reply, Socket};

use movers::Movers;
use seats::{PATIENCE, Watch};
use service::{Presence, Service};
use session::Info;
use vectors::Vectors;

/// The most sessions at a time.
const MOST_SESSIONS: usize = 1024;
/// Threads that access programs' memory, besides one for each program.
const SPARE_MOVERS: usize = 2;
/// The most machines, each with a list of devices.
const MOST_MACHINES: usize = 1024;
/// The most addresses of one machine, on all its devices.
const MOST_ADDRESSES: usize = 16;
/// How long a program that was not admitted waits for the next attempt.
const PAUSE: Duration = Duration::from_millis(50);
/// How many sessions the answer to [`Request::Status`] has: they fit in one message, whatever their
/// names and addresses are.
const SHOWN: usize = 96;

/// What each device of a fabric can do.
const LIMITS: Limits = Limits {
    max_queue_depth: 1 << 15,
    max_completions: 1 << 20,
    max_inline: wire::MAX_INLINE as u32,
    max_region: 1 << 40,
    max_regions: 1 << 20,
    locked_memory: 1 << 42,
    max_read_depth: 128,
    max_queue_pairs: 1 << 16,
    max_completion_queues: 1 << 16,
    completion_vectors: 2,
};

/// A fabric, and the programs on it.
pub struct Fabric {
    model: rdma_softsim::Fabric,
    state: Mutex<State>,
    /// Readable when a session has ended.
    ended: OwnedFd,
    /// The threads that access programs' memory.
    movers: Arc<Movers>,
    /// Counts programs, also those that have ended while a thread is still in their memory.
    places: Arc<()>,
    /// Whether faults were injected.
    faulty: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Machines, by the addresses of their devices.
    machines: BTreeMap<Vec<Vec<IpAddr>>, Vec<SoftSim>>,
    /// Connections of programs, some of them without a session yet.
    sessions: BTreeMap<u64, Option<Arc<Info>>>,
    count: u64,
    /// Faults for machines that have no program yet.
    awaited: Vec<inject::Awaited>,
    /// The recording, if one was started.
    writing: Option<record::Writing>,
    /// The threads of completion vectors, if a program asked for them.
    vectors: Option<Arc<Vectors>>,
}

impl Fabric {
    /// Makes a fabric without programs.
    pub fn new() -> Result<Arc<Self>, Errno> {
        Self::with_parameters(Parameters::default())
    }

    /// Makes a fabric with other times than the default ones.
    pub fn with_parameters(parameters: Parameters) -> Result<Arc<Self>, Errno> {
        Self::with_movers(parameters, Movers::new(MOST_SESSIONS + SPARE_MOVERS, PATIENCE))
    }

    fn with_movers(parameters: Parameters, movers: Arc<Movers>) -> Result<Arc<Self>, Errno> {
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // The watch ends with the fabric.
        Watch::start(&movers).map_err(|_no_thread| Errno::AGAIN)?;
        Ok(Arc::new(Self {
            model: rdma_softsim::Fabric::with_parameters(parameters),
            movers,
            places: Arc::default(),
            state: Mutex::default(),
            ended,
            faulty: AtomicBool::new(false),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no program is on the fabric.
    #[must_use]
    pub fn is_deserted(&self) -> bool {
        self.lock().sessions.is_empty()
    }

    /// Admits programs until the last has left.
    pub fn serve(self: &Arc<Self>, listener: &Listener) -> Result<(), Error> {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.ended, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let [coming, leaving] = fds.map(|fd| !fd.revents().is_empty());
            if coming {
                match listener.accept() {
                    Ok(socket) => self.admit(socket),
                    // The program has left already, or the fabric has no descriptors for it until
                    // another one leaves.
                    Err(_) => std::thread::sleep(PAUSE),
                }
            } else if leaving {
                let _count = rustix::io::read(&self.ended, &mut [0; 8]);
                if self.is_deserted() {
                    return Ok(());
                }
            }
        }
    }

    /// Serves one program on a thread of its own.
    pub fn admit(self: &Arc<Self>, socket: Socket) {
        let number = {
            let mut state = self.lock();
            let programs = Arc::strong_count(&self.places) - 1;
            if state.sessions.len().max(programs) >= MOST_SESSIONS {
                return;
            }
            state.count += 1;
            let number = state.count;
            state.sessions.insert(number, None);
            number
        };
        let presence = Presence { fabric: Arc::clone(self), number };
        // If no thread can be started, the program is rejected: both ends of its session are
        // dropped.
        let _thread = std::thread::Builder::new().name("session".into()).spawn(move || {
            if let Ok(service) = Service::new(presence, socket) {
                Box::new(service).serve();
            }
        });
    }

    /// Returns the devices of the machine with these addresses, which is made if it does not exist.
    fn machine(&self, mut devices: Vec<Vec<IpAddr>>) -> Result<Vec<SoftSim>, Errno> {
        let unusable = |ip: &IpAddr| ip.is_unspecified() || ip.is_multicast();
        for addresses in &mut devices {
            addresses.sort_unstable();
            if addresses.is_empty() || addresses.iter().any(unusable) {
                return Err(Errno::INVAL);
            }
        }
        let addresses: BTreeSet<IpAddr> = devices.iter().flatten().copied().collect();
        let twice = devices.iter().map(Vec::len).sum::<usize>() > addresses.len();
        if addresses.is_empty() || addresses.len() > MOST_ADDRESSES || twice {
            return Err(Errno::INVAL);
        }
        let mut state = self.lock();
        if let Some(machine) = state.machines.get(&devices) {
            return Ok(machine.clone());
        }
        // An address belongs to one machine.
        if state.machines.keys().flatten().flatten().any(|ip| addresses.contains(ip)) {
            return Err(Errno::ADDRINUSE);
        }
        if state.machines.len() >= MOST_MACHINES {
            return Err(Errno::NOMEM);
        }
        let mut machine: Vec<SoftSim> = Vec::new();
        for addresses in &devices {
            machine.push(match machine.first() {
                None => self.model.host_with(addresses, LIMITS),
                Some(first) => first.add_device(addresses, LIMITS),
            });
            self.befall(&mut state, addresses);
        }
        state.machines.insert(devices, machine.clone());
        Ok(machine)
    }

    fn configure(&self, latency: Option<u32>, device_kind: Option<&str>, vectors: Option<u32>) -> Reply {
        match vectors.map(Vectors::start) {
            Some(Ok(started)) => self.lock().vectors = Some(Arc::new(started)),
            Some(Err(errno)) => return Reply::Refused(errno.raw_os_error()),
            None => {}
        }
        let kind = device_kind.map(|name| DeviceKind::ALL.into_iter().find(|kind| kind.name() == name));
        match kind {
            Some(None) => return Reply::Refused(Errno::INVAL.raw_os_error()),
            Some(Some(kind)) => self.model.set_device_kind(kind),
            None => {}
        }
        if let Some(latency) = latency {
            self.model.set_latency(Duration::from_micros(latency.into()));
        }
        Reply::Done
    }

    fn record(&self, file: Option<OwnedFd>) -> Reply {
        let recorded = || {
            let (recorder, writer) = record::recorder(file.ok_or(Errno::BADF)?)?;
            if !self.model.capture(Box::new(recorder)) {
                return Err(Errno::BUSY);
            }
            // The file is emptied only now: it may be the one that a recording is being written to.
            let writing = writer.start().inspect_err(|_| self.end_recording())?;
            self.lock().writing = Some(writing);
            Ok(())
        };
        match recorded() {
            Ok(()) => Reply::Done,
            Err(errno) => Reply::Refused(errno.raw_os_error()),
        }
    }

    /// Ends the recording, if there is one, and waits a bounded time until it is written.
    pub fn end_recording(&self) {
        drop(self.model.stop_capture());
        let writing = self.lock().writing.take();
        if let Some(writing) = writing {
            writing.finish();
        }
    }

    fn pairs(&self, above: u32) -> Reply {
        let connections = self.model.connections().into_iter();
        let pairs = connections.filter(|connection| connection.pair > above).take(wire::MAX_BATCH);
        Reply::Pairs(pairs.map(|connection| translate::connection(&connection)).collect())
    }

    fn status(&self) -> Reply {
        let sessions =
            self.lock().sessions.values().flatten().take(SHOWN).map(|info| info.session()).collect();
        let counts = self.model.failure_counts();
        let failures = FailureClass::ALL.iter().map(|class| wire::Failure {
            words: class.words().into(),
            injected: counts.injected(*class),
            observed: counts.observed(*class),
        });
        let failures = failures.filter(|failure| failure.injected + failure.observed > 0).collect();
        let vectors = self.lock().vectors.as_ref().map_or_else(Vec::new, |vectors| vectors.raised());
        Reply::Status { sessions, struck: self.model.faults_struck(), failures, vectors }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.movers.close();
    }
}
