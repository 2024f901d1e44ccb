//! Shared memory against a vector of bytes.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

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

/// Bytes that lie before and behind words.
#[repr(C)]
struct Laid<const WORDS: usize> {
    before: [AtomicU8; 8],
    words: [AtomicU64; WORDS],
    behind: [AtomicU8; 8],
}

impl<const WORDS: usize> Laid<WORDS> {
    fn new() -> Self {
        let byte = [0xee; 8];
        let [before, behind] = [byte.map(AtomicU8::new), byte.map(AtomicU8::new)];
        Self { before, words: [const { AtomicU64::new(u64::from_ne_bytes([0xee; 8])) }; WORDS], behind }
    }

    /// Every offset and every length of the memory that has `first` bytes before the words and `last` behind.
    fn agrees_with_a_vector(first: usize, last: usize) {
        let len = first + 8 * WORDS + last;
        let data: Vec<u8> = (1..=len as u8 + 1).collect();
        let step = if cfg!(miri) { 3 } else { 1 };
        for offset in (0..=len + 1).step_by(step) {
            for count in (0..=len + 1).step_by(step) {
                let laid = Self::new();
                let (before, behind) = (&laid.before[8 - first..], &laid.behind[..last]);
                let memory = SharedMemory::with_edges(before, &laid.words, behind).expect("contiguous");
                assert_eq!((memory.len(), memory.is_empty()), (len, len == 0));
                let place = format!("{count} bytes at {offset} of {first} + 8 * {WORDS} + {last}");
                let mut model = vec![0xee; len];
                let inside = offset + count <= len;
                if inside {
                    model[offset..offset + count].copy_from_slice(&data[..count]);
                }
                assert_eq!(memory.write(offset, &data[..count]), inside, "{place}");
                let mut whole = vec![0; len];
                assert!(memory.read(0, &mut whole) && whole == model, "{place}");
                let beside = laid.before[..8 - first].iter().chain(&laid.behind[last..]);
                assert!(beside.map(|byte| byte.load(Relaxed)).all(|byte| byte == 0xee), "{place}");
                let mut into = vec![0xdd; count];
                assert_eq!(memory.read(offset, &mut into), inside, "{place}");
                assert!(if inside { into == data[..count] } else { into == vec![0xdd; count] }, "{place}");
            }
        }
    }
}

#[test]
fn bytes_beside_the_words_are_read_and_written_too() {
    Laid::<2>::agrees_with_a_vector(0, 3);
    Laid::<2>::agrees_with_a_vector(5, 0);
    Laid::<9>::agrees_with_a_vector(7, 1);
    Laid::<0>::agrees_with_a_vector(3, 4);
    Laid::<0>::agrees_with_a_vector(0, 5);
    Laid::<0>::agrees_with_a_vector(0, 0);
    Laid::<1>::agrees_with_a_vector(1, 1);
}

/// A device is told one address and one length, so the parts must be contiguous.
#[test]
fn parts_that_are_not_contiguous_are_no_memory() {
    let laid = Laid::<2>::new();
    let Laid { before, words, behind } = &laid;
    assert!(SharedMemory::with_edges(&before[..7], words, &[]).is_none());
    assert!(SharedMemory::with_edges(&[], &words[..1], behind).is_none());
    assert!(SharedMemory::with_edges(before, &[], behind).is_none());
    assert!(SharedMemory::with_edges(behind, words, before).is_none());
    let address = |memory: Option<SharedMemory<'_>>| memory.expect("contiguous").address();
    assert_eq!(address(SharedMemory::with_edges(&before[3..], words, behind)), before[3..].as_ptr().addr());
    assert_eq!(address(SharedMemory::with_edges(&[], words, behind)), words.as_ptr().addr());
    assert_eq!(address(SharedMemory::with_edges(&[], &[], behind)), behind.as_ptr().addr());
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
