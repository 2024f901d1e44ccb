//! Random clients of sockets and of TLS, which pause, read slowly, end their own direction, or
//! break, and a server that ends some of them. A seed determines what each does, but not when the
//! kernel moves bytes: the oracle holds in any case.
//!
//! `SERVER_SEEDS=17` repeats one seed, and `SERVER_SEEDS=0..100000` runs many.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use rdma_server::{
    Address, Flow, Replies, SendError, Server, ServerSettings, Service, SessionId, Tcp, Tls, TlsSettings,
    Unix,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use socket2::{Domain, Socket, Type};

use crate::harness::{HOST, PATIENCE, open};
use crate::oracle::{Seen, byte, for_seeds};

/// The server's side, for the oracle.
const SERVER: u8 = 0x5a;

/// The client's socket buffer: small, so that replies wait in the server.
const RECEIVES: usize = 64 << 10;

const LEAVE: u8 = b'L';
const WAIT: u8 = b'W';

/// Answers each request, a kind and the place of a length in this table, with so many bytes.
const LENGTHS: [usize; 8] = [0, 1, 7, 300, 5_000, 60_000, 300_000, 2 << 20];

#[derive(Default)]
struct Talker {
    seen: Seen,
    /// The client that waits for a reply, and the reply's length.
    waits: Option<(SessionId, usize)>,
}

impl Talker {
    fn reply(&mut self, len: usize) -> Vec<u8> {
        let from = self.seen.sent;
        self.seen.sent += len;
        (from..self.seen.sent).map(|at| byte(SERVER, at)).collect()
    }
}

impl Service for Talker {
    type Client = ();

    fn serve(&mut self, from: SessionId, (): &mut (), input: &mut BytesMut, replies: &mut Replies) -> Flow {
        while let Some(&[kind, length]) = input.first_chunk() {
            if replies.is_full() {
                return Flow::Again;
            }
            input.advance(2);
            let len = LENGTHS[usize::from(length)];
            if kind == WAIT {
                self.waits = Some((from, len));
                return Flow::Wait;
            }
            replies.extend_from_slice(&self.reply(len));
            if kind == LEAVE {
                self.seen.ended = true;
                return Flow::Leave;
            }
        }
        Flow::Stay
    }
}

/// A client's side of a connection, which never waits.
trait Peer: Read + Write {
    /// Ends its own direction, as soon as everything written has left. Until then `WouldBlock`.
    fn end(&mut self) -> io::Result<()>;
}

