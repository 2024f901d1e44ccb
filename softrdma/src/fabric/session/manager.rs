//! Requests to the connection manager, and the events that the program reads.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::{CmEvent, CmEventKind, EventChannel as _, Identifier as _, QueuePair as _};
use rdma_softsim::{
    EventChannel, Identifier, Offered, QueuePair, Signal, SoftSim, footprint, listen_backlog,
};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Connected, Name, Reply, Request};

use super::super::budget::Taken;
use super::super::signals::Level;
use super::super::translate;
use super::{LEVEL, Refusal, Session, find, take};

/// An event channel.
///
/// Here an answer is available as soon as a request was made, unlike in any network. Some programs
/// read events until there are none, a *batch*, and handle each, and rely on the delay: libvalkey
/// forgets that a connection failed if it reads so in one batch with the event that made it
/// connect. So the end of a connection is not reported in the batch in which its program asked for
/// it or was told of it.
pub(super) struct Channel {
    channel: EventChannel,
    level: Arc<Level>,
    /// How often no event was found, which ends a batch.
    batch: u64,
    /// An event that belongs to the next batch.
    held: Option<CmEvent<SoftSim>>,
    _taken: Taken,
}

/// An identifier, and its current channel.
pub(super) struct Owned {
    identifier: Identifier,
    channel: Name,
    /// The batch in which the program asked to connect it, or was told that it is connected.
    connects_in: Option<u64>,
    /// What the requests take that it may have as a listener.
    backlog: Option<Taken>,
    _taken: Taken,
}

/// Whether the event says that a connection ended or was not established.
const fn is_end(kind: &CmEventKind<SoftSim>) -> bool {
    matches!(
        kind,
        CmEventKind::Unreachable { .. }
            | CmEventKind::ConnectError { .. }
            | CmEventKind::Rejected { .. }
            | CmEventKind::Disconnected
    )
}

impl Session {
    pub(super) fn perform_on_identifier(&mut self, request: &Request<'_>) -> Result<Reply, Refusal> {
        let id = |name: &Name| find(&self.identifiers, *name).map(|owned| &owned.identifier);
        match request {
            Request::CreateIdentifier { channel } => {
                let taken = self.take_memory(footprint::OBJECT)?;
                let identifier = find(&self.event_channels, *channel)?.channel.create_id()?;
                return Ok(Reply::Made(self.adopt(identifier, *channel, taken)?));
            }
            Request::DestroyIdentifier(name) => {
                let key = id(name)?.key();
                self.keys.remove(&key);
                return take(&mut self.identifiers, *name, |_| false);
            }
            Request::Bind { id: name, address } => {
                let identifier = id(name)?;
                identifier.bind(*address)?;
                let bound = identifier.local_addr().ok_or(Errno::INVAL)?;
                return Ok(Reply::Bound(bound));
            }
            Request::Listen { id: name, backlog } => {
                let identifier = id(name)?;
                if identifier.local_addr().is_none() {
                    identifier.bind(SocketAddr::from(([0; 4], 0)))?;
                }
                // Requests wait in the model until they are read.
                let requests = listen_backlog(*backlog).into();
                let taken = self.take_memory(footprint::CONNECT_REQUEST.saturating_mul(requests))?;
                identifier.listen(*backlog)?;
                let bound = identifier.local_addr().ok_or(Errno::INVAL)?;
                if let Some(owned) = self.identifiers.get_mut(name) {
                    owned.backlog = Some(taken);
                }
                return Ok(Reply::Bound(bound));
            }
            Request::SetTrafficClass { id: name, class } => id(name)?.set_traffic_class(*class)?,
            Request::ResolveAddress { id: name, source, destination, milliseconds } => {
                let timeout = Duration::from_millis((*milliseconds).into());
                id(name)?.resolve_address(*source, *destination, timeout)?;
            }
            Request::ResolveRoute(name) => id(name)?.resolve_route(Duration::ZERO)?,
            Request::Connect { id: name, pair, params, data } => {
                let (identifier, params) = (id(name)?, translate::params(*params));
                match pair {
                    Connected::Managed(pair) => {
                        identifier.connect_pair(self.pair(*pair)?, &params, data)?;
                    }
                    Connected::External(number) => {
                        identifier.connect_external(self.numbered(*number)?, &params, data)?;
                    }
                }
                self.connects(*name);
            }
            Request::Accept { id: name, pair, params, data } => {
                let (identifier, params) = (id(name)?, translate::params(*params));
                match pair {
                    Connected::Managed(pair) => {
                        identifier.accept_pair(self.pair(*pair)?, &params, data)?;
                    }
                    Connected::External(number) => {
                        identifier.accept_external(self.numbered(*number)?, &params, data)?;
                    }
                }
            }
            Request::Reject { id: name, data } => id(name)?.reject(data)?,
            Request::Notify(name) => id(name)?.notify_established()?,
            Request::Establish(name) => id(name)?.establish()?,
            Request::Offered(name) => {
                let Offered { local, remote, peer, theirs, retry } = id(name)?.offered()?;
                let theirs = translate::offered(theirs);
                return Ok(Reply::Offered { local, remote, peer, theirs, retry });
            }
            Request::Disconnect(name) => id(name)?.disconnect()?,
            Request::Migrate { id: name, channel } => {
                id(name)?.migrate(&find(&self.event_channels, *channel)?.channel)?;
                if let Some(owned) = self.identifiers.get_mut(name) {
                    owned.channel = *channel;
                }
            }
            // The session has handled every other request before.
            _ => return Err(Errno::INVAL.into()),
        }
        Ok(Reply::Done)
    }

