//! Cases for publishers. The suite's side is a reader that is correct except for the case's point.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_backend::RemoteAddress;
use rdma_conn::{Connect, Descriptors, Options, Stream};
use suite::Case;

use super::data::{Data, Way};
use super::wire::{
    AREA, Entry, Frame, Handshake, Heard, MAGIC, Talk, VERSION, digest, digest_of_chunks, kind, proof_address,
};
use conformance::client::Failure;

/// A publisher under test.
pub struct Publisher<B: Descriptors> {
    /// The suite's backend.
    pub backend: B,
    /// Its address for control streams.
    pub address: SocketAddr,
    /// The secret that it requires.
    pub secret: Vec<u8>,
    /// How long it may take for anything that must happen.
    pub patience: Duration,
}

/// Bytes of one READ.
const PIECE: usize = 1 << 20;
/// How long the suite listens for frames that must not come.
const LISTENING: Duration = Duration::from_millis(300);
/// The bound of VS-TIME-001, in multiples of the patience.
const BOUNDED: u32 = 8;

/// Returns the cases. The first shows that there is something to test.
#[must_use]
pub fn cases<B: Descriptors>() -> Vec<Case<Publisher<B>>> {
    let case = |id, intent, requirements, run: fn(&Publisher<B>) -> Result<String, Failure>| {
        Case::new(id, intent, requirements, move |on: &Publisher<B>, _| run(on))
    };
    vec![
        case(
            "publisher.whole",
            "all of the snapshot: entries in order, digests and ends are right, and Done ends it",
            &[
                "VS-TABLE-002",
                "VS-TABLE-003",
                "VS-TABLE-006",
                "VS-READ-002",
                "VS-READ-004",
                "VS-RCP-001",
                "VS-WIRE-001",
            ],
            whole,
        ),
        case(
            "publisher.secret",
            "a reader without the secret is told nothing but Challenge and why",
            &["VS-AUTH-001"],
            |on| {
                let mut reader = Reader::meet(on)?;
                let challenge = reader.hello(VERSION, [0; 16], 0)?;
                let way = reader.way(&challenge)?;
                reader.prove(b"not the secret", way.local)?;
                reader.is_refused(2)
            },
        ),
        case(
            "publisher.stranger",
            "a connection for READs that no Proof has announced is not accepted",
            &["VS-AUTH-003", "VS-SEC-001"],
            |on| {
                let mut reader = Reader::meet(on)?;
                let challenge = reader.hello(VERSION, [0; 16], 0)?;
                match reader.way(&challenge)?.connect(1)? {
                    Ok(_) => Err(Failure::wrong("it accepted a stranger")),
                    Err(why) => Ok(why.into()),
                }
            },
        ),
        case(
            "publisher.names-late",
            "no memory is named before the connection for READs is there",
            &["VS-AUTH-003"],
            |on| {
                let mut reader = Reader::meet(on)?;
                let challenge = reader.hello(VERSION, [0; 16], 0)?;
                let way = reader.way(&challenge)?;
                reader.prove(&on.secret, way.local)?;
                reader.welcome()?;
                reader.talk.until(LISTENING, |heard| match heard {
                    Heard::Silence => Ok(Some(String::new())),
                    Heard::Frame(frame) if frame.kind == kind::ALIVE => Ok(None),
                    other => Err(Failure::wrong(format!("it said {other}"))),
                })
            },
        ),
        case("publisher.version", "a reader of another version is told so", &["VS-WIRE-003"], |on| {
            for version in [VERSION - 1, VERSION + 1] {
                let mut reader = Reader::meet(on)?;
                reader.say_hello(version, [0; 16], 0)?;
                reader.is_refused(1)?;
            }
            Ok(String::new())
        }),
        case(
            "publisher.no-frame",
            "a length that no frame can have, and a command of RESP, end the session",
            &["VS-WIRE-002", "VS-WIRE-003"],
            |on| {
                for bytes in [&b"\xff\xff\xff\xe0\x05\0\0\0"[..], b"*1\r\n$4\r\nPING\r\n"] {
                    let mut reader = Reader::meet(on)?;
                    reader.talk.send_bytes(bytes)?;
                    reader.is_refused(7)?;
                }
                Ok(String::new())
            },
        ),
        case(
            "publisher.out-of-order",
            "Progress in place of Hello ends the session",
            &["VS-WIRE-002", "VS-AUTH-001"],
            |on| {
                let mut reader = Reader::meet(on)?;
                reader.talk.send(&Frame::new(kind::PROGRESS, &[&[0; 8]]))?;
                reader.is_refused(7)
            },
        ),
        case(
            "publisher.other-snapshot",
            "a reader that has a part of another snapshot is told so",
            &["VS-TABLE-001"],
            |on| {
                let mut reader = Reader::meet(on)?;
                reader.say_hello(VERSION, [0xa5; 16], 1)?;
                reader.is_refused(3)
            },
        ),
        case(
            "publisher.resume",
            "entries begin with the first that the reader asks for",
            &["VS-READ-003", "VS-TABLE-002"],
            |on| {
                let mut reader = Reader::open(on, [0; 16], 0)?;
                let snapshot = reader.handshake.snapshot;
                if reader.is_mapping() {
                    return Ok("the seed's table has no entries".into());
                }
                reader.memory()?;
                let mut again = Reader::open(on, snapshot, 1)?;
                match again.frame()?.entries().first() {
                    Some(Entry { index: 1, .. }) => Ok(String::new()),
                    Some(other) => Err(Failure::wrong(format!("asked for chunk 1, it announced {other}"))),
                    None => Err(Failure::wrong("asked for chunk 1, it announced none")),
                }
            },
        ),
        case(
            "publisher.unchanged",
            "a later reader finds the bytes that an earlier one has read",
            &["VS-TABLE-004"],
            |on| {
                let mut first = Reader::open(on, [0; 16], 0)?;
                let before = first.piece()?;
                let mut later = Reader::open(on, first.handshake.snapshot, 0)?;
                is_same(&before, &later.piece()?)
            },
        ),
        case(
            "publisher.write",
            "a WRITE to what was announced fails, and changes nothing",
            &["VS-TABLE-004", "VS-SEC-001"],
            |on| {
                let mut reader = Reader::open(on, [0; 16], 0)?;
                let before = reader.piece()?;
                let (at, _) = reader.memory()?;
                let written = reader.data()?.write(at, b"overwritten")?;
                let mut later = Reader::open(on, reader.handshake.snapshot, 0)?;
                is_same(&before, &later.piece()?)?;
                match written {
                    Ok(()) => Err(Failure::wrong("the WRITE succeeded")),
                    Err(status) => Ok(format!("{status:?}")),
                }
            },
        ),
        case(
            "publisher.depth",
            "a reader that asks for one READ at a time gets one",
            &["VS-READ-001"],
            |on| Reader::open(on, [0; 16], 0)?.piece().map(|_| String::new()),
        ),
        case(
            "publisher.lease",
            "the session of a reader that is silent ends, and its queue pair with it",
            &["VS-LEASE-001", "VS-TIME-001"],
            |on| {
                let mut reader = Reader::open(on, [0; 16], 0)?;
                let (at, _) = reader.memory()?;
                let lease = Duration::from_millis(reader.welcome.u32(40).into());
                if lease > BOUNDED * on.patience {
                    let told = format!("its lease of {lease:?} is too long to wait for: see --patience");
                    return Err(Failure::Environment(told));
                }
                reader.is_refused_within(6, lease + on.patience)?;
                Ok(format!("{} after {lease:?}", reader.data()?.read_fails(at)?))
            },
        ),
        case(
            "publisher.claims",
            "a reader that claims chunks which were not announced is refused",
            &["VS-LEASE-003"],
            |on| {
                let mut reader = Reader::open(on, [0; 16], 0)?;
                reader.has(u64::MAX)?;
                reader.is_refused(7)
            },
        ),
        case(
            "publisher.says-nothing",
            "a peer that says nothing at all is not kept for ever",
            &["VS-TIME-001"],
            |on| Reader::meet(on)?.talk.ends(BOUNDED * on.patience).map(|()| String::new()),
        ),
    ]
}

