//! Cases for readers. The suite's side is a publisher that is correct except for the case's point.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rdma_backend::RemoteAddress;
use rdma_conn::{Descriptors, Listener};
use suite::Case;

use super::data::{Data, Door};
use super::wire::{
    Entry, Frame, Handshake, Heard, MAGIC, Talk, VERSION, digest, digest_of_chunks, kind, proof_address,
};
use conformance::blackbox::target::{Exit, Running};
use conformance::client::Failure;

/// Readers under test: programs that pull a snapshot into a file, and end.
pub trait Readers {
    /// Starts a reader that pulls from `publisher` into `file`, for a case.
    ///
    /// # Errors
    /// It does not start.
    fn start(&self, case: &str, publisher: SocketAddr, file: &Path) -> Result<Box<dyn Running>, String>;
}

/// Readers under test, and the suite's addresses for them.
pub struct Reader<B: Descriptors> {
    /// The suite's backend.
    pub backend: B,
    /// Where the suite listens for control streams.
    pub listen: SocketAddr,
    /// The address that readers get: another one if a proxy is in between.
    pub told: SocketAddr,
    /// The secret that they must prove.
    pub secret: Vec<u8>,
    /// Starts them.
    pub readers: Box<dyn Readers>,
    /// The folder for pulled files.
    pub folder: PathBuf,
    /// How long they may take for anything that must happen.
    pub patience: Duration,
}

const CHUNKS: u64 = 5;
const CHUNK: usize = 4096;
/// Bytes of the suite's memory: the snapshot, after an address area of one.
const MEMORY: usize = 8 + CHUNKS as usize * CHUNK;
const SNAPSHOT: [u8; 16] = [0x51; 16];
const OTHER: [u8; 16] = [0x52; 16];
const LEASE: Duration = Duration::from_secs(2);
/// The bound of VS-TIME-001, in multiples of the patience.
const BOUNDED: u32 = 8;

pub(super) fn content(index: u64) -> Vec<u8> {
    (0..CHUNK as u64).map(|at| (at.wrapping_mul(31) + at / 97 + index * 7) as u8).collect()
}

fn snapshot() -> Vec<u8> {
    (0..CHUNKS).flat_map(content).collect()
}

