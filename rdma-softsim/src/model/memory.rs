//! Protection domains and memory regions, with their access checks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rdma_backend::{Access, RemoteAddress};
use rdma_memory::{CallerMemory, SharedMemory, Zeroed};

use super::parts::Part;
use super::queue_pair::QueuePair;
use super::{DomainId, HostId, Model, RegionId};
use crate::request::Rights;
use crate::trace::EntryKind;
use crate::{Error, Load};

/// The first region address. Addresses are never reused, so that a stale one is always noticed.
const FIRST_ADDRESS: u64 = 0x7000_0000_0000;
/// Regions start on a page and are followed by an unmapped page.
const PAGE: u64 = 4096;

/// The bytes of a region in this process. They outlive its registration while a handle reads them.
pub(crate) enum Memory {
    /// Allocated for the region.
    Own(Zeroed),
    /// A program's memory.
    Caller(Box<dyn CallerMemory>),
}

impl Memory {
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        Zeroed::new(len).map(Self::Own).ok_or(Error::Allocation(len))
    }

    pub(crate) fn len(&self) -> usize {
        self.shared().len()
    }

    /// Returns the bytes, or none if the program's code panics when asked for them. Only requests
    /// that need them then fail.
    pub(crate) fn shared(&self) -> SharedMemory<'_> {
        match self {
            Self::Own(memory) => memory.shared(),
            Self::Caller(memory) => {
                catch_unwind(AssertUnwindSafe(|| memory.shared())).unwrap_or_else(|_| SharedMemory::new(&[]))
            }
        }
    }
}

/// Bytes of a region in another process: a program that this fabric serves.
///
/// They are accessed without the fabric's lock, because a call may take as long as the process lets
/// it. It must not call the fabric.
pub trait ForeignMemory: Send + Sync {
    /// Takes the next step of `load`, which accesses this memory ([`Load::step`]). Either at once,
    /// and returns the load. Or later, on another thread, which then lets it [continue](Load::go).
    fn carry(&self, mut load: Load) -> Option<Load> {
        load.step();
        Some(load)
    }

    /// Copies `into.len()` bytes at `offset` out, within the region. Returns false if they cannot
    /// be accessed, because their process has ended or has unmapped them.
    fn read(&self, offset: usize, into: &mut [u8]) -> bool;

    /// Copies `from` to `offset`, within the region. Returns false if the bytes cannot be accessed;
    /// some may have changed.
    fn write(&self, offset: usize, from: &[u8]) -> bool;
}

#[derive(Clone)]
pub(crate) enum Bytes {
    /// In this process; a handle may read them too.
    Own(Arc<Memory>),
    /// In another process.
    Foreign { memory: Arc<dyn ForeignMemory>, len: usize },
}

impl Bytes {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Own(memory) => memory.len(),
            Self::Foreign { len, .. } => *len,
        }
    }

    /// Copies bytes out. Returns false if they are not all inside, or are in another process, which
    /// cannot be accessed under the lock.
    #[must_use]
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        matches!(self, Self::Own(memory) if memory.shared().read(offset, into))
    }

    /// Copies bytes in. Returns false if they do not all fit, or are in another process.
    #[must_use]
    pub(super) fn write(&self, offset: usize, from: &[u8]) -> bool {
        matches!(self, Self::Own(memory) if memory.shared().write(offset, from))
    }

    /// Reads like [`Bytes::read`], also in another process: never under the lock.
    #[must_use]
    pub(super) fn reach_read(&self, offset: usize, into: &mut [u8]) -> bool {
        match self {
            Self::Own(_) => self.read(offset, into),
            Self::Foreign { memory, len } => inside(offset, into.len(), *len) && memory.read(offset, into),
        }
    }

    /// Writes like [`Bytes::write`], also in another process: never under the lock.
    #[must_use]
    pub(super) fn reach_write(&self, offset: usize, from: &[u8]) -> bool {
        match self {
            Self::Own(_) => self.write(offset, from),
            Self::Foreign { memory, len } => inside(offset, from.len(), *len) && memory.write(offset, from),
        }
    }
}

fn inside(offset: usize, count: usize, len: usize) -> bool {
    offset.checked_add(count).is_some_and(|end| end <= len)
}

/// The end of a copy that could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unreachable {
    Source,
    Target,
}

pub(crate) struct Domain {
    pub(super) host: HostId,
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

#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) id: RegionId,
    pub(crate) address: u64,
    pub(crate) rkey: u32,
}

impl Model {
    pub(crate) fn destroy_domain(&mut self, id: DomainId) {
        let busy = self.pairs.iter().any(|(_, pair)| pair.domain == id)
            || self.regions.iter().any(|(_, region)| region.domain == id);
        if let (Some(domain), true) = (self.domains.remove(id), busy) {
            let host = domain.host.index();
            self.note(|| EntryKind::Busy { host, what: "protection domain" });
        }
    }

