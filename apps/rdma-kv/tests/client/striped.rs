use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use crate::world::{WINDOW, bytes_of, client, fabric, how, over_tcp, pattern};
use kv_store::Store;
use rdma_conn::{Connect, Stream};
use rdma_kv::{Buffer, Client, Error, Memory, Part, Striped};
use rdma_softsim::SoftSim;

#[test]
fn one_registration_serves_the_connections_of_a_domain() {
    let shared = Arc::new(Store::default());
    let (host, address) = fabric(3, move |stream| _ = shared.serve(stream));
    let how = how();
    let one = Stream::connect_with(&host, address, &how).expect("connects");
    let two = Stream::connect_in(&host, &one.domain(), address, &how).expect("connects");
    let three = Stream::connect_with(&host, address, &how).expect("connects");
    assert!(one.domain() == two.domain() && one.domain() != three.domain());
    let (mut one, mut two, mut three) = (Client::new(one), Client::new(two), Client::new(three));
    let mut buffer = one.register(pattern(300, 0)).expect("registered");
    for (client, at) in [(&mut one, 100), (&mut two, 200)] {
        client.set_from(b"key", &buffer, 20..80).expect("set");
        assert_eq!(client.get_into(b"key", &mut buffer, at..at + 70).expect("got"), Some(60));
        assert!(bytes_of(&buffer, at..at + 60) == pattern(100, 0)[20..80]);
    }
    let foreign = three.set_from(b"key", &buffer, 0..70).expect_err("it is of another domain");
    assert!(foreign.to_string().contains("protection domain"), "{foreign}");
}

fn connections(count: usize, together: bool) -> Striped<Stream<SoftSim>> {
    let shared = Arc::new(Store::default());
    let (host, address) = fabric(count, move |stream| _ = shared.serve(stream));
    let how: Connect = how();
    let first = Stream::connect_with(&host, address, &how).expect("connects");
    let mut streams = vec![first];
    while let Some(first) = streams.first().filter(|_| streams.len() < count) {
        let next = match together {
            true => Stream::connect_in(&host, &first.domain(), address, &how),
            false => Stream::connect_with(&host, address, &how),
        };
        streams.push(next.expect("connects"));
    }
    Striped::new(streams.into_iter().map(client).collect())
}

/// Values of all lengths around multiples of windows. One domain has memory in slices.
fn spread(count: usize, together: bool) {
    let mut client = connections(count, together);
    let lengths: Vec<usize> = (0..30)
        .flat_map(|windows| [windows * WINDOW, windows * WINDOW + 1, (windows + 1) * WINDOW - 1])
        .collect();
    let keys: Vec<String> = lengths.iter().map(|len| format!("key:{len}")).collect();
    let total = lengths.iter().sum();
    let mut at = 0;
    let parts: Vec<_> = lengths
        .iter()
        .zip(&keys)
        .map(|(len, key)| {
            at += len;
            Part { key: key.as_bytes(), range: at - len..at }
        })
        .collect();
    let value = pattern(total, count);
    let memory = Memory::from(value.clone()).in_slices(if together { 200 * WINDOW } else { usize::MAX });
    let mut buffer = client.register(memory.clone()).expect("registered");
    let set = client.mset_from(&parts, &buffer).expect("a buffer of these");
    assert!(set.len() == parts.len() && set.iter().all(Result::is_ok));
    assert_eq!(client.counts().bytes_lent, total as u64);
    assert!(buffer.write(0, &vec![0; total]), "nothing uses the buffer");
    let got = client.mget_into(&parts, &mut buffer).expect("a buffer of these");
    for (got, len) in got.into_iter().zip(&lengths) {
        assert_eq!(got.expect("got"), Some(*len));
    }
    assert!(bytes_of(&buffer, 0..total) == value, "{count} connections");
    let counts = client.counts();
    assert_eq!(counts.bytes_landed + counts.bytes_copied, total as u64);
    assert!(counts.bytes_landed > counts.bytes_copied, "{counts:?}");
    let outside = client.mget_into(&[Part { key: b"key:1", range: 0..total + 1 }], &mut buffer);
    assert!(matches!(outside, Err(Error::Outside { .. })));
    assert!(client.mget_into(&[], &mut buffer).expect("nothing is asked for").is_empty());
    drop(buffer);
    assert!(memory.try_into_vec().expect("nothing uses it") == value);
}

#[test]
fn keys_are_spread_over_connections() {
    spread(1, false);
    spread(3, false);
    spread(8, true);
}

