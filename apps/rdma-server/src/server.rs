//! A server on an event loop: one service over any connection types, with limits.
//!
//! - TCP and RDMA may share an address and a port: their port spaces are separate, and so are the
//!   listeners.
//! - [`Server::rebind`] moves a service to other addresses. Existing clients stay.
//! - A refused client is told why, on RDMA as on TCP: the text arrives before the end.
//! - A client of TCP or TLS that sees an orderly end has seen every reply: if replies are lost, its
//!   connection is reset. It may end its own direction, and still gets its replies. Connections of
//!   RDMA and Unix sockets end in one way, which does not tell.
//! - A client that does not read its replies is not read any further, so its window or socket fills
//!   and it waits. At most [`ServerSettings::reply_budget`] bytes and one reply wait for it
//!   (VR-RES-008). The loop still sleeps.
//! - A request may be as long as the service allows ([`Service::request_limit`]). A client without
//!   waiting bytes has no buffer, whatever it sent and got before (VR-RES-008).
//! - [`affinity`](crate::affinity) pins the server's thread and a device's interrupts to CPUs.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use bytes::BytesMut;
use slotmap::{SecondaryMap, SlotMap, new_key_type};

use crate::address::Address;
use crate::buffer::Buffer;
use crate::event_loop::{EventLoop, ListenerId, SessionId, Timeouts};
use crate::replies::{Replies, SendError};
use crate::session::{Barrier, Session};
use crate::transport::{ConnectionType, out_of_bounds};

/// Bytes read from a client at once.
const CHUNK: usize = 64 << 10;

/// Clients that may be refused with a text at the same time. Further ones are refused without.
const REFUSED_AT_ONCE: usize = 128;

/// The behaviour of a server towards its clients.
pub trait Service: 'static {
    /// The service's state for each client.
    type Client: Default;

    /// Removes whole commands from `input` and appends their replies to `replies`. Bytes left in
    /// `input` are passed again, followed by those that have arrived meanwhile.
    ///
    /// It may leave commands in `input` and return [`Flow::Again`]. It should do so once
    /// [`Replies::is_full`]: replies beyond that take unbounded memory.
    fn serve(
        &mut self,
        from: SessionId,
        client: &mut Self::Client,
        input: &mut BytesMut,
        replies: &mut Replies,
    ) -> Flow;

    /// Returns the maximum length of this client's requests, in bytes. The default is 1 MiB.
    ///
    /// It bounds what [`Service::serve`] leaves in `input` when it waits for more ([`Flow::Stay`]).
    /// Its memory is at most twice that and 128 KiB. A client with a longer request gets an error,
    /// and its connection is closed.
    fn request_limit(&self, _client: &Self::Client) -> usize {
        1 << 20
    }
}

/// What to do next with a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// All whole commands are answered: serve the client again when more has arrived.
    Stay,
    /// Whole commands are left: serve again when the replies have room, before reading more.
    Again,
    /// The reply follows with [`Server::send`]: serve and read nothing before that.
    Wait,
    /// Send the remaining replies, then close the connection.
    Leave,
}

/// Admission and per-client limits. Start from [`ServerSettings::default`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerSettings {
    /// Clients at the same time, including those that are closing.
    pub max_clients: usize,
    /// Whether only clients on this machine are admitted.
    pub protected: bool,
    /// Bytes of replies that may wait for a client before it is served and read no further: at
    /// least 1. Fixed when the client connects.
    pub reply_budget: usize,
}

impl ServerSettings {
    rdma_proto::setters! {
        max_clients: usize,
        protected: bool,
        reply_budget: usize,
    }

    fn check(&self) -> io::Result<()> {
        if self.reply_budget == 0 {
            return Err(out_of_bounds("ServerSettings::reply_budget must be at least 1"));
        }
        Ok(())
    }
}

impl Default for ServerSettings {
    /// 10,000 clients of this machine, with 1 MiB of replies each.
    fn default() -> Self {
        Self { max_clients: 10_000, protected: true, reply_budget: 1 << 20 }
    }
}

/// The counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Clients admitted: their connections were established.
    pub admitted: u64,
    /// Clients refused because there were too many.
    pub refused_full: u64,
    /// Clients refused by protected mode, including those that only claimed to be local.
    pub refused_protected: u64,
}

new_key_type! {
    /// Identifies a binding: one connection type on some addresses.
    pub struct BindingId;
}

type Open<S> = Box<dyn Fn(&mut EventLoop<Clients<S>>, &Address) -> io::Result<ListenerId>>;

/// The listeners of a binding by address, with actual ports.
type Listeners = BTreeMap<Address, ListenerId>;

struct Binding<S: Service> {
    open: Open<S>,
    listeners: Listeners,
}