fn is_same(before: &[u8], later: &[u8]) -> Result<String, Failure> {
    if before == later {
        Ok(format!("{} bytes", before.len()))
    } else {
        Err(Failure::wrong("its bytes have changed"))
    }
}

struct Reader<'a, B: Descriptors> {
    on: &'a Publisher<B>,
    talk: Talk<B>,
    handshake: Handshake,
    welcome: Frame,
    data: Option<Data<B>>,
    heard: Option<Frame>,
}

impl<'a, B: Descriptors> Reader<'a, B> {
    fn meet(on: &'a Publisher<B>) -> Result<Self, Failure> {
        let how = Connect::default().timeout(on.patience).options(Options::default());
        // A just started publisher may not listen yet.
        let by = Instant::now() + on.patience;
        let stream = loop {
            match Stream::connect_with(&on.backend, on.address, &how) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= by => return Err(Failure::connecting(error)),
                Err(_) => std::thread::sleep(LISTENING / 10),
            }
        };
        Ok(Self {
            on,
            talk: Talk::new(stream, on.patience),
            handshake: Handshake::default(),
            welcome: Frame::new(kind::WELCOME, &[]),
            data: None,
            heard: None,
        })
    }

    /// Performs the whole handshake and connects for READs, one at a time.
    fn open(on: &'a Publisher<B>, snapshot: [u8; 16], first: u64) -> Result<Self, Failure> {
        let mut reader = Self::meet(on)?;
        let challenge = reader.hello(VERSION, snapshot, first)?;
        let way = reader.way(&challenge)?;
        reader.prove(&on.secret, way.local)?;
        reader.welcome()?;
        let data = way.connect(1)?;
        reader.data = Some(data.map_err(|why| Failure::wrong(format!("no connection for READs: {why}")))?);
        Ok(reader)
    }

    fn say_hello(&mut self, version: u16, snapshot: [u8; 16], first: u64) -> Result<(), Failure> {
        let random = RandomState::new();
        let nonce: Vec<u8> = (0..4).flat_map(|part| random.hash_one(part).to_be_bytes()).collect();
        let hello = Frame::new(
            kind::HELLO,
            &[MAGIC, &version.to_be_bytes(), &[0; 6], &snapshot, &first.to_be_bytes(), &nonce],
        );
        self.handshake.note(&hello);
        self.talk.send(&hello)
    }

    fn hello(&mut self, version: u16, snapshot: [u8; 16], first: u64) -> Result<Frame, Failure> {
        self.say_hello(version, snapshot, first)?;
        let challenge = self.expect(kind::CHALLENGE)?;
        if !challenge.payload.starts_with(MAGIC) || challenge.u16(8) != VERSION {
            return Err(Failure::wrong(format!("its Challenge begins otherwise: {challenge:02x?}")));
        }
        self.handshake.note(&challenge);
        Ok(challenge)
    }

    fn way(&self, challenge: &Frame) -> Result<Way<B>, Failure> {
        let to = SocketAddr::new(self.on.address.ip(), challenge.u16(10));
        Way::find(&self.on.backend, to, PIECE, self.on.patience)
    }

    fn prove(&mut self, secret: &[u8], local: SocketAddr) -> Result<(), Failure> {
        let address = proof_address(local);
        let code = self.handshake.readers(secret, &address);
        self.talk.send(&Frame::new(kind::PROOF, &[&address, &[0; 6], &code]))
    }

    /// Takes Welcome, whose code must be right.
    fn welcome(&mut self) -> Result<(), Failure> {
        self.welcome = self.expect(kind::WELCOME)?;
        if self.welcome.field(0) != self.handshake.publishers(&self.on.secret) {
            return Err(Failure::wrong("the code in its Welcome is wrong"));
        }
        Ok(())
    }

    /// Takes the next frame other than Alive.
    fn frame(&mut self) -> Result<Frame, Failure> {
        self.talk.until(self.on.patience, |heard| match heard {
            Heard::Frame(frame) if frame.kind == kind::ALIVE => Ok(None),
            Heard::Frame(frame) => Ok(Some(frame)),
            Heard::End => Err(Failure::wrong("it ended the session")),
            Heard::Silence => Err(Failure::wrong("it says nothing but Alive")),
        })
    }

    fn expect(&mut self, wanted: u8) -> Result<Frame, Failure> {
        let frame = self.frame()?;
        if frame.kind == wanted {
            Ok(frame)
        } else {
            Err(Failure::wrong(format!("instead of a frame of kind {wanted} came {frame:02x?}")))
        }
    }

    fn is_refused(&mut self, reason: u32) -> Result<String, Failure> {
        self.is_refused_within(reason, self.on.patience)
    }

    /// Checks that the session ends with Refused for this reason, and announces no further memory.
    fn is_refused_within(&mut self, reason: u32, patience: Duration) -> Result<String, Failure> {
        let may_announce = self.data.is_some();
        self.talk.until(patience, |heard| match heard {
            Heard::Frame(frame) if frame.kind == kind::REFUSED && frame.u32(0) == reason => Ok(Some(())),
            Heard::Frame(frame) if may_announce && frame.kind != kind::REFUSED => Ok(None),
            Heard::Silence => Err(Failure::wrong("the session goes on")),
            other => Err(Failure::wrong(format!("not Refused for reason {reason}: {other:02x?}"))),
        })?;
        self.talk.ends(self.on.patience)?;
        Ok(format!("reason {reason}"))
    }

    fn data(&mut self) -> Result<&mut Data<B>, Failure> {
        self.data.as_mut().ok_or_else(|| Failure::Environment("nothing was connected".into()))
    }

    fn is_mapping(&self) -> bool {
        self.welcome.field::<1>(32) == [2]
    }

    /// Returns the first announced memory, a chunk or the first area of the table, and its length.
    fn memory(&mut self) -> Result<(RemoteAddress, usize), Failure> {
        let frame = match self.heard.take() {
            Some(frame) => frame,
            None => self.frame()?,
        };
        let named = match (frame.kind, frame.entries().first()) {
            (kind::CHUNKS, Some(entry)) => {
                (RemoteAddress { address: entry.address, rkey: entry.rkey }, entry.length as usize)
            }
            (kind::MAPPING, _) => {
                let area = frame.u64(0).wrapping_add(8 * u64::from(frame.u32(12)));
                let length = AREA.min(usize::try_from(frame.u64(16)).unwrap_or(AREA));
                (RemoteAddress { address: area, rkey: frame.u32(8) }, length)
            }
            _ => return Err(Failure::wrong(format!("it names no memory, but says {frame:02x?}"))),
        };
        self.heard = Some(frame);
        Ok(named)
    }

    fn piece(&mut self) -> Result<Vec<u8>, Failure> {
        let (at, length) = self.memory()?;
        self.fetch(at, length)
    }

    fn fetch(&mut self, from: RemoteAddress, length: usize) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let address = from.address.wrapping_add(bytes.len() as u64);
            let count = PIECE.min(length - bytes.len());
            let read = self.data()?.read(RemoteAddress { address, ..from }, count)?;
            bytes.extend(
                read.map_err(|status| Failure::wrong(format!("a READ of what it named: {status:?}")))?,
            );
        }
        Ok(bytes)
    }

    /// Reports progress, which renews the lease.
    fn has(&mut self, chunks: u64) -> Result<(), Failure> {
        self.talk.send(&Frame::new(kind::PROGRESS, &[&chunks.to_be_bytes()]))
    }

    fn chunk(&mut self, entry: &Entry, index: u64) -> Result<Vec<u8>, Failure> {
        let Entry { address, rkey, length, .. } = *entry;
        let is_possible = (1..=self.welcome.u32(36)).contains(&length)
            && address.checked_add(length.into()).is_some()
            && entry.index == index;
        if !is_possible {
            return Err(Failure::wrong(format!("chunk {index} cannot be as it announces it: {entry}")));
        }
        let bytes = self.fetch(RemoteAddress { address, rkey }, length as usize)?;
        if digest(&bytes) != entry.digest {
            return Err(Failure::wrong(format!("the digest of chunk {index} is wrong")));
        }
        self.has(index + 1)?;
        Ok(bytes)
    }

    /// Returns the areas of the seed's table, whose addresses must be the computed ones.
    fn areas(&mut self, mapping: &Frame) -> Result<Vec<Vec<u8>>, Failure> {
        let start = RemoteAddress { address: mapping.u64(0), rkey: mapping.u32(8) };
        let (areas, bytes) = (mapping.u32(12) as usize, mapping.u64(16) as usize);
        if areas != bytes.div_ceil(AREA) {
            return Err(Failure::wrong(format!("{areas} areas cannot hold {bytes} bytes")));
        }
        let addresses = self.fetch(start, areas * 8)?;
        let mut all = Vec::new();
        for (area, named) in addresses.as_chunks().0.iter().enumerate() {
            let address = start.address.wrapping_add((areas * 8 + area * AREA) as u64);
            if u64::from_be_bytes(*named) != address {
                return Err(Failure::wrong(format!("the address of area {area} is not that of its data")));
            }
            let length = AREA.min(bytes - area * AREA);
            all.push(self.fetch(RemoteAddress { address, ..start }, length)?);
            self.has(area as u64 + 1)?;
        }
        Ok(all)
    }
}

