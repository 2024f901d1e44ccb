//! Servers and their clients, on the embedded fabric and over TCP.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kv_store::{FrameReader, Store};
use rdma_conn::{Connect, Listener, Stream};
use rdma_kv::{Buffer, Client, Counts, Transport};
use rdma_softsim::{Fabric, SoftSim};

pub(crate) const WINDOW: usize = 64 << 10;
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Starts a server whose `serve` gets each connection. Returns a host for clients, and its address.
pub(crate) fn fabric(
    connections: usize,
    serve: impl Fn(Stream<SoftSim>) + Send + Sync + 'static,
) -> (SoftSim, SocketAddr) {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("is free");
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for _connection in 0..connections {
            let (stream, _) = listener.accept_timeout(LONG).expect("accepts");
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(stream));
        }
    });
    (fabric.host(&[[192, 0, 2, 2].into()]), address)
}

pub(crate) fn how() -> Connect {
    let mut options = rdma_kv::options();
    options.protocol.window = WINDOW as u32;
    Connect::default().options(options)
}

pub(crate) fn client<T: Transport>(stream: T) -> Client<T> {
    let mut client = Client::new(stream);
    client.set_timeout(Some(LONG));
    client
}

pub(crate) fn over_rdma(serve: impl Fn(Stream<SoftSim>) + Send + Sync + 'static) -> Client<Stream<SoftSim>> {
    let (host, address) = fabric(1, serve);
    client(Stream::connect_with(&host, address, &how()).expect("connects"))
}

pub(crate) fn over_tcp(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Client<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("is free");
    let address = listener.local_addr().expect("it listens");
    thread::spawn(move || serve(listener.accept().expect("accepts").0));
    client(TcpStream::connect(address).expect("connects"))
}

pub(crate) fn store<S: Read + Write>(stream: S) {
    let _ended = Store::default().serve(stream);
}

pub(crate) fn answers<S: Read + Write>(replies: &'static [&'static [u8]]) -> impl Fn(S) + Send + Sync {
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

/// Sets a value from the middle of `buffer` and gets it back, while no byte beside it changes.
pub(crate) fn there_and_back<T: Transport>(
    client: &mut Client<T>,
    buffer: &mut T::Buffer,
    len: usize,
    seed: usize,
) -> Counts {
    let (all, value, before) = (buffer.len(), pattern(len, seed), client.counts());
    assert!(buffer.write(50, &value), "nothing uses the buffer");
    client.set_from(b"key", buffer, 50..50 + len).expect("set");
    assert!(buffer.write(0, &vec![0xee; all]), "nothing uses the buffer");
    assert_eq!(client.get_into(b"key", buffer, 50..all - 50).expect("got"), Some(len));
    assert!(bytes_of(buffer, 50..50 + len) == value, "{len} bytes");
    let around = [0..50, 50 + len..all].map(|range| bytes_of(buffer, range)).concat();
    assert!(around.iter().all(|byte| *byte == 0xee), "{len}: bytes beside the value changed");
    client.counts() - before
}

pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16) ^ seed) as u8).collect()
}

pub(crate) fn bytes_of(buffer: &impl Buffer, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    assert!(buffer.read(range.start, &mut bytes), "not inside");
    bytes
}
