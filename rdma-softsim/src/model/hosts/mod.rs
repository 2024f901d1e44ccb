//! Hosts: addresses, limits, listeners and links.

pub(super) mod context;
pub(super) mod listeners;

use core::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use rdma_backend::time::Instant;

use super::base::arena::{Arena, visit};
use super::base::ids::{HostId, IdentifierId, kind};
use crate::error::Error;
use crate::settings::{Limits, Link};
use listeners::{FIRST, Listeners, free_port};

/// One device of a machine, and the process on it. A machine with several devices has a host for
/// each: objects belong to one, identifiers to the one of their address, and wildcard listeners are
/// on all.
pub(crate) struct Host {
    /// The first device of its machine; `None` if this is the first.
    first: Option<HostId>,
    /// The further devices of its machine, if this is the first.
    others: Vec<HostId>,
    addresses: Vec<IpAddr>,
    pub(super) limits: Limits,
    /// False after its process was killed. The machine and its kernel continue.
    alive: bool,
    pub(super) listeners: Listeners,
    /// The dynamic port that is tried next.
    next_port: u16,
    pub(super) registered: u64,
    /// Until when faults keep its link down.
    down_until: Instant,
}

impl Host {
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        self.addresses.contains(&ip)
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

/// The hosts of a fabric, their addresses and their links.
pub(super) struct Hosts {
    all: Arena<kind::Host, Host>,
    /// The host that has an address.
    of: BTreeMap<IpAddr, HostId>,
    down: BTreeSet<IpAddr>,
}

impl Hosts {
    pub(super) const fn new() -> Self {
        Self { all: Arena::new(), of: BTreeMap::new(), down: BTreeSet::new() }
    }

    pub(super) fn get(&self, id: HostId) -> Option<&Host> {
        self.all.get(id)
    }

    /// Returns the host with this number, by which faults and traces name it.
    pub(super) fn numbered(&self, number: u32) -> Option<HostId> {
        self.all.at(number).map(|(id, _)| id)
    }

    pub(super) fn at(&self, ip: IpAddr) -> Option<HostId> {
        self.of.get(&ip).copied()
    }

    /// Adds a device to the machine whose first one is given, or a new machine.
    pub(super) fn insert(&mut self, first: Option<HostId>, addresses: &[IpAddr], limits: Limits) -> HostId {
        // Wildcard listeners are on this device too.
        let listeners = first
            .and_then(|first| self.all.get(first))
            .map_or_else(Listeners::default, |first| first.listeners.everywhere());
        let id = self.all.insert(Host {
            first,
            others: Vec::new(),
            addresses: addresses.to_vec(),
            limits,
            alive: true,
            listeners,
            next_port: FIRST,
            registered: 0,
            down_until: Instant::default(),
        });
        // A former owner keeps its listeners there, which no request reaches any more.
        for ip in addresses {
            let before = self.of.insert(*ip, id).filter(|before| *before != id);
            if let Some(before) = before.and_then(|before| self.all.get_mut(before)) {
                before.addresses.retain(|other| other != ip);
            }
        }
        if let Some(first) = first.and_then(|first| self.all.get_mut(first)) {
            first.others.push(id);
        }
        id
    }

    pub(super) fn machine(&self, host: HostId) -> HostId {
        self.all.get(host).and_then(|host| host.first).unwrap_or(host)
    }

    pub(super) fn devices(&self, host: HostId) -> Vec<HostId> {
        let machine = self.machine(host);
        let others = self.all.get(machine).map_or(&[][..], |first| &first.others);
        std::iter::once(machine).chain(others.iter().copied()).inspect(|_| visit()).collect()
    }

