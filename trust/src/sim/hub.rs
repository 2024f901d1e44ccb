//! All connections of a host on one [`Endpoint`]: what its event loop does.
//!
//! A program runs only when the endpoint tells something of its connection, or at a time of its own. Nobody else looks: what
//! the endpoint does not tell stays unnoticed, and the run does not come to its end.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_conn::{Connection, ConnectionId, Endpoint, Error, Event, Limits, Options, RegisteredBuffer};
use rdma_proto::time::Instant;
use rdma_softsim::{Random, SoftSim};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use super::app::{App, Face, How};
use super::end::{DIAL_TIMEOUT, End};

/// How an endpoint is used: as the scenario has it.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Its descriptor is watched for edges, not for its level.
    pub edges: bool,
    /// Whoever closes a connection wants to hear no more of it.
    pub abandons: bool,
    /// What it may hold.
    pub limits: Limits,
}

/// A host's endpoint, with the programs of its connections.
pub struct Hub {
    host: u32,
    endpoint: Endpoint<SoftSim>,
    usage: Usage,
    poller: OwnedFd,
    /// Connections to ask for: the place among the ends, and what for.
    dials: Vec<(usize, Instant, SocketAddr, Options)>,
    ends: Vec<End>,
    /// Whose end a connection is.
    seats: BTreeMap<ConnectionId, usize>,
}

/// A connection of an endpoint, as its program sees it.
struct Seat<'a> {
    endpoint: &'a mut Endpoint<SoftSim>,
    id: ConnectionId,
    abandons: bool,
    /// It was handed over to the endpoint, which sees it to its end.
    abandoned: bool,
}

impl Hub {
    /// An endpoint on a host.
    pub fn new(backend: &SoftSim, host: u32, usage: Usage) -> Result<Self, Error> {
        let endpoint = Endpoint::new(backend, usage.limits)?;
        let poller = watch(&endpoint, usage.edges).map_err(|errno| Error::Wait(Arc::new(errno.into())))?;
        Ok(Self {
            host,
            endpoint,
            usage,
            poller,
            dials: Vec::new(),
            ends: Vec::new(),
            seats: BTreeMap::new(),
        })
    }

    /// Listens. Without a listener, for instance by a fault, all clients are refused.
    pub fn listen(&mut self, address: SocketAddr, options: Options) {
        if let Err(error) = self.endpoint.listen(address, options) {
            tracing::debug!(%error, "no listener");
        }
    }

    /// A client that begins to connect at a certain time.
    pub fn dial(&mut self, peer: SocketAddr, options: Options, at: Instant, connection: usize, app: App) {
        self.dials.push((self.ends.len(), at, peer, options));
        self.ends.push(End::seated(self.host, connection, app));
    }

    /// Its host.
    pub const fn host(&self) -> u32 {
        self.host
    }

    /// All that there were.
    pub fn ends(&self) -> &[End] {
        &self.ends
    }

    /// All that there were.
    pub fn ends_mut(&mut self) -> &mut [End] {
        &mut self.ends
    }

    /// The connection of an end, while it has one.
    pub fn connection(&self, place: usize) -> Option<&Connection<SoftSim>> {
        let (id, _) = self.seats.iter().find(|(_, seat)| **seat == place)?;
        self.endpoint.connection(*id)
    }

    /// Whether nobody is left: no program, nor anything on its way to its end.
    pub fn is_over(&self) -> bool {
        let ended = self.ends.iter().all(|end| end.ending().is_some());
        ended && self.endpoint.usage().connections == 0
    }

    /// What its descriptor says; of an edge, once.
    pub fn is_readable(&self) -> bool {
        let mut events = Vec::with_capacity(1);
        let polled = epoll::wait(&self.poller, spare_capacity(&mut events), Some(&Timespec::default()));
        polled.is_ok_and(|count| count > 0)
    }

    /// When it wants to run, if its descriptor stays silent.
    pub fn next_wake(&self) -> Option<Instant> {
        let apps = self.seats.values().filter_map(|place| self.ends[*place].next_wake());
        let dials = self.dials.iter().map(|(_, at, ..)| *at);
        self.endpoint.next_timeout().into_iter().chain(apps).chain(dials).min()
    }

    /// Whether a connection wants to be looked at sooner than its endpoint.
    pub fn oversleeps(&self) -> bool {
        let connections = self.seats.keys().filter_map(|id| self.endpoint.connection(*id));
        // What is overdue is due now.
        let soonest =
            connections.filter_map(Connection::next_timeout).min().map(|at| at.max(self.endpoint.now()));
        soonest.is_some_and(|soonest| self.endpoint.next_timeout().is_none_or(|at| at > soonest))
    }

    /// Everything goes. What is left are the ends.
    pub fn give_up(mut self) -> Vec<End> {
        self.ends.iter_mut().for_each(End::kill);
        self.seats.into_keys().for_each(|id| self.endpoint.remove(id));
        self.ends
    }

