//! What peers cost a server that has not counted them (VR-SEC-007), and what a limit does to those
//! that it has.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::{Connecting, Incoming, Progress, Session, Shape, Step};
use rdma_backend::{Access, ConnectParams};
use rdma_conn::{ConnectionId, Endpoint, Event, Limits, Options};
use rdma_softsim::{Simulation, SoftSim};

use crate::world::{pass, pattern, simulation};

const SERVER: [u8; 4] = [192, 0, 2, 1];
const ADDRESS: ([u8; 4], u16) = (SERVER, 6379);
const LONG: Duration = Duration::from_secs(60);
const REFUSAL: &[u8] = b"-ERR max number of clients reached\r\n";
const STRANGERS: usize = 300;
/// What a handshake registers with the default options: slots for messages, and a page each for the
/// send buffer and the window of a refusal.
const NEWCOMER: u64 = 1280 * 32 + 2 * 4096;
/// What a client registers that is idle.
const IDLE: u64 = (1 << 20) + 1280 * 32 + 4096;

/// A program that counts a client when it learns of it, as `valkey-server` does, and echoes.
struct World {
    sim: Simulation,
    server: Endpoint<SoftSim>,
    most_clients: usize,
    clients: Vec<ConnectionId>,
    refused: usize,
    /// The most registered bytes on its host.
    most: u64,
}

impl World {
    fn new(limits: Limits, most_clients: usize, host: rdma_softsim::Limits) -> Self {
        Self::with(limits, most_clients, host, Options::default())
    }

    fn with(limits: Limits, most_clients: usize, host: rdma_softsim::Limits, options: Options) -> Self {
        let sim = simulation();
        let mut server = Endpoint::new(&sim.host(&[SERVER.into()], host), limits).expect("a device");
        server.listen(ADDRESS.into(), options).expect("a free address");
        Self { sim, server, most_clients, clients: Vec::new(), refused: 0, most: 0 }
    }

    fn host(&self, last: u8) -> SoftSim {
        self.sim.host(&[[192, 0, 2, last].into()], rdma_softsim::Limits::default())
    }

    /// A turn of the server's loop.
    fn turn(&mut self) {
        self.server.progress().expect("the fabric stays");
        while let Some(event) = self.server.next_event() {
            match event {
                Event::Opened { id, .. } if self.clients.len() >= self.most_clients => {
                    let told = self.server.write(id, &[IoSlice::new(REFUSAL)]).expect("open");
                    assert_eq!(told, Some(REFUSAL.len()));
                    self.server.abandon(id, Duration::from_secs(2)).expect("it is there");
                    self.refused += 1;
                }
                Event::Opened { id, .. } => self.clients.push(id),
                Event::Readable(id) => self.echo(id),
                Event::Ended(id) => {
                    self.server.abort(id);
                    self.clients.retain(|other| *other != id);
                }
                _ => {}
            }
        }
        let held = self.sim.fabric().resources(SERVER.into());
        assert_eq!(held.registered_bytes, self.server.usage().registered_bytes);
        self.most = self.most.max(held.registered_bytes);
        pass(&self.sim, Duration::from_micros(200));
    }

    fn echo(&mut self, id: ConnectionId) {
        let mut bytes = [0; 4096];
        while let Ok(Some(read)) = self.server.read(id, &mut bytes)
            && read > 0
        {
            let echoed = self.server.write(id, &[IoSlice::new(&bytes[..read])]).expect("open");
            assert_eq!(echoed, Some(read), "a short line finds room");
        }
    }

    fn until(&mut self, what: &str, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) {
        let by = self.sim.now().after(limit);
        while !done(self) {
            assert!(self.sim.now() < by, "{what}: not in {limit:?}");
            self.turn();
        }
    }
}

/// A client of this crate.
struct Client {
    endpoint: Endpoint<SoftSim>,
    id: ConnectionId,
    read: Vec<u8>,
}

impl Client {
    fn new(host: &SoftSim) -> Self {
        let mut endpoint = Endpoint::new(host, Limits::NONE).expect("a device");
        let id = endpoint.connect(ADDRESS.into(), None, LONG, Options::default()).expect("begins");
        Self { endpoint, id, read: Vec::new() }
    }

