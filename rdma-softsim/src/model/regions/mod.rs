//! Protection domains and memory regions, with their access checks.

pub(super) mod memory;
pub(super) mod parts;

use core::hash::Hasher;
use std::sync::Arc;

use rdma_backend::{Access, RemoteAddress};

use super::base::arena::{Objects, OnHost};
use super::base::environment::Environment;
use super::base::ids::{DomainId, HostId, RegionId, kind};
use super::flights::freight::Stretch;
use super::hosts::Hosts;
use super::pairs::queue_pair::QueuePair;
use crate::error::Error;
use crate::request::Rights;
use crate::trace::{Digest, EntryKind};
use memory::{Bytes, Memory, Unreachable, copy, inside};
use parts::{Part, Parts};

/// The first region address. Addresses are never reused, so that a stale one is always noticed.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;
/// Regions start on a page and are followed by an unmapped page.
const PAGE: u64 = 4096;

pub(crate) struct Domain {
    pub(super) host: HostId,
    /// How many queue pairs and regions are in it.
    pub(super) users: usize,
}

impl OnHost for Domain {
    const NAME: &'static str = "protection domain";

    fn host(&self) -> HostId {
        self.host
    }
}

pub(crate) struct Region {
    pub(super) host: HostId,
    pub(super) domain: DomainId,
    pub(super) memory: Bytes,
    /// The length at registration, whatever a program's memory says later.
    len: usize,
    rights: Rights,
    address: u64,
    rkey: u32,
}

impl OnHost for Region {
    const NAME: &'static str = "region";

    fn host(&self) -> HostId {
        self.host
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) id: RegionId,
    pub(crate) address: u64,
    pub(crate) rkey: u32,
}

/// The protection domains of all hosts, and the regions in them.
pub(super) struct Regions {
    domains: Objects<kind::Domain, Domain>,
    all: Objects<kind::Region, Region>,
    /// Regions ever registered, modulo the width of the key.
    registrations: u8,
    /// Bytes of address space ever given to regions.
    address_space: u64,
    /// How many regions are memory of other processes.
    foreign: usize,
}

impl Regions {
    pub(super) const fn new() -> Self {
        Self { domains: Objects::new(), all: Objects::new(), registrations: 0, address_space: 0, foreign: 0 }
    }

    pub(super) fn get(&self, id: RegionId) -> Option<&Region> {
        self.all.get(id)
    }

    pub(super) const fn all(&self) -> &Objects<kind::Region, Region> {
        &self.all
    }

    pub(super) const fn domains(&self) -> &Objects<kind::Domain, Domain> {
        &self.domains
    }

    pub(super) fn create_domain(&mut self, env: &mut Environment, host: HostId) -> Result<DomainId, Error> {
        if env.strikes_creation(host) {
            return Err(Error::Exhausted { what: "protection domains", limit: "", value: 0 });
        }
        Ok(self.domains.insert(Domain { host, users: 0 }))
    }

    pub(super) fn destroy_domain(&mut self, env: &mut Environment, id: DomainId) {
        if let Some(domain) = self.domains.remove(id)
            && domain.users > 0
        {
            let host = domain.host.index();
            env.note(|| EntryKind::Busy { host, what: "protection domain" });
        }
    }

    /// Returns the host of a domain.
    pub(super) fn domain_host(&self, id: DomainId) -> Result<HostId, Error> {
        Ok(self.domains.find(id)?.host)
    }

    /// Counts a queue pair or a region that is made in a domain.
    pub(super) fn enter_domain(&mut self, id: DomainId) {
        if let Some(domain) = self.domains.get_mut(id) {
            domain.users += 1;
        }
    }

    pub(super) fn leave_domain(&mut self, id: DomainId) {
        if let Some(domain) = self.domains.get_mut(id) {
            domain.users -= 1;
        }
    }