    /// One turn of the event loop, which then sleeps again. `program` is the program of a connection that was accepted.
    ///
    /// # Errors
    /// The endpoint is lost.
    pub fn run(
        &mut self,
        random: &mut Random,
        program: impl Fn(&mut Random, usize) -> App,
    ) -> Result<(), Error> {
        let now = self.endpoint.now();
        self.ask(now);
        self.endpoint.progress()?;
        // Some take what they are told one by one.
        let most = if random.chance(1, 4) { 1 } else { u32::MAX };
        let mut told = BTreeSet::new();
        for _ in 0..most {
            let Some(event) = self.endpoint.next_event() else { break };
            told.extend(self.take(event, random, &program));
        }
        let due = |place: &&usize| self.ends[**place].next_wake().is_some_and(|at| at <= now);
        told.extend(self.seats.values().filter(due));
        let run: Vec<_> =
            self.seats.iter().filter(|(_, place)| told.contains(place)).map(|(id, at)| (*id, *at)).collect();
        for (id, place) in run {
            self.turn(id, place);
        }
        Ok(())
    }

    fn ask(&mut self, now: Instant) {
        for (place, _, peer, options) in self.dials.extract_if(.., |(_, at, ..)| *at <= now) {
            match self.endpoint.connect(peer, None, DIAL_TIMEOUT, options) {
                Ok(id) => drop(self.seats.insert(id, place)),
                Err(error) => self.ends[place].over(How::Failed(error)),
            }
        }
    }

    /// Whose program has to run by what was told.
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
        // What nobody has asked for was accepted.
        let (place, accepted) = match self.seats.get(&id) {
            Some(place) => (*place, false),
            None => (self.seat(id, random, program)?, true),
        };
        let end = &mut self.ends[place];
        if let Event::Opened { .. } = event {
            end.open();
        }
        let connection = self.endpoint.connection(id);
        // A dial that has not come about has no queue pair that anybody knows of.
        let known = connection.filter(|_| accepted || end.is_open());
        if let Some(connection) = known {
            end.found(connection.queue_pair_number());
        }
        if let Event::Ended(_) = event
            && !end.is_open()
        {
            // Gone before it was there: to a server, that is an end like any other.
            let left = known.is_some_and(|connection| connection.check().is_ok());
            let error = self.endpoint.check(id).err();
            end.over(if left { How::Eof } else { error.map_or(How::Gone, How::Failed) });
            self.seats.remove(&id);
            self.endpoint.remove(id);
            return None;
        }
        Some(place)
    }

    /// A place for a connection that was accepted.
    fn seat(
        &mut self,
        id: ConnectionId,
        random: &mut Random,
        program: impl Fn(&mut Random, usize) -> App,
    ) -> Option<usize> {
        let IpAddr::V4(ip) = self.endpoint.peer_addr(id)?.ip() else { return None };
        let connection = usize::from(ip.octets()[3]).saturating_sub(2);
        let place = self.ends.len();
        self.ends.push(End::seated(self.host, connection, program(random, connection)));
        self.seats.insert(id, place);
        Some(place)
    }

    fn turn(&mut self, id: ConnectionId, place: usize) {
        let end = &mut self.ends[place];
        let abandons = self.usage.abandons;
        let mut seat = Seat { endpoint: &mut self.endpoint, id, abandons, abandoned: false };
        if end.is_open() && end.run_seated(&mut seat) {
            let abandoned = seat.abandoned;
            self.seats.remove(&id);
            if !abandoned {
                self.endpoint.remove(id);
            }
        }
    }
}

impl Face for Seat<'_> {
    fn connection(&self) -> &Connection<SoftSim> {
        match self.endpoint.connection(self.id) {
            Some(connection) => connection,
            None => unreachable!("a program runs only while its connection is there"),
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.endpoint.check(self.id)
    }

    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, Error> {
        self.endpoint.read(self.id, into)
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        self.endpoint.write(self.id, from)
    }

    fn lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<SoftSim>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.endpoint.lend(self.id, buffer, range)
    }

    fn close(&mut self, linger: Duration) -> bool {
        self.abandoned = self.abandons;
        let closed = if self.abandons {
            self.endpoint.close(self.id, linger)
        } else {
            self.endpoint.shutdown(self.id, linger)
        };
        closed.is_ok() && !self.abandons
    }
}

/// An epoll instance that watches an endpoint.
fn watch(endpoint: &Endpoint<SoftSim>, edges: bool) -> rustix::io::Result<OwnedFd> {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = if edges { epoll::EventFlags::IN | epoll::EventFlags::ET } else { epoll::EventFlags::IN };
    epoll::add(&poller, endpoint.as_fd(), epoll::EventData::new_u64(0), flags)?;
    Ok(poller)
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {}: {:?}", self.host, self.endpoint)
    }
}
