//! Establishing a connection, from either side, up to the queue pair.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::{Backend, CmEventKind, ConnectParams, EventChannel, Identifier};

use crate::{Session, Shape};

/// A connection attempt.
pub struct Connecting<B: Backend> {
    id: B::Identifier,
    events: B::EventChannel,
    timeout: Duration,
}

/// An identifier that may have a queue pair.
pub struct Candidate<B: Backend> {
    id: B::Identifier,
    events: B::EventChannel,
    /// The parameters that the peer offered, if the peer requested the connection.
    pub asked: Option<ConnectParams>,
}

/// Returns why there is no route to a peer, if `event` says so.
pub fn no_way<B: Backend>(event: &CmEventKind<B>) -> Option<String> {
    let (what, status) = match event {
        CmEventKind::AddressError { status } => ("no device leads to the address", *status),
        CmEventKind::RouteError { status } => ("no route leads to the address", *status),
        CmEventKind::DeviceRemoval => return Some("the device was removed".into()),
        _ => return None,
    };
    Some(format!("{what}: {}", io::Error::from_raw_os_error(status.saturating_neg())))
}

/// The progress of a connection attempt.
pub enum Progress<B: Backend> {
    /// It waits for an event.
    Waits(Connecting<B>),
    /// It may have a queue pair.
    Ready(Candidate<B>),
    /// There is no route to the peer, and why.
    NoWay(String),
}

enum Found<B: Backend> {
    Nothing,
    Candidate(Option<(B::Identifier, ConnectParams)>),
    NoWay(String),
}

impl<B: Backend> Connecting<B> {
    /// Connects to `peer`; each step may take `timeout`.
    ///
    /// # Errors
    /// The backend's.
    pub fn dial(backend: &B, peer: SocketAddr, timeout: Duration) -> Result<Self, B::Error> {
        let events = backend.event_channel()?;
        let id = events.create_id()?;
        id.resolve_address(None, peer, timeout)?;
        Ok(Self { id, events, timeout })
    }

    /// Takes the first connect request at `address`.
    ///
    /// # Errors
    /// The backend's.
    pub fn listen(backend: &B, address: SocketAddr) -> Result<Self, B::Error> {
        let events = backend.event_channel()?;
        let id = events.listen(address, 0)?;
        Ok(Self { id, events, timeout: Duration::ZERO })
    }

    /// Returns the address at which it listens, or from which it connects once the route is known.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Returns the channel of connection events.
    pub const fn events(&self) -> &B::EventChannel {
        &self.events
    }

    /// Proceeds as far as possible now.
    ///
    /// # Errors
    /// The backend's.
    pub fn poll(self) -> Result<Progress<B>, B::Error> {
        Ok(match self.look()? {
            Found::Nothing => Progress::Waits(self),
            Found::NoWay(event) => Progress::NoWay(event),
            Found::Candidate(None) => {
                Progress::Ready(Candidate { id: self.id, events: self.events, asked: None })
            }
            Found::Candidate(Some((id, params))) => {
                Progress::Ready(Candidate { id, events: self.events, asked: Some(params) })
            }
        })
    }

    fn look(&self) -> Result<Found<B>, B::Error> {
        while let Some(event) = self.events.next_event()? {
            match event.kind {
                CmEventKind::AddressResolved => self.id.resolve_route(self.timeout)?,
                CmEventKind::RouteResolved => return Ok(Found::Candidate(None)),
                CmEventKind::ConnectRequest { id, peer } => return Ok(Found::Candidate(Some((id, peer)))),
                event => {
                    if let Some(why) = no_way(&event) {
                        return Ok(Found::NoWay(why));
                    }
                }
            }
        }
        Ok(Found::Nothing)
    }
}

impl<B: Backend> Candidate<B> {
    /// Returns the largest depth of a queue that its device allows.
    ///
    /// # Errors
    /// The backend's.
    pub fn most(&self) -> Result<u32, B::Error> {
        Ok(self.id.capabilities()?.max_queue_depth)
    }

    /// Creates the domain, regions and completion queue of a session.
    ///
    /// # Errors
    /// The backend's.
    pub fn session(self, shape: Shape) -> Result<Session<B>, B::Error> {
        Session::new(self.id, self.events, shape)
    }
}
