//! What every case has around it: our server with a neighbour on it, and our side under attack.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_conn::{Connect, Descriptors, Error, Listener, Options, Stream};
use rdma_proto::wire::Message;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Held, Setting};
use crate::Outcome;
use conformance::client::{Client, Failure};
use conformance::peer::{Listener as Lurker, Peer as Adversary, Shape};
use kv_store as kv;

/// Length of our windows.
pub(super) const WINDOW: u32 = 64 << 10;
/// How long our side may take to notice what it must notice. The longest is a device that repeats a request eight times,
/// four seconds apart.
const BOUND: Duration = Duration::from_secs(60);
/// How long bystanders wait for their answers.
const PATIENCE: Duration = Duration::from_secs(10);
/// What [`impatient`] waits.
pub(super) const STALL: Duration = Duration::from_millis(300);

/// Which side is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Server,
    Client,
}

/// The settings of our side, small enough that many connections fit under the cap.
pub(super) fn usual() -> Options {
    let mut options = Options::server();
    options.protocol.window = WINDOW;
    options.protocol.send_buffer = WINDOW;
    options.linger = STALL;
    options
}

/// Settings under which nobody waits for a peer for long.
pub(super) fn impatient() -> Options {
    let mut options = usual();
    options.protocol.stall_limit = Some(STALL);
    options.handshake_timeout = STALL;
    options
}

/// How a connection of ours ended.
pub(super) enum Ended {
    InOrder,
    With(Error),
    Otherwise(io::Error),
}

impl From<io::Result<()>> for Ended {
    fn from(result: io::Result<()>) -> Self {
        let Err(error) = result else { return Self::InOrder };
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(inner) => Self::With(inner.clone()),
            None => Self::Otherwise(error),
        }
    }
}

impl Ended {
    pub(super) fn told(&self) -> String {
        match self {
            Self::InOrder => "in order".into(),
            Self::With(error) => format!("with {error:?}: {error}"),
            Self::Otherwise(error) => format!("with {error}"),
        }
    }
}

/// Our server, and who learns how connections of ours end.
pub(super) struct Scene<'a, B: Descriptors> {
    pub(super) setting: &'a Setting<B>,
    options: Options,
    /// Where our server listens.
    pub(super) address: SocketAddr,
    gate: Arc<Mutex<()>>,
    over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
    endings: Receiver<Ended>,
    report: Sender<Ended>,
}

