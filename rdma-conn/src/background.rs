//! The background thread, which drives idle streams and endpoints without another driver.
//!
//! A peer that finds no receive waits, or gives up (VR-KEEP-008). One thread per process drives all
//! streams, except those that a call is driving.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rdma_process::UnsharedFd;
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use slotmap::{Key, KeyData, SlotMap, new_key_type};

use crate::error::Error;

/// Interval of visits to idle streams: several per keepalive interval (3 s), and often enough that
/// a peer's control messages cannot use up 1024 receives.
const INTERVAL: Duration = Duration::from_millis(500);

pub(crate) trait Driven: Send + Sync {
    /// Does pending work, and says when to call again.
    fn drive(&self) -> Schedule;

    fn descriptor(&self) -> Arc<UnsharedFd>;

    /// Called after the last [`Driven::drive`], which panicked. Every wait must end with
    /// [`panicked`].
    fn panicked(&self);
}

pub(crate) fn panicked() -> Error {
    Error::Protocol(rdma_proto::Error::Bug(
        "a call on this connection, or the thread that drives it, has panicked",
    ))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// Every [`INTERVAL`]: calls of its program do the rest.
    Periodic,
    /// When its descriptor is readable or this time has passed: only the thread drives it.
    WhenReadable(Option<Duration>),
    Never,
}

new_key_type! {
    struct EntryId;
}

struct Entry {
    driven: Weak<dyn Driven>,
    /// The watched descriptor, kept open while it is watched.
    watched: Option<Arc<UnsharedFd>>,
    due: Instant,
}

struct BackgroundThread {
    entries: Mutex<Entries>,
    epoll: UnsharedFd,
    changed: UnsharedFd,
}

#[derive(Default)]
struct Entries {
    entries: SlotMap<EntryId, Entry>,
    running: bool,
}

const CHANGED: u64 = u64::MAX;

/// `None` if the process has no descriptors for it. Only calls then drive streams.
static BACKGROUND: LazyLock<Option<BackgroundThread>> = LazyLock::new(|| BackgroundThread::new().ok());

pub(crate) fn drive(driven: Weak<dyn Driven>) {
    // A forked child has no thread, and only a copy of its descriptors.
    if rdma_process::is_child() {
        return;
    }
    if let Some(background) = &*BACKGROUND {
        background.add(driven, Instant::now());
        background.start();
    }
}

/// Keeps the thread from starting, so that a test runs the same way each time.
#[cfg(all(test, feature = "tokio"))]
pub(crate) fn disable() {
    if let Some(background) = &*BACKGROUND {
        background.lock().running = true;
    }
}

impl BackgroundThread {
    fn new() -> rustix::io::Result<Self> {
        let epoll = UnsharedFd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let changed = UnsharedFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        epoll::add(&epoll, &changed, epoll::EventData::new_u64(CHANGED), epoll::EventFlags::IN)?;
        Ok(Self { entries: Mutex::default(), epoll, changed })
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, driven: Weak<dyn Driven>, now: Instant) {
        // Due at once: the first visit says how it is to be driven.
        self.lock().entries.insert(Entry { driven, watched: None, due: now });
        // Fails only if a wake-up is pending already.
        _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }

    fn start(&'static self) {
        let mut state = self.lock();
        if !state.running {
            let run = move || {
                loop {
                    let woken = self.sleep(self.next(Instant::now()));
                    self.turn(Instant::now(), &woken);
                }
            };
            // Without a thread, every call still drives its connection.
            state.running = rdma_process::spawn("rdma-background", run).is_ok();
        }
    }

    fn next(&self, now: Instant) -> Option<Duration> {
        let state = self.lock();
        state.entries.values().map(|entry| entry.due.saturating_duration_since(now)).min()
    }

