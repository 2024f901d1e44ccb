use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_store::{FrameReader, Session, Store, command};
use rdma_conn::Stream;
use rdma_kv::{Buffer, Client, Error, Memory, Striped, Transport};
use rdma_softsim::SoftSim;

use crate::world::{WINDOW, answers, bytes_of, client, fabric, how, over_tcp, pattern};

const MIB: usize = 1 << 20;

fn clients(count: usize) -> (Striped<Stream<SoftSim>>, Client<Stream<SoftSim>>) {
    let shared = Arc::new(Store::default());
    let (host, address) = fabric(count + 1, move |stream| _ = shared.serve(stream));
    let connect = || client(Stream::connect_with(&host, address, &how()).expect("connects"));
    (Striped::new((0..count).map(|_| connect()).collect()), connect())
}

/// Sets values and gets them back, of lengths around those of parts, with another client's eyes.
fn there_and_back<T: Transport + Send, U: Transport>(mut striped: Striped<T>, mut other: Client<U>) {
    let (count, most) = (striped.connections(), 9 * MIB);
    let mut buffer = striped.buffer(most + 100).expect("memory");
    let mut theirs = other.buffer(most).expect("memory");
    for (seed, len) in [most, 0, 1, 2 * MIB - 1, 2 * MIB, 3 * MIB + 1, count * MIB].into_iter().enumerate() {
        let (value, before) = (pattern(len, seed), striped.counts());
        assert!(buffer.write(7, &value), "nothing uses the buffer");
        striped.set_from(b"key", &buffer, 7..7 + len).expect("set");
        assert_eq!(other.get_into(b"key", &mut theirs, 0..most).expect("got"), Some(len));
        assert!(bytes_of(&theirs, 0..len) == value, "{len} bytes over {count} connections");
        assert!(buffer.write(0, &vec![0xee; most + 100]), "nothing uses the buffer");
        assert_eq!(striped.get_into(b"key", &mut buffer, 7..7 + most).expect("got"), Some(len));
        assert!(bytes_of(&buffer, 7..7 + len) == value, "{len} bytes over {count} connections");
        let around = [0..7, 7 + len..most + 100].map(|range| bytes_of(&buffer, range)).concat();
        assert!(around.iter().all(|byte| *byte == 0xee), "{len}: bytes beside the value changed");
        let counts = striped.counts() - before;
        assert_eq!(counts.bytes_landed + counts.bytes_copied + counts.bytes_lent, 2 * len as u64);
    }
    assert_eq!(striped.get_into(b"none", &mut buffer, 0..most).expect("got"), None);
    let long = striped.get_into(b"key", &mut buffer, 0..2 * MIB);
    if count > 2 {
        assert!(matches!(long, Err(Error::TooLong { room, .. }) if room == 2 * MIB), "{long:?}");
    }
    let outside = striped.set_from(b"key", &buffer, most..most + 101);
    assert!(matches!(outside, Err(Error::Outside { .. })));
    let outside = striped.get_into(b"key", &mut buffer, 0..most + 101);
    assert!(matches!(outside, Err(Error::Outside { .. })));
    assert_eq!(striped.connections(), count);
}

#[test]
fn a_value_goes_over_all_connections() {
    for count in [1, 2, 5] {
        let (striped, other) = clients(count);
        there_and_back(striped, other);
    }
    let shared = Arc::new(Store::default());
    let connect = || {
        let store = Arc::clone(&shared);
        over_tcp(move |stream| _ = store.serve(stream))
    };
    there_and_back(Striped::new(vec![connect(), connect(), connect()]), connect());
}

/// In two protection domains, one of two connections.
#[test]
fn parts_land_across_slices() {
    let shared = Arc::new(Store::default());
    let (host, address) = fabric(3, move |stream| _ = shared.serve(stream));
    let connect = || Stream::connect_with(&host, address, &how()).expect("connects");
    let (first, other) = (connect(), connect());
    let second = Stream::connect_in(&host, &first.domain(), address, &how()).expect("connects");
    let mut striped = Striped::new([first, second, other].map(client).into());
    let len = 12 * MIB;
    let memory = Memory::from(pattern(len, 1)).in_slices(5 * MIB);
    let mut buffer = striped.register(memory).expect("registered");
    striped.set_from(b"key", &buffer, 0..len).expect("set");
    let set = striped.counts();
    assert_eq!((set.bytes_lent, set.bytes_copied), (len as u64, 0));
    assert!(buffer.write(0, &vec![0; len]), "nothing uses the buffer");
    assert_eq!(striped.get_into(b"key", &mut buffer, 0..len).expect("got"), Some(len));
    assert!(bytes_of(&buffer, 0..len) == pattern(len, 1));
    // Three parts, two of which lie across a cut.
    let got = striped.counts() - set;
    assert!(got.bytes_landed >= (len - 5 * 2 * WINDOW) as u64, "{got:?}");
}

