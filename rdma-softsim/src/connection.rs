//! Handles of the connection manager: event channels and identifiers.

use core::fmt;
use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rdma_backend::{
    self, Capabilities, CmEvent, CmEventKind, ConnectParams, DeviceKey, IdentifierKey, QueuePairLimits,
};

use crate::driver::{Driver, Signal};
use crate::error::Error;
use crate::fabric::SoftSim;
use crate::model::{ChannelId, HostId, IdentifierId, NoticeKind, Wake};
use crate::sync::{Mutex, PoisonError};
use crate::verbs::{CompletionQueue, Domain, QueuePair};

/// A channel of connection-manager events. Its descriptor is readable while an event waits.
pub struct EventChannel {
    inner: Arc<ChannelInner>,
}

struct ChannelInner {
    driver: Arc<Driver>,
    id: ChannelId,
    signal: Arc<dyn Signal>,
}

impl EventChannel {
    pub(crate) fn create(driver: &Arc<Driver>, host: HostId) -> Result<Self, Error> {
        let (id, signal) =
            driver.create_waking(|model| model.create_channel(host), |id| Wake::Events(*id))?;
        Ok(Self { inner: Arc::new(ChannelInner { driver: Arc::clone(driver), id, signal }) })
    }

    /// Creates a channel like [`EventChannel::create`], with an existing signal.
    pub(crate) fn signalling(
        driver: &Arc<Driver>,
        host: HostId,
        signal: Arc<dyn Signal>,
    ) -> Result<Self, Error> {
        let id =
            driver.create_signalling(&signal, |model| model.create_channel(host), |id| Wake::Events(*id))?;
        Ok(Self { inner: Arc::new(ChannelInner { driver: Arc::clone(driver), id, signal }) })
    }

    fn handle(&self, id: IdentifierId, key: IdentifierKey) -> Identifier {
        let channel = Mutex::new(Arc::clone(&self.inner));
        let inner = IdentifierInner { driver: Arc::clone(&self.inner.driver), id, key, channel };
        Identifier { inner: Arc::new(inner) }
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        self.driver.release(|driver| {
            driver.destroy_waking(Wake::Events(self.id), |model| model.destroy_channel(self.id));
        });
    }
}

impl rdma_backend::EventChannel<SoftSim> for EventChannel {
    fn create_id(&self) -> Result<Identifier, Error> {
        let (id, key) = self.inner.driver.with(|model| model.create_identifier(self.inner.id))?;
        Ok(self.handle(id, key))
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Identifier, Error> {
        let (id, key) = self.inner.driver.with(|model| model.listen(self.inner.id, address, backlog))?;
        Ok(self.handle(id, key))
    }

    fn next_event(&self) -> Result<Option<CmEvent<SoftSim>>, Error> {
        let notice = self.inner.driver.with(|model| {
            let taken = model.take_notice(self.inner.id)?;
            // Under the lock: an event that comes later raises the signal after this.
            if taken.emptied {
                self.inner.signal.clear();
            }
            Ok(taken.notice)
        })?;
        Ok(notice.map(|notice| {
            let kind = match notice.kind {
                NoticeKind::AddressResolved => CmEventKind::AddressResolved,
                NoticeKind::AddressError(status) => CmEventKind::AddressError { status },
                NoticeKind::RouteResolved => CmEventKind::RouteResolved,
                NoticeKind::ConnectRequest { id, key, peer } => {
                    CmEventKind::ConnectRequest { id: self.handle(id, key), peer }
                }
                NoticeKind::RouteError(status) => CmEventKind::RouteError { status },
                NoticeKind::ConnectError(status) => CmEventKind::ConnectError { status },
                NoticeKind::DeviceRemoval => CmEventKind::DeviceRemoval,
                NoticeKind::AddressChange => CmEventKind::AddressChange,
                NoticeKind::Established(peer) => CmEventKind::Established { peer },
                // `RDMA_CM_EVENT_CONNECT_RESPONSE`.
                NoticeKind::ConnectResponse => CmEventKind::Other(5),
                NoticeKind::Unreachable(status) => CmEventKind::Unreachable { status },
                NoticeKind::Rejected(reason) => CmEventKind::Rejected { reason },
                NoticeKind::Disconnected => CmEventKind::Disconnected,
                NoticeKind::TimewaitExit => CmEventKind::TimewaitExit,
                NoticeKind::Async(event) => CmEventKind::Async(event),
            };
            CmEvent { id: notice.key, kind, private_data: notice.data }
        }))
    }
}

impl EventChannel {
    /// Returns whether an event waits. In real time the descriptor is readable then.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.inner.driver.peek(|model| model.has_notices(self.inner.id))
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.signal.as_fd()
    }
}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventChannel").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

