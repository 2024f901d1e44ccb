//! Streams for the tokio runtime.

mod readiness;
#[cfg(test)]
mod tests;

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use rdma_proto::Counters;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::ToSocketAddrs;
use tokio::time::Sleep;

use crate::dial::Dial;
use crate::error::Error;
use crate::keeper;
use crate::lend::RegisteredBuffer;
use crate::link::Link;
use crate::listener::Listener;
use crate::shared::Shared;
use crate::stream::Connect;
use crate::wait::Descriptors;
use crate::waiting::{Waiting, Want};
use crate::work::Work;

use readiness::Readiness;

/// A byte stream over RDMA for tokio: [`AsyncRead`] and [`AsyncWrite`].
///
/// Reads and writes are cancel-safe: a future that is dropped has read or written nothing. One task may read while another
/// writes (see `tokio::io::split`). Dropping the stream delivers what was written in the background, for at most
/// [`Options::linger`](crate::Options::linger); `shutdown` waits for it.
pub struct AsyncStream<B: Descriptors> {
    shared: Arc<Shared<B>>,
    sources: Sources,
}

/// What can move a connection: completions, connection-manager events, and time.
struct Sources {
    completions: Readiness,
    events: Readiness,
    timer: Pin<Box<Sleep>>,
    /// Wakes all who wait for this connection: the sources remember only one waker each.
    everybody: Waker,
}

impl Sources {
    fn new<B: Descriptors>(link: &Link<B>, waiting: &Arc<Waiting>) -> Result<Self, Error> {
        Ok(Self {
            completions: watch(link.completion_queue())?,
            events: watch(link.event_channel())?,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            everybody: Arc::clone(waiting).into(),
        })
    }

