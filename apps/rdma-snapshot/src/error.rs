//! Errors, in words for somebody who has to do something about them.

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
    /// The peer ended the connection that READs go over, or it failed.
    #[error("the connection for READs ended: {0}")]
    DataEnded(&'static str),
    /// The device told of a failure.
    #[error("the RDMA device failed: {}", .0.describe())]
    Device(AsyncEvent),
    /// The RDMA backend could not do something.
    #[error("{doing}: {source}")]
    Backend {
        /// The operation that failed.
        doing: &'static str,
        /// The backend's own error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A READ failed: the publisher has withdrawn the memory, or named some that it does not have, or is gone.
    #[error("READ of chunk {chunk}: {}", .status.describe())]
    Read {
        /// Which chunk.
        chunk: u64,
        /// The status of its completion.
        status: CompletionStatus,
    },
    /// A chunk's bytes are not those that were announced.
    #[error(
        "chunk {chunk} has another digest than the publisher announced: its bytes were damaged or changed"
    )]
    Corrupt {
        /// Which chunk.
        chunk: u64,
    },
    /// The snapshot's digest is not the announced one.
    #[error("the snapshot has another digest than the publisher announced")]
    Digest,
    /// The peer sent no frames of this protocol.
    #[error("the other side is no valkey-rdma-sync: {0}")]
    Foreign(Malformed),
    /// The peer has another version.
    #[error("the other side has version {theirs} of the protocol, this one {}", crate::wire::VERSION)]
    Version {
        /// Its version.
        theirs: u16,
    },
    /// The publisher has not proven that it has the secret.
    #[error("the publisher has another secret: nothing was read from it")]
    Secret,
    /// The publisher said something that cannot be.
    #[error("the publisher breaks the protocol: {0}")]
    Misbehaved(&'static str),
    /// The publisher has another snapshot than the one that was begun.
    #[error("the publisher has another snapshot than the one that was begun: begin again")]
    OtherSnapshot,
    /// The publisher said no.
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
    /// Nothing listens where the publisher should be.
    #[error("no publisher listens at {publisher}")]
    Nobody {
        /// The place.
        publisher: std::net::SocketAddr,
    },
    /// As many attempts as were allowed have brought nothing new.
    #[error("gave up after {attempts} attempts: {error}")]
    GivenUp {
        /// How many.
        attempts: u32,
        /// Why the last one failed.
        error: Arc<Self>,
    },
    /// The source of the snapshot failed.
    #[error("the source: {0}")]
    Source(Arc<io::Error>),
    /// Where the snapshot goes to failed.
    #[error("the target: {0}")]
    Sink(Arc<io::Error>),
    /// It was stopped.
    #[error("stopped before it was complete")]
    Stopped,
    /// It failed, and what was begun at the target is not undone.
    #[error("{error}; {left}")]
    NotUndone {
        /// Why it failed.
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

    /// Returns whether another attempt may go on where this one ended: nothing was wrong with what was said, only the way it came.
    #[must_use]
    pub fn may_resume(&self) -> bool {
        match self {
            // What this machine lacks, it lacks the next time too.
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

    /// Returns whether the error is one of the publisher alone: another holder of the snapshot may
    /// have what it lacks.
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
