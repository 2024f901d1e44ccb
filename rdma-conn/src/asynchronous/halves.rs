use std::fmt;
use std::io::{self, IoSlice};
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::AsyncStream;
use crate::endpoint::Descriptors;

/// The read half of a stream, from [`AsyncStream::split`] or [`AsyncStream::into_split`].
pub struct ReadHalf<P>(P);

/// The write half of a stream, from [`AsyncStream::split`] or [`AsyncStream::into_split`].
pub struct WriteHalf<P>(P);

type Owned<B> = (ReadHalf<Arc<AsyncStream<B>>>, WriteHalf<Arc<AsyncStream<B>>>);

impl<B: Descriptors> AsyncStream<B> {
    /// Splits the stream into borrowed halves, so that one task can read and write at once.
    pub fn split(&mut self) -> (ReadHalf<&Self>, WriteHalf<&Self>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Splits the stream into halves that two tasks can own. This adds no lock.
    ///
    /// The connection ends when both halves are dropped, or when the write half is shut down: the
    /// protocol cannot end one direction alone.
    pub fn into_split(self) -> Owned<B> {
        let shared = Arc::new(self);
        (ReadHalf(Arc::clone(&shared)), WriteHalf(shared))
    }
}

impl<B: Descriptors> ReadHalf<Arc<AsyncStream<B>>> {
    /// Reunites two halves of a stream.
    ///
    /// # Errors
    /// Returns both halves if they belong to different streams.
    pub fn reunite(self, other: WriteHalf<Arc<AsyncStream<B>>>) -> Result<AsyncStream<B>, Owned<B>> {
        if !Arc::ptr_eq(&self.0, &other.0) {
            return Err((self, other));
        }
        // Each half has a reference, so that this leaves one.
        drop(other);
        Arc::try_unwrap(self.0).map_err(|_| unreachable!("a stream has two halves"))
    }
}

impl<B: Descriptors, P: Deref<Target = AsyncStream<B>>> ReadHalf<P> {
    /// Returns the stream of this half, for its counts and addresses.
    pub fn stream(&self) -> &AsyncStream<B> {
        &self.0
    }
}

impl<B: Descriptors, P: Deref<Target = AsyncStream<B>>> WriteHalf<P> {
    /// Returns the stream of this half, for its counts and addresses.
    pub fn stream(&self) -> &AsyncStream<B> {
        &self.0
    }
}

impl<B: Descriptors, P: Deref<Target = AsyncStream<B>> + Unpin> AsyncRead for ReadHalf<P> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.read_shared(cx, into)
    }
}

impl<B: Descriptors, P: Deref<Target = AsyncStream<B>> + Unpin> AsyncWrite for WriteHalf<P> {
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

impl<P: fmt::Debug> fmt::Debug for ReadHalf<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReadHalf").field(&self.0).finish()
    }
}

impl<P: fmt::Debug> fmt::Debug for WriteHalf<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WriteHalf").field(&self.0).finish()
    }
}
