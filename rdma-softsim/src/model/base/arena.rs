//! Objects under ids that are never reused, and which of them are on a host.
//!
//! No call may take longer because of what others have: every call holds the fabric's lock. So a
//! call finds what it needs by id or by an index, and never looks at all objects of a kind. Tests
//! count how many objects a call looks at ([`visits`]).

use core::marker::PhantomData;
use std::collections::BTreeSet;

use super::ids::{HostId, Id};
use crate::error::Error;

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Objects of one kind.
pub(crate) struct Arena<K, T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    of: PhantomData<fn() -> K>,
}

impl<K, T> Arena<K, T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), of: PhantomData }
    }

    /// Inserts `value`. Places beyond `u32` do not occur: the limits of devices are far below.
    pub(crate) fn insert(&mut self, value: T) -> Id<K> {
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slots.get_mut(index as usize)
        {
            slot.value = Some(value);
            // Its generation has grown since, so that ids of the former object stay invalid.
            return Id::new(index, slot.generation);
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Id::new(index, 0)
    }

    pub(crate) fn get(&self, id: Id<K>) -> Option<&T> {
        visit();
        self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: Id<K>) -> Option<&mut T> {
        visit();
        self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, id: Id<K>) -> Option<T> {
        visit();
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        let value = slot.value.take()?;
        // Wraps: an old id names another object only after 2³² of them in its place.
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.index);
        Some(value)
    }

    /// Returns the object at this place. `None` if the place is free.
    pub(crate) fn at(&self, index: u32) -> Option<(Id<K>, &T)> {
        visit();
        let slot = self.slots.get(index as usize)?;
        Some((Id::new(index, slot.generation), slot.value.as_ref()?))
    }

    /// Returns how many places there are, free ones as well.
    pub(crate) const fn places(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Returns all objects, by place. Only for simulations, which are small.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<K>, &T)> {
        (0..self.places()).filter_map(|place| self.at(place))
    }

    pub(crate) const fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// An object that is on a host.
pub(crate) trait OnHost {
    /// What an error calls it.
    const NAME: &'static str;

    fn host(&self) -> HostId;
}

/// Objects of one kind, and an index of those on each host.
pub(crate) struct Objects<K, T> {
    all: Arena<K, T>,
    /// The objects of each host, by place: an order that is the same in every run.
    on: Vec<BTreeSet<Id<K>>>,
}

impl<K, T: OnHost> Objects<K, T> {
    pub(crate) const fn new() -> Self {
        Self { all: Arena::new(), on: Vec::new() }
    }

    pub(crate) fn insert(&mut self, value: T) -> Id<K> {
        let host = value.host();
        let id = self.all.insert(value);
        self.enter(id, host);
        id
    }

    pub(crate) fn get(&self, id: Id<K>) -> Option<&T> {
        self.all.get(id)
    }

    pub(crate) fn get_mut(&mut self, id: Id<K>) -> Option<&mut T> {
        self.all.get_mut(id)
    }

    /// Returns an object, or the error that it is gone.
    pub(crate) fn find(&self, id: Id<K>) -> Result<&T, Error> {
        self.get(id).ok_or(Error::Gone(T::NAME))
    }

    pub(crate) fn find_mut(&mut self, id: Id<K>) -> Result<&mut T, Error> {
        self.get_mut(id).ok_or(Error::Gone(T::NAME))
    }

    pub(crate) fn remove(&mut self, id: Id<K>) -> Option<T> {
        let value = self.all.remove(id)?;
        self.leave(id, value.host());
        Some(value)
    }

    pub(crate) fn at(&self, index: u32) -> Option<(Id<K>, &T)> {
        self.all.at(index)
    }

    pub(crate) const fn places(&self) -> u32 {
        self.all.places()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<K>, &T)> {
        self.all.iter()
    }

    pub(crate) const fn len(&self) -> usize {
        self.all.len()
    }

    /// Changes an object so that it is possibly on another host.
    pub(crate) fn relocate(&mut self, id: Id<K>, change: impl FnOnce(&mut T)) {
        let Some(value) = self.all.get_mut(id) else { return };
        let before = value.host();
        change(value);
        let after = value.host();
        if before != after {
            self.leave(id, before);
            self.enter(id, after);
        }
    }

    /// Returns the ids of the objects on a host, for loops that change them.
    pub(crate) fn on(&self, host: HostId) -> Vec<Id<K>> {
        self.on.get(host.index() as usize).into_iter().flatten().inspect(|_| visit()).copied().collect()
    }

    /// Returns how many objects are on a host.
    pub(crate) fn count_on(&self, host: HostId) -> usize {
        self.on.get(host.index() as usize).map_or(0, BTreeSet::len)
    }

    fn enter(&mut self, id: Id<K>, host: HostId) {
        let place = host.index() as usize;
        if self.on.len() <= place {
            self.on.resize_with(place + 1, BTreeSet::new);
        }
        if let Some(on) = self.on.get_mut(place) {
            on.insert(id);
        }
    }

    fn leave(&mut self, id: Id<K>, host: HostId) {
        if let Some(on) = self.on.get_mut(host.index() as usize) {
            on.remove(&id);
        }
    }
}

#[cfg(test)]
thread_local! {
    static VISITS: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
}

/// Counts, in tests, that a call looks at an object or at an entry of a list.
pub(in crate::model) fn visit() {
    #[cfg(test)]
    VISITS.set(VISITS.get() + 1);
}

/// Returns how many objects and entries `act` looks at.
#[cfg(test)]
pub(in crate::model) fn visits<T>(act: impl FnOnce() -> T) -> (u64, T) {
    let before = VISITS.get();
    let result = act();
    (VISITS.get() - before, result)
}