/// Clients of a server that calls `before` with each command, and disconnects if that is false.
fn watched(
    count: usize,
    before: impl Fn(&Store, &[&[u8]]) -> bool + Send + Sync + 'static,
) -> (Striped<Stream<SoftSim>>, Arc<Store>) {
    let store = Arc::new(Store::default());
    let shared = Arc::clone(&store);
    let (host, address) = fabric(count, move |stream| {
        let (mut session, mut commands) = (Session::default(), FrameReader::new(stream));
        while let Ok(Some(frame)) = commands.frame() {
            let words = frame.clone().into_array().unwrap_or_default().into_iter();
            let words: Vec<_> = words.filter_map(|word| word.into_bulk_string().ok()).collect();
            if !before(&shared, &words.iter().map(|word| &word[..]).collect::<Vec<_>>()) {
                return;
            }
            let mut replies = Default::default();
            session.answer(&shared, frame, &mut replies);
            if commands.stream().write_all(&replies).is_err() {
                return;
            }
        }
    });
    let connect = |_| client(Stream::connect_with(&host, address, &how()).expect("connects"));
    (Striped::new((0..count).map(connect).collect()), store)
}

fn ask(store: &Store, words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    command(&mut bytes, words.len(), words);
    let mut commands = FrameReader::new(Cursor::new(bytes));
    let mut replies = Default::default();
    store.answer(commands.frame().expect("a command").expect("a command"), &mut replies);
    replies.to_vec()
}

fn left(store: &Store, key: &[u8]) -> i64 {
    let left = String::from_utf8(ask(store, &[b"PTTL", key])).expect("a text");
    left.trim_end().trim_start_matches(':').parse().expect("a number")
}

/// A key's TTL is that of its client, counted from the end; that of the parts is gone.
#[test]
fn a_value_changes_at_once() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let (mut striped, store) = watched(3, move |store, words| {
        if matches!(words[0], b"SETRANGE" | b"PEXPIRE" | b"PERSIST" | b"RENAME") {
            counter.fetch_add(1, Ordering::Relaxed);
            assert_eq!(ask(store, &[b"GET", b"key"]), b"$3\r\nold\r\n");
        }
        true
    });
    ask(&store, &[b"SET", b"key", b"old", b"EX", b"1000"]);
    let buffer = striped.register(pattern(3 * MIB, 4)).expect("registered");
    striped.set_from(b"key", &buffer, 0..3 * MIB).expect("set");
    assert_eq!(seen.load(Ordering::Relaxed), 1 + 1 + 3 + 1 + 1);
    assert_eq!(ask(&store, &[b"PTTL", b"key"]), b":-1\r\n");
    assert_eq!(ask(&store, &[b"STRLEN", b"key"]), b":3145728\r\n");
    assert_eq!(ask(&store, &[b"DBSIZE"]), b":1\r\n");
    striped.set_time_to_live(Some(Duration::from_secs(1000)));
    ask(&store, &[b"SET", b"key", b"old"]);
    striped.set_from(b"key", &buffer, 0..3 * MIB).expect("set");
    let left = left(&store, b"key");
    assert!((500_000..=1_000_000).contains(&left), "{left} ms: the parts had three minutes");
}

#[test]
fn parts_are_of_one_value() {
    for changes in [0, 1, 2, usize::MAX] {
        let done = AtomicUsize::new(0);
        let (mut striped, store) = watched(3, move |store, words| {
            if words[0] == b"GETRANGE" {
                let now = done.fetch_add(1, Ordering::Relaxed);
                if now % 3 == 2 && now / 3 < changes {
                    let value = pattern(3 * MIB + 1 + now, now);
                    ask(store, &[b"SET", b"key", &value]);
                }
            }
            true
        });
        ask(&store, &[b"SET", b"key", &pattern(3 * MIB, 9)]);
        let mut buffer = striped.buffer(4 * MIB).expect("registered");
        let got = striped.get_into(b"key", &mut buffer, 0..4 * MIB);
        if changes > 2 {
            assert!(matches!(got, Err(Error::Changed)), "{got:?}");
        } else {
            let value = match changes {
                0 => pattern(3 * MIB, 9),
                _ => pattern(3 * MIB + 3 * changes, 3 * changes - 1),
            };
            assert_eq!(got.expect("got"), Some(value.len()));
            assert!(bytes_of(&buffer, 0..value.len()) == value, "{changes} changes");
        }
        assert_eq!(striped.connections(), 3);
    }
}

