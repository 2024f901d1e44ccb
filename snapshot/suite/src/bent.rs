//! Peers that make one mistake: our own side, and a [`Proxy`] between its control stream and the
//! suite that makes it. The connection for READs bypasses the proxy, which is therefore on the
//! publisher's host. [`Bent`], a backend of our side, errs below the control stream.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_backend::{Access, Backend, ConnectParams, QueuePairLimits, Region as _};
use rdma_conn::{Connect, Descriptors, Listener, Options, Stream};
use rdma_softsim::SoftSim;

use super::data::Door;
use super::reader::content;
use super::wire::{Entry, Frame, Handshake, Heard, Talk, VERSION, digest, kind};
use conformance::client::Failure;
use intercept::{Call, Interceptor, Origin};

/// A mistake of a publisher, of a reader, or of either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Accepts readers without the secret.
    TakesAnyReader,
    /// Does not prove that it has the secret.
    ProvesNothing,
    /// Accepts connections for READs from any address.
    AdmitsStrangers,
    /// Announces memory right after Welcome.
    NamesEarly,
    /// Accepts a peer of any version.
    AnyVersion,
    /// Continues after invalid frames.
    IgnoresNoFrames,
    /// Ignores frames that come out of order, and false claims.
    IgnoresDisorder,
    /// Continues with any snapshot.
    AnySnapshot,
    /// Always begins with the first chunk.
    FromTheFirst,
    /// Announces an entry twice.
    RepeatsEntries,
    /// Announces a wrong digest of a chunk.
    WrongChunk,
    /// Sends a wrong Mark.
    WrongDigest,
    /// Ends before the last chunk.
    EndsEarly,
    /// Announces the table 8 bytes too far.
    ElsewhereTable,
    /// Changes announced chunks when a second reader comes.
    ChangesChunks,
    /// Lets peers write.
    Writable,
    /// Grants, or requests, no READs.
    NoReads,
    /// Has no leases.
    EndlessLease,
    /// Never ends a session.
    HoldsOn,
    /// Reuses one nonce.
    OneNonce,
    /// Accepts publishers without the secret.
    TakesAnyPublisher,
    /// Accepts entries out of order.
    Renumbers,
    /// Skips impossible entries.
    SkipsEntries,
    /// Does not compare the digests of chunks.
    IgnoresChunks,
    /// Accepts any Mark and any End.
    BelievesEnds,
    /// Never sends Progress.
    SaysNoProgress,
    /// Sends Done when it gives up.
    SaysDone,
    /// Loses a received byte.
    LosesAByte,
}

/// How long the proxy listens to one side before it listens to the other.
const TURN: Duration = Duration::from_millis(5);

type Regions = Arc<Mutex<Vec<Arc<<SoftSim as Backend>::Region>>>>;

/// An interceptor that makes a mistake below the control stream, or none.
pub struct Bent {
    mistake: Mistake,
    regions: Regions,
}

impl Bent {
    /// Returns an interceptor for `mistake`, if it is one of its own.
    #[must_use]
    pub fn new(mistake: Mistake) -> Self {
        Self { mistake, regions: Regions::default() }
    }

    /// Returns the regions that were registered through it.
    #[must_use]
    pub fn regions(&self) -> Regions {
        Arc::clone(&self.regions)
    }
}

impl Interceptor<SoftSim> for Bent {
    type Identifier = ();
    type QueuePair = ();

    fn identifier(&self, _: &Arc<<SoftSim as Backend>::Identifier>, _: Origin) {}

    fn queue_pair(
        &self,
        (): &(),
        _: &Arc<<SoftSim as Backend>::QueuePair>,
        _: &<SoftSim as Backend>::Domain,
        _: QueuePairLimits,
    ) -> Result<(), <SoftSim as Backend>::Error> {
        Ok(())
    }

    fn call(&self, (): &(), _: &<SoftSim as Backend>::Identifier, call: Call<'_>) -> bool {
        // Only connections for READs have one depth of zero.
        match call {
            Call::Connect(params, _)
                if self.mistake == Mistake::NoReads && params.responder_resources == 0 =>
            {
                *params = ConnectParams { initiator_depth: 0, ..*params };
            }
            Call::Accept(params, _) if self.mistake == Mistake::NoReads && params.initiator_depth == 0 => {
                *params = ConnectParams { responder_resources: 0, ..*params };
            }
            _ => {}
        }
        true
    }

    fn registering(&self, len: usize, access: Access) -> (usize, Access) {
        if self.mistake == Mistake::Writable && access.allows(Access::REMOTE_READ) {
            (len, access.and(Access::REMOTE_WRITE))
        } else {
            (len, access)
        }
    }

