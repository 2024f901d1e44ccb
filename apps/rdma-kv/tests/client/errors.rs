//! Errors: which are reported to the caller, and the state of the buffer and the client after each.

use std::io::{self, Read, Write};
use std::thread;
use std::time::Duration;

use crate::world::{LONG, WINDOW, answers, bytes_of, over_rdma, over_tcp, store};
use rdma_kv::{Buffer, Client, Error, Memory, Part, Transport};

fn errors<T: Transport>(mut client: Client<T>) {
    let mut buffer = client.buffer(100).expect("memory");
    let refused = client.get_into(b"key", &mut buffer, 0..100).expect_err("a wrong type");
    assert!(matches!(&refused, Error::Refused(text) if text.starts_with("WRONGTYPE")), "{refused}");
    let refused = client.set_from(b"key", &buffer, 0..10).expect_err("a full memory");
    assert!(matches!(&refused, Error::Refused(text) if text.starts_with("OOM")), "{refused}");
    assert_eq!(client.get_into(b"key", &mut buffer, 0..100).expect("got"), Some(3));
    let unexpected = client.get_into(b"key", &mut buffer, 0..100).expect_err("no reply to GET");
    assert!(matches!(unexpected, Error::Unexpected(_)), "{unexpected}");
    assert!(matches!(client.exists(&[b"key"]), Err(Error::Lost)));
    assert!(matches!(client.get_into(b"key", &mut buffer, 0..1), Err(Error::Lost)));
}

const fn ending(last: &'static [u8]) -> [&'static [u8]; 4] {
    [b"-WRONGTYPE no string\r\n", b"-OOM no memory\r\n", b"$3\r\nabc\r\n", last]
}

static REPLIES: [[&[u8]; 4]; 5] = [
    ending(b":3\r\n"),
    ending(b"*1\r\n$1\r\na\r\n"),
    ending(b"$-2\r\n"),
    ending(b"$99999999999999999999\r\n"),
    ending(b"$\r\n"),
];

#[test]
fn errors_say_who_is_at_fault() {
    for replies in &REPLIES {
        errors(over_rdma(answers(replies)));
        errors(over_tcp(answers(replies)));
    }
}

/// What a server sends before it disconnects: in the header, in the value, before its end.
const CUT: &[&[&[u8]]] = &[
    &[],
    &[b"$10000"],
    &[b"$1000000\r\n"],
    &[b"$1000000\r\nonly these"],
    &[b"$10\r\n0123456789"],
    &[b"$10\r\n0123456789\r"],
    &[b"$10\r\n0123456789\r\n", b"$2000000\r\nof another key"],
    &[b"$9223372036854775807\r\nsome"],
];

