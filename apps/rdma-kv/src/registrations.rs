use std::collections::BTreeMap;
use std::ops::Range;

use crate::memory::Memory;

/// Registered buffers, found by address: an arena is registered once for all of its parts.
#[derive(Debug)]
pub struct Registrations<B> {
    /// By the address of the first byte; none overlaps another.
    arenas: BTreeMap<usize, Arena<B>>,
}

#[derive(Debug)]
struct Arena<B> {
    len: usize,
    buffer: B,
}

impl<B> Default for Registrations<B> {
    fn default() -> Self {
        Self { arenas: BTreeMap::new() }
    }
}

impl<B> Registrations<B> {
    /// Adds `buffer`, which [`Client::register`](crate::Client::register) created from `memory`.
    ///
    /// # Errors
    /// Returns `buffer` if some of the memory is registered here already.
    pub fn add(&mut self, memory: &Memory, buffer: B) -> Result<(), B> {
        let (address, len) = (memory.address(), memory.len());
        let before = self.arenas.range(..address.saturating_add(len.max(1))).next_back();
        if before.is_some_and(|(start, arena)| start + arena.len > address || *start == address) {
            return Err(buffer);
        }
        self.arenas.insert(address, Arena { len, buffer });
        Ok(())
    }

    /// Returns the buffer that contains all `len` bytes at `address`, and their range in it.
    pub fn find(&mut self, address: usize, len: usize) -> Option<(&mut B, Range<usize>)> {
        let (start, arena) = self.arenas.range_mut(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(len).filter(|end| *end <= arena.len)?;
        Some((&mut arena.buffer, offset..end))
    }

    /// Removes the buffer whose memory begins at `address`.
    pub fn remove(&mut self, address: usize) -> Option<B> {
        Some(self.arenas.remove(&address)?.buffer)
    }

    /// Returns all buffers.
    pub fn buffers(&self) -> impl Iterator<Item = &B> {
        self.arenas.values().map(|arena| &arena.buffer)
    }

    /// Returns how many buffers there are.
    pub fn len(&self) -> usize {
        self.arenas.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.arenas.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_an_arena_are_found_by_their_address() {
        let (one, two) = (Memory::from(vec![0; 100]), Memory::from(vec![0; 50]));
        let mut registrations = Registrations::default();
        assert_eq!(registrations.find(one.address(), 1), None);
        registrations.add(&one, 1).expect("is new");
        registrations.add(&two, 2).expect("is new");
        assert_eq!(registrations.add(&one, 3), Err(3), "is there already");
        for (memory, mut number) in [(&one, 1), (&two, 2)] {
            let (address, len) = (memory.address(), memory.len());
            assert_eq!(registrations.find(address, len), Some((&mut number, 0..len)));
            assert_eq!(registrations.find(address + 7, 3), Some((&mut number, 7..10)));
            assert_eq!(registrations.find(address + len, 0), Some((&mut number, len..len)));
            assert_eq!(registrations.find(address + 1, len), None, "one byte too many");
            assert_eq!(registrations.find(address, usize::MAX), None);
        }
        assert_eq!((registrations.remove(one.address()), registrations.len()), (Some(1), 1));
        assert_eq!(registrations.find(one.address(), 1), None);
        assert!(registrations.remove(two.address()) == Some(2) && registrations.is_empty());
    }

    #[test]
    #[expect(unsafe_code, reason = "parts of one allocation are memory of their own")]
    fn what_overlaps_is_refused() {
        let mut bytes = vec![0_u8; 100];
        let base = bytes.as_mut_ptr();
        // SAFETY: `bytes` outlives these and is not accessed otherwise meanwhile, and every part is
        // inside.
        let part =
            |range: Range<usize>| unsafe { Memory::from_raw_parts(base.add(range.start), range.len(), ()) };
        let mut registrations = Registrations::default();
        registrations.add(&part(20..40), 1).expect("is new");
        registrations.add(&part(40..60), 2).expect("is beside it");
        registrations.add(&part(10..20), 3).expect("is beside it");
        for overlap in [0..11, 10..20, 15..18, 19..21, 39..40, 59..80, 0..100] {
            assert_eq!(registrations.add(&part(overlap.clone()), 9), Err(9), "{overlap:?}");
        }
        let address = base.addr() + 38;
        assert_eq!(registrations.find(address, 4), None, "it lies in two");
        assert_eq!(registrations.find(address, 2), Some((&mut 1, 18..20)));
    }
}
