//! An echo server that listens by TCP and RDMA, and its clients.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rdma_server::{
    Address, BindingId, ConnectionType, EventLoop, Flow, Rdma, Replies, Server, ServerSettings, Service,
    Session, SessionId, SessionState, Tcp,
};
use rdma_softsim::{Fabric, SoftSim};

pub(crate) const MEBIBYTE: usize = 1 << 20;
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
pub(crate) const REMOTE: [u8; 4] = [192, 0, 2, 2];

/// Echoes. After `Q` a client leaves. Each `M` is answered by a mebibyte. After `W` the client
/// waits for its reply. A request that begins with `L` has no end.
pub(crate) struct Echo;

impl Service for Echo {
    type Client = u64;

    fn serve(&mut self, _: SessionId, served: &mut u64, input: &mut BytesMut, replies: &mut Replies) -> Flow {
        while let Some(first) = input.first().copied() {
            if replies.is_full() {
                return Flow::Again;
            }
            if first == b'L' {
                return Flow::Stay;
            }
            if first == b'W' {
                let _ = input.split_to(1);
                *served += 1;
                return Flow::Wait;
            }
            let len = if first == b'M' {
                replies.extend_from_slice(&[b'm'; MEBIBYTE]);
                1
            } else {
                let len = input.iter().position(|byte| b"MW".contains(byte)).unwrap_or(input.len());
                replies.extend_from_slice(&input[..len]);
                len
            };
            *served += len as u64;
            if input.split_to(len).contains(&b'Q') {
                return Flow::Leave;
            }
        }
        Flow::Stay
    }
}

/// A fabric whose server has the loopback address, so that TCP and RDMA can share it.
pub(crate) struct TestBed {
    pub(crate) server: Server<Echo>,
    pub(crate) tcp: BindingId,
    pub(crate) rdma: BindingId,
    pub(crate) fabric: Fabric,
    pub(crate) remote: Rdma<SoftSim>,
    pub(crate) local: Rdma<SoftSim>,
}

pub(crate) fn test_bed(settings: ServerSettings) -> TestBed {
    let fabric = Fabric::new();
    let local = Rdma::new(fabric.host(&[HOST]));
    let mut server = Server::new(Echo, settings).expect("a loop");
    let tcp = server.bind(Tcp::new(), &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let same = server.local_addrs(tcp);
    let rdma = server.bind(local.clone(), &same).expect("the same port");
    let remote = Rdma::new(fabric.host(&[REMOTE.into()]));
    TestBed { server, tcp, rdma, fabric, remote, local }
}

pub(crate) fn open() -> ServerSettings {
    ServerSettings::default().protected(false)
}

pub(crate) struct Client {
    pub(crate) events: EventLoop<()>,
    pub(crate) id: SessionId,
}

impl Client {
    pub(crate) fn new(with: &impl ConnectionType, to: &Address) -> Self {
        let mut events = EventLoop::new(()).expect("a loop");
        let id = events.blocking_connect(with, to, None, PATIENCE).expect("connects");
        Self { events, id }
    }

    pub(crate) fn over(rdma: bool, remote: &Rdma<SoftSim>, to: &Address) -> Self {
        if rdma { Self::new(remote, to) } else { Self::new(&Tcp::new(), to) }
    }

    pub(crate) fn both(remote: &Rdma<SoftSim>, to: &Address) -> [Self; 2] {
        [false, true].map(|rdma| Self::over(rdma, remote, to))
    }

    pub(crate) fn connection(&mut self) -> &mut Session<()> {
        self.events.get_mut(self.id).expect("is there")
    }

    pub(crate) fn echo(&mut self, bytes: &[u8]) {
        self.connection().sync_write(bytes, PATIENCE).expect("written");
        let mut echo = vec![0; bytes.len()];
        self.connection().sync_read(&mut echo, PATIENCE).expect("answered");
        assert!(echo == bytes, "the bytes differ");
    }

    pub(crate) fn last_words(&mut self) -> String {
        let line = self.connection().sync_read_line(1000, PATIENCE).expect("a line before the end");
        let end = self.connection().sync_read(&mut [0; 1], PATIENCE).expect_err("the end");
        assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof);
        assert_eq!(self.connection().state(), SessionState::Closed);
        String::from_utf8(line).expect("text")
    }
}

/// Runs the server on this thread until `clients`, on another one, is done.
pub(crate) fn while_serving<T: Send>(server: &mut Server<Echo>, clients: impl FnOnce(&Ask) -> T + Send) -> T {
    thread::scope(|scope| {
        let (ask, asked) = mpsc::channel::<Request>();
        let clients = scope.spawn(move || clients(&Ask(ask)));
        loop {
            match asked.try_recv() {
                Ok(request) => request(server),
                Err(mpsc::TryRecvError::Empty) => {
                    server.turn(Some(Duration::from_millis(2))).expect("a turn");
                }
                Err(mpsc::TryRecvError::Disconnected) => break,
            }
        }
        clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

pub(crate) type Request = Box<dyn FnOnce(&mut Server<Echo>) + Send>;

pub(crate) struct Ask(mpsc::Sender<Request>);

impl Ask {
    pub(crate) fn server<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut Server<Echo>) -> T + Send + 'static,
    ) -> T {
        let (tell, told) = mpsc::channel();
        let request: Request = Box::new(move |server| drop(tell.send(what(server))));
        self.0.send(request).expect("a server");
        told.recv().expect("an answer")
    }

    /// Stops the server's thread until the returned guard is dropped.
    pub(crate) fn hold(&self) -> mpsc::Sender<()> {
        let (held, holding) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let request: Request = Box::new(move |_| {
            held.send(()).expect("who asked");
            // The error is the awaited drop.
            let _ = released.recv();
        });
        self.0.send(request).expect("a server");
        holding.recv().expect("a server");
        release
    }

    pub(crate) fn until(&self, what: impl Fn(&mut Server<Echo>) -> bool + Send + Copy + 'static) {
        let begun = Instant::now();
        while !self.server(what) {
            assert!(begun.elapsed() < PATIENCE, "it does not happen");
        }
    }
}