    fn sleep(&self, limit: Option<Duration>) -> Vec<EntryId> {
        let mut events = Vec::with_capacity(64);
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs().min(3600) as i64,
            tv_nsec: limit.subsec_nanos().into(),
        });
        // Treat a failure as a spurious wake-up.
        _ = epoll::wait(&self.epoll, spare_capacity(&mut events), limit.as_ref());
        let mut woken = Vec::new();
        for event in events {
            match event.data.u64() {
                CHANGED => _ = rustix::io::read(&self.changed, &mut [0; 8]),
                entry => woken.push(EntryId::from(KeyData::from_ffi(entry))),
            }
        }
        woken
    }

    fn turn(&self, now: Instant, woken: &[EntryId]) {
        let mut state = self.lock();
        state.entries.retain(|_, entry| {
            let lives = entry.driven.strong_count() > 0;
            if !lives {
                self.unwatch(entry);
            }
            lives
        });
        let due = state.entries.iter().filter(|(id, entry)| entry.due <= now || woken.contains(id));
        let due: Vec<_> = due.filter_map(|(id, entry)| Some((id, entry.driven.upgrade()?))).collect();
        // Driving takes long, and meanwhile other threads add entries.
        drop(state);
        for (id, driven) in due {
            self.drive(id, &*driven, now);
        }
    }

    /// Unregister first: another watcher may take over this descriptor.
    fn unwatch(&self, entry: &mut Entry) {
        if let Some(descriptor) = entry.watched.take() {
            _ = epoll::delete(&self.epoll, &descriptor);
        }
    }

    fn drive(&self, id: EntryId, driven: &dyn Driven, now: Instant) {
        let descriptor = driven.descriptor();
        // Watch before driving, so that later arrivals cause an edge.
        let newly = self.lock().entries.get(id).is_some_and(|entry| entry.watched.is_none());
        let data = epoll::EventData::new_u64(id.data().as_ffi());
        let watched = newly
            && epoll::add(&self.epoll, &descriptor, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
                .is_ok();
        // A panic in one must not stop the others.
        let schedule = catch_unwind(AssertUnwindSafe(|| driven.drive())).unwrap_or_else(|_| {
            tracing::error!("driving a connection panicked: its calls fail from now on");
            driven.panicked();
            Schedule::Never
        });
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(id) else { return };
        if watched {
            entry.watched = Some(descriptor);
        }
        match schedule {
            // Calls of the program take what arrives: it would wake the thread for nothing.
            Schedule::Periodic => {
                self.unwatch(entry);
                entry.due = now + INTERVAL;
            }
            Schedule::WhenReadable(after) => {
                // If it cannot be watched, drive it often.
                let after = after.unwrap_or(Duration::MAX).min(match entry.watched {
                    Some(_) => Duration::from_secs(3600),
                    None => INTERVAL / 100,
                });
                entry.due = now + after;
            }
            Schedule::Never => {
                self.unwatch(entry);
                state.entries.remove(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Counted {
        calls: AtomicU32,
        schedule: Schedule,
        panics: bool,
        told: AtomicU32,
        descriptor: Arc<UnsharedFd>,
    }

    impl Driven for Counted {
        fn drive(&self) -> Schedule {
            self.calls.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics, "as it was told");
            self.schedule
        }

        fn descriptor(&self) -> Arc<UnsharedFd> {
            Arc::clone(&self.descriptor)
        }

        fn panicked(&self) {
            assert!(self.panics, "it did not");
            self.told.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn driven(schedule: Schedule, panics: bool) -> Arc<Counted> {
        let descriptor = Arc::new(UnsharedFd::new(eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor")));
        Arc::new(Counted { calls: AtomicU32::new(0), schedule, panics, told: AtomicU32::new(0), descriptor })
    }

    fn add(background: &BackgroundThread, driven: &Arc<Counted>, now: Instant) {
        let weak: Weak<Counted> = Arc::downgrade(driven);
        background.add(weak, now);
    }

    fn calls(driven: &Counted) -> u32 {
        driven.calls.load(Ordering::Relaxed)
    }

    #[test]
    fn only_what_is_due_is_driven() {
        let background = BackgroundThread::new().expect("descriptors");
        let begun = Instant::now();
        let (busy, idle) = (
            driven(Schedule::WhenReadable(Some(Duration::from_millis(2))), false),
            driven(Schedule::Periodic, false),
        );
        add(&background, &busy, begun);
        add(&background, &idle, begun);
        for millis in (0..2000).step_by(2) {
            background.turn(begun + Duration::from_millis(millis), &[]);
        }
        assert_eq!((calls(&busy), calls(&idle)), (1000, 4));
    }

    #[test]
    fn what_is_watched_is_driven_when_it_wakes() {
        let background = BackgroundThread::new().expect("descriptors");
        let begun = Instant::now();
        let (watched, idle) =
            (driven(Schedule::WhenReadable(None), false), driven(Schedule::Periodic, false));
        add(&background, &watched, begun);
        add(&background, &idle, begun);
        background.turn(begun, &[]);
        for driven in [&watched, &idle] {
            rustix::io::write(&driven.descriptor, &1_u64.to_ne_bytes()).expect("is an eventfd");
        }
        let woken = background.sleep(None);
        background.turn(begun, &woken);
        assert_eq!((calls(&watched), calls(&idle)), (2, 1));
    }

    /// The descriptor of a dropped entry may be reused by another that is driven too.
    #[test]
    fn what_is_gone_is_watched_no_more() {
        let background = BackgroundThread::new().expect("descriptors");
        let begun = Instant::now();
        let gone = driven(Schedule::WhenReadable(None), false);
        let descriptor = Arc::clone(&gone.descriptor);
        add(&background, &gone, begun);
        background.turn(begun, &[]);
        drop(gone);
        background.turn(begun, &[]);
        let data = epoll::EventData::new_u64(1);
        epoll::add(&background.epoll, &descriptor, data, epoll::EventFlags::IN).expect("it is not watched");
    }

    #[test]
    fn a_panic_concerns_only_the_one_that_panics() {
        let background = BackgroundThread::new().expect("descriptors");
        let begun = Instant::now();
        let (bad, good) = (driven(Schedule::Periodic, true), driven(Schedule::Periodic, false));
        add(&background, &bad, begun);
        add(&background, &good, begun);
        for turn in 0..3 {
            background.turn(begun + turn * INTERVAL, &[]);
        }
        assert_eq!((calls(&bad), calls(&good)), (1, 3));
        assert_eq!(bad.told.load(Ordering::Relaxed), 1);
    }
}