    /// Returns the devices of a host's machine for an identifier at this address: the one that has
    /// it, or all.
    pub(super) fn devices_at(&self, host: HostId, ip: IpAddr) -> Result<Vec<HostId>, Error> {
        let mut devices = self.devices(host);
        if !ip.is_unspecified() {
            devices.retain(|id| self.all.get(*id).is_some_and(|host| host.has(ip)));
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
            // There is no path between the two families.
            .filter(|(_, ip)| ip.is_ipv4() == remote.is_ipv4())
            // Of equal ones the first. `max_by_key` would return the last.
            .min_by_key(|(_, ip)| Reverse(common_prefix(*ip, remote)))
    }

    /// Returns `address`, with a port if it has none, for a new listener or connection on these
    /// devices.
    pub(super) fn claim(&mut self, devices: &[HostId], mut address: SocketAddr) -> Result<SocketAddr, Error> {
        let hosts = || devices.iter().filter_map(|id| self.all.get(*id));
        if address.port() != 0 {
            let taken = hosts().any(|host| host.listeners.has_taken(address));
            return if taken { Err(Error::AddressInUse(address)) } else { Ok(address) };
        }
        let first = hosts().next().ok_or(Error::Gone("host"))?;
        // Free on every device: a wildcard listens on all of them.
        let taken = |place| hosts().fold(0, |taken, host| taken | host.listeners.word(place));
        let port = free_port(first.next_port, taken).ok_or(Error::NoFreePort)?;
        if let Some(first) = devices.first().and_then(|first| self.all.get_mut(*first)) {
            first.next_port = port.checked_add(1).unwrap_or(FIRST);
        }
        address.set_port(port);
        Ok(address)
    }

    pub(super) fn is_killed(&self, host: u32) -> bool {
        self.all.at(host).is_some_and(|(_, host)| !host.alive)
    }

    pub(super) fn addresses(&self, id: HostId) -> Vec<IpAddr> {
        self.all.get(id).map_or_else(Vec::new, |host| host.addresses.clone())
    }

    /// Records that a fault keeps the link of a host down until then. A short fault does not end a
    /// longer one.
    pub(super) fn down_until(&mut self, id: HostId, until: Instant) {
        if let Some(host) = self.all.get_mut(id) {
            host.down_until = host.down_until.max(until);
        }
    }

    /// Returns whether no fault keeps its link down any more.
    pub(super) fn is_repaired(&self, id: HostId, now: Instant) -> bool {
        self.all.get(id).is_none_or(|host| now >= host.down_until)
    }

    pub(super) fn alive(&self, id: HostId) -> Result<&Host, Error> {
        self.all.get(id).filter(|host| host.alive).ok_or(Error::Gone("host"))
    }

    pub(super) fn cut(&self, one: IpAddr, other: IpAddr) -> bool {
        // Asked for each message, and nearly always no link is down.
        !self.down.is_empty() && (self.down.contains(&one) || self.down.contains(&other))
    }

    pub(super) fn set_link(&mut self, ip: IpAddr, link: Link) {
        match link {
            Link::Up => self.down.remove(&ip),
            Link::Down => self.down.insert(ip),
        };
    }

    /// Ends the process on a device. Returns false if there is no such device.
    pub(super) fn kill(&mut self, id: HostId) -> bool {
        self.all.get_mut(id).is_some_and(|host| {
            host.alive = false;
            true
        })
    }

    /// Puts a listener on all of these devices.
    pub(super) fn listen(&mut self, devices: &[HostId], address: SocketAddr, listener: IdentifierId) {
        for device in devices {
            if let Some(device) = self.all.get_mut(*device) {
                device.listeners.insert(address, listener);
            }
        }
    }

    /// Removes a listener. A wildcard listens on all devices of its machine.
    pub(super) fn end_listening(&mut self, host: HostId, address: SocketAddr, listener: IdentifierId) {
        for device in self.devices(host) {
            if let Some(device) = self.all.get_mut(device) {
                device.listeners.remove(address, listener);
            }
        }
    }

    /// Counts bytes that are registered on a device.
    pub(super) fn add_registered(&mut self, id: HostId, bytes: u64) {
        if let Some(host) = self.all.get_mut(id) {
            host.registered += bytes;
        }
    }

    pub(super) fn subtract_registered(&mut self, id: HostId, bytes: u64) {
        if let Some(host) = self.all.get_mut(id) {
            host.registered -= bytes;
        }
    }
}
