//! A server on an event loop: one service over any connection types, with limits, and addresses that change while it runs.
//!
//! - TCP and RDMA may share an address and a port: their port spaces are separate, and so are the listeners.
//! - [`Server::rebind`] moves a service to other addresses. Clients that are there stay.
//! - Who is not let in is told why, on RDMA as on TCP: the text arrives before the end.
//! - A client that does not read its replies is not read any further, so that its window or socket fills and it waits: at most
//!   [`Settings::reply_budget`] bytes and one reply wait for it (VR-RES-008). Nothing spins.
//! - [`affinity`] puts the server's thread and a device's interrupts on CPUs.

pub mod affinity;
mod replies;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;

use bytes::BytesMut;
use slotmap::{SecondaryMap, SlotMap, new_key_type};

use crate::types::{
    Address, Barrier, Connection, ConnectionId, ConnectionType, EventLoop, ListenerId, State, Timeouts,
};

pub use replies::{Replies, SendError};

/// Bytes read from a client at once.
const CHUNK: usize = 64 << 10;

/// Clients that may be in the middle of being told why they are not let in. Beyond it they are not told.
const REFUSED_AT_ONCE: usize = 128;

/// What a server does for its clients.
pub trait Service: 'static {
    /// What it keeps about each of them.
    type Client: Default;

    /// Takes the commands that are whole out of `input` and appends their replies to `replies`.
    ///
    /// It may answer some of them only, and leave the others in `input`: [`Flow::Again`]. It should do so once
    /// [`Replies::is_full`]; what it appends beyond that takes memory without a bound.
    fn serve(
        &mut self,
        from: ConnectionId,
        client: &mut Self::Client,
        input: &mut BytesMut,
        replies: &mut Replies,
    ) -> Flow;
}

/// How a service goes on with a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// All that was whole is answered: serve the client again when more has arrived.
    Stay,
    /// Whole commands are left: serve the client again when replies have been written and are not full, before more is read.
    Again,
    /// The reply to the last command follows by [`Server::send`]: nothing is served or read before that.
    Wait,
    /// The client gets its replies, and then the connection is closed.
    Leave,
}

/// Who is let in, and how much is kept for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Clients at once.
    pub max_clients: usize,
    /// Only clients on this machine are let in.
    pub protected: bool,
    /// Bytes of replies that may wait for a client before it is served and read no further. Taken when the client comes.
    pub reply_budget: usize,
}

impl Default for Settings {
    /// 10,000 clients of this machine, with 1 MiB of replies each.
    fn default() -> Self {
        Self { max_clients: 10_000, protected: true, reply_budget: 1 << 20 }
    }
}

/// What a server has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Clients let in.
    pub admitted: u64,
    /// Clients refused because there were too many.
    pub refused_full: u64,
    /// Clients refused because of protected mode.
    pub refused_protected: u64,
}

new_key_type! {
    /// Names what was bound together: one connection type on some addresses.
    pub struct BindingId;
}

/// Opens one address of a binding.
type Open<S> = Box<dyn Fn(&mut EventLoop<Hall<S>>, &Address) -> io::Result<ListenerId>>;

/// The listeners of a binding, by address, ports filled in.
type Listeners = BTreeMap<Address, ListenerId>;

struct Binding<S: Service> {
    open: Open<S>,
    listeners: Listeners,
}

/// A service, the clients it has, and the addresses it is found at.
pub struct Server<S: Service> {
    events: EventLoop<Hall<S>>,
    bindings: SlotMap<BindingId, Binding<S>>,
}

/// What the handlers work on.
struct Hall<S: Service> {
    service: S,
    settings: Settings,
    clients: SecondaryMap<ConnectionId, Client<S::Client>>,
    counters: Counters,
    /// Where bytes are read to.
    chunk: Box<[u8]>,
}

struct Client<C> {
    own: C,
    input: BytesMut,
    replies: Replies,
    /// What the service said last; `Again` when more was read since.
    flow: Flow,
}

