use slotmap::{Key, KeyData, SecondaryMap};

slotmap::new_key_type! {
    pub(super) struct MemberKey;
}

/// Identifies a connection of an endpoint. An id is never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(super) MemberKey);

impl ConnectionId {
    /// Returns the id as a number, never 0, for C interfaces and logs.
    #[inline]
    pub fn as_u64(self) -> u64 {
        self.0.data().as_ffi()
    }

    /// Returns the id with this number, or `None` if no id has it.
    #[inline]
    pub fn from_u64(number: u64) -> Option<Self> {
        // A key ignores this bit, which all have. A number without it was never an id.
        (number & 1 << 32 != 0).then(|| Self(KeyData::from_ffi(number).into()))
    }
}

/// A program's data per connection of one endpoint. Lookups do not hash.
#[derive(Clone, Debug)]
pub struct ConnectionMap<T>(SecondaryMap<MemberKey, T>);

impl<T> ConnectionMap<T> {
    /// Returns an empty map.
    pub fn new() -> Self {
        Self(SecondaryMap::new())
    }

    /// Stores `value` for a connection. Returns the previous value.
    pub fn insert(&mut self, id: ConnectionId, value: T) -> Option<T> {
        self.0.insert(id.0, value)
    }

    /// Returns the value of a connection.
    #[inline]
    pub fn get(&self, id: ConnectionId) -> Option<&T> {
        self.0.get(id.0)
    }

    /// Returns the value of a connection.
    #[inline]
    pub fn get_mut(&mut self, id: ConnectionId) -> Option<&mut T> {
        self.0.get_mut(id.0)
    }

    /// Removes the value of a connection, and returns it.
    pub fn remove(&mut self, id: ConnectionId) -> Option<T> {
        self.0.remove(id.0)
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all values.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.values()
    }

    /// Returns all values.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }
}

impl<T> Default for ConnectionMap<T> {
    fn default() -> Self {
        Self::new()
    }
}
