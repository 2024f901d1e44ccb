//! Programs of verbs: a server that echoes the messages of its clients, and clients.

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::Duration;

use rdma_backend::{
    Access, AsyncEvent, Backend as _, CmEventKind, Completed, Completion, CompletionQueue as _,
    ConnectParams, Domain as _, EventChannel as _, Identifier as _, QueuePair as _, QueuePairLimits,
    RNR_RETRY_INFINITE, RecvRequest, Region as _, SendOp, SendRequest, Slice,
};
use rdma_verbs::{CompletionQueue, EventChannel, Identifier, QueuePair, Region, Verbs};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Pid;

use crate::common::{CLIENT, Home, Running, SERVER, program, role};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The bytes of a message, and of the one that ends the server.
const BYTES: usize = 40_000;
const LAST: usize = 1;

/// Longer than a machine may stand still.
const LONG: Duration = Duration::from_secs(600);

const PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 7,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// Starts a server. Returns it, its address and its process.
pub(crate) fn server(home: &Home) -> (Running, String, Pid) {
    let mut server = Running::start(&mut program(home, SERVER, "echo::echoes", ""));
    let pid = server.line("process ").parse().ok().and_then(Pid::from_raw).expect("a process");
    let address = server.line("listens on ");
    (server, address, pid)
}

/// Starts a client that has so many messages echoed. Then it ends the server, and prints that all
/// came back.
pub(crate) fn client(home: &Home, address: &str, messages: usize) -> Running {
    let argument = format!("{address} {messages}");
    Running::start(&mut program(home, CLIENT, "echo::sends", &argument))
}

/// One end of a connection.
struct End {
    pair: QueuePair,
    queue: CompletionQueue,
    /// Room for a message that comes, and for one that goes.
    region: Region,
    id: Identifier,
    channel: EventChannel,
    /// The event that has ended it.
    over: RefCell<Option<String>>,
}

impl End {
    fn new(id: Identifier, channel: EventChannel) -> Result<Self> {
        let domain = id.create_domain()?;
        let queue = id.create_completion_queue(16, 0)?;
        let limits = QueuePairLimits { send_depth: 4, recv_depth: 4, inline: 0 };
        let pair = id.create_queue_pair(&domain, &queue, limits)?;
        let region = domain.register(2 * BYTES, Access::LOCAL_WRITE)?;
        let end = Self { pair, queue, region, id, channel, over: RefCell::new(None) };
        end.receive()?;
        Ok(end)
    }

    /// Posts a receive.
    fn receive(&self) -> Result<()> {
        let local = Slice { region: &self.region, offset: 0, len: BYTES };
        Ok(self.pair.post_recv(&[RecvRequest { id: 0, local }]).map_err(|failed| failed.error)?)
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        assert!(self.region.write(BYTES, bytes), "more than there is room for");
        let local = Slice { region: &self.region, offset: BYTES, len: bytes.len() };
        let request = SendRequest { id: 1, op: SendOp::Send, local, signaled: true, inline: false };
        Ok(self.pair.post_send(&[request]).map_err(|failed| failed.error)?)
    }

    /// Waits for a completion. Returns the message if it is that of a receive, and posts the next
    /// receive.
    fn completion(&self) -> Result<Option<Vec<u8>>> {
        let (mut one, mut armed) = ([Completion::EMPTY], false);
        while self.queue.poll(&mut one)? == 0 {
            // What came before the end is in the queue by the time that its event is read.
            if let Some(over) = &*self.over.borrow() {
                return Err(over.as_str().into());
            }
            match self.channel.next_event()?.map(|event| event.kind) {
                Some(CmEventKind::Established { .. } | CmEventKind::Async(AsyncEvent::CommEst)) => {}
                Some(end) => _ = self.over.replace(Some(format!("{end:?}"))),
                None if armed => {
                    let mut both = [self.queue.as_fd(), self.channel.as_fd()]
                        .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
                    poll(&mut both, None)?;
                    self.queue.take_events()?;
                    armed = false;
                }
                None => {
                    self.queue.arm()?;
                    armed = true;
                }
            }
        }
        match one[0].result {
            Ok(Completed::Recv { len, .. }) => {
                let mut message = vec![0; len as usize];
                assert!(self.region.read(0, &mut message));
                self.receive()?;
                Ok(Some(message))
            }
            Ok(_) => Ok(None),
            Err(error) => Err(format!("{error:?}").into()),
        }
    }
}

fn next(channel: &EventChannel) -> Result<CmEventKind<Verbs>> {
    loop {
        if let Some(event) = channel.next_event()? {
            return Ok(event.kind);
        }
        poll(&mut [PollFd::new(channel, PollFlags::IN)], None)?;
    }
}

fn expect(channel: &EventChannel, right: fn(&CmEventKind<Verbs>) -> bool) -> Result<()> {
    let event = next(channel)?;
    if right(&event) { Ok(()) } else { Err(format!("{event:?}").into()) }
}

/// A program that serves one client after the other, until one has ended it.
#[test]
fn echoes() {
    let Some(_) = role("echo::echoes") else { return };
    match serve() {
        Ok(()) => println!("the client closed"),
        Err(error) => println!("ended: {error}"),
    }
}

fn serve() -> Result<()> {
    let verbs = Verbs::load()?;
    let channel = verbs.event_channel()?;
    let listener = channel.listen(SocketAddr::new(SERVER.parse()?, 0), 8)?;
    println!("process {}", std::process::id());
    println!("listens on {}", listener.local_addr().ok_or("it does not listen")?);
    loop {
        let CmEventKind::ConnectRequest { id, .. } = next(&channel)? else { continue };
        match echo(id, verbs.event_channel()?) {
            Ok(()) => return Ok(()),
            Err(error) => println!("ended: {error}"),
        }
    }
}

fn echo(id: Identifier, own: EventChannel) -> Result<()> {
    id.migrate(&own)?;
    let end = End::new(id, own)?;
    end.id.accept(&PARAMS, &[])?;
    loop {
        match end.completion()? {
            Some(last) if last.len() == LAST => return Ok(()),
            Some(message) => end.send(&message)?,
            None => {}
        }
    }
}

/// A program that has messages echoed.
#[test]
fn sends() {
    let Some(argument) = role("echo::sends") else { return };
    let (address, messages) = argument.split_once(' ').expect("two parts");
    match send_to(address, messages.parse().expect("a number")) {
        Ok(()) => println!("all came back"),
        Err(error) => println!("ended: {error}"),
    }
}

fn send_to(address: &str, messages: usize) -> Result<()> {
    let channel = Verbs::load()?.event_channel()?;
    let id = channel.create_id()?;
    id.resolve_address(None, address.parse()?, LONG)?;
    expect(&channel, |kind| matches!(kind, CmEventKind::AddressResolved))?;
    id.resolve_route(LONG)?;
    expect(&channel, |kind| matches!(kind, CmEventKind::RouteResolved))?;
    let end = End::new(id, channel)?;
    end.id.connect(&PARAMS, &[])?;
    expect(&end.channel, |kind| matches!(kind, CmEventKind::Established { .. }))?;
    for nth in 0..messages {
        let message: Vec<u8> = (nth..nth + BYTES).map(|place| (place ^ place >> 8) as u8).collect();
        end.send(&message)?;
        // Its own completion, and that of the receive, in any order.
        for back in [end.completion()?, end.completion()?].into_iter().flatten() {
            assert!(back == message, "message {nth} has changed");
        }
        if nth == 3 {
            println!("under way");
        }
    }
    end.send(&[0; LAST])?;
    end.completion()?;
    Ok(())
}
