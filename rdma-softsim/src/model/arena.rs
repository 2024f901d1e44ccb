//! Objects under ids that are never reused.

use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

/// Identifies an object in an [`Arena`]. Once the object is gone, the id is invalid for ever.
pub(crate) struct Id<T> {
    index: u32,
    generation: u32,
    of: PhantomData<fn() -> T>,
}

impl<T> Id<T> {
    /// An id that is never valid.
    pub(crate) const NONE: Self = Self::new(u32::MAX, u32::MAX);

    const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation, of: PhantomData }
    }

    /// The place in the arena, which later objects may take.
    pub(crate) const fn index(self) -> u32 {
        self.index
    }

    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

impl<T> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Id<T> {}

impl<T> PartialEq for Id<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.index, self.generation) == (other.index, other.generation)
    }
}

impl<T> Eq for Id<T> {}

impl<T> Hash for Id<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.index, self.generation).hash(state);
    }
}

impl<T> fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Objects of one kind. Iteration is by place, so it is the same in every run.
pub(crate) struct Arena<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Arena<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Inserts `value`. Places beyond `u32` do not occur: the limits of devices are far below.
    pub(crate) fn insert(&mut self, value: T) -> Id<T> {
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slots.get_mut(index as usize)
        {
            slot.value = Some(value);
            return Id::new(index, slot.generation);
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Id::new(index, 0)
    }

    pub(crate) fn get(&self, id: Id<T>) -> Option<&T> {
        self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: Id<T>) -> Option<&mut T> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, id: Id<T>) -> Option<T> {
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.index);
        Some(value)
    }

    pub(crate) fn at(&self, index: u32) -> Option<(Id<T>, &T)> {
        let slot = self.slots.get(index as usize)?;
        Some((Id::new(index, slot.generation), slot.value.as_ref()?))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        self.slots
            .iter()
            .zip(0..)
            .filter_map(|(slot, index)| Some((Id::new(index, slot.generation), slot.value.as_ref()?)))
    }

    pub(crate) const fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the ids of all objects that satisfy `wanted`, for loops that change the arena.
    pub(crate) fn select(&self, wanted: impl Fn(&T) -> bool) -> Vec<Id<T>> {
        self.iter().filter(|(_, value)| wanted(value)).map(|(id, _)| id).collect()
    }
}
