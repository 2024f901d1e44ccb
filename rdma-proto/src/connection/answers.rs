//! Pending questions for features.

use crate::error::PeerMisbehaved;

/// Different consecutive questions that may wait, if a peer takes no answers (VR-RES-008).
const RUNS: usize = 4;

/// Values of `select`. Equal neighbours share a place: to repeat one costs nothing (VR-FEAT-003).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Answers {
    runs: [Run; RUNS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Run {
    select: u16,
    count: u16,
}

impl Answers {
    pub(super) const fn new() -> Self {
        Self { runs: [Run { select: 0, count: 0 }; RUNS] }
    }

    pub(super) const fn is_empty(&self) -> bool {
        let [Run { count, .. }, ..] = self.runs;
        count == 0
    }

    pub(super) fn push(&mut self, select: u16) -> Result<(), PeerMisbehaved> {
        // A question is refused and not dropped: each must be answered (VR-FEAT-002). More equal
        // ones than can be counted are a flood, too (VR-FEAT-007).
        if let Some(last) = self.runs.iter_mut().rev().find(|run| run.count > 0)
            && last.select == select
        {
            last.count = last.count.checked_add(1).ok_or(PeerMisbehaved::FeatureFlood)?;
            return Ok(());
        }
        let free = self.runs.iter_mut().find(|run| run.count == 0).ok_or(PeerMisbehaved::FeatureFlood)?;
        *free = Run { select, count: 1 };
        Ok(())
    }

    pub(super) fn pop(&mut self) -> Option<u16> {
        let first = self.runs.first_mut().filter(|run| run.count > 0)?;
        let select = first.select;
        first.count = first.count.saturating_sub(1);
        if first.count == 0 {
            // The free place goes last: answers keep the order of their questions (VR-FEAT-002).
            self.runs.rotate_left(1);
        }
        Some(select)
    }
}
