//! Values in both directions, over the embedded fabric and over TCP.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use kv_store::{FrameReader, Store};
use rdma_conn::{Connect, Listener, Options, Stream};
use rdma_kv::{Buffer, Client, Counts, Error, Memory, Part, Transport};
use rdma_softsim::{Fabric, SoftSim};

const WINDOW: usize = 64 << 10;
const LONG: Duration = Duration::from_secs(60);

/// A client of a store on the embedded fabric.
fn over_rdma(serve: impl FnOnce(Stream<SoftSim>) + Send + 'static) -> Client<Stream<SoftSim>> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener =
        Listener::bind(&fabric.host(&[address.ip()]), address, Options::server()).expect("is free");
    thread::spawn(move || serve(listener.accept_timeout(LONG).expect("accepts").0));
    let mut options = Options::client();
    options.protocol.window = WINDOW as u32;
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let stream =
        Stream::connect_with(&host, address, &Connect::default().options(options)).expect("connects");
    let mut client = Client::new(stream);
    client.set_timeout(Some(LONG)).expect("a time-out");
    client
}

/// A client of a store on the loopback.
fn over_tcp(serve: impl FnOnce(TcpStream) + Send + 'static) -> Client<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("is free");
    let address = listener.local_addr().expect("it listens");
    thread::spawn(move || serve(listener.accept().expect("accepts").0));
    let mut client = Client::new(TcpStream::connect(address).expect("connects"));
    client.set_timeout(Some(LONG)).expect("a time-out");
    client
}

fn store<S: Read + Write>(stream: S) {
    // Ends with the client.
    let _ended = Store::default().serve(stream);
}

/// Answers each command with the next of these replies.
fn answers<S: Read + Write>(replies: &'static [&'static [u8]]) -> impl FnOnce(S) + Send {
    move |stream| {
        let mut commands = FrameReader::new(stream);
        for reply in replies {
            let Ok(Some(_command)) = commands.frame() else { return };
            if commands.stream().write_all(reply).is_err() {
                return;
            }
        }
        let _sent = commands.stream().flush();
    }
}

/// Bytes of which no two neighbouring kilobytes are alike.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16) ^ seed) as u8).collect()
}

fn bytes_of(buffer: &impl Buffer, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    assert!(buffer.read(range.start, &mut bytes), "not inside");
    bytes
}

/// Values of many lengths, set and got back; what each command counts.
fn there_and_back<T: Transport>(mut client: Client<T>) -> Counts {
    let most = 40 * WINDOW;
    let mut buffer = client.buffer(most + 100).expect("memory");
    let random = (0..20).map(|_| fastrand::usize(0..most));
    let lengths = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 8 * WINDOW, 8 * WINDOW + 1, most];
    for (seed, len) in lengths.into_iter().chain(random).enumerate() {
        let value = pattern(len, seed);
        assert!(buffer.write(50, &value), "nothing uses the buffer");
        client.set_from(b"key", &buffer, 50..50 + len).expect("set");
        assert_eq!(client.strlen(b"key").expect("a length"), len as u64);
        assert!(buffer.write(0, &vec![0xee; most + 100]), "nothing uses the buffer");
        let got = client.get_into(b"key", &mut buffer, 50..50 + most).expect("got");
        assert_eq!(got, Some(len));
        assert!(bytes_of(&buffer, 50..50 + len) == value, "{len} bytes");
        let around = [0..50, 50 + len..most + 100].map(|range| bytes_of(&buffer, range)).concat();
        assert!(around.iter().all(|byte| *byte == 0xee), "{len}: bytes beside the value changed");
    }
    client.counts()
}

#[test]
fn values_land_over_rdma() {
    let counts = there_and_back(over_rdma(store));
    assert_eq!(counts.bytes_landed % WINDOW as u64, 0, "{counts:?}");
    assert_eq!(counts.bytes_landed + counts.bytes_copied, counts.bytes_lent, "{counts:?}");
    assert!(counts.bytes_landed > counts.bytes_copied, "{counts:?}");
}

