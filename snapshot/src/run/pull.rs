//! Pulling into a sink, over as many connections as needed, and handing on what was pulled.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::{Descriptors, Waker};

use super::{Progress, Stop, TICK};
use crate::digest::Whole;
use crate::error::Error;
use crate::publisher::{self, Publisher};
use crate::reader::{self, Have, Landed, Offer, Reader};
use crate::source::Sink;
use crate::wire::{Layout, Reason};

/// Settings of a pull.
#[derive(Clone, Debug)]
pub struct Pull {
    /// Settings of the reader.
    pub config: reader::Config,
    /// Consecutive attempts without a new chunk, after which it gives up. At least 1.
    pub attempts: u32,
    /// Chunks in memory, including those that the sink has not taken yet. At least 1.
    pub room: usize,
    /// Whether, and how, the pulled snapshot is handed on. At its limit of memory this ends, and
    /// the pull goes on.
    pub republish: Option<Republish>,
    /// Ends it, and undoes its changes. A second call leaves them as they are.
    pub stop: Stop,
}

/// How the pulled snapshot is handed on.
#[derive(Clone, Debug)]
pub struct Republish {
    /// The address for readers: one of the device over which it is pulled.
    pub address: SocketAddr,
    /// Settings of the publisher.
    pub config: publisher::Config,
    /// Ends when this many readers have received everything.
    pub readers: usize,
    /// Or when the table has been complete for this long.
    pub keep: Duration,
}

impl Default for Pull {
    fn default() -> Self {
        Self {
            config: reader::Config::default(),
            attempts: 10,
            room: 64,
            republish: None,
            stop: Stop::default(),
        }
    }
}

/// A message to the sink's thread.
enum Job {
    Begin(Offer),
    Bytes(Vec<u8>),
    Mark,
    End,
}

/// The sink, as seen from the thread that drives RDMA.
struct Applying {
    /// `None` once it is to end.
    jobs: Option<Sender<Job>>,
    /// Returns what could not be undone.
    thread: Option<JoinHandle<io::Result<()>>>,
    /// Its finished jobs, with a chunk's buffer.
    done: Receiver<Result<Option<Vec<u8>>, Error>>,
    /// Chunks that it has not taken.
    backlog: usize,
    /// Buffers of the chunks that it has taken.
    spare: Vec<Vec<u8>>,
    ended: bool,
}

impl Applying {
    fn begin(sink: impl Sink + 'static, how: &Pull, waker: Waker) -> Result<Self, Error> {
        let (jobs, theirs) = channel();
        let (finished, done) = channel();
        let stop = how.stop.clone();
        let thread = std::thread::Builder::new().name("sink".into()).spawn(move || {
            let left = work(finished, sink, &theirs, &stop, &waker);
            // Only now the receiver sees that all jobs are finished.
            waker.wake();
            left
        });
        let thread = Some(thread.map_err(|error| Error::Sink(Arc::new(error)))?);
        Ok(Self { jobs: Some(jobs), thread, done, backlog: 0, spare: Vec::new(), ended: false })
    }

    fn give(&mut self, job: Job) {
        self.backlog += usize::from(matches!(job, Job::Bytes(_)));
        self.ended |= matches!(job, Job::End);
        // If it has ended, it says why.
        let _ended = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }

    /// Takes its finished jobs. Returns true once all are finished.
    fn collect(&mut self) -> Result<bool, Error> {
        loop {
            match self.done.try_recv() {
                Ok(outcome) => {
                    if let Some(buffer) = outcome? {
                        self.backlog = self.backlog.saturating_sub(1);
                        self.spare.push(buffer);
                    }
                }
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) if self.ended => return Ok(true),
                Err(TryRecvError::Disconnected) => {
                    return Err(Error::Sink(Arc::new(io::Error::other("its thread ended early"))));
                }
            }
        }
    }
}

impl Applying {
    /// Tells the sink that no more follows. From now on it undoes unfinished changes.
    fn close(&mut self) {
        self.jobs = None;
    }

