//! Deviations of providers from the InfiniBand specification, which change our side's error.

use conformance::requirements::Role;

use super::Roles;

/// One deviation.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    pub provider: &'static str,
    /// The role of our side that sees it.
    pub of: Roles,
    /// A part of the error's text by the specification.
    pub expected: &'static str,
    /// The text that it has instead.
    pub seen: &'static str,
    #[expect(dead_code, reason = "for whoever reads this table")]
    reason: &'static str,
}

/// An orderly end in [`Deviation::expected`].
pub const IN_ORDER: &str = "in order";

/// The error of a side that still expects something when the peer has disconnected.
pub const DISCONNECTED: &str = "the peer has disconnected";

/// The deviations of real devices.
pub const OF_DEVICES: &[Deviation] = &[
    Deviation {
        provider: "rxe",
        of: Roles::Both,
        expected: "longer than 32 bytes",
        seen: "LOC_QP_OP_ERR",
        reason: "The specification has a local length error for a receive that is too short. In Linux 6.1 the function that \
                 copies into the receive (copy_data in rxe_mr.c) answers EINVAL then, of which its caller (send_data_in in \
                 rxe_resp.c) makes a malformed work request; only ENOSPC would have made a length error.",
    },
    Deviation {
        provider: "rxe",
        of: Roles::Both,
        expected: "for memory that it was not given",
        seen: DISCONNECTED,
        reason: "A refused request that takes no receive shows itself on this side by flushed work and an asynchronous event. A task of its \
                 own tells of those, and the peer's disconnect may be told before: a server, for which nothing is missing then, sees an end in order.",
    },
    Deviation {
        provider: "rxe",
        of: Roles::Client,
        expected: IN_ORDER,
        seen: DISCONNECTED,
        reason: "One task acknowledges what this side has sent, another one delivers what the peer has. A reply and the disconnect behind it may be \
                 told before the acknowledgement of the request, which is flushed then: its bytes count as not arrived.",
    },
];

impl Deviation {
    /// Returns whether `seen` is what the provider reports in place of `expected`.
    #[must_use]
    pub fn explains(&self, role: Role, expected: &str, seen: &str) -> bool {
        self.of.includes(role) && expected.contains(self.expected) && seen.contains(self.seen)
    }
}
