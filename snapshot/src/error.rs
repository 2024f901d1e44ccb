//! Errors, with texts that help to fix the cause.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::{AsyncEvent, CompletionStatus, Failure};
use rdma_conn::Error as Control;

use crate::wire::{Malformed, Reason};

/// Why a snapshot was not published, or not pulled.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The control stream failed.
    #[error("the connection to the other side: {0}")]
    Control(#[from] Control),
    /// The peer ended the control stream.
    #[error("the other side ended the connection")]
    Ended,
    /// The peer ended the connection for READs, or it failed.
    #[error("the connection for READs ended: {0}")]
    DataEnded(&'static str),
    /// The device reported a failure.
    #[error("the RDMA device failed: {}", .0.describe())]
    Device(AsyncEvent),
    /// An operation of the RDMA backend failed.
    #[error("{doing}: {source}")]
    Backend {
        /// The operation that failed.
        doing: &'static str,
        /// The backend's own error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A READ failed: the publisher has withdrawn the memory, announced memory that it does not
    /// have, or is gone.
    #[error("READ of chunk {chunk}: {}", .status.describe())]
    Read {
        /// The chunk's index.
        chunk: u64,
        /// The status of its completion.
        status: CompletionStatus,
    },
    /// A chunk's bytes do not match their digest.
    #[error(
        "chunk {chunk} has another digest than the publisher announced: its bytes were damaged or changed"
    )]
    Corrupt {
        /// The chunk's index.
        chunk: u64,
    },
    /// The snapshot's digest does not match the announced one.
    #[error("the snapshot has another digest than the publisher announced")]
    Digest,
    /// The peer does not send frames of this protocol.
    #[error("the other side is no valkey-rdma-sync: {0}")]
    Foreign(Malformed),
    /// The peer has another version.
    #[error("the other side has version {theirs} of the protocol, this one {}", crate::wire::VERSION)]
    Version {
        /// The peer's version.
        theirs: u16,
    },
    /// The publisher has not proven that it has the secret.
    #[error("the publisher has another secret: nothing was read from it")]
    Secret,
    /// The publisher sent something impossible.
    #[error("the publisher breaks the protocol: {0}")]
    Misbehaved(&'static str),
    /// The publisher has a different snapshot than the one already begun.
    #[error("the publisher has another snapshot than the one that was begun: begin again")]
    OtherSnapshot,
    /// The publisher refused.
    #[error("the publisher refuses: {}", .0.describe())]
    Refused(Reason),
    /// The publisher grants no READs.
    #[error("the publisher's device grants no READs on this connection")]
    NoReads,
    /// An amount exceeds a limit of this side.
    #[error("{what} is more than this side's limit of {limit}")]
    TooMuch {
        /// The amount.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A time-out passed.
    #[error("timed out after {after:?} {doing}")]
    TimedOut {
        /// The operation that took too long.
        doing: &'static str,
        /// The time-out.
        after: Duration,
    },
    /// Nothing listens at the publisher's address.
    #[error("no publisher listens at {publisher}")]
    Nobody {
        /// The address.
        publisher: std::net::SocketAddr,
    },
    /// The allowed number of attempts brought nothing new.
    #[error("gave up after {attempts} attempts: {error}")]
    GivenUp {
        /// The number of attempts.
        attempts: u32,
        /// Why the last one failed.
        error: Arc<Self>,
    },
    /// The source of the snapshot failed.
    #[error("the source: {0}")]
    Source(Arc<io::Error>),
    /// The target of the snapshot failed.
    #[error("the target: {0}")]
    Sink(Arc<io::Error>),
    /// The operator stopped it.
    #[error("stopped before it was complete")]
    Stopped,
    /// It failed, and changes at the target are not undone.
    #[error("{error}; {left}")]
    NotUndone {
        /// The error.
        error: Arc<Self>,
        /// What is left, and what to do about it.
        left: Arc<io::Error>,
    },
    /// Waiting for descriptors failed.
    #[error("waiting: {0}")]
    Wait(Arc<io::Error>),
    /// The address to publish on names no single device.
    #[error("a publisher listens on one address of one RDMA device, not on {0}: name the address")]
    Address(std::net::SocketAddr),
    /// A replica that publishes has its readers on another device than its publisher.
    #[error(
        "the address to publish on is on another RDMA device than the way to the publisher: chunks cannot be handed on"
    )]
    OtherDevice,
}

impl Error {
    /// Wraps a backend's error; for use with `map_err`.
    pub(crate) fn backend<E: Failure>(doing: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Backend { doing, source: Arc::new(error) }
    }

    /// Returns whether another attempt may continue where this one ended: the peer's messages were
    /// right, but their transport failed.
    #[must_use]
    pub fn may_resume(&self) -> bool {
        match self {
            // Missing resources of this machine will be missing next time, too.
            Self::Control(error) => {
                !matches!(error, Control::Backend { .. } | Control::Options { .. } | Control::DeviceRemoved)
            }
            Self::Device(event) => !matches!(event, AsyncEvent::DeviceFatal),
            Self::Ended
            | Self::DataEnded(_)
            | Self::Read { .. }
            | Self::Corrupt { .. }
            | Self::TimedOut { .. }
            | Self::Refused(Reason::Full | Reason::Lease | Reason::Resources) => true,
            _ => false,
        }
    }

    /// Returns whether the error concerns the publisher alone. Another holder of the snapshot may
    /// succeed.
    #[must_use]
    pub const fn is_publishers(&self) -> bool {
        match self {
            Self::Refused(reason) => !matches!(reason, Reason::Full | Reason::Lease | Reason::Resources),
            Self::OtherSnapshot
            | Self::Foreign(_)
            | Self::Version { .. }
            | Self::Secret
            | Self::Misbehaved(_)
            | Self::NoReads => true,
            _ => false,
        }
    }

    /// Wraps an error of a sink, which may be that of [`Stop::check`](crate::Stop::check).
    pub(crate) fn sink(error: io::Error) -> Self {
        if crate::wait::is_stop(&error) { Self::Stopped } else { Self::Sink(Arc::new(error)) }
    }
}
