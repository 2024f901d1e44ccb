//! Hosts: addresses, limits, listeners, and faults of links and processes.

use core::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::{HostId, IdentifierId, Model, Wake};
use crate::Error;
use crate::settings::{Limits, Link, Resources};

/// Ports given out when none is requested, IANA's dynamic ports.
const DYNAMIC_PORTS: core::ops::RangeInclusive<u16> = 49152..=65535;

/// One device of a machine, and the process on it. A machine with several devices has a host for
/// each: objects belong to one, identifiers to the one of their address, and wildcard listeners are
/// on all.
pub(crate) struct Host {
    /// The first device of its machine; `None` if this is the first.
    first: Option<HostId>,
    addresses: Vec<IpAddr>,
    pub(super) limits: Limits,
    /// False after its process was killed. The machine and its kernel continue.
    alive: bool,
    pub(super) listeners: BTreeMap<SocketAddr, IdentifierId>,
    next_port: u16,
    pub(super) regions: u32,
    pub(super) registered: u64,
}

impl Host {
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        self.addresses.contains(&ip)
    }

    /// Returns the listener for connections to `address`. A wildcard covers its own family: `::`
    /// takes no IPv4, because the listeners of `rdma-verbs` do not (`RDMA_OPTION_ID_AFONLY`,
    /// `rdma_set_option(3)`).
    pub(super) fn listener(&self, address: SocketAddr) -> Option<IdentifierId> {
        let anywhere = SocketAddr::new(unspecified(address.ip()), address.port());
        self.listeners.get(&address).or_else(|| self.listeners.get(&anywhere)).copied()
    }

    pub(super) fn taken(&self, address: SocketAddr) -> bool {
        self.listeners.keys().any(|other| {
            let overlap =
                other.ip() == address.ip() || other.ip().is_unspecified() || address.ip().is_unspecified();
            other.port() == address.port() && other.is_ipv4() == address.is_ipv4() && overlap
        })
    }

    /// Returns the next dynamic port, taken or not.
    fn next_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(*DYNAMIC_PORTS.start());
        port
    }
}

/// Returns the number of common leading bits of two addresses of one family.
const fn common_prefix(one: IpAddr, other: IpAddr) -> u32 {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()).leading_zeros(),
        _ => 0,
    }
}

const fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

impl Model {
    /// Adds a host. An address of another host moves here, as when a machine takes over for
    /// another. Resolutions that await one of the addresses find it.
    pub(crate) fn add_host(&mut self, addresses: &[IpAddr], limits: Limits) -> HostId {
        self.insert_host(None, addresses, limits)
    }

    pub(crate) fn add_device(&mut self, host: HostId, addresses: &[IpAddr], limits: Limits) -> HostId {
        self.insert_host(Some(self.machine(host)), addresses, limits)
    }

    fn insert_host(&mut self, first: Option<HostId>, addresses: &[IpAddr], limits: Limits) -> HostId {
        for id in self.hosts.select(|_| true) {
            if let Some(host) = self.hosts.get_mut(id) {
                host.addresses.retain(|ip| !addresses.contains(ip));
            }
        }
        // Wildcard listeners are on this device too.
        let listeners = first.and_then(|first| self.hosts.get(first)).map_or_else(BTreeMap::new, |first| {
            let everywhere = first.listeners.iter().filter(|(address, _)| address.ip().is_unspecified());
            everywhere.map(|(address, listener)| (*address, *listener)).collect()
        });
        self.found(addresses);
        self.hosts.insert(Host {
            first,
            addresses: addresses.to_vec(),
            limits,
            alive: true,
            listeners,
            next_port: *DYNAMIC_PORTS.start(),
            regions: 0,
            registered: 0,
        })
    }

    pub(super) fn machine(&self, host: HostId) -> HostId {
        self.hosts.get(host).and_then(|host| host.first).unwrap_or(host)
    }

    pub(super) fn devices(&self, host: HostId) -> Vec<HostId> {
        let machine = self.machine(host);
        let ids = self.hosts.iter().map(|(id, _)| id);
        ids.filter(|id| self.machine(*id) == machine).collect()
    }

    /// Returns the devices of a host's machine for an identifier at this address: the one that has
    /// it, or all.
    pub(super) fn devices_at(&self, host: HostId, ip: IpAddr) -> Result<Vec<HostId>, Error> {
        let mut devices = self.devices(host);
        if !ip.is_unspecified() {
            devices.retain(|id| self.hosts.get(*id).is_some_and(|host| host.has(ip)));
        }
        if devices.is_empty() { Err(Error::NotLocal(ip)) } else { Ok(devices) }
    }