    fn turn(&mut self) {
        self.endpoint.progress().expect("the fabric stays");
        let mut bytes = [0; 4096];
        while let Ok(Some(read)) = self.endpoint.read(self.id, &mut bytes)
            && read > 0
        {
            self.read.extend(&bytes[..read]);
        }
        while self.endpoint.next_event().is_some() {}
    }

    fn opens(&mut self, world: &mut World, limit: Duration) {
        world.until("a client opens", limit, |_| {
            self.turn();
            self.endpoint.check(self.id).expect("it is not refused");
            self.endpoint.is_open(self.id)
        });
    }

    fn is_served(&mut self, world: &mut World) {
        let asked = self.endpoint.write(self.id, &[IoSlice::new(b"PING")]).expect("it is open");
        assert_eq!(asked, Some(4));
        self.read.clear();
        world.until("an answer", LONG, |_| {
            self.turn();
            self.read == b"PING"
        });
    }
}

/// A peer of raw verbs that asks for a connection, and sends nothing.
enum Stranger {
    Dials(Option<Connecting<SoftSim>>),
    Asked(Box<Session<SoftSim>>),
    Silent(Box<Session<SoftSim>>),
    Gone,
}

impl Stranger {
    fn new(host: &SoftSim) -> Self {
        Self::Dials(Some(Connecting::dial(host, SocketAddr::from(ADDRESS), LONG).expect("begins")))
    }

    /// Goes on, up to its request or, if it `completes`, to a handshake.
    fn turn(&mut self, completes: bool) {
        match self {
            Self::Dials(dials) => match dials.take().map(Connecting::poll) {
                Some(Ok(Progress::Waits(waits))) => *dials = Some(waits),
                Some(Ok(Progress::Ready(candidate))) => {
                    let shape =
                        Shape { sends: 4, receives: 4, window: 1, access: Access::REMOTE_WRITE, outbox: 1 };
                    let params = ConnectParams {
                        responder_resources: 1,
                        initiator_depth: 1,
                        retry_count: 6,
                        rnr_retry_count: 7,
                    };
                    let mut session = candidate.session(shape).expect("resources");
                    session.create_queue_pair().expect("a queue pair");
                    session.take(Step::Receive(4)).expect("posted");
                    session.connect(&params, &[]).expect("asked");
                    *self = Self::Asked(Box::new(session));
                }
                _ => panic!("the server cannot be reached"),
            },
            Self::Asked(session) if completes => match session.poll().expect("the fabric stays") {
                None => {}
                Some(Incoming::Established(_)) => {
                    let Self::Asked(session) = std::mem::replace(self, Self::Gone) else { return };
                    *self = Self::Silent(session);
                }
                Some(Incoming::Gone(_)) => *self = Self::Gone,
                Some(other) => panic!("{other}"),
            },
            Self::Silent(session) => {
                if matches!(session.poll().expect("the fabric stays"), Some(Incoming::Gone(_))) {
                    *self = Self::Gone;
                }
            }
            _ => {}
        }
    }

    fn has_asked(&self) -> bool {
        !matches!(self, Self::Dials(_))
    }
}

fn strangers(world: &World) -> Vec<Stranger> {
    let host = world.host(66);
    (0..STRANGERS).map(|_| Stranger::new(&host)).collect()
}

/// 300 requests that are never completed.
#[test]
fn requests_that_are_never_completed_cost_little_and_keep_no_client_out() {
    let mut world = World::new(Limits::NONE.backlog(32), 10, rdma_softsim::Limits::default());
    let mut first = Client::new(&world.host(2));
    first.opens(&mut world, LONG);
    let mut strangers = strangers(&world);
    world.until("they ask", LONG, |_| {
        strangers.iter_mut().for_each(|stranger| stranger.turn(false));
        strangers.iter().all(Stranger::has_asked)
    });
    first.is_served(&mut world);
    // It waits for those before it, for a tenth of a second for each 32.
    let mut second = Client::new(&world.host(3));
    second.opens(&mut world, Duration::from_millis(1500));
    second.is_served(&mut world);
    first.is_served(&mut world);
    assert!(world.most <= 2 * IDLE + 32 * NEWCOMER, "{} bytes were registered", world.most);
}

