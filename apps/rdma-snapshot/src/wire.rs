//! The frames of a control stream: what a reader and a publisher tell each other besides the bytes that are READ.
//!
//! A frame is a header of 8 bytes and a payload. Integers are big-endian, reserved bytes are zero when sent and not looked at when
//! received (VS-WIRE-001, VS-WIRE-002). Every kind but [`Frame::Chunks`] has one length.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a first frame, by which a peer of another protocol is recognised.
pub const MAGIC: [u8; 8] = *b"VRSNAP\r\n";

/// The version of this protocol. Both sides must have the same (VS-WIRE-003).
pub const VERSION: u16 = 2;

/// Bytes of a frame's header.
pub const HEADER: usize = 8;

/// Entries in one frame, at most (VS-TABLE-005).
pub const MOST_ENTRIES: usize = 512;

/// Bytes of a payload, at most.
pub const MOST_PAYLOAD: usize = MOST_ENTRIES * size_of::<Entry>();

/// Names a snapshot: random, drawn anew for each (VS-TABLE-001).
pub type SnapshotId = [u8; 16];

/// A number used once.
pub type Nonce = [u8; 32];

/// A message authentication code or a digest.
pub type Digest = [u8; 32];

/// One chunk of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// Its place in the table, from 0.
    pub index: U64,
    /// Where its first byte is in the publisher's memory.
    pub address: U64,
    /// The key of that memory.
    pub rkey: U32,
    /// How many bytes it has.
    pub length: U32,
    /// Reserved.
    pub reserved: [u8; 8],
    /// BLAKE3 of its bytes.
    pub digest: Digest,
}

/// The reader's first frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// Reserved.
    pub reserved: [u8; 6],
    /// The snapshot that it has a part of; zero for whichever there is.
    pub snapshot: SnapshotId,
    /// The first chunk that it does not have.
    pub first: U64,
    /// Drawn by the reader.
    pub nonce: Nonce,
}

/// The publisher's answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Challenge {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// Where the publisher accepts the connection that is for READs.
    pub data_port: U16,
    /// Reserved.
    pub reserved: [u8; 4],
    /// The snapshot that there is.
    pub snapshot: SnapshotId,
    /// Drawn by the publisher.
    pub nonce: Nonce,
}

/// The reader proves that it has the secret, and says where it will connect from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Proof {
    /// The local address of its connection for READs: IPv6, or IPv4 mapped into it.
    pub address: [u8; 16],
    /// And the port.
    pub port: U16,
    /// Reserved.
    pub reserved: [u8; 6],
    /// See [`crate::auth`].
    pub code: Digest,
}

/// The publisher proves the same, and says what there is to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// See [`crate::auth`].
    pub code: Digest,
    /// See [`Layout`].
    pub layout: u8,
    /// See [`Content`].
    pub content: u8,
    /// Reserved.
    pub reserved: [u8; 2],
    /// No chunk is longer.
    pub chunk_size: U32,
    /// For how long the publisher keeps what a reader says nothing about, in milliseconds.
    pub lease: U32,
    /// Bytes that the snapshot will have, as far as the publisher knows: for showing progress, and for nothing else. 0: unknown.
    pub total: U64,
    /// Of an RDB from a primary: the id of its replication history, otherwise zeros.
    pub history: [u8; 40],
    /// And how far into it the snapshot is.
    pub offset: U64,
}

/// The seed's table, in one piece of memory: `areas` addresses of 8 bytes, and behind them as many data areas of 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mapping {
    /// The first byte of the address area.
    pub address: U64,
    /// The key of the whole table.
    pub rkey: U32,
    /// Addresses, and data areas.
    pub areas: U32,
    /// Bytes in the data areas; the last area may have fewer than 4 MiB.
    pub bytes: U64,
}

/// The snapshot ends before chunk `chunks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mark {
    /// Its chunks.
    pub chunks: U64,
    /// Their bytes.
    pub bytes: U64,
    /// What [`crate::digest::Whole`] makes of the digests of its chunks, or of its data areas.
    pub digest: Digest,
}

/// How far the reader is: what renews its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Progress {
    /// Chunks that it has and has verified.
    pub chunks: U64,
}

/// The table ends before chunk `chunks`: nothing will follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct End {
    /// All chunks.
    pub chunks: U64,
}

/// The publisher ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refused {
    /// See [`Reason`].
    pub reason: U32,
}

/// How a table is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Chunks that are announced one after another.
    Chunks,
    /// The seed's: one [`Mapping`].
    Rcp,
}

/// The kind of a snapshot's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything.
    Bytes,
    /// An RDB file, and behind it, if any, the commands that a primary sent its replicas since.
    Rdb,
}

/// Why a publisher ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The reader has another version of the protocol.
    Version,
    /// The reader has not proven that it has the secret.
    Secret,
    /// The snapshot that the reader has a part of is not here.
    Snapshot,
    /// There are as many readers as may be.
    Full,
    /// The snapshot is withdrawn.
    Withdrawn,
    /// The reader did not say anything for as long as its lease.
    Lease,
    /// The reader broke the protocol.
    Misbehaved,
    /// The snapshot failed, and no more of it will come.
    Failed,
    /// The publisher could not give the reader what its connection takes.
    Resources,
    /// A number that this version does not know.
    Unknown(u32),
}

const REASONS: [Reason; 9] = [
    Reason::Version,
    Reason::Secret,
    Reason::Snapshot,
    Reason::Full,
    Reason::Withdrawn,
    Reason::Lease,
    Reason::Misbehaved,
    Reason::Failed,
    Reason::Resources,
];