    fn registered(&self, inner: &Arc<<SoftSim as Backend>::Region>) {
        if self.mistake == Mistake::ChangesChunks {
            self.regions.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(inner));
        }
    }
}

/// Stands between a control stream's ends.
pub struct Proxy {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on `listen` and forwards to `to`, both on one host, making `mistake`. `regions` are
    /// those of a [`Bent`] publisher.
    ///
    /// # Errors
    /// It cannot listen.
    pub fn start<B: Descriptors>(
        backend: &B,
        listen: SocketAddr,
        to: SocketAddr,
        mistake: Mistake,
        secret: &[u8],
        regions: Regions,
    ) -> Result<Self, Failure> {
        let listener = Listener::bind(backend, listen)?;
        let door = Door::open(backend, listen)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (backend, secret, stopped) = (backend.clone(), secret.to_vec(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut proxied = Vec::new();
            let port = door.port;
            // This listener accepts every connection, and reads nothing.
            let stranger = std::thread::spawn({
                let stopped = Arc::clone(&stopped);
                move || {
                    let mut door = Some(door);
                    while !stopped.load(Ordering::Relaxed)
                        && let Some(open) = door.take()
                    {
                        door = open.admit(Duration::from_millis(50));
                    }
                }
            });
            while !stopped.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept_timeout(Duration::from_millis(50)) else { continue };
                if !proxied.is_empty() {
                    spoil(&regions);
                }
                let tamper = Tamper::new(mistake, &secret, port);
                let (backend, stopped) = (backend.clone(), Arc::clone(&stopped));
                proxied.push(std::thread::spawn(move || {
                    let how = Connect::default().options(Options::default());
                    if let Ok(upper) = Stream::connect_with(&backend, to, &how) {
                        let patience = Duration::from_secs(5);
                        between(Talk::new(stream, patience), Talk::new(upper, patience), tamper, &stopped);
                    }
                }));
            }
            proxied.push(stranger);
            for thread in proxied {
                // A panic of its own would be a mistake that goes unnoticed.
                let _ended = thread.join();
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// Changes a byte of every region that is longer than those of control streams.
fn spoil(regions: &Regions) {
    for region in regions.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let mut byte = [0];
        if region.len() > 64 << 10 && region.read(0, &mut byte) {
            let _inside = region.write(0, &[byte[0] ^ 1]);
        }
    }
}

fn between<B: Descriptors>(
    mut reader: Talk<B>,
    mut publisher: Talk<B>,
    mut tamper: Tamper,
    stopped: &AtomicBool,
) {
    let holds = tamper.mistake == Mistake::HoldsOn;
    let (mut reads, mut publishes) = (true, true);
    while !stopped.load(Ordering::Relaxed) && (reads || publishes) {
        for up in [true, false] {
            let (from, to, there) = if up {
                (&mut reader, &mut publisher, &mut reads)
            } else {
                (&mut publisher, &mut reader, &mut publishes)
            };
            if !*there {
                std::thread::sleep(TURN);
                continue;
            }
            let forwarded = match from.listen(TURN) {
                Ok(Heard::Frame(frame)) => {
                    let frames = if up { tamper.up(frame) } else { tamper.down(frame) };
                    frames.iter().try_for_each(|frame| to.send(frame))
                }
                Ok(Heard::Silence) => tamper.idle(up).iter().try_for_each(|frame| to.send(frame)),
                Ok(Heard::End) => {
                    *there = false;
                    match tamper.mistake {
                        Mistake::SaysDone if up => to.send(&Frame::new(kind::DONE, &[])),
                        _ if holds => Ok(()),
                        _ => {
                            to.end();
                            return;
                        }
                    }
                }
                Err(_no_frame) => {
                    let rest = from.take_rest();
                    if tamper.mistake == Mistake::IgnoresNoFrames { Ok(()) } else { to.send_bytes(&rest) }
                }
            };
            // The end of the other side is handled in its turn.
            let _gone = forwarded;
        }
    }
}

struct Tamper {
    mistake: Mistake,
    secret: Vec<u8>,
    door: u16,
    /// The handshake as seen by each side.
    readers: Handshake,
    publishers: Handshake,
    /// The snapshot that the reader has a part of.
    has: [u8; 16],
    greeted: bool,
    serving: bool,
    entries: u64,
}

impl Tamper {
    fn new(mistake: Mistake, secret: &[u8], door: u16) -> Self {
        Self {
            mistake,
            secret: secret.to_vec(),
            door,
            readers: Handshake::default(),
            publishers: Handshake::default(),
            has: [0; 16],
            greeted: false,
            serving: false,
            entries: 0,
        }
    }

    /// Returns the frames that the publisher gets in place of a reader's frame.
    fn up(&mut self, mut frame: Frame) -> Vec<Frame> {
        match (frame.kind, self.mistake) {
            (kind::HELLO, _) => {
                self.greeted = true;
                self.readers.note(&frame);
                self.has = frame.field(16);
                match self.mistake {
                    Mistake::AnyVersion => frame.put(8, &VERSION.to_be_bytes()),
                    Mistake::AnySnapshot => frame.put(16, &[0; 16]),
                    Mistake::FromTheFirst => frame.put(32, &[0; 8]),
                    Mistake::OneNonce => frame.put(40, &[1; 32]),
                    _ => {}
                }
                self.entries = frame.u64(32);
                self.publishers.note(&frame);
            }
            (kind::PROOF, mistake) => {
                let address = frame.field(0);
                let is_right = frame.field(24) == self.readers.readers(&self.secret, &address);
                if is_right || mistake == Mistake::TakesAnyReader {
                    frame.put(24, &self.publishers.readers(&self.secret, &address));
                }
            }
            (kind::PROGRESS, Mistake::SaysNoProgress) => return Vec::new(),
            (_, Mistake::IgnoresDisorder) if !self.greeted || frame.u64(0) == u64::MAX => return Vec::new(),
            _ => {}
        }
        vec![frame]
    }

    /// Returns the frames that the reader gets in place of a publisher's frame.
    fn down(&mut self, mut frame: Frame) -> Vec<Frame> {
        match (frame.kind, self.mistake) {
            (kind::CHALLENGE, mistake) => {
                self.publishers.note(&frame);
                match mistake {
                    Mistake::AnyVersion => frame.put(8, &VERSION.to_be_bytes()),
                    Mistake::AdmitsStrangers => frame.put(10, &self.door.to_be_bytes()),
                    Mistake::AnySnapshot if self.has != [0; 16] => frame.put(16, &self.has),
                    _ => {}
                }
                self.readers.note(&frame);
            }
            (kind::WELCOME, mistake) => {
                let is_right = frame.field(0) == self.publishers.publishers(&self.secret);
                if mistake == Mistake::ProvesNothing {
                    frame.put(0, &[0; 32]);
                } else if is_right || mistake == Mistake::TakesAnyPublisher {
                    frame.put(0, &self.readers.publishers(&self.secret));
                }
                if mistake == Mistake::NamesEarly {
                    return vec![frame, Frame::new(kind::CHUNKS, &[&[1; 64]])];
                }
            }
            (kind::CHUNKS, mistake) => return self.chunks(frame, mistake),
            (kind::MAPPING, Mistake::ElsewhereTable) => frame.put(0, &(frame.u64(0) + 8).to_be_bytes()),
            (kind::MARK, Mistake::WrongDigest) => frame.put(16, &[0; 32]),
            (kind::MARK | kind::END, Mistake::EndsEarly) => {
                frame.put(0, &frame.u64(0).saturating_sub(1).to_be_bytes());
            }
            (kind::MARK | kind::END, Mistake::BelievesEnds) => frame.put(0, &self.entries.to_be_bytes()),
            _ => {}
        }
        self.serving |= matches!(frame.kind, kind::CHUNKS | kind::MAPPING);
        vec![frame]
    }

    fn chunks(&mut self, frame: Frame, mistake: Mistake) -> Vec<Frame> {
        self.serving = true;
        let mut entries = frame.entries();
        let can_be = |entry: &Entry| {
            (1..=4096).contains(&entry.length) && entry.address.checked_add(entry.length.into()).is_some()
        };
        if mistake == Mistake::SkipsEntries {
            entries.retain(can_be);
        }
        for entry in &mut entries {
            match mistake {
                Mistake::Renumbers => entry.index = self.entries,
                Mistake::WrongChunk => entry.digest[0] ^= 1,
                Mistake::IgnoresChunks => entry.digest = digest(&content(entry.index)),
                _ => {}
            }
            self.entries += 1;
        }
        if entries.is_empty() {
            return Vec::new();
        }
        let bytes: Vec<u8> = entries.iter().flat_map(Entry::bytes).collect();
        let frame = Frame::new(frame.kind, &[&bytes]);
        if mistake == Mistake::RepeatsEntries { vec![frame.clone(), frame] } else { vec![frame] }
    }

    /// Returns the frames that a side gets when the other is silent.
    fn idle(&self, up: bool) -> Vec<Frame> {
        let renews = up && self.serving && self.mistake == Mistake::EndlessLease;
        if renews { vec![Frame::new(kind::PROGRESS, &[&[0; 8]])] } else { Vec::new() }
    }
}