/// A service, its clients, and its addresses.
pub struct Server<S: Service> {
    events: EventLoop<Clients<S>>,
    bindings: SlotMap<BindingId, Binding<S>>,
}

struct Clients<S: Service> {
    service: S,
    settings: ServerSettings,
    all: SecondaryMap<SessionId, Client<S::Client>>,
    counters: ServerCounters,
    chunk: Box<[u8]>,
    spare: Spare,
}

#[derive(Default)]
struct Spare {
    input: Buffer,
    replies: Buffer,
}

struct Client<C> {
    own: C,
    input: Buffer,
    replies: Replies,
    /// The service's last answer; `Again` when more was read since.
    flow: Flow,
}

impl<S: Service> Server<S> {
    /// Returns a server without addresses.
    ///
    /// # Errors
    /// Returns [`InvalidInput`](ErrorKind::InvalidInput) if a setting is out of bounds, or an error
    /// if the process has no descriptor left.
    pub fn new(service: S, settings: ServerSettings) -> io::Result<Self> {
        settings.check()?;
        let (all, counters) = (SecondaryMap::new(), ServerCounters::default());
        let (chunk, spare) = (vec![0; CHUNK].into(), Spare::default());
        let state = Clients { service, settings, all, counters, chunk, spare };
        Ok(Self { events: EventLoop::new(state)?, bindings: SlotMap::with_key() })
    }

    /// Listens with a connection type on some addresses.
    ///
    /// # Errors
    /// Returns an error, and listens on none, if one is taken, not of this machine or of the type.
    pub fn bind<T: ConnectionType + 'static>(&mut self, with: T, at: &[Address]) -> io::Result<BindingId> {
        let open: Open<S> = Box::new(move |events, at| events.listen(&with, at, on_connection));
        let id = self.bindings.insert(Binding { open, listeners: Listeners::new() });
        self.rebind(id, at).inspect_err(|_| {
            self.bindings.remove(id);
        })?;
        Ok(id)
    }

    /// Listens on these addresses instead. Clients of the old ones stay.
    ///
    /// # Errors
    /// The errors are those of [`Server::bind`]. It then listens where it did before.
    pub fn rebind(&mut self, id: BindingId, at: &[Address]) -> io::Result<()> {
        let Some(binding) = self.bindings.get_mut(id) else {
            return Err(io::Error::new(ErrorKind::InvalidInput, "no such binding"));
        };
        let events = &mut self.events;
        // An address that stays keeps its listener, with the peers that wait there.
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
            // An old address may be in the way: one among all addresses, or the reverse.
            Err(error) if error.kind() == ErrorKind::AddrInUse && !old.is_empty() => {
                let addresses: Vec<Address> = old.keys().cloned().collect();
                old.into_values().for_each(|listener| events.close_listener(listener));
                let opened = open_all(events, &binding.open, new);
                let (opened, result) = match opened {
                    Ok(opened) => (opened, Ok(())),
                    // Back to the old ones, which were closed for the attempt.
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

    /// Returns the addresses of a binding, with actual ports.
    pub fn local_addrs(&self, id: BindingId) -> Vec<Address> {
        self.bindings.get(id).into_iter().flat_map(|binding| binding.listeners.keys().cloned()).collect()
    }

    /// Takes one turn of the event loop; see [`EventLoop::turn`].
    ///
    /// # Errors
    /// Returns an error if the system cannot wait, or if a listener is lost
    /// ([`ListenerLost`](crate::ListenerLost)). In the latter case its address no longer belongs to
    /// the binding, and the next turn continues with the others. [`Server::rebind`] listens again.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.events.turn(timeout).inspect_err(|_| {
            for binding in self.bindings.values_mut() {
                binding.listeners.retain(|_, listener| self.events.has_listener(*listener));
            }
        })
    }

    /// Returns whether there is work that needs no waiting; see [`EventLoop::has_pending`].
    pub fn has_pending(&mut self) -> bool {
        self.events.has_pending()
    }

    /// Sends a client a message, or the reply that it waits for ([`Flow::Wait`]).
    ///
    /// # Errors
    /// Returns an error, and sends nothing, if the client has left or more than
    /// [`ServerSettings::reply_budget`] bytes would wait for it.
    pub fn send(&mut self, to: SessionId, bytes: &[u8]) -> Result<(), SendError> {
        let client = self.events.state.all.get_mut(to).ok_or(SendError::NoSuchClient)?;
        client.replies.send(bytes)?;
        if client.flow == Flow::Wait {
            // Commands behind the one that has waited may be served now.
            client.flow = Flow::Again;
        }
        go_on(&mut self.events, to);
        Ok(())
    }

    /// Closes a client's connection. Written bytes are delivered, for at most [`Timeouts::linger`].
    /// If replies wait, they are lost, and the connection is aborted: see [`EventLoop::abort`].
    pub fn close(&mut self, client: SessionId) {
        leave(&mut self.events, client);
    }

    /// Returns the service.
    pub fn service(&mut self) -> &mut S {
        &mut self.events.state.service
    }

    /// Returns the settings.
    pub const fn settings(&self) -> &ServerSettings {
        &self.events.state.settings
    }

    /// Changes admission, and the limits of later clients.
    ///
    /// # Errors
    /// Returns [`InvalidInput`](ErrorKind::InvalidInput), and changes none, if one is not allowed.
    pub fn configure(&mut self, settings: ServerSettings) -> io::Result<()> {
        settings.check()?;
        self.events.state.settings = settings;
        Ok(())
    }

    /// Returns the time limits of handshakes and closes. Changes apply from now on.
    pub fn timeouts(&mut self) -> &mut Timeouts {
        &mut self.events.timeouts
    }

    /// Returns the counters.
    pub const fn counters(&self) -> ServerCounters {
        self.events.state.counters
    }

    /// Returns the connected clients, with the service's state for each.
    pub fn clients(&self) -> impl Iterator<Item = (SessionId, &S::Client)> {
        self.events.state.all.iter().map(|(id, client)| (id, &client.own))
    }

    /// Returns the number of connected clients.
    pub fn client_count(&self) -> usize {
        self.events.state.all.len()
    }

    /// Returns how much memory the buffers of all clients take, in bytes, for requests and replies.
    pub fn waiting_bytes(&self) -> usize {
        let clients = self.events.state.all.values();
        clients.map(|client| client.input.memory() + client.replies.memory()).sum()
    }

    /// Returns a waker that ends a waiting [`Server::turn`], from any thread.
    pub fn waker(&self) -> rdma_conn::Waker {
        self.events.waker()
    }

    /// Stops listening, as the beginning of a graceful end. Connected clients are still served.
    pub fn close_listeners(&mut self) {
        for binding in self.bindings.values_mut() {
            for listener in std::mem::take(&mut binding.listeners).into_values() {
                self.events.close_listener(listener);
            }
        }
    }

    /// Returns the number of connections: clients, those being refused, and those that are closing.
    pub fn connection_count(&self) -> usize {
        self.events.len()
    }

    /// Closes everything. Written bytes are delivered, for at most [`Timeouts::linger`]. Replies
    /// that wait for room are lost, and their connections aborted.
    ///
    /// For a graceful end, call [`Server::close_listeners`] first, and take turns until all clients
    /// have left or the time has passed.
    ///
    /// # Errors
    /// Returns an error if the system cannot wait.
    pub fn finish(mut self) -> io::Result<S> {
        for id in self.events.state.all.keys().collect::<Vec<_>>() {
            leave(&mut self.events, id);
        }
        Ok(self.events.finish()?.service)
    }
}

