//! Publishing from a source.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_conn::{Descriptors, Waker};

use super::making::{AHEAD, Leaving, Made, Making};
use super::renewal::Renewal;
use super::{Progress, Stop, TICK};
use crate::error::Error;
use crate::publisher::{self, Publisher};
use crate::reader::{AREA, Offer};
use crate::source::{Again, Source};
use crate::wire::{Layout, Reason};

/// Settings of a publication.
#[derive(Clone, Debug)]
pub struct Publish {
    /// Settings of the publisher.
    pub config: publisher::Config,
    /// The table's layout.
    pub layout: Layout,
    /// Bytes in a chunk.
    pub chunk_size: u32,
    /// The least bytes of later writes after which a new snapshot is made, if the source can. It is
    /// made once there are as many as this, and as many as the snapshot has.
    pub backlog: u64,
    /// The most bytes of a snapshot that are taken from the source in a second.
    pub rate: Option<u64>,
    /// Memory is a window: chunks that this many readers have, and all others that are there, are
    /// released, so that the snapshot may be larger than memory. A reader that comes after that is
    /// refused, and no newer snapshot is made.
    pub window: Option<usize>,
    /// Ends when this many readers have received everything; never if `None`.
    pub readers: Option<usize>,
    /// Ends when the table has been complete for this long, even if readers are still reading.
    pub keep: Option<Duration>,
    /// Ends the log of later writes, and then ends as above.
    pub stop: Stop,
    /// Withdraws the snapshot at once. Readers that do not read are told for a short time only.
    pub withdraw: Stop,
}

impl Default for Publish {
    fn default() -> Self {
        Self {
            config: publisher::Config::default(),
            layout: Layout::Chunks,
            chunk_size: 1 << 20,
            backlog: 64 << 20,
            rate: None,
            window: None,
            readers: None,
            keep: None,
            stop: Stop::default(),
            withdraw: Stop::default(),
        }
    }
}

/// Publishes `source` on `address`, and reports progress to `told` now and then. `bound` gets the
/// address before any reader is served.
///
/// # Errors
/// The source failed, or there is no memory, or no RDMA. Readers are told.
pub fn publish<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    source: impl Source + 'static,
    how: &Publish,
    bound: impl FnOnce(SocketAddr),
    told: &mut dyn FnMut(&Progress),
) -> Result<Progress, Error> {
    let mut publisher = Publisher::bind(backend, address, how.config.clone())?;
    let rcp = how.layout == Layout::Rcp;
    let chunk_size = if rcp { AREA } else { how.chunk_size };
    let total = source.total();
    if rcp && how.window.is_some() {
        let one = io::Error::other("the seed's table is in one piece of memory, which cannot be a window");
        return Err(Error::Source(Arc::new(one)));
    }
    if rcp {
        let no_length =
            io::Error::other("the seed's table cannot grow, so the length must be known: a file's is");
        publisher.begin_mapping(total.ok_or_else(|| Error::Source(Arc::new(no_length)))?)?;
    }
    let offer = Offer {
        layout: how.layout,
        content: source.content(),
        chunk_size,
        total,
        position: source.position(),
    };
    publisher.offer(None, offer)?;
    bound(publisher.address());
    let waker = Waker::new()?;
    let again = source.again().filter(|_| how.window.is_none());
    let filler = publisher.filler(chunk_size);
    let filler = if how.window.is_some() { filler.windowed()? } else { filler };
    let first = Making::begin(Box::new(source), filler, (how.stop.clone(), how.rate), true, &waker)?;
    let mut run = Run {
        backend,
        how,
        offer,
        waker: &waker,
        making: first,
        again,
        renewal: None,
        leaving: None,
        released: false,
        waits: false,
        not_before: 0,
    };
    let outcome = run.serve(&mut publisher, told);
    if let Err(error) = &outcome {
        let reason = if matches!(error, Error::Source(_)) { Reason::Failed } else { Reason::Resources };
        publisher.withdraw(reason);
    } else {
        publisher.withdraw(Reason::Withdrawn);
    }
    // Before the process may end, changes at the source are undone.
    drop(run);
    let drained = publisher.drain(&waker, &how.withdraw);
    outcome.and_then(|progress| drained.map(|()| progress))
}

/// A running publication.
struct Run<'a, B: Descriptors> {
    backend: &'a B,
    how: &'a Publish,
    offer: Offer,
    waker: &'a Waker,
    /// The source of the snapshot that new readers get.
    making: Making<B>,
    /// Opens another snapshot, until the log ends, if the source can.
    again: Option<Again>,
    /// Another snapshot, while it is being made.
    renewal: Option<Renewal<B>>,
    /// One that was given up, while the log waits for its memory.
    leaving: Option<Leaving<B>>,
    /// Whether chunks were released since the source was last told to go on.
    released: bool,
    /// Whether the source waits for memory of the window.
    waits: bool,
    /// Bytes of later writes before which no other snapshot is begun.
    not_before: u64,
}

