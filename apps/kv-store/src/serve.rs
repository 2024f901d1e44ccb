//! Serves the store to all connections of an endpoint, on one thread.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Buf;
use rdma_conn::{ConnectionId, Descriptors, Endpoint, Error, Event, Waker};

use crate::buffer::Buffer;
use crate::kv::{REPLY_BATCH, Store, refuse};
use crate::resp::Frames;
use crate::session::Session;

/// How long the last reply may take to arrive.
const LINGER: Duration = Duration::from_secs(2);

const LONGEST_READ: usize = 1 << 20;

/// A store and its clients.
pub struct Server<'a, B: Descriptors> {
    /// The connections.
    pub endpoint: Endpoint<B>,
    store: &'a Store,
    sessions: HashMap<ConnectionId, Client>,
    /// Clients with new published messages.
    woken: Arc<Mutex<Vec<ConnectionId>>>,
    waker: Option<Waker>,
}

struct Client {
    session: Session,
    received: Frames,
    replies: Buffer,
    quits: bool,
}

impl<'a, B: Descriptors> Server<'a, B> {
    /// Returns a server without clients. The endpoint listens already.
    pub fn new(endpoint: Endpoint<B>, store: &'a Store) -> Self {
        Self { endpoint, store, sessions: HashMap::new(), woken: Arc::default(), waker: None }
    }

    /// Sets the endpoint's waker, for messages that another thread publishes.
    #[must_use]
    pub fn woken_by(self, waker: Waker) -> Self {
        Self { waker: Some(waker), ..self }
    }

    /// Handles everything that has arrived, without waiting for more.
    ///
    /// # Errors
    /// The endpoint has failed, or the device of a listener is gone. Connected clients may still be
    /// served after that.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.endpoint.progress()?;
        self.handle()
    }

    /// Waits for input, for at most `limit`, and handles it.
    ///
    /// # Errors
    /// Those of [`Server::turn`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        self.endpoint.wait(limit)?;
        self.handle()
    }

    fn handle(&mut self) -> Result<(), Error> {
        let mut lost = Ok(());
        while let Some(event) = self.endpoint.next_event() {
            match event {
                Event::Opened { id, .. } => self.open(id),
                Event::Readable(id) | Event::Writable(id) => self.serve(id),
                Event::Ended(id) => {
                    match self.endpoint.check(id) {
                        Ok(()) => tracing::info!(peer = ?self.endpoint.peer_addr(id), "client left"),
                        Err(error) => {
                            tracing::warn!(peer = ?self.endpoint.peer_addr(id), %error, "client lost");
                        }
                    }
                    self.sessions.remove(&id);
                    self.endpoint.abort(id);
                }
                Event::AcceptFailed(listener) => match self.endpoint.take_accept_error(listener) {
                    // It would never accept a client again.
                    Some(error @ (Error::DeviceRemoved | Error::Device { .. })) => lost = Err(error),
                    Some(error) => tracing::warn!(%error, "no connection can be accepted now"),
                    None => {}
                },
                _ => {}
            }
        }
        let woken = std::mem::take(&mut *lock(&self.woken));
        woken.into_iter().for_each(|id| self.serve(id));
        lost
    }

    fn open(&mut self, id: ConnectionId) {
        let (woken, waker) = (Arc::clone(&self.woken), self.waker.clone());
        let session = Session::with_waker(move || {
            let first = {
                let mut woken = lock(&woken);
                woken.push(id);
                woken.len() == 1
            };
            // A turn takes all of them.
            if first && let Some(waker) = &waker {
                waker.wake();
            }
        });
        self.sessions.insert(
            id,
            Client { session, received: Frames::default(), replies: Buffer::default(), quits: false },
        );
    }

    fn serve(&mut self, id: ConnectionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let over = match session.serve(&mut self.endpoint, id, self.store) {
            Ok(over) => over,
            Err(error) => {
                tracing::warn!(peer = ?self.endpoint.peer_addr(id), %error, "client dismissed");
                true
            }
        };
        if over {
            self.sessions.remove(&id);
            // It may have ended meanwhile.
            let _closed = self.endpoint.abandon(id, LINGER);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Answers received commands. Returns true if the session has ended. Replies are sent together,
    /// and a client that does not take them is not read from.
    fn serve<B: Descriptors>(
        &mut self,
        endpoint: &mut Endpoint<B>,
        id: ConnectionId,
        store: &Store,
    ) -> io::Result<bool> {
        loop {
            while !self.quits && self.replies.bytes.len() < REPLY_BATCH {
                match self.received.take() {
                    Ok(None) => break,
                    Ok(Some(command)) => {
                        self.quits = self.session.answer(store, command, &mut self.replies.bytes);
                    }
                    Err(error) => {
                        tracing::warn!(peer = ?endpoint.peer_addr(id), %error, "client dismissed");
                        refuse(&mut self.replies.bytes, &error);
                        self.quits = true;
                    }
                }
            }
            if self.replies.bytes.len() < REPLY_BATCH {
                self.session.published(&mut self.replies.bytes);
            }
            if !self.replies.bytes.is_empty() {
                self.replies.grown();
                let Some(written) = endpoint.write(id, &[IoSlice::new(&self.replies.bytes)])? else {
                    return Ok(false);
                };
                self.replies.bytes.advance(written);
                self.replies.settle();
            } else if self.quits {
                return Ok(true);
            } else {
                // Without unread bytes, a read shows whether the stream has ended.
                let unread = endpoint.connection(id).map_or(0, |connection| connection.unread());
                let most = usize::try_from(unread).unwrap_or(usize::MAX).clamp(1, LONGEST_READ);
                match self.received.read(most, |into| endpoint.read(id, into))? {
                    None => return Ok(false),
                    Some(0) => return Ok(true),
                    Some(_) => {}
                }
            }
        }
    }
}
