//! The error that our own side ends a connection with, case by case.

use std::time::Duration;

use rdma_backend::{CompletionError, CompletionStatus};
use rdma_conn::Error::{Backend, Protocol, Refused, Rejected, TimedOut};
use rdma_conn::Options;
use rdma_proto::Error::{InvalidMessage, PeerIncompatible, PeerMisbehaved, Transport};
use rdma_proto::InvalidMessage as Invalid;
use rdma_proto::PeerIncompatible::WindowTooLarge;
use rdma_proto::PeerMisbehaved::{
    EarlyRegistration, EmptyWindow, FeatureFlood, NeverDrained, NeverReceives, NeverRegistered, NoWindow,
    ReachedOutside, ServerSent, TooFewReceives, UnaskedFeatures, WindowOverrun, WindowRefused, WindowWraps,
};
use rdma_proto::TransportError::{Completion, Disconnected};

use super::Roles;
use super::deviations::{DISCONNECTED, Deviation, IN_ORDER};
use super::told;
use conformance::blackbox::builtin::Ended;
use conformance::requirements::Role;

/// A case, and how connections of our side end in it.
#[derive(Clone, Copy)]
pub struct Row {
    /// The case's id.
    pub case: &'static str,
    /// The role of our side.
    pub role: Roles,
    /// Changes the default options of our side.
    pub options: fn(&mut Options),
    /// The errors; a connection that ends with none of them ends in order.
    pub errors: &'static [Expected],
}

/// An error that our side reports.
#[derive(Clone, Copy)]
pub struct Expected {
    /// Whether an end is of the right kind: usually, one variant of [`rdma_conn::Error`].
    pub is: fn(&Ended) -> bool,
    /// A part of its text.
    pub text: &'static str,
    /// How many connections end with it.
    pub times: Times,
}

/// A number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// Exactly this many.
    Exactly(usize),
    /// Any number: it depends on how far our side had come.
    Any,
}

impl Row {
    /// A case in which all connections end in order.
    pub(super) const fn in_order(case: &'static str) -> Self {
        row(case, Roles::Both, &[])
    }

    const fn with(self, options: fn(&mut Options)) -> Self {
        Self { options, ..self }
    }

    /// Judges how connections ended.
    ///
    /// # Errors
    /// A description of a wrong end.
    pub(super) fn judge(
        &self,
        role: Role,
        ended: &[Ended],
        deviations: &[Deviation],
    ) -> Result<String, String> {
        let mut times = vec![0; self.errors.len()];
        for end in ended.iter().filter(|end| !matches!(end, Ended::InOrder)) {
            let text = end.to_string();
            let is_it = |expected: &Expected| {
                let differs = |deviation: &Deviation| deviation.explains(role, expected.text, &text);
                (expected.is)(end) && text.contains(expected.text) || deviations.iter().any(differs)
            };
            let found = self.errors.iter().position(is_it);
            if found.is_none() && deviations.iter().any(|deviation| deviation.explains(role, IN_ORDER, &text))
            {
                continue;
            }
            let counted = found.and_then(|at| times.get_mut(at));
            *counted.ok_or_else(|| format!("unexpected: {}; expected: {}", told(ended), self.wanted()))? += 1;
        }
        let in_order = ended.iter().filter(|end| matches!(end, Ended::InOrder)).count();
        for (expected, times) in self.errors.iter().zip(times) {
            // A provider may report a disconnect before the error. For a side that expects nothing
            // more, that is an orderly end.
            let hides = |deviation: &Deviation| deviation.explains(role, expected.text, DISCONNECTED);
            let hidden = if deviations.iter().any(hides) { in_order } else { 0 };
            let right = match expected.times {
                Times::Any => true,
                Times::Exactly(wanted) => (times..=times + hidden).contains(&wanted),
            };
            if !right {
                return Err(format!("{times} times `{}`: {}", expected.text, told(ended)));
            }
        }
        Ok(told(ended))
    }

    fn wanted(&self) -> String {
        let texts: Vec<_> = self.errors.iter().map(|expected| format!("`{}`", expected.text)).collect();
        if texts.is_empty() { "no error".into() } else { texts.join(" or ") }
    }
}

const fn row(case: &'static str, role: Roles, errors: &'static [Expected]) -> Row {
    Row { case, role, options: |_| {}, errors }
}