    /// Checks that `len` more bytes may be registered, and returns the host.
    pub(super) fn may_register(&self, hosts: &Hosts, domain: DomainId, len: u64) -> Result<HostId, Error> {
        let host = self.domain_host(domain)?;
        let owner = hosts.get(host).ok_or(Error::Gone("host"))?;
        let limits = &owner.limits;
        let exhausted = |what, limit, value| Err(Error::Exhausted { what, limit, value });
        if len == 0 {
            return Err(Error::Argument("a region has at least one byte"));
        }
        if len > limits.max_region {
            return exhausted("bytes in a region", "max_region", limits.max_region);
        }
        // A region's place is part of its rkey, in 24 bits.
        if self.all.count_on(host) >= limits.max_regions as usize || self.all.len() >= (1 << 24) - 1 {
            return exhausted("regions", "max_regions", limits.max_regions.into());
        }
        let registered = owner.registered;
        // All regions together, as `RLIMIT_MEMLOCK` bounds them.
        if registered.checked_add(len).is_none_or(|sum| sum > limits.locked_memory) {
            return Err(Error::LockedMemory { asked: len, registered, limit: limits.locked_memory });
        }
        Ok(host)
    }

    pub(super) fn register(
        &mut self,
        env: &mut Environment,
        hosts: &mut Hosts,
        domain: DomainId,
        memory: Arc<Memory>,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        let address = FIRST_ADDRESS + self.address_space;
        let space = (memory.len() as u64).next_multiple_of(PAGE) + PAGE;
        let registered = self.register_at(env, hosts, domain, address, Bytes::Own(memory), rights)?;
        // Only now: a refused registration uses no addresses.
        self.address_space += space;
        Ok(registered)
    }

    /// Registers memory that peers access at `address`.
    pub(super) fn register_at(
        &mut self,
        env: &mut Environment,
        hosts: &mut Hosts,
        domain: DomainId,
        address: u64,
        memory: Bytes,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        let (len, rights) = (memory.len(), rights.into());
        let host = self.may_register(hosts, domain, len as u64)?;
        if env.strikes_creation(host) {
            return Err(Error::Allocation(len));
        }
        self.foreign += usize::from(memory.foreign().is_some());
        let id = self.all.insert(Region { host, domain, memory, len, rights, address, rkey: 0 });
        // As on real devices: the place of the region, and 8 bits that change with each
        // registration there.
        // The place counts from 1, so that a key of 0 opens nothing.
        self.registrations = self.registrations.wrapping_add(1);
        let rkey = (id.index() + 1) << 8 | u32::from(self.registrations);
        if let Some(region) = self.all.get_mut(id) {
            region.rkey = rkey;
        }
        hosts.add_registered(host, len as u64);
        self.enter_domain(domain);
        env.note(|| EntryKind::Registered { host: host.index(), access: rights.access });
        Ok(Registration { id, address, rkey })
    }

    /// Removes a region. Returns its key.
    pub(super) fn remove(&mut self, hosts: &mut Hosts, id: RegionId) -> Option<u32> {
        let region = self.all.remove(id)?;
        self.foreign -= usize::from(region.memory.foreign().is_some());
        hosts.subtract_registered(region.host, region.len as u64);
        self.leave_domain(region.domain);
        Some(region.rkey)
    }

    /// Returns the part of a region that the peer of a queue pair names, if its key, bounds, domain
    /// and rights are valid.
    pub(super) fn remote(
        &self,
        pair: &QueuePair,
        remote: RemoteAddress,
        len: usize,
        wanted: Rights,
    ) -> Option<(RegionId, usize)> {
        // The key contains the place of its region; see `register_at`.
        let (id, region) = self.all.at((remote.rkey >> 8).checked_sub(1)?)?;
        let offset = usize::try_from(remote.address.checked_sub(region.address)?).ok()?;
        let fits = inside(offset, len, region.len);
        let allowed = pair.rights.allow(wanted) && region.rights.allow(wanted);
        // A key opens a region only through its own domain (docs/decisions.md, 4).
        let allowed = allowed && region.rkey == remote.rkey && region.domain == pair.domain;
        (fits && allowed).then_some((id, offset))
    }

    /// Returns the memory of `region`, if it is still registered and allows `access`.
    pub(super) fn local(&self, region: RegionId, access: Access) -> Option<&Bytes> {
        Some(&self.all.get(region).filter(|region| region.rights.access.allows(access))?.memory)
    }

