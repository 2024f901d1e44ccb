//! The first publisher, with its source, like [`crate::run::publish`].

use rdma_backend::Backend as _;
use rdma_backend::time::Instant;
use rdma_softsim::SoftSim;

use super::Violation;
use super::scenario::{ORIGIN, Scenario};
use super::simulation::{Original, Originals, Serving, violated};
use crate::Error;
use crate::reader::Offer;
use crate::wire::{Content, Layout, Reason, SnapshotId};

pub(super) struct Origin {
    backend: SoftSim,
    pub(super) serving: Option<Serving>,
    /// How often it has begun. Each time it has another snapshot.
    version: u8,
    /// Chunks of its source so far, and when the next one comes.
    given: usize,
    give_at: Option<Instant>,
    pub(super) asleep: Option<Instant>,
    /// It has ended, or fails, permanently.
    pub(super) fallen: bool,
}

impl Origin {
    pub(super) fn new(backend: SoftSim) -> Self {
        let mut origin =
            Self { backend, serving: None, version: 0, given: 0, give_at: None, asleep: None, fallen: false };
        origin.begin(Instant::default());
        origin
    }

    pub(super) fn begin(&mut self, now: Instant) {
        self.version += 1;
        self.given = 0;
        self.give_at = Some(now);
    }

    pub(super) fn die(&mut self) {
        self.serving = None;
        self.give_at = None;
    }

    fn snapshot(&self) -> SnapshotId {
        [self.version; 16]
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        if self.asleep.is_some() {
            return self.asleep;
        }
        self.serving.as_ref().and_then(Serving::next_timeout).into_iter().chain(self.give_at).min()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        if let Some(until) = self.asleep {
            return until <= now;
        }
        self.next_timeout().is_some_and(|at| at <= now)
            || self.serving.as_ref().is_some_and(Serving::is_readable)
    }

    pub(super) fn turn(&mut self, scenario: &Scenario, originals: &mut Originals) -> Result<(), Violation> {
        self.asleep = None;
        let now = self.backend.now();
        let mut outcome = Ok(());
        if self.serving.as_ref().is_some_and(Serving::is_leaving) {
            self.give_at = None;
        }
        if self.give_at.is_some_and(|at| now >= at) {
            self.give_at = None;
            outcome = self.give(scenario, originals, now);
        }
        if let Err(error) = outcome {
            self.fall(&error, scenario)?;
            if let Some(serving) = &mut self.serving {
                serving.leave(Reason::Resources, now);
            }
        }
        if let Some(serving) = &mut self.serving
            && let Err(error) = serving.turn(now)
        {
            self.serving = None;
            self.give_at = None;
            if !matches!(error, Error::Stopped) {
                self.fall(&error, scenario)?;
            }
        }
        Ok(())
    }

    /// A publisher fails only by its device.
    fn fall(&mut self, error: &Error, scenario: &Scenario) -> Result<(), Violation> {
        self.fallen = true;
        let is_theirs = matches!(error, Error::Backend { .. } | Error::Control(_) | Error::DataEnded(_));
        if is_theirs && !scenario.plan().is_empty() {
            return Ok(());
        }
        Err(violated("publisher", format!("{error} ({error:?})")))
    }

    /// Takes more of the source.
    fn give(&mut self, scenario: &Scenario, originals: &mut Originals, now: Instant) -> Result<(), Error> {
        let snapshot = self.snapshot();
        if self.serving.is_none() {
            let mut serving = Serving::bind(&self.backend, ORIGIN, scenario)?;
            let original = Original::new(scenario.seed ^ u64::from(self.version) << 56, &scenario.lengths);
            let offer = Offer {
                layout: scenario.layout,
                content: Content::Bytes,
                chunk_size: scenario.chunk_size(),
                total: None,
                position: None,
            };
            if scenario.layout == Layout::Rcp {
                serving.publisher.begin_mapping(original.len())?;
            }
            serving.publisher.offer(Some(snapshot), offer)?;
            originals.insert(snapshot, original);
            self.serving = Some(serving);
        }
        let (Some(serving), Some(original)) = (&mut self.serving, originals.get(&snapshot)) else {
            return Ok(());
        };
        let forgery = scenario.forgery().copied();
        loop {
            if self.given == scenario.marked && serving.publisher.store.log.mark.is_none() {
                serving.publisher.mark()?;
                if let Some(forgery) = forgery {
                    forgery.mark(&mut serving.publisher.store);
                }
            }
            if self.given == scenario.lengths.len() {
                serving.publisher.end();
                return Ok(());
            }
            serving.publisher.append(original.chunk(self.given))?;
            self.given += 1;
            if let Some(forgery) = forgery {
                forgery.announce(&mut serving.publisher.store);
            }
            if !scenario.pace.is_zero() {
                self.give_at = Some(now.after(scenario.pace));
                return Ok(());
            }
        }
    }

    /// Returns whether no program drives it.
    pub(super) const fn is_silent(&self) -> bool {
        self.asleep.is_some()
    }

    pub(super) fn registered(&self) -> u64 {
        self.serving.as_ref().map_or(0, |serving| serving.publisher.store.registered())
    }
}