    /// Checks that `len` more bytes may be registered, and returns the host. Called before the
    /// memory is allocated, without the fabric's lock.
    pub(crate) fn may_register(&self, domain: DomainId, len: u64) -> Result<HostId, Error> {
        let host = self.domains.get(domain).ok_or(Error::Gone("protection domain"))?.host;
        let owner = self.hosts.get(host).ok_or(Error::Gone("host"))?;
        let limits = &owner.limits;
        let exhausted = |what, limit, value| Err(Error::Exhausted { what, limit, value });
        if len == 0 {
            return Err(Error::Argument("a region has at least one byte"));
        }
        if len > limits.max_region {
            return exhausted("bytes in a region", "max_region", limits.max_region);
        }
        // A region's place is part of its rkey, in 24 bits.
        if owner.regions >= limits.max_regions || self.regions.len() >= (1 << 24) - 1 {
            return exhausted("regions", "max_regions", limits.max_regions.into());
        }
        let registered = owner.registered;
        if registered.checked_add(len).is_none_or(|sum| sum > limits.locked_memory) {
            return Err(Error::LockedMemory { asked: len, registered, limit: limits.locked_memory });
        }
        Ok(host)
    }

    pub(crate) fn register(
        &mut self,
        domain: DomainId,
        memory: Arc<Memory>,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        let address = FIRST_ADDRESS + self.address_space;
        let space = (memory.len() as u64).next_multiple_of(PAGE) + PAGE;
        let registered = self.register_at(domain, address, Bytes::Own(memory), rights)?;
        self.address_space += space;
        Ok(registered)
    }

    /// Registers memory that peers access at `address`.
    pub(crate) fn register_at(
        &mut self,
        domain: DomainId,
        address: u64,
        memory: Bytes,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        let (len, rights) = (memory.len(), rights.into());
        let host = self.may_register(domain, len as u64)?;
        if self.strikes_creation(host) {
            return Err(Error::Allocation(len));
        }
        let id = self.regions.insert(Region { host, domain, memory, len, rights, address, rkey: 0 });
        // As on real devices: the place of the region, and 8 bits that change with each
        // registration there.
        self.registrations = self.registrations.wrapping_add(1);
        let rkey = (id.index() + 1) << 8 | u32::from(self.registrations);
        if let Some(region) = self.regions.get_mut(id) {
            region.rkey = rkey;
        }
        if let Some(owner) = self.hosts.get_mut(host) {
            owner.regions += 1;
            owner.registered += len as u64;
        }
        self.note(|| EntryKind::Registered { host: host.index(), access: rights.access });
        Ok(Registration { id, address, rkey })
    }

    pub(crate) fn deregister(&mut self, id: RegionId) {
        if self.is_observed()
            && (self.pairs.iter().any(|(_, pair)| pair.uses(id))
                || self.shared.iter().any(|(_, queue)| queue.uses(id)))
            && let Some(host) = self.regions.get(id).map(|region| region.host.index())
        {
            self.note(|| EntryKind::Busy { host, what: "region" });
        }
        let Some(region) = self.regions.remove(id) else { return };
        self.cut_short_into(id);
        self.remember_stale(region.rkey);
        if let Some(owner) = self.hosts.get_mut(region.host) {
            owner.regions -= 1;
            owner.registered -= region.len as u64;
        }
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
        let (id, region) = self.regions.at((remote.rkey >> 8).checked_sub(1)?)?;
        let offset = usize::try_from(remote.address.checked_sub(region.address)?).ok()?;
        let fits = inside(offset, len, region.len);
        let allowed = pair.rights.allow(wanted) && region.rights.allow(wanted);
        let allowed = allowed && region.rkey == remote.rkey && region.domain == pair.domain;
        (fits && allowed).then_some((id, offset))
    }

    /// Returns the memory of `region`, if it is still registered and allows `access`.
    pub(super) fn local(&self, region: RegionId, access: Access) -> Option<&Bytes> {
        Some(&self.regions.get(region).filter(|region| region.rights.access.allows(access))?.memory)
    }

    /// Returns the part of a region that a work request names by address and `lkey`. A wrong key,
    /// or bytes outside the region or in another domain than the queue pair's, name no existing
    /// region: a device notices when it executes the work.
    pub(crate) fn named(&self, domain: Option<DomainId>, address: u64, len: u32, lkey: u32) -> Part {
        let len = len as usize;
        let found = || {
            let (id, region) = self.regions.at((lkey >> 8).checked_sub(1)?)?;
            let offset = usize::try_from(address.checked_sub(region.address)?).ok()?;
            let valid = region.rkey == lkey && Some(region.domain) == domain;
            (valid && inside(offset, len, region.len)).then_some((id, offset))
        };
        let (region, offset) = found().unwrap_or((RegionId::NONE, 0));
        Part { region, offset, len }
    }
}

/// Copies `len` bytes from one region of this process to another.
pub(super) fn copy(
    (from, from_offset): (&Bytes, usize),
    (to, to_offset): (&Bytes, usize),
    len: usize,
) -> Result<(), Unreachable> {
    if !inside(from_offset, len, from.len()) {
        return Err(Unreachable::Source);
    }
    let (Bytes::Own(from), Bytes::Own(to)) = (from, to) else { return Err(Unreachable::Target) };
    let copied = from.shared().copy_to(from_offset, to.shared(), to_offset, len);
    if copied { Ok(()) } else { Err(Unreachable::Target) }
}
