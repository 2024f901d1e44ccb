use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rdma_backend::{Backend, PostError, QueuePairLimits, RecvRequest};

use crate::{Interceptor, LowerQueuePair, Origin, Region, lock};

/// An interceptor that stops the side above it, as a signal stops a process: a stopped side takes
/// no event and no completion, and posts no receive. Its device goes on.
#[derive(Clone, Default)]
pub struct Gate(Arc<Shut>);

#[derive(Default)]
struct Shut {
    is_shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Stops the side until the result is dropped.
    pub fn freeze(&self) -> Frozen {
        *lock(&self.0.is_shut) = true;
        let gate = self.clone();
        Frozen::new(move || {
            *lock(&gate.0.is_shut) = false;
            gate.0.opened.notify_all();
        })
    }

    fn pass(&self) {
        let shut = lock(&self.0.is_shut);
        drop(self.0.opened.wait_while(shut, |shut| *shut).unwrap_or_else(PoisonError::into_inner));
    }
}

impl<B: Backend> Interceptor<B> for Gate {
    type Identifier = ();
    type QueuePair = ();

    fn identifier(&self, _inner: &Arc<B::Identifier>, _origin: Origin) {}

    fn queue_pair(
        &self,
        (): &(),
        _inner: &Arc<B::QueuePair>,
        _domain: &B::Domain,
        _limits: QueuePairLimits,
    ) -> Result<(), B::Error> {
        Ok(())
    }

    fn before_events(&self, _inner: &B::EventChannel) {
        self.pass();
    }

    fn before_poll(&self) {
        self.pass();
    }

    fn post_recv(
        &self,
        (): &(),
        below: LowerQueuePair<'_, B>,
        requests: &[RecvRequest<'_, Region<B>>],
    ) -> Result<(), PostError<B::Error>> {
        self.pass();
        below.post_recv(requests)
    }
}

/// Something that stands still until this is dropped.
#[must_use = "it goes on at once otherwise"]
pub struct Frozen(Box<dyn FnMut() + Send>);

impl Frozen {
    /// Calls `thaw` when it is dropped.
    pub fn new(thaw: impl FnMut() + Send + 'static) -> Self {
        Self(Box::new(thaw))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        (self.0)();
    }
}
