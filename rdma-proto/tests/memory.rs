//! Shared memory against a vector of bytes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use rdma_proto::memory::SharedMemory;

/// More than are copied together, with words left over.
const WORDS: usize = 11;

/// Words whose bytes are `filler`, so that a byte touched by mistake shows.
fn words(filler: u8) -> Vec<AtomicU64> {
    (0..WORDS).map(|_| AtomicU64::new(u64::from_ne_bytes([filler; 8]))).collect()
}

fn bytes(words: &[AtomicU64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect()
}

/// Every offset and every length of a small memory, of every length that its words can hold.
#[test]
fn every_place_reads_and_writes_what_a_vector_does() {
    let data: Vec<u8> = (1..=8 * WORDS as u8).collect();
    // Miri is a thousand times as slow.
    for len in (0..=8 * WORDS).step_by(if cfg!(miri) { 17 } else { 1 }) {
        for offset in (0..=len + 1).step_by(if cfg!(miri) { 13 } else { 1 }) {
            for count in (0..=len + 2).step_by(if cfg!(miri) { 3 } else { 1 }) {
                let Some(from) = data.get(..count) else { continue };
                let backing = words(0xee);
                let memory = SharedMemory::new(&backing, len);
                let mut model = vec![0xee; 8 * WORDS];
                let inside = offset + count <= len;
                if inside {
                    model[offset..offset + count].copy_from_slice(from);
                }
                assert_eq!(memory.write(offset, from), inside, "{count} bytes at {offset} of {len}");
                assert_eq!(bytes(&backing), model, "{count} bytes at {offset} of {len}");

                let mut into = vec![0xdd; count];
                assert_eq!(memory.read(offset, &mut into), inside);
                let expected = if inside { from } else { &vec![0xdd; count] };
                assert_eq!(into, expected, "{count} bytes at {offset} of {len}");
            }
        }
    }
}

#[test]
fn it_is_never_longer_than_its_words() {
    let backing = words(0);
    for (asked, len) in [(0, 0), (87, 87), (88, 88), (89, 88), (usize::MAX, 88)] {
        let memory = SharedMemory::new(&backing, asked);
        assert_eq!((memory.len(), memory.is_empty()), (len, len == 0));
    }
}

#[test]
fn sums_that_wrap_are_outside() {
    let backing = words(0);
    let memory = SharedMemory::new(&backing, 48);
    assert!(memory.read(48, &mut []), "nothing, at the end");
    assert!(!memory.read(49, &mut []), "nothing, behind the end");
    assert!(!memory.read(usize::MAX, &mut [0]));
    assert!(!memory.write(usize::MAX, &[0]));
}

proptest! {
    /// A long run of writes leaves what a vector would hold, whatever they overlap.
    #[test]
    fn overlapping_writes_leave_what_a_vector_holds(
        len in 0..=8 * WORDS,
        writes in prop::collection::vec((0..8 * WORDS, prop::collection::vec(any::<u8>(), 0..20)), 0..40),
    ) {
        let backing = words(0);
        let memory = SharedMemory::new(&backing, len);
        let mut model = vec![0; len];
        for (offset, data) in writes {
            let fits = model.get_mut(offset..offset + data.len()).map(|place| place.copy_from_slice(&data));
            prop_assert_eq!(memory.write(offset, &data), fits.is_some());
            let mut whole = vec![0; len];
            prop_assert!(memory.read(0, &mut whole));
            prop_assert_eq!(&whole, &model);
        }
    }
}

/// Two threads that write neighbouring bytes of one word never undo each other.
#[test]
fn neighbours_in_a_word_belong_to_others() {
    let backing = words(0);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let memory = SharedMemory::new(&backing, 48);
            scope.spawn(move || {
                let place = 6 + 3 * part;
                for round in 0..if cfg!(miri) { 20 } else { 2000_u32 } {
                    let written = [round as u8, (round >> 8) as u8, part as u8];
                    let mut seen = [0; 3];
                    assert!(memory.write(place, &written) && memory.read(place, &mut seen));
                    assert_eq!(seen, written);
                }
            });
        }
    });
}