impl Reason {
    /// The reason of a number.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        let known = (number as usize).checked_sub(1).and_then(|at| REASONS.get(at));
        known.copied().unwrap_or(Self::Unknown(number))
    }

    /// Its number, from 1.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Unknown(number) => number,
            known => REASONS.iter().position(|one| *one == known).map_or(0, |at| at as u32 + 1),
        }
    }

    /// Returns the meaning of the reason, and what to do about it.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Version => "it has another version of the protocol: use one program at both ends",
            Self::Secret => "the secrets of both ends differ",
            Self::Snapshot => "it does not have the snapshot that was begun: begin again",
            Self::Full => "it has as many readers as it may: raise its limit, or pull from a replica",
            Self::Withdrawn => "the snapshot was withdrawn",
            Self::Lease => "this side was silent for longer than its lease",
            Self::Misbehaved => "it says that this side broke the protocol",
            Self::Failed => "what made the snapshot failed: look at its messages",
            Self::Resources => "it has no resources left for another reader",
            Self::Unknown(_) => "it gave a reason that this version does not know",
        }
    }
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Reader: asks for a snapshot.
    Hello(Hello),
    /// Publisher: which there is, and what to prove.
    Challenge(Challenge),
    /// Reader: the proof.
    Proof(Proof),
    /// Publisher: its own, and what there is to read.
    Welcome(Welcome),
    /// Publisher: more chunks can be read. At least one.
    Chunks(Vec<Entry>),
    /// Publisher: where the seed's table is.
    Mapping(Mapping),
    /// Publisher: the snapshot is complete.
    Mark(Mark),
    /// Publisher: the table is complete.
    End(End),
    /// Publisher: it is there, and has nothing new.
    Alive,
    /// Reader: how far it is.
    Progress(Progress),
    /// Reader: it has everything and needs nothing any more.
    Done,
    /// Publisher: the session is over, and why.
    Refused(Refused),
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The header names a kind that does not exist, or a length that this kind cannot have.
    #[error("a frame of kind {kind} cannot have {length} bytes")]
    Header {
        /// The kind.
        kind: u8,
        /// The length of its payload.
        length: u32,
    },
    /// The first frame does not begin with [`MAGIC`].
    #[error("the peer speaks another protocol")]
    Magic,
}

macro_rules! kinds {
    ($($number:literal $name:ident;)*) => {
        impl Frame {
            /// The number of its kind.
            const fn kind(&self) -> u8 {
                match self { $(Self::$name(_) => $number,)* Self::Chunks(_) => 5, Self::Alive => 9, Self::Done => 11 }
            }

            fn payload(&self) -> &[u8] {
                match self {
                    $(Self::$name(payload) => payload.as_bytes(),)*
                    Self::Chunks(entries) => entries.as_bytes(),
                    Self::Alive | Self::Done => &[],
                }
            }

            /// Bytes of a payload of this kind, if it has one length.
            const fn length(kind: u8) -> Option<usize> {
                match kind { $($number => Some(size_of::<$name>()),)* 9 | 11 => Some(0), _ => None }
            }

            fn parse(kind: u8, payload: &[u8]) -> Option<Self> {
                Some(match kind {
                    $($number => Self::$name($name::read_from_bytes(payload).ok()?),)*
                    5 => {
                        let (entries, rest) = payload.as_chunks::<{ size_of::<Entry>() }>();
                        if !rest.is_empty() || entries.is_empty() {
                            return None;
                        }
                        Self::Chunks(entries.iter().filter_map(|entry| Entry::read_from_bytes(entry).ok()).collect())
                    }
                    9 if payload.is_empty() => Self::Alive,
                    11 if payload.is_empty() => Self::Done,
                    _ => return None,
                })
            }
        }
    };
}

kinds! {
    1 Hello;
    2 Challenge;
    3 Proof;
    4 Welcome;
    6 Mapping;
    7 Mark;
    8 End;
    10 Progress;
    12 Refused;
}

impl Frame {
    /// Appends the frame to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let payload = self.payload();
        out.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes());
        out.extend_from_slice(&[self.kind(), 0, 0, 0]);
        out.extend_from_slice(payload);
    }

    /// The frame that `bytes` begin with, and how many of them it takes; `None` if more are needed.
    ///
    /// # Errors
    /// They are the beginning of no frame. What a header claims is looked at before anything is kept for it (VS-WIRE-002).
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [a, b, c, d, kind, ..] = *header;
        let length = u32::from_be_bytes([a, b, c, d]);
        let malformed = Malformed::Header { kind, length };
        let size = length as usize;
        let possible = match Self::length(kind) {
            Some(one) => size == one,
            None => kind == 5 && size <= MOST_PAYLOAD && size > 0 && size.is_multiple_of(size_of::<Entry>()),
        };
        if !possible {
            return Err(malformed);
        }
        let Some(payload) = rest.get(..size) else { return Ok(None) };
        let frame = Self::parse(kind, payload).ok_or(malformed)?;
        let magic = match &frame {
            Self::Hello(hello) => hello.magic == MAGIC,
            Self::Challenge(challenge) => challenge.magic == MAGIC,
            _ => true,
        };
        if magic { Ok(Some((frame, HEADER.saturating_add(size)))) } else { Err(Malformed::Magic) }
    }
}

impl Proof {
    /// The address that it names.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.address).to_canonical(), self.port.get())
    }
}

/// An address as [`Proof::address`] has it.
#[must_use]
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Layout {
    /// Its number.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Chunks => 1,
            Self::Rcp => 2,
        }
    }

    /// The layout of a number.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Chunks),
            2 => Some(Self::Rcp),
            _ => None,
        }
    }
}

impl Content {
    /// Its number.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Bytes => 1,
            Self::Rdb => 2,
        }
    }

    /// The content of a number.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Bytes),
            2 => Some(Self::Rdb),
            _ => None,
        }
    }
}
