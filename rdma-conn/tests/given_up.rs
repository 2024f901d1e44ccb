//! A hostile peer that writes into windows in application memory after a reader gave them up.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use raw_peer::{Connecting, Incoming, Progress, Session, Shape, Step};
use rdma_backend::{CompletionStatus, ConnectParams, Immediate, RemoteAddress, SendOp};
use rdma_conn::{
    Access, CallerMemory, ConnectionId, Endpoint, Limits, Options, Receiving, RegisteredBuffer, SharedMemory,
};
use rdma_proto::wire::{Message, Window};
use rdma_softsim::{Fabric, SoftSim};

const LONG: Duration = Duration::from_secs(20);
const WINDOW: usize = 4096;
const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 6, rnr_retry_count: 7 };

/// A client, and a scripted server of raw verbs.
struct World {
    endpoint: Endpoint<SoftSim>,
    id: ConnectionId,
    server: Session<SoftSim>,
    /// The client's windows, as announced.
    windows: Vec<Window>,
    /// The status of the server's first failed request.
    failed: Option<CompletionStatus>,
}

impl World {
    fn new() -> Self {
        let fabric = Fabric::new();
        let address = SocketAddr::from(([192, 0, 2, 1], 6379));
        let mut connecting =
            Some(Connecting::listen(&fabric.host(&[address.ip()]), address).expect("is free"));
        let mut endpoint =
            Endpoint::new(&fabric.host(&[[192, 0, 2, 2].into()]), Limits::NONE).expect("a device");
        let mut options = Options::default();
        (options.protocol.window, options.protocol.windows) = (WINDOW as u32, 2);
        let id = endpoint.connect(address, None, LONG, options).expect("begins");
        let mut server = loop {
            endpoint.progress().expect("the fabric stays");
            match connecting.take().map(Connecting::poll) {
                Some(Ok(Progress::Waits(waits))) => connecting = Some(waits),
                Some(Ok(Progress::Ready(candidate))) => {
                    let shape = Shape {
                        sends: 64,
                        receives: 64,
                        window: WINDOW,
                        access: Access::REMOTE_WRITE,
                        outbox: 4 * WINDOW,
                    };
                    break candidate.session(shape).expect("a queue pair");
                }
                _ => panic!("no connection"),
            }
        };
        server.create_queue_pair().expect("a queue pair");
        server.take(Step::Receive(64)).expect("posted");
        server.accept(&PARAMS, &[]).expect("accepted");
        let mut world = Self { endpoint, id, server, windows: Vec::new(), failed: None };
        world.until("the client's window", |world| !world.windows.is_empty());
        let own = world.server.own_window().expect("a window");
        world.post(SendOp::Send, Message::RegisterXferMemory(own).encode().to_vec());
        world.until("open", |world| world.endpoint.is_open(id));
        world
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + LONG;
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: it never comes");
            self.endpoint.progress().expect("the fabric stays");
            while let Some(incoming) = self.server.poll().expect("the fabric stays") {
                match incoming {
                    Incoming::Message(bytes) => {
                        if let Ok(Message::RegisterXferMemory(window)) = Message::decode(&bytes) {
                            self.windows.push(window);
                        }
                    }
                    Incoming::Failed(status) => _ = self.failed.get_or_insert(status),
                    _ => {}
                }
            }
        }
    }

    fn post(&mut self, op: SendOp, bytes: Vec<u8>) {
        self.server.take(Step::Post(op, bytes)).expect("posted");
    }

    /// Writes `len` bytes of this kind as a correct peer does, at `offset` of the newest window.
    fn send(&mut self, byte: u8, offset: usize, len: usize) {
        let Window { address, rkey, .. } = *self.windows.last().expect("the first is there");
        let to = RemoteAddress { address: address + offset as u64, rkey };
        self.post(SendOp::WriteImmediate(to, Immediate(len as u32)), vec![byte; len]);
    }

    /// Writes into an older window without a notification.
    fn intrude(&mut self, window: Window, byte: u8) {
        let to = RemoteAddress { address: window.address, rkey: window.rkey };
        self.post(SendOp::Write(to), vec![byte; window.length as usize]);
    }

    fn receive(&mut self, receiving: &mut Receiving<SoftSim>) -> bool {
        self.endpoint.receive(self.id, receiving).expect("the server is there").is_some()
    }

    fn read(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 10 * WINDOW];
        let read = self.endpoint.read(self.id, &mut bytes).expect("the server is there").unwrap_or(0);
        bytes.truncate(read);
        bytes
    }
}