#[test]
fn values_are_copied_over_tcp() {
    let counts = there_and_back(over_tcp(store));
    assert_eq!((counts.bytes_landed, counts.bytes_lent), (0, 0));
}

/// Memory that exists is used where it is, and given back when the buffer is gone.
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
    assert!(counts.bytes_landed >= 17 * WINDOW as u64, "{counts:?}");
    into_memory_that_exists(over_tcp(store));
}

/// Windows may lie in the memory after an error, so it is given back when the connection has ended, not before.
#[test]
fn memory_is_kept_for_as_long_as_the_server_may_write_to_it() {
    let mut client = over_rdma(|mut stream| {
        let mut some = [0; 100];
        assert!(stream.read(&mut some).expect("a command") > 0);
        stream.write_all(b"$10000000\r\n").expect("written");
        stream.write_all(&vec![1; 3 * WINDOW]).expect("written");
        let _until_the_client_goes = stream.read_to_end(&mut Vec::new());
    });
    client.set_timeout(Some(Duration::from_millis(200))).expect("a time-out");
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

/// A registration serves all connections in its protection domain, and no other.
#[test]
fn one_registration_serves_the_connections_of_a_domain() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener =
        Listener::bind(&fabric.host(&[address.ip()]), address, Options::server()).expect("is free");
    let served = thread::spawn(move || {
        for _connection in 0..3 {
            let (stream, _) = listener.accept_timeout(LONG).expect("accepts");
            thread::spawn(move || store(stream));
        }
    });
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let how = Connect::default();
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
    served.join().expect("does not panic");
}

/// All but two windows and less than one more of a large value land.
#[test]
fn most_of_a_large_value_lands() {
    let len = 32 * WINDOW;
    let mut client = over_rdma(store);
    let mut buffer = client.buffer(len).expect("memory");
    client.set_from(b"key", &buffer, 0..len).expect("set");
    let before = client.counts();
    assert_eq!(before.bytes_lent, len as u64, "a SET is lent");
    client.get_into(b"key", &mut buffer, 0..len).expect("got");
    let landed = client.counts().bytes_landed;
    assert!(landed >= (len - 3 * WINDOW) as u64, "{landed} of {len}");
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

/// A refusal is told to the caller, and the client goes on; after a reply that is none the client is lost.
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

const REPLIES: &[&[u8]] = &[b"-WRONGTYPE no string\r\n", b"-OOM no memory\r\n", b"$3\r\nabc\r\n", b":3\r\n"];

#[test]
fn errors_say_who_is_at_fault() {
    errors(over_rdma(answers(REPLIES)));
    errors(over_tcp(answers(REPLIES)));
}

/// A server that goes in the middle of a value.
#[test]
fn a_server_that_goes_loses_the_client() {
    let mut client = over_rdma(answers(&[b"$1000000\r\nonly these"]));
    let mut buffer = client.buffer(1_000_000).expect("memory");
    let ended = client.get_into(b"key", &mut buffer, 0..1_000_000).expect_err("the rest is missing");
    assert!(matches!(&ended, Error::Io(error) if error.kind() == io::ErrorKind::BrokenPipe), "{ended}");
    assert!(matches!(client.strlen(b"key"), Err(Error::Lost)));
}

/// A server that says nothing.
#[test]
fn a_server_that_says_nothing_is_not_waited_for() {
    let mut client = over_rdma(|mut stream| {
        let mut all = Vec::new();
        let _ended = stream.read_to_end(&mut all);
    });
    client.set_timeout(Some(Duration::from_millis(20))).expect("a time-out");
    let mut buffer = client.buffer(10).expect("memory");
    let waited = client.get_into(b"key", &mut buffer, 0..10).expect_err("nothing comes");
    assert!(matches!(&waited, Error::Io(error) if error.kind() == io::ErrorKind::TimedOut), "{waited}");
}
