//! The fabric in real time, and the hosts on it.

use core::fmt;
use core::time::Duration;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_backend::Backend;
use rdma_backend::time::Instant;

use crate::connection::{EventChannel, Identifier};
use crate::driver::Driver;
use crate::model::HostId;
use crate::settings::{Limits, Link, Parameters, Resources};
use crate::verbs::{CompletionQueue, Domain, QueuePair, Region};
use crate::{Capture, Chance, Connection, Connections, DeviceKind, Error, FailureCounts, Fault, When};

/// A network of hosts with RDMA devices, inside this process. Clones are handles to the same fabric.
#[derive(Clone)]
pub struct Fabric {
    driver: Arc<Driver>,
}

impl Fabric {
    /// A fabric without latency.
    #[must_use]
    pub fn new() -> Self {
        Self::with_parameters(Parameters::default())
    }

    /// A fabric with times of its own.
    #[must_use]
    pub fn with_parameters(parameters: Parameters) -> Self {
        Self { driver: Arc::new(Driver::new(parameters)) }
    }

    pub(crate) fn of(driver: &Arc<Driver>) -> Self {
        Self { driver: Arc::clone(driver) }
    }

    /// A new host with these addresses and a generous device. An address that another host has moves to this one.
    #[must_use]
    pub fn host(&self, addresses: &[IpAddr]) -> SoftSim {
        self.host_with(addresses, Limits::default())
    }

    /// A new host with a device of these limits.
    #[must_use]
    pub fn host_with(&self, addresses: &[IpAddr], limits: Limits) -> SoftSim {
        let host = self.driver.peek(|model| model.add_host(addresses, limits));
        SoftSim { driver: Arc::clone(&self.driver), host }
    }

    /// Takes the link of an address down or up again. Nobody is told: requests are retried and in the end fail, and
    /// whoever waits idly waits on.
    pub fn set_link(&self, ip: IpAddr, link: Link) {
        self.driver.peek(|model| model.set_link(ip, link));
    }

    /// Ends the process on the host with this address: everything it holds is gone, and its kernel tells its peers
    /// that they are disconnected. Every later call on its handles is an error. The machine stays on the network,
    /// where nobody listens; [`Fabric::host`] with the same address starts a new process.
    pub fn kill_host(&self, ip: IpAddr) {
        self.driver.peek(|model| {
            if let Some(host) = model.host_at(ip) {
                model.kill_host(host);
            }
        });
    }

    /// From now on `fault` may befall the host with this address: once, when the time has come (times count from now on), or again
    /// and again, by chance. Of its connections only those named are struck. False if there is no such host, if the fault strikes by itself
    /// and is to come by chance, or if it strikes more than connections and some are named.
    ///
    /// In real time [`Fault::Stall`] is for the caller to obey, see [`Fabric::stalled_for`].
    #[must_use]
    pub fn inject(
        &self,
        ip: IpAddr,
        connections: Connections,
        fault: Fault,
        when: Result<When, Chance>,
    ) -> bool {
        let sensible = (when.is_ok() || !fault.strikes_by_itself())
            && (connections == Connections::All || fault.strikes_connections());
        self.driver.peek(|model| {
            let host = model.host_at(ip).filter(|_| sensible);
            host.inspect(|host| model.inject(*host, connections, fault, when)).is_some()
        })
    }

    /// Draws what comes by chance from this seed, from now on.
    pub fn seed_faults(&self, seed: u64) {
        self.driver.peek(|model| model.seed_faults(seed));
    }

    /// Messages that are sent from now on travel for so long, one way. In real time the machine's own speed comes on top.
    pub fn set_latency(&self, latency: Duration) {
        self.driver.peek(|model| model.set_latency(latency));
    }

    /// Devices behave as this kind does from now on, where verbs leaves them a choice. What the kind leaves to chance is drawn now, from
    /// the seed of [`Fabric::seed_faults`].
    pub fn set_device_kind(&self, kind: DeviceKind) {
        self.driver.peek(|model| model.set_device_kind(kind));
    }

    /// `capture` sees the messages that pass from now on until the fabric is gone, and their answers; the connection manager's are not
    /// among them. False if something else sees them already.
    #[must_use]
    pub fn capture(&self, capture: Box<dyn Capture>) -> bool {
        self.driver.peek(|model| model.capture(capture))
    }

    /// Gives back what [`Fabric::capture`] was given; from now on it sees nothing.
    #[must_use]
    pub fn stop_capture(&self) -> Option<Box<dyn Capture>> {
        self.driver.peek(|model| model.stop_capture())
    }

    /// Returns the counts of the classes of failure, since a fault was first injected or the devices' kind set. Classes about memory that still
    /// changes are not among them: it is a program's own.
    #[must_use]
    pub fn failure_counts(&self) -> FailureCounts {
        self.driver.peek(|model| {
            model.simulation().map_or_else(FailureCounts::default, |simulation| simulation.failure_counts)
        })
    }

    /// How often faults struck.
    #[must_use]
    pub fn faults_struck(&self) -> u64 {
        self.driver.peek(|model| model.faults_struck())
    }

    /// Returns how many injected faults are ahead: those that have not struck, and those that come by chance, which always are.
    #[must_use]
    pub fn faults_ahead(&self) -> usize {
        self.driver.peek(|model| model.faults_ahead())
    }

    /// For how long the programs on the host with this address are not to run, if a fault says so.
    #[must_use]
    pub fn stalled_for(&self, ip: IpAddr) -> Option<Duration> {
        self.driver.peek(|model| {
            let host = model.host_at(ip)?;
            let until = model.simulation()?.stalled_until(host.index())?;
            Some(until.since(model.now())).filter(|left| !left.is_zero())
        })
    }

    /// All queue pairs of the fabric, in the order of their numbers.
    #[must_use]
    pub fn connections(&self) -> Vec<Connection> {
        self.driver.peek(|model| model.connections())
    }

    /// What the host with this address holds; nothing if there is none.
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

/// A host on a [`Fabric`]: the software implementation of [`Backend`].
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