    /// Returns the device and the address from which a host's machine reaches `remote`: `remote`
    /// itself, or the address that has the most leading bits in common with it, as on one network
    /// (RFC 6724, section 5, rule 8).
    pub(super) fn source_for(&self, host: HostId, remote: IpAddr) -> Option<(HostId, IpAddr)> {
        let devices = self.devices(host).into_iter();
        let addresses = devices.flat_map(|id| self.addresses(id).into_iter().map(move |ip| (id, ip)));
        addresses
            .filter(|(_, ip)| ip.is_ipv4() == remote.is_ipv4())
            .min_by_key(|(_, ip)| Reverse(common_prefix(*ip, remote)))
    }

    /// Returns `address`, with a port if it has none, for a new listener or connection on these
    /// devices.
    pub(super) fn claim(&mut self, devices: &[HostId], mut address: SocketAddr) -> Result<SocketAddr, Error> {
        let taken = |model: &Self, address| {
            devices.iter().any(|id| model.hosts.get(*id).is_some_and(|host| host.taken(address)))
        };
        if address.port() != 0 {
            return if taken(self, address) { Err(Error::AddressInUse(address)) } else { Ok(address) };
        }
        let &first = devices.first().ok_or(Error::Gone("host"))?;
        for _ in DYNAMIC_PORTS {
            address.set_port(self.hosts.get_mut(first).ok_or(Error::Gone("host"))?.next_port());
            if !taken(self, address) {
                return Ok(address);
            }
        }
        Err(Error::NoFreePort)
    }

    pub(crate) fn host_at(&self, ip: IpAddr) -> Option<HostId> {
        self.hosts.iter().find(|(_, host)| host.has(ip)).map(|(id, _)| id)
    }

    pub(crate) fn is_killed(&self, host: u32) -> bool {
        self.hosts.at(host).is_some_and(|(_, host)| !host.alive)
    }

    pub(super) fn addresses(&self, id: HostId) -> Vec<IpAddr> {
        self.hosts.get(id).map_or_else(Vec::new, |host| host.addresses.clone())
    }

    pub(crate) fn limits(&self, id: HostId) -> Result<Limits, Error> {
        Ok(self.alive(id)?.limits)
    }

    pub(super) fn alive(&self, id: HostId) -> Result<&Host, Error> {
        self.hosts.get(id).filter(|host| host.alive).ok_or(Error::Gone("host"))
    }

    pub(crate) fn set_link(&mut self, ip: IpAddr, link: Link) {
        match link {
            Link::Up => self.down.remove(&ip),
            Link::Down => self.down.insert(ip),
        };
    }

    pub(super) fn cut(&self, one: IpAddr, other: IpAddr) -> bool {
        !self.down.is_empty() && (self.down.contains(&one) || self.down.contains(&other))
    }

    /// Ends the process on a host's machine. Its kernel closes everything it held, and notifies the
    /// peers as usual.
    pub(crate) fn kill_host(&mut self, id: HostId) {
        for device in self.devices(id) {
            self.kill_device(device);
        }
    }

    fn kill_device(&mut self, id: HostId) {
        let Some(host) = self.hosts.get_mut(id) else { return };
        host.alive = false;
        // Sleepers on descriptors wake up to the error.
        self.wakes.extend(self.channels.select(|c| c.host == id).into_iter().map(Wake::Events));
        self.wakes.extend(self.queues.select(|q| q.host == id).into_iter().map(Wake::Completions));
        for pair in self.pairs.select(|pair| pair.host == id) {
            self.destroy_pair(pair);
        }
        for identifier in self.identifiers.select(|identifier| identifier.host == id) {
            self.destroy_identifier(identifier);
        }
        for channel in self.channels.select(|channel| channel.host == id) {
            self.destroy_channel(channel);
        }
        for queue in self.queues.select(|queue| queue.host == id) {
            self.destroy_queue(queue);
        }
        for region in self.regions.select(|region| region.host == id) {
            self.deregister(region);
        }
        for domain in self.domains.select(|domain| domain.host == id) {
            self.destroy_domain(domain);
        }
    }

    pub(crate) fn resources(&self, id: HostId) -> Resources {
        Resources {
            event_channels: self.channels.iter().filter(|(_, channel)| channel.host == id).count(),
            identifiers: self.identifiers.iter().filter(|(_, identifier)| identifier.host == id).count(),
            domains: self.domains.iter().filter(|(_, domain)| domain.host == id).count(),
            regions: self.regions.iter().filter(|(_, region)| region.host == id).count(),
            registered_bytes: self.hosts.get(id).map_or(0, |host| host.registered),
            completion_queues: self.queues.iter().filter(|(_, queue)| queue.host == id).count(),
            queue_pairs: self.pairs.iter().filter(|(_, pair)| pair.host == id).count(),
        }
    }
}
