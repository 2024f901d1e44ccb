//! Keeps idle streams alive, and drives endpoints that nobody else drives.
//!
//! A stream whose program is busy elsewhere still has keepalives to send, receives to post again, and a peer to answer: a
//! peer that finds no receive posted waits, or gives up (VR-KEEP-008). One thread per process looks after all of them; it never
//! touches an endpoint that a call is using, because that call does what is to be done.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use slotmap::{Key, KeyData, SlotMap, new_key_type};

/// How often idle streams are looked at: a few times per keepalive interval (3 s), and often enough that a peer cannot use up
/// 1024 receives with anything but data.
const INTERVAL: Duration = Duration::from_millis(500);

/// Something to look after.
pub(crate) trait Kept: Send + Sync {
    /// Does what is to be done. Returns when it wants to be looked at again.
    fn tend(&self) -> Care;

    /// Becomes readable when there is something to do.
    fn descriptor(&self) -> Arc<OwnedFd>;
}

/// When something that is kept is looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Care {
    /// Now and then: its own program does the rest.
    NowAndThen,
    /// As soon as its descriptor is readable, or when so much time has passed: nobody else drives it.
    Always(Option<Duration>),
    /// Never: it has ended.
    Over,
}

new_key_type! {
    struct EntryId;
}

struct Entry {
    kept: Weak<dyn Kept>,
    /// Watched for as long as this is here.
    watched: Option<Arc<OwnedFd>>,
    /// When it is looked at if its descriptor stays silent.
    due: Instant,
}

struct Keeper {
    entries: Mutex<State>,
    epoll: OwnedFd,
    /// Wakes the thread.
    changed: OwnedFd,
}

#[derive(Default)]
struct State {
    entries: SlotMap<EntryId, Entry>,
    running: bool,
}

/// Stands for [`Keeper::changed`].
const CHANGED: u64 = u64::MAX;

/// Without descriptors for it there is no keeper, and streams are tended by the calls on them alone.
static KEEPER: LazyLock<Option<Keeper>> = LazyLock::new(|| Keeper::new().ok());

/// Looks after `kept` until it has ended or is dropped, from now on.
pub(crate) fn keep(kept: Weak<dyn Kept>) {
    if let Some(keeper) = &*KEEPER {
        keeper.add(kept, Instant::now());
        keeper.start();
    }
}

/// From now on only calls look after anything, so that a test is the same each time.
#[cfg(all(test, feature = "tokio"))]
pub(crate) fn stay_away() {
    if let Some(keeper) = &*KEEPER {
        keeper.lock().running = true;
    }
}