impl Peer for TcpStream {
    fn end(&mut self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Peer for UnixStream {
    fn end(&mut self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Peer for StreamOwned<ClientConnection, TcpStream> {
    fn end(&mut self) -> io::Result<()> {
        // Within the handshake, an end is none in order.
        while self.conn.is_handshaking() {
            self.conn.complete_io(&mut self.sock)?;
        }
        // A second call sends nothing.
        self.conn.send_close_notify();
        while self.conn.wants_write() {
            self.conn.write_tls(&mut self.sock)?;
        }
        Ok(())
    }
}

fn pem(name: &str) -> Vec<u8> {
    let file = [env!("CARGO_MANIFEST_DIR"), "/tests/types/certificates/", name].concat();
    std::fs::read(file).expect("a file of this package")
}

fn tls() -> (Arc<ServerConfig>, Arc<ClientConfig>) {
    let provider = Arc::new(rustls_graviola::default_provider());
    let certificate = |name| CertificateDer::from_pem_slice(&pem(name)).expect("a certificate");
    let key = PrivateKeyDer::from_pem_slice(&pem("server.key.pem")).expect("a key");
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let server = server.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    let server = server.with_single_cert(vec![certificate("server.pem")], key).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(certificate("authority.pem")).expect("an authority");
    let client = ClientConfig::builder_with_provider(provider);
    let client = client.with_safe_default_protocol_versions().expect("versions");
    (Arc::new(server), Arc::new(client.with_root_certificates(roots).with_no_client_auth()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Ends its own direction once everything is written.
    AtOnce,
    /// The server ends it, at a request or by itself.
    ToldTo,
    /// Goes away at some moment.
    Breaks,
}

#[derive(Debug)]
struct Script {
    kind: &'static str,
    budget: usize,
    linger: Duration,
    requests: Vec<[u8; 2]>,
    /// The beginning of one more.
    half: bool,
    way: Way,
    /// The longest read.
    piece: usize,
    /// Reads nothing in so many steps.
    patience: usize,
    /// Is closed while replies wait, if any do: not over a Unix socket, which cannot tell it that.
    cut: bool,
}

impl Script {
    fn new(random: &mut fastrand::Rng) -> Self {
        let kind = ["tcp", "tcp", "tls", "unix"][random.usize(..4)];
        let way = [Way::AtOnce, Way::AtOnce, Way::ToldTo, Way::Breaks][random.usize(..4)];
        let cut = kind != "unix" && random.bool();
        let longest = random.usize(1..LENGTHS.len());
        let mut requests: Vec<_> = (0..random.usize(..12))
            .map(|_| [[b'G', b'G', b'G', WAIT][random.usize(..4)], random.usize(..=longest) as u8])
            .collect();
        if cut && random.bool() {
            // More than the kernel keeps for a client that does not read.
            requests.extend([[b'G', 7]; 3]);
        }
        if way == Way::ToldTo && random.bool() {
            requests.push([LEAVE, random.u8(..LENGTHS.len() as u8)]);
        }
        Self {
            kind,
            budget: [1, 1_000, 100_000, 1 << 20][random.usize(..4)],
            linger: if way == Way::AtOnce { PATIENCE } else { Duration::from_millis(random.u64(..3)) },
            requests,
            half: kind != "unix" && random.bool(),
            way,
            piece: [1_000, 10_000, 1 << 20][random.usize(..3)],
            patience: [0, 30, 300][random.usize(..3)],
            cut,
        }
    }

    /// Returns the number of bytes of all replies.
    fn whole(&self) -> usize {
        self.requests.iter().map(|[_, length]| LENGTHS[usize::from(*length)]).sum()
    }
}

struct Run {
    server: Server<Talker>,
    client: Box<dyn Peer>,
    random: fastrand::Rng,
    seen: Seen,
    /// What is left of the requests.
    requests: Vec<u8>,
    script: Script,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let script = Script::new(&mut random);
        let settings: ServerSettings = open().reply_budget(script.budget);
        let mut server = Server::new(Talker::default(), settings).expect("a loop");
        server.timeouts().linger = script.linger;
        let local: Address = SocketAddr::from((HOST, 0)).into();
        let connect = |at: &Address| {
            let Address::Ip(at) = at else { panic!("an address of TCP: {at}") };
            let socket = Socket::new(Domain::for_address(*at), Type::STREAM, None).expect("a socket");
            socket.set_recv_buffer_size(RECEIVES).expect("a socket");
            socket.connect(&(*at).into()).expect("it listens");
            socket.set_nonblocking(true).expect("a socket");
            TcpStream::from(socket)
        };
        let client: Box<dyn Peer> = match script.kind {
            "tcp" => {
                let binding = server.bind(Tcp::new(), &[local]).expect("a free port");
                Box::new(connect(&server.local_addrs(binding)[0]))
            }
            "tls" => {
                let (ours, theirs) = tls();
                let with = Tls::new(Tcp::new(), TlsSettings::default().server(Some(ours)));
                let binding = server.bind(with, &[local]).expect("a free port");
                let name = ServerName::try_from("server.test").expect("a name");
                let connection = ClientConnection::new(theirs, name).expect("settings");
                Box::new(StreamOwned::new(connection, connect(&server.local_addrs(binding)[0])))
            }
            _ => {
                let path = std::env::temp_dir().join(format!("rdma-server-ends-{}", std::process::id()));
                server.bind(Unix::new(), &[path.clone().into()]).expect("a free path");
                let stream = UnixStream::connect(path).expect("it listens");
                stream.set_nonblocking(true).expect("a socket");
                Box::new(stream)
            }
        };
        let mut requests: Vec<u8> = script.requests.iter().flatten().copied().collect();
        requests.extend(script.half.then_some(b'G'));
        Self { server, client, random, seen: Seen::default(), requests, script }
    }

    /// Writes some requests, and then ends its own direction.
    fn write(&mut self) -> io::Result<()> {
        if self.requests.is_empty() {
            if self.script.way == Way::AtOnce && !self.seen.ended {
                self.client.end()?;
                self.seen.ended = true;
            }
            return Ok(());
        }
        let part = self.random.usize(1..=self.requests.len());
        let written = self.client.write(&self.requests[..part])?;
        self.requests.drain(..written);
        self.seen.sent += written;
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let mut bytes = vec![0; self.script.piece];
        match self.client.read(&mut bytes)? {
            0 => self.seen.end = Some(true),
            read => self.seen.receive(SERVER, &bytes[..read]),
        }
        Ok(())
    }

    /// The reply that a client waits for, or the end of a client that does not end by itself.
    fn server_acts(&mut self) {
        if let Some((waits, len)) = self.server.service().waits.take() {
            let before = self.server.service().seen.sent;
            let reply = self.server.service().reply(len);
            match self.server.send(waits, &reply) {
                Ok(()) => {}
                Err(error) => {
                    self.server.service().seen.sent = before;
                    self.server.service().waits = (error != SendError::NoSuchClient).then_some((waits, len));
                }
            }
        } else if self.script.way == Way::ToldTo && self.requests.is_empty() {
            // A request's half takes memory, too, but not so much.
            let waits = self.server.waiting_bytes() > 1_000;
            let due =
                if self.script.cut { waits || self.seen.received == self.script.whole() } else { !waits };
            let client = self.server.clients().next().map(|(client, ())| client);
            if let Some(client) = client.filter(|_| due) {
                self.server.service().seen.ended = true;
                self.server.close(client);
            }
        }
    }

    fn go(mut self) -> [usize; 2] {
        let begun = Instant::now();
        let breaks = (self.script.way == Way::Breaks).then(|| self.random.usize(..200));
        let mut broken = false;
        for step in 0.. {
            assert!(begun.elapsed() < PATIENCE, "it waits for ever\n{}", self.story());
            if self.seen.end.is_some() || broken || breaks.is_some_and(|at| step >= at) {
                break;
            }
            let done = match self.random.u8(..8) {
                0 => self.write(),
                1 | 2 if step >= self.script.patience => self.read(),
                3 if self.random.u8(..4) == 0 => {
                    self.server_acts();
                    Ok(())
                }
                _ => {
                    self.server.turn(Some(Duration::ZERO)).expect("a turn");
                    Ok(())
                }
            };
            match done {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // A write fails once the server has ended: what came before can be read.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => self.requests.clear(),
                Err(_) => {
                    self.seen.end = Some(false);
                    broken = true;
                }
                Ok(()) => {}
            }
        }
        let story = self.story();
        let way = self.script.way;
        let whole = self.script.whole();
        drop(self.client);
        let peer = self.server.finish().expect("a turn").seen;
        self.seen.judge(&Seen { ended: peer.ended || self.seen.ended, ..peer }, false, || story.clone());
        if way == Way::AtOnce {
            assert_eq!(
                (self.seen.end, self.seen.received),
                (Some(true), whole),
                "a reply is missing\n{story}"
            );
        }
        [true, false].map(|order| usize::from(self.seen.end == Some(order)))
    }

    fn story(&self) -> String {
        format!("{:#?}\nclient: {:?}\n{} bytes of requests left", self.script, self.seen, self.requests.len())
    }
}

#[test]
fn who_saw_an_orderly_end_saw_every_byte() {
    for_seeds("SERVER_SEEDS", 0..120, |seed| Run::new(seed).go());
}