/// A connection-manager identifier.
pub struct Identifier {
    pub(crate) inner: Arc<IdentifierInner>,
}

/// Keeps an identifier alive, shared by its handle and its queue pair.
pub(crate) struct IdentifierInner {
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: IdentifierId,
    key: IdentifierKey,
    /// Keeps the event channel alive.
    channel: Mutex<Arc<ChannelInner>>,
}

impl Drop for IdentifierInner {
    fn drop(&mut self) {
        self.driver.release(|driver| driver.with(|model| model.destroy_identifier(self.id)));
    }
}

impl rdma_backend::Identifier<SoftSim> for Identifier {
    fn key(&self) -> IdentifierKey {
        self.inner.key
    }

    fn set_traffic_class(&self, class: u8) -> Result<(), Error> {
        self.inner.driver.with(|model| model.set_traffic_class(self.inner.id, class))
    }

    fn set_ack_timeout(&self, code: u8) -> Result<(), Error> {
        self.inner.driver.with(|model| model.set_identifier_timeout(self.inner.id, code))
    }

    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.inner.driver.with(|model| model.resolve_address(self.inner.id, local, remote, timeout))
    }

    /// Every host has a route to every other, so this never fails and never waits.
    fn resolve_route(&self, _timeout: Duration) -> Result<(), Error> {
        self.inner.driver.with(|model| model.resolve_route(self.inner.id))
    }

    fn device(&self) -> Result<DeviceKey, Error> {
        self.inner.driver.with(|model| model.device_key(self.inner.id))
    }

    fn capabilities(&self) -> Result<Capabilities, Error> {
        self.inner.driver.with(|model| model.capabilities(self.inner.id))
    }

    fn create_domain(&self) -> Result<Domain, Error> {
        let id = self.inner.driver.with(|model| model.create_domain(self.inner.id))?;
        Ok(Domain::new(&self.inner.driver, id))
    }

    fn create_completion_queue(&self, depth: u32, _vector: u32) -> Result<CompletionQueue, Error> {
        let id = self.inner.id;
        let (id, signal) = self
            .inner
            .driver
            .create_waking(|model| model.create_queue(id, depth), |id| Wake::Completions(*id))?;
        Ok(CompletionQueue::new(&self.inner.driver, id, signal))
    }

    fn create_queue_pair(
        &self,
        domain: &Domain,
        completions: &CompletionQueue,
        limits: QueuePairLimits,
    ) -> Result<QueuePair, Error> {
        self.inner.driver.same_fabric(domain.driver())?;
        self.inner.driver.same_fabric(completions.driver())?;
        let (id, number, inline) = self
            .inner
            .driver
            .with(|model| model.create_pair(self.inner.id, domain.id(), completions.id(), limits))?;
        // Kept alive: a queue pair must be destroyed before its identifier (`rdma_destroy_id(3)`).
        let identifier: Arc<dyn Send + Sync> = Arc::<IdentifierInner>::clone(&self.inner);
        let queues = [completions; 2];
        Ok(QueuePair::new(&self.inner.driver, id, number, inline, Some(identifier), domain, queues))
    }

    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        self.inner.driver.with(|model| model.connect(self.inner.id, params, private_data))
    }

    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        self.inner.driver.with(|model| model.accept(self.inner.id, params, private_data))
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.inner.driver.with(|model| model.reject(self.inner.id, private_data))
    }

    fn notify_established(&self) -> Result<(), Error> {
        self.inner.driver.with(|model| model.notify_established(self.inner.id))
    }

    fn disconnect(&self) -> Result<(), Error> {
        self.inner.driver.with(|model| model.disconnect(self.inner.id))
    }

    fn migrate(&self, to: &EventChannel) -> Result<(), Error> {
        self.inner.driver.same_fabric(&to.inner.driver)?;
        // Held over both steps: the handle must keep the channel that the model names.
        let mut channel = self.inner.channel.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.driver.with(|model| model.migrate(self.inner.id, to.inner.id))?;
        let old = core::mem::replace(&mut *channel, Arc::clone(&to.inner));
        drop(channel);
        // Possibly the last handle, which then destroys the channel.
        drop(old);
        Ok(())
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.driver.with(|model| model.local_addr(self.inner.id))
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner.driver.with(|model| model.peer_addr(self.inner.id))
    }
}

impl fmt::Debug for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identifier").field("key", &self.inner.key).finish_non_exhaustive()
    }
}
