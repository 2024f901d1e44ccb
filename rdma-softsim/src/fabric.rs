//! The fabric in real time, and the hosts on it.

use core::fmt;
use core::time::Duration;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_backend::Backend;
use rdma_backend::time::Instant;

use crate::capture::Capture;
use crate::connection::{EventChannel, Identifier};
use crate::device_kind::DeviceKind;
use crate::driver::Driver;
use crate::error::Error;
use crate::failure_class::FailureCounts;
use crate::faults::{Chance, Connections, Fault, When};
use crate::model::{HostId, Model};
use crate::settings::{Limits, Link, Parameters, Resources};
use crate::state::Connection;
use crate::verbs::{CompletionQueue, Domain, QueuePair, Region};

/// A network of hosts with RDMA devices, inside this process. Clones are handles to the same
/// fabric.
#[derive(Clone)]
pub struct Fabric {
    driver: Arc<Driver>,
}

impl Fabric {
    /// Returns a fabric without latency.
    #[must_use]
    pub fn new() -> Self {
        Self::with_parameters(Parameters::default())
    }

    /// Returns a fabric with these times.
    #[must_use]
    pub fn with_parameters(parameters: Parameters) -> Self {
        Self { driver: Arc::new(Driver::new(parameters)) }
    }

    pub(crate) fn of(driver: &Arc<Driver>) -> Self {
        Self { driver: Arc::clone(driver) }
    }

    /// Adds a host with these addresses and a generous device. An address of another host moves to
    /// this one.
    #[must_use]
    pub fn host(&self, addresses: &[IpAddr]) -> SoftSim {
        self.host_with(addresses, Limits::default())
    }

    /// Adds a host with a device of these limits.
    #[must_use]
    pub fn host_with(&self, addresses: &[IpAddr], limits: Limits) -> SoftSim {
        // Not a program's call, which could lose its processor in virtual time.
        let host = self.driver.peek(|model| model.add_host(addresses, limits));
        SoftSim { driver: Arc::clone(&self.driver), host }
    }

    /// Takes the link of an address down or up. There is no notification. Requests are retried and
    /// fail in the end, and idle waits continue.
    pub fn set_link(&self, ip: IpAddr, link: Link) {
        self.driver.peek(|model| model.set_link(ip, link));
    }

    /// Ends the process on the host with this address. Everything it holds is gone, and its kernel
    /// disconnects its peers. Every later call on its handles fails. The machine stays on the
    /// network, without a listener. [`Fabric::host`] with the same address starts a new process.
    pub fn kill_host(&self, ip: IpAddr) {
        self.driver.peek(|model| {
            if let Some(host) = model.host_at(ip) {
                model.kill_host(host);
            }
        });
    }

    /// Injects `fault` at the host with this address.
    ///
    /// It strikes once, when its time has come (counted from now), or repeatedly, by chance. Only
    /// the named connections are struck. Returns false if there is no such host, if the fault
    /// strikes by itself and is to come by chance, or if it strikes more than connections and some
    /// are named.
    ///
    /// In real time the caller must obey [`Fault::Stall`]; see [`Fabric::stalled_for`].
    #[must_use]
    pub fn inject(
        &self,
        ip: IpAddr,
        connections: Connections,
        fault: Fault,
        when: Result<When, Chance>,
    ) -> bool {
        // A fault that strikes by itself has no targets at which chance could be drawn.
        let sensible = (when.is_ok() || !fault.strikes_by_itself())
            && (connections == Connections::All || fault.strikes_connections());
        self.driver.peek(|model| {
            let host = model.host_at(ip).filter(|_| sensible);
            host.inspect(|host| model.inject(*host, connections, fault, when)).is_some()
        })
    }

    /// Seeds the random choices of faults from now on.
    pub fn seed_faults(&self, seed: u64) {
        self.driver.peek(|model| model.seed_faults(seed));
    }

    /// Sets the one-way latency of later messages. In real time the machine's own time adds to it.
    pub fn set_latency(&self, latency: Duration) {
        self.driver.peek(|model| model.set_latency(latency));
    }

