//! RDMA as a connection type, on any backend.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_proto::State;
use rdma_proto::backend::ErrorKind as Failure;

use super::{
    Accepted, Address, Carrier, ConnectionType, Interest, Kind, Listening, SOURCES, Sources, Transport,
};
use crate::{Descriptors, Dial, Error, Link, Listener, Options};

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
        let dial = Dial::new(&self.backend, peer, from, settings.connect_timeout, options)?;
        Ok(Box::new(RdmaTransport {
            backend: self.backend.clone(),
            peer: to.clone(),
            step: Step::Dial(Box::new(dial)),
        }))
    }
}

/// Whether the next request will fail as well: what a listener takes requests from, or what each of them needs, is lost or
/// has run out.
const fn is_the_listeners(error: &Error) -> bool {
    match error {
        Error::DeviceRemoved | Error::Wait(_) => true,
        Error::Backend { doing, kind, .. } => {
            let channel =
                matches!(doing.as_bytes(), b"reading connection events" | b"opening an event channel");
            channel || matches!(kind, Failure::Memory | Failure::NoDevice)
        }
        _ => false,
    }
}

const KIND: Kind = Kind { carrier: Carrier::Rdma, tls: false };

struct RdmaListener<B: Descriptors> {
    listener: Listener<B>,
    settings: Arc<Mutex<RdmaSettings>>,
}

impl<B: Descriptors> Listening for RdmaListener<B> {
    fn accept(&mut self) -> io::Result<Accepted> {
        let settings = *locked(&self.settings);
        self.listener
            .set_options(Options { completion_vector: settings.vector.choose(), ..settings.server })?;
        match self.listener.try_accept() {
            Ok(Some(link)) => {
                let peer = link.peer_addr().into();
                let backend = self.listener.backend().clone();
                let mut transport = RdmaTransport { backend, peer, step: Step::Link(Box::new(link)) };
                transport.drive([Interest::NONE; SOURCES]);
                Ok(Accepted::Connection(Box::new(transport)))
            }
            Ok(None) => Ok(Accepted::Nobody),
            Err(error) if is_the_listeners(&error) => Err(error.into()),
            Err(error) => Ok(Accepted::Lost(error.into())),
        }
    }

    fn address(&self) -> Option<Address> {
        self.listener.local_addr().map(Into::into)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.event_channel().as_fd()
    }
}

struct RdmaTransport<B: Descriptors> {
    backend: B,
    peer: Address,
    step: Step<B>,
}

enum Step<B: Descriptors> {
    Dial(Box<Dial<B>>),
    Link(Box<Link<B>>),
}

impl<B: Descriptors> Transport for RdmaTransport<B> {
    fn kind(&self) -> Kind {
        KIND
    }

    fn establish(&mut self) -> io::Result<bool> {
        match &mut self.step {
            Step::Dial(dial) => {
                let Some(link) = dial.progress()? else { return Ok(false) };
                self.step = Step::Link(Box::new(link));
                Ok(true)
            }
            Step::Link(link) => {
                link.check()?;
                Ok(link.state() != State::Connecting)
            }
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.step {
            Step::Dial(_) => Err(ErrorKind::NotConnected.into()),
            Step::Link(link) => link.try_read(into)?.ok_or_else(|| ErrorKind::WouldBlock.into()),
        }
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.step {
            Step::Dial(_) => Err(ErrorKind::NotConnected.into()),
            Step::Link(link) => link.try_write(from)?.ok_or_else(|| ErrorKind::WouldBlock.into()),
        }
    }

    fn shutdown(&mut self, linger: Duration) {
        if let Step::Link(link) = &mut self.step {
            link.close(linger);
            link.progress();
        }
    }

    fn begin_close(&mut self, linger: Duration) {
        self.shutdown(linger);
    }

    fn is_over(&mut self) -> bool {
        match &mut self.step {
            Step::Dial(_) => true,
            Step::Link(link) => !matches!(link.closed(), Ok(None)),
        }
    }

    fn local_address(&self) -> Option<Address> {
        match &self.step {
            Step::Dial(_) => None,
            Step::Link(link) => link.local_addr().map(Into::into),
        }
    }

    fn peer_address(&self) -> Option<Address> {
        Some(self.peer.clone())
    }

    fn is_local(&self) -> bool {
        // VR-SEC-008: a device has no loopback interface, so a path that leads back is what local means.
        match &self.step {
            Step::Dial(_) => false,
            Step::Link(link) => link.is_local(),
        }
    }

    fn sources(&self, _want: Interest) -> Sources<'_> {
        // Whatever its owner wants: keepalives, receives to post again, and windows to announce do not ask.
        match &self.step {
            Step::Dial(dial) => match dial.sources() {
                Some((events, completions)) => [
                    Some((events.as_fd(), Interest::READ)),
                    completions.map(|completions| (completions.as_fd(), Interest::READ)),
                ],
                None => [None, None],
            },
            Step::Link(link) => [
                Some((link.event_channel().as_fd(), Interest::READ)),
                Some((link.completion_queue().as_fd(), Interest::READ)),
            ],
        }
    }

    fn drive(&mut self, [events, completions]: [Interest; SOURCES]) {
        // A dial is driven by `establish`.
        if let Step::Link(link) = &mut self.step {
            if completions.read {
                link.take_completion_events();
            }
            if events.read {
                link.take_events();
            }
            // What comes from here on makes the descriptor readable; what came before is found now.
            link.arm();
            link.progress();
        }
    }

    fn ready(&mut self) -> Interest {
        match &self.step {
            Step::Dial(_) => Interest::NONE,
            Step::Link(link) => Interest { read: link.is_readable(), write: link.is_writable() },
        }
    }

    fn next_timeout(&self) -> Option<Duration> {
        match &self.step {
            Step::Dial(dial) => Some(dial.deadline().since(self.backend.now())),
            Step::Link(link) => link.next_timeout().map(|at| at.since(link.now())),
        }
    }
}
