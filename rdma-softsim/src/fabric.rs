//! The fabric in real time, and the hosts on it.

use core::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_proto::backend::Backend;
use rdma_proto::time::Instant;

use crate::Error;
use crate::connection::{EventChannel, Identifier};
use crate::driver::Driver;
use crate::model::HostId;
use crate::settings::{Limits, Link, Parameters, Resources};
use crate::verbs::{CompletionQueue, Domain, QueuePair, Region};

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

    /// Returns the resources of the host with this address; none if there is no such host.
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