    fn numbered(&self, number: u32) -> Result<&QueuePair, Refusal> {
        let found = self.pairs.values().map(|owned| &owned.pair).find(|pair| pair.number() == number);
        Ok(found.ok_or(Errno::INVAL)?)
    }

    fn adopt(&mut self, identifier: Identifier, channel: Name, taken: Taken) -> Result<Name, Refusal> {
        let name = self.name()?;
        self.keys.insert(identifier.key(), name);
        self.identifiers
            .insert(name, Owned { identifier, channel, connects_in: None, backlog: None, _taken: taken });
        Ok(name)
    }

    /// Notes that the identifier connects in the current batch of its channel.
    fn connects(&mut self, identifier: Name) {
        if let Some(owned) = self.identifiers.get_mut(&identifier) {
            owned.connects_in = self.event_channels.get(&owned.channel).map(|channel| channel.batch);
        }
    }

    pub(super) fn create_event_channel(&mut self) -> Result<(Name, OwnedFd), Refusal> {
        let taken = self.info.process.program().take(LEVEL)?;
        let level = Arc::new(Level::new()?);
        let end = level.end_for_program()?;
        let signal: Arc<dyn Signal> = Arc::<Level>::clone(&level);
        // Any device will do: an identifier goes to the device of its address.
        let channel = self.opened(0)?.host.event_channel_with(signal)?;
        let name = self.name()?;
        self.event_channels.insert(name, Channel { channel, level, batch: 0, held: None, _taken: taken });
        Ok((name, end))
    }

    /// Returns the next event of a channel, if its batch has one.
    fn next_told(&mut self, name: Name) -> Result<Option<CmEvent<SoftSim>>, Refusal> {
        // A destroyed channel is reported as a closed descriptor.
        let channel = self.event_channels.get_mut(&name).ok_or(Errno::BADF)?;
        if let Some(held) = channel.held.take() {
            if !channel.channel.is_readable() {
                channel.level.clear();
            }
            return Ok(Some(held));
        }
        let Some(told) = channel.channel.next_event()? else {
            channel.batch += 1;
            return Ok(None);
        };
        let owner = self.keys.get(&told.id).and_then(|name| self.identifiers.get(name));
        let connects_in = owner.and_then(|owner| owner.connects_in);
        if is_end(&told.kind) && connects_in == Some(channel.batch) {
            channel.batch += 1;
            channel.held = Some(told);
            channel.level.raise();
            return Ok(None);
        }
        Ok(Some(told))
    }

    pub(super) fn take_event(&mut self, name: Name) -> Result<Reply, Refusal> {
        loop {
            let Some(event) = self.next_told(name)? else { return Ok(Reply::Event(None)) };
            // Programs read asynchronous events from their device.
            if matches!(event.kind, CmEventKind::Async(_)) {
                continue;
            }
            // The identifier was destroyed, so its event is skipped.
            let Some(&told) = self.keys.get(&event.id) else { continue };
            let (kind, status, params) = translate::event(&event.kind);
            let established = matches!(event.kind, CmEventKind::Established { .. });
            let (id, listener) = match event.kind {
                CmEventKind::ConnectRequest { id, .. } => {
                    // Without memory for it the request is dropped, and so rejected.
                    let Ok(taken) = self.take_memory(footprint::OBJECT) else { continue };
                    (self.adopt(id, name, taken)?, Some(told))
                }
                _ => (told, None),
            };
            let Owned { identifier, .. } = find(&self.identifiers, id)?;
            let (local, remote) = (identifier.local_addr(), identifier.peer_addr());
            let data = event.private_data.into_vec();
            if established {
                self.connects(id);
            }
            let event = wire::Event { id, listener, kind, status, params, data, local, remote };
            return Ok(Reply::Event(Some(Box::new(event))));
        }
    }
}
