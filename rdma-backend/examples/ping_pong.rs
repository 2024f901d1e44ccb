//! Connects two ends on any backend, and makes a SEND, a WRITE with immediate and a READ.
//!
//! ```text
//! cargo run -p rdma-backend --example ping_pong               # the embedded fabric; needs no device
//! cargo run -p rdma-backend --example ping_pong 192.0.2.1     # a device that has this address
//! ```

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdma_backend::{
    Access, Backend, CmEventKind, Completed, Completion, CompletionQueue, ConnectParams, Domain,
    EventChannel, Identifier, Immediate, QueuePair, QueuePairLimits, RNR_RETRY_INFINITE, RecvRequest, Region,
    RemoteAddress, SendOp, SendRequest, Slice,
};
use rustix::event::{PollFd, PollFlags, poll};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Waiting needs descriptors. Both backends have them; the traits do not require them.
trait Device: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}
impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Device for B {}

const PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: RNR_RETRY_INFINITE,
};
const TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of each end's region: the first half for receives, the second for the peer to access.
const LEN: usize = 128;
const HALF: usize = LEN / 2;

fn main() -> Result<()> {
    match std::env::args().nth(1) {
        Some(address) => {
            let device = rdma_verbs::Verbs::load()?;
            ping_pong(device.clone(), device, address.parse()?)
        }
        None => {
            let fabric = rdma_softsim::Fabric::new();
            let (server, client) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
            ping_pong(fabric.host(&[server]), fabric.host(&[client]), server)
        }
    }
}

fn ping_pong<B: Device>(at_server: B, at_client: B, address: IpAddr) -> Result<()> {
    let servers = at_server.event_channel()?;
    let clients = at_client.event_channel()?;
    let listener = servers.listen(SocketAddr::new(address, 0), 1)?;
    let to = listener.local_addr().ok_or("the listener has no address")?;

    let id = clients.create_id()?;
    id.resolve_address(None, to, TIMEOUT)?;
    expect::<B>(&clients, "AddressResolved")?;
    id.resolve_route(TIMEOUT)?;
    expect::<B>(&clients, "RouteResolved")?;
    let client = End::<B>::new(id)?;
    client.id.connect(&PARAMS, &[])?;

    let CmEventKind::ConnectRequest { id, .. } = next_event::<B>(&servers)? else {
        return Err("the event is not a connect request".into());
    };
    let server = End::<B>::new(id)?;
    server.id.accept(&PARAMS, &[])?;
    expect::<B>(&clients, "Established")?;
    expect::<B>(&servers, "Established")?;

    let mut message = [0; 12];
    message[..8].copy_from_slice(&client.region.address().to_be_bytes());
    message[8..].copy_from_slice(&client.region.rkey().to_be_bytes());
    client.put(HALF, &message)?;
    client.post(SendOp::Send, HALF, message.len())?;
    client.completes(Completed::Send)?;
    server.completes(Completed::Recv { len: 12, immediate: None })?;
    let told = server.get(0, message.len())?;
    let there = RemoteAddress {
        address: u64::from_be_bytes(told[..8].try_into()?) + HALF as u64,
        rkey: u32::from_be_bytes(told[8..].try_into()?),
    };
    println!("SEND: the client's region is at {:#x}, its key is {:#x}", there.address, there.rkey);

    server.put(HALF, b"ping")?;
    server.post(SendOp::WriteImmediate(there, Immediate(4)), HALF, 4)?;
    server.completes(Completed::Write)?;
    client.completes(Completed::RecvWrite { immediate: Immediate(4) })?;
    println!("WRITE with immediate 4: {:?}", String::from_utf8(client.get(HALF, 4)?)?);

    // READ: the server fetches what the client has put there since, without the client's program.
    client.put(HALF, b"pong")?;
    server.post(SendOp::Read(there), HALF, 4)?;
    server.completes(Completed::Read)?;
    println!("READ: {:?}", String::from_utf8(server.get(HALF, 4)?)?);

    client.id.disconnect()?;
    expect::<B>(&servers, "Disconnected")?;
    Ok(())
}

struct End<B: Device> {
    queue_pair: B::QueuePair,
    completions: B::CompletionQueue,
    region: B::Region,
    id: B::Identifier,
}

impl<B: Device> End<B> {
    fn new(id: B::Identifier) -> Result<Self> {
        let domain = id.create_domain()?;
        let completions = id.create_completion_queue(16, 0)?;
        let limits = QueuePairLimits { send_depth: 4, recv_depth: 4, inline: 0 };
        let queue_pair = id.create_queue_pair(&domain, &completions, limits)?;
        let region = domain.register(LEN, Access::REMOTE_WRITE.and(Access::REMOTE_READ))?;
        let receive = RecvRequest { id: 0, local: Slice { region: &region, offset: 0, len: HALF } };
        queue_pair.post_recv(&[receive]).map_err(|failed| failed.error)?;
        Ok(Self { queue_pair, completions, region, id })
    }

    fn put(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.region.write(offset, bytes) { Ok(()) } else { Err("beyond the region".into()) }
    }

    fn get(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        if self.region.read(offset, &mut bytes) { Ok(bytes) } else { Err("beyond the region".into()) }
    }

    fn post(&self, op: SendOp, offset: usize, len: usize) -> Result<()> {
        let local = Slice { region: &self.region, offset, len };
        let request = SendRequest { id: 1, op, local, signaled: true, inline: false };
        Ok(self.queue_pair.post_send(&[request]).map_err(|failed| failed.error)?)
    }

    // The order of waiting: poll, arm, poll again, then sleep.
    fn completes(&self, expected: Completed) -> Result<()> {
        let mut one = [Completion::EMPTY];
        let mut armed = false;
        while self.completions.poll(&mut one)? == 0 {
            if armed {
                readable(self.completions.as_fd())?;
                self.completions.take_events()?;
            } else {
                self.completions.arm()?;
            }
            armed = !armed;
        }
        match one[0].result {
            Ok(completed) if completed == expected => Ok(()),
            other => Err(format!("{other:?} completed, not {expected:?}").into()),
        }
    }
}

fn next_event<B: Device>(channel: &B::EventChannel) -> Result<CmEventKind<B>> {
    loop {
        if let Some(event) = channel.next_event()? {
            return Ok(event.kind);
        }
        readable(channel.as_fd())?;
    }
}

fn expect<B: Device>(channel: &B::EventChannel, kind: &str) -> Result<()> {
    let found = format!("{:?}", next_event::<B>(channel)?);
    if found.starts_with(kind) { Ok(()) } else { Err(format!("the event {found}, not {kind}").into()) }
}

fn readable(descriptor: BorrowedFd<'_>) -> Result<()> {
    let timeout = Duration::from_secs(10).try_into()?;
    match poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&timeout))? {
        0 => Err("nothing happened for ten seconds".into()),
        _ => Ok(()),
    }
}