/// Plays `body` with a neighbour beside it, and checks that the neighbour noticed nothing and nothing is left.
pub(super) fn play<B: Descriptors>(
    setting: &Setting<B>,
    options: Options,
    body: impl FnOnce(&Scene<'_, B>) -> Outcome,
) -> Outcome {
    let scene = Scene::new(setting, options)?;
    let mut neighbour = scene.neighbour()?;
    let before = setting.held();
    let told = body(&scene)?;
    ping(&mut neighbour).map_err(told_by("the neighbour"))?;
    let mut newcomer = scene.neighbour().map_err(told_by("a new connection"))?;
    newcomer.stream().close(PATIENCE).map_err(|error| told_by("a new connection")(error.into()))?;
    drop(newcomer);
    scene.ends_in_order()?;
    let after = await_no_more_than(setting, before);
    if after.exceeds(before) {
        return Err(Failure::wrong(format!("before: {before}; after: {after}")));
    }
    Ok(told)
}

fn told_by(who: &'static str) -> impl Fn(Failure) -> Failure {
    move |failure| Failure::wrong(format!("{who}: {failure}"))
}

fn ping<B: Descriptors>(client: &mut Client<Stream<B>>) -> Result<(), Failure> {
    client.send(&[b"PING"])?;
    client.expect("PONG")
}

/// Waits until no more is held than `before`: the last threads end a little later than their connections.
fn await_no_more_than<B>(setting: &Setting<B>, before: Held) -> Held {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = setting.held();
        if !now.exceeds(before) || Instant::now() >= deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl<'a, B: Descriptors> Scene<'a, B> {
    fn new(setting: &'a Setting<B>, options: Options) -> Result<Self, Failure> {
        let listener = Listener::bind(&setting.ours, setting.our_address, options)?;
        let address = listener.local_addr().ok_or_else(|| Failure::wrong("our listener has no address"))?;
        let (report, endings) = channel();
        let (gate, over) = (Arc::new(Mutex::new(())), Arc::new(AtomicBool::new(false)));
        let accepting = std::thread::spawn({
            let (gate, over, report) = (Arc::clone(&gate), Arc::clone(&over), report.clone());
            move || accept(&listener, &gate, &over, &report)
        });
        Ok(Self { setting, options, address, gate, over, accepting: Some(accepting), endings, report })
    }

    /// A client of ours, connected to our server, that got an answer.
    pub(super) fn neighbour(&self) -> Result<Client<Stream<B>>, Failure> {
        let how = Connect::default().timeout(PATIENCE).options(self.client_options());
        let mut stream = Stream::connect_with(&self.setting.ours, self.address, &how)?;
        stream.set_read_timeout(Some(PATIENCE));
        stream.set_write_timeout(Some(PATIENCE));
        let mut client = Client::new(stream);
        ping(&mut client)?;
        Ok(client)
    }

    /// The options as a client's.
    fn client_options(&self) -> Options {
        let mut options = self.options;
        options.protocol.role = rdma_conn::Role::Client;
        options
    }

    /// Lets our server accept connections, but look at none of them until this is dropped.
    pub(super) fn hold(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adversary connected to our side.
    pub(super) fn attack(&self, side: Side, shape: Shape) -> Result<Attack<'_, B>, Failure> {
        match side {
            Side::Server => {
                let peer = Adversary::dial(&self.setting.theirs, self.address, shape)?;
                Ok(Attack { peer, side, scene: self })
            }
            Side::Client => self.lure(shape, echo),
        }
    }

    /// The adversary connected to our side, and the windows exchanged.
    pub(super) fn greet(&self, side: Side) -> Result<Attack<'_, B>, Failure> {
        let mut attack = self.attack(side, Shape::default())?;
        attack.peer.handshake()?;
        Ok(attack)
    }

    /// A client of ours, connected to the adversary, that runs `program`.
    pub(super) fn lure(&self, shape: Shape, program: Program<B>) -> Result<Attack<'_, B>, Failure> {
        let lurker = Lurker::new(&self.setting.theirs, self.setting.their_address)?;
        self.send_client(lurker.address()?, program);
        let mut peer = lurker.accept(shape)?;
        peer.await_established()?;
        Ok(Attack { peer, side: Side::Client, scene: self })
    }

    /// Has a client of ours connect to `address` and run `program`.
    pub(super) fn send_client(&self, address: SocketAddr, program: Program<B>) {
        let (backend, report) = (self.setting.ours.clone(), self.report.clone());
        let timeout = self.options.handshake_timeout;
        let how = Connect::default().timeout(timeout).options(self.client_options());
        std::thread::spawn(move || {
            let ended = match Stream::connect_with(&backend, address, &how) {
                Ok(stream) => program(stream).into(),
                Err(error) => Ended::With(error),
            };
            // The case may have failed and gone meanwhile.
            let _heard = report.send(ended);
        });
    }

    /// How the next connection of ours ends.
    pub(super) fn ended(&self) -> Result<Ended, Failure> {
        self.endings
            .recv_timeout(BOUND)
            .map_err(|_| Failure::wrong(format!("our side noticed nothing within {BOUND:?}")))
    }

    /// The next connection of ours to end must do so with this error. Its text is what the case has to tell.
    pub(super) fn fails(&self, expected: fn(&Error) -> bool, text: &str) -> Outcome {
        let ended = self.ended()?;
        let Ended::With(error) = &ended else { return Err(unexpected(text, &ended)) };
        let told = error.to_string();
        match self.setting.deviation(text, &told) {
            _ if expected(error) && told.contains(text) => Ok(told),
            Some(deviation) => Ok(format!("{told} (as {} has it)", deviation.provider)),
            None => Err(unexpected(text, &ended)),
        }
    }

    /// The next connection of ours to end must do so without an error.
    pub(super) fn ends_in_order(&self) -> Result<(), Failure> {
        match self.ended()? {
            Ended::InOrder => Ok(()),
            other => Err(Failure::wrong(format!("our side ended {}", other.told()))),
        }
    }
}

fn unexpected(text: &str, ended: &Ended) -> Failure {
    Failure::wrong(format!("expected an error `{text}`; our side ended {}", ended.told()))
}

impl<B: Descriptors> Drop for Scene<'_, B> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            // A panic there has ended the case already.
            let _ended = accepting.join();
        }
    }
}

