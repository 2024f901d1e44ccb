//! What providers do otherwise than the InfiniBand specification says, so that our side cannot know better.

/// One such thing.
pub(super) struct Deviation {
    /// Which provider.
    pub(super) provider: &'static str,
    /// What the error should say.
    pub(super) expected: &'static str,
    /// What it says instead.
    pub(super) seen: &'static str,
    /// Why.
    #[expect(dead_code, reason = "for whoever reads this table")]
    reason: &'static str,
}

/// Those of real devices.
pub(super) const OF_DEVICES: &[Deviation] = &[Deviation {
    provider: "rxe",
    expected: "longer than 32 bytes",
    seen: "LOC_QP_OP_ERR",
    reason: "The specification has a local length error for a receive that is too short. In Linux 6.1 the function that \
             copies into the receive (copy_data in rxe_mr.c) answers EINVAL then, of which its caller (send_data_in in \
             rxe_resp.c) makes a malformed work request; only ENOSPC would have made a length error.",
}];