/// Returns the cases. The first shows that there is something to test.
#[must_use]
pub fn cases<B: Descriptors>() -> Vec<Case<Reader<B>>> {
    let case = |id, intent, requirements, run: fn(&Reader<B>) -> Result<String, Failure>| {
        Case::new(id, intent, requirements, move |on: &Reader<B>, _| run(on))
    };
    vec![
        case(
            "reader.whole",
            "a snapshot of five chunks arrives, and the last word is Done",
            &["VS-READ-002", "VS-TABLE-002", "VS-WIRE-001", "VS-SEC-001"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.whole", SNAPSHOT, Layout::Chunks)?;
                publisher.announce(0..CHUNKS)?;
                publisher.end()?;
                publisher.is_whole()
            },
        ),
        case(
            "reader.table",
            "the seed's table arrives, and is refused if an address is not that of its area",
            &["VS-RCP-002", "VS-RCP-001"],
            table,
        ),
        case(
            "reader.proves",
            "its code is right, over a nonce that is another each time",
            &["VS-AUTH-001", "VS-WIRE-001"],
            |on| {
                let mut nonces = Vec::new();
                for _ in 0..2 {
                    let mut publisher = Publisher::meet(on, "reader.proves")?;
                    let (hello, _) = publisher.hello(SNAPSHOT)?;
                    nonces.push(hello.field::<32>(40));
                    publisher.proof()?;
                }
                if nonces[0] == nonces[1] {
                    Err(Failure::wrong("its nonces are one"))
                } else {
                    Ok(String::new())
                }
            },
        ),
        case(
            "reader.secret",
            "nothing is read from a publisher whose code is wrong",
            &["VS-AUTH-002"],
            |on| {
                let mut publisher = Publisher::meet(on, "reader.secret")?;
                let (_, door) = publisher.hello(SNAPSHOT)?;
                publisher.proof()?;
                publisher.welcome(b"not the secret", Layout::Chunks)?;
                publisher.gives_up(on.patience)?;
                if door.has_request()? {
                    return Err(Failure::wrong("it connects for READs"));
                }
                publisher.fails()
            },
        ),
        case("reader.version", "a publisher of another version is given up", &["VS-WIRE-003"], |on| {
            let mut publisher = Publisher::meet(on, "reader.version")?;
            publisher.hello_as(VERSION - 1, SNAPSHOT)?;
            publisher.gives_up(on.patience)?;
            publisher.fails()
        }),
        case("reader.no-frame", "a length that no frame can have ends the session", &["VS-WIRE-002"], |on| {
            let mut publisher = Publisher::open(on, "reader.no-frame", SNAPSHOT, Layout::Chunks)?;
            publisher.talk.send_bytes(b"\xff\xff\xff\xe0\x05\0\0\0")?;
            publisher.gives_up(on.patience)?;
            publisher.fails()
        }),
        case("reader.place", "an entry that comes twice or too early is refused", &["VS-TABLE-002"], |on| {
            lies(on, "reader.place", |entry| entry.index -= 1)?;
            lies(on, "reader.place", |entry| entry.index += 1)
        }),
        case(
            "reader.entry",
            "an entry of no bytes, of too many, or beyond the last address is refused",
            &["VS-TABLE-003"],
            |on| {
                lies(on, "reader.entry", |entry| entry.length = 0)?;
                lies(on, "reader.entry", |entry| entry.length = CHUNK as u32 + 1)?;
                lies(on, "reader.entry", |entry| entry.address = u64::MAX - 1)
            },
        ),
        case(
            "reader.digest",
            "a chunk with another digest is not passed on, and asked for again",
            &["VS-READ-002", "VS-READ-003"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.digest", SNAPSHOT, Layout::Chunks)?;
                publisher.announce(0..2)?;
                let mut entry = publisher.entry(2)?;
                entry.digest[0] ^= 1;
                publisher.talk.send(&Frame::new(kind::CHUNKS, &[&entry.bytes()]))?;
                // It may already be gone.
                _ = publisher.announce(3..CHUNKS).and_then(|()| publisher.end());
                publisher.gives_up(on.patience)?;
                publisher.resumes(0..=2)
            },
        ),
        case(
            "reader.ends",
            "a Mark or an End that is not where the chunks end is refused",
            &["VS-TABLE-006"],
            |on| {
                for lying in [kind::MARK, kind::END] {
                    let mut publisher = Publisher::open(on, "reader.ends", SNAPSHOT, Layout::Chunks)?;
                    publisher.announce(0..CHUNKS)?;
                    for mut frame in publisher.ends(CHUNKS) {
                        if frame.kind == lying {
                            frame.put(0, &(CHUNKS - 1).to_be_bytes());
                        }
                        // It may be gone after the first of the two.
                        _ = publisher.talk.send(&frame);
                    }
                    publisher.gives_up(on.patience)?;
                    publisher.fails()?;
                }
                Ok(String::new())
            },
        ),
        case(
            "reader.resume",
            "after a cut it asks for the first chunk that it does not have, by the same name, and ends well",
            &["VS-READ-003", "VS-READ-006", "VS-TABLE-001"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.resume", SNAPSHOT, Layout::Chunks)?;
                publisher.announce(0..3)?;
                publisher.hears_of(3)?;
                publisher.cut();
                publisher.resumes(3..=3)
            },
        ),
        case(
            "reader.other-snapshot",
            "a reader that has a part of one snapshot takes nothing of another",
            &["VS-TABLE-001"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.other-snapshot", SNAPSHOT, Layout::Chunks)?;
                publisher.announce(0..3)?;
                publisher.hears_of(3)?;
                publisher.cut();
                publisher.meet_again()?;
                publisher.hello(OTHER)?;
                publisher.gives_up(on.patience)?;
                publisher.fails()
            },
        ),
        case(
            "reader.lease",
            "a reader that has nothing to do says Progress again and again",
            &["VS-LEASE-001"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.lease", SNAPSHOT, Layout::Chunks)?;
                // One may come a little late; four are due in one lease.
                for _ in 0..4 {
                    match publisher.talk.listen(LEASE)? {
                        Heard::Frame(frame) if frame.kind == kind::PROGRESS => {}
                        other => {
                            return Err(Failure::wrong(format!("while a lease passed, it said {other}")));
                        }
                    }
                    publisher.talk.send(&Frame::new(kind::ALIVE, &[]))?;
                }
                publisher.announce(0..CHUNKS)?;
                publisher.end()?;
                publisher.is_whole()
            },
        ),
        case(
            "reader.tells",
            "a reader that has read all that was announced says so, long before its lease asks for it",
            &["VS-READ-005"],
            |on| {
                let mut publisher = Publisher::meet(on, "reader.tells")?;
                publisher.lease = 8 * BOUNDED * on.patience;
                publisher.enter(SNAPSHOT, Layout::Chunks, 16)?;
                for chunk in 0..CHUNKS {
                    publisher.announce(chunk..chunk + 1)?;
                    publisher.hears_of(chunk + 1)?;
                }
                publisher.end()?;
                publisher.is_whole()
            },
        ),
        case(
            "reader.depth",
            "a reader that is granted one READ at a time reads everything",
            &["VS-READ-001"],
            |on| {
                let mut publisher = Publisher::meet(on, "reader.depth")?;
                publisher.enter(SNAPSHOT, Layout::Chunks, 1)?;
                publisher.announce(0..CHUNKS)?;
                publisher.end()?;
                publisher.is_whole()
            },
        ),
        case(
            "reader.says-nothing",
            "a publisher that says nothing behind Challenge is not waited for without end",
            &["VS-TIME-001"],
            |on| {
                let mut publisher = Publisher::meet(on, "reader.says-nothing")?;
                publisher.hello(SNAPSHOT)?;
                publisher.proof()?;
                publisher.gives_up(BOUNDED * on.patience).map(|()| String::new())
            },
        ),
    ]
}

