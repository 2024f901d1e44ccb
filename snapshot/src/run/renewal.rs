//! A new snapshot once the log of later writes is as long as the one so far.
//!
//! Until the new one is complete, readers get the one so far. Then its log ends, that of the new
//! one continues at the same place of the history, and new readers get the new one.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};

use rdma_conn::{Descriptors, Waker};

use super::making::{AHEAD, Leaving, Made, Making};
use super::{Publish, Stop, TICK};
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
    /// The offset at which its history begins, and whether it is complete.
    Making(Making<B>, Box<Store<B>>, u64, bool),
}

/// A source that another thread opens. Dropping it waits until changes at the source are undone.
struct Opening {
    opened: Receiver<io::Result<Box<dyn Source>>>,
    /// Whether it has come. The source may use the same `stop` from then on.
    is_over: bool,
    stop: Stop,
    /// The operator's. A second call ends the undoing, too.
    withdraw: Stop,
}

impl Opening {
    /// Returns the source, or why there is none, once either is known.
    fn poll(&mut self) -> Option<io::Result<Box<dyn Source>>> {
        let opened = match self.opened.try_recv() {
            Ok(opened) => opened,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => Err(io::Error::other("its thread ended early")),
        };
        self.is_over = true;
        Some(opened)
    }

    /// Ends the wait for the source. A second call of [`Stop::stop`] would end the undoing.
    fn end(&self) {
        if !self.stop.is_stopped() {
            self.stop.stop();
        }
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.end();
        loop {
            match self.opened.recv_timeout(TICK) {
                Err(RecvTimeoutError::Timeout) if self.withdraw.is_forced() => self.stop.stop(),
                Err(RecvTimeoutError::Timeout) => {}
                Ok(opened) => return tell(opened),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Tells what is left at a source that is not wanted any longer. Drops it.
fn tell(opened: io::Result<Box<dyn Source>>) {
    if let Err(error) = opened
        && !crate::wait::is_stop(&error)
    {
        tracing::error!(%error, "another snapshot was not made");
    }
}

impl<B: Descriptors> Renewal<B> {
    /// Begins to open another snapshot, which has a similar `offer`.
    pub(super) fn begin(again: &Again, offer: Offer, how: &Publish, waker: &Waker) -> Result<Self, Error> {
        let stop = Stop::default();
        let (sender, opened) = channel();
        let (again, theirs, waker) = (Arc::clone(again), stop.clone(), waker.clone());
        let thread = std::thread::Builder::new().name("renewal".into()).spawn(move || {
            // If the receiver is gone, the publication has ended.
            let _unheard = sender.send(again(&theirs));
            waker.wake();
        });
        thread.map_err(|error| Error::Source(Arc::new(error)))?;
        let opening = Opening { opened, is_over: false, stop, withdraw: how.withdraw.clone() };
        Ok(Self { state: State::Opening(opening), offer })
    }

    /// Goes on with it. Once it is complete and waits for the end of the log so far, it returns the
    /// offset that this must have reached.
    ///
    /// # Errors
    /// It cannot be completed. The one so far is unaffected.
    pub(super) fn progress(
        &mut self,
        publisher: &mut Publisher<B>,
        how: &Publish,
        waker: &Waker,
    ) -> Result<Option<u64>, Error> {
        if let State::Opening(opening) = &mut self.state {
            let Some(opened) = opening.poll() else { return Ok(None) };
            let source = opened.map_err(failed)?;
            let no_offset = || failed(io::Error::other("its history has no offsets"));
            let begun = source.position().ok_or_else(no_offset)?.offset;
            // A primary that sends its snapshot without a disk does not know its length, which is
            // then taken to be that of the newest one.
            let total = source.total().or_else(|| publisher.snapshot_bytes());
            publisher.check_room(total.unwrap_or(0))?;
            self.offer.total = source.total();
            self.offer.position = source.position();
            let mut store = Box::new(publisher.prepare());
            let filler = store.filler(self.offer.chunk_size.max(1) as usize);
            let making = Making::begin(source, filler, (how.stop.clone(), how.rate), false, waker)?;
            self.state = State::Making(making, store, begun, false);
        }
        let State::Making(making, store, begun, is_complete) = &mut self.state else { return Ok(None) };
        let was_complete = *is_complete;
        for _ in 0..AHEAD {
            match making.next() {
                Some(Made::Chunk(filled)) => store.publish(filled),
                Some(Made::Mark) => {
                    store.mark()?;
                    *is_complete = true;
                }
                // Its source may end while it waits for the log so far.
                Some(Made::Short(error)) => making.retry(publisher, error)?,
                Some(Made::Failed(error)) => return Err(error),
                Some(Made::End | Made::Replaced(_)) | None => break,
            }
        }
        if !was_complete {
            publisher.fit(store.taken())?;
        }
        Ok(is_complete.then_some(*begun))
    }

    /// Returns whether it is complete, so that it can be published.
    pub(super) const fn is_complete(&self) -> bool {
        matches!(self.state, State::Making(.., true))
    }

    /// Gives a snapshot up if it takes memory, and returns what still holds some of it. What is
    /// being opened takes none, and dropping it would wait.
    pub(super) fn give_up(renewal: &mut Option<Self>) -> Option<Leaving<B>> {
        match renewal.take_if(|renewal| matches!(renewal.state, State::Making(..)))?.state {
            State::Making(making, ..) => Some(making.leave()),
            State::Opening(_) => None,
        }
    }

    /// Another snapshot is not wanted any longer. Returns it while changes at the source are being
    /// undone, for which dropping it would wait. To be called again then, so that an opened source
    /// is not kept.
    pub(super) fn stop(mut self) -> Option<Self> {
        let State::Opening(opening) = &mut self.state else { return None };
        opening.end();
        match opening.poll() {
            None => Some(self),
            Some(opened) => {
                tell(opened);
                None
            }
        }
    }

    /// Publishes the complete snapshot in place of the one so far, whose log has ended at `offset`.
    /// Returns its source.
    pub(super) fn publish(self, publisher: &mut Publisher<B>, offset: u64) -> Result<Making<B>, Error> {
        let State::Making(making, store, begun, true) = self.state else { return Err(ended_early()) };
        let behind = offset.checked_sub(begun).ok_or_else(ended_early)?;
        let shared_from = store.bytes().saturating_add(behind);
        publisher.renew(*store, self.offer, shared_from)?;
        making.go_on_from(offset);
        Ok(making)
    }
}

fn failed(error: io::Error) -> Error {
    Error::Source(Arc::new(error))
}

/// The error of a log that has ended before the next one continues it.
fn ended_early() -> Error {
    failed(io::Error::other("its log ended early"))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rdma_softsim::{Fabric, SoftSim};

    use super::*;
    use crate::publisher;
    use crate::reader::Position;
    use crate::source::Piece;
    use crate::wire::{Content, Layout};

    const OFFER: Offer = Offer {
        layout: Layout::Chunks,
        content: Content::Bytes,
        chunk_size: 1000,
        total: None,
        position: None,
    };

    /// A source that has nothing. Its snapshot has this many bytes.
    struct Nothing(Option<u64>);

    impl Source for Nothing {
        fn content(&self) -> Content {
            Content::Bytes
        }
        fn total(&self) -> Option<u64> {
            self.0
        }
        fn position(&self) -> Option<Position> {
            Some(Position { history: [b'h'; 40], offset: 0 })
        }
        fn read(&mut self, _: &mut [u8]) -> io::Result<Piece> {
            std::thread::sleep(Duration::from_millis(1));
            Ok(Piece::Idle)
        }
    }

    fn publisher(config: publisher::Config) -> Publisher<SoftSim> {
        let address = std::net::Ipv4Addr::new(192, 0, 2, 1);
        let backend = Fabric::new().host(&[address.into()]);
        Publisher::bind(&backend, (address, 0).into(), config).expect("an address")
    }

    /// Opens a source of this total. Returns the outcome, and the [`Stop`] that it was given.
    fn opened(
        publisher: &mut Publisher<SoftSim>,
        total: Option<u64>,
    ) -> (Result<Renewal<SoftSim>, Error>, Stop) {
        let again: Again = Arc::new(move |_| Ok(Box::new(Nothing(total))));
        let (how, waker) = (Publish::default(), Waker::new().expect("a waker"));
        let mut renewal = Renewal::begin(&again, OFFER, &how, &waker).expect("a thread");
        let State::Opening(open) = &renewal.state else { panic!("it cannot be open") };
        let stop = open.stop.clone();
        let by = Instant::now() + Duration::from_secs(600);
        while matches!(renewal.state, State::Opening(_)) {
            assert!(Instant::now() < by, "nothing is opened");
            if let Err(error) = renewal.progress(publisher, &how, &waker) {
                return (Err(error), stop);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        (Ok(renewal), stop)
    }

    /// The end of the opening is no end of what was opened.
    #[test]
    fn an_opened_source_is_not_told_to_stop() {
        let (renewal, stop) = opened(&mut publisher(publisher::Config::default()), None);
        let renewal = renewal.expect("it is open");
        assert!(!stop.is_stopped());
        drop(renewal);
        assert!(!stop.is_stopped());
    }

    /// A snapshot for which there cannot be room is refused before older ones make room for it.
    #[test]
    fn a_snapshot_that_is_too_long_is_refused_before_it_is_made() {
        let mut publisher = publisher(publisher::Config { memory: 10_000, ..publisher::Config::default() });
        publisher.append(&[0; 4000]).expect("room");
        let (renewal, _) = opened(&mut publisher, Some(4097));
        assert!(matches!(renewal.err(), Some(Error::TooMuch { .. })));
        assert!(opened(&mut publisher, Some(4096)).0.is_ok());
        // One of unknown length is taken to be as long as the newest one.
        publisher.mark().expect("a mark");
        assert!(opened(&mut publisher, None).0.is_ok());
        let config = publisher::Config { memory: 5000, ..publisher::Config::default() };
        let mut publisher = self::publisher(config);
        publisher.append(&[0; 4000]).expect("room");
        publisher.mark().expect("a mark");
        assert!(matches!(opened(&mut publisher, None).0.err(), Some(Error::TooMuch { .. })));
    }

    /// Begins to open a source, which fails once `is_over` says so of its [`Stop`].
    fn opening(how: &Publish, is_over: fn(&Stop) -> bool) -> Renewal<SoftSim> {
        let again: Again = Arc::new(move |stop: &Stop| {
            let by = Instant::now() + Duration::from_secs(600);
            while !is_over(stop) && Instant::now() < by {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(io::Error::other("nothing was opened"))
        });
        Renewal::begin(&again, OFFER, how, &Waker::new().expect("a waker")).expect("a thread")
    }

    /// The end of the log ends the wait for another source, and nothing ends its undoing but a
    /// second call of the operator's.
    #[test]
    fn undoing_continues_until_the_operator_ends_it() {
        let how = Publish::default();
        let renewal = opening(&how, Stop::is_stopped);
        let State::Opening(open) = &renewal.state else { panic!("it cannot be open") };
        let stop = open.stop.clone();
        drop(renewal.stop());
        assert!(stop.is_stopped() && !stop.is_forced());

        let renewal = opening(&how, Stop::is_forced);
        let State::Opening(open) = &renewal.state else { panic!("it cannot be open") };
        let stop = open.stop.clone();
        how.withdraw.stop();
        how.withdraw.stop();
        drop(renewal);
        assert!(stop.is_forced());
    }
}
