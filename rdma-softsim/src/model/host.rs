//! Hosts: addresses, limits, listeners, and the two things that can befall them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::{HostId, IdentifierId, Model, Wake};
use crate::Error;
use crate::settings::{Limits, Link, Resources};

/// Ports given out when nobody asks for one, as IANA has them.
const DYNAMIC_PORTS: core::ops::RangeInclusive<u16> = 49152..=65535;

/// A machine with one device and one process on it.
pub(crate) struct Host {
    addresses: Vec<IpAddr>,
    pub(super) limits: Limits,
    /// False after its process was killed. The machine and its kernel live on.
    alive: bool,
    pub(super) listeners: BTreeMap<SocketAddr, IdentifierId>,
    next_port: u16,
    pub(super) regions: u32,
    /// Bytes registered.
    pub(super) registered: u64,
}

impl Host {
    /// The address from which this host reaches `remote`.
    pub(super) fn source_for(&self, remote: IpAddr) -> Option<IpAddr> {
        let same = |ip: &&IpAddr| ip.is_ipv4() == remote.is_ipv4();
        // To itself a host talks from the address it talks to.
        let own = self.addresses.iter().find(|ip| **ip == remote);
        own.or_else(|| self.addresses.iter().find(same)).copied()
    }

    pub(super) fn has(&self, ip: IpAddr) -> bool {
        self.addresses.contains(&ip)
    }

    /// Returns the listener for connections to `address`. A wildcard is for its own family: `::` takes no IPv4, because the
    /// listeners of `rdma-verbs` do not (`RDMA_OPTION_ID_AFONLY`, `rdma_set_option(3)`).
    pub(super) fn listener(&self, address: SocketAddr) -> Option<IdentifierId> {
        let anywhere = SocketAddr::new(unspecified(address.ip()), address.port());
        self.listeners.get(&address).or_else(|| self.listeners.get(&anywhere)).copied()
    }

    /// Returns whether a listener there would be in another's way.
    pub(super) fn taken(&self, address: SocketAddr) -> bool {
        self.listeners.keys().any(|other| {
            let overlap =
                other.ip() == address.ip() || other.ip().is_unspecified() || address.ip().is_unspecified();
            other.port() == address.port() && other.is_ipv4() == address.is_ipv4() && overlap
        })
    }

    /// `address`, with a port if it has none, for a new listener or connection.
    pub(super) fn claim(&mut self, mut address: SocketAddr) -> Result<SocketAddr, Error> {
        if address.port() != 0 {
            return if self.taken(address) { Err(Error::AddressInUse(address)) } else { Ok(address) };
        }
        for _ in DYNAMIC_PORTS {
            address.set_port(self.next_port);
            self.next_port = self.next_port.checked_add(1).unwrap_or(*DYNAMIC_PORTS.start());
            if !self.taken(address) {
                return Ok(address);
            }
        }
        Err(Error::NoFreePort)
    }
}

const fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

impl Model {
    /// A new host. An address that another host has moves here, as it does when a machine takes over for another.
    pub(crate) fn add_host(&mut self, addresses: &[IpAddr], limits: Limits) -> HostId {
        for id in self.hosts.select(|_| true) {
            if let Some(host) = self.hosts.get_mut(id) {
                host.addresses.retain(|ip| !addresses.contains(ip));
            }
        }
        self.hosts.insert(Host {
            addresses: addresses.to_vec(),
            limits,
            alive: true,
            listeners: BTreeMap::new(),
            next_port: *DYNAMIC_PORTS.start(),
            regions: 0,
            registered: 0,
        })
    }

    /// The host with this address, dead or alive.
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

    /// Returns whether nothing passes between these addresses.
    pub(super) fn cut(&self, one: IpAddr, other: IpAddr) -> bool {
        !self.down.is_empty() && (self.down.contains(&one) || self.down.contains(&other))
    }

    /// The end of a host's process: its kernel closes all it held, and tells the peers as it always does.
    pub(crate) fn kill_host(&mut self, id: HostId) {
        let Some(host) = self.hosts.get_mut(id) else { return };
        host.alive = false;
        // Whoever sleeps on a descriptor wakes up to the error.
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