    /// Returns the part of a region that a work request names by address and `lkey`. A wrong key,
    /// or bytes outside the region or in another domain than the queue pair's, name no existing
    /// region: a device notices when it executes the work.
    pub(super) fn named(&self, domain: Option<DomainId>, address: u64, len: u32, lkey: u32) -> Part {
        let len = len as usize;
        let found = || {
            let (id, region) = self.all.at((lkey >> 8).checked_sub(1)?)?;
            let offset = usize::try_from(address.checked_sub(region.address)?).ok()?;
            // Rights are checked when the work is executed: they depend on what it does.
            let valid = region.rkey == lkey && Some(region.domain) == domain;
            (valid && inside(offset, len, region.len)).then_some((id, offset))
        };
        let (region, offset) = found().unwrap_or((RegionId::NONE, 0));
        Part { region, offset, len }
    }

    /// Returns whether the first `len` bytes are all in regions that allow `access`.
    pub(super) fn allows(&self, parts: &Parts, len: usize, access: Access) -> bool {
        // Each part: regions of one list may have different rights.
        parts.within(0, len).all(|part| self.local(part.region, access).is_some())
    }

    /// Reads the first bytes. Returns false if some cannot be accessed.
    pub(super) fn gather(&self, parts: &Parts, into: &mut [u8]) -> bool {
        let mut rest = into;
        let len = rest.len();
        parts.within(0, len).all(|part| {
            // It cannot be short: `within` returns no more than `into` has room for.
            let Some((piece, behind)) = core::mem::take(&mut rest).split_at_mut_checked(part.len) else {
                return false;
            };
            rest = behind;
            self.local(part.region, Access::NONE).is_some_and(|memory| memory.read(part.offset, piece))
        })
    }

    /// Writes `bytes` at offset `at`. Returns false if some cannot be accessed.
    pub(super) fn scatter(&self, parts: &Parts, at: usize, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        parts.within(at, bytes.len()).all(|part| {
            let Some((piece, behind)) = rest.split_at_checked(part.len) else { return false };
            rest = behind;
            self.local(part.region, Access::LOCAL_WRITE)
                .is_some_and(|memory| memory.write(part.offset, piece))
        })
    }

    /// Copies the first `len` bytes of one list to another, which must have room for them.
    pub(super) fn copy_parts(&self, from: &Parts, to: &Parts, len: usize) -> Result<(), Unreachable> {
        let mut done = 0;
        for part in from.within(0, len) {
            let source = self.local(part.region, Access::NONE).ok_or(Unreachable::Source)?;
            let mut offset = part.offset;
            // A piece ends where a part of either list does.
            for target in to.within(done, part.len) {
                let memory = self.local(target.region, Access::LOCAL_WRITE).ok_or(Unreachable::Target)?;
                copy((source, offset), (memory, target.offset), target.len)?;
                offset += target.len;
            }
            done += part.len;
        }
        Ok(())
    }

    /// Returns whether a region is memory of another process.
    #[inline]
    pub(super) const fn has_foreign(&self) -> bool {
        self.foreign > 0
    }

    #[inline]
    pub(super) fn is_any_foreign(&self, parts: &Parts) -> bool {
        let is_foreign =
            |part: &Part| self.all.get(part.region).is_some_and(|region| region.memory.foreign().is_some());
        self.has_foreign() && parts.list().iter().any(is_foreign)
    }

    pub(super) fn stretches(&self, parts: &Parts, len: usize) -> Vec<Stretch> {
        let of = |Part { region, offset, len }| {
            // Shared: a mover has no access to the model.
            let memory = self.all.get(region)?.memory.clone();
            Some(Stretch { memory, offset, len })
        };
        parts.within(0, len).filter_map(of).collect()
    }

    /// Returns a hash of these bytes, unless some cannot be read.
    pub(super) fn hash_of(&self, parts: &Parts) -> Option<u64> {
        let mut digest = Digest::default();
        // In pieces: a message may be as long as all memory.
        const CHUNK: usize = 4096;
        let mut chunk = [0; CHUNK];
        for &Part { region, mut offset, len } in parts.list() {
            let memory = &self.all.get(region)?.memory;
            let end = offset + len;
            while offset < end {
                let part = &mut chunk[..CHUNK.min(end - offset)];
                if !memory.read(offset, part) {
                    return None;
                }
                digest.write(part);
                offset += part.len();
            }
        }
        Some(digest.finish())
    }
}