    /// Sets the kind of device from now on. Random choices of the kind are drawn now, from the seed
    /// of [`Fabric::seed_faults`].
    pub fn set_device_kind(&self, kind: DeviceKind) {
        self.driver.peek(|model| model.set_device_kind(kind));
    }

    /// Passes later messages and their answers to `capture` until the fabric is dropped. Messages
    /// of the connection manager are not included. Returns false if there is a capture already.
    #[must_use]
    pub fn capture(&self, capture: Box<dyn Capture>) -> bool {
        self.driver.peek(|model| model.capture(capture))
    }

    /// Stops the capture and returns it.
    #[must_use]
    pub fn stop_capture(&self) -> Option<Box<dyn Capture>> {
        self.driver.peek(|model| model.stop_capture())
    }

    /// Returns the counts of failure classes since a fault was first injected or the devices' kind
    /// was set. Classes about memory that still changes are not included: it belongs to a program.
    #[must_use]
    pub fn failure_counts(&self) -> FailureCounts {
        let counts = |model: &mut Model| model.simulation().map(|simulation| simulation.failure_counts);
        // The completions that programs have taken count as seen. Other calls come in between.
        let mut next = self.driver.peek(counts).map(|_| 0);
        while let Some(place) = next {
            next = self.driver.peek(|model| model.look_at_some(place));
        }
        self.driver.peek(counts).unwrap_or_default()
    }

    /// Returns how often faults struck.
    #[must_use]
    pub fn faults_struck(&self) -> u64 {
        self.driver.peek(|model| model.faults_struck())
    }

    /// Returns how many injected faults have not struck yet. Those that come by chance always
    /// count.
    #[must_use]
    pub fn faults_ahead(&self) -> usize {
        self.driver.peek(|model| model.faults_ahead())
    }

    /// Returns for how long a fault stops the programs on the host with this address.
    #[must_use]
    pub fn stalled_for(&self, ip: IpAddr) -> Option<Duration> {
        self.driver.peek(|model| {
            let host = model.host_at(ip)?;
            let until = model.simulation()?.stalled_until(host.index())?;
            Some(until.since(model.now())).filter(|left| !left.is_zero())
        })
    }

    /// Returns the queue pairs of the fabric with the lowest numbers above `above`, at most `most`,
    /// by number.
    ///
    /// Other calls come in between, so that queue pairs may come and go meanwhile.
    #[must_use]
    pub fn connections(&self, above: u32, most: usize) -> Vec<Connection> {
        let (mut found, mut next) = (Vec::new(), above.checked_add(1));
        while let Some(from) = next
            && found.len() < most
        {
            let more;
            (more, next) = self.driver.peek(|model| model.connections(from, most - found.len()));
            found.extend(more);
        }
        found
    }

    /// Returns what the host with this address holds, or nothing if there is none.
    #[must_use]
    pub fn resources(&self, ip: IpAddr) -> Resources {
        self.driver
            .peek(|model| model.host_at(ip).map_or_else(Resources::default, |host| model.resources(host)))
    }
}

impl Default for Fabric {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").finish_non_exhaustive()
    }
}

/// A host on a [`Fabric`], and a software implementation of [`Backend`].
#[derive(Clone)]
pub struct SoftSim {
    pub(crate) driver: Arc<Driver>,
    pub(crate) host: HostId,
}

impl Backend for SoftSim {
    type Error = Error;
    type EventChannel = EventChannel;
    type Identifier = Identifier;
    type Domain = Domain;
    type Region = Region;
    type CompletionQueue = CompletionQueue;
    type QueuePair = QueuePair;

    fn event_channel(&self) -> Result<EventChannel, Error> {
        EventChannel::create(&self.driver, self.host)
    }

    fn now(&self) -> Instant {
        self.driver.now()
    }
}

impl fmt::Debug for SoftSim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftSim").field("host", &self.host).finish_non_exhaustive()
    }
}