/// Announces an impossible entry after a possible one. The session must end, and so must the pull.
fn lies<B: Descriptors>(on: &Reader<B>, case: &'static str, lie: fn(&mut Entry)) -> Result<String, Failure> {
    let mut publisher = Publisher::open(on, case, SNAPSHOT, Layout::Chunks)?;
    publisher.announce(0..2)?;
    let mut entry = publisher.entry(2)?;
    lie(&mut entry);
    publisher.talk.send(&Frame::new(kind::CHUNKS, &[&entry.bytes()]))?;
    publisher.gives_up(on.patience)?;
    publisher.fails()
}

fn table<B: Descriptors>(on: &Reader<B>) -> Result<String, Failure> {
    for lie in [0, 8] {
        let mut publisher = Publisher::open(on, "reader.table", SNAPSHOT, Layout::Table)?;
        let at = publisher.memory()?;
        publisher.data()?.fill(0, &(at.address + 8 + lie).to_be_bytes())?;
        publisher.data()?.fill(8, &snapshot())?;
        let numbers = [at.rkey, 1].map(u32::to_be_bytes).concat();
        let bytes = snapshot().len() as u64;
        let mapping = [&at.address.to_be_bytes()[..], &numbers, &bytes.to_be_bytes()];
        publisher.talk.send(&Frame::new(kind::MAPPING, &mapping))?;
        if lie == 0 {
            // The reader must not handle this before it has read the addresses.
            for frame in publisher.ends(1) {
                publisher.talk.send(&frame)?;
            }
            publisher.is_whole()?;
        } else {
            publisher.gives_up(on.patience)?;
            publisher.fails()?;
        }
    }
    Ok(String::new())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    Chunks,
    Table,
}