/// 300 peers that complete a handshake and send nothing. An early send buffer is for clients, too.
#[test]
fn silent_peers_beyond_the_clients_cost_little() {
    const CLIENTS: usize = 10;
    let options = Options::default().eager_send_buffer(true);
    let client = IDLE + u64::from(options.protocol.send_buffer);
    let host = rdma_softsim::Limits::default();
    let mut world = World::with(Limits::NONE.backlog(32), CLIENTS, host, options);
    let mut first = Client::new(&world.host(2));
    first.opens(&mut world, LONG);
    let mut strangers = strangers(&world);
    world.until("most are refused", LONG, |world| {
        strangers.iter_mut().for_each(|stranger| stranger.turn(true));
        world.refused > STRANGERS - CLIENTS - 32
    });
    first.is_served(&mut world);
    assert_eq!(world.clients.len(), CLIENTS);
    let bound = CLIENTS as u64 * client + 32 * NEWCOMER;
    assert!(world.most <= bound, "{} bytes were registered, not {bound}", world.most);
    // A peer that listens is told why.
    let mut late = Client::new(&world.host(3));
    world.until("it is told", LONG, |_| {
        strangers.iter_mut().for_each(|stranger| stranger.turn(true));
        late.turn();
        late.read == REFUSAL
    });
    assert!(world.most <= bound, "{} bytes were registered, not {bound}", world.most);
}

/// A refusal has its tenth of a second from the close, however long the handshake took.
#[test]
fn a_peer_that_is_refused_after_a_long_handshake_keeps_its_time() {
    let mut world = World::new(Limits::NONE.backlog(1), 0, rdma_softsim::Limits::default());
    let host = world.host(66);
    world.sim.fabric().set_latency(Duration::from_millis(120));
    let mut refused = Stranger::new(&host);
    world.until("it is accepted", LONG, |world| {
        refused.turn(true);
        world.server.usage().accepted == 1
    });
    // The answer is on its way for more than a tenth of a second. Another request comes meanwhile,
    // and its tenth of a second ends soon after the refusal.
    world.sim.fabric().set_latency(Duration::from_micros(1));
    let half = world.sim.now().after(Duration::from_millis(50));
    world.until("time passes", LONG, |world| {
        refused.turn(true);
        world.sim.now() >= half
    });
    let mut waits = Stranger::new(&host);
    world.until("it is refused", LONG, |world| {
        refused.turn(true);
        waits.turn(true);
        world.refused == 1
    });
    let since = world.sim.now();
    world.until("it gives way to the other one", LONG, |_| {
        refused.turn(true);
        waits.turn(true);
        matches!(refused, Stranger::Gone)
    });
    assert_eq!(world.server.usage().accepted, 2);
    let took = world.sim.now().since(since);
    assert!(took >= Duration::from_millis(99) && took < Duration::from_secs(1), "it had {took:?}");
}