    /// Waits until the sink has undone its changes.
    ///
    /// # Errors
    /// What could not be undone.
    fn undone(&mut self) -> io::Result<()> {
        self.close();
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread ended early")))
    }
}

impl Drop for Applying {
    /// A run that panics also undoes its changes.
    fn drop(&mut self) {
        if let Err(error) = self.undone() {
            tracing::error!(%error, "not undone");
        }
    }
}

/// Runs jobs until the last one, or until one fails. Returns what could not be undone.
///
/// `finished` is the first parameter, so it is dropped last, when the sink is gone.
fn work(
    finished: Sender<Result<Option<Vec<u8>>, Error>>,
    mut sink: impl Sink,
    jobs: &Receiver<Job>,
    stop: &Stop,
    waker: &Waker,
) -> io::Result<()> {
    if let Err(error) = sink.prepare(stop) {
        // If the receiver is gone, the run has ended.
        let _unheard = finished.send(Err(Error::sink(error)));
        waker.wake();
        return sink.undo();
    }
    while let Ok(job) = jobs.recv() {
        let is_end = matches!(job, Job::End);
        let outcome = apply(&mut sink, job, stop);
        let has_failed = outcome.is_err();
        // If the receiver is gone, the run has ended.
        let is_heard = finished.send(outcome).is_ok();
        waker.wake();
        if is_end && !has_failed {
            return Ok(());
        }
        if has_failed || !is_heard {
            break;
        }
    }
    sink.undo()
}

/// Runs a job. Returns the buffer of a chunk.
fn apply(sink: &mut impl Sink, job: Job, stop: &Stop) -> Result<Option<Vec<u8>>, Error> {
    let done = match job {
        Job::Begin(offer) => sink.begin(&offer, stop),
        Job::Bytes(bytes) => {
            sink.write(&bytes).map_err(Error::sink)?;
            return Ok(Some(bytes));
        }
        Job::Mark => sink.mark(),
        Job::End => sink.end(),
    };
    done.map(|()| None).map_err(Error::sink)
}

/// Pulls from the first of `publishers` that has the snapshot into `sink`, and reports progress to
/// `told` now and then. After a lost connection it continues with the next of them, where it was
/// (VS-READ-003).
///
/// # Errors
/// The error that ended the last attempt, or the sink's.
pub fn pull<B: Descriptors>(
    backend: &B,
    publishers: &[SocketAddr],
    sink: impl Sink + 'static,
    how: &Pull,
    told: &mut dyn FnMut(&Progress),
) -> Result<Progress, Error> {
    let waker = Waker::new()?;
    let handing_on = how
        .republish
        .as_ref()
        .map(|republish| Publisher::bind(backend, republish.address, republish.config.clone()))
        .transpose()?;
    let mut run = Run {
        backend,
        how,
        applying: Applying::begin(sink, how, waker.clone())?,
        handing_on,
        marked: false,
        begun: false,
        have: Have::default(),
        whole: Whole::default(),
        progress: Progress::default(),
        started: backend.now(),
        tell_at: backend.now(),
        waker,
    };
    let outcome = run.attempts(publishers, told);
    let mut outcome = outcome.and_then(|()| run.finish(told));
    run.applying.close();
    if let Some(mut publisher) = run.handing_on.take() {
        publisher.withdraw(if outcome.is_ok() { Reason::Withdrawn } else { Reason::Failed });
        outcome = outcome.and(publisher.drain(&run.waker, &how.stop));
    }
    match (outcome, run.applying.undone()) {
        (Err(error), Err(left)) => Err(Error::NotUndone { error: Arc::new(error), left: Arc::new(left) }),
        (outcome, _) => outcome.map(|()| run.progress),
    }
}

/// A running pull.
struct Run<'a, B: Descriptors> {
    backend: &'a B,
    how: &'a Pull,
    applying: Applying,
    handing_on: Option<Publisher<B>>,
    /// Whether the sink knows the end of the snapshot, and whether it has begun.
    marked: bool,
    begun: bool,
    have: Have,
    /// The digest of the chunks that it has, up to the mark.
    whole: Whole,
    progress: Progress,
    started: rdma_backend::time::Instant,
    tell_at: rdma_backend::time::Instant,
    waker: Waker,
}

