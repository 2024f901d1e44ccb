use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_process::UnsharedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::time::Sleep;

use super::{Driven, Schedule, Shared};
use crate::background;
use crate::endpoint::Descriptors;
use crate::error::Error;

/// Drives an endpoint while it has a handle. After its runtime, the background thread takes over.
struct Driver<B: Descriptors> {
    shared: Weak<Shared<B>>,
    readable: AsyncFd<Arc<UnsharedFd>>,
    timer: Pin<Box<Sleep>>,
}

pub(super) fn drive<B: Descriptors>(shared: &Arc<Shared<B>>) -> Result<(), Error> {
    let failed = |error| Error::Wait(Arc::new(error));
    let runtime = Handle::try_current().map_err(|error| failed(io::Error::other(error)))?;
    #[allow(unsafe_code)]
    // SAFETY: `AsyncFd::register_with_interest` requires that the descriptor stays open, and the
    // same, for as long as the `AsyncFd` lives. An `UnsharedFd` is open and never changes until it
    // is dropped. The `AsyncFd` keeps it alive through its `Arc`, and nothing here takes it out.
    let readable =
        unsafe { AsyncFd::register_with_interest(Arc::clone(&shared.descriptor), Interest::READABLE) };
    let readable = readable.map_err(|error| failed(error.into()))?;
    let timer = Box::pin(tokio::time::sleep(Duration::ZERO));
    runtime.spawn(Driver { shared: Arc::downgrade(shared), readable, timer });
    Ok(())
}

impl<B: Descriptors> Future for Driver<B> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        // The last handle woke this task when it was dropped.
        let Some(shared) = this.shared.upgrade() else { return Poll::Ready(()) };
        loop {
            // Readiness is edge-triggered: later arrivals wake the task, earlier ones are found
            // here.
            while let Poll::Ready(readable) = this.readable.poll_read_ready(cx) {
                match readable {
                    Ok(mut readable) => readable.clear_ready(),
                    Err(error) => {
                        shared.lost(Error::Wait(Arc::new(error)));
                        return Poll::Ready(());
                    }
                }
            }
            match shared.turn(Some(cx.waker())) {
                Turn::Lost => return Poll::Ready(()),
                Turn::Sleep(None) => return Poll::Pending,
                // Let other tasks run before the rest.
                Turn::Sleep(Some(left)) if left.is_zero() => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Turn::Sleep(Some(left)) => {
                    // `tokio` has no instant so late; there is nothing to wait for.
                    let Some(at) = tokio::time::Instant::now().checked_add(left) else {
                        return Poll::Pending;
                    };
                    this.timer.as_mut().reset(at);
                    if this.timer.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
            }
        }
    }
}

impl<B: Descriptors> Drop for Driver<B> {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        // A turn that panicked may have lost what a wait needs, so the endpoint fails. A runtime
        // that ends drops the task: the connections go on, and deliver (VR-CLOSE-001).
        if shared.state.is_poisoned() {
            shared.panicked();
        } else {
            background::drive(self.shared.clone());
        }
    }
}

pub(super) enum Turn {
    Lost,
    Sleep(Option<Duration>),
}

impl<B: Descriptors> Shared<B> {
    /// Makes progress and wakes the tasks concerned. Keeps `driver`, for when it must look sooner.
    pub(super) fn turn(&self, driver: Option<&Waker>) -> Turn {
        let error = {
            let mut state = self.lock();
            if state.lost.is_some() {
                return Turn::Lost;
            }
            match state.endpoint.progress() {
                Ok(()) => {
                    let wake = state.concerned();
                    let next = state.endpoint.next_timeout();
                    state.driver = driver.cloned();
                    state.sleeps_until = Some(next.unwrap_or(Instant::from_start(Duration::MAX)));
                    let left = next.map(|at| at.since(state.endpoint.now()));
                    drop(state);
                    wake.all();
                    return Turn::Sleep(left);
                }
                Err(error) => error,
            }
        };
        self.lost(error);
        Turn::Lost
    }

    fn lost(&self, error: Error) {
        let wake = self.lock().lose(error);
        wake.into_iter().for_each(Waker::wake);
    }
}

struct Nudge(crate::waker::Waker);

impl Wake for Nudge {
    fn wake(self: Arc<Self>) {
        self.0.wake();
    }
}

impl<B: Descriptors> Driven for Shared<B> {
    fn drive(&self) -> Schedule {
        // The thread sleeps on the endpoint's descriptor, which this waker makes readable.
        let nudge = self.lock().endpoint.waker().ok().map(|waker| Waker::from(Arc::new(Nudge(waker))));
        match self.turn(nudge.as_ref()) {
            Turn::Lost => Schedule::Never,
            Turn::Sleep(left) => Schedule::WhenReadable(left),
        }
    }

    fn descriptor(&self) -> Arc<UnsharedFd> {
        Arc::clone(&self.descriptor)
    }

    fn panicked(&self) {
        self.lost(background::panicked());
    }
}

impl<B: Descriptors> Drop for Shared<B> {
    fn drop(&mut self) {
        // A child has no driver, and another thread of the parent may have held the lock.
        if rdma_process::is_child() {
            return;
        }
        // The driver finds no endpoint then, and its task ends.
        let driver = self.lock().driver.take();
        if let Some(driver) = driver {
            driver.wake();
        }
    }
}
