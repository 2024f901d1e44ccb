//! Cases for readers. The suite's side is a publisher that is correct except for the case's point.

mod peer;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rdma_conn::Descriptors;
use suite::Case;

use super::wire::{Entry, Frame, Heard, VERSION, kind};
use conformance::blackbox::target::Running;
use conformance::client::Failure;
use peer::{Layout, Publisher};

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
                let mut publisher = Publisher::open(on, "reader.whole", Layout::Chunks)?;
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
            for version in [VERSION - 1, VERSION + 1] {
                let mut publisher = Publisher::meet(on, "reader.version")?;
                publisher.hello_as(version, SNAPSHOT)?;
                publisher.gives_up(on.patience)?;
                publisher.fails()?;
            }
            Ok(String::new())
        }),
        case("reader.no-frame", "a length that no frame can have ends the session", &["VS-WIRE-002"], |on| {
            let mut publisher = Publisher::open(on, "reader.no-frame", Layout::Chunks)?;
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
                let mut publisher = Publisher::open(on, "reader.digest", Layout::Chunks)?;
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
                    let mut publisher = Publisher::open(on, "reader.ends", Layout::Chunks)?;
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
                let mut publisher = Publisher::open(on, "reader.resume", Layout::Chunks)?;
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
                let mut publisher = Publisher::open(on, "reader.other-snapshot", Layout::Chunks)?;
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
            "a reader that has nothing to do says Progress repeatedly",
            &["VS-LEASE-001"],
            |on| {
                let mut publisher = Publisher::open(on, "reader.lease", Layout::Chunks)?;
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
                publisher.enter(Layout::Chunks, 16)?;
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
                publisher.enter(Layout::Chunks, 1)?;
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
    let mut publisher = Publisher::open(on, case, Layout::Chunks)?;
    publisher.announce(0..2)?;
    let mut entry = publisher.entry(2)?;
    lie(&mut entry);
    publisher.talk.send(&Frame::new(kind::CHUNKS, &[&entry.bytes()]))?;
    publisher.gives_up(on.patience)?;
    publisher.fails()
}

fn table<B: Descriptors>(on: &Reader<B>) -> Result<String, Failure> {
    for lie in [0, 8] {
        let mut publisher = Publisher::open(on, "reader.table", Layout::Table)?;
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