impl<B: Descriptors> Run<'_, B> {
    /// Reads until everything is there.
    fn attempts(&mut self, publishers: &[SocketAddr], told: &mut dyn FnMut(&Progress)) -> Result<(), Error> {
        let mut order: VecDeque<_> = publishers.iter().copied().collect();
        let mut failures = 0;
        loop {
            if self.how.stop.is_stopped() {
                return Err(Error::Stopped);
            }
            let Some(publisher) = order.front().copied() else { return Err(Error::Ended) };
            let before = self.have.chunks;
            let error = match self.attempt(publisher, told) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if error.is_publishers() {
                // This one will not have the snapshot again. The next one may.
                order.pop_front();
                if order.is_empty() {
                    return Err(error);
                }
                tracing::warn!(%publisher, %error, chunks = self.have.chunks, "going on at another publisher");
                continue;
            }
            failures = if self.have.chunks > before { 0 } else { failures + 1 };
            if !error.may_resume() {
                return Err(error);
            }
            // If nothing listens at the address, advice about a Valkey server's settings does not
            // help.
            let nobody = matches!(&error, Error::Control(rdma_conn::Error::Refused { .. }));
            let error = if nobody { Error::Nobody { publisher } } else { error };
            if failures >= self.how.attempts {
                return Err(Error::GivenUp { attempts: failures, error: Arc::new(error) });
            }
            match self.begun {
                true => tracing::warn!(%publisher, %error, chunks = self.have.chunks, "going on after a cut"),
                false => tracing::warn!(%error, attempt = failures, of = self.how.attempts, "trying again"),
            }
            order.rotate_left(1);
            // The next one may be there already. A restarting publisher needs a moment, and other
            // readers come back at the same time.
            let pause = if failures <= 1 { 20 } else { 100 << failures.min(5) };
            let pause = Duration::from_millis(pause);
            let until = self.backend.now().after(pause);
            while self.backend.now() < until {
                self.turn(None, until, told)?;
            }
        }
    }

    fn attempt(&mut self, publisher: SocketAddr, told: &mut dyn FnMut(&Progress)) -> Result<(), Error> {
        let domain = self.handing_on.as_ref().map(Publisher::domain).transpose()?;
        let config = self.how.config.clone();
        let mut reader = Reader::connect(self.backend, publisher, config, self.have, domain)?;
        loop {
            let room = self.how.room.saturating_sub(self.applying.backlog);
            let worked = reader.progress(room);
            if let Some(offer) = reader.offer()
                && !self.begun
            {
                self.begin(&reader, offer)?;
            }
            self.have.mark = reader.have().mark;
            while let Some(buffer) = self.applying.spare.pop() {
                reader.reuse(buffer);
            }
            while let Some(landed) = reader.poll() {
                self.mark(landed.chunk.index)?;
                self.whole.add(&landed.digest);
                self.have.chunks = landed.chunk.index + 1;
                self.have.bytes += u64::from(landed.chunk.length);
                let mut landed = landed;
                self.applying.give(Job::Bytes(std::mem::take(&mut landed.bytes)));
                self.hand_on(landed, &mut reader)?;
            }
            self.have = reader.have();
            self.mark(self.have.chunks)?;
            worked?;
            if reader.is_done() {
                return Ok(());
            }
            let until = self.backend.now().after(TICK);
            self.turn(Some(&reader), until, told)?;
        }
    }

    /// Hands a chunk on. Once there is no memory for more, handing on ends, and its readers are
    /// told for a short time. The pull goes on.
    fn hand_on(&mut self, landed: Landed<B>, reader: &mut Reader<B>) -> Result<(), Error> {
        let Some(publisher) = &mut self.handing_on else {
            reader.recycle(landed.region);
            return Ok(());
        };
        let Err(error) = publisher.hand_on(landed) else { return Ok(()) };
        tracing::warn!(%error, "nothing is handed on any longer");
        let Some(mut publisher) = self.handing_on.take() else { return Ok(()) };
        self.progress.readers = 0;
        publisher.withdraw(Reason::Resources);
        publisher.drain(&self.waker, &self.how.stop)
    }

    /// Handles the publisher's offer.
    fn begin(&mut self, reader: &Reader<B>, offer: Offer) -> Result<(), Error> {
        self.begun = true;
        self.progress.total = offer.total;
        self.started = self.backend.now();
        self.applying.give(Job::Begin(offer));
        match &mut self.handing_on {
            Some(_) if offer.layout == Layout::Rcp => {
                let what = "a table of the seed's layout cannot be handed on: it is in one piece of memory";
                Err(Error::Sink(Arc::new(io::Error::other(what))))
            }
            Some(publisher) => publisher.offer(Some(reader.have().snapshot), offer),
            None => Ok(()),
        }
    }

    /// Reports the end of the snapshot to the sink, if that is before chunk `next` and the digest
    /// of all of it is right (VS-READ-004).
    fn mark(&mut self, next: u64) -> Result<(), Error> {
        let mark = self.have.mark.filter(|mark| mark.chunks.get() == next && !self.marked);
        if let Some(mark) = mark {
            if self.whole.digest() != mark.digest {
                return Err(Error::Digest);
            }
            self.marked = true;
            self.progress.marked = true;
            self.applying.give(Job::Mark);
            if let Some(publisher) = &mut self.handing_on {
                publisher.hand_on_mark(mark);
            }
        }
        Ok(())
    }

    /// Checks everything but the reader, then sleeps, at most until `until`.
    fn turn(
        &mut self,
        reader: Option<&Reader<B>>,
        until: rdma_backend::time::Instant,
        told: &mut dyn FnMut(&Progress),
    ) -> Result<bool, Error> {
        let mut sources = Vec::new();
        let mut until = until;
        if let Some(publisher) = &mut self.handing_on {
            publisher.progress()?;
            let counts = publisher.counts();
            (self.progress.readers, self.progress.done) = (counts.reading, counts.done);
            until = publisher.next_timeout().map_or(until, |at| at.min(until));
        }
        if let Some(publisher) = &self.handing_on {
            sources.extend(publisher.sources());
        }
        self.progress.bytes = self.have.bytes;
        let now = self.backend.now();
        if reader.is_some() {
            self.progress.elapsed = now.since(self.started);
        }
        if now >= self.tell_at {
            self.tell_at = now.after(TICK);
            told(&self.progress);
        }
        until = until.min(self.tell_at);
        // A complete snapshot is the sink's to end: it may already be in place.
        if self.how.stop.is_stopped() && !self.applying.ended {
            return Err(Error::Stopped);
        }
        let backlog = self.applying.backlog;
        if self.applying.collect()? {
            return Ok(true);
        }
        if self.applying.backlog < backlog {
            return Ok(false);
        }
        match reader {
            Some(reader) => reader.wait(&self.waker, &sources, Some(until))?,
            None => {
                sources.push(std::os::fd::AsFd::as_fd(&self.waker));
                crate::wait::sleep(&sources, until.since(now))?;
            }
        }
        self.waker.clear();
        Ok(false)
    }

    /// Waits for the sink, and for readers of the handed-on snapshot.
    fn finish(&mut self, told: &mut dyn FnMut(&Progress)) -> Result<(), Error> {
        self.applying.give(Job::End);
        if let Some(publisher) = &mut self.handing_on {
            publisher.end();
        }
        let mut applied = false;
        let ended = self.backend.now();
        loop {
            let now = self.backend.now();
            let republish = self.how.republish.as_ref().filter(|_| self.handing_on.is_some());
            let served = republish.is_none_or(|republish| {
                self.progress.done >= republish.readers || now.since(ended) >= republish.keep
            });
            let served = served || self.how.stop.is_stopped();
            if applied && served {
                told(&self.progress);
                return Ok(());
            }
            let until = now.after(TICK);
            applied |= self.turn(None, until, told)?;
        }
    }
}

#[cfg(test)]
mod tests;
