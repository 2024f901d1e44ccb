//! Compares shared memory with a vector of bytes.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use proptest::prelude::*;
use rdma_memory::SharedMemory;

/// Longer than every step of a copy, with a remainder of each.
const LEN: usize = 95;

/// A byte touched by mistake shows.
fn filled(filler: u8) -> Vec<AtomicU8> {
    (0..LEN).map(|_| AtomicU8::new(filler)).collect()
}

fn values(bytes: &[AtomicU8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte.load(Relaxed)).collect()
}

/// Every offset and length, at every alignment.
#[test]
fn every_place_reads_and_writes_what_a_vector_does() {
    let data: Vec<u8> = (1..=LEN as u8).collect();
    // Miri is a thousand times as slow.
    let step = |here: usize, long: usize| if cfg!(miri) { long } else { here };
    for skip in (0..8).step_by(step(1, 3)) {
        for len in (0..=LEN - skip).step_by(step(5, 31)) {
            for offset in (0..=len + 1).step_by(step(3, 13)) {
                for count in (0..=len + 2).step_by(step(1, 7)) {
                    let Some(from) = data.get(..count) else { continue };
                    let backing = filled(0xee);
                    let memory = SharedMemory::new(&backing[skip..skip + len]);
                    assert_eq!((memory.len(), memory.is_empty()), (len, len == 0));
                    let mut model = vec![0xee; LEN];
                    let inside = offset + count <= len;
                    if inside {
                        model[skip + offset..skip + offset + count].copy_from_slice(from);
                    }
                    let place = format!("{count} bytes at {offset} of {skip} + {len}");
                    assert_eq!(memory.write(offset, from), inside, "{place}");
                    assert_eq!(values(&backing), model, "{place}");

                    let mut into = vec![0xdd; count];
                    assert_eq!(memory.read(offset, &mut into), inside);
                    let expected = if inside { from } else { &vec![0xdd; count] };
                    assert_eq!(into, expected, "{place}");

                    let other = filled(0xaa);
                    assert_eq!(
                        memory.copy_to(offset, SharedMemory::new(&other[3..]), 2, count),
                        inside && count <= LEN - 5
                    );
                    let mut model = vec![0xaa; LEN];
                    if inside && count <= LEN - 5 {
                        model[5..5 + count].copy_from_slice(from);
                    }
                    assert_eq!(values(&other), model, "{place}");
                }
            }
        }
    }
}

#[test]
fn sums_that_wrap_are_outside() {
    let backing = filled(0);
    let memory = SharedMemory::new(&backing[..48]);
    assert!(memory.read(48, &mut []), "nothing, at the end");
    assert!(!memory.read(49, &mut []), "nothing, behind the end");
    assert!(!memory.read(usize::MAX, &mut [0]));
    assert!(!memory.write(usize::MAX, &[0]));
    assert!(!memory.copy_to(usize::MAX, memory, 0, 1) && !memory.copy_to(0, memory, 1, usize::MAX));
}

proptest! {
    #[test]
    fn overlapping_writes_leave_what_a_vector_holds(
        len in 0..=LEN,
        writes in prop::collection::vec((0..LEN, prop::collection::vec(any::<u8>(), 0..20)), 0..40),
    ) {
        let backing = filled(0);
        let memory = SharedMemory::new(&backing[..len]);
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

#[test]
fn pieces_fill_a_part_and_nothing_behind_it() {
    for len in 0..=40 {
        let backing = filled(0);
        let whole = SharedMemory::new(&backing[..LEN]);
        let mut part = whole.slice(3, len).expect("inside");
        let pieces = [&[1; 7][..], &[], &[2; 1], &[3; 19], &[4; 9]];
        let put: Vec<usize> = pieces.iter().map(|piece| part.put(piece)).collect();
        let all = pieces.concat();
        let mut model = vec![0; LEN];
        model[3..3 + len.min(36)].copy_from_slice(&all[..len.min(36)]);
        assert_eq!(values(&backing)[..LEN], model, "{len}");
        assert_eq!((put.iter().sum::<usize>(), part.len()), (len.min(36), len.saturating_sub(36)), "{put:?}");
    }
    let backing = filled(0);
    let memory = SharedMemory::new(&backing[..16]);
    assert!(memory.slice(16, 0).is_some() && memory.slice(17, 0).is_none());
    assert!(memory.slice(15, 2).is_none() && memory.slice(usize::MAX, 2).is_none());
}

#[test]
fn neighbours_belong_to_others() {
    let backing = filled(0);
    std::thread::scope(|scope| {
        for part in 0..4 {
            let memory = SharedMemory::new(&backing);
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

#[cfg(feature = "alloc")]
mod zeroed {
    use rdma_memory::{CallerMemory, Zeroed};

    #[test]
    fn it_is_as_long_as_asked_for_and_zero() {
        for len in [1, 63, 64, 65, 4097] {
            let memory = Zeroed::new(len).expect("memory");
            let mut bytes = vec![1; len];
            assert!(memory.shared().len() == len && memory.shared().read(0, &mut bytes));
            assert!(bytes.iter().all(|byte| *byte == 0));
            assert!(memory.shared().write(len - 1, &[7]) && !memory.shared().write(len, &[7]));
        }
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        assert!([0, usize::MAX, isize::MAX as usize].into_iter().all(|len| Zeroed::new(len).is_none()));
    }
}
