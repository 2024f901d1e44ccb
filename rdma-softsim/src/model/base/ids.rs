//! Ids of objects, by kind.

use core::cmp::Ordering;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

/// The kinds of objects. They have no values.
pub(crate) mod kind {
    pub(crate) enum Host {}
    pub(crate) enum Context {}
    pub(crate) enum Channel {}
    pub(crate) enum Identifier {}
    pub(crate) enum Domain {}
    pub(crate) enum Region {}
    pub(crate) enum Queue {}
    pub(crate) enum Shared {}
    pub(crate) enum Pair {}
}

pub(crate) type HostId = Id<kind::Host>;
pub(crate) type ContextId = Id<kind::Context>;
pub(crate) type ChannelId = Id<kind::Channel>;
pub(crate) type IdentifierId = Id<kind::Identifier>;
pub(crate) type DomainId = Id<kind::Domain>;
pub(crate) type RegionId = Id<kind::Region>;
pub(crate) type QueueId = Id<kind::Queue>;
pub(crate) type SharedId = Id<kind::Shared>;
pub(crate) type PairId = Id<kind::Pair>;

/// Identifies an object in an [`Arena`](super::arena::Arena). Once the object is gone, the id is
/// invalid for ever.
pub(crate) struct Id<K> {
    pub(super) index: u32,
    pub(super) generation: u32,
    of: PhantomData<fn() -> K>,
}

impl<K> Id<K> {
    /// An id that is never valid.
    pub(crate) const NONE: Self = Self::new(u32::MAX, u32::MAX);
    /// The lowest id, for ranges; [`Id::NONE`] is the highest.
    pub(in crate::model) const FIRST: Self = Self::new(0, 0);

    pub(super) const fn new(index: u32, generation: u32) -> Self {
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

// Not derived: a derive would ask the kinds for these traits too, and they have none.
impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Id<K> {}

impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        (self.index, self.generation) == (other.index, other.generation)
    }
}

impl<K> Eq for Id<K> {}

impl<K> Hash for Id<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.index, self.generation).hash(state);
    }
}

/// By place.
impl<K> Ord for Id<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.index, self.generation).cmp(&(other.index, other.generation))
    }
}

impl<K> PartialOrd for Id<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}
