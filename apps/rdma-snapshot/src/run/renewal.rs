//! A new snapshot once the log of later writes is as long as the one so far.
//!
//! Until the new one is complete, readers get the one so far. Then its log ends, that of the new
//! one continues at the same place of the history, and new readers get the new one.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use rdma_conn::{Descriptors, Waker};

use super::making::{AHEAD, Made, Making};
use super::{Publish, Stop};
use crate::error::Error;
use crate::publisher::{Publisher, Store};
use crate::reader::Offer;
use crate::source::{Again, Source};

/// A new snapshot, before readers get it.
pub(super) struct Renewal<B: Descriptors> {
    state: State<B>,
    offer: Offer,
}

enum State<B: Descriptors> {
    Opening(Opening),
    /// Whether it is complete.
    Making(Making<B>, Box<Store<B>>, bool),
}

/// A source that another thread opens. Dropping it undoes changes at the source.
struct Opening {
    thread: Option<JoinHandle<io::Result<Box<dyn Source>>>>,
    stop: Stop,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(Err(error)) = self.thread.take().and_then(|thread| thread.join().ok()) {
            tracing::debug!(%error, "another snapshot is not wanted any longer");
        }
    }
}

impl<B: Descriptors> Renewal<B> {
    /// Begins to open another snapshot, which has a similar `offer`.
    pub(super) fn begin(again: Again, offer: Offer, waker: &Waker) -> Result<Self, Error> {
        let stop = Stop::default();
        let (theirs, waker) = (stop.clone(), waker.clone());
        let thread = std::thread::Builder::new().name("renewal".into()).spawn(move || {
            let opened = again(&theirs);
            waker.wake();
            opened
        });
        let thread = Some(thread.map_err(|error| Error::Source(Arc::new(error)))?);
        Ok(Self { state: State::Opening(Opening { thread, stop }), offer })
    }

    /// Goes on with it. Returns whether it is complete and waits for the end of the log so far.
    ///
    /// # Errors
    /// It cannot be completed. The one so far is unaffected.
    pub(super) fn progress(
        &mut self,
        publisher: &mut Publisher<B>,
        how: &Publish,
        waker: &Waker,
    ) -> Result<bool, Error> {
        if let State::Opening(opening) = &mut self.state
            && let Some(thread) = opening.thread.take_if(|thread| thread.is_finished())
        {
            let opened = thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread ended early")));
            let source = opened.map_err(|error| Error::Source(Arc::new(error)))?;
            self.offer.total = source.total();
            self.offer.position = source.position();
            let mut store = Box::new(publisher.prepare());
            let filler = store.filler(self.offer.chunk_size.max(1) as usize);
            let making = Making::begin(source, filler, (how.stop.clone(), how.rate), false, waker)?;
            self.state = State::Making(making, store, false);
        }
        let State::Making(making, store, is_complete) = &mut self.state else { return Ok(false) };
        for _ in 0..AHEAD {
            match making.next().filter(|_| !*is_complete) {
                Some(Made::Chunk(filled)) => {
                    store.beside(publisher.kept());
                    store.publish(filled)?;
                }
                Some(Made::Mark) => {
                    store.mark()?;
                    *is_complete = true;
                }
                Some(Made::Failed(error)) => return Err(error),
                Some(Made::End | Made::Replaced(_)) | None => break,
            }
        }
        Ok(*is_complete)
    }

    /// Ends a wait for the source. Another snapshot is not wanted any longer.
    pub(super) fn stop(&self) {
        if let State::Opening(opening) = &self.state {
            opening.stop.stop();
        }
    }

    /// Returns whether its memory and that of other snapshots exceed the limit.
    pub(super) fn is_too_much(&self, kept: u64, limit: u64) -> bool {
        let State::Making(_, store, false) = &self.state else { return false };
        kept.saturating_add(store.bytes()) > limit
    }

    /// Publishes the complete snapshot in place of the one so far, whose log has ended at `offset`.
    /// Returns its source.
    pub(super) fn publish(self, publisher: &mut Publisher<B>, offset: u64) -> Result<Making<B>, Error> {
        let State::Making(making, store, true) = self.state else {
            return Err(Error::Source(Arc::new(io::Error::other("its log ended early"))));
        };
        let begun = self.offer.position.map_or(offset, |position| position.offset);
        let shared_from = store.bytes().saturating_add(offset.saturating_sub(begun));
        publisher.renew(*store, self.offer, shared_from)?;
        making.go_on_from(offset);
        Ok(making)
    }
}