/// Application memory with a handle that the test keeps.
struct Memory(Arc<[AtomicU8]>);

impl CallerMemory for Memory {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.0)
    }
}

fn all(buffer: &RegisteredBuffer<SoftSim>, range: std::ops::Range<usize>, byte: u8) -> bool {
    let mut bytes = vec![0; range.len()];
    buffer.read(range.start, &mut bytes) && bytes.iter().all(|one| *one == byte)
}

/// VR-MEM-019, VR-SEC-005, VR-SEC-010: a window in application memory that a reader gave up stays
/// the peer's until it is full, and no other is announced there. Later writes there become no part
/// of the stream. After deregistration the device refuses them.
#[test]
fn what_was_given_up_can_be_written_until_its_key_is_dead() {
    let mut world = World::new();
    let memory: Arc<[AtomicU8]> = (0..6 * WINDOW).map(|_| AtomicU8::new(0)).collect();
    let handle = Memory(Arc::clone(&memory));
    let connection = world.endpoint.connection(world.id).expect("is there");
    let mut buffer = Arc::new(connection.register_memory(handle, Access::REMOTE_WRITE).expect("registered"));
    let mut receiving = Receiving::new(Arc::clone(&buffer), 0..6 * WINDOW);
    assert!(!world.receive(&mut receiving));

    world.send(1, 0, WINDOW);
    world.until("the second window", |world| world.windows.len() == 2);
    assert!(!world.receive(&mut receiving));
    let landing = world.windows[1];
    assert_ne!(landing.rkey, world.windows[0].rkey, "it lies in the buffer");
    world.send(2, 0, WINDOW / 2);
    world.until("half of it", |world| {
        world.endpoint.connection(world.id).expect("is there").counters().bytes_received
            == (WINDOW + WINDOW / 2) as u64
    });
    assert!(!world.receive(&mut receiving));
    assert!(all(&buffer, 0..WINDOW, 1) && all(&buffer, WINDOW..WINDOW + WINDOW / 2, 2));

    // The reader gives up. The rest of the window is read as usual; the next lies elsewhere.
    drop(receiving);
    world.endpoint.stop_landing(world.id).expect("is there");
    assert!(Arc::get_mut(&mut buffer).is_none(), "a window lies in it");
    world.send(3, WINDOW / 2, WINDOW / 2);
    world.until("the third window", |world| world.windows.len() == 3);
    assert_ne!(world.windows[2].rkey, landing.rkey, "it was given up");
    assert!(world.read() == vec![3; WINDOW / 2]);
    assert!(Arc::get_mut(&mut buffer).is_some(), "it is the program's again");

    // The key is still valid: writes show in the buffer, and in nothing that is read.
    world.intrude(landing, 0xee);
    world.send(4, 0, 100);
    world.until("the next bytes", |world| {
        world.endpoint.connection(world.id).expect("is there").unread() == 100
    });
    assert!(all(&buffer, WINDOW..2 * WINDOW, 0xee), "the device allows it");
    assert!(world.read() == vec![4; 100] && world.endpoint.check(world.id).is_ok());

    // The key is invalid: the device refuses it.
    drop(buffer);
    assert_eq!(Arc::strong_count(&memory), 1, "the region has let go of it");
    world.intrude(landing, 0xdd);
    world.until("the refusal", |world| world.failed.is_some());
    assert_eq!(world.failed, Some(CompletionStatus::REM_ACCESS_ERR));
    let bytes = &memory[WINDOW..2 * WINDOW];
    assert!(bytes.iter().all(|byte| byte.load(Ordering::Relaxed) == 0xee), "the program's bytes changed");
}
