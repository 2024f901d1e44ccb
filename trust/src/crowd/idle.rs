use std::io::IoSlice;
use std::net::SocketAddr;

use rdma_conn::{Connect, ConnectionId, Descriptors, Stream};

use conformance::client::{Failure, RespClient};
use intercept::Intercepted;

use super::serving::{Objects, beside};
use super::{Crowd, Face, PATIENCE, hosts, options};

/// What each client does before it is idle.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// How many clients there are.
    pub connections: usize,
    /// Length of a receive window, in bytes.
    pub window: u32,
    /// Bytes that each client sends in one command and gets in one reply.
    pub bytes: usize,
}

/// What all clients hold together, on both sides, which run in this process.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Bytes of registered memory.
    pub registered: u64,
    /// Bytes of memory by the caller's measure; on the embedded fabric, with its model's.
    pub memory: u64,
}

impl Kept {
    /// Returns the memory that is not registered.
    pub const fn beside(&self) -> u64 {
        self.memory.saturating_sub(self.registered)
    }

    const fn since(self, before: Self) -> Self {
        let registered = self.registered.saturating_sub(before.registered);
        Self { registered, memory: self.memory.saturating_sub(before.memory) }
    }
}

/// Measures a server on a fabric in this process: what its clients hold once connected, and after
/// the exchange. `memory` returns the process's current memory.
///
/// # Errors
/// A connection failed, or a reply was wrong.
pub fn idle_on_softsim(face: Face, exchange: Exchange, memory: fn() -> u64) -> Result<[Kept; 2], Failure> {
    let (ours, theirs, address) = hosts();
    idle(face, exchange, &ours, &theirs, address, memory)
}

/// Returns the resident memory of this process, in bytes; 0 if the system does not report it.
pub fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) * 1024
}

pub(super) fn idle<B: Descriptors>(
    face: Face,
    exchange: Exchange,
    ours: &B,
    theirs: &B,
    address: SocketAddr,
    memory: fn() -> u64,
) -> Result<[Kept; 2], Failure> {
    let objects = Objects::<B>::default();
    let counted = |backend: &B| Intercepted::by(backend.clone(), objects.clone());
    beside(face, counted(ours), (address, options(exchange.window)), |at| {
        let now = || Kept { registered: objects.registered_bytes(), memory: memory() };
        among(exchange, &counted(theirs), at, now)
    })
}

fn among<B: Descriptors>(
    exchange: Exchange,
    backend: &B,
    address: SocketAddr,
    now: impl Fn() -> Kept,
) -> Result<[Kept; 2], Failure> {
    let value = vec![b'x'; exchange.bytes];
    let mut into = vec![0; 256 << 10];
    // It stays connected, so that its values exist before the first measurement.
    let mut first = Crowd::gather(backend, address, 1, exchange.window)?;
    first.exchange(&value, &mut into)?;
    let mut last = RespClient::new(Stream::connect_with(backend, address, &Connect::default())?);
    rest(&mut last)?;
    let before = now();
    let mut crowd = Crowd::gather(backend, address, exchange.connections, exchange.window)?;
    rest(&mut last)?;
    let connected = now();
    crowd.exchange(&value, &mut into)?;
    rest(&mut last)?;
    Ok([connected.since(before), now().since(before)])
}

/// Waits until the server, which has one thread, has finished its work before this request.
fn rest<B: Descriptors>(client: &mut RespClient<Stream<B>>) -> Result<(), Failure> {
    client.send(&[b"PING"])?;
    client.expect("PONG")
}

impl<B: Descriptors> Crowd<B> {
    fn exchange(&mut self, value: &[u8], into: &mut [u8]) -> Result<(), Failure> {
        let head = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n", value.len());
        let reply = format!("${}\r\n", value.len()).len() + value.len() + 2;
        for id in self.members.clone() {
            for part in [head.as_bytes(), value, b"\r\n"] {
                self.send(id, part)?;
            }
            self.receive(id, "+OK\r\n".len(), into)?;
            self.send(id, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")?;
            self.receive(id, reply, into)?;
        }
        Ok(())
    }

    fn send(&mut self, id: ConnectionId, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            match self.endpoint.write(id, &[IoSlice::new(bytes)])? {
                Some(written) => bytes = bytes.get(written..).unwrap_or_default(),
                None => self.turn(PATIENCE)?,
            }
        }
        Ok(())
    }

    fn receive(&mut self, id: ConnectionId, mut left: usize, into: &mut [u8]) -> Result<(), Failure> {
        while left > 0 {
            let most = left.min(into.len());
            match self.endpoint.read(id, &mut into[..most])? {
                Some(0) => return Err(Failure::wrong("the server has left")),
                Some(read) => left -= read,
                None => self.turn(PATIENCE)?,
            }
        }
        Ok(())
    }
}
