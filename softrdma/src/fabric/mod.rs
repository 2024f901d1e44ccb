//! The fabric: one process that owns the model, and serves the programs.
//!
//! Each program has a session on a thread of its own. The thread sleeps until the program sends a
//! request or has ended. At the end it drops the program's objects, and the peers are notified, as
//! a kernel would do. This thread also moves the data that its program sends (`seats`); other
//! threads do the rest (`movers`).

mod budget;
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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_softsim::{DeviceKind, FailureClass, Limits, Parameters, SoftSim};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Amounts, Error, Listener, Reply, Socket};

pub use budget::Bounds;
use budget::{Budget, Taken};
use memory::Process;
use movers::Movers;
use seats::{PATIENCE, Watch};
use service::{Presence, Service};
use session::{Info, Refusal};
use vectors::{Pool, Vectors};

/// Threads that access programs' memory, besides one for each program.
const SPARE_MOVERS: usize = 2;
/// The most machines, each with a list of devices.
const MOST_MACHINES: usize = 1024;
/// The most addresses of one machine, on all its devices.
const MOST_ADDRESSES: usize = 16;
/// How many sockets of refused programs are kept open, so that they can read why.
const MOST_REFUSED: usize = 64;
/// What a session takes, besides its objects and its devices: its socket, its memory, that which it
/// shares with the program, and an eventfd.
const SESSION: Amounts = Amounts { memory: 512 << 10, descriptors: 6, sessions: 1 };
/// What a process takes besides its sessions: the descriptor that shows whether it lives.
const PROCESS: Amounts = Amounts { memory: 0, descriptors: 1, sessions: 0 };
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
    /// Readable when a session has ended, or was refused.
    ended: OwnedFd,
    /// The threads that access programs' memory.
    movers: Arc<Movers>,
    /// What programs take.
    budget: Budget,
    /// Whether faults were injected.
    faulty: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Machines, by the addresses of their devices.
    machines: BTreeMap<Vec<Vec<IpAddr>>, Vec<SoftSim>>,
    /// The addresses of all of them.
    addresses: BTreeSet<IpAddr>,
    /// Connections of programs, some of them without a session yet.
    sessions: BTreeMap<u64, Option<Arc<Info>>>,
    count: u64,
    /// Processes that the fabric outlives, whatever sessions they have: by their numbers.
    processes: BTreeMap<u32, Taken>,
    /// Faults for machines that have no program yet.
    awaited: Vec<inject::Awaited>,
    /// The recording, if one was started.
    writing: Option<record::Writing>,
    /// The threads of completion vectors, and the vectors that later sessions have, if a program
    /// asked for them.
    pool: Pool,
    vectors: Option<Arc<Vectors>>,
    /// Sockets of refused programs.
    refused: VecDeque<Socket>,
}

impl Fabric {
    /// Makes a fabric without programs.
    pub fn new() -> Result<Arc<Self>, Errno> {
        Self::with_parameters(Parameters::default())
    }

    /// Makes a fabric with other times than the default ones.
    pub fn with_parameters(parameters: Parameters) -> Result<Arc<Self>, Errno> {
        Self::with_bounds(parameters, Bounds::of_this_process())
    }

    /// Makes a fabric like [`Fabric::with_parameters`], with other bounds than the default ones.
    pub fn with_bounds(parameters: Parameters, bounds: Bounds) -> Result<Arc<Self>, Errno> {
        let most = usize::try_from(bounds.all.sessions).unwrap_or(usize::MAX).saturating_add(SPARE_MOVERS);
        Self::with_movers(parameters, bounds, Movers::new(most, PATIENCE))
    }