/// A row for both roles, with one error.
macro_rules! both {
    ($case:literal, $pattern:pat, $text:expr) => {
        row($case, Roles::Both, &[error!($pattern, $text)])
    };
}

/// A row for our server, with one error.
macro_rules! server {
    ($case:literal, $pattern:pat, $text:expr) => {
        row($case, Roles::Server, &[error!($pattern, $text)])
    };
}

/// A row for our client, with one error.
macro_rules! client {
    ($case:literal, $pattern:pat, $text:expr) => {
        row($case, Roles::Client, &[error!($pattern, $text)])
    };
}

/// An error that one connection ends with, or the given number of connections.
macro_rules! error {
    ($pattern:pat, $text:expr) => {
        error!($pattern, $text, Times::Exactly(1))
    };
    ($pattern:pat, $text:expr, $times:expr) => {
        Expected { is: |end| matches!(end, Ended::With($pattern)), text: $text, times: $times }
    };
}

/// How long an impatient side waits for a peer.
const STALL: Duration = Duration::from_millis(300);

/// Our side gives up on a peer early.
const IMPATIENT: fn(&mut Options) = |options| {
    options.protocol.stall_limit = Some(STALL);
    options.handshake_timeout = STALL;
};

/// Our side always has something to send.
const VIGILANT: fn(&mut Options) = |options| {
    options.protocol.keepalive = Some(rdma_conn::Keepalive::NONE.every(Some(Duration::from_millis(50))));
};

/// Our client asks for no features.
const QUIET: fn(&mut Options) = |options| options.protocol.negotiate = false;

const GONE: &str = "the RDMA transport failed: the peer has disconnected";
const INCOMPLETE: &str = "timed out after 300ms waiting for the peer to complete the connection";
const OUTSIDE: &str = "the peer broke the protocol: it reached for memory that it was not given";
/// Part of both texts that `STOPPED` has.
const NOT_GIVEN: &str = "for memory that it was not given";
const UNASKED: &str = "the peer broke the protocol: it answered a question for features that was not asked";
const TOO_LONG: &str = "the peer sent an invalid control message: longer than 32 bytes";
const REFUSED: &str = "the peer broke the protocol: its device refused the window that it registered";

/// The end of a side whose device refused a peer's request. The device reports it by an
/// asynchronous event, or, where it raises none (soft-RoCE), by the flush that followed.
macro_rules! stopped {
    ($case:literal, $role:expr, $times:literal) => {
        row(
            $case,
            $role,
            &[error!(
                Protocol(
                    PeerMisbehaved(ReachedOutside)
                        | Transport(Completion(CompletionError {
                            status: CompletionStatus::WR_FLUSH_ERR,
                            ..
                        }))
                ),
                NOT_GIVEN,
                Times::Exactly($times)
            )],
        )
    };
}