impl<B: Descriptors> Run<'_, B> {
    fn serve(
        &mut self,
        publisher: &mut Publisher<B>,
        told: &mut dyn FnMut(&Progress),
    ) -> Result<Progress, Error> {
        let mut progress = Progress { total: self.offer.total, snapshots: 1, ..Progress::default() };
        let begun = self.backend.now();
        let mut ended = None;
        let mut tell_at = begun;
        loop {
            self.waker.clear();
            publisher.progress()?;
            // Takes only a few at a time. Between them it checks readers, the operator, and time.
            let mut is_empty = ended.is_some();
            for _ in 0..AHEAD {
                if is_empty {
                    break;
                }
                match self.making.next() {
                    Some(Made::Chunk(filled)) => publisher.publish(filled)?,
                    Some(Made::Mark) => {
                        publisher.mark()?;
                        progress.marked = true;
                    }
                    Some(Made::End) => {
                        publisher.end();
                        ended = Some(self.backend.now());
                        self.again = None;
                        is_empty = true;
                    }
                    Some(Made::Replaced(offset)) => {
                        // The newer one may have failed meanwhile. Then this log goes on.
                        self.renew(publisher);
                        if let Some(renewal) = self.renewal.take_if(|renewal| renewal.is_complete()) {
                            self.making = renewal.publish(publisher, offset)?;
                            self.not_before = 0;
                            progress.snapshots += 1;
                        } else {
                            self.making.go_on_from(offset);
                        }
                    }
                    Some(Made::Short(error)) => self.make_room(publisher, error)?,
                    Some(Made::Failed(error)) => return Err(error),
                    None => is_empty = true,
                }
                publisher.progress()?;
            }
            self.slide(publisher);
            if self.leaving.take_if(|leaving| leaving.is_over()).is_some() {
                self.making.go_on_from(0);
            }
            self.renew(publisher);
            let now = self.backend.now();
            let counts = publisher.counts();
            progress.bytes = counts.bytes;
            (progress.readers, progress.done) = (counts.reading, counts.done);
            if ended.is_none() {
                progress.elapsed = now.since(begun);
            }
            let served = self.how.readers.is_some_and(|readers| counts.done >= readers);
            let kept = self.how.keep.zip(ended).is_some_and(|(keep, ended)| now.since(ended) >= keep);
            let over = ended.is_some() && (served || kept) || self.how.withdraw.is_stopped();
            if now >= tell_at || over {
                tell_at = now.after(TICK);
                told(&progress);
            }
            if over {
                return Ok(progress);
            }
            publisher.wait(self.waker, Some(if is_empty { tell_at } else { now }))?;
        }
    }

    /// Makes a new snapshot once the backlog is full. Once it is complete, the log so far ends, and
    /// that of the new one continues it. After the end of the log no snapshot is wanted.
    fn renew(&mut self, publisher: &mut Publisher<B>) {
        let Some(again) = &self.again else {
            self.renewal = self.renewal.take().and_then(Renewal::stop);
            return;
        };
        let full = self.full(publisher);
        let is_full = full.is_some_and(|full| publisher.log_bytes() >= full.max(self.not_before));
        let renewal = match &mut self.renewal {
            Some(renewal) => Ok(renewal),
            none if is_full && !self.how.stop.is_stopped() => {
                Renewal::begin(again, self.offer, self.how, self.waker).map(|begun| none.insert(begun))
            }
            _ => return,
        };
        match renewal.and_then(|renewal| renewal.progress(publisher, self.how, self.waker)) {
            Ok(Some(from)) => self.making.replace(from),
            Ok(None) => {}
            Err(error) => {
                self.renewal = None;
                self.not_renewed(publisher, &error);
            }
        }
    }

    /// Returns the bytes of later writes after which a new snapshot is made.
    fn full(&self, publisher: &Publisher<B>) -> Option<u64> {
        publisher.snapshot_bytes().map(|bytes| bytes.max(self.how.backlog))
    }

    /// There is no new snapshot. The one so far continues, for all readers.
    fn not_renewed(&mut self, publisher: &Publisher<B>, error: &Error) {
        tracing::warn!(%error, "no new snapshot was made, so readers get this one and its backlog");
        self.making.replace(u64::MAX);
        self.not_before = publisher.log_bytes().saturating_add(self.full(publisher).unwrap_or(0));
    }

    /// Releases what all readers have, and lets a source go on that waits for it. What was released
    /// before it waited may be enough.
    fn slide(&mut self, publisher: &mut Publisher<B>) {
        let Some(readers) = self.how.window else { return };
        self.released |= publisher.release(readers);
        if self.waits && self.released {
            (self.waits, self.released) = (false, false);
            // The log does not move meanwhile, so the offset does not matter.
            self.making.go_on_from(0);
        }
    }

    /// Answers [`Made::Short`]. A window waits for readers. Otherwise an older snapshot goes, or
    /// else the new one that is being made. The registration is tried again once the memory is
    /// there: a source's thread holds some of it until it ends.
    fn make_room(&mut self, publisher: &mut Publisher<B>, error: Error) -> Result<(), Error> {
        if self.how.window.is_some() {
            // What readers release would not be enough.
            let is_all = publisher.store.regions().len() < 2;
            self.waits = true;
            return if is_all && matches!(error, Error::Backend { .. }) { Err(error) } else { Ok(()) };
        }
        let Err(error) = self.making.retry(publisher, error) else { return Ok(()) };
        let Some(leaving) = Renewal::give_up(&mut self.renewal) else { return Err(error) };
        self.not_renewed(publisher, &error);
        self.leaving = Some(leaving);
        Ok(())
    }
}
