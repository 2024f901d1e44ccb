//! RDMA as a connection type, on any backend.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Address, Carrier, ConnectionType, Interest, Kind, Listening, SOURCES, Sources, Transport};
use crate::{ConnectionId, Descriptors, Endpoint, Limits, Listener, Options};

/// Which completion vector, and so which interrupt, signals a connection's completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vector {
    /// Another one for each connection, at random.
    #[default]
    Random,
    /// Always this one, modulo the number the device has.
    Fixed(u32),
}

impl Vector {
    fn choose(self) -> u32 {
        match self {
            Self::Fixed(vector) => vector,
            // The hasher's random seed is random enough to spread connections.
            Self::Random => RandomState::new().hash_one(()) as u32,
        }
    }
}

/// Settings of [`Rdma`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaSettings {
    /// For connections that are accepted. Their completion vector is [`RdmaSettings::vector`].
    pub server: Options,
    /// For connections that are made. Their completion vector is [`RdmaSettings::vector`].
    pub client: Options,
    /// Which completion vector connections use.
    pub vector: Vector,
    /// How long connecting may take.
    pub connect_timeout: Duration,
}

impl Default for RdmaSettings {
    fn default() -> Self {
        Self {
            server: Options::server(),
            client: Options::client(),
            vector: Vector::Random,
            connect_timeout: Duration::from_secs(5),
        }
    }
}

/// RDMA on a backend.
#[derive(Clone, Debug)]
pub struct Rdma<B> {
    backend: B,
    settings: Arc<Mutex<RdmaSettings>>,
}

impl<B: Descriptors> Rdma<B> {
    /// RDMA on `backend` with default settings.
    pub fn new(backend: B) -> Self {
        Self { backend, settings: Arc::default() }
    }
}

fn locked(settings: &Mutex<RdmaSettings>) -> MutexGuard<'_, RdmaSettings> {
    settings.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Descriptors> ConnectionType for Rdma<B> {
    type Settings = RdmaSettings;

    fn kind(&self) -> Kind {
        KIND
    }

    fn configure(&self, settings: RdmaSettings) -> io::Result<()> {
        for options in [&settings.server, &settings.client] {
            options.protocol.check().map_err(crate::Error::from)?;
        }
        *locked(&self.settings) = settings;
        Ok(())
    }

    fn listen(&self, at: &Address) -> io::Result<Box<dyn Listening>> {
        let options = locked(&self.settings).server;
        let listener = Listener::bind(&self.backend, at.ip()?, options)?;
        Ok(Box::new(RdmaListener { listener, settings: Arc::clone(&self.settings) }))
    }

    fn connect(&self, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        let settings = *locked(&self.settings);
        let options = Options { completion_vector: settings.vector.choose(), ..settings.client };
        let peer = to.ip()?;
        let from = from.map(Address::ip).transpose()?;
        let mut endpoint = Endpoint::new(&self.backend, Limits::NONE)?;
        let id = endpoint.connect(peer, from, settings.connect_timeout, options)?;
        Ok(Box::new(RdmaTransport { endpoint, id, peer: to.clone() }))
    }
}

const KIND: Kind = Kind { carrier: Carrier::Rdma, tls: false };

struct RdmaListener<B: Descriptors> {
    listener: Listener<B>,
    settings: Arc<Mutex<RdmaSettings>>,
}

impl<B: Descriptors> Listening for RdmaListener<B> {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Transport>>> {
        let settings = *locked(&self.settings);
        self.listener
            .set_options(Options { completion_vector: settings.vector.choose(), ..settings.server })?;
        let Some((endpoint, id)) = self.listener.try_accept()? else { return Ok(None) };
        let Some(peer) = endpoint.peer_addr(id) else { return Ok(None) };
        let mut transport = RdmaTransport { endpoint, id, peer: peer.into() };
        transport.drive([Interest::NONE; SOURCES]);
        Ok(Some(Box::new(transport)))
    }

    fn address(&self) -> Option<Address> {
        self.listener.local_addr().map(Into::into)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

struct RdmaTransport<B: Descriptors> {
    endpoint: Endpoint<B>,
    id: ConnectionId,
    peer: Address,
}

impl<B: Descriptors> Transport for RdmaTransport<B> {
    fn kind(&self) -> Kind {
        KIND
    }

    fn establish(&mut self) -> io::Result<bool> {
        self.drive([Interest::NONE; SOURCES]);
        self.endpoint.check(self.id)?;
        Ok(self.endpoint.is_open(self.id))
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.endpoint.read(self.id, into)?.ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.endpoint.write(self.id, from)?.ok_or_else(|| ErrorKind::WouldBlock.into());
        if self.endpoint.connection(self.id).is_some_and(|connection| !connection.is_flushed()) {
            self.drive([Interest::NONE; SOURCES]);
        }
        written
    }

    fn shutdown(&mut self, linger: Duration) {
        _ = self.endpoint.close(self.id, linger);
        self.drive([Interest::NONE; SOURCES]);
    }

    fn begin_close(&mut self, linger: Duration) {
        self.shutdown(linger);
    }

    fn is_over(&mut self) -> bool {
        self.endpoint.connection(self.id).is_none() || !matches!(self.endpoint.closed(self.id), Ok(None))
    }

    fn local_address(&self) -> Option<Address> {
        self.endpoint.connection(self.id)?.local_addr().map(Into::into)
    }

    fn peer_address(&self) -> Option<Address> {
        Some(self.peer.clone())
    }

    fn is_local(&self) -> bool {
        // VR-SEC-008: a device has no loopback interface, so the same address at both ends is what local means.
        match (self.local_address(), &self.peer) {
            (Some(Address::Ip(local)), Address::Ip(peer)) => local.ip() == peer.ip(),
            _ => false,
        }
    }

    fn sources(&self, _want: Interest) -> Sources<'_> {
        // Whatever its owner wants: keepalives, receives to post again, and windows to announce do not ask.
        [Some((self.endpoint.as_fd(), Interest::READ)), None]
    }

    fn drive(&mut self, _ready: [Interest; SOURCES]) {
        if let Err(error) = self.endpoint.progress() {
            tracing::warn!(%error, "an endpoint is lost");
            self.endpoint.abort(self.id);
        }
        // Whoever owns it asks instead.
        while self.endpoint.next_event().is_some() {}
    }

    fn ready(&mut self) -> Interest {
        let connection = self.endpoint.connection(self.id).filter(|_| self.endpoint.is_open(self.id));
        connection.map_or(Interest::NONE, |connection| Interest {
            read: connection.is_readable(),
            write: connection.is_writable(),
        })
    }

    fn next_timeout(&self) -> Option<Duration> {
        self.endpoint.next_timeout().map(|at| at.since(self.endpoint.now()))
    }
}
