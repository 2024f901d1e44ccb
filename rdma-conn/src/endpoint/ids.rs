//! Names of connections, and what is kept by them.

use slotmap::{Key, KeyData, SecondaryMap};

slotmap::new_key_type! {
    /// The place of a connection among those of its endpoint.
    pub(super) struct MemberKey;
}

/// Names a connection of an endpoint. The id of one that is gone names no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(super) MemberKey);

impl ConnectionId {
    /// Returns the id as a number, never 0, for where only a number has room: an interface of C, a log.
    #[inline]
    pub fn as_u64(self) -> u64 {
        self.0.data().as_ffi()
    }

    /// Returns the id with this number; `None` if no id has it.
    #[inline]
    pub fn from_u64(number: u64) -> Option<Self> {
        let id = Self(KeyData::from_ffi(number).into());
        // Some bits mean nothing to a key: a number with others was never an id.
        (id.as_u64() == number).then_some(id)
    }
}

/// What a program keeps for each connection of one endpoint: found without hashing.
#[derive(Clone, Debug)]
pub struct ConnectionMap<T>(SecondaryMap<MemberKey, T>);

impl<T> ConnectionMap<T> {
    /// Returns an empty map.
    pub fn new() -> Self {
        Self(SecondaryMap::new())
    }

    /// Keeps `value` for a connection; what was kept for it before.
    pub fn insert(&mut self, id: ConnectionId, value: T) -> Option<T> {
        self.0.insert(id.0, value)
    }

    /// Returns what is kept for a connection.
    #[inline]
    pub fn get(&self, id: ConnectionId) -> Option<&T> {
        self.0.get(id.0)
    }

    /// Returns what is kept for a connection.
    #[inline]
    pub fn get_mut(&mut self, id: ConnectionId) -> Option<&mut T> {
        self.0.get_mut(id.0)
    }

    /// Keeps nothing more for a connection; what was kept.
    pub fn remove(&mut self, id: ConnectionId) -> Option<T> {
        self.0.remove(id.0)
    }

    /// Returns for how many connections something is kept.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all that is kept.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    /// Returns all that is kept.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }
}

impl<T> Default for ConnectionMap<T> {
    fn default() -> Self {
        Self::new()
    }
}
