//! Serves the store to all connections of an endpoint, on one thread.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rdma_conn::{ConnectionId, Descriptors, Endpoint, Error, Event};

use crate::kv::{REPLY_BATCH, Store};
use crate::resp::Frames;
use crate::session::Session;

/// How long the last reply may take to arrive.
const LINGER: Duration = Duration::from_secs(2);

/// Bytes read together at most.
const LONGEST_READ: usize = 1 << 20;

/// A store and its clients.
pub struct Server<'a, B: Descriptors> {
    /// The connections.
    pub endpoint: Endpoint<B>,
    store: &'a Store,
    sessions: HashMap<ConnectionId, Client>,
    /// Clients for whom something was published.
    woken: Arc<Mutex<Vec<ConnectionId>>>,
    /// Interrupts whoever waits for the endpoint.
    wake: Arc<dyn Fn() + Send + Sync>,
}

/// State between two commands of a client.
struct Client {
    session: Session,
    received: Frames,
    replies: BytesMut,
    quits: bool,
}

impl<'a, B: Descriptors> Server<'a, B> {
    /// A server without clients. The endpoint listens already.
    pub fn new(endpoint: Endpoint<B>, store: &'a Store) -> Self {
        Self { endpoint, store, sessions: HashMap::new(), woken: Arc::default(), wake: Arc::new(|| ()) }
    }

    /// Has `wake` called when something is published for a client of this server, whose client ever publishes it, once before the next
    /// [`Server::turn`]. It must end the wait for the endpoint, so that there is one.
    #[must_use]
    pub fn woken_by(self, wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { wake: Arc::new(wake), ..self }
    }

    /// Handles everything that has come, without waiting for more.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.endpoint.progress()?;
        self.handle();
        Ok(())
    }

    /// Waits until something has come, for at most `limit`, and handles it.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        self.endpoint.wait(limit)?;
        self.handle();
        Ok(())
    }

    fn handle(&mut self) {
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
                _ => {}
            }
        }
        let woken = std::mem::take(&mut *lock(&self.woken));
        woken.into_iter().for_each(|id| self.serve(id));
    }

    fn open(&mut self, id: ConnectionId) {
        let (woken, wake) = (Arc::clone(&self.woken), Arc::clone(&self.wake));
        let session = Session::with_waker(move || {
            let first = {
                let mut woken = lock(&woken);
                woken.push(id);
                woken.len() == 1
            };
            // A turn takes all of them.
            if first {
                wake();
            }
        });
        self.sessions.insert(
            id,
            Client { session, received: Frames::default(), replies: BytesMut::new(), quits: false },
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
            // It may have gone by itself meanwhile.
            let _closed = self.endpoint.abandon(id, LINGER);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    /// Answers what has arrived; true if the session is over. Replies to commands that arrived together leave together, and a
    /// client that does not take its replies is not read from.
    fn serve<B: Descriptors>(
        &mut self,
        endpoint: &mut Endpoint<B>,
        id: ConnectionId,
        store: &Store,
    ) -> io::Result<bool> {
        loop {
            while !self.quits
                && self.replies.len() < REPLY_BATCH
                && let Some(command) = self.received.take()?
            {
                self.quits = self.session.answer(store, command, &mut self.replies);
            }
            if self.replies.len() < REPLY_BATCH {
                self.session.published(&mut self.replies);
            }
            if !self.replies.is_empty() {
                let Some(written) = endpoint.write(id, &[IoSlice::new(&self.replies)])? else {
                    return Ok(false);
                };
                self.replies.advance(written);
            } else if self.quits {
                return Ok(true);
            } else {
                // Straight to where commands are cut from it; with nothing there, a read says whether that is the end.
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
