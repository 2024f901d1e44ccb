//! An event loop on an [`Endpoint`] for all connections of a host, or for a single one.
//!
//! A program runs only on an event of its connection, or at a time that it chose: with an event
//! that the endpoint does not report, the run does not end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rdma_backend::time::Instant;
use rdma_conn::{Connection, ConnectionId, Endpoint, Error, Event, Limits, Options};
use rdma_softsim::{Random, SoftSim};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::app::{App, EndCause, Handle};
use super::end::End;

/// How long connecting may take.
pub const DIAL_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

/// How the scenario uses an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Its descriptor is watched for edges, not for its level.
    pub edges: bool,
    /// A program that closes a connection wants no more of its events.
    pub abandons: bool,
    /// The limits of the endpoint.
    pub limits: Limits,
}

impl Usage {
    /// Draws the usage of an endpoint of one connection.
    pub fn draw(random: &mut Random) -> Self {
        Self { edges: random.chance(1, 2), abandons: random.chance(1, 8), limits: Limits::default() }
    }
}

/// An endpoint, with the programs of its connections.
pub struct EventLoop {
    host: u32,
    /// `None` once its process is gone.
    endpoint: Option<Endpoint<SoftSim>>,
    usage: Usage,
    poller: OwnedFd,
    /// Connections to request: the index of the end, the time, the peer and the options.
    dials: Vec<(usize, Instant, SocketAddr, Options)>,
    ends: Vec<End>,
    /// The index of the end that a connection is.
    places: BTreeMap<ConnectionId, usize>,
}

impl EventLoop {
    /// Creates an endpoint on a host.
    ///
    /// # Errors
    /// The endpoint cannot be created.
    pub fn new(backend: &SoftSim, host: u32, usage: Usage) -> Result<Self, Error> {
        Self::of(Endpoint::new(backend, usage.limits)?, host, usage)
    }

    fn of(endpoint: Endpoint<SoftSim>, host: u32, usage: Usage) -> Result<Self, Error> {
        let poller = watch(&endpoint, usage.edges).map_err(|errno| Error::Wait(Arc::new(errno.into())))?;
        let (dials, ends, places) = (Vec::new(), Vec::new(), BTreeMap::new());
        Ok(Self { host, endpoint: Some(endpoint), usage, poller, dials, ends, places })
    }

    /// Wraps the endpoint of one connection that a listener has accepted.
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn accepted(
        (endpoint, id): (Endpoint<SoftSim>, ConnectionId),
        host: u32,
        usage: Usage,
        connection: usize,
        app: App,
    ) -> Result<Self, Error> {
        let pair = endpoint.connection(id).map(Connection::queue_pair_number);
        let mut this = Self::of(endpoint, host, usage)?;
        let mut end = End::new(host, connection, app);
        pair.into_iter().for_each(|pair| end.found(pair));
        this.ends.push(end);
        this.places.insert(id, 0);
        Ok(this)
    }

    /// Lets programs run before their connections are established.
    pub fn begin(&mut self) {
        self.ends.iter_mut().for_each(End::open);
    }

    /// Listens. Without a listener, for instance after a fault, all clients are refused.
    pub fn listen(&mut self, address: SocketAddr, options: Options) {
        if let Some(Err(error)) = self.endpoint.as_mut().map(|endpoint| endpoint.listen(address, options)) {
            tracing::debug!(%error, "no listener");
        }
    }

    /// Adds a client that begins to connect at a certain time.
    pub fn dial(&mut self, peer: SocketAddr, options: Options, at: Instant, connection: usize, app: App) {
        self.dials.push((self.ends.len(), at, peer, options));
        self.ends.push(End::new(self.host, connection, app));
    }

    /// Returns its host.
    pub const fn host(&self) -> u32 {
        self.host
    }

    /// Returns all ends so far.
    pub fn ends(&self) -> &[End] {
        &self.ends
    }

    /// Returns all ends so far.
    pub fn ends_mut(&mut self) -> &mut [End] {
        &mut self.ends
    }

    /// Returns the connection of an end, while it has one.
    pub fn connection(&self, place: usize) -> Option<&Connection<SoftSim>> {
        let (id, _) = self.places.iter().find(|(_, end)| **end == place)?;
        self.endpoint.as_ref()?.connection(*id)
    }

    /// Returns whether no program is left, and no connection is closing.
    pub fn is_over(&self) -> bool {
        let ended = self.ends.iter().all(|end| end.ending().is_some());
        ended && self.endpoint.as_ref().is_none_or(|endpoint| endpoint.usage().connections == 0)
    }

    /// Returns whether its descriptor is readable; for an edge, once.
    pub fn is_readable(&self) -> bool {
        self.endpoint.is_some() && ready(&self.poller, 1) > 0
    }

    /// Returns when it wants to run if its descriptor stays silent.
    pub fn next_wake(&self) -> Option<Instant> {
        let endpoint = self.endpoint.as_ref()?;
        let apps = self.places.values().filter_map(|place| self.ends[*place].next_wake());
        let dials = self.dials.iter().map(|(_, at, ..)| *at);
        endpoint.next_timeout().into_iter().chain(apps).chain(dials).min()
    }

    /// Returns whether a connection has an earlier time-out than its endpoint.
    pub fn oversleeps(&self) -> bool {
        let Some(endpoint) = &self.endpoint else { return false };
        let connections = self.places.keys().filter_map(|id| endpoint.connection(*id));
        // An overdue time-out is due now.
        let soonest = connections.filter_map(Connection::next_timeout).min().map(|at| at.max(endpoint.now()));
        soonest.is_some_and(|soonest| endpoint.next_timeout().is_none_or(|at| at > soonest))
    }

