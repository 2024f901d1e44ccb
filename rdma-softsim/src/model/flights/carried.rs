//! A message whose bytes are in flight.

use core::time::Duration;
use std::sync::Arc;

use rdma_backend::time::Instant;

use super::freight::{End, Progress, Track};
use crate::faults::Fault;
use crate::model::base::ids::{PairId, RegionId};
use crate::model::pairs::Pairs;
use crate::model::pairs::datagram::Datagram;
use crate::model::regions::parts::Parts;

pub(in crate::model) const ENDS: [End; 2] = [End::Requester, End::Responder];

/// How often a message is looked at in the time that it may be without progress.
const LOOKS: u32 = 4;

/// A message whose bytes are in flight, or one of whose ends waits for a last step.
pub(in crate::model) struct Carried {
    pub(in crate::model) from: PairId,
    pub(in crate::model) to: PairId,
    pub(in crate::model) epoch: u32,
    pub(in crate::model) sequence: u64,
    pub(in crate::model) struck: Option<Fault>,
    pub(in crate::model) reads: bool,
    pub(in crate::model) target: Option<Parts>,
    /// What it changes at the responder, if it is an atomic operation.
    pub(in crate::model) changed: Option<Parts>,
    /// Whether a receive was reserved for it.
    pub(in crate::model) reserves: bool,
    /// The datagram, of one that is being stored at its receiver: both ends are the receiver's.
    pub(in crate::model) datagram: Option<Datagram>,
    pub(in crate::model) track: Arc<Track>,
    /// Whether the message has no outcome yet.
    pub(in crate::model) open: bool,
    /// Which ends still count it, the requester first.
    pub(in crate::model) holds: [bool; 2],
    /// How long it may be without progress.
    pub(in crate::model) patience: Duration,
    /// When it is looked at next, how far it was at the last look, and how many looks in a row have
    /// found no progress.
    pub(in crate::model) next_look: Instant,
    pub(in crate::model) seen: Option<Progress>,
    pub(in crate::model) idle: u32,
    /// Whether it was given up before, and gets less time.
    pub(in crate::model) repeats: bool,
}

impl Carried {
    pub(in crate::model) const fn pair(&self, end: End) -> PairId {
        match end {
            End::Requester => self.from,
            End::Responder => self.to,
        }
    }

    pub(in crate::model) const fn target_end(&self) -> End {
        if self.reads { End::Requester } else { End::Responder }
    }

    /// Returns what it writes at this end.
    pub(in crate::model) fn written(&self, end: End) -> Option<&Parts> {
        if end == self.target_end() { self.target.as_ref() } else { self.changed.as_ref() }
    }

    /// Returns whether it writes to a region at this end.
    pub(in crate::model) fn writes_to(&self, end: End, region: RegionId) -> bool {
        self.written(end).is_some_and(|written| written.touch(region))
    }

    /// Returns whether the memory of such an end is being accessed.
    pub(in crate::model) fn is_inside(&self, there: impl Fn(End) -> bool) -> bool {
        ENDS.iter().any(|end| self.track.is_inside(*end) && there(*end))
    }

    pub(in crate::model) fn look_after(&mut self, now: Instant) {
        self.next_look = now.after(self.patience / LOOKS);
    }

    /// Looks whether the message makes progress. Returns whether it has made none for too long.
    pub(in crate::model) fn is_late(&mut self) -> bool {
        let progress = Some(self.track.progress());
        self.idle = if progress == self.seen { self.idle + 1 } else { 0 };
        self.seen = progress;
        // Counted from a look that found progress, as the first one always does: never less time
        // than `patience`, and at most a quarter more.
        self.idle >= LOOKS
    }

    /// Stops counting the message at its ends, except at one whose memory is being accessed.
    pub(in crate::model) fn free(&mut self, pairs: &mut Pairs, inside: Option<End>) {
        for end in ENDS {
            if inside != Some(end)
                && core::mem::take(&mut self.holds[end as usize])
                && let Some(pair) = pairs.get_mut(self.pair(end))
            {
                pair.bulks -= 1;
            }
        }
    }
}
