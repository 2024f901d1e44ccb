//! Errors that say what to change.

use core::net::SocketAddr;
use std::net::IpAddr;

use rdma_backend::{ErrorKind, Failure};
use rustix::io::Errno;

/// An error of the software fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host, and everything on it, is gone after [`crate::Fabric::kill_host`].
    #[error("the {0} is gone: its host was killed")]
    Gone(&'static str),
    /// No device of this host has the address.
    #[error("{0} is not an address of this host")]
    NotLocal(IpAddr),
    /// The address already has a listener on this host.
    #[error("{0} is in use on this host")]
    AddressInUse(SocketAddr),
    /// Every dynamic port of the host is in use.
    #[error("no free port on this host")]
    NoFreePort,
    /// Registering would exceed the host's limit on pinned memory.
    #[error(
        "cannot register {asked} bytes: {registered} of {limit} bytes of locked memory are in use; raise \
         Limits::locked_memory (on a real host: RLIMIT_MEMLOCK, `ulimit -l`)"
    )]
    LockedMemory {
        /// Bytes requested.
        asked: u64,
        /// Bytes registered already.
        registered: u64,
        /// The limit.
        limit: u64,
    },
    /// A device limit other than locked memory, or an injected fault.
    #[error("the device has no more {what}{}", reason(.limit, *.value))]
    Exhausted {
        /// The kind of object that ran out.
        what: &'static str,
        /// The field of [`crate::Limits`] that sets the limit. Empty if a fault was injected.
        limit: &'static str,
        /// Its value.
        value: u64,
    },
    /// The allocator has no memory of that size.
    #[error("cannot allocate {0} bytes")]
    Allocation(usize),
    /// A queue has no free slot.
    #[error("the {queue} queue is full: {depth} work requests are outstanding")]
    QueueFull {
        /// `send` or `receive`.
        queue: &'static str,
        /// Its depth.
        depth: u32,
    },
    /// Bytes are still being written to memory that is to be taken away. Its program has not
    /// provided a page of it in time; the call may be repeated.
    #[error("the memory is still being written to: a page of it does not come")]
    Landing,
    /// The call is invalid in this state.
    #[error("{0}")]
    State(&'static str),
    /// An argument is outside what is allowed.
    #[error("{0}")]
    Argument(&'static str),
    /// More completions arrived than fit into the completion queue.
    #[error("the completion queue was overrun: {depth} completions waited when another arrived")]
    Overrun {
        /// The queue's depth.
        depth: u32,
    },
    /// The operating system refused an operation on a descriptor.
    #[error("event descriptor: {0}")]
    Descriptor(#[source] Errno),
}

/// Returns the reason of [`Error::Exhausted`], as the end of its text.
fn reason(limit: &str, value: u64) -> String {
    if limit.is_empty() { " (an injected fault)".into() } else { format!(": Limits::{limit} is {value}") }
}

impl Failure for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Gone(_) | Self::State(_) | Self::Landing => ErrorKind::State,
            Self::NotLocal(_) | Self::AddressInUse(_) | Self::NoFreePort => ErrorKind::Address,
            Self::LockedMemory { .. } | Self::Exhausted { .. } | Self::Allocation(_) => ErrorKind::Memory,
            Self::QueueFull { .. } => ErrorKind::QueueFull,
            Self::Argument(_) => ErrorKind::Argument,
            Self::Descriptor(Errno::MFILE | Errno::NFILE) => ErrorKind::Descriptors,
            Self::Descriptor(Errno::NOMEM) => ErrorKind::Memory,
            Self::Overrun { .. } | Self::Descriptor(_) => ErrorKind::Other,
        }
    }
}