impl<S: Service> Server<S> {
    /// A server that is found nowhere yet.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new(service: S, settings: Settings) -> io::Result<Self> {
        let (clients, counters) = (SecondaryMap::new(), Counters::default());
        let hall = Hall { service, settings, clients, counters, chunk: vec![0; CHUNK].into() };
        Ok(Self { events: EventLoop::new(hall)?, bindings: SlotMap::with_key() })
    }

    /// Listens with a connection type on some addresses.
    ///
    /// # Errors
    /// As [`ConnectionType::listen`], and then on none of them.
    pub fn bind<T: ConnectionType + 'static>(&mut self, with: T, at: &[Address]) -> io::Result<BindingId> {
        let open: Open<S> = Box::new(move |events, at| events.listen(&with, at, on_connection));
        let id = self.bindings.insert(Binding { open, listeners: Listeners::new() });
        self.rebind(id, at).inspect_err(|_| {
            self.bindings.remove(id);
        })?;
        Ok(id)
    }

    /// Listens on these addresses instead. Clients that came by the old ones stay.
    ///
    /// # Errors
    /// As [`ConnectionType::listen`]; it then listens where it did before.
    pub fn rebind(&mut self, id: BindingId, at: &[Address]) -> io::Result<()> {
        let Some(binding) = self.bindings.get_mut(id) else {
            return Err(io::Error::new(ErrorKind::InvalidInput, "no such binding"));
        };
        let events = &mut self.events;
        let (kept, old): (Listeners, Listeners) =
            std::mem::take(&mut binding.listeners).into_iter().partition(|(address, _)| at.contains(address));
        let new: Vec<&Address> = at.iter().filter(|address| !kept.contains_key(*address)).collect();
        binding.listeners = kept;
        match open_all(events, &binding.open, new.iter().copied()) {
            Ok(opened) => {
                binding.listeners.extend(opened);
                old.into_values().for_each(|listener| events.close_listener(listener));
                Ok(())
            }
            // An old one may be what is in the way: an address among all addresses, or the other way round.
            Err(error) if error.kind() == ErrorKind::AddrInUse && !old.is_empty() => {
                let addresses: Vec<Address> = old.keys().cloned().collect();
                old.into_values().for_each(|listener| events.close_listener(listener));
                let opened = open_all(events, &binding.open, new);
                let (opened, result) = match opened {
                    Ok(opened) => (opened, Ok(())),
                    Err(error) => (open_all(events, &binding.open, &addresses)?, Err(error)),
                };
                binding.listeners.extend(opened);
                result
            }
            Err(error) => {
                binding.listeners.extend(old);
                Err(error)
            }
        }
    }

    /// Where a binding is found, with ports filled in.
    pub fn addresses(&self, id: BindingId) -> Vec<Address> {
        self.bindings.get(id).into_iter().flat_map(|binding| binding.listeners.keys().cloned()).collect()
    }

    /// One turn of the event loop; see [`EventLoop::turn`].
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.events.turn(timeout)
    }

    /// Whether something can be done without waiting; see [`EventLoop::has_pending`].
    pub fn has_pending(&mut self) -> bool {
        self.events.has_pending()
    }

    /// Sends a client a message, or the reply that it waits for ([`Flow::Wait`]).
    ///
    /// # Errors
    /// The client has left, or too many bytes wait for it already: [`Settings::reply_budget`]. Nothing was sent.
    pub fn send(&mut self, to: ConnectionId, bytes: &[u8]) -> Result<(), SendError> {
        let client = self.events.state.clients.get_mut(to).ok_or(SendError::NoSuchClient)?;
        client.replies.send(bytes)?;
        if client.flow == Flow::Wait {
            client.flow = Flow::Again;
        }
        go_on(&mut self.events, to);
        Ok(())
    }

    /// Closes a client's connection. What was written is delivered, for at most [`Timeouts::linger`]; replies that wait are
    /// lost.
    pub fn close(&mut self, client: ConnectionId) {
        leave(&mut self.events, client);
    }

    /// The service.
    pub const fn service(&mut self) -> &mut S {
        &mut self.events.state.service
    }

    /// Who is let in, from now on.
    pub const fn settings(&mut self) -> &mut Settings {
        &mut self.events.state.settings
    }

    /// How long handshakes and closes may take, from now on.
    pub const fn timeouts(&mut self) -> &mut Timeouts {
        &mut self.events.timeouts
    }

    /// What it has seen so far.
    pub const fn counters(&self) -> Counters {
        self.events.state.counters
    }

    /// The clients that are there, and what the service keeps about each of them.
    pub fn clients(&self) -> impl Iterator<Item = (ConnectionId, &S::Client)> {
        self.events.state.clients.iter().map(|(id, client)| (id, &client.own))
    }

    /// Clients that are there.
    pub fn client_count(&self) -> usize {
        self.events.state.clients.len()
    }

    /// Returns how many bytes of memory are taken by replies that wait for their clients.
    pub fn waiting_bytes(&self) -> usize {
        self.events.state.clients.values().map(|client| client.replies.memory()).sum()
    }

    /// Closes everything; clients get their last replies, for at most [`Timeouts::linger`].
    ///
    /// # Errors
    /// As [`EventLoop::turn`].
    pub fn finish(self) -> io::Result<S> {
        Ok(self.events.finish()?.service)
    }
}