/// Evicted before a part that begins them again, shorter or as long, and before the end.
#[test]
fn evicted_parts_are_missed() {
    for evicts in [&b"SETRANGE"[..], b"PTTL"] {
        let calls = AtomicUsize::new(0);
        let (mut striped, store) = watched(3, move |store, words| {
            let [name, key, ..] = words else { return true };
            // The first SETRANGE is that of the last byte.
            if *name == evicts && (*name == b"PTTL" || calls.fetch_add(1, Ordering::Relaxed) == 2) {
                ask(store, &[b"DEL", key]);
                if *name == b"PTTL" {
                    ask(store, &[b"SETRANGE", key, b"3145727", b"x"]);
                }
            }
            true
        });
        ask(&store, &[b"SET", b"key", b"old"]);
        let buffer = striped.register(pattern(3 * MIB, 4)).expect("registered");
        let set = striped.set_from(b"key", &buffer, 0..3 * MIB).expect_err("a part is gone");
        assert!(matches!(set, Error::Changed), "{set}");
        assert_eq!(ask(&store, &[b"GET", b"key"]), b"$3\r\nold\r\n");
        assert_eq!(ask(&store, &[b"DBSIZE"]), b":1\r\n");
        assert_eq!(striped.connections(), 3);
    }
}

#[test]
fn a_refused_part_leaves_the_old_value() {
    let mut refusing = Striped::new(vec![
        over_tcp(answers(&[b":3145728\r\n", b":1\r\n", b"-OOM no memory\r\n", b":1\r\n"])),
        over_tcp(answers(&[b":3145728\r\n"])),
    ]);
    let buffer = refusing.register(pattern(3 * MIB, 4)).expect("memory");
    let set = refusing.set_from(b"key", &buffer, 0..3 * MIB).expect_err("there is no memory");
    assert!(matches!(&set, Error::Refused(text) if text == "OOM no memory"), "{set}");
    assert_eq!(refusing.connections(), 2, "the fourth answer was that to DEL");
    assert!(buffer.read(0, &mut [0]));
}

/// Another connection deletes them.
#[test]
fn a_lost_end_leaves_no_parts() {
    for lost in [&b"PTTL"[..], b"RENAME", b"EXEC"] {
        let (mut striped, store) = watched(3, move |_, words| words[0] != lost);
        ask(&store, &[b"SET", b"key", b"old"]);
        let buffer = striped.register(pattern(3 * MIB, 4)).expect("registered");
        let set = striped.set_from(b"key", &buffer, 0..3 * MIB).expect_err("a connection is lost");
        assert!(matches!(set, Error::Io(_)), "{set}");
        assert_eq!(striped.connections(), 2);
        assert_eq!(ask(&store, &[b"GET", b"key"]), b"$3\r\nold\r\n");
        assert_eq!(ask(&store, &[b"DBSIZE"]), b":1\r\n");
    }
}

/// No other one is asked whether the key has changed: it has watched nothing.
#[test]
fn a_lost_watch_proves_nothing() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let (mut striped, store) = watched(3, move |_, words| {
        if words[0] == b"EXEC" {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        words[0] != b"STRLEN"
    });
    ask(&store, &[b"SET", b"key", &pattern(3 * MIB, 9)]);
    let mut buffer = striped.buffer(3 * MIB).expect("registered");
    let got = striped.get_into(b"key", &mut buffer, 0..3 * MIB).expect_err("a connection is lost");
    assert!(matches!(got, Error::Io(_)), "{got}");
    assert_eq!((striped.connections(), asked.load(Ordering::Relaxed)), (2, 0));
}

/// The parts expire, and the other connections continue.
#[test]
fn a_lost_part_leaves_the_old_value() {
    let parts = AtomicUsize::new(0);
    let names = Arc::new(Mutex::new(Vec::new()));
    let named = Arc::clone(&names);
    let (mut striped, store) = watched(3, move |_, words| {
        if words[0] == b"SETRANGE" {
            named.lock().expect("no test panics there").push(words[1].to_vec());
        }
        // The second of the three parts; the first command is the last byte.
        !matches!(words[0], b"SETRANGE" | b"GETRANGE") || parts.fetch_add(1, Ordering::Relaxed) != 2
    });
    ask(&store, &[b"SET", b"key", b"old"]);
    let mut buffer = striped.register(pattern(3 * MIB, 4)).expect("registered");
    let set = striped.set_from(b"key", &buffer, 0..3 * MIB).expect_err("a connection is lost");
    assert!(matches!(set, Error::Io(_)), "{set}");
    assert_eq!(striped.connections(), 2);
    assert_eq!(ask(&store, &[b"GET", b"key"]), b"$3\r\nold\r\n");
    let name = names.lock().expect("no test panics there").first().expect("a part").clone();
    assert!(left(&store, &name) > 0, "a late part finds the key, which expires");
    striped.set_from(b"key", &buffer, 0..3 * MIB).expect("two are left");
    assert!(buffer.write(0, &vec![0; 3 * MIB]), "the lost connection has let go of it");
    assert_eq!(striped.get_into(b"key", &mut buffer, 0..3 * MIB).expect("two are left"), Some(3 * MIB));
    assert!(bytes_of(&buffer, 0..3 * MIB) == pattern(3 * MIB, 4));
}