struct Publisher<'a, B: Descriptors> {
    on: &'a Reader<B>,
    /// `None` when the reader must not come again.
    listener: Option<Listener<B>>,
    talk: Talk<B>,
    reader: Box<dyn Running>,
    file: PathBuf,
    handshake: Handshake,
    data: Option<Data<B>>,
    lease: Duration,
}

impl<'a, B: Descriptors> Publisher<'a, B> {
    fn meet(on: &'a Reader<B>, case: &'static str) -> Result<Self, Failure> {
        let environment = |error: &dyn std::fmt::Display| Failure::Environment(error.to_string());
        let listener = Listener::bind(&on.backend, on.listen).map_err(|error| environment(&error))?;
        let file = on.folder.join(format!("{case}.pulled"));
        if file.exists() {
            std::fs::remove_file(&file).map_err(|error| environment(&error))?;
        }
        let reader = on.readers.start(case, on.told, &file).map_err(Failure::Environment)?;
        let talk = accept(&listener, on)?;
        Ok(Self {
            on,
            listener: Some(listener),
            talk,
            reader,
            file,
            handshake: Handshake::default(),
            data: None,
            lease: LEASE,
        })
    }

    fn meet_again(&mut self) -> Result<(), Failure> {
        self.data = None;
        let Some(listener) = &self.listener else {
            return Err(Failure::Environment("the suite listens no more".into()));
        };
        self.talk = accept(listener, self.on)?;
        Ok(())
    }

    /// Performs everything up to the first announcement.
    fn open(
        on: &'a Reader<B>,
        case: &'static str,
        snapshot: [u8; 16],
        layout: Layout,
    ) -> Result<Self, Failure> {
        let mut publisher = Self::meet(on, case)?;
        publisher.enter(snapshot, layout, 16)?;
        Ok(publisher)
    }

    /// Performs everything up to the first announcement, and grants `depth` READs at a time.
    /// Returns the first requested chunk.
    fn enter(&mut self, snapshot: [u8; 16], layout: Layout, depth: u8) -> Result<u64, Failure> {
        let (hello, door) = self.hello(snapshot)?;
        self.proof()?;
        self.welcome(&self.on.secret, layout)?;
        let Some((data, asked)) = door.accept(depth, MEMORY, self.on.patience)? else {
            return Err(Failure::wrong("it does not connect for READs"));
        };
        if asked == 0 {
            return Err(Failure::wrong("VS-READ-001: it asks for no READs"));
        }
        data.fill(8, &self::snapshot())?;
        self.data = Some(data);
        Ok(hello.u64(32))
    }

    /// Takes Hello, and sends Challenge. Returns Hello, and the listener for READs.
    fn hello(&mut self, snapshot: [u8; 16]) -> Result<(Frame, Door<B>), Failure> {
        self.hello_as(VERSION, snapshot)
    }

    fn hello_as(&mut self, version: u16, snapshot: [u8; 16]) -> Result<(Frame, Door<B>), Failure> {
        let hello = self.expect(kind::HELLO)?;
        let is_right =
            hello.payload.starts_with(MAGIC) && hello.u16(8) == VERSION && hello.field(10) == [0; 6];
        if !is_right {
            return Err(Failure::wrong(format!("its Hello begins otherwise: {hello:02x?}")));
        }
        let door = Door::open(&self.on.backend, self.on.listen)?;
        let port = door.port.to_be_bytes();
        let begin = [&MAGIC[..], &version.to_be_bytes(), &port, &[0; 4], &snapshot, &[0x77; 32]];
        let challenge = Frame::new(kind::CHALLENGE, &begin);
        self.handshake.note(&hello);
        self.handshake.note(&challenge);
        self.talk.send(&challenge)?;
        Ok((hello, door))
    }