/// Peers that complete a handshake while no task accepts, as behind a semaphore.
#[cfg(feature = "tokio")]
#[test]
fn silent_peers_that_no_task_accepts_cost_little() {
    const BACKLOG: usize = 32;
    let sim = simulation();
    let [server, host] =
        [SERVER, [192, 0, 2, 66]].map(|address| sim.host(&[address.into()], rdma_softsim::Limits::default()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let limits = Limits::NONE.backlog(BACKLOG);
    let address = SocketAddr::from(ADDRESS);
    let listening = rdma_conn::AsyncListener::bind_with(&server, address, Options::default(), limits);
    let listener = runtime.block_on(listening).expect("a free address");
    let mut strangers: Vec<_> = (0..STRANGERS).map(|_| Stranger::new(&host)).collect();
    let by = sim.now().after(LONG);
    // Returns the registered bytes, and how many strangers have completed a handshake.
    let mut turn = || {
        assert!(sim.now() < by, "not in {LONG:?}");
        strangers.iter_mut().for_each(|stranger| stranger.turn(true));
        runtime.block_on(async {
            // The runtime turns its reactor, and the driver.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
        });
        pass(&sim, Duration::from_micros(200));
        let silent = strangers.iter().filter(|stranger| matches!(stranger, Stranger::Silent(_))).count();
        (sim.fabric().resources(SERVER.into()).registered_bytes, silent)
    };
    let mut clients = Vec::new();
    while clients.len() < 3 {
        let windows = clients.len() as u64 * IDLE;
        let mut settled = 0;
        while settled < 100 {
            let (held, silent) = turn();
            assert!(held <= windows + BACKLOG as u64 * NEWCOMER, "{held} bytes were registered");
            assert!(silent <= clients.len() + BACKLOG, "{silent} are beyond the backlog");
            // Those that a task has accepted get their windows.
            settled += u32::from(held >= windows && silent == clients.len() + BACKLOG);
        }
        clients.push(runtime.block_on(listener.accept()).expect("accepted"));
    }
}

/// Many clients that connect at once wait for each other, and each gets in.
#[test]
fn a_crowd_that_connects_at_once_gets_in() {
    const MANY: usize = 100;
    let mut world = World::new(Limits::NONE.backlog(8), MANY, rdma_softsim::Limits::default());
    let host = world.host(2);
    let mut clients: Vec<_> = (0..MANY).map(|_| Client::new(&host)).collect();
    world.until("all open", LONG, |_| {
        clients.iter_mut().for_each(Client::turn);
        clients.iter().for_each(|client| client.endpoint.check(client.id).expect("it is not refused"));
        clients.iter().all(|client| client.endpoint.is_open(client.id))
    });
    assert_eq!((world.clients.len(), world.server.usage().rejected), (MANY, 0));
}

/// VR-CLOSE-002: the server has left before its window came.
#[test]
fn a_client_reads_what_a_server_sent_before_it_had_a_window() {
    let mut world = World::new(Limits::NONE, 0, rdma_softsim::Limits::default());
    let mut client = Client::new(&world.host(2));
    let mut opened = None;
    world.until("it opens", LONG, |world| {
        client.turn();
        world.server.progress().expect("the fabric stays");
        opened = opened.or(world.server.next_event());
        opened.is_some()
    });
    let Some(Event::Opened { id, .. }) = opened else { panic!("{opened:?}") };
    assert_eq!(world.server.write(id, &[IoSlice::new(b"bye")]).expect("open"), Some(3));
    // It has arrived, and nothing else.
    pass(&world.sim, Duration::from_millis(1));
    world.server.abort(id);
    pass(&world.sim, Duration::from_millis(1));
    client.turn();
    assert!(client.endpoint.is_open(client.id));
    assert_eq!(client.read, b"bye");
}

/// Each of two limits, which the idle clients nearly use up.
#[test]
fn a_limit_of_memory_refuses_newcomers_and_ends_no_client() {
    const CLIENTS: u64 = 3;
    let spare = NEWCOMER;
    let own = Limits::NONE.registered_bytes(CLIENTS * IDLE + spare);
    let system =
        rdma_softsim::Limits { locked_memory: CLIENTS * IDLE + spare, ..rdma_softsim::Limits::default() };
    for (limits, host) in [(own, rdma_softsim::Limits::default()), (Limits::NONE, system)] {
        let mut world = World::new(limits, 100, host);
        let mut clients: Vec<_> = (2..2 + CLIENTS).map(|last| Client::new(&world.host(last as u8))).collect();
        clients.iter_mut().for_each(|client| client.opens(&mut world, LONG));
        assert_eq!(world.server.usage().registered_bytes, CLIENTS * IDLE);
        let mut late = Client::new(&world.host(77));
        world.until("one more is refused", LONG, |_| {
            late.turn();
            late.endpoint.check(late.id).is_err()
        });
        // More than the windows and the send buffers that there are.
        let bytes = pattern(3 << 20);
        for index in [0, 1] {
            let (id, client) = (world.clients[index], &mut clients[index]);
            let mut sent = 0;
            client.read.clear();
            world.until("all of it", LONG, |world| {
                if let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
                    let written = world.server.write(id, &[IoSlice::new(rest)]).expect("it is not ended");
                    sent += written.unwrap_or(0);
                }
                client.turn();
                client.read.len() == bytes.len()
            });
            assert!(client.read == bytes);
        }
        assert!(world.most <= CLIENTS * IDLE + spare);
        clients.iter_mut().for_each(|client| client.is_served(&mut world));
        // Once there is memory, the send buffer grows.
        drop(clients.pop());
        let id = world.clients[0];
        world.until("its buffer grows", LONG, |world| {
            _ = world.server.write(id, &[IoSlice::new(&bytes)]).expect("it is not ended");
            clients[0].turn();
            world.server.connection(id).is_some_and(|one| one.registered_bytes() as u64 > IDLE)
        });
    }
}
