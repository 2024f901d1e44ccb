//! Shared receive queues, as handles.

use core::fmt;
use std::sync::Arc;

use rdma_backend::PostError;

use crate::driver::Driver;
use crate::error::Error;
use crate::model::{PostedReceive, SharedId};
use crate::request::NamedReceive;
use crate::verbs::{Domain, DomainInner, chain};

/// A shared receive queue. Queue pairs that take their receives from it keep it alive.
pub struct SharedReceives {
    pub(crate) inner: Arc<SharedInner>,
}

pub(crate) struct SharedInner {
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: SharedId,
    domain: Arc<DomainInner>,
}

impl Drop for SharedInner {
    fn drop(&mut self) {
        self.driver.release(|driver| driver.with(|model| model.destroy_shared(self.id)));
    }
}

impl SharedReceives {
    pub(crate) fn new(driver: &Arc<Driver>, id: SharedId, domain: &Domain) -> Self {
        let (driver, domain) = (Arc::clone(driver), Arc::clone(&domain.inner));
        Self { inner: Arc::new(SharedInner { driver, id, domain }) }
    }

    /// `ibv_post_srq_recv(3)`: posts the requests in order, up to the first refused one.
    pub fn post(&self, requests: &[NamedReceive<'_>]) -> Result<(), PostError<Error>> {
        self.inner.driver.with(|model| {
            chain(requests, |request| {
                // In the queue's own domain, whichever queue pair takes them (`ibv_create_srq(3)`).
                let local = model.named(Some(self.inner.domain.id), request.local);
                model.post_shared(self.inner.id, &PostedReceive { id: request.id, local })
            })
        })
    }

    /// `ibv_modify_srq(3)`: raises an event when the queue holds fewer receives than this; 0 is no
    /// limit.
    pub fn set_limit(&self, limit: u32) -> Result<(), Error> {
        self.inner.driver.with(|model| model.set_shared_limit(self.inner.id, limit))
    }

    /// `ibv_query_srq(3)`: the limit; 0 once its event has come.
    pub fn limit(&self) -> Result<u32, Error> {
        self.inner.driver.with(|model| model.shared_limit(self.inner.id))
    }

    /// Returns whether a queue pair still takes its receives from it (`EBUSY`).
    #[must_use]
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }
}

impl fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives").field("id", &self.inner.id).finish_non_exhaustive()
    }
}