fn whole<B: Descriptors>(on: &Publisher<B>) -> Result<String, Failure> {
    let mut reader = Reader::open(on, [0; 16], 0)?;
    let (mut chunks, mut bytes, mut digests, mut marked) = (0_u64, 0_u64, Vec::new(), false);
    loop {
        let frame = reader.frame()?;
        let come = match frame.kind {
            kind::CHUNKS if !reader.is_mapping() => {
                let entries = frame.entries();
                if entries.is_empty() {
                    return Err(Failure::wrong("it announces nothing"));
                }
                let read = entries.iter().zip(chunks..).map(|(entry, index)| reader.chunk(entry, index));
                read.collect::<Result<Vec<_>, _>>()?
            }
            kind::MAPPING if reader.is_mapping() && chunks == 0 => reader.areas(&frame)?,
            kind::MARK if !marked => {
                let told = (frame.u64(0), frame.u64(8), frame.field::<32>(16));
                let seen = digest_of_chunks(&digests);
                if told != (chunks, bytes, seen) {
                    return Err(Failure::wrong(format!("Mark is not where {chunks} chunks end, or lies")));
                }
                marked = true;
                continue;
            }
            kind::END if marked => {
                if frame.u64(0) != chunks {
                    return Err(Failure::wrong(format!("End is not behind {chunks} chunks")));
                }
                break;
            }
            _ => return Err(Failure::wrong(format!("out of its place: {frame:02x?}"))),
        };
        for chunk in come {
            chunks += 1;
            bytes += chunk.len() as u64;
            if !marked {
                digests.push(digest(&chunk));
            }
        }
    }
    reader.talk.send(&Frame::new(kind::DONE, &[]))?;
    reader.talk.ends(on.patience)?;
    Ok(format!("{chunks} chunks, {bytes} bytes"))
}
