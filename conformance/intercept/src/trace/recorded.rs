use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use rdma_backend::{
    Backend, CmEventKind, Completed, Completion, CompletionStatus, Identifier as _, IdentifierKey, PostError,
    QueuePair as _, QueuePairLimits, RecvRequest, Region as _, SendOp, SendRequest, Slice,
};
use rdma_proto::wire::Message;

use super::inbound::{Inbound, Place, bytes};
use super::recording::{EntryKind, Op, Outcome, Recorder, Request};
use super::words;
use crate::{Call, Intercepted, Interceptor, LowerQueuePair, Origin, Region, lock};
use suite::hex::Bytes;

/// Records the calls of `B`. The recorder itself keeps no region alive.
pub type Recorded<B> = Intercepted<B, Recording<B>>;

impl<B: Backend> Recorded<B> {
    /// Returns `backend`, recorded by `recorder`.
    pub fn new(backend: B, recorder: &Recorder) -> Self {
        let log = Log { backend: backend.clone(), recorder: recorder.clone(), ends: Mutex::default() };
        Self::by(backend, Recording { log: Arc::new(log), regions: Mutex::default() })
    }
}

/// The interceptor that writes into a recorder.
pub struct Recording<B: Backend> {
    log: Arc<Log<B>>,
    /// Regions by rkey.
    regions: Mutex<HashMap<u32, Weak<B::Region>>>,
}

struct Log<B> {
    backend: B,
    recorder: Recorder,
    ends: Mutex<HashMap<IdentifierKey, u32>>,
}

impl<B: Backend> Log<B> {
    fn record(&self, end: u32, what: EntryKind) {
        self.recorder.record(|| self.backend.now(), end, what);
    }
}

/// One end of a connection, while events for it can come.
pub struct RecordedEnd<B: Backend> {
    log: Arc<Log<B>>,
    key: IdentifierKey,
    number: u32,
}

impl<B: Backend> RecordedEnd<B> {
    fn record(&self, what: EntryKind) {
        self.log.record(self.number, what);
    }
}

impl<B: Backend> Drop for RecordedEnd<B> {
    fn drop(&mut self) {
        lock(&self.log.ends).remove(&self.key);
    }
}

pub struct RecordedQueuePair<B: Backend> {
    end: Arc<RecordedEnd<B>>,
    inbound: Mutex<Inbound<B::Region>>,
}

impl<B: Backend> RecordedQueuePair<B> {
    fn refused(&self, requests: usize, error: &PostError<B::Error>) {
        let requests = requests.saturating_sub(error.posted);
        self.end.record(EntryKind::Refused { requests, error: error.error.to_string() });
    }
}

impl<B: Backend> Recording<B> {
    fn posting(&self, pair: &RecordedQueuePair<B>, request: &SendRequest<'_, Region<B>>) {
        let Some(most) = self.log.recorder.bytes() else { return };
        let &SendRequest { id, op, local: Slice { region, offset, len }, signaled, .. } = request;
        let bytes = match op {
            SendOp::Read(_) => Vec::new(),
            // Messages are kept whole, because later entries depend on them.
            SendOp::Send | SendOp::SendImmediate(_) => bytes(region, offset, len.min(most.max(32))),
            SendOp::Write(_) | SendOp::WriteImmediate(..) => bytes(region, offset, len.min(most)),
        };
        if let (SendOp::Send, Ok(Message::RegisterXferMemory(window))) = (op, Message::decode(&bytes)) {
            let region = lock(&self.regions).get(&window.rkey).cloned().unwrap_or_default();
            lock(&pair.inbound).announce(window, region);
        }
        pair.end.record(EntryKind::Posted(Request::new(id, op, len, signaled, bytes)));
    }

    fn receiving(&self, pair: &RecordedQueuePair<B>, requests: &[RecvRequest<'_, Region<B>>]) {
        if self.log.recorder.bytes().is_none() {
            return;
        }
        let mut inbound = lock(&pair.inbound);
        for &RecvRequest { id, local: Slice { region, offset, len } } in requests {
            inbound.receive(id, Place { region: Arc::downgrade(&region.inner), offset, len });
        }
        drop(inbound);
        pair.end.record(EntryKind::Receives { count: requests.len() });
    }
}

impl<B: Backend> Interceptor<B> for Recording<B> {
    /// `None` for a listener.
    type Identifier = Option<Arc<RecordedEnd<B>>>;
    type QueuePair = Option<RecordedQueuePair<B>>;

    fn identifier(&self, inner: &Arc<B::Identifier>, origin: Origin) -> Option<Arc<RecordedEnd<B>>> {
        let first = match origin {
            Origin::Created => EntryKind::Created,
            Origin::Listening => return None,
            Origin::Requested(peer) => EntryKind::Requested { peer: peer.into() },
        };
        let (key, number) = (inner.key(), self.log.recorder.end());
        lock(&self.log.ends).insert(key, number);
        let end = RecordedEnd { log: Arc::clone(&self.log), key, number };
        end.record(first);
        Some(Arc::new(end))
    }

