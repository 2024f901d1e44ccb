use rdma_kv::{Buffer, Error, Memory, Registrations};

use crate::world::{WINDOW, bytes_of, over_rdma, over_tcp, pattern, store, there_and_back};

/// A value crosses every kind of cut, and lands but for two windows of each slice.
#[test]
fn values_lie_across_cuts() {
    let most = 40 * WINDOW;
    for slice in [most + 100, 16 * WINDOW, 8 * WINDOW + 1, 5 * WINDOW - 3, WINDOW, 1000] {
        let mut client = over_rdma(store);
        let before = client.stream().registered_bytes();
        let memory = Memory::from(vec![0; most + 100]).in_slices(slice);
        let mut buffer = client.register(memory.clone()).expect("registered");
        assert_eq!(client.stream().registered_bytes() - before, most + 100, "every byte once");
        for (seed, len) in [0, 1, WINDOW, slice.min(most), 8 * WINDOW + 1, most].into_iter().enumerate() {
            let counts = there_and_back(&mut client, &mut buffer, len, seed);
            assert_eq!(counts.bytes_lent, len as u64, "a SET is lent, slice by slice");
            assert_eq!(counts.bytes_landed + counts.bytes_copied, len as u64);
            let touched = (50 + len).div_ceil(slice);
            let least = len.saturating_sub(2 * WINDOW * touched) as u64;
            assert!(counts.bytes_landed >= least, "{len} bytes in slices of {slice}: {counts:?}");
        }
        let outside = client.get_into(b"key", &mut buffer, 101..most + 101).expect_err("outside");
        assert!(matches!(outside, Error::Outside { .. }), "{outside}");
        drop(buffer);
        assert_eq!(memory.try_into_vec().expect("nothing uses it").len(), most + 100);
    }
}

#[test]
fn an_arena_in_slices_is_one_buffer() {
    let mut client = over_rdma(store);
    let memory = Memory::from(pattern(300, 1)).in_slices(64);
    let mut arenas = Registrations::default();
    arenas.add(&memory, client.register(memory.clone()).expect("registered")).expect("is new");
    let (buffer, range) = arenas.find(memory.address() + 60, 100).expect("it is inside");
    assert_eq!(range, 60..160);
    client.set_from(b"key", buffer, range).expect("set");
    let (buffer, range) = arenas.find(memory.address() + 190, 110).expect("it is inside");
    assert_eq!(client.get_into(b"key", buffer, range).expect("got"), Some(100));
    assert!(bytes_of(buffer, 190..290) == pattern(300, 1)[60..160]);
}

#[test]
fn slices_are_in_use_together() {
    let client = over_rdma(store);
    let mut buffer = client.register(Memory::from(vec![0; 10]).in_slices(4)).expect("registered");
    assert!(buffer.write(3, b"four") && !buffer.write(7, b"four"), "bytes 7 to 11 of 10");
    let other = buffer.clone();
    assert!(!buffer.write(0, b"a"), "there is another handle");
    assert_eq!(bytes_of(&other, 2..8), *b"\0four\0");
    assert!(!other.read(usize::MAX, &mut [0; 2]) && !other.read(9, &mut [0; 2]), "outside");
}

#[test]
fn over_tcp_cuts_have_no_effect() {
    let mut client = over_tcp(store);
    let mut buffer = client.register(Memory::from(pattern(100, 2)).in_slices(7)).expect("memory");
    client.set_from(b"key", &buffer, 5..65).expect("set");
    assert_eq!(client.get_into(b"key", &mut buffer, 20..100).expect("got"), Some(60));
    assert!(bytes_of(&buffer, 20..80) == pattern(100, 2)[5..65]);
}
