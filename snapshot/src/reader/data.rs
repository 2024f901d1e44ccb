//! The queue pair for READs.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rdma_backend::{
    Access, Completion, CompletionQueue, CompletionStatus, ConnectParams, Identifier, QueuePair,
    QueuePairLimits, RemoteAddress, SendOp, SendRequest, Slice,
};
use rdma_conn::Descriptors;

use super::Shared;
use super::table::Chunk;
use crate::error::Error;
use crate::publisher::filler::register;

/// The target of a READ.
pub(super) enum What {
    /// The address area of the seed's table.
    Addresses,
    Chunk(Chunk),
}

/// A READ in flight, and the memory that it lands in.
pub(super) struct Flight<B: Descriptors> {
    pub(super) what: What,
    pub(super) length: u32,
    pub(super) remote: RemoteAddress,
    pub(super) region: B::Region,
}

/// A connection for READs, established or not yet. It carries no SENDs.
pub(super) struct Data<B: Descriptors> {
    pair: B::QueuePair,
    queue: B::CompletionQueue,
    /// Keeps the connection.
    _id: B::Identifier,
    domain: Arc<B::Domain>,
    /// READs that this side's device can have in flight.
    pub(super) depth: u8,
}

/// How often unacknowledged requests are repeated. Soft-RoCE treats 7 as endless.
pub(crate) const RETRIES: u8 = 6;

impl<B: Descriptors> Data<B> {
    /// Asks the publisher for a connection of `depth` READs, within the device's limits. It has a
    /// protection domain of its own (VS-SEC-001), or that of a replica that hands on what it reads.
    pub(super) fn connect(id: B::Identifier, shared: Option<&Shared<B>>, depth: u8) -> Result<Self, Error> {
        let capabilities = id.capabilities().map_err(Error::backend("looking at the device"))?;
        let depth = depth.min(capabilities.max_read_depth).max(1);
        let domain = match shared {
            Some(shared) => {
                let device = id.device().map_err(Error::backend("looking at the device"))?;
                if device != shared.device {
                    return Err(Error::OtherDevice);
                }
                Arc::clone(&shared.domain)
            }
            None => Arc::new(id.create_domain().map_err(Error::backend("creating a protection domain"))?),
        };
        // One more than the READs in flight, for the addresses of the seed's table.
        let sends = u32::from(depth) + 1;
        let queue =
            id.create_completion_queue(sends, 0).map_err(Error::backend("creating a completion queue"))?;
        let limits = QueuePairLimits { send_depth: sends, recv_depth: 1, inline: 0 };
        let pair =
            id.create_queue_pair(&domain, &queue, limits).map_err(Error::backend("creating a queue pair"))?;
        let params = ConnectParams {
            responder_resources: 0,
            initiator_depth: depth,
            retry_count: RETRIES,
            rnr_retry_count: RETRIES,
        };
        id.connect(&params, &[]).map_err(Error::backend("connecting"))?;
        Ok(Self { pair, queue, _id: id, domain, depth })
    }

    pub(super) fn register(&self, length: usize, access: Access) -> Result<B::Region, Error> {
        register::<B>(&self.domain, length, access, "registering memory to read into")
    }

    /// Posts READs, with one doorbell.
    pub(super) fn read<'a>(&self, flights: impl IntoIterator<Item = &'a Flight<B>>) -> Result<(), Error>
    where
        B: 'a,
    {
        let request = |flight: &'a Flight<B>| {
            let local = Slice { region: &flight.region, offset: 0, len: flight.length as usize };
            SendRequest { id: 0, op: SendOp::Read(flight.remote), local, signaled: true, inline: false }
        };
        let chain: Vec<_> = flights.into_iter().map(request).collect();
        if chain.is_empty() {
            return Ok(());
        }
        self.pair.post_send(&chain).map_err(|error| Error::backend("posting READs")(error.error))
    }

    /// Returns the next finished READ. If there is none, arms the queue and polls again.
    pub(super) fn completed(&self) -> Result<Option<Result<(), CompletionStatus>>, Error> {
        let lost = Error::backend("taking completions");
        let mut one = [Completion::EMPTY];
        if self.queue.poll(&mut one).map_err(&lost)? == 0 {
            self.queue.take_events().map_err(&lost)?;
            self.queue.arm().map_err(&lost)?;
            if self.queue.poll(&mut one).map_err(&lost)? == 0 {
                return Ok(None);
            }
        }
        let [completion] = one;
        Ok(Some(completion.result.map(|_read| ()).map_err(|error| error.status)))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}
