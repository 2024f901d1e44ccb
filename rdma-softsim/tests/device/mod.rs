//! Verbs below the seam: queue pairs that find each other by number, memory of other processes,
//! private data.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdma_backend::{
    Access, AsyncEvent, CmEventKind, Completed, Completion, CompletionStatus, ConnectParams,
    EventChannel as _, Identifier as _, Immediate, QueuePair as _, QueuePairLimits, RemoteAddress, RnrTimer,
    SendOp,
};
use rdma_softsim::{
    About, Arming, Atomic, Calls, Chance, CompletionQueue, Connections, Destination, Detail, Device, Domain,
    Error, Fabric, FailureClass, Fault, ForeignMemory, ForeignRegion, Load, Local, Look, Mirror,
    NamedReceive, NamedSend, Op, PairState, Parameters, QueuePair, Resources, Rights, Service, Sge, Signal,
    Site, SoftSim, Source, Transition, When,
};

mod atomics;
mod connecting;
mod datagrams;
mod faults;
mod kept_memory;
mod queues;
mod requests;

const BASE: u64 = 0x1000;
const LEN: usize = 600_000;
const LIMITS: QueuePairLimits = QueuePairLimits { send_depth: 8, recv_depth: 8, inline: 64 };
const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 2, rnr_retry_count: 7 };

/// Memory of a program that may end.
#[derive(Clone)]
struct Program {
    bytes: Arc<Mutex<Vec<u8>>>,
    ended: Arc<AtomicBool>,
}

impl ForeignMemory for Program {
    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + into.len()]);
        !self.ended.load(Relaxed)
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        !self.ended.load(Relaxed)
    }
}

struct CountingSignal {
    count: AtomicU32,
    fd: OwnedFd,
}

impl CountingSignal {
    fn new() -> Arc<Self> {
        let (fd, _other) = rustix::pipe::pipe().unwrap();
        Arc::new(Self { count: AtomicU32::new(0), fd })
    }
}

impl AsFd for CountingSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Signal for CountingSignal {
    fn raise(&self) {
        self.count.fetch_add(1, Relaxed);
    }

    fn clear(&self) {}
}

/// Where a program finds its completions: room for so many.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Page>>);

#[derive(Default)]
struct Page {
    shown: Vec<(Completion, Detail)>,
    /// What the program has done since the model looked.
    done: Look,
    calls: Calls,
    /// How often the model has looked and asked.
    looks: u32,
    asks: u32,
    /// What the program does next, at this moment.
    next: Option<(Moment, Act)>,
}

type Act = fn(&mut Page);

/// A moment of the model's, in which a program does something.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Before it could find another completion, and after that.
    Showing,
    Shown,
    /// Before it could find out what it must call for.
    Asking,
}

impl Page {
    /// The program takes all that is there.
    fn take(&mut self) -> Vec<(Completion, Detail)> {
        let shown = core::mem::take(&mut self.shown);
        let taken = if self.done.armed.is_some() { &mut self.done.after } else { &mut self.done.before };
        *taken += shown.len();
        shown
    }

    /// The program arms its queue.
    fn arm(&mut self, arming: Arming) {
        let Look { before, armed: _, after } = self.done;
        self.done = Look { before: before + after, armed: Some(arming), after: 0 };
    }

    fn pass(&mut self, moment: Moment) {
        if let Some((_, act)) = self.next.take_if(|(at, _)| *at == moment) {
            act(self);
        }
    }
}

const ROOM: usize = 4;

impl Shown {
    /// Takes all that is there.
    fn take(&self) -> Vec<(Completion, Detail)> {
        self.0.lock().unwrap().take()
    }

    /// How often the model has looked and asked since the last call.
    fn counts(&self) -> (u32, u32) {
        let mut page = self.0.lock().unwrap();
        (core::mem::take(&mut page.looks), core::mem::take(&mut page.asks))
    }

    /// Has the program do something at that moment, once.
    fn meanwhile(&self, at: Moment, act: Act) {
        self.0.lock().unwrap().next = Some((at, act));
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().shown.len()
    }

    fn must_call(&self) -> bool {
        self.0.lock().unwrap().calls.polls
    }
}

impl Mirror for Shown {
    fn look(&self) -> Look {
        let mut page = self.0.lock().unwrap();
        page.looks += 1;
        core::mem::take(&mut page.done)
    }

