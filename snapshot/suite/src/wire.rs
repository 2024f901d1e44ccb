//! Frames and handshake codes of the snapshot protocol, written from `spec/snapshot.md` alone.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use rdma_conn::{Descriptors, Stream};
use sha2::Sha256;

use conformance::client::Failure;

pub(super) mod kind {
    pub(crate) const HELLO: u8 = 1;
    pub(crate) const CHALLENGE: u8 = 2;
    pub(crate) const PROOF: u8 = 3;
    pub(crate) const WELCOME: u8 = 4;
    pub(crate) const CHUNKS: u8 = 5;
    pub(crate) const MAPPING: u8 = 6;
    pub(crate) const MARK: u8 = 7;
    pub(crate) const END: u8 = 8;
    pub(crate) const ALIVE: u8 = 9;
    pub(crate) const PROGRESS: u8 = 10;
    pub(crate) const DONE: u8 = 11;
    pub(crate) const REFUSED: u8 = 12;
}

pub(super) const MAGIC: &[u8; 8] = b"VRSNAP\r\n";

pub(super) const VERSION: u16 = 2;

/// Bytes of a data area of the seed's table.
pub(super) const AREA: usize = 4 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) payload: Vec<u8>,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            kind::HELLO => "Hello",
            kind::CHALLENGE => "Challenge",
            kind::PROOF => "Proof",
            kind::WELCOME => "Welcome",
            kind::CHUNKS => "Chunks",
            kind::MAPPING => "Mapping",
            kind::MARK => "Mark",
            kind::END => "End",
            kind::ALIVE => "Alive",
            kind::PROGRESS => "Progress",
            kind::DONE => "Done",
            kind::REFUSED => "Refused",
            _ => "a frame of no kind that there is",
        };
        write!(f, "{name} ({}) with {} bytes", self.kind, self.payload.len())
    }
}

impl Frame {
    pub(super) fn new(kind: u8, parts: &[&[u8]]) -> Self {
        Self { kind, payload: parts.concat() }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let length = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        [&length.to_be_bytes()[..], &[self.kind, 0, 0, 0], &self.payload].concat()
    }

    /// Returns the bytes of the payload from `at`, or zeros beyond its end.
    pub(super) fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        let bytes = self.payload.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().unwrap_or([0; N])
    }

    pub(super) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.field(at))
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.field(at))
    }

    pub(super) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.field(at))
    }

    pub(super) fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.payload.get_mut(at..at.saturating_add(bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.payload.as_chunks().0.iter().map(Entry::read).collect()
    }

    /// Takes the first frame of `bytes`, if complete (VS-WIRE-002).
    fn take(bytes: &mut Vec<u8>) -> Result<Option<Self>, Failure> {
        let Some(&[a, b, c, d, kind, ..]) = bytes.first_chunk::<8>() else { return Ok(None) };
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        let is_possible = match kind {
            kind::HELLO => length == 72,
            kind::CHALLENGE => length == 64,
            kind::PROOF => length == 56,
            kind::WELCOME => length == 100,
            kind::CHUNKS => length > 0 && length <= 32_768 && length.is_multiple_of(64),
            kind::MAPPING => length == 24,
            kind::MARK => length == 48,
            kind::END | kind::PROGRESS => length == 8,
            kind::ALIVE | kind::DONE => length == 0,
            kind::REFUSED => length == 4,
            _ => false,
        };
        if !is_possible {
            return Err(Failure::wrong(format!("VS-WIRE-002: a frame of kind {kind} with {length} bytes")));
        }
        let Some(payload) = bytes.get(8..8 + length) else { return Ok(None) };
        let frame = Self { kind, payload: payload.to_vec() };
        bytes.drain(..8 + length);
        Ok(Some(frame))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) index: u64,
    pub(super) address: u64,
    pub(super) rkey: u32,
    pub(super) length: u32,
    pub(super) digest: [u8; 32],
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, address, rkey, length, .. } = self;
        write!(f, "index {index}, {length} bytes at {address:#x}, rkey {rkey:#x}")
    }
}

impl Entry {
    fn read(bytes: &[u8; 64]) -> Self {
        let frame = Frame::new(kind::CHUNKS, &[bytes]);
        Self {
            index: frame.u64(0),
            address: frame.u64(8),
            rkey: frame.u32(16),
            length: frame.u32(20),
            digest: frame.field(32),
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let numbers = [self.rkey, self.length, 0, 0].map(u32::to_be_bytes).concat();
        [&self.index.to_be_bytes()[..], &self.address.to_be_bytes(), &numbers, &self.digest].concat()
    }
}

pub(super) fn digest(bytes: &[u8]) -> [u8; 32] {
    blake3::hash(bytes).into()
}

pub(super) fn digest_of_chunks<'a>(chunks: impl IntoIterator<Item = &'a [u8; 32]>) -> [u8; 32] {
    let context = "valkey-rdma snapshot version 2: a snapshot by the digests of its chunks";
    let mut hasher = blake3::Hasher::new_derive_key(context);
    for chunk in chunks {
        hasher.update(chunk);
    }
    hasher.finalize().into()
}