/// Opens all of the addresses, or none.
fn open_all<'a, S: Service>(
    events: &mut EventLoop<Hall<S>>,
    open: &Open<S>,
    at: impl IntoIterator<Item = &'a Address>,
) -> io::Result<Listeners> {
    let mut opened = Listeners::new();
    for address in at {
        match open(events, address) {
            Ok(listener) => {
                let address = events.listener_address(listener).unwrap_or_else(|| address.clone());
                opened.insert(address, listener);
            }
            Err(error) => {
                opened.into_values().for_each(|listener| events.close_listener(listener));
                return Err(io::Error::new(error.kind(), format!("cannot listen on {address}: {error}")));
            }
        }
    }
    Ok(opened)
}

/// Lets a client in, or has it told why not.
fn on_connection<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    let local = events.get(id).is_some_and(Connection::is_local);
    let hall = &mut events.state;
    let handler = if hall.settings.protected && !local {
        hall.counters.refused_protected += 1;
        refuse_stranger
    } else if hall.clients.len() >= hall.settings.max_clients {
        hall.counters.refused_full += 1;
        refuse_excess
    } else {
        hall.counters.admitted += 1;
        let replies = Replies::new(hall.settings.reply_budget);
        let (own, input) = (S::Client::default(), BytesMut::new());
        hall.clients.insert(id, Client { own, input, replies, flow: Flow::Stay });
        on_established
    };
    let refused = !events.state.clients.contains_key(id);
    if refused && events.len() - events.state.clients.len() > REFUSED_AT_ONCE {
        events.abort(id);
    } else if events.accept(id, handler).is_err() {
        leave(events, id);
    }
}

fn refuse_stranger<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    refuse(
        events,
        id,
        b"-DENIED this server is in protected mode and lets in clients of its own machine only. Turn protected mode off, with \
          access restricted in another way, or connect from there.\r\n",
    );
}

fn refuse_excess<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    refuse(events, id, b"-ERR max number of clients reached\r\n");
}

/// Tells a client why it is not let in. The close waits until the text has arrived.
fn refuse<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId, why: &[u8]) {
    if let Some(connection) = events.get_mut(id).filter(|connection| connection.state() == State::Connected)
        && let Err(error) = connection.write_all(why)
    {
        tracing::debug!(%error, "a refused client has left before it was told why");
    }
    events.close(id);
}

fn on_established<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    let Some(connection) = events.get_mut(id) else { return };
    if let Some(error) = connection.last_error() {
        tracing::info!(%error, kind = %connection.kind(), "a client did not make it in");
        leave(events, id);
        return;
    }
    tracing::debug!(kind = %connection.kind(), peer = ?connection.peer_address(), "client");
    connection.set_read_handler(Some(on_readable));
}

fn leave<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    events.state.clients.remove(id);
    events.close(id);
}

fn on_readable<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    let Some((hall, connection)) = events.get_with_state(id) else { return };
    let Some(client) = hall.clients.get_mut(id) else { return };
    match connection.read(&mut hall.chunk) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
        Ok(0) => leave(events, id),
        Ok(read) => {
            client.input.extend_from_slice(hall.chunk.get(..read).unwrap_or_default());
            client.flow = Flow::Again;
            go_on(events, id);
        }
        Err(error) => {
            tracing::info!(%error, peer = ?connection.peer_address(), "client lost");
            leave(events, id);
        }
    }
}

/// Writes replies as far as there is room, and serves a client once if it has room for more of them.
fn go_on<S: Service>(events: &mut EventLoop<Hall<S>>, id: ConnectionId) {
    let Some((hall, connection)) = events.get_with_state(id) else { return };
    let Some(client) = hall.clients.get_mut(id) else { return };
    let Client { own, input, replies, flow } = client;
    let mut written = replies.write_to(connection);
    if written.is_ok() && *flow == Flow::Again && !replies.is_full() {
        *flow = hall.service.serve(id, own, input, replies);
        written = replies.write_to(connection);
    }
    let reads = *flow == Flow::Stay && !replies.is_full();
    connection.set_read_handler(reads.then_some(on_readable));
    let writes = *flow == Flow::Again || !replies.is_empty();
    connection.set_write_handler(writes.then_some(go_on), Barrier::ReadFirst);
    if written.is_err() || (*flow == Flow::Leave && replies.is_empty()) {
        leave(events, id);
    }
}

impl<S: Service> std::fmt::Debug for Server<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("clients", &self.client_count())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}
