use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use rdma_conn::{AsyncEndpoint, Descriptors, Limits, WeakAsyncEndpoint};
use tokio::runtime::{Handle, Id};

type PerRuntime<B> = Vec<(Id, WeakAsyncEndpoint<B>)>;

/// A program's RDMA backend, with the endpoints of its [`Client`](crate::Client)s.
///
/// All connections made on one tokio runtime share an [`AsyncEndpoint`]: an event channel, a task
/// that drives them, and a completion queue for each 64 of them. Each has a queue pair, a
/// protection domain and memory of its own.
///
/// Clones share endpoints, and so do clients that are given clones. An endpoint is made with the
/// first connection on a runtime and dropped with the last. A failed one is replaced by the next
/// connection. Runtimes share none: one that does not run would let connections elsewhere wait.
pub struct Endpoints<B: Descriptors> {
    backend: B,
    made: Arc<Mutex<PerRuntime<B>>>,
}

impl<B: Descriptors> From<B> for Endpoints<B> {
    fn from(backend: B) -> Self {
        Self { backend, made: Arc::default() }
    }
}

impl<B: Descriptors> Endpoints<B> {
    pub(crate) fn current(&self) -> io::Result<AsyncEndpoint<B>> {
        let runtime = Handle::try_current().map_err(io::Error::other)?.id();
        // The state is valid after each change.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        made.retain(|(id, endpoint)| {
            let endpoint = endpoint.upgrade();
            let exists = endpoint.is_some();
            if *id == runtime {
                found = endpoint;
            }
            exists
        });
        if let Some(endpoint) = found {
            return Ok(endpoint);
        }
        let endpoint = AsyncEndpoint::new(&self.backend, Limits::NONE)?;
        made.push((runtime, endpoint.downgrade()));
        Ok(endpoint)
    }
}

impl<B: Descriptors> Clone for Endpoints<B> {
    fn clone(&self) -> Self {
        Self { backend: self.backend.clone(), made: Arc::clone(&self.made) }
    }
}

impl<B: Descriptors> fmt::Debug for Endpoints<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints").field("made", &self.made).finish_non_exhaustive()
    }
}