/// The input of both sides' codes, besides the address in Proof.
#[derive(Clone, Debug, Default)]
pub(super) struct Handshake {
    pub(super) reader_nonce: [u8; 32],
    pub(super) publisher_nonce: [u8; 32],
    pub(super) snapshot: [u8; 16],
    pub(super) data_port: [u8; 2],
}

impl Handshake {
    pub(super) fn note(&mut self, frame: &Frame) {
        if frame.kind == kind::HELLO {
            self.reader_nonce = frame.field(40);
        } else if frame.kind == kind::CHALLENGE {
            self.data_port = frame.field(10);
            self.snapshot = frame.field(16);
            self.publisher_nonce = frame.field(32);
        }
    }

    pub(super) fn readers(&self, secret: &[u8], address: &[u8; 18]) -> [u8; 32] {
        self.code(secret, b'R', address)
    }

    pub(super) fn publishers(&self, secret: &[u8]) -> [u8; 32] {
        self.code(secret, b'P', &[])
    }

    fn code(&self, secret: &[u8], role: u8, address: &[u8]) -> [u8; 32] {
        let Ok(mac) = Hmac::<Sha256>::new_from_slice(secret) else {
            unreachable!("an HMAC takes keys of any length")
        };
        let mac = mac.chain_update([role]).chain_update(self.reader_nonce).chain_update(self.publisher_nonce);
        let mac = mac.chain_update(self.snapshot).chain_update(self.data_port).chain_update(address);
        mac.finalize().into_bytes().into()
    }
}

pub(super) fn proof_address(address: SocketAddr) -> [u8; 18] {
    let ip = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut bytes = [0; 18];
    let (first, last) = bytes.split_at_mut(16);
    first.copy_from_slice(&ip.octets());
    last.copy_from_slice(&address.port().to_be_bytes());
    bytes
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Frame(Frame),
    /// The other side ended the stream, or it was lost.
    End,
    Silence,
}

impl fmt::Display for Heard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Frame(frame) => frame.fmt(f),
            Self::End => f.write_str("the end of the stream"),
            Self::Silence => f.write_str("nothing in time"),
        }
    }
}

pub(super) struct Talk<B: Descriptors> {
    stream: Stream<B>,
    inbox: Vec<u8>,
}

impl<B: Descriptors> Talk<B> {
    pub(super) fn new(stream: Stream<B>, patience: Duration) -> Self {
        let mut stream = stream;
        stream.set_write_timeout(Some(patience));
        Self { stream, inbox: Vec::new() }
    }

    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), Failure> {
        self.send_bytes(&frame.bytes())
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream.write_all(bytes)?;
        Ok(self.stream.flush()?)
    }

    /// Ends the stream. The peer need not read.
    pub(super) fn end(&mut self) {
        let _gone = self.stream.close(Duration::from_millis(100));
    }

    /// Takes received bytes that are no frame.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.inbox)
    }

    /// Listens for at most `patience`, until `take` returns something.
    pub(super) fn until<T>(
        &mut self,
        patience: Duration,
        mut take: impl FnMut(Heard) -> Result<Option<T>, Failure>,
    ) -> Result<T, Failure> {
        let by = Instant::now() + patience;
        loop {
            let heard = self.listen(by.saturating_duration_since(Instant::now()))?;
            if let Some(taken) = take(heard)? {
                return Ok(taken);
            }
        }
    }

    /// Waits until the other side ends the stream, whatever it says before.
    pub(super) fn ends(&mut self, patience: Duration) -> Result<(), Failure> {
        self.until(patience, |heard| match heard {
            Heard::End => Ok(Some(())),
            Heard::Silence => Err(Failure::wrong("the session does not end")),
            Heard::Frame(_) => Ok(None),
        })
    }

    pub(super) fn listen(&mut self, patience: Duration) -> Result<Heard, Failure> {
        let by = Instant::now() + patience;
        loop {
            if let Some(frame) = Frame::take(&mut self.inbox)? {
                return Ok(Heard::Frame(frame));
            }
            let left = by.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Heard::Silence);
            }
            self.stream.set_read_timeout(Some(left));
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(Heard::End),
                Ok(count) => self.inbox.extend_from_slice(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(Heard::Silence),
                Err(_) => return Ok(Heard::End),
            }
        }
    }
}