    /// Takes what the sources have for `link`; ready if there was anything.
    fn poll<B: Descriptors>(&mut self, link: &mut Link<B>) -> Poll<Result<(), Error>> {
        let cx = &mut Context::from_waker(&self.everybody);
        let mut moved = false;
        let completions = self.completions.poll_drain(cx, || link.take_completion_events());
        let events = self.events.poll_drain(cx, || {
            link.take_events();
        });
        for source in [completions, events] {
            if let Poll::Ready(drained) = source {
                drained.map_err(|error| Error::Wait(Arc::new(error)))?;
                moved = true;
            }
        }
        if let Some(at) = link.next_timeout() {
            let left = at.since(link.now());
            // Without an instant so late there is nothing to wait for.
            if let Some(at) = tokio::time::Instant::now().checked_add(left) {
                self.timer.as_mut().reset(at);
                moved |= self.timer.as_mut().poll(cx).is_ready();
            }
        }
        if moved { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

fn watch(channel: &impl std::os::fd::AsFd) -> Result<Readiness, Error> {
    Readiness::new(channel).map_err(|error| Error::Wait(Arc::new(error)))
}

impl<B: Descriptors> AsyncStream<B> {
    /// Connects to a host and port, with default settings.
    ///
    /// # Errors
    /// As [`Stream::connect`](crate::Stream::connect).
    pub async fn connect(backend: &B, host: impl ToSocketAddrs + ToString) -> Result<Self, Error> {
        Self::connect_with(backend, host, &Connect::default()).await
    }

    /// Connects to a host and port. Its addresses are tried in turn. A future that is dropped leaves nothing behind.
    ///
    /// # Errors
    /// As [`Stream::connect_with`](crate::Stream::connect_with).
    pub async fn connect_with(
        backend: &B,
        host: impl ToSocketAddrs + ToString,
        how: &Connect,
    ) -> Result<Self, Error> {
        let name = host.to_string();
        let no_such_host = |source| Error::NoSuchHost { host: name.clone(), source: Arc::new(source) };
        let addresses = tokio::net::lookup_host(host).await.map_err(no_such_host)?;
        let mut last = no_such_host(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for peer in addresses {
            match dialed(backend, peer, how).await.and_then(Self::new) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn new(link: Link<B>) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new(link));
        let sources = Sources::new(&shared.lock(), &shared.waiting)?;
        let weak: Weak<Shared<B>> = Arc::downgrade(&shared);
        keeper::keep(weak);
        Ok(Self { shared, sources })
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.shared.lock().peer_addr()
    }

    /// This side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.lock().local_addr()
    }

    /// What the connection has done so far.
    pub fn counters(&self) -> Counters {
        self.shared.lock().counters()
    }

    /// What it has asked of the device so far.
    pub fn work(&self) -> Work {
        self.shared.lock().work()
    }

    /// Registers memory to send from without a copy, see [`Connection::register`](crate::Connection::register).
    ///
    /// # Errors
    /// As there.
    pub fn register(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.shared.lock().register(len)
    }

    /// Sends bytes of `buffer`, from the beginning of `range`, behind all that was written; returns how many as soon as they are
    /// on their way. A future that is dropped has lent nothing. [`AsyncStream::returned`] waits for the buffer.
    ///
    /// # Errors
    /// As [`Connection::try_lend`](crate::Connection::try_lend).
    pub async fn lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> io::Result<usize> {
        poll_fn(|cx| self.poll_step(cx, Want::Write, |link| link.try_lend(buffer, range.clone()))).await
    }

    /// Waits until the peer has all that was lent of `buffer`, which can then be changed.
    ///
    /// # Errors
    /// The connection ended before that.
    pub async fn returned(&mut self, buffer: &RegisteredBuffer<B>) -> io::Result<()> {
        poll_fn(|cx| self.poll_step(cx, Want::Write, |link| link.returned(buffer))).await
    }

    /// Repeats `step` until it has a result; until then the task is woken whenever the connection has moved.
    fn poll_step<T>(
        &mut self,
        cx: &mut Context<'_>,
        want: Want,
        mut step: impl FnMut(&mut Link<B>) -> Result<Option<T>, Error>,
    ) -> Poll<io::Result<T>> {
        let link = &mut *self.shared.lock();
        if let Some(done) = step(link)? {
            return Poll::Ready(Ok(done));
        }
        self.shared.waiting.add(want, cx.waker());
        loop {
            link.arm();
            if link.progress() {
                // What this task has noticed may be what another one waits for.
                self.shared.waiting.wake();
                self.shared.waiting.add(want, cx.waker());
            }
            if let Some(done) = step(link)? {
                return Poll::Ready(Ok(done));
            }
            ready!(self.sources.poll(link))?;
        }
    }
}

/// Makes a connection.
async fn dialed<B: Descriptors>(backend: &B, peer: SocketAddr, how: &Connect) -> Result<Link<B>, Error> {
    let mut dial = Dial::new(backend, peer, how.local, how.timeout, how.options)?;
    // The first source is there from the beginning; the second comes when the peer is asked.
    let mut watched: [Option<Readiness>; 2] = [None, None];
    loop {
        if let Some(link) = dial.progress()? {
            return Ok(link);
        }
        let left = dial.deadline().since(backend.now());
        if let Some((events, completions)) = dial.sources() {
            let [first, second] = &mut watched;
            if first.is_none() {
                *first = Some(watch(events)?);
            }
            if let (None, Some(completions)) = (&second, completions) {
                *second = Some(watch(completions)?);
                // What came before it was watched raises no edge.
                continue;
            }
        }
        // `progress` drains both channels, so nothing is left to take out here.
        let any = poll_fn(|cx| {
            let ready = watched.iter().flatten().any(|source| source.poll_drain(cx, || ()).is_ready());
            if ready { Poll::Ready(()) } else { Poll::Pending }
        });
        let _late_or_not = tokio::time::timeout(left, any).await;
    }
}

impl<B: Descriptors> AsyncRead for AsyncStream<B> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let unfilled = into.initialize_unfilled();
        let read = ready!(self.get_mut().poll_step(cx, Want::Read, |link| link.try_read(unfilled)))?;
        into.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl<B: Descriptors> AsyncWrite for AsyncStream<B> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(from)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_step(cx, Want::Write, |link| link.try_write(from))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Waits until everything written has been handed to the device.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_step(cx, Want::Write, |link| link.flushed())
    }

    /// Waits until everything written has arrived, for at most [`Options::linger`](crate::Options::linger), and ends the
    /// connection.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        {
            let mut link = this.shared.lock();
            let linger = link.options().linger;
            link.close(linger);
        }
        this.poll_step(cx, Want::Write, |link| link.closed())
    }
}

impl<B: Descriptors> Drop for AsyncStream<B> {
    fn drop(&mut self) {
        let mut link = self.shared.lock();
        let linger = link.options().linger;
        link.close(linger);
        drop(link);
        keeper::see_off(self.shared.clone());
    }
}

impl<B: Descriptors> std::fmt::Debug for AsyncStream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncStream").field("link", &*self.shared.lock()).finish_non_exhaustive()
    }
}

/// Accepts connections for tokio.
pub struct AsyncListener<B: Descriptors> {
    listener: Listener<B>,
    events: Readiness,
}

impl<B: Descriptors> AsyncListener<B> {
    /// Accepts what `listener` is asked for.
    ///
    /// # Errors
    /// The runtime cannot watch the listener.
    pub fn new(listener: Listener<B>) -> Result<Self, Error> {
        let events = watch(listener.event_channel())?;
        Ok(Self { listener, events })
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.local_addr()
    }

    /// Waits for the next connection. A future that is dropped has accepted none.
    ///
    /// # Errors
    /// As [`Listener::try_accept`].
    pub async fn accept(&self) -> Result<(AsyncStream<B>, SocketAddr), Error> {
        loop {
            if let Some(link) = self.listener.try_accept()? {
                let peer = link.peer_addr();
                return Ok((AsyncStream::new(link)?, peer));
            }
            // `try_accept` has taken everything out of the channel.
            self.events.drained().await.map_err(|error| Error::Wait(Arc::new(error)))?;
        }
    }
}