/// Accepts connections and serves each in a thread of its own, as the example server does, and reports how each ends.
fn accept<B: Descriptors>(
    listener: &Listener<B>,
    gate: &Arc<Mutex<()>>,
    over: &AtomicBool,
    report: &Sender<Ended>,
) {
    let store = Arc::new(kv::Store::default());
    while !over.load(Ordering::Relaxed) {
        match listener.try_accept() {
            Ok(Some(link)) => {
                let (store, gate, report) = (Arc::clone(&store), Arc::clone(gate), report.clone());
                std::thread::spawn(move || {
                    // Only as a stream is it tended from behind, so until then nobody looks at it.
                    drop(gate.lock());
                    let _heard = report.send(store.serve(Stream::from(link)).into());
                });
            }
            Ok(None) => {
                let mut requests = [PollFd::new(listener, PollFlags::IN)];
                // In vain, or too early, does no harm.
                let _woken = poll(&mut requests, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
            }
            Err(error) => {
                let _heard = report.send(Ended::With(error));
            }
        }
    }
}

/// What a client of ours does.
pub(super) type Program<B> = fn(Stream<B>) -> io::Result<()>;

/// Sends back what it gets.
pub(super) fn echo<B: Descriptors>(mut stream: Stream<B>) -> io::Result<()> {
    let mut bytes = vec![0; WINDOW as usize];
    loop {
        let read = stream.read(&mut bytes)?;
        if read == 0 {
            return Ok(());
        }
        stream.write_all(&bytes[..read])?;
    }
}

/// Sends, one byte at a time, more than anybody has receives for.
pub(super) fn chatter<B: Descriptors>(mut stream: Stream<B>) -> io::Result<()> {
    (0..5000).try_for_each(|_| stream.write_all(b"."))?;
    stream.flush()
}

/// Our side with the adversary connected to it.
pub(super) struct Attack<'a, B: Descriptors> {
    pub(super) peer: Adversary<B>,
    side: Side,
    scene: &'a Scene<'a, B>,
}

impl<B: Descriptors> Attack<'_, B> {
    /// What the adversary has to say to be answered with `bytes`, and how the answer looks.
    pub(super) fn question(&self, bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
        match self.side {
            Side::Client => (bytes.to_vec(), bytes.to_vec()),
            Side::Server => {
                let bulk = [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat();
                ([b"*2\r\n$4\r\nECHO\r\n", &bulk[..]].concat(), bulk)
            }
        }
    }

    /// What the adversary has to say to be answered with `length` bytes in all.
    pub(super) fn question_for(&self, length: usize) -> Result<(Vec<u8>, Vec<u8>), Failure> {
        (0..=length)
            .rev()
            .map(|bytes| self.question(&vec![b'x'; bytes]))
            .find(|(_, answer)| answer.len() == length)
            .ok_or_else(|| Failure::wrong(format!("no question has an answer of {length} bytes")))
    }

    /// Bytes go there and come back.
    pub(super) fn talk(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let (question, expected) = self.question(bytes);
        self.peer.send_bytes(&question)?;
        self.is_answered(&expected)
    }

    /// The next bytes are these.
    pub(super) fn is_answered(&mut self, expected: &[u8]) -> Result<(), Failure> {
        if self.peer.receive_bytes(expected.len())? == expected {
            return Ok(());
        }
        Err(Failure::wrong(format!("the answer of {} bytes is a wrong one", expected.len())))
    }

    /// The next message, keepalives apart, is this one.
    pub(super) fn is_told(&mut self, expected: Message) -> Result<(), Failure> {
        match self.peer.receive_message()? {
            message if message == expected => Ok(()),
            other => Err(Failure::wrong(format!("expected {expected:?}, got {other:?}"))),
        }
    }

    /// Our side must have taken no harm: it talks, and takes its leave when the adversary does.
    pub(super) fn is_harmless(&mut self) -> Result<(), Failure> {
        self.talk(b"are you well?")?;
        self.peer.disconnect()?;
        self.scene.ends_in_order()
    }

    /// Our side must end the connection with this error, and tell the adversary that it is over.
    pub(super) fn fails(&mut self, expected: fn(&Error) -> bool, text: &str) -> Outcome {
        let told = self.scene.fails(expected, text)?;
        self.peer.await_end()?;
        Ok(told)
    }
}
