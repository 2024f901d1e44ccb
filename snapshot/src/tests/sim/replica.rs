//! A replica that pulls, like [`crate::run::pull`], and hands on verified chunks if others pull
//! from it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::Backend as _;
use rdma_backend::time::Instant;
use rdma_softsim::SoftSim;

use super::scenario::{ATTEMPTS, Plan, Scenario, Trouble};
use super::simulation::{Original, Originals, PORT, Serving, violated};
use super::{Violation, address, is_readable};
use crate::digest::Whole;
use crate::reader::{self, Have, Reader};
use crate::wire::{Layout, Reason};
use crate::{Error, Secret};

/// The state of a replica.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// It has everything.
    Whole,
    Failed(Error),
    /// Its process has ended and does not come back.
    Dead,
}

pub(super) struct Replica {
    pub(super) plan: Plan,
    backend: SoftSim,
    config: reader::Config,
    sources: VecDeque<SocketAddr>,
    reader: Option<Reader<SoftSim>>,
    /// The publisher for its own readers, if others pull from it.
    pub(super) serving: Option<Serving>,
    hands_on: bool,
    offered: bool,
    have: Have,
    /// Its chunks at the beginning of the present session.
    began: u64,
    pub(super) bytes: u64,
    whole: Whole,
    /// Whether the digest of the snapshot was right.
    pub(super) marked: bool,
    /// Chunks that its sink has not taken, and when it takes the next.
    backlog: usize,
    take_at: Instant,
    failures: u32,
    retry_at: Option<Instant>,
    pub(super) asleep: Option<Instant>,
    pub(super) end: Option<End>,
    /// Lost sessions.
    pub(super) cuts: u64,
}

impl Replica {
    pub(super) fn new(backend: SoftSim, scenario: &Scenario, plan: Plan, rogue: Option<u8>) -> Self {
        let mut sources = VecDeque::from([SocketAddr::new(address(plan.parent), PORT)]);
        let first = SocketAddr::new(address(super::scenario::ORIGIN), PORT);
        if plan.falls_back && !sources.contains(&first) {
            sources.push_back(first);
        }
        sources.extend(rogue.map(|host| SocketAddr::new(address(host), PORT)));
        if rogue.is_some() {
            sources.rotate_right(1);
        }
        let is_stranger =
            |trouble: &Trouble| matches!(trouble, Trouble::Stranger { host } if *host == plan.host);
        let secret = if scenario.troubles.iter().any(is_stranger) { "another" } else { super::SECRET };
        let config = reader::Config {
            secret: Secret::new(secret),
            limits: scenario.forgery().map_or_else(reader::Limits::default, |forgery| forgery.limits()),
            depth: plan.depth,
            ..reader::Config::default()
        };
        Self {
            plan,
            backend,
            config,
            sources,
            reader: None,
            serving: None,
            hands_on: scenario.replicas.iter().any(|other| other.parent == plan.host),
            offered: false,
            have: Have::default(),
            began: 0,
            bytes: 0,
            whole: Whole::default(),
            marked: false,
            backlog: 0,
            take_at: Instant::default(),
            failures: 0,
            retry_at: Some(Instant::default()),
            asleep: None,
            end: None,
            cuts: 0,
        }
    }

