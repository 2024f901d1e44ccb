use std::any::Any;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::{Call, Intercepted, Interceptor, LowerQueuePair, Origin, Region, lock};
use rdma_backend::time::Instant;
use rdma_backend::{
    Access, Backend, CmEventKind, Completed, Completion, ConnectParams, Domain as _, IdentifierKey,
    PostError, QueuePairLimits, RNR_RETRY_INFINITE, RecvRequest, Region as _, SendOp, SendRequest, Slice,
};
use rdma_softsim::SoftSim;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::tamper::{IncomingMessage, OutgoingSend, Tamper, zero};
use super::{Conduct, Mistake};

/// The embedded fabric, with one mistake.
pub type Wrong = Intercepted<SoftSim, Mistaken>;

type Error = <SoftSim as Backend>::Error;
type Inner = <SoftSim as Backend>::Region;

const FEW: usize = 16;

/// How many receives are posted again at once.
const MANY: usize = 256;

/// The length of receives that take messages of any length.
const WIDE: usize = 4096;

/// The id of requests that a mistake adds.
const ADDED: u64 = u64::MAX;

/// An interceptor that makes a mistake, or none.
pub struct Mistaken {
    mistake: Option<Mistake>,
    conduct: Conduct,
    domain: OnceLock<Arc<<SoftSim as Backend>::Domain>>,
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
    /// The descriptor of the event channel that was asked last.
    events: Mutex<Option<OwnedFd>>,
    /// Connect requests that have arrived.
    requests: AtomicU32,
    made: Instant,
}

impl Mistaken {
    pub(crate) fn new(conduct: Conduct, made: Instant) -> Self {
        Self {
            mistake: conduct.mistake,
            conduct,
            domain: OnceLock::new(),
            kept: Mutex::default(),
            events: Mutex::default(),
            requests: AtomicU32::new(0),
            made,
        }
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// Keeps a handle forever, if that is the mistake.
    fn keep<T: Send + Sync + 'static>(&self, when: Mistake, handle: &Arc<T>) {
        if self.is(when) {
            lock(&self.kept).push(Box::new(Arc::clone(handle)));
        }
    }
}

/// The place of a received message: a region, an offset in it, and the number of the receive.
type Place = (Weak<Inner>, usize, usize);

/// A receive: its id, and its region, offset and length.
type Late = (u64, Region<SoftSim>, usize, usize);

pub struct MistakenQueuePair {
    tamper: Mutex<Tamper>,
    /// Receives by work request id.
    receives: Mutex<HashMap<u64, Place>>,
    posted: Mutex<usize>,
    /// Receives that are posted later.
    late: Mutex<Vec<Late>>,
    /// Memory for messages that the mistake adds.
    spare: Region<SoftSim>,
    wide: Option<Region<SoftSim>>,
}

impl MistakenQueuePair {
    fn add(&self, below: &LowerQueuePair<'_, SoftSim>, message: &[u8]) {
        let written = self.spare.memory().write(0, message);
        debug_assert!(written, "as long as a message");
        let local = Slice { region: &self.spare, offset: 0, len: message.len() };
        let request = SendRequest { id: ADDED, op: SendOp::Send, local, signaled: false, inline: false };
        // If there is no room, the mistake is not made this time.
        let _added = below.post_send(&[request]);
    }

    fn post_later(
        &self,
        below: &LowerQueuePair<'_, SoftSim>,
        requests: &[RecvRequest<'_, Region<SoftSim>>],
    ) -> Result<(), PostError<Error>> {
        let mut late = lock(&self.late);
        late.extend(requests.iter().map(|request| {
            let Slice { region, offset, len } = request.local;
            (request.id, Region { inner: Arc::clone(&region.inner), len: region.len }, offset, len)
        }));
        if late.len() < MANY {
            return Ok(());
        }
        let due = std::mem::take(&mut *late);
        let chain: Vec<_> = due
            .iter()
            .map(|(id, region, offset, len)| RecvRequest {
                id: *id,
                local: Slice { region, offset: *offset, len: *len },
            })
            .collect();
        below.post_recv(&chain)
    }

    /// Applies the mistake to a message before the side gets it, and returns an answer to send.
    fn receive(&self, tamper: &mut Tamper, completion: &mut Completion) -> Option<Vec<u8>> {
        let Ok(Completed::Recv { len, immediate }) = &mut completion.result else { return None };
        let (region, offset, number) = lock(&self.receives).get(&completion.id).cloned()?;
        let region = region.upgrade()?;
        let mut bytes = [0; 32];
        let there = bytes.len().min(*len as usize);
        let read = match &self.wide {
            None => region.memory().read(offset, &mut bytes[..there]),
            Some(wide) => wide.memory().read(number * WIDE, &mut bytes[..there]),
        };
        let mut message = IncomingMessage { bytes, len: *len, immediate: *immediate, payload: None };
        let added = tamper.receive(&mut message);
        let written = region.memory().write(offset, &message.bytes);
        debug_assert!(read && written, "where the receive is");
        *len = message.len;
        if let Some(payload) = message.payload {
            completion.result = Ok(Completed::RecvWrite { immediate: payload });
        }
        added
    }
}

impl Interceptor<SoftSim> for Mistaken {
    type Identifier = ();
    type QueuePair = MistakenQueuePair;