/// Opens all of the addresses, or none.
fn open_all<'a, S: Service>(
    events: &mut EventLoop<Clients<S>>,
    open: &Open<S>,
    at: impl IntoIterator<Item = &'a Address>,
) -> io::Result<Listeners> {
    let mut opened = Listeners::new();
    for address in at {
        match open(events, address) {
            Ok(listener) => {
                let address = events.listener_addr(listener).unwrap_or_else(|| address.clone());
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

const DENIED: &[u8] = b"-DENIED this server is in protected mode and lets in clients of its own machine only. Turn protected mode off, \
    with access restricted in another way, or connect from there.\r\n";
const FULL: &[u8] = b"-ERR max number of clients reached\r\n";

/// Admits a client, or has it told why not. Nothing costly was allocated for it yet (VR-SEC-007).
fn on_connection<S: Service>(events: &mut EventLoop<Clients<S>>, id: SessionId) {
    let local = events.get(id).is_some_and(Session::is_local);
    // Closing connections count, and this one does not count yet.
    let there = events.len().saturating_sub(events.refusing() + 1);
    let clients = &mut events.state;
    let refusal = if clients.settings.protected && !local {
        clients.counters.refused_protected += 1;
        Some(DENIED)
    } else if there >= clients.settings.max_clients {
        clients.counters.refused_full += 1;
        Some(FULL)
    } else {
        let replies = Replies::new(clients.settings.reply_budget);
        let (own, input) = (S::Client::default(), Buffer::default());
        clients.all.insert(id, Client { own, input, replies, flow: Flow::Stay });
        None
    };
    let accepted = match refusal {
        Some(_) if events.refusing() >= REFUSED_AT_ONCE => {
            // Refusing costs pages, so a crowd of strangers gets no text (VR-SEC-007).
            events.abort(id);
            return;
        }
        Some(why) => events.refuse(id, why),
        None => events.accept(id, on_established),
    };
    if accepted.is_err() {
        leave(events, id);
    }
}

fn on_established<S: Service>(events: &mut EventLoop<Clients<S>>, id: SessionId) {
    let Some((clients, connection)) = events.get_with_state(id) else { return };
    if let Some(error) = connection.last_error() {
        tracing::info!(%error, kind = %connection.kind(), "a client was not admitted");
        leave(events, id);
    } else if clients.settings.protected && !connection.is_local() {
        // It claimed to be local. Its path shows where it is (VR-SEC-008): it is sent nothing more.
        tracing::warn!(peer = ?connection.peer_addr(), "a client elsewhere gave an address of this machine as its own");
        clients.counters.refused_protected += 1;
        clients.all.remove(id);
        events.abort(id);
    } else {
        tracing::debug!(kind = %connection.kind(), peer = ?connection.peer_addr(), "client");
        clients.counters.admitted += 1;
        // Writes what [`Server::send`] was given during the handshake.
        go_on(events, id);
    }
}

/// Closes a client's connection: in order only if every reply was written.
fn leave<S: Service>(events: &mut EventLoop<Clients<S>>, id: SessionId) {
    let client = events.state.all.remove(id);
    if client.is_some_and(|client| !client.replies.is_empty()) {
        events.abort(id);
    } else {
        events.close(id);
    }
}

fn on_readable<S: Service>(events: &mut EventLoop<Clients<S>>, id: SessionId) {
    let Some((state, connection)) = events.get_with_state(id) else { return };
    let Some(client) = state.all.get_mut(id) else { return };
    match connection.read(&mut state.chunk) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
        // A client is read only when its whole commands are answered, so this is all that it gets.
        Ok(0) if connection.half_closes() => {
            client.input.bytes.clear();
            client.flow = Flow::Leave;
            go_on(events, id);
        }
        // Over RDMA, a connection ends as a whole: no reply can be delivered any more.
        Ok(0) => leave(events, id),
        Ok(read) => {
            client.input.borrow_from(&mut state.spare.input);
            client.input.bytes.extend_from_slice(state.chunk.get(..read).unwrap_or_default());
            client.flow = Flow::Again;
            go_on(events, id);
        }
        Err(error) => {
            tracing::info!(%error, peer = ?connection.peer_addr(), "client lost");
            leave(events, id);
        }
    }
}

/// Writes replies as far as there is room, serves a client if more may wait, and sets its handlers.
fn go_on<S: Service>(events: &mut EventLoop<Clients<S>>, id: SessionId) {
    let Some((state, connection)) = events.get_with_state(id) else { return };
    // Messages to a client in the handshake wait for its end.
    if connection.is_establishing() {
        return;
    }
    let Some(client) = state.all.get_mut(id) else { return };
    // Before serving: a client that does not read its replies is not served (VR-RES-008).
    let mut written = client.replies.write_to(connection);
    if written.is_ok() && client.flow == Flow::Again && !client.replies.is_full() {
        client.replies.borrow_from(&mut state.spare.replies);
        client.serve(id, &mut state.service);
        written = client.replies.write_to(connection);
    }
    let Client { input, replies, flow, .. } = client;
    input.settle(&mut state.spare.input);
    replies.settle(&mut state.spare.replies);
    // Nothing is read before it can be served, so that input is bounded (VR-RES-008).
    let reads = *flow == Flow::Stay && !replies.is_full();
    connection.set_read_handler(reads.then_some(on_readable));
    // With room for replies, a service that stopped with `Flow::Again` goes on.
    let writes = *flow == Flow::Again || !replies.is_empty();
    connection.set_write_handler(writes.then_some(go_on), Barrier::ReadFirst);
    if written.is_err() || (*flow == Flow::Leave && replies.is_empty()) {
        leave(events, id);
    }
}

impl<C: Default> Client<C> {
    fn serve<S: Service<Client = C>>(&mut self, id: SessionId, service: &mut S) {
        self.flow = service.serve(id, &mut self.own, &mut self.input.bytes, &mut self.replies);
        let limit = service.request_limit(&self.own);
        // This many bytes should contain a whole request.
        if self.flow == Flow::Stay && self.input.bytes.len() >= limit.max(1) {
            tracing::info!(limit, "a client's request is too long");
            let why = format!(
                "-ERR Protocol error: a request may have {limit} bytes here, and this one has more\r\n"
            );
            self.replies.extend_from_slice(why.as_bytes());
            self.flow = Flow::Leave;
        }
        // Commands behind the last one are not served.
        if self.flow == Flow::Leave {
            self.input.bytes.clear();
        }
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
