//! A connection with a completion queue and an event channel of its own.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use rdma_proto::backend::{Backend, Completion, CompletionQueue, EventChannel, Identifier};

use crate::connection::{BATCH, Connection};
use crate::error::Error;
use crate::lend::RegisteredBuffer;
use crate::memory::{Budget, Memory, Place};
use crate::options::Options;

/// A [`Connection`] that shares nothing with others: what a [`Stream`](crate::Stream) is made of. Nothing here blocks.
///
/// The order that never sleeps on work is: [`Link::arm`], [`Link::progress`], then wait for the descriptors.
pub struct Link<B: Backend> {
    connection: Connection<B>,
    completions: B::CompletionQueue,
    events: B::EventChannel,
    _place: Place,
}

impl<B: Backend> Link<B> {
    /// A connection on `id`, whose device is known and whose events come through `events`.
    pub(crate) fn new(
        backend: B,
        events: B::EventChannel,
        id: B::Identifier,
        peer: SocketAddr,
        options: Options,
        (budget, place): (&Arc<Budget>, Place),
    ) -> Result<Self, Error> {
        let limits = id.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        let options = options.fitted(&limits);
        // Before anything is made for it.
        budget.has(Memory::<B>::idle(&options))?;
        let completions = id
            .create_completion_queue(options.completions(), options.completion_vector)
            .map_err(Error::backend("creating a completion queue"))?;
        let connection = Connection::new(backend, id, &completions, peer, options, Arc::clone(budget))?;
        Ok(Self { connection, completions, events, _place: place })
    }

    /// The channel of this connection's connection-manager events.
    pub const fn event_channel(&self) -> &B::EventChannel {
        &self.events
    }

    /// The queue of this connection's completions.
    pub const fn completion_queue(&self) -> &B::CompletionQueue {
        &self.completions
    }

    /// As [`Connection::try_write`]. What holds the bytes back may have been lifted by completions that nobody has looked at
    /// yet, so it looks.
    ///
    /// # Errors
    /// What ended the connection.
    pub fn try_write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let written = self.connection.try_write(from)?;
        self.look(written);
        Ok(written)
    }

    /// As [`Connection::try_lend`], and looks as [`Link::try_write`] does.
    ///
    /// # Errors
    /// As [`Connection::try_lend`].
    pub fn try_lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let lent = self.connection.try_lend(buffer, range)?;
        self.look(lent);
        Ok(lent)
    }

    fn look(&mut self, sent: Option<usize>) {
        if sent.is_some_and(|sent| sent > 0) && !self.is_flushed() {
            self.progress();
        }
    }

    /// Takes completions, handles time, and posts what can be posted. Call it after the completion queue's descriptor was
    /// readable, and when [`Connection::next_timeout`] has come. True if anything happened by which a read or write that had to
    /// wait may go on.
    pub fn progress(&mut self) -> bool {
        let moved = self.take_completions();
        if self.connection.is_suspect() {
            self.take_events();
        }
        self.connection.handle_time() | moved
    }

    /// Asks for one wake-up by the next completion. Call [`Link::progress`] once more before waiting for it.
    pub fn arm(&mut self) {
        if self.completions.arm().is_err() {
            self.connection.handle_refusal("ibv_req_notify_cq");
        }
    }

    /// Takes wake-ups off the completion channel. Call it when the channel's descriptor was readable.
    pub fn take_completion_events(&mut self) {
        if self.completions.take_events().is_err() {
            self.connection.handle_refusal("ibv_get_cq_event");
        }
    }

    /// Takes connection-manager events. Call it when the event channel's descriptor was readable.
    /// True if there were any.
    pub fn take_events(&mut self) -> bool {
        let mut any = false;
        loop {
            match self.events.next_event() {
                Ok(Some(event)) if event.id == self.connection.id().key() => {
                    self.take_completions();
                    self.connection.handle_event(event.kind);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    self.connection.fail(Error::backend("reading connection events")(error));
                    any = true;
                    break;
                }
            }
            any = true;
        }
        self.connection.conclude();
        any
    }

    /// Takes all completions; true if there were any.
    fn take_completions(&mut self) -> bool {
        let mut batch = [Completion::EMPTY; BATCH];
        let mut any = false;
        loop {
            let Ok(count) = self.completions.poll(&mut batch) else {
                self.connection.handle_refusal("ibv_poll_cq");
                return true;
            };
            if count == 0 {
                return any;
            }
            any = true;
            self.connection.handle_completions(batch.iter().take(count));
            if count < BATCH {
                return true;
            }
        }
    }
}

impl<B: Backend> Deref for Link<B> {
    type Target = Connection<B>;

    fn deref(&self) -> &Connection<B> {
        &self.connection
    }
}

impl<B: Backend> DerefMut for Link<B> {
    fn deref_mut(&mut self) -> &mut Connection<B> {
        &mut self.connection
    }
}

impl<B: Backend> std::fmt::Debug for Link<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("connection", &self.connection).finish_non_exhaustive()
    }
}
