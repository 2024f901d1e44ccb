//! The frames of a control stream between a reader and a publisher. Chunks are READ, not sent.
//!
//! A frame is a header of 8 bytes and a payload. Integers are big-endian. Reserved bytes are zero
//! when sent and ignored when received (VS-WIRE-001, VS-WIRE-002). Every kind but [`Frame::Chunks`]
//! has one length.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use zerocopy::byteorder::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a first frame. They identify the protocol.
pub const MAGIC: [u8; 8] = *b"VRSNAP\r\n";

/// The version of this protocol. Both sides must have the same (VS-WIRE-003).
pub const VERSION: u16 = 2;

/// Bytes of a frame's header.
pub const HEADER: usize = 8;

/// The most entries in one frame (VS-TABLE-005).
pub const MOST_ENTRIES: usize = 512;

/// The most bytes of a payload.
pub const MOST_PAYLOAD: usize = MOST_ENTRIES * size_of::<Entry>();

/// The name of a snapshot: random, drawn again for each (VS-TABLE-001).
pub type SnapshotId = [u8; 16];

/// The name of a reader: random, and the same in all of its sessions (VS-READ-006).
pub type ReaderId = [u8; 16];

/// A number used once.
pub type Nonce = [u8; 32];

/// A message authentication code or a digest.
pub type Digest = [u8; 32];

/// One chunk of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// Its index in the table, from 0.
    pub index: U64,
    /// The address of its first byte in the publisher's memory.
    pub address: U64,
    /// The key of that memory.
    pub rkey: U32,
    /// Its length in bytes.
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
    /// The snapshot that the reader has a part of; zero for any.
    pub snapshot: SnapshotId,
    /// The first chunk that the reader does not have.
    pub first: U64,
    /// Drawn by the reader. It begins with the reader's name.
    pub nonce: Nonce,
}

impl Hello {
    /// Returns the reader's name.
    pub(crate) fn reader(&self) -> ReaderId {
        self.nonce.first_chunk().copied().unwrap_or_default()
    }
}

/// The publisher's answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Challenge {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// The port of the connection for READs.
    pub data_port: U16,
    /// Reserved.
    pub reserved: [u8; 4],
    /// The publisher's snapshot.
    pub snapshot: SnapshotId,
    /// Drawn by the publisher.
    pub nonce: Nonce,
}

/// The reader proves that it has the secret, and announces its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Proof {
    /// The local address of its connection for READs: IPv6, or IPv4 mapped into it.
    pub address: [u8; 16],
    /// Its port.
    pub port: U16,
    /// Reserved.
    pub reserved: [u8; 6],
    /// See [`crate::auth`].
    pub code: Digest,
}

/// The publisher proves that it has the secret, and describes its snapshot.
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
    /// The longest chunk.
    pub chunk_size: U32,
    /// How long the publisher keeps chunks for a silent reader, in milliseconds.
    pub lease: U32,
    /// Bytes of the whole snapshot, if the publisher knows. Only for showing progress. 0: unknown.
    pub total: U64,
    /// For an RDB from a primary, the id of its replication history, otherwise zeros.
    pub history: [u8; 40],
    /// The snapshot's offset in that history.
    pub offset: U64,
}

/// The seed's table, in one piece of memory: `areas` addresses of 8 bytes, then as many data areas
/// of 4 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mapping {
    /// The first byte of the address area.
    pub address: U64,
    /// The key of the whole table.
    pub rkey: U32,
    /// The number of addresses, and of data areas.
    pub areas: U32,
    /// Bytes in the data areas; the last area may have fewer than 4 MiB.
    pub bytes: U64,
}

/// The snapshot ends before chunk `chunks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Mark {
    /// The number of its chunks.
    pub chunks: U64,
    /// Their bytes.
    pub bytes: U64,
    /// The digest of its chunks' or data areas' digests, by [`crate::digest::Whole`].
    pub digest: Digest,
}

/// The reader's progress, which renews its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Progress {
    /// Chunks that the reader has verified.
    pub chunks: U64,
}

/// The table ends before chunk `chunks`. Nothing follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct End {
    /// The number of all chunks.
    pub chunks: U64,
}

/// The publisher ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refused {
    /// See [`Reason`].
    pub reason: U32,
}

/// The layout of a table.
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
    /// An RDB file, possibly followed by the commands that a primary has sent its replicas since.
    Rdb,
}

/// Why a publisher ends a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The reader has another version of the protocol.
    Version,
    /// The reader has not proven that it has the secret.
    Secret,
    /// The publisher does not have the snapshot that the reader has a part of.
    Snapshot,
    /// The publisher has its maximum of readers.
    Full,
    /// The snapshot is withdrawn.
    Withdrawn,
    /// The reader was silent for longer than its lease.
    Lease,
    /// The reader broke the protocol.
    Misbehaved,
    /// The snapshot failed, and no more of it will come.
    Failed,
    /// The publisher lacks the resources for the reader's connection.
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
    /// Returns the reason with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        let known = (number as usize).checked_sub(1).and_then(|at| REASONS.get(at));
        known.copied().unwrap_or(Self::Unknown(number))
    }

    /// Returns its number, from 1.
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
    /// Reader: requests a snapshot.
    Hello(Hello),
    /// Publisher: its snapshot, and what to prove.
    Challenge(Challenge),
    /// Reader: the proof.
    Proof(Proof),
    /// Publisher: its own proof, and its offer.
    Welcome(Welcome),
    /// Publisher: more chunks, at least one.
    Chunks(Vec<Entry>),
    /// Publisher: the place of the seed's table.
    Mapping(Mapping),
    /// Publisher: the snapshot is complete.
    Mark(Mark),
    /// Publisher: the table is complete.
    End(End),
    /// Publisher: alive, without news.
    Alive,
    /// Reader: its progress.
    Progress(Progress),
    /// Reader: has everything and needs nothing more.
    Done,
    /// Publisher: ends the session, with the reason.
    Refused(Refused),
}

/// The reason for which bytes are no frame.
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
            /// Returns the number of its kind.
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

            /// Returns the payload's length of this kind, if it is fixed.
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

    /// Returns the frame at the beginning of `bytes`, and its length; `None` if more bytes are
    /// needed.
    ///
    /// # Errors
    /// They do not begin a frame. A header is checked before any memory is allocated for it
    /// (VS-WIRE-002).
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
    /// Returns the address that it names.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.address).to_canonical(), self.port.get())
    }
}

/// Encodes an address for [`Proof::address`].
#[must_use]
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Layout {
    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }

    /// Returns the layout with this number.
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
    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }

    /// Returns the content with this number.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Bytes),
            2 => Some(Self::Rdb),
            _ => None,
        }
    }
}
