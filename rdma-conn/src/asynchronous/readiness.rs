//! A descriptor in tokio's reactor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a channel's descriptor. Readiness is edge-triggered: whoever was told must take everything out of the channel.
#[derive(Debug)]
pub(super) struct Readiness(AsyncFd<OwnedFd>);

impl Readiness {
    /// Watches `channel`, through a descriptor of its own.
    pub(super) fn new(channel: &impl AsFd) -> io::Result<Self> {
        let own = channel.as_fd().try_clone_to_owned()?;
        #[allow(unsafe_code)]
        // SAFETY: `AsyncFd::register_with_interest` asks that the descriptor stays open, and the same, for as long as the
        // `AsyncFd` lives. An `OwnedFd` is open and never changes until it is dropped, the `AsyncFd` owns it, and nothing here
        // takes it out again.
        let watched = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) };
        Ok(Self(watched?))
    }

    /// Waits until the descriptor has become readable, in as many tasks as like. The caller has taken everything out of the channel,
    /// and looks again.
    pub(super) async fn drained(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }

    /// Calls `drain` once the descriptor has become readable; `drain` must take everything out of the channel.
    pub(super) fn poll_drain(&self, cx: &mut Context<'_>, drain: impl FnOnce()) -> Poll<io::Result<()>> {
        self.0.poll_read_ready(cx).map_ok(|mut ready| {
            drain();
            ready.clear_ready();
        })
    }
}