    fn clock(&self, now: Instant) -> Instant {
        if self.is(Mistake::ClockStands) { self.made } else { now }
    }

    fn before_events(&self, inner: &<SoftSim as Backend>::EventChannel) {
        if self.is(Mistake::EndFirst) {
            *lock(&self.events) = inner.as_fd().try_clone_to_owned().ok();
        }
    }

    fn event(&self, _id: IdentifierKey, kind: &mut CmEventKind<SoftSim>) -> bool {
        if let (Some(Mistake::AcknowledgedIsHandled), CmEventKind::Established { peer }) =
            (self.mistake, &mut *kind)
        {
            peer.rnr_retry_count = RNR_RETRY_INFINITE;
        }
        let most = match (self.mistake, kind) {
            (Some(Mistake::EndPanics), CmEventKind::Disconnected | CmEventKind::Rejected { .. }) => {
                panic!("a mistake that was asked for");
            }
            (Some(Mistake::TwoConnections), CmEventKind::ConnectRequest { .. }) => 2,
            (Some(Mistake::FewConnections), CmEventKind::ConnectRequest { .. }) => 10,
            _ => return true,
        };
        self.requests.fetch_add(1, Ordering::Relaxed) < most
    }

    fn identifier(&self, inner: &Arc<<SoftSim as Backend>::Identifier>, _origin: Origin) {
        self.keep(Mistake::NeverLetsGo, inner);
    }

    fn call(&self, (): &(), _inner: &<SoftSim as Backend>::Identifier, call: Call<'_>) -> bool {
        match call {
            Call::Connect(params, private_data) | Call::Accept(params, private_data) => match self.mistake {
                Some(Mistake::NoRnrRetries) => params.rnr_retry_count = 0,
                Some(Mistake::PrivateData) => *private_data = Box::new(*b"hello"),
                Some(Mistake::OddDepths) => {
                    *params = ConnectParams { responder_resources: 0, initiator_depth: 3, ..*params };
                }
                _ => {}
            },
            Call::Disconnect => return !self.is(Mistake::NeverLetsGo),
            _ => {}
        }
        true
    }

    fn domain(&self, own: <SoftSim as Backend>::Domain) -> Arc<<SoftSim as Backend>::Domain> {
        let own = Arc::new(own);
        let shares = matches!(self.mistake, Some(Mistake::OneDomain | Mistake::KeysOutlive));
        if shares { Arc::clone(self.domain.get_or_init(|| own)) } else { own }
    }

    /// Makes room for messages that a mistake adds.
    fn completions(&self, depth: u32) -> u32 {
        depth + 64
    }

    fn completion_queue(&self, inner: &Arc<<SoftSim as Backend>::CompletionQueue>) {
        self.keep(Mistake::NeverLetsGo, inner);
    }

    fn limits(&self, limits: QueuePairLimits) -> QueuePairLimits {
        QueuePairLimits { send_depth: 2 * limits.send_depth + 64, ..limits }
    }

    fn queue_pair(
        &self,
        (): &(),
        inner: &Arc<<SoftSim as Backend>::QueuePair>,
        domain: &<SoftSim as Backend>::Domain,
        limits: QueuePairLimits,
    ) -> Result<MistakenQueuePair, Error> {
        self.keep(Mistake::NeverLetsGo, inner);
        let spare = Region::whole(domain.register(64, Access::NONE)?);
        let wide = if self.is(Mistake::LongAccepted) {
            Some(Region::whole(domain.register(limits.recv_depth as usize * WIDE, Access::LOCAL_WRITE)?))
        } else {
            None
        };
        let tamper = Mutex::new(Tamper::new(self.conduct));
        Ok(MistakenQueuePair {
            tamper,
            receives: Mutex::default(),
            posted: Mutex::default(),
            late: Mutex::default(),
            spare,
            wide,
        })
    }

    fn registering(&self, len: usize, access: Access) -> (usize, Access) {
        let is_window = access.allows(Access::REMOTE_WRITE);
        match self.mistake {
            Some(Mistake::ReadableWindows) if is_window => (len, access.and(Access::REMOTE_READ)),
            Some(Mistake::WindowsTooOpen) if is_window => (len + 4096, access),
            Some(Mistake::WritesBehind) => (len + 8, access),
            _ => (len, access),
        }
    }

