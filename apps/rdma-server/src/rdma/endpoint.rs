//! The endpoint shared by all RDMA connections of one loop.

use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use rdma_conn::{
    Connection, ConnectionId, ConnectionMap, Descriptors, Endpoint, Error, Event, Limits, Options, Request,
};
use rdma_proto::State;

use crate::poller::wait_one;
use crate::transport::{Driver, Interest};

/// A type's endpoint on one loop, and the tasks it wakes. The lock is free: one thread calls.
pub(super) struct SharedEndpoint<B: Descriptors> {
    inner: Mutex<Inner<B>>,
    /// The endpoint's descriptor, to be watched without the lock.
    descriptor: OwnedFd,
}

struct Inner<B: Descriptors> {
    endpoint: Endpoint<B>,
    members: ConnectionMap<Member>,
    /// Tasks to wake once the lock is released. Kept for its memory.
    wakers: Vec<Waker>,
    failure: Option<Error>,
}

#[derive(Default)]
struct Member {
    waker: Option<Waker>,
    /// Bytes can flow, or could before it ended.
    opened: bool,
}

impl<B: Descriptors> SharedEndpoint<B> {
    pub(super) fn new(backend: &B, limits: Limits) -> io::Result<Self> {
        let endpoint = Endpoint::new(backend, limits)?;
        let descriptor = endpoint.as_fd().try_clone_to_owned()?;
        let inner = Inner { endpoint, members: ConnectionMap::new(), wakers: Vec::new(), failure: None };
        Ok(Self { inner: Mutex::new(inner), descriptor })
    }

    fn lock(&self) -> MutexGuard<'_, Inner<B>> {
        // A panic between two calls leaves an endpoint intact.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the tasks of a turn, not under the lock: a waker may run anything.
    fn wake(&self, mut wakers: Vec<Waker>) {
        wakers.drain(..).for_each(Waker::wake);
        self.lock().wakers = wakers;
    }

    pub(super) fn connect(
        &self,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    ) -> io::Result<ConnectionId> {
        let mut inner = self.lock();
        let id = inner.endpoint()?.connect(peer, local, timeout, options)?;
        inner.members.insert(id, Member::default());
        Ok(id)
    }

    pub(super) fn accept(&self, request: Request<B>, options: Options) -> io::Result<ConnectionId> {
        let mut inner = self.lock();
        let id = inner.endpoint()?.accept_request(request, options)?;
        inner.members.insert(id, Member::default());
        Ok(id)
    }

    pub(super) fn set_waker(&self, id: ConnectionId, waker: &Waker) {
        if let Some(member) = self.lock().members.get_mut(id) {
            member.waker = Some(waker.clone());
        }
    }

    pub(super) fn is_open(&self, id: ConnectionId) -> io::Result<bool> {
        let mut inner = self.lock();
        let opened = inner.members.get(id).is_some_and(|member| member.opened);
        // One that was open reports its end by reading, after the bytes that came before it.
        if !opened {
            inner.endpoint()?.check(id)?;
        }
        Ok(opened)
    }

    pub(super) fn read(&self, id: ConnectionId, into: &mut [u8]) -> io::Result<usize> {
        self.lock().endpoint()?.read(id, into)?.ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    pub(super) fn write(&self, id: ConnectionId, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.lock().endpoint()?.write(id, from)?.ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    pub(super) fn shutdown(&self, id: ConnectionId, linger: Duration) {
        // A connection that is gone has ended.
        let _ = self.lock().endpoint.close(id, linger);
    }

    pub(super) fn remove(&self, id: ConnectionId) {
        let mut inner = self.lock();
        inner.members.remove(id);
        inner.endpoint.abort(id);
    }

    /// A failed connection is ready: it can report its error.
    pub(super) fn ready(&self, id: ConnectionId) -> Interest {
        let inner = self.lock();
        match inner.endpoint.connection(id) {
            _ if inner.failure.is_some() => Interest::BOTH,
            Some(connection) => Interest { read: connection.is_readable(), write: connection.is_writable() },
            None => Interest::NONE,
        }
    }

    pub(super) fn has_ended(&self, id: ConnectionId) -> bool {
        let inner = self.lock();
        let ended = |connection: &Connection<B>| {
            matches!(connection.state(), State::Closed | State::Failed(_)) || connection.check().is_err()
        };
        inner.failure.is_some()
            || inner.endpoint.check(id).is_err()
            || inner.endpoint.connection(id).is_some_and(ended)
    }

    /// Queries a connection; `None` while there is no queue pair.
    pub(super) fn with<T>(&self, id: ConnectionId, ask: impl FnOnce(&Connection<B>) -> T) -> Option<T> {
        self.lock().endpoint.connection(id).map(ask)
    }
}

impl<B: Descriptors> Inner<B> {
    fn endpoint(&mut self) -> Result<&mut Endpoint<B>, Error> {
        match &self.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(&mut self.endpoint),
        }
    }

    fn progress(&mut self, take: impl FnOnce(&mut Endpoint<B>) -> Result<(), Error>) -> Vec<Waker> {
        let mut wakers = std::mem::take(&mut self.wakers);
        if self.failure.is_some() {
            return wakers;
        }
        if let Err(error) = take(&mut self.endpoint) {
            tracing::error!(%error, "the RDMA connections of a loop are lost");
            self.failure = Some(error);
            // All of them, so that each reports the failure.
            wakers.extend(self.members.values().filter_map(|member| member.waker.clone()));
            return wakers;
        }
        while let Some(event) = self.endpoint.next_event() {
            let (id, opens) = match event {
                Event::Opened { id, .. } => (id, true),
                Event::Readable(id) | Event::Writable(id) | Event::Returned(id) | Event::Ended(id) => {
                    (id, false)
                }
                // The others are about listeners, of which this endpoint has none.
                _ => continue,
            };
            if let Some(member) = self.members.get_mut(id) {
                member.opened |= opens;
                wakers.extend(member.waker.clone());
            }
        }
        wakers
    }
}

impl<B: Descriptors> Driver for SharedEndpoint<B> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    fn drive(&self) {
        let wakers = self.lock().progress(Endpoint::progress);
        self.wake(wakers);
    }

    fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let mut inner = self.lock();
        if inner.failure.is_some() {
            drop(inner);
            // Nothing will come, and a waiting caller must not be kept busy.
            return wait_one(self.descriptor(), Interest::NONE, timeout).map(drop);
        }
        let wakers = inner.progress(|endpoint| endpoint.wait(timeout));
        drop(inner);
        self.wake(wakers);
        Ok(())
    }

    fn next_timeout(&self) -> Option<Duration> {
        let inner = self.lock();
        // Nothing is due any more: a time that has passed would keep the loop awake.
        if inner.failure.is_some() {
            return None;
        }
        inner.endpoint.next_timeout().map(|at| at.since(inner.endpoint.now()))
    }
}
