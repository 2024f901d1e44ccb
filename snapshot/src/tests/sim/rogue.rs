//! A rogue, neither a publisher nor a reader, which sends arbitrary frames to either.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::Backend as _;
use rdma_backend::time::Instant;
use rdma_conn::{ConnectionId, Endpoint, Event};
use rdma_softsim::{Random, SoftSim};
use zerocopy::FromBytes;

use super::scenario::ORIGIN;
use super::simulation::PORT;
use super::{SECRET, address, is_readable};
use crate::Secret;
use crate::channel::{limits, options};
use crate::wire::{
    Challenge, End, Entry, Frame, Hello, MAGIC, Mapping, Mark, Progress, Proof, Refused, VERSION, Welcome,
};

pub(super) struct Rogue {
    endpoint: Endpoint<SoftSim>,
    backend: SoftSim,
    random: Random,
    reads: bool,
    /// Connections, the incomplete frame of each, and how many frames it will still send.
    connections: Vec<Connection>,
    next_at: Option<Instant>,
}

struct Connection {
    id: ConnectionId,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    left: u64,
    hello: Hello,
}

impl Rogue {
    pub(super) fn reader(backend: &SoftSim, seed: u64) -> Self {
        let mut rogue = Self::new(backend, seed, true);
        let publisher = SocketAddr::new(address(ORIGIN), PORT);
        for _ in 0..rogue.random.within(1..=3) {
            // A fault means one rogue less.
            let _struck = rogue.endpoint.connect(publisher, None, Duration::from_secs(5), options());
        }
        rogue
    }

    pub(super) fn publisher(backend: &SoftSim, host: u8, seed: u64) -> Self {
        let mut rogue = Self::new(backend, seed, false);
        let _struck = rogue.endpoint.listen(SocketAddr::new(address(host), PORT), options());
        rogue
    }

    fn new(backend: &SoftSim, seed: u64, reads: bool) -> Self {
        Self {
            endpoint: Endpoint::new(backend, limits(8)).expect("a device"),
            backend: backend.clone(),
            random: Random::new(seed ^ 0x5eed),
            reads,
            connections: Vec::new(),
            next_at: None,
        }
    }

    pub(super) fn is_reader(&self) -> bool {
        self.reads
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.endpoint.next_timeout().into_iter().chain(self.next_at).min()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        use std::os::fd::AsFd;
        self.next_timeout().is_some_and(|at| at <= now) || is_readable(&[self.endpoint.as_fd()])
    }

    pub(super) fn turn(&mut self) {
        let _device = self.endpoint.progress();
        while let Some(event) = self.endpoint.next_event() {
            if let Event::Opened { id, .. } = event {
                let hello = self.hello();
                let left = self.random.below(12);
                self.connections.push(Connection { id, inbox: Vec::new(), outbox: Vec::new(), left, hello });
            }
        }
        let mut connections = std::mem::take(&mut self.connections);
        for connection in &mut connections {
            self.speak(connection);
        }
        let says = connections.iter().any(|connection| connection.left > 0);
        self.connections = connections;
        let now = self.backend.now();
        if self.next_at.is_none_or(|at| at <= now) {
            self.next_at = says.then(|| now.after(self.random.duration(Duration::from_millis(2))));
        }
    }

    /// Reads a little, and sends a frame that may be right.
    fn speak(&mut self, connection: &mut Connection) {
        let mut bytes = [0; 1024];
        while let Ok(Some(count @ 1..)) = self.endpoint.read(connection.id, &mut bytes) {
            connection.inbox.extend_from_slice(&bytes[..count]);
        }
        if connection.left > 0 && self.endpoint.is_open(connection.id) {
            connection.left -= 1;
            if self.random.chance(1, 8) {
                let count = self.random.below(100);
                connection.outbox.extend((0..count).map(|_| self.random.next() as u8));
            } else {
                self.frame(connection).encode(&mut connection.outbox);
            }
        }
        if let Ok(Some(count)) = self.endpoint.write(connection.id, &[IoSlice::new(&connection.outbox)]) {
            connection.outbox.drain(..count);
        }
    }

    fn any<T: FromBytes>(&mut self) -> T {
        let bytes: Vec<u8> = (0..size_of::<T>()).map(|_| self.random.next() as u8).collect();
        T::read_from_bytes(&bytes).unwrap_or_else(|_| unreachable!("as many bytes as it has"))
    }

    fn hello(&mut self) -> Hello {
        let snapshot = self.random.pick(&[[0; 16], [0; 16], [1; 16], [9; 16]]);
        let first = self.random.pick(&[0, 0, 1, 1000, u64::MAX]);
        Hello {
            magic: MAGIC,
            version: VERSION.into(),
            reserved: [0; 6],
            snapshot,
            first: first.into(),
            nonce: [5; 32],
        }
    }

    fn frame(&mut self, connection: &mut Connection) -> Frame {
        let theirs = Frame::decode(&connection.inbox).ok().flatten();
        if let Some((frame, taken)) = theirs {
            connection.inbox.drain(..taken);
            match frame {
                // It has the secret, like a reader that misbehaves later.
                Frame::Challenge(challenge) if self.random.chance(3, 4) => {
                    let mut proof = Proof {
                        address: crate::wire::mapped(address(9)),
                        port: 1.into(),
                        reserved: [0; 6],
                        code: [0; 32],
                    };
                    proof.code = Secret::new(SECRET).reader_code(&connection.hello, &challenge, &proof);
                    return Frame::Proof(proof);
                }
                Frame::Hello(hello) if self.random.chance(3, 4) => {
                    connection.hello = hello;
                    let snapshot = if hello.snapshot == [0; 16] { [7; 16] } else { hello.snapshot };
                    return Frame::Challenge(Challenge {
                        magic: MAGIC,
                        snapshot,
                        version: VERSION.into(),
                        data_port: 1.into(),
                        ..self.any()
                    });
                }
                _ => {}
            }
        }
        match self.random.below(14) {
            0..3 if self.reads => Frame::Hello(connection.hello),
            0..3 => Frame::Challenge(Challenge { magic: MAGIC, ..self.any() }),
            3 => Frame::Proof(self.any::<Proof>()),
            4 => Frame::Welcome(self.any::<Welcome>()),
            5 => Frame::Chunks(vec![self.any::<Entry>()]),
            6 => Frame::Mapping(self.any::<Mapping>()),
            7 => Frame::Mark(self.any::<Mark>()),
            8 => Frame::End(self.any::<End>()),
            9 => Frame::Alive,
            10 => Frame::Progress(self.any::<Progress>()),
            11 => Frame::Done,
            12 => Frame::Refused(self.any::<Refused>()),
            _ => Frame::Refused(Refused { reason: (self.random.below(10) as u32).into() }),
        }
    }
}
