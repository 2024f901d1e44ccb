//! The way to a connection, from either side, up to where it may have a queue pair.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_proto::backend::{Backend, CmEventKind, ConnectParams, EventChannel, Identifier};

use crate::{Session, Shape};

/// A connection in the making.
pub struct Connecting<B: Backend> {
    id: B::Identifier,
    events: B::EventChannel,
    timeout: Duration,
}

/// An identifier that may have a queue pair.
pub struct Candidate<B: Backend> {
    id: B::Identifier,
    events: B::EventChannel,
    /// What the peer offered, if it is the peer that asks for the connection.
    pub asked: Option<ConnectParams>,
}

/// What came of looking once.
enum Found<B: Backend> {
    Nothing,
    Candidate(Option<(B::Identifier, ConnectParams)>),
    NoWay,
}

impl<B: Backend> Connecting<B> {
    /// Towards `peer`; each step may take `timeout`.
    ///
    /// # Errors
    /// The backend's.
    pub fn dial(backend: &B, peer: SocketAddr, timeout: Duration) -> Result<Self, B::Error> {
        let events = backend.event_channel()?;
        let id = events.create_id()?;
        id.resolve_address(None, peer, timeout)?;
        Ok(Self { id, events, timeout })
    }

    /// From whoever asks first at `address`.
    ///
    /// # Errors
    /// The backend's.
    pub fn listen(backend: &B, address: SocketAddr) -> Result<Self, B::Error> {
        let events = backend.event_channel()?;
        let id = events.listen(address, 0)?;
        Ok(Self { id, events, timeout: Duration::ZERO })
    }

    /// Where events come.
    pub const fn events(&self) -> &B::EventChannel {
        &self.events
    }

    /// Goes on as far as it can now: to a candidate, or to itself again. `None`: there is no way to the peer.
    ///
    /// # Errors
    /// The backend's.
    pub fn poll(self) -> Result<Option<Result<Candidate<B>, Self>>, B::Error> {
        match self.look()? {
            Found::Nothing => Ok(Some(Err(self))),
            Found::NoWay => Ok(None),
            Found::Candidate(None) => {
                Ok(Some(Ok(Candidate { id: self.id, events: self.events, asked: None })))
            }
            Found::Candidate(Some((id, params))) => {
                Ok(Some(Ok(Candidate { id, events: self.events, asked: Some(params) })))
            }
        }
    }

    fn look(&self) -> Result<Found<B>, B::Error> {
        while let Some(event) = self.events.next_event()? {
            match event.kind {
                CmEventKind::AddressResolved => self.id.resolve_route(self.timeout)?,
                CmEventKind::RouteResolved => return Ok(Found::Candidate(None)),
                CmEventKind::ConnectRequest { id, peer } => return Ok(Found::Candidate(Some((id, peer)))),
                CmEventKind::AddressError { .. } | CmEventKind::RouteError { .. } => return Ok(Found::NoWay),
                CmEventKind::DeviceRemoval => return Ok(Found::NoWay),
                _ => {}
            }
        }
        Ok(Found::Nothing)
    }
}

impl<B: Backend> Candidate<B> {
    /// Sends of a queue, and receives, that its device can have at most.
    ///
    /// # Errors
    /// The backend's.
    pub fn most(&self) -> Result<u32, B::Error> {
        Ok(self.id.capabilities()?.max_queue_depth)
    }

    /// Makes everything that a connection needs.
    ///
    /// # Errors
    /// The backend's.
    pub fn session(self, shape: Shape) -> Result<Session<B>, B::Error> {
        Session::new(self.id, self.events, shape)
    }
}