/// All rows. A case without one ends in order.
pub const TABLE: &[Row] = &[
    // Connections.
    row(
        "conn.withdrawn",
        Roles::Server,
        &[
            error!(Rejected { .. } | Backend { .. }, "", Times::Any),
            error!(Protocol(Transport(Disconnected)), GONE, Times::Any),
        ],
    ),
    server!("conn.never-completed", TimedOut { .. }, INCOMPLETE).with(IMPATIENT),
    row("conn.request-flood", Roles::Server, &[error!(TimedOut { .. }, INCOMPLETE, Times::Exactly(20))])
        .with(IMPATIENT),
    row(
        "res.storm",
        Roles::Server,
        &[
            error!(Rejected { .. } | Backend { .. }, "", Times::Any),
            error!(Protocol(Transport(Disconnected)), GONE, Times::Any),
        ],
    ),
    client!("own.refused", Refused { .. }, "refused the connection: nothing listens there for RDMA"),
    client!("conn.rejected", Rejected { .. }, "rejected the connection (reason 28)"),
    client!("conn.dropped", Rejected { .. }, "rejected the connection (reason 28)"),
    client!("conn.never-accepted", TimedOut { .. }, "timed out after 300ms connecting").with(IMPATIENT),
    client!(
        "conn.never-registered",
        TimedOut { .. },
        "timed out after 300ms waiting for the server to register its window"
    )
    .with(IMPATIENT),
    // Without a window the client's connect has not succeeded yet.
    client!("conn.leaves-at-once", Protocol(Transport(Disconnected)), GONE),
    // The connection ends in the middle of something.
    row("close.last-command", Roles::Server, &[error!(Protocol(Transport(Disconnected)), GONE, Times::Any)]),
    row(
        "close.before-the-reply",
        Roles::Server,
        &[error!(Protocol(Transport(Disconnected)), GONE, Times::Any)],
    ),
    server!("close.in-a-reply", Protocol(Transport(Disconnected)), GONE),
    server!("close.vanishes-in-a-reply", Protocol(Transport(Disconnected)), GONE),
    // Its first command may have been delivered, or not.
    row(
        "close.registered-only",
        Roles::Client,
        &[error!(Protocol(Transport(Disconnected)), GONE, Times::Any)],
    ),
    client!("own.leaves-in-a-command", Protocol(Transport(Disconnected)), GONE),
    // Control messages.
    both!(
        "ctrl.message-of-0",
        Protocol(InvalidMessage(Invalid::Length { .. })),
        "the peer sent an invalid control message: 0 bytes long, not 32"
    ),
    both!(
        "ctrl.message-of-1",
        Protocol(InvalidMessage(Invalid::Length { .. })),
        "the peer sent an invalid control message: 1 bytes long, not 32"
    ),
    both!(
        "ctrl.message-of-31",
        Protocol(InvalidMessage(Invalid::Length { .. })),
        "the peer sent an invalid control message: 31 bytes long, not 32"
    ),
    both!("ctrl.message-of-33", Protocol(InvalidMessage(Invalid::TooLong)), TOO_LONG),
    both!("ctrl.message-of-4096", Protocol(InvalidMessage(Invalid::TooLong)), TOO_LONG),
    both!(
        "ctrl.opcode-4",
        Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })),
        "opcode 0x0004 is not defined"
    ),
    both!(
        "ctrl.opcode-ffff",
        Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })),
        "opcode 0xffff is not defined"
    ),
    both!(
        "ctrl.opcode-swapped",
        Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })),
        "opcode 0x0200 is not defined"
    ),
    // Features.
    server!(
        "feat.asked-without-end",
        Protocol(PeerMisbehaved(FeatureFlood)),
        "the peer broke the protocol: it asks for features faster than it takes the answers"
    ),
    // A client that asked gets one answer too many. A client that did not ask gets one.
    client!("feat.unasked", Protocol(PeerMisbehaved(UnaskedFeatures)), UNASKED),
    client!("feat.unasked", Protocol(PeerMisbehaved(UnaskedFeatures)), UNASKED).with(QUIET),
    client!("feat.other-select", Protocol(PeerMisbehaved(UnaskedFeatures)), UNASKED),
    client!(
        "feat.set-by-server",
        Protocol(PeerMisbehaved(ServerSent { .. })),
        "the peer broke the protocol: a server sent SetClientFeature, which only a client may"
    ),
    // Windows.
    both!(
        "mem.of-0",
        Protocol(PeerMisbehaved(EmptyWindow)),
        "the peer broke the protocol: it registered a window of no bytes"
    ),
    both!(
        "mem.of-4-gib",
        Protocol(PeerIncompatible(WindowTooLarge { .. })),
        "the peer is incompatible with this side's configuration: it registered a window of 4294967295 bytes; this side \
         accepts at most 16777216"
    ),
    both!(
        "mem.wraps",
        Protocol(PeerMisbehaved(WindowWraps { .. })),
        "the peer broke the protocol: it registered a window of 65536 bytes at 0xffffffffffffff9b, beyond the end of the \
         address space"
    ),
    both!("mem.bogus-key", Protocol(PeerMisbehaved(WindowRefused)), REFUSED),
    both!("mem.bogus-address", Protocol(PeerMisbehaved(WindowRefused)), REFUSED),
    both!("mem.not-writable", Protocol(PeerMisbehaved(WindowRefused)), REFUSED),
    server!(
        "mem.twice",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only 0 of the old one's 65536 bytes"
    ),
    // Its first command may be in flight.
    client!(
        "mem.twice",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only "
    ),
    server!(
        "mem.one-byte-left",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only 7 of the old one's 8 bytes"
    ),
    client!(
        "mem.one-byte-left",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only 27 of the old one's 65536 bytes"
    ),
    server!(
        "mem.flood",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only 0 of the old one's 65536 bytes"
    ),
    client!(
        "mem.flood",
        Protocol(PeerMisbehaved(EarlyRegistration { .. })),
        "the peer broke the protocol: it registered a new window when only "
    ),
    // Immediates.
    both!(
        "flow.beyond-by-1",
        Protocol(PeerMisbehaved(WindowOverrun { .. })),
        "the peer broke the protocol: it notified 65537 bytes when 0 of the window's 65536 were already used"
    ),
    both!(
        "flow.of-4-gib",
        Protocol(PeerMisbehaved(WindowOverrun { .. })),
        "the peer broke the protocol: it notified 4294967295 bytes when 0 of the window's 65536 were already used"
    ),
    server!(
        "flow.wraps",
        Protocol(PeerMisbehaved(WindowOverrun { .. })),
        "the peer broke the protocol: it notified 4294967259 bytes when 37 of the window's 65536 were already used"
    ),
    client!(
        "flow.wraps",
        Protocol(PeerMisbehaved(WindowOverrun { .. })),
        "the peer broke the protocol: it notified 4294967283 bytes when 13 of the window's 65536 were already used"
    ),
    server!(
        "own.notified-before-window",
        Protocol(PeerMisbehaved(NoWindow { .. })),
        "the peer broke the protocol: it notified 5 bytes before it was given a window"
    ),
    // The store rejects whichever of the bytes it reads, and closes.
    row(
        "xfer.overwritten",
        Roles::Server,
        &[Expected { is: |end| matches!(end, Ended::Otherwise(_)), text: "", times: Times::Any }],
    ),
    // Peers that keep our side waiting.
    server!(
        "res.never-registers",
        Protocol(PeerMisbehaved(NeverRegistered { .. })),
        "the peer broke the protocol: it registered no window for 300ms while data waits for it"
    )
    .with(IMPATIENT),
    server!(
        "res.never-drains",
        Protocol(PeerMisbehaved(NeverDrained { .. })),
        "the peer broke the protocol: it did not empty its window for 300ms while data waits for it"
    )
    .with(IMPATIENT),
    server!(
        "res.never-polls",
        Protocol(PeerMisbehaved(NeverDrained { .. })),
        "the peer broke the protocol: it did not empty its window for 300ms while data waits for it"
    )
    .with(IMPATIENT),
    server!(
        "res.long-replies",
        Protocol(PeerMisbehaved(NeverDrained { .. })),
        "the peer broke the protocol: it did not empty its window for 300ms while data waits for it"
    )
    .with(IMPATIENT),
    client!(
        "own.never-drains",
        Protocol(PeerMisbehaved(NeverDrained { .. })),
        "the peer broke the protocol: it did not empty its window for 300ms while data waits for it"
    )
    .with(IMPATIENT),
    server!(
        "own.never-reposts",
        Protocol(PeerMisbehaved(NeverReceives { .. })),
        "the peer broke the protocol: it took no notification for 300ms"
    )
    .with(IMPATIENT),
    both!(
        "own.too-few-receives",
        Protocol(PeerMisbehaved(TooFewReceives { .. })),
        "the peer broke the protocol: it had no receive posted for a notification"
    )
    .with(VIGILANT),
    server!(
        "own.queue-pair-lost",
        Protocol(Transport(Completion(CompletionError { status: CompletionStatus::RETRY_EXC_ERR, .. }))),
        "the RDMA transport failed: the peer's device no longer acknowledges"
    )
    .with(VIGILANT),
    client!(
        "keep.vanished",
        Protocol(Transport(Completion(CompletionError { status: CompletionStatus::RETRY_EXC_ERR, .. }))),
        "the RDMA transport failed: the peer's device no longer acknowledges"
    ),
    // Memory that our side did not grant.
    stopped!("sec.write-outside", Roles::Both, 1),
    both!("sec.write-immediate-outside", Protocol(PeerMisbehaved(ReachedOutside)), OUTSIDE),
    stopped!("sec.write-before", Roles::Both, 1),
    stopped!("sec.read", Roles::Both, 1),
    stopped!("sec.wrong-key", Roles::Both, 1),
    stopped!("sec.foreign-key", Roles::Both, 1),
    stopped!("sec.stale-key", Roles::Both, 1),
    stopped!("sec.neighbour", Roles::Server, 4),
];