impl Keeper {
    fn new() -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let changed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &changed, epoll::EventData::new_u64(CHANGED), epoll::EventFlags::IN)?;
        Ok(Self { entries: Mutex::default(), epoll, changed })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, kept: Weak<dyn Kept>, now: Instant) {
        self.lock().entries.insert(Entry { kept, watched: None, due: now });
        // Fails only if it is due already.
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
            let spawned = std::thread::Builder::new().name("rdma-keeper".into()).spawn(run);
            // Without a thread, connections are still tended by every call on them.
            state.running = spawned.is_ok();
        }
    }

    /// Returns the time until something is due, if no descriptor becomes readable before.
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
        // A failure is as good as a wake-up for nothing.
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

    /// Tends whatever was woken, or is due.
    fn turn(&self, now: Instant, woken: &[EntryId]) {
        let mut state = self.lock();
        state.entries.retain(|_, entry| entry.kept.strong_count() > 0);
        let due = state.entries.iter().filter(|(id, entry)| entry.due <= now || woken.contains(id));
        let due: Vec<_> = due.filter_map(|(id, entry)| Some((id, entry.kept.upgrade()?))).collect();
        drop(state);
        for (id, kept) in due {
            self.tend(id, &*kept, now);
        }
    }

    fn tend(&self, id: EntryId, kept: &dyn Kept, now: Instant) {
        let descriptor = kept.descriptor();
        // Watched before it is looked at: what comes from then on makes an edge.
        let newly = self.lock().entries.get(id).is_some_and(|entry| entry.watched.is_none());
        let data = epoll::EventData::new_u64(id.data().as_ffi());
        let watched = newly
            && epoll::add(&self.epoll, &descriptor, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
                .is_ok();
        // What is wrong with one must not end the care for the others.
        let care = catch_unwind(AssertUnwindSafe(|| kept.tend())).unwrap_or_else(|_| {
            tracing::error!("tending a connection panicked: nobody tends it any more");
            Care::Over
        });
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(id) else { return };
        if watched {
            entry.watched = Some(descriptor);
        }
        let unwatch = |entry: &mut Entry| {
            if let Some(descriptor) = entry.watched.take() {
                _ = epoll::delete(&self.epoll, &descriptor);
            }
        };
        match care {
            Care::NowAndThen => {
                unwatch(entry);
                entry.due = now + INTERVAL;
            }
            Care::Always(after) => {
                // Where it cannot be watched, it is looked at often.
                let after = after.unwrap_or(Duration::MAX).min(match entry.watched {
                    Some(_) => Duration::from_secs(3600),
                    None => INTERVAL / 100,
                });
                entry.due = now + after;
            }
            Care::Over => {
                unwatch(entry);
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
        tended: AtomicU32,
        care: Care,
        panics: bool,
        descriptor: Arc<OwnedFd>,
    }

    impl Kept for Counted {
        fn tend(&self) -> Care {
            self.tended.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics, "as it was told");
            self.care
        }

        fn descriptor(&self) -> Arc<OwnedFd> {
            Arc::clone(&self.descriptor)
        }
    }

    fn kept(care: Care, panics: bool) -> Arc<Counted> {
        let descriptor = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor"));
        Arc::new(Counted { tended: AtomicU32::new(0), care, panics, descriptor })
    }

    fn add(keeper: &Keeper, kept: &Arc<Counted>, now: Instant) {
        let weak: Weak<Counted> = Arc::downgrade(kept);
        keeper.add(weak, now);
    }

    fn tended(kept: &Counted) -> u32 {
        kept.tended.load(Ordering::Relaxed)
    }

    /// That one connection wants to be looked at all the time is no reason to look at the others.
    #[test]
    fn only_what_is_due_is_tended() {
        let keeper = Keeper::new().expect("descriptors");
        let begun = Instant::now();
        let (busy, idle) =
            (kept(Care::Always(Some(Duration::from_millis(2))), false), kept(Care::NowAndThen, false));
        add(&keeper, &busy, begun);
        add(&keeper, &idle, begun);
        for millis in (0..2000).step_by(2) {
            keeper.turn(begun + Duration::from_millis(millis), &[]);
        }
        assert_eq!((tended(&busy), tended(&idle)), (1000, 4));
    }

    /// Where nobody else drives, a descriptor that becomes readable is enough.
    #[test]
    fn what_is_watched_is_tended_when_it_wakes() {
        let keeper = Keeper::new().expect("descriptors");
        let begun = Instant::now();
        let (watched, idle) = (kept(Care::Always(None), false), kept(Care::NowAndThen, false));
        add(&keeper, &watched, begun);
        add(&keeper, &idle, begun);
        keeper.turn(begun, &[]);
        for kept in [&watched, &idle] {
            rustix::io::write(&kept.descriptor, &1_u64.to_ne_bytes()).expect("is an eventfd");
        }
        let woken = keeper.sleep(None);
        keeper.turn(begun, &woken);
        assert_eq!((tended(&watched), tended(&idle)), (2, 1));
    }

    #[test]
    fn a_panic_concerns_only_the_one_that_panics() {
        let keeper = Keeper::new().expect("descriptors");
        let begun = Instant::now();
        let (bad, good) = (kept(Care::NowAndThen, true), kept(Care::NowAndThen, false));
        add(&keeper, &bad, begun);
        add(&keeper, &good, begun);
        for turn in 0..3 {
            keeper.turn(begun + turn * INTERVAL, &[]);
        }
        assert_eq!((tended(&bad), tended(&good)), (1, 3));
    }
}