    fn with_movers(parameters: Parameters, bounds: Bounds, movers: Arc<Movers>) -> Result<Arc<Self>, Errno> {
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        // The watch ends with the fabric.
        Watch::start(&movers).map_err(|_no_thread| Errno::AGAIN)?;
        Ok(Arc::new(Self {
            model: rdma_softsim::Fabric::with_parameters(parameters),
            movers,
            budget: Budget::new(bounds),
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
        let state = self.lock();
        state.sessions.is_empty() && state.processes.is_empty()
    }

    /// Makes the fabric stay until this process has ended. It may close all of its descriptors and
    /// execute itself, to be a program on the fabric again.
    ///
    /// The process of the fabric itself does not count.
    fn outlive(&self, process: &Process) -> Result<(), Refusal> {
        let (number, program) = (process.number(), process.program());
        let mut state = self.lock();
        let known = state.processes.get(&number).is_some_and(|known| Arc::ptr_eq(&known.program, program));
        if !known && number != std::process::id() {
            state.processes.insert(number, program.take(PROCESS)?);
        }
        Ok(())
    }

    /// Admits programs until the last has left.
    pub fn serve(self: &Arc<Self>, listener: &Listener) -> Result<(), Error> {
        loop {
            // One that comes meanwhile has a session, whose end wakes this thread.
            let programs: Vec<_> =
                self.lock().processes.values().map(|taken| Arc::clone(&taken.program)).collect();
            let own = [listener.as_fd(), self.ended.as_fd()].into_iter();
            let fds = own.chain(programs.iter().map(|program| program.alive.as_fd()));
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
            let (coming, leaving) = (ready.next() == Some(true), ready.next() == Some(true));
            let ended: Vec<_> =
                programs.iter().zip(ready).filter_map(|(program, ended)| ended.then_some(program)).collect();
            if coming {
                match listener.accept() {
                    Ok(socket) => self.admit(socket),
                    // The program has left already, or the fabric has no descriptors for it until
                    // another one leaves.
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
            // Even beside newcomers: it frees descriptors, for want of which they are not admitted.
            if leaving || !ended.is_empty() {
                let _count = rustix::io::read(&self.ended, &mut [0; 8]);
                let lives = |taken: &Taken| !ended.iter().any(|ended| Arc::ptr_eq(ended, &taken.program));
                self.lock().processes.retain(|_, taken| lives(taken));
                if self.is_deserted() {
                    return Ok(());
                }
            }
        }
    }

    /// Serves one program on a thread of its own.
    pub fn admit(self: &Arc<Self>, socket: Socket) {
        let taken = match self.taken_by(&socket) {
            Ok(taken) => taken,
            Err(refusal) => return self.refuse(socket, refusal),
        };
        let number = {
            let mut state = self.lock();
            state.count += 1;
            let number = state.count;
            state.sessions.insert(number, None);
            number
        };
        let presence = Presence { fabric: Arc::clone(self), number };
        // The thread takes it, if there is one.
        let handed = Arc::new(Mutex::new(Some(socket)));
        let offered = Arc::clone(&handed);
        let take = |from: &Mutex<Option<Socket>>| from.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = std::thread::Builder::new().name("session".into()).spawn(move || {
            if let Some(socket) = take(&offered)
                && let Ok(service) = Service::new(presence, socket, taken)
            {
                Box::new(service).serve();
            }
        });
        if thread.is_err()
            && let Some(socket) = take(&handed)
        {
            self.refuse(socket, Errno::AGAIN.into());
        }
    }

    /// Takes what a session needs for the program at the other end.
    fn taken_by(&self, socket: &Socket) -> Result<Taken, Refusal> {
        let (pid, _user) = socket.peer().map_err(|_closed| Errno::SRCH)?;
        Ok(self.budget.program(pid)?.take(SESSION)?)
    }

    /// Answers a program's first request, which has yet to come.
    fn refuse(&self, mut socket: Socket, refusal: Refusal) {
        // It may have been the only program: started the fabric, and left before it was admitted.
        self.tell_end();
        if socket.answer(&Reply::from(refusal), None).is_ok() {
            let mut state = self.lock();
            state.refused.push_back(socket);
            if state.refused.len() > MOST_REFUSED {
                state.refused.pop_front();
            }
        }
    }

    /// Makes [`Fabric::serve`] look whether a program is left.
    fn tell_end(&self) {
        let _told = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
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
        if addresses.iter().any(|ip| state.addresses.contains(ip)) {
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
        state.addresses.extend(addresses);
        state.machines.insert(devices, machine.clone());
        Ok(machine)
    }

    fn configure(&self, latency: Option<u32>, device_kind: Option<&str>, vectors: Option<u32>) -> Reply {
        if let Some(count) = vectors {
            let mut state = self.lock();
            match state.pool.vectors(count) {
                Ok(vectors) => state.vectors = Some(Arc::new(vectors)),
                Err(errno) => return Reply::Refused(errno.raw_os_error()),
            }
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
        let connections = self.model.connections(above, wire::MAX_BATCH);
        Reply::Pairs(connections.iter().map(translate::connection).collect())
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
        let (used, most, refused) = (self.budget.used(), self.budget.bounds.all, self.budget.refusals());
        Reply::Status { sessions, struck: self.model.faults_struck(), failures, vectors, used, most, refused }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.movers.close();
    }
}