    /// Returns whether nothing more is expected of it.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.end.is_some() || self.asleep.is_some_and(|until| until.since(now) > Duration::from_secs(1 << 20))
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.end, Some(End::Whole))
    }

    /// Ends its process, with all its state.
    pub(super) fn die(&mut self) {
        self.reader = None;
        self.serving = None;
        self.end = Some(End::Dead);
        self.retry_at = None;
    }

    /// Begins again, with nothing.
    pub(super) fn begin(&mut self, now: Instant) {
        self.offered = false;
        self.have = Have::default();
        (self.began, self.bytes, self.backlog, self.failures) = (0, 0, 0, 0);
        self.whole = Whole::default();
        self.marked = false;
        self.end = None;
        self.retry_at = Some(now);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        if self.asleep.is_some() {
            return self.asleep;
        }
        let taking = Some(self.take_at).filter(|_| self.backlog > 0);
        let reading = self.reader.as_ref().map(Reader::next_timeout);
        let serving = self.serving.as_ref().and_then(Serving::next_timeout);
        self.retry_at.into_iter().chain(taking).chain(reading).chain(serving).min()
    }

    /// Returns whether it runs now: something has arrived for it, or it is time.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        if let Some(until) = self.asleep {
            return until <= now;
        }
        self.next_timeout().is_some_and(|at| at <= now)
            || self.reader.as_ref().is_some_and(|reader| is_readable(&reader.sources()))
            || self.serving.as_ref().is_some_and(Serving::is_readable)
    }

    pub(super) fn turn(&mut self, scenario: &Scenario, originals: &Originals) -> Result<(), Violation> {
        let now = self.backend.now();
        self.asleep = None;
        if self.hands_on && self.serving.is_none() && self.end.is_none() {
            match Serving::bind(&self.backend, self.plan.host, scenario) {
                Ok(serving) => self.serving = Some(serving),
                Err(error) => self.fail(error, scenario)?,
            }
        }
        if self.backlog > 0 && now >= self.take_at {
            self.backlog -= 1;
            self.take_at = now.after(self.plan.pace);
        }
        if self.reader.is_none() && self.end.is_none() && self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
            self.began = self.have.chunks;
            match self.connect() {
                Ok(reader) => self.reader = Some(reader),
                Err(error) => self.fail(error, scenario)?,
            }
        }
        if let Some(mut reader) = self.reader.take() {
            let read = self.read(&mut reader, scenario, originals)?;
            // Chunks that were read but are no longer taken are not the protocol's waste.
            if !matches!(read, Err(Error::Digest | Error::Backend { .. })) {
                self.check_session(&reader, scenario)?;
            }
            match read {
                Ok(false) => self.reader = Some(reader),
                Ok(true) => self.complete(scenario, originals)?,
                Err(error) => {
                    drop(reader);
                    self.fail(error, scenario)?;
                }
            }
        }
        if let Some(serving) = &mut self.serving
            && let Err(error) = serving.turn(self.backend.now())
        {
            self.serving = None;
            self.reader = None;
            if self.end.is_none() {
                self.fail(error, scenario)?;
            }
        }
        Ok(())
    }

    fn connect(&self) -> Result<Reader<SoftSim>, Error> {
        let domain = self.serving.as_ref().map(|serving| serving.publisher.domain()).transpose()?;
        let source = self.sources.front().copied().ok_or(Error::Ended)?;
        Reader::connect(&self.backend, source, self.config.clone(), self.have, domain)
    }

    /// Handles input. Returns true once it has everything.
    fn read(
        &mut self,
        reader: &mut Reader<SoftSim>,
        scenario: &Scenario,
        originals: &Originals,
    ) -> Result<Result<bool, Error>, Violation> {
        loop {
            let before = self.have.chunks;
            let outcome = self.read_some(reader, scenario, originals)?;
            // Taken chunks leave room for more.
            if outcome.is_err() || self.have.chunks == before {
                return Ok(outcome.map(|()| reader.is_done()));
            }
        }
    }

    fn read_some(
        &mut self,
        reader: &mut Reader<SoftSim>,
        scenario: &Scenario,
        originals: &Originals,
    ) -> Result<Result<(), Error>, Violation> {
        let worked = reader.progress(self.plan.room.saturating_sub(self.backlog));
        let mut outcome = Ok(());
        if let (Some(offer), false) = (reader.offer(), self.offered) {
            self.offered = true;
            if let Some(serving) = &mut self.serving {
                outcome = serving.publisher.offer(Some(reader.have().snapshot), offer);
            }
        }
        let original = originals.get(&reader.have().snapshot);
        self.have.mark = reader.have().mark;
        while let Some(landed) = reader.poll() {
            if let Err(error) = self.mark(landed.chunk.index) {
                outcome = Err(error);
            }
            if outcome.is_err() {
                break;
            }
            let original =
                original.ok_or_else(|| violated("content", "a chunk of a snapshot that no publisher has"))?;
            if scenario.layout == Layout::Chunks {
                original.check(landed.chunk.index, self.bytes, &landed.bytes)?;
            }
            self.bytes += landed.bytes.len() as u64;
            self.whole.add(&landed.digest);
            self.have.chunks = landed.chunk.index + 1;
            self.have.bytes = self.bytes;
            if self.plan.pace > Duration::ZERO {
                if self.backlog == 0 {
                    self.take_at = self.backend.now().after(self.plan.pace);
                }
                self.backlog += 1;
            }
            match &mut self.serving {
                Some(serving) => outcome = serving.publisher.hand_on(landed),
                None => reader.recycle(landed.region),
            }
        }
        if outcome.is_ok() {
            self.have = reader.have();
            if (self.have.chunks, self.have.bytes) != (reader.have().chunks, self.bytes) {
                return Err(violated("resume", "what it says it has is not what it gave"));
            }
            outcome = self.mark(self.have.chunks);
        }
        Ok(outcome.and(worked))
    }

    /// Handles the end of the snapshot before chunk `next`, if known: compares its digest.
    fn mark(&mut self, next: u64) -> Result<(), Error> {
        let Some(mark) = self.have.mark.filter(|mark| mark.chunks.get() == next && !self.marked) else {
            return Ok(());
        };
        if self.whole.digest() != mark.digest {
            return Err(Error::Digest);
        }
        self.marked = true;
        if let Some(serving) = &mut self.serving {
            serving.publisher.hand_on_mark(mark);
        }
        Ok(())
    }

    /// Checks the session's requests to its device (VS-READ-001, VS-READ-003).
    fn check_session(&self, reader: &Reader<SoftSim>, scenario: &Scenario) -> Result<(), Violation> {
        let counters = reader.counters();
        let most = usize::from(self.plan.depth.min(scenario.depth)).min(self.plan.room);
        if counters.most_in_flight > most {
            return Err(violated(
                "depth",
                format!("{} READs under way, {most} may be", counters.most_in_flight),
            ));
        }
        let wasted = (counters.reads + self.began).checked_sub(self.have.chunks);
        if wasted.is_none_or(|wasted| wasted > most as u64) {
            let (reads, had) = (counters.reads, self.have.chunks - self.began);
            return Err(violated("waste", format!("{reads} READs for {had} chunks, {most} at a time")));
        }
        // Memory to read into, and the windows of the control stream, two of them while one is
        // replaced.
        let held = self.backend_resources(reader);
        let whole = if self.hands_on { scenario.lengths.len() } else { 0 };
        let bound = self.plan.room + whole + 1;
        if held > bound {
            return Err(violated("memory", format!("{held} regions to read into, {bound} may be")));
        }
        Ok(())
    }

    fn backend_resources(&self, reader: &Reader<SoftSim>) -> usize {
        reader.regions() + self.serving.as_ref().map_or(0, |serving| serving.publisher.store.regions().len())
    }

    fn complete(&mut self, scenario: &Scenario, originals: &Originals) -> Result<(), Violation> {
        let original = originals.get(&self.have.snapshot);
        if !self.marked || original.map(Original::len) != Some(self.bytes) {
            let what =
                format!("host {} is done with {} bytes, marked {}", self.plan.host, self.bytes, self.marked);
            return Err(violated("whole", what));
        }
        if scenario.forgery().is_some() && self.plan.parent == super::scenario::ORIGIN {
            return Err(violated("forgery", format!("{:?} was believed", scenario.forgery())));
        }
        self.end = Some(End::Whole);
        if let Some(serving) = &mut self.serving {
            serving.publisher.end();
        }
        Ok(())
    }

    /// Handles the end of a session: continues elsewhere, or fails.
    fn fail(&mut self, error: Error, scenario: &Scenario) -> Result<(), Violation> {
        if !scenario.excuses(&self.plan, &error) {
            return Err(violated("error", format!("host {}: {error} ({error:?})", self.plan.host)));
        }
        let now = self.backend.now();
        self.cuts += 1;
        self.failures = if self.have.chunks > self.began { 0 } else { self.failures + 1 };
        if error.may_resume() && self.failures < ATTEMPTS {
            self.sources.rotate_left(1);
            self.retry_at = Some(now.after(Duration::from_millis(100 << self.failures.min(5))));
            return Ok(());
        }
        self.retry_at = None;
        self.end = Some(End::Failed(error));
        if let Some(serving) = &mut self.serving {
            serving.leave(Reason::Failed, now);
        }
        Ok(())
    }
}
