use crate::world::{WINDOW, bytes_of, over_rdma, over_tcp, pattern, store, there_and_back};
use rdma_kv::{Buffer, Client, Counts, Error, Memory, Part, Transport};

fn many_lengths<T: Transport>(mut client: Client<T>, check: impl Fn(Counts, usize)) {
    let most = 40 * WINDOW;
    let mut buffer = client.buffer(most + 100).expect("memory");
    let random = (0..20).map(|_| fastrand::usize(0..most));
    let lengths = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 8 * WINDOW, 8 * WINDOW + 1, most];
    for (seed, len) in lengths.into_iter().chain(random).enumerate() {
        check(there_and_back(&mut client, &mut buffer, len, seed), len);
        assert_eq!(client.strlen(b"key").expect("a length"), len as u64);
    }
}

/// A large value lands, except one window and less than another one.
#[test]
fn values_land_over_rdma() {
    many_lengths(over_rdma(store), |counts, len| {
        assert_eq!(counts.bytes_landed % WINDOW as u64, 0, "{counts:?}");
        assert_eq!((counts.bytes_lent, counts.bytes_landed + counts.bytes_copied), (len as u64, len as u64));
        assert!(len == 0 || counts.bytes_copied < 2 * WINDOW as u64, "{len}: {counts:?}");
    });
}

#[test]
fn values_are_copied_over_tcp() {
    many_lengths(over_tcp(store), |counts, _len| {
        assert_eq!((counts.bytes_landed, counts.bytes_lent), (0, 0));
    });
}

fn into_memory_that_exists<T: Transport>(mut client: Client<T>) -> Counts {
    let len = 20 * WINDOW + 3;
    let value = pattern(len, 5);
    let mut bytes = vec![0; len + 10];
    bytes[1..1 + len].copy_from_slice(&value);
    let address = bytes.as_ptr().addr();
    let memory = Memory::from(bytes);
    let mut buffer = client.register(memory.clone()).expect("registered");
    client.set_from(b"key", &buffer, 1..1 + len).expect("set");
    assert!(buffer.write(0, &vec![0xee; len + 10]), "nothing uses the buffer");
    assert_eq!(client.get_into(b"key", &mut buffer, 3..3 + len).expect("got"), Some(len));
    let memory = memory.try_into_vec().expect_err("the buffer has it");
    drop(buffer);
    let bytes = memory.try_into_vec().expect("nothing uses it");
    assert_eq!(bytes.as_ptr().addr(), address);
    assert!(bytes[3..3 + len] == value, "the value");
    assert!(bytes[..3].iter().chain(&bytes[3 + len..]).all(|byte| *byte == 0xee), "beside the value");
    assert!(client.register(Vec::new()).is_err(), "no bytes");
    client.counts()
}

#[test]
fn memory_that_exists_is_used_where_it_is() {
    let counts = into_memory_that_exists(over_rdma(store));
    assert_eq!(counts.bytes_lent, 20 * WINDOW as u64 + 3);
    assert!(counts.bytes_landed >= 19 * WINDOW as u64, "{counts:?}");
    into_memory_that_exists(over_tcp(store));
}

fn many_at_once<T: Transport>(mut client: Client<T>) {
    let mut buffer = client.buffer(20 * WINDOW).expect("memory");
    let value = pattern(20 * WINDOW, 7);
    assert!(buffer.write(0, &value));
    client.set_from(b"one", &buffer, 0..3 * WINDOW + 5).expect("set");
    client.set_from(b"two", &buffer, 100..100 + 9 * WINDOW).expect("set");
    client.set_from(b"three", &buffer, 1..11).expect("set");
    assert!(buffer.write(0, &vec![0; 20 * WINDOW]));

    let part = |key, range| Part { key, range };
    let parts = [
        part(&b"three"[..], 0..10),
        part(b"two", 10..10 + 9 * WINDOW),
        part(b"none", 0..5),
        part(b"one", 12 * WINDOW..12 * WINDOW + 7),
        part(b"one", 12 * WINDOW..20 * WINDOW),
        part(b"three", 20 * WINDOW - 10..20 * WINDOW),
    ];
    let got = client.mget_into(&parts, &mut buffer).expect("the connection holds");
    let [three, two, none, short, one, last] = got.try_into().expect("one result for each part");
    assert_eq!(three.expect("got"), Some(10));
    assert_eq!(two.expect("got"), Some(9 * WINDOW));
    assert_eq!(none.expect("got"), None);
    let short = short.expect_err("it does not fit");
    assert!(matches!(short, Error::TooLong { room: 7, len } if len == 3 * WINDOW as u64 + 5), "{short}");
    assert_eq!((one.expect("got"), last.expect("got")), (Some(3 * WINDOW + 5), Some(10)));
    assert!(bytes_of(&buffer, 0..10) == value[1..11]);
    assert!(bytes_of(&buffer, 10..10 + 9 * WINDOW) == value[100..100 + 9 * WINDOW]);
    assert!(bytes_of(&buffer, 12 * WINDOW..15 * WINDOW + 5) == value[..3 * WINDOW + 5]);

    assert_eq!(client.exists(&[b"one", b"none", b"two"]).expect("a number"), 2);
    assert_eq!(client.del(&[b"one", b"none"]).expect("a number"), 1);
    assert_eq!(client.get_into(b"one", &mut buffer, 0..1).expect("got"), None);
    let outside = client.get_into(b"two", &mut buffer, 5..20 * WINDOW + 1).expect_err("outside");
    assert!(matches!(outside, Error::Outside { .. }), "{outside}");
    assert_eq!(client.strlen(b"two").expect("the client goes on"), 9 * WINDOW as u64);
}

#[test]
fn many_values_at_once() {
    many_at_once(over_rdma(store));
    many_at_once(over_tcp(store));
}