    fn show(&self, completion: &Completion, detail: Detail) -> bool {
        let mut page = self.0.lock().unwrap();
        let room = page.shown.len() < ROOM;
        if room {
            page.pass(Moment::Showing);
            page.shown.push((*completion, detail));
            page.pass(Moment::Shown);
        }
        room
    }

    fn ask(&self, calls: Calls) {
        let mut page = self.0.lock().unwrap();
        page.pass(Moment::Asking);
        page.calls = calls;
        page.asks += 1;
    }
}

/// One program with a queue pair. Fields drop in this order.
struct End {
    pair: QueuePair,
    region: ForeignRegion,
    queue: CompletionQueue,
    domain: Domain,
    device: Device,
    signals: Arc<CountingSignal>,
    shown: Shown,
    program: Program,
}

fn end(host: &SoftSim) -> End {
    let program = Program { bytes: Arc::new(Mutex::new(vec![0; LEN])), ended: Arc::default() };
    end_with(host, program.clone(), Arc::new(program))
}

fn end_with(host: &SoftSim, program: Program, memory: Arc<dyn ForeignMemory>) -> End {
    let signals = CountingSignal::new();
    let device = host.open(CountingSignal::new()).unwrap();
    let domain = device.create_domain().unwrap();
    let signal: Arc<dyn Signal> = Arc::<CountingSignal>::clone(&signals);
    let shown = Shown::default();
    let queue = device.create_completion_queue(7, 16, signal, Box::new(shown.clone())).unwrap();
    let access = Access::REMOTE_WRITE.and(Access::REMOTE_READ);
    let region = domain.register_foreign(BASE, LEN, memory, access).unwrap();
    let pair =
        device.create_queue_pair(9, Service::Connected, &domain, [&queue, &queue], None, LIMITS).unwrap();
    End { pair, region, queue, domain, device, signals, shown, program }
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

/// Moves a queue pair to RTS with the peer's number, like programs that exchange it themselves.
fn connect(end: &End, own: u8, peer: u8, number: u32) {
    connect_pair(&end.pair, own, peer, number);
}

fn connect_pair(pair: &QueuePair, own: u8, peer: u8, number: u32) {
    let to = |transition| pair.modify(transition).unwrap();
    assert_eq!(pair.state(), Ok(PairState::Reset));
    to(Transition::Initialise);
    to(Transition::Receive {
        local: address(own),
        remote: address(peer),
        number,
        timer: RnrTimer::MICROS_640,
    });
    to(Transition::Send { retry: 1, rnr_retry: 7, read_depth: 1 });
    assert_eq!(pair.state(), Ok(PairState::Ready));
    assert_eq!(pair.ends(), Some((address(own), address(peer), number)));
}

/// Waits for completions.
fn await_completions(end: &End) -> Vec<Result<Completed, CompletionStatus>> {
    loop {
        let completions = end.completions();
        if !completions.is_empty() {
            return completions;
        }
        std::thread::yield_now();
    }
}

fn connected() -> (Fabric, End, End) {
    connected_on(Fabric::new())
}

fn connected_on(fabric: Fabric) -> (Fabric, End, End) {
    let ends = [1, 2].map(|last| end(&fabric.host(&[address(last)])));
    let [a, b] = ends;
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    (fabric, a, b)
}

impl End {
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: BASE + offset, len, lkey: self.region.key() }
    }

    fn post(&self, op: SendOp, local: Sge) {
        self.post_list(op, &[local]);
    }

    fn post_list(&self, op: SendOp, local: &[Sge]) {
        self.try_post(op.into(), Local::Memory(local)).unwrap();
    }

    fn try_post(&self, op: Op, local: Local<'_>) -> Result<(), Error> {
        let work = NamedSend { id: 1, op, local, signaled: true, solicited: false };
        self.pair.post_named(&[work]).map_err(|refused| refused.error)
    }

    fn completions(&self) -> Vec<Result<Completed, CompletionStatus>> {
        self.taken()
            .into_iter()
            .map(|(completion, _)| completion.result.map_err(|error| error.status))
            .collect()
    }

    /// Takes all completions, with the bytes of their messages.
    fn taken(&self) -> Vec<(Completion, Detail)> {
        let mut taken = Vec::new();
        loop {
            self.queue.called().unwrap();
            let some = self.shown.take();
            if some.is_empty() {
                return taken;
            }
            taken.extend(some);
        }
    }

    /// Arms the queue. The model looks when it needs to know.
    fn arm(&self, arming: Arming) {
        self.shown.0.lock().unwrap().arm(arming);
    }
}
