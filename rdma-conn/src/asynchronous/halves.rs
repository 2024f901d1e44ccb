//! The two halves of a stream, each for a task of its own.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::AsyncStream;
use crate::endpoint::Descriptors;

/// The half of an [`AsyncStream`] that reads; see [`AsyncStream::into_split`].
pub struct ReadHalf<B: Descriptors>(Arc<AsyncStream<B>>);

/// The half of an [`AsyncStream`] that writes; see [`AsyncStream::into_split`].
pub struct WriteHalf<B: Descriptors>(Arc<AsyncStream<B>>);

impl<B: Descriptors> AsyncStream<B> {
    /// Splits it into halves that two tasks can own. Nothing is locked that the stream itself does not lock. The protocol cannot end one
    /// direction alone: the connection ends when both halves are dropped, or when the one that writes is shut down.
    pub fn into_split(self) -> (ReadHalf<B>, WriteHalf<B>) {
        let shared = Arc::new(self);
        (ReadHalf(Arc::clone(&shared)), WriteHalf(shared))
    }
}

impl<B: Descriptors> ReadHalf<B> {
    /// Returns the stream of which this is a half, for its counts and addresses.
    pub fn stream(&self) -> &AsyncStream<B> {
        &self.0
    }

    /// Makes a stream of two halves again.
    ///
    /// # Errors
    /// They are of different streams, and both come back.
    pub fn reunite(self, other: WriteHalf<B>) -> Result<AsyncStream<B>, (Self, WriteHalf<B>)> {
        if !Arc::ptr_eq(&self.0, &other.0) {
            return Err((self, other));
        }
        drop(other);
        Arc::try_unwrap(self.0).map_err(|_| unreachable!("a stream has two halves"))
    }
}

impl<B: Descriptors> WriteHalf<B> {
    /// Returns the stream of which this is a half, for its counts and addresses.
    pub fn stream(&self) -> &AsyncStream<B> {
        &self.0
    }
}

impl<B: Descriptors> AsyncRead for ReadHalf<B> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.read_shared(cx, into)
    }
}

impl<B: Descriptors> AsyncWrite for WriteHalf<B> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.0.write_shared(cx, &[IoSlice::new(from)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.write_shared(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.flush_shared(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.shutdown_shared(cx)
    }
}

impl<B: Descriptors> fmt::Debug for ReadHalf<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReadHalf").field(&self.0).finish()
    }
}

impl<B: Descriptors> fmt::Debug for WriteHalf<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WriteHalf").field(&self.0).finish()
    }
}