fn cut<T: Transport>(connect: impl Fn(&'static [&'static [u8]]) -> Client<T>) {
    for replies in CUT {
        let mut client = connect(replies);
        let mut buffer = client.buffer(1_000_000).expect("memory");
        let part = |key| Part { key, range: 0..1_000_000 };
        let ended =
            client.mget_into(&[part(b"one"), part(b"two")], &mut buffer).expect_err("the rest is missing");
        let Error::Io(error) = &ended else { panic!("{replies:?}: {ended}") };
        let kinds = [io::ErrorKind::BrokenPipe, io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
        assert!(kinds.contains(&error.kind()), "{replies:?}: {error:?}");
        assert!(client.is_lost() && matches!(client.strlen(b"key"), Err(Error::Lost)));
        drop(client);
        assert!(buffer.write(0, b"is mine"), "the connection has ended, and the buffer is the caller's");
    }
}

#[test]
fn a_server_that_goes_loses_the_client() {
    cut(|replies| over_rdma(answers(replies)));
    cut(|replies| over_tcp(answers(replies)));
}

#[test]
fn a_value_that_is_too_long_changes_nothing() {
    let mut client = over_rdma(store);
    let len = 5 * WINDOW;
    let mut buffer = client.buffer(len).expect("memory");
    client.set_from(b"key", &buffer, 0..len).expect("set");
    assert!(buffer.write(0, &vec![0xee; len]));
    for room in [0, 1, WINDOW, 3 * WINDOW + 7, len - 1] {
        let refused = client.get_into(b"key", &mut buffer, 0..room).expect_err("it does not fit");
        assert!(
            matches!(refused, Error::TooLong { len: told, room: had } if (told, had) == (len as u64, room))
        );
        assert!(bytes_of(&buffer, 0..len).iter().all(|byte| *byte == 0xee), "{room}");
    }
    assert_eq!(client.get_into(b"key", &mut buffer, 0..len).expect("got"), Some(len));
}

fn drips<T: Transport>(mut client: Client<T>) {
    client.set_timeout(Some(Duration::from_millis(100)));
    let mut buffer = client.buffer(1_000_000).expect("memory");
    let waited = client.get_into(b"key", &mut buffer, 0..1_000_000).expect_err("it never comes");
    assert!(matches!(&waited, Error::Io(error) if error.kind() == io::ErrorKind::TimedOut), "{waited}");
}

fn drip<S: Read + Write>(header: &'static [u8]) -> impl Fn(S) + Send + Sync {
    move |mut stream| {
        let mut sent = stream.read(&mut [0; 100]).and_then(|_command| stream.write_all(header));
        while sent.is_ok() {
            thread::sleep(Duration::from_millis(5));
            sent = stream.write_all(b"1");
        }
    }
}

#[test]
fn a_server_that_drips_is_not_waited_for() {
    for header in [&b"$"[..], b"$1000000\r\n", b"$100000000\r\n"] {
        drips(over_rdma(drip(header)));
        drips(over_tcp(drip(header)));
    }
    drips(over_rdma(|mut stream| _ = stream.read_to_end(&mut Vec::new())));
}

/// Windows may lie in the memory after an error.
#[test]
fn memory_is_kept_for_as_long_as_the_server_may_write_to_it() {
    let mut client = over_rdma(|mut stream| {
        let mut some = [0; 100];
        assert!(stream.read(&mut some).expect("a command") > 0);
        stream.write_all(b"$10000000\r\n").expect("written");
        stream.write_all(&vec![1; 3 * WINDOW]).expect("written");
        let _until_the_client_goes = stream.read_to_end(&mut Vec::new());
    });
    // Far longer than the server's bytes take, also on a busy machine.
    client.set_timeout(Some(Duration::from_secs(2)));
    let memory = Memory::from(vec![0; 10_000_000]);
    let mut buffer = client.register(memory.clone()).expect("registered");
    let waited = client.get_into(b"key", &mut buffer, 0..10_000_000).expect_err("the rest never comes");
    assert!(matches!(&waited, Error::Io(error) if error.kind() == io::ErrorKind::TimedOut), "{waited}");
    drop(buffer);
    let mut memory = memory.try_into_vec().expect_err("a window lies in it");
    drop(client);
    let deadline = std::time::Instant::now() + LONG;
    let bytes = loop {
        memory = match memory.try_into_vec() {
            Ok(bytes) => break bytes,
            Err(memory) => memory,
        };
        assert!(std::time::Instant::now() < deadline, "it never comes back");
        thread::yield_now();
    };
    assert!(bytes[..2 * WINDOW].iter().all(|byte| *byte == 1));
}

#[test]
fn a_dma_buf_needs_a_device_that_can() {
    let bytes = Box::leak(vec![0; 100].into_boxed_slice());
    let mut memory = || {
        let descriptor = std::fs::File::open("/dev/null").expect("is there").into();
        // SAFETY: the bytes live forever, and are not accessed otherwise. The descriptor is that of
        // no dma-buf, and given to no device.
        unsafe { Memory::from_dma_buf(bytes.as_mut_ptr(), bytes.len(), descriptor, 0, ()) }
    };
    let refused = over_rdma(store).register(memory()).expect_err("there is no device");
    assert!(refused.to_string().contains("dma-buf"), "{refused}");
    let mut client = over_tcp(store);
    let mut buffer = client.register(memory()).expect("it is copied");
    assert!(buffer.write(0, b"value"));
    client.set_from(b"key", &buffer, 0..5).expect("set");
    assert_eq!(client.get_into(b"key", &mut buffer, 50..100).expect("got"), Some(5));
    assert_eq!(bytes_of(&buffer, 50..55), b"value");
}