    fn registered(&self, inner: &Arc<Inner>) {
        self.keep(Mistake::KeysOutlive, inner);
    }

    fn post_send(
        &self,
        pair: &MistakenQueuePair,
        below: LowerQueuePair<'_, SoftSim>,
        requests: &[SendRequest<'_, Region<SoftSim>>],
    ) -> Result<(), PostError<Error>> {
        let mut tamper = lock(&pair.tamper);
        let mut chain = Vec::with_capacity(requests.len());
        let mut added = Vec::new();
        for request in requests {
            let Slice { region, offset, len } = request.local;
            let mut send = OutgoingSend { op: request.op, offset, len, behind: Vec::new() };
            tamper.send(&mut send, &region.memory());
            let local = Slice { region, offset: send.offset, len: send.len };
            let inline = request.inline && send.len <= len;
            chain.push(SendRequest { op: send.op, local, inline, ..*request });
            if send.empty_immediate() {
                let (op, local) = (zero(send.op), Slice { len: 0, ..local });
                chain.push(SendRequest { id: ADDED, op, local, signaled: false, inline: false });
            }
            added.append(&mut send.behind);
        }
        below.post_send(&chain)?;
        if self.is(Mistake::MemoryReused) {
            requests.iter().for_each(reuse);
        }
        added.iter().filter(|message| !message.is_empty()).for_each(|message| pair.add(&below, message));
        Ok(())
    }

    fn post_recv(
        &self,
        pair: &MistakenQueuePair,
        below: LowerQueuePair<'_, SoftSim>,
        requests: &[RecvRequest<'_, Region<SoftSim>>],
    ) -> Result<(), PostError<Error>> {
        let held = match self.mistake {
            Some(Mistake::NeverReposts) => lock(&pair.tamper).has_heard,
            Some(Mistake::IdleWithoutReceives) => lock(&pair.tamper).is_idle,
            _ => false,
        };
        if held {
            return Ok(());
        }
        if self.is(Mistake::RepostsInBatches) && lock(&pair.tamper).has_heard {
            return pair.post_later(&below, requests);
        }
        let mut receives = lock(&pair.receives);
        let mut chain = requests.to_vec();
        for request in &mut chain {
            let Slice { region, offset, .. } = request.local;
            let next = receives.len();
            let number = receives.get(&request.id).map_or(next, |(.., number)| *number);
            receives.insert(request.id, (Arc::downgrade(&region.inner), offset, number));
            if let Some(wide) = &pair.wide {
                request.local = Slice { region: wide, offset: number * WIDE, len: WIDE };
            }
        }
        drop(receives);
        if self.is(Mistake::FewReceives) {
            let mut posted = lock(&pair.posted);
            chain.truncate(FEW.saturating_sub(*posted));
            *posted += chain.len();
        }
        below.post_recv(&chain)
    }

    fn polled(
        &self,
        pair: &MistakenQueuePair,
        below: LowerQueuePair<'_, SoftSim>,
        completion: &mut Completion,
    ) -> bool {
        if completion.id == ADDED {
            return false;
        }
        if self.is(Mistake::FailuresUnnoticed) && completion.result.is_err() {
            return false;
        }
        if self.is(Mistake::EndFirst)
            && matches!(completion.result, Ok(Completed::RecvWrite { .. }))
            && lock(&self.events).as_ref().is_some_and(is_readable)
        {
            return false;
        }
        if let Ok(Completed::Recv { .. } | Completed::RecvWrite { .. }) = completion.result {
            let mut posted = lock(&pair.posted);
            *posted = posted.saturating_sub(1);
        }
        let mut tamper = lock(&pair.tamper);
        tamper.has_heard = true;
        if let Ok(Completed::RecvWrite { immediate }) = &mut completion.result {
            immediate.0 = tamper.notified(immediate.0);
        } else if let Some(message) = pair.receive(&mut tamper, completion) {
            pair.add(&below, &message);
        }
        true
    }
}

/// Writes over the memory of a request with payload.
fn reuse(request: &SendRequest<'_, Region<SoftSim>>) {
    let Slice { region, offset, len } = request.local;
    if matches!(request.op, SendOp::Write(_) | SendOp::WriteImmediate(..)) {
        let written = region.memory().write(offset, &vec![b'!'; len]);
        debug_assert!(written, "the request reads there");
    }
}

/// Returns whether an event is waiting.
fn is_readable(descriptor: &OwnedFd) -> bool {
    let mut waiting = [PollFd::new(descriptor, PollFlags::IN)];
    matches!(poll(&mut waiting, Some(&Timespec::default())), Ok(1..))
}
