//! A link between the bridge and one side, in memory: TCP, or RDMA, which ends as a whole.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Waker, ready};

use tokio::io::ReadBuf;
use tokio::time::Sleep;

use super::*;

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    ended: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

pub(super) struct Link {
    pipes: [Pipe; 2],
    whole: bool,
    room: usize,
    reset: bool,
    gone: [bool; 2],
    /// What the other side has read of each.
    taken: [Taken; 2],
    random: fastrand::Rng,
}

struct LinkEnd {
    link: Rc<RefCell<Link>>,
    me: usize,
    finished: bool,
    /// An RDMA connection ends when the last bytes are confirmed.
    confirming: Option<Pin<Box<Sleep>>>,
}

pub(super) struct Outer(LinkEnd);

pub(super) struct Inner(LinkEnd);

impl Link {
    pub(super) fn pair(random: fastrand::Rng, whole: bool, room: usize) -> (Outer, Inner) {
        let (pipes, gone, taken) = Default::default();
        let link = Self { pipes, whole, room, reset: false, gone, taken, random };
        let link = Rc::new(RefCell::new(link));
        let end = |me| LinkEnd { link: Rc::clone(&link), me, finished: false, confirming: None };
        (Outer(end(0)), Inner(end(1)))
    }

    fn wake(&mut self) {
        for pipe in &mut self.pipes {
            pipe.reader.take().into_iter().chain(pipe.writer.take()).for_each(Waker::wake);
        }
    }

    /// Resets the connection, which discards unread bytes.
    fn break_off(&mut self) {
        self.reset = true;
        self.pipes.iter_mut().for_each(|pipe| pipe.bytes.clear());
        self.wake();
    }

    fn part(&mut self, most: usize) -> usize {
        if self.random.bool() { most } else { self.random.usize(1..=most) }
    }
}

impl LinkEnd {
    fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let link = &mut *self.link.borrow_mut();
        let (len, most) = (link.pipes[1 - self.me].bytes.len(), into.remaining());
        if len == 0 {
            // Data and an end that arrived before a reset can still be read.
            return match (link.reset, link.pipes[1 - self.me].ended) {
                (true, _) => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                (false, true) => Poll::Ready(Ok(())),
                (false, false) => {
                    link.pipes[1 - self.me].reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            };
        }
        let part = link.part(len.min(most));
        let pipe = &mut link.pipes[1 - self.me];
        let bytes: Vec<u8> = pipe.bytes.drain(..part).collect();
        into.put_slice(&bytes);
        link.taken[1 - self.me].fetch_add(bytes.len() as u64, Ordering::Relaxed);
        pipe.writer.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let link = &mut *self.link.borrow_mut();
        if link.reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if link.pipes[self.me].ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if link.gone[1 - self.me] {
            // A segment to a closed socket is answered by a reset.
            link.break_off();
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let room = link.room - link.pipes[self.me].bytes.len();
        if room == 0 {
            link.pipes[self.me].writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let part = link.part(room.min(from.len()));
        let pipe = &mut link.pipes[self.me];
        pipe.bytes.extend(&from[..part]);
        pipe.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(part))
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let link = &mut *self.link.borrow_mut();
        if link.reset {
            return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
        }
        if link.whole && !link.pipes[self.me].ended {
            let takes = milliseconds(&mut link.random, 0..50);
            ready!(self.confirming.get_or_insert_with(|| Box::pin(sleep(takes))).as_mut().poll(cx));
            // Bytes beyond the peer's window have not arrived.
            if link.pipes[self.me].bytes.len() > link.room / 2 {
                link.pipes[self.me].writer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            link.pipes[1 - self.me].ended = true;
        }
        link.pipes[self.me].ended = true;
        self.finished = true;
        link.wake();
        Poll::Ready(Ok(()))
    }
}

impl Drop for LinkEnd {
    fn drop(&mut self) {
        let link = &mut *self.link.borrow_mut();
        link.gone[self.me] = true;
        let ended_by_peer = link.whole && link.pipes[self.me].ended;
        let unread = !link.whole && !link.pipes[1 - self.me].bytes.is_empty();
        // Closing a socket with unread bytes resets the connection.
        if !(self.finished || ended_by_peer) || unread {
            link.break_off();
        }
        link.wake();
    }
}

macro_rules! stream {
    ($end:ty) => {
        impl AsyncRead for $end {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                into: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                self.get_mut().0.poll_read(cx, into)
            }
        }

        impl AsyncWrite for $end {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                from: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.get_mut().0.poll_write(cx, from)
            }

            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.get_mut().0.poll_shutdown(cx)
            }
        }
    };
}

stream!(Outer);
stream!(Inner);

impl Outer {
    pub(super) fn is_whole(&self) -> bool {
        self.0.link.borrow().whole
    }
}

impl End for Inner {
    fn half_closes(&self) -> bool {
        !self.0.link.borrow().whole
    }

    fn taken(&self) -> Taken {
        Arc::clone(&self.0.link.borrow().taken[self.0.me])
    }
}