    /// Drops everything except the ends.
    pub fn give_up(&mut self) {
        self.ends.iter_mut().for_each(|end| end.over(EndCause::Gone));
        self.places.clear();
        self.endpoint = None;
    }

    /// Runs one turn of the event loop, which then sleeps again. `program` is that of an accepted
    /// connection. Returns whether more than one thing had woken it.
    ///
    /// # Errors
    /// The endpoint is lost.
    pub fn run(
        &mut self,
        random: &mut Random,
        program: impl Fn(&mut Random, usize) -> App,
    ) -> Result<bool, Error> {
        let Some(endpoint) = &mut self.endpoint else { return Ok(false) };
        let now = endpoint.now();
        // Before `progress` takes what there is.
        let several = ready(&*endpoint, 2) > 1;
        self.ask(now);
        let Some(endpoint) = &mut self.endpoint else { return Ok(false) };
        endpoint.progress()?;
        // Some loops take events one by one.
        let most = if random.chance(1, 4) { 1 } else { u32::MAX };
        let mut told = BTreeSet::new();
        for _ in 0..most {
            let Some(event) = self.endpoint.as_mut().and_then(Endpoint::next_event) else { break };
            told.extend(self.take(event, random, &program));
        }
        let due = |place: &&usize| self.ends[**place].next_wake().is_some_and(|at| at <= now);
        told.extend(self.places.values().filter(due));
        // Collected first: a turn removes connections that end.
        let run: Vec<_> =
            self.places.iter().filter(|(_, place)| told.contains(place)).map(|(id, at)| (*id, *at)).collect();
        let diligent = random.chance(1, 4);
        for (id, place) in run {
            self.turn(id, place, diligent);
        }
        Ok(several)
    }

    fn ask(&mut self, now: Instant) {
        let Some(endpoint) = &mut self.endpoint else { return };
        for (place, _, peer, options) in self.dials.extract_if(.., |(_, at, ..)| *at <= now) {
            match endpoint.connect(peer, None, DIAL_TIMEOUT, options) {
                Ok(id) => drop(self.places.insert(id, place)),
                Err(error) => self.ends[place].over(EndCause::Failed(error)),
            }
        }
    }

    fn take(
        &mut self,
        event: Event,
        random: &mut Random,
        program: impl Fn(&mut Random, usize) -> App,
    ) -> Option<usize> {
        let (Event::Opened { id, .. }
        | Event::Readable(id)
        | Event::Writable(id)
        | Event::Returned(id)
        | Event::Ended(id)) = event
        else {
            return None;
        };
        let place = match self.places.get(&id) {
            Some(place) => *place,
            // A connection that was not requested was accepted.
            None => self.add_accepted(id, random, program)?,
        };
        let endpoint = self.endpoint.as_mut()?;
        let end = &mut self.ends[place];
        if let Event::Opened { .. } = event {
            end.open();
        }
        // One that was not established has no number that the program could know.
        if let Some(connection) = endpoint.connection(id).filter(|_| end.is_open()) {
            end.found(connection.queue_pair_number());
        }
        // Its program has not begun, so that the loop records how it ended.
        if let Event::Ended(_) = event
            && !end.is_open()
        {
            end.over(endpoint.check(id).err().map_or(EndCause::Gone, EndCause::Failed));
            self.places.remove(&id);
            endpoint.abort(id);
            return None;
        }
        Some(place)
    }

    fn add_accepted(
        &mut self,
        id: ConnectionId,
        random: &mut Random,
        program: impl Fn(&mut Random, usize) -> App,
    ) -> Option<usize> {
        let IpAddr::V4(ip) = self.endpoint.as_ref()?.peer_addr(id)?.ip() else { return None };
        // The inverse of `world::address`, for the host of a client.
        let connection = usize::from(ip.octets()[3]).saturating_sub(2);
        let place = self.ends.len();
        self.ends.push(End::new(self.host, connection, program(random, connection)));
        self.places.insert(id, place);
        Some(place)
    }

    fn turn(&mut self, id: ConnectionId, place: usize, diligent: bool) {
        let (end, abandons) = (&mut self.ends[place], self.usage.abandons);
        let Some(endpoint) = &mut self.endpoint else { return };
        let mut handle = Handle { endpoint, id, abandons, abandoned: false };
        if end.is_open() && end.run(&mut handle, diligent) {
            // The endpoint itself closes one that was abandoned.
            if !handle.abandoned {
                handle.endpoint.abort(id);
            }
            self.places.remove(&id);
        }
    }
}

fn ready(poller: &impl AsFd, most: usize) -> usize {
    let mut events = Vec::with_capacity(most);
    let polled = epoll::wait(poller, spare_capacity(&mut events), Some(&Timespec::default()));
    polled.unwrap_or(0)
}

fn watch(endpoint: &Endpoint<SoftSim>, edges: bool) -> rustix::io::Result<OwnedFd> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = if edges { epoll::EventFlags::IN | epoll::EventFlags::ET } else { epoll::EventFlags::IN };
    epoll::add(&poller, endpoint.as_fd(), epoll::EventData::new_u64(0), flags)?;
    Ok(poller)
}

impl std::fmt::Debug for EventLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {}: {:?}", self.host, self.endpoint)
    }
}