    /// Takes Proof, whose code must be right.
    fn proof(&mut self) -> Result<(), Failure> {
        let proof = self.expect(kind::PROOF)?;
        let code = self.handshake.readers(&self.on.secret, &proof.field(0));
        if proof.field(24) != code {
            return Err(Failure::wrong("the code in its Proof is wrong"));
        }
        // The reader must connect from this address, so it must name a real one.
        if proof.field(0) == proof_address(SocketAddr::from(([0; 16], 0))) {
            return Err(Failure::wrong("its Proof names no address"));
        }
        Ok(())
    }

    fn welcome(&mut self, secret: &[u8], layout: Layout) -> Result<(), Failure> {
        let layout = if layout == Layout::Chunks { 1 } else { 2 };
        let code = self.handshake.publishers(secret);
        let lease = u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX).to_be_bytes();
        let size = (CHUNK as u32).to_be_bytes();
        let size = if layout == 1 { size } else { (4_u32 << 20).to_be_bytes() };
        self.talk.send(&Frame::new(
            kind::WELCOME,
            &[&code, &[layout, 1, 0, 0], &size, &lease, &[0; 8], &[0; 40], &[0; 8]],
        ))
    }

    fn data(&self) -> Result<&Data<B>, Failure> {
        self.data.as_ref().ok_or_else(|| Failure::Environment("nothing is connected".into()))
    }

    fn memory(&self) -> Result<RemoteAddress, Failure> {
        self.data()?.memory().ok_or_else(|| Failure::Environment("the suite has no memory".into()))
    }

    fn entry(&self, index: u64) -> Result<Entry, Failure> {
        let at = self.memory()?;
        let bytes = content(index);
        let address = at.address + 8 + index * CHUNK as u64;
        Ok(Entry { index, address, rkey: at.rkey, length: CHUNK as u32, digest: digest(&bytes) })
    }

    fn announce(&mut self, chunks: std::ops::Range<u64>) -> Result<(), Failure> {
        let entries =
            chunks.map(|index| Ok(self.entry(index)?.bytes())).collect::<Result<Vec<_>, Failure>>()?;
        self.talk.send(&Frame::new(kind::CHUNKS, &[&entries.concat()]))
    }

    /// Returns Mark and End after the whole snapshot, which is in `chunks` chunks.
    fn ends(&self, chunks: u64) -> [Frame; 2] {
        let bytes = snapshot();
        // The whole snapshot is the one area of the seed's table.
        let size = if chunks == 1 { bytes.len() } else { CHUNK };
        let digests: Vec<_> = bytes.chunks(size).map(digest).collect();
        let digest = digest_of_chunks(&digests);
        let chunks = chunks.to_be_bytes();
        let mark = Frame::new(kind::MARK, &[&chunks, &(bytes.len() as u64).to_be_bytes(), &digest]);
        [mark, Frame::new(kind::END, &[&chunks])]
    }

    fn end(&mut self) -> Result<(), Failure> {
        let [mark, end] = self.ends(CHUNKS);
        self.talk.send(&mark)?;
        self.talk.send(&end)
    }

    fn expect(&mut self, wanted: u8) -> Result<Frame, Failure> {
        self.expect_by(wanted, Instant::now() + self.on.patience)
    }

    fn expect_by(&mut self, wanted: u8, by: Instant) -> Result<Frame, Failure> {
        match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
            Heard::Frame(frame) if frame.kind == wanted => Ok(frame),
            Heard::Silence => Err(Failure::wrong("it says nothing")),
            other => Err(Failure::wrong(format!("instead of a frame of kind {wanted} came {other:02x?}"))),
        }
    }

    fn hears_of(&mut self, chunks: u64) -> Result<(), Failure> {
        let (mut by, mut has) = (Instant::now() + self.on.patience, 0);
        while has < chunks {
            let told = match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
                Heard::Frame(frame) if frame.kind == kind::PROGRESS => frame.u64(0),
                Heard::Silence => {
                    return Err(Failure::wrong(format!("it does not say that it has {chunks} chunks")));
                }
                other => return Err(Failure::wrong(format!("instead of Progress came {other:02x?}"))),
            };
            // Each chunk starts the time again.
            if told > has {
                (by, has) = (Instant::now() + self.on.patience, told);
            }
        }
        Ok(())
    }

    fn cut(&mut self) {
        self.data = None;
        self.talk.end();
    }

    /// Checks that the reader ends the session without sending Done.
    fn gives_up(&mut self, patience: Duration) -> Result<(), Failure> {
        let by = Instant::now() + patience;
        loop {
            match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
                Heard::End => return Ok(()),
                Heard::Frame(frame) if frame.kind == kind::PROGRESS => {}
                Heard::Silence => return Err(Failure::wrong("the session goes on")),
                other => {
                    return Err(Failure::wrong(format!("the session should end, and {other:02x?} came")));
                }
            }
        }
    }

    /// Checks that the reader comes again, for one of these chunks, and then succeeds.
    fn resumes(&mut self, first: std::ops::RangeInclusive<u64>) -> Result<String, Failure> {
        let before = self.handshake.reader_nonce;
        self.meet_again()?;
        let asked = self.enter(SNAPSHOT, Layout::Chunks, 16)?;
        let again = self.handshake.reader_nonce;
        if before[..16] != again[..16] || before[16..] == again[16..] {
            return Err(Failure::wrong("its nonces are not one name, and another number each"));
        }
        if !first.contains(&asked) {
            return Err(Failure::wrong(format!("it asks for chunk {asked} and what is behind")));
        }
        self.announce(asked..CHUNKS)?;
        self.end()?;
        self.is_whole()?;
        Ok(format!("from chunk {asked} on"))
    }

    /// Checks that the reader sends Done and succeeds, with the whole snapshot in its file.
    fn is_whole(&mut self) -> Result<String, Failure> {
        let (mut by, mut has) = (Instant::now() + self.on.patience, 0);
        loop {
            match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
                Heard::Frame(frame) if frame.kind == kind::DONE => break,
                Heard::Frame(frame) if frame.kind == kind::PROGRESS => {
                    if (has + 1..=CHUNKS).contains(&frame.u64(0)) {
                        (by, has) = (Instant::now() + self.on.patience, frame.u64(0));
                    }
                }
                Heard::Silence => return Err(Failure::wrong("it does not say Done")),
                other => return Err(Failure::wrong(format!("instead of Done came {other:02x?}"))),
            }
        }
        self.cut();
        match self.reader.ended(self.on.patience) {
            Some(Exit::Success) => {}
            Some(exit) => return Err(Failure::wrong(exit.to_string())),
            None => return Err(Failure::wrong("it does not end")),
        }
        let pulled =
            std::fs::read(&self.file).map_err(|error| Failure::wrong(format!("no file: {error}")))?;
        if pulled == snapshot() {
            Ok(format!("{} bytes", pulled.len()))
        } else {
            Err(Failure::wrong("its file has other bytes"))
        }
    }

    /// Checks that the reader fails, and leaves nothing that was not published.
    fn fails(&mut self) -> Result<String, Failure> {
        // No listener is there if the reader tries again.
        self.listener = None;
        let told = match self.reader.ended(BOUNDED * self.on.patience) {
            Some(Exit::Success) => return Err(Failure::wrong("it reports success")),
            Some(Exit::Crashed(how)) => return Err(Failure::wrong(format!("it crashed: {how}"))),
            Some(exit) => exit.to_string(),
            None => return Err(Failure::wrong("it does not end")),
        };
        match std::fs::read(&self.file) {
            Ok(pulled) if !snapshot().starts_with(&pulled) => Err(Failure::wrong("its file has other bytes")),
            _ => Ok(told),
        }
    }
}

fn accept<B: Descriptors>(listener: &Listener<B>, on: &Reader<B>) -> Result<Talk<B>, Failure> {
    match listener.accept_timeout(on.patience) {
        Ok((stream, _)) => Ok(Talk::new(stream, on.patience)),
        Err(error) => Err(Failure::Unreached(format!("no reader comes: {error}"))),
    }
}
