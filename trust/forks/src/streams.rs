//! Blocking streams and listeners.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::time::Duration;

use rdma_conn::{Error, Limits};
use rdma_verbs::Verbs;

use crate::{Face, MESSAGE, PING, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, is_forked, patient, verbs};

/// A blocking stream.
pub(crate) struct Stream(rdma_conn::Stream<Verbs>);

impl Stream {
    fn connect(server: SocketAddr) -> Self {
        Self(rdma_conn::Stream::connect_with(&verbs(), server, &patient()).expect("a server"))
    }

    fn asks(&mut self, (request, end): (&[u8], &[u8])) {
        self.0.write_all(request).expect("written");
        self.hears(end);
    }

    fn hears(&mut self, end: &[u8]) {
        let (mut heard, mut some) = (Vec::new(), [0; 64]);
        while !heard.ends_with(end) {
            let count = self.0.read(&mut some).expect("read");
            assert!(count > 0, "the server has left");
            heard.extend_from_slice(&some[..count]);
        }
    }
}

impl Face for Stream {
    fn new(server: SocketAddr) -> Self {
        Self::connect(server)
    }

    fn exchange(&mut self) {
        self.asks(PING);
    }

    fn prepare(&mut self) {
        self.asks(SUBSCRIBE);
    }

    fn wait(&mut self) {
        self.hears(MESSAGE);
        self.asks(UNSUBSCRIBE);
    }

    fn free(&mut self) {
        self.asks(PUBLISH);
    }

    fn close(&mut self) -> Result<(), Error> {
        self.0.close(Duration::from_secs(1))
    }

    fn refuses(&mut self) {
        is_forked(&self.0.write(b"child").expect_err("no write"));
        is_forked(&self.0.read(&mut [0]).expect_err("no read"));
        is_forked(&self.0.flush().expect_err("no flush"));
        assert!(matches!(self.0.register_buffer(64), Err(Error::Forked)));
        let other = rdma_conn::Stream::connect(&verbs(), (IpAddr::from([192, 0, 2, 1]), 1));
        assert!(matches!(other, Err(Error::Forked)), "{other:?}");
        assert!(matches!(rdma_conn::Listener::bind(&verbs(), "[::]:0"), Err(Error::Forked)));
    }
}

/// A listener of this process, and a connection that it has accepted from this process.
pub(crate) struct Listener {
    listener: rdma_conn::Listener<Verbs>,
    accepted: Stream,
    client: Stream,
}

/// That of the listener at which a thread is in `accept`.
static AWAITED: OnceLock<SocketAddr> = OnceLock::new();

impl Face for Listener {
    fn new(server: SocketAddr) -> Self {
        // The address of this machine.
        let probe = Stream::connect(server).0;
        let own = SocketAddr::new(probe.local_addr().expect("an address").ip(), 0);
        let listener = rdma_conn::Listener::bind_with(&verbs(), own, patient().options, Limits::default())
            .expect("listens");
        let address = listener.local_addr().expect("it listens");
        let first = std::thread::spawn(move || Stream::connect(address));
        let accepted = Stream(listener.accept().expect("the first").0);
        Self { listener, accepted, client: first.join().expect("connects") }
    }

    fn exchange(&mut self) {
        self.client.0.write_all(PING.0).expect("written");
        self.accepted.hears(PING.0);
        self.accepted.0.write_all(PING.1).expect("written");
        self.client.hears(PING.1);
    }

    fn prepare(&mut self) {
        AWAITED.get_or_init(|| self.listener.local_addr().expect("it listens"));
    }

    fn wait(&mut self) {
        // It stays, as its client waits until it is established.
        std::mem::forget(self.listener.accept().expect("the second"));
    }

    fn free(&mut self) {
        drop(Stream::connect(*AWAITED.get().expect("a thread waits")));
    }

    fn close(&mut self) -> Result<(), Error> {
        self.accepted.close()
    }

    fn refuses(&mut self) {
        self.accepted.refuses();
        assert!(matches!(self.listener.try_request(), Err(Error::Forked)));
        assert!(matches!(self.listener.accept(), Err(Error::Forked)));
        assert!(matches!(self.listener.wait(None), Err(Error::Forked)));
        self.listener.waker().wake();
    }
}
