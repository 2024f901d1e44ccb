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
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Copy)]
pub struct Row {
    pub case: &'static str,
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
    pub(super) const fn in_order(case: &'static str) -> Self {
        Self { case, role: Roles::Both, options: |_| {}, errors: &[] }
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
            // A provider may make an error of an end that is in order by the specification.
            if found.is_none() && deviations.iter().any(|deviation| deviation.explains(role, IN_ORDER, &text))
            {
                continue;
            }
            let counted = found.and_then(|at| times.get_mut(at));
            *counted.ok_or_else(|| format!("unexpected: {}; expected: {}", told(ended), self.wanted()))? += 1;
        }
        let in_order = ended.iter().filter(|end| matches!(end, Ended::InOrder)).count();
        for (expected, times) in self.errors.iter().zip(times) {
            // A provider may report a disconnect first: an orderly end, if no more is expected.
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

/// A table of rows: our side's role, the case, options other than the default, and the errors. An
/// error is a pattern, a part of the text, and a number of connections other than one; `broke`
/// stands for [`PeerMisbehaved`] and the beginning of its text.
macro_rules! rows {
    ($($who:ident $case:literal $($options:ident)? => $(($($error:tt)+))+;)+) => {
        &[$(Row {
            case: $case,
            role: Roles::$who,
            options: rows!(@ $($options)?),
            errors: &[$(error!($($error)+)),+],
        }),+]
    };
    (@) => { |_| {} };
    (@ $options:ident) => { $options };
}

macro_rules! error {
    (otherwise) => {
        Expected { is: |end| matches!(end, Ended::Otherwise(_)), text: "", times: Times::Any }
    };
    // The end of a side whose device refused a peer's request. The device reports it by an
    // asynchronous event, or, where it raises none (soft-RoCE), by the flush that followed.
    (stopped $times:expr) => {
        error!(
            Protocol(
                PeerMisbehaved(ReachedOutside)
                    | Transport(Completion(CompletionError { status: CompletionStatus::WR_FLUSH_ERR, .. }))
            ),
            "for memory that it was not given", $times
        )
    };
    (broke $pattern:pat, $text:literal) => {
        error!(Protocol(PeerMisbehaved($pattern)), concat!("the peer broke the protocol: ", $text))
    };
    ($pattern:pat, $text:expr) => {
        error!($pattern, $text, Times::Exactly(1))
    };
    ($pattern:pat, $text:expr, $times:expr) => {
        Expected { is: |end| matches!(end, Ended::With($pattern)), text: $text, times: $times }
    };
}

/// How long an impatient side waits for a peer.
const STALL: Duration = Duration::from_millis(300);

const IMPATIENT: fn(&mut Options) = |options| options.protocol.stall_limit = Some(STALL);

/// For peers that do not complete the connection.
const IMPATIENT_AT_FIRST: fn(&mut Options) = |options| options.handshake_timeout = STALL;

/// For peers that complete it, for which a busy machine needs time.
const PATIENT_AT_FIRST: fn(&mut Options) = |options| options.handshake_timeout = Duration::from_secs(3);

/// Our side always has something to send.
const VIGILANT: fn(&mut Options) = |options| {
    options.protocol.keepalive = Some(rdma_conn::Keepalive::NONE.every(Some(Duration::from_millis(50))));
};

/// Our client asks for no features.
const QUIET: fn(&mut Options) = |options| options.protocol.negotiate = false;

const GONE: &str = "the RDMA transport failed: the peer has disconnected";
const INCOMPLETE: &str = "timed out after 300ms waiting for the peer to complete the connection";
const UNACKNOWLEDGED: &str = "the RDMA transport failed: the peer's device no longer acknowledges";
const TOO_LONG: &str = "the peer sent an invalid control message: longer than 32 bytes";

/// All rows. A case without one ends in order.
pub const TABLE: &[Row] = rows! {
    // The peer withdraws its request at any moment of the handshake.
    Server "conn.withdrawn" => (Rejected { .. } | Backend { .. }, "", Times::Any) (Protocol(Transport(Disconnected)), GONE, Times::Any);
    Server "conn.never-completed" IMPATIENT_AT_FIRST => (TimedOut { .. }, INCOMPLETE);
    Server "conn.request-flood" IMPATIENT_AT_FIRST => (TimedOut { .. }, INCOMPLETE, Times::Exactly(20));
    Server "res.storm" => (Rejected { .. } | Backend { .. }, "", Times::Any) (Protocol(Transport(Disconnected)), GONE, Times::Any);
    Client "own.refused" => (Refused { .. }, "refused the connection: nothing listens there for RDMA");
    // 28 is the reason of a program's own reject (`rdma_reject(3)`), also of a dropped request.
    Client "conn.rejected" => (Rejected { .. }, "rejected the connection (reason 28)");
    Client "conn.dropped" => (Rejected { .. }, "rejected the connection (reason 28)");
    Client "conn.never-accepted" IMPATIENT_AT_FIRST => (TimedOut { .. }, "timed out after 300ms connecting");
    Client "conn.never-registered" PATIENT_AT_FIRST
        => (TimedOut { .. }, "timed out after 3s waiting for the server to register its window");
    // Without a window the client's connect has not succeeded yet.
    Client "conn.leaves-at-once" => (Protocol(Transport(Disconnected)), GONE);
    Server "close.last-command" => (Protocol(Transport(Disconnected)), GONE, Times::Any);
    Server "close.before-the-reply" => (Protocol(Transport(Disconnected)), GONE, Times::Any);
    // Bytes that are not delivered make the end an error.
    Server "close.in-a-reply" => (Protocol(Transport(Disconnected)), GONE);
    Server "close.vanishes-in-a-reply" => (Protocol(Transport(Disconnected)), GONE);
    // Its first command may have been delivered, or not.
    Client "close.registered-only" => (Protocol(Transport(Disconnected)), GONE, Times::Any);
    Client "own.leaves-in-a-command" => (Protocol(Transport(Disconnected)), GONE);
    Both "ctrl.message-of-0"
        => (Protocol(InvalidMessage(Invalid::Length { .. })), "the peer sent an invalid control message: 0 bytes long, not 32");
    Both "ctrl.message-of-1"
        => (Protocol(InvalidMessage(Invalid::Length { .. })), "the peer sent an invalid control message: 1 bytes long, not 32");
    Both "ctrl.message-of-31"
        => (Protocol(InvalidMessage(Invalid::Length { .. })), "the peer sent an invalid control message: 31 bytes long, not 32");
    Both "ctrl.message-of-33" => (Protocol(InvalidMessage(Invalid::TooLong)), TOO_LONG);
    Both "ctrl.message-of-4096" => (Protocol(InvalidMessage(Invalid::TooLong)), TOO_LONG);
    Both "ctrl.opcode-4" => (Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })), "opcode 0x0004 is not defined");
    Both "ctrl.opcode-ffff" => (Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })), "opcode 0xffff is not defined");
    Both "ctrl.opcode-swapped" => (Protocol(InvalidMessage(Invalid::UnknownOpcode { .. })), "opcode 0x0200 is not defined");
    // At the bound for waiting answers (VR-FEAT-007).
    Server "feat.asked-without-end" => (broke FeatureFlood, "it asks for features faster than it takes the answers");
    // A client that asked gets one answer too many. A client that did not ask gets one.
    Client "feat.unasked" => (broke UnaskedFeatures, "it answered a question for features that was not asked");
    Client "feat.unasked" QUIET => (broke UnaskedFeatures, "it answered a question for features that was not asked");
    Client "feat.other-select" => (broke UnaskedFeatures, "it answered a question for features that was not asked");
    Client "feat.set-by-server" => (broke ServerSent { .. }, "a server sent SetClientFeature, which only a client may");
    Both "mem.of-0" => (broke EmptyWindow, "it registered a window of no bytes");
    Both "mem.of-4-gib" => (Protocol(PeerIncompatible(WindowTooLarge { .. })),
        "the peer is incompatible with this side's configuration: it registered a window of 4294967295 bytes; this side \
         accepts at most 16777216");
    Both "mem.wraps"
        => (broke WindowWraps { .. }, "it registered a window of 65536 bytes at 0xffffffffffffff9b, beyond the end of the address space");
    // Our device finds out when it writes (VR-MEM-009).
    Both "mem.bogus-key" => (broke WindowRefused, "its device refused the window that it registered");
    Both "mem.bogus-address" => (broke WindowRefused, "its device refused the window that it registered");
    Both "mem.not-writable" => (broke WindowRefused, "its device refused the window that it registered");
    Server "mem.twice"
        => (broke EarlyRegistration { .. }, "it registered a new window when only 0 of the old one's 65536 bytes");
    // Its first command may be in flight.
    Client "mem.twice" => (broke EarlyRegistration { .. }, "it registered a new window when only ");
    Server "mem.one-byte-left"
        => (broke EarlyRegistration { .. }, "it registered a new window when only 7 of the old one's 8 bytes");
    Client "mem.one-byte-left"
        => (broke EarlyRegistration { .. }, "it registered a new window when only 27 of the old one's 65536 bytes");
    Server "mem.flood"
        => (broke EarlyRegistration { .. }, "it registered a new window when only 0 of the old one's 65536 bytes");
    Client "mem.flood" => (broke EarlyRegistration { .. }, "it registered a new window when only ");
    Both "flow.beyond-by-1"
        => (broke WindowOverrun { .. }, "it notified 65537 bytes when 0 of the window's 65536 were already used");
    Both "flow.of-4-gib"
        => (broke WindowOverrun { .. }, "it notified 4294967295 bytes when 0 of the window's 65536 were already used");
    // With what was used it makes 2³², which is 0 in 32 bits.
    Server "flow.wraps"
        => (broke WindowOverrun { .. }, "it notified 4294967259 bytes when 37 of the window's 65536 were already used");
    Client "flow.wraps"
        => (broke WindowOverrun { .. }, "it notified 4294967283 bytes when 13 of the window's 65536 were already used");
    Server "own.notified-before-window" => (broke NoWindow { .. }, "it notified 5 bytes before it was given a window");
    // The store rejects whichever of the bytes it reads, and closes.
    Server "xfer.overwritten" => (otherwise);
    Server "res.never-registers" IMPATIENT
        => (broke NeverRegistered { .. }, "it registered no window for 300ms while data waits for it");
    Server "res.never-drains" IMPATIENT
        => (broke NeverDrained { .. }, "it did not empty its window for 300ms while data waits for it");
    Server "res.never-polls" IMPATIENT
        => (broke NeverDrained { .. }, "it did not empty its window for 300ms while data waits for it");
    Server "res.long-replies" IMPATIENT
        => (broke NeverDrained { .. }, "it did not empty its window for 300ms while data waits for it");
    Client "own.never-drains" IMPATIENT
        => (broke NeverDrained { .. }, "it did not empty its window for 300ms while data waits for it");
    Server "own.never-reposts" IMPATIENT => (broke NeverReceives { .. }, "it took no notification for 300ms");
    // Keepalives use up the receives.
    Both "own.too-few-receives" VIGILANT
        => (broke TooFewReceives { .. }, "it had no receive posted for a notification");
    // A keepalive that is not acknowledged shows that the device is gone (VR-KEEP-006).
    Server "own.queue-pair-lost" VIGILANT
        => (Protocol(Transport(Completion(CompletionError { status: CompletionStatus::RETRY_EXC_ERR, .. }))), UNACKNOWLEDGED);
    Client "keep.vanished"
        => (Protocol(Transport(Completion(CompletionError { status: CompletionStatus::RETRY_EXC_ERR, .. }))), UNACKNOWLEDGED);
    // By an event or a flush: a refused WRITE consumes no receive that could report it.
    Both "sec.write-outside" => (stopped Times::Exactly(1));
    Both "sec.write-immediate-outside" => (broke ReachedOutside, "it reached for memory that it was not given");
    Both "sec.write-before" => (stopped Times::Exactly(1));
    Both "sec.read" => (stopped Times::Exactly(1));
    Both "sec.wrong-key" => (stopped Times::Exactly(1));
    Both "sec.foreign-key" => (stopped Times::Exactly(1));
    Both "sec.stale-key" => (stopped Times::Exactly(1));
    Server "sec.neighbour" => (stopped Times::Exactly(4));
};
