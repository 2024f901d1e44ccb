//! What providers do otherwise than the InfiniBand specification says, so that our side cannot know better.

/// One such thing.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// Which provider.
    pub provider: &'static str,
    /// What the error should say.
    pub expected: &'static str,
    /// What it says instead.
    pub seen: &'static str,
    /// Why.
    #[expect(dead_code, reason = "for whoever reads this table")]
    reason: &'static str,
}

/// Those of real devices.
pub const OF_DEVICES: &[Deviation] = &[Deviation {
    provider: "rxe",
    expected: "longer than 32 bytes",
    seen: "LOC_QP_OP_ERR",
    reason: "The specification has a local length error for a receive that is too short. In Linux 6.1 the function that \
             copies into the receive (copy_data in rxe_mr.c) answers EINVAL then, of which its caller (send_data_in in \
             rxe_resp.c) makes a malformed work request; only ENOSPC would have made a length error.",
}];

impl Deviation {
    /// Returns whether `seen` is what the provider reports where `expected` is due.
    #[must_use]
    pub fn explains(&self, expected: &str, seen: &str) -> bool {
        expected.contains(self.expected) && seen.contains(self.seen)
    }
}