#[test]
fn a_server_that_takes_nothing_is_not_lingered_for() {
    // The stream is never dropped, and never read from.
    let (host, address) = fabric(3, std::mem::forget);
    let mut how = how();
    how.options.linger = Duration::from_secs(3600);
    let connect = || Client::new(Stream::connect_with(&host, address, &how).expect("connects"));
    let mut client = Striped::new((0..2).map(|_| connect()).collect());
    client.set_timeout(Some(Duration::from_millis(100)));
    const LEN: usize = 4 << 20;
    let buffer = client.buffer(2 * LEN).expect("registered");
    let parts = [Part { key: b"one", range: 0..LEN }, Part { key: b"other", range: LEN..2 * LEN }];
    let set = client.mset_from(&parts, &buffer).expect("two are there");
    assert!(matches!(set[..], [Err(Error::Io(_)), Err(Error::Io(_))]), "{set:?}");
    assert_eq!(client.connections(), 0);

    let mut alone = connect();
    alone.set_timeout(Some(Duration::from_millis(100)));
    let buffer = alone.buffer(2 * LEN).expect("registered");
    let late = alone.set_from(b"one", &buffer, 0..2 * LEN).expect_err("its server takes nothing");
    assert!(matches!(late, Error::Io(_)) && alone.is_lost(), "{late}");
    drop(alone);
}

#[test]
fn a_lost_connection_leaves_the_others() {
    let shared = Arc::new(Store::default());
    let broken = Arc::new(std::sync::Mutex::new(true));
    let (host, address) = fabric(3, move |mut stream| {
        // The first accepted connection ends at its first command.
        if std::mem::take(&mut *broken.lock().expect("no panic")) {
            let _asked = stream.read(&mut [0]);
        } else {
            let _ended = shared.serve(stream);
        }
    });
    let connect = || Stream::connect_with(&host, address, &how()).expect("connects");
    let mut client = Striped::new((0..3).map(|_| client(connect())).collect());
    let mut buffer = client.buffer(9 * WINDOW).expect("registered");
    let keys: Vec<String> = (0..9).map(|index| format!("key:{index}")).collect();
    let parts: Vec<_> = keys
        .iter()
        .enumerate()
        .map(|(index, key)| Part { key: key.as_bytes(), range: index * WINDOW..(index + 1) * WINDOW })
        .collect();
    let first = client.mget_into(&parts, &mut buffer).expect("two are there");
    let failed: Vec<_> = first.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(matches!(failed[..], [Error::Io(_), Error::Lost, Error::Lost]), "{failed:?}");
    assert_eq!(first.iter().filter(|result| matches!(result, Ok(None))).count(), 6);
    assert_eq!(client.connections(), 2);
    assert!(buffer.write(0, &pattern(9 * WINDOW, 1)), "the lost connection has let go of it");
    let set = client.mset_from(&parts, &buffer).expect("two are there");
    assert!(set.iter().all(Result::is_ok), "{set:?}");
    assert!(buffer.write(0, &vec![0; 9 * WINDOW]));
    let got = client.mget_into(&parts, &mut buffer).expect("two are there");
    assert!(got.iter().all(|result| matches!(result, Ok(Some(WINDOW)))), "{got:?}");
    assert!(bytes_of(&buffer, 0..9 * WINDOW) == pattern(9 * WINDOW, 1));
}

#[test]
fn a_buffer_serves_its_own_connections_only() {
    let (mut one, two) = (connections(2, false), connections(1, false));
    let mut foreign = two.buffer(10).expect("registered");
    let part = [Part { key: b"key", range: 0..10 }];
    assert!(matches!(one.mget_into(&part, &mut foreign), Err(Error::Foreign)));
    assert!(matches!(Striped::<Stream<SoftSim>>::new(Vec::new()).buffer(10), Err(Error::Lost)));
}

#[test]
fn tcp_is_striped_the_same() {
    let shared = Arc::new(Store::default());
    let connect = || {
        let store = Arc::clone(&shared);
        over_tcp(move |stream| _ = store.serve(stream))
    };
    let mut client = Striped::new(vec![connect(), connect()]);
    let mut buffer = client.register(pattern(100, 3)).expect("memory");
    let parts = [Part { key: b"one", range: 0..40 }, Part { key: b"two", range: 40..100 }];
    client.mset_from(&parts, &buffer).expect("set");
    assert!(buffer.write(0, &[0; 100]));
    client.mget_into(&parts, &mut buffer).expect("got");
    assert!(bytes_of(&buffer, 0..100) == pattern(100, 3));
}
