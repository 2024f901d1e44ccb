//! Ownership of bytes over time: of send buffers until their completion is polled, of window bytes
//! only after it.
//!
//! Only simulations check it. A device may read a send buffer again until the work's completion
//! says otherwise (`ibv_post_send(3)`). The bytes of a WRITE may land in any order until the
//! completion of a receive that came with or after it (`ibv_reg_mr(3)`). A program that writes the
//! former or reads the latter too early is detected here.

use std::collections::VecDeque;

use crate::model::base::ids::RegionId;
use crate::model::regions::parts::Parts;

/// Ownership state of a queue pair's bytes, in a simulation.
#[derive(Default)]
pub(in crate::model) struct Ownership {
    pub(in crate::model) lent: VecDeque<Lent>,
    /// Bytes of the peer's messages that have not landed.
    pub(in crate::model) landing: VecDeque<Landing>,
}

/// The bytes of what is known of a send buffer.
pub(in crate::model) const LENT: usize = size_of::<Lent>();

pub(in crate::model) struct Lent {
    /// The request, and its sequence number.
    pub(in crate::model) id: u64,
    pub(in crate::model) sequence: u64,
    pub(in crate::model) parts: Parts,
    pub(in crate::model) hash: u64,
}

pub(in crate::model) struct Landing {
    pub(in crate::model) sequence: u64,
    pub(in crate::model) target: Parts,
    pub(in crate::model) bytes: Vec<u8>,
}

impl Ownership {
    pub(in crate::model) fn lends(&self, region: RegionId) -> bool {
        self.lent.iter().any(|lent| lent.parts.touch(region))
    }
}