    fn event(&self, id: IdentifierKey, kind: &mut CmEventKind<B>) -> bool {
        if matches!(kind, CmEventKind::ConnectRequest { .. }) {
            // Recorded by the identifier that came with it.
            return true;
        }
        let end = lock(&self.log.ends).get(&id).copied().unwrap_or_default();
        self.log.record(end, EntryKind::Event { event: words::event(kind) });
        true
    }

    fn call(&self, id: &Self::Identifier, inner: &B::Identifier, call: Call<'_>) -> bool {
        let Some(end) = id else { return true };
        let called = |call: String| EntryKind::Called { call };
        end.record(match call {
            Call::ResolveAddress(remote) => called(format!("resolve_addr({remote})")),
            Call::ResolveRoute => called("resolve_route".into()),
            Call::Connect(params, _) | Call::Accept(params, _) => {
                let (local, peer) = (inner.local_addr(), inner.peer_addr());
                EntryKind::Connecting { local, peer, params: (*params).into() }
            }
            Call::Reject => called("reject".into()),
            Call::Notify => called("notify".into()),
            Call::Disconnect => called("disconnect".into()),
        });
        true
    }

    fn registered(&self, inner: &Arc<B::Region>) {
        let mut regions = lock(&self.regions);
        regions.retain(|_, region| region.strong_count() > 0);
        regions.insert(inner.rkey(), Arc::downgrade(inner));
    }

    fn queue_pair(
        &self,
        id: &Self::Identifier,
        inner: &Arc<B::QueuePair>,
        _domain: &B::Domain,
        limits: QueuePairLimits,
    ) -> Result<Option<RecordedQueuePair<B>>, B::Error> {
        let Some(end) = id else { return Ok(None) };
        let QueuePairLimits { send_depth, recv_depth, .. } = limits;
        end.record(EntryKind::QueuePair { number: inner.number(), sends: send_depth, receives: recv_depth });
        Ok(Some(RecordedQueuePair { end: Arc::clone(end), inbound: Mutex::default() }))
    }

    fn post_send(
        &self,
        pair: &Self::QueuePair,
        below: LowerQueuePair<'_, B>,
        requests: &[SendRequest<'_, Region<B>>],
    ) -> Result<(), PostError<B::Error>> {
        let Some(pair) = pair else { return below.post_send(requests) };
        // Recorded before the call, because its effects may be recorded before it returns.
        requests.iter().for_each(|request| self.posting(pair, request));
        below.post_send(requests).inspect_err(|error| pair.refused(requests.len(), error))
    }

    fn post_recv(
        &self,
        pair: &Self::QueuePair,
        below: LowerQueuePair<'_, B>,
        requests: &[RecvRequest<'_, Region<B>>],
    ) -> Result<(), PostError<B::Error>> {
        let Some(pair) = pair else { return below.post_recv(requests) };
        self.receiving(pair, requests);
        below.post_recv(requests).inspect_err(|error| pair.refused(requests.len(), error))
    }

    fn polled(
        &self,
        pair: &Self::QueuePair,
        _below: LowerQueuePair<'_, B>,
        completion: &mut Completion,
    ) -> bool {
        let (Some(pair), Some(most)) = (pair, self.log.recorder.bytes()) else { return true };
        let id = completion.id;
        let mut inbound = lock(&pair.inbound);
        let outcome = match completion.result {
            Ok(Completed::Send) => Outcome::Done { op: Op::Send },
            Ok(Completed::Write) => Outcome::Done { op: Op::Write },
            Ok(Completed::Read) => Outcome::Done { op: Op::Read },
            Ok(Completed::Recv { len, immediate }) => {
                let bytes = inbound.received(id, len, most.max(32));
                Outcome::Received { len, immediate: immediate.map(|it| it.0), bytes: Bytes(bytes) }
            }
            Ok(Completed::RecvWrite { immediate }) => {
                inbound.is_received(id);
                let (place, bytes) = inbound.notified(immediate.0, most);
                Outcome::Notified { immediate: immediate.0, place, bytes: Bytes(bytes) }
            }
            Err(error) if error.status == CompletionStatus::WR_FLUSH_ERR && inbound.is_received(id) => {
                drop(inbound);
                pair.end.record(EntryKind::Flushed { count: 1 });
                return true;
            }
            Err(error) => Outcome::Failed { status: error.status.0, vendor: error.vendor },
        };
        drop(inbound);
        pair.end.record(EntryKind::Completed { id, outcome });
        true
    }
}
