//! How many work requests certainly find room in a queue of a queue pair.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The free places of a queue, as far as the program knows of them. A completion that it takes
/// gives one back.
///
/// The fabric may count the places meanwhile, with or without that one. So each count has a number,
/// and a place is given back only to the count that was there before the completion was taken.
#[derive(Debug, Default)]
pub(crate) struct Room(AtomicU64);

/// The places that are free, which are fewer than none if the fabric took more than were known to
/// be free, and the number of the count.
#[derive(Clone, Copy)]
struct Count {
    free: i32,
    number: u32,
}

impl Count {
    const fn of(word: u64) -> Self {
        Self { free: (word as u32).cast_signed(), number: (word >> 32) as u32 }
    }

    const fn word(self) -> u64 {
        (self.number as u64) << 32 | self.free.cast_unsigned() as u64
    }
}

impl Room {
    /// Takes so many places. Returns false, and takes none, if not as many are known to be free.
    pub(crate) fn reserve(&self, places: usize) -> bool {
        let Ok(places) = i32::try_from(places) else { return false };
        // Acquire: the page of the completions that gave these places back is written.
        let reserved = self.0.fetch_update(Acquire, Relaxed, |word| {
            let count = Count::of(word);
            (count.free >= places).then(|| Count { free: count.free - places, ..count }.word())
        });
        reserved.is_ok()
    }

    /// The number of the present count, for [`Room::give_back`].
    pub(crate) fn number(&self) -> u32 {
        Count::of(self.0.load(Relaxed)).number
    }

    /// Gives a place back, unless the places were counted anew since `number`.
    pub(crate) fn give_back(&self, number: u32) {
        let _unless = self.0.fetch_update(Release, Relaxed, |word| {
            let count = Count::of(word);
            let free = count.free.saturating_add(1);
            (count.number == number).then_some(Count { free, ..count }.word())
        });
    }

    /// Starts a new count with so many free places.
    pub(crate) fn count_anew(&self, free: u32) {
        let free = i32::try_from(free).unwrap_or(i32::MAX);
        let anew = |word| Some(Count { free, number: Count::of(word).number.wrapping_add(1) }.word());
        let _always = self.0.fetch_update(Relaxed, Relaxed, anew);
    }

    /// Takes places that were not known to be free.
    pub(crate) fn owe(&self, places: u32) {
        let places = i32::try_from(places).unwrap_or(i32::MAX);
        let _always = self.0.fetch_update(Relaxed, Relaxed, |word| {
            let count = Count::of(word);
            Some(Count { free: count.free.saturating_sub(places), ..count }.word())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back_to_their_count() {
        let room = Room::default();
        assert!(room.reserve(0) && !room.reserve(1));
        room.count_anew(3);
        assert!(!room.reserve(4) && room.reserve(2) && room.reserve(1) && !room.reserve(1));
        let number = room.number();
        room.give_back(number);
        assert!(room.reserve(1) && !room.reserve(1));
        // The fabric counts while a completion is being taken: it may have counted that place.
        room.count_anew(1);
        room.give_back(number);
        assert!(!room.reserve(2) && room.reserve(1));
    }

    /// The fabric has places that are free there, and whose completions the program has not taken.
    #[test]
    fn places_that_were_not_known_are_owed() {
        let room = Room::default();
        room.count_anew(2);
        assert!(room.reserve(2));
        room.owe(2);
        for _ in 0..2 {
            room.give_back(room.number());
            assert!(!room.reserve(1));
        }
        room.give_back(room.number());
        assert!(room.reserve(1) && !room.reserve(1));
        room.owe(u32::MAX);
        room.owe(u32::MAX);
        room.give_back(room.number());
        assert!(!room.reserve(1));
        room.count_anew(u32::MAX);
        room.give_back(room.number());
        assert!(room.reserve(i32::MAX as usize));
    }
}
