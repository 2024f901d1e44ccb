//! Memory that the fabric shares with one program: a page of notices to it ([`Notice`]), one for
//! each completion queue ([`Page`]), in which the program polls and arms without a request, and the
//! ring in which it posts ([`Posts`]).
//!
//! The program may write anything there at any time, and affects only its own queues and session.
//! The memory's size is sealed, so no access of the fabric fails, and none waits for the program.
//! Only touched pages take memory on either side.

#![allow(unsafe_code, reason = "a mapping that is shared with a program")]

use core::ptr::NonNull;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_backend::Completion;
use rdma_softsim::{Arming, Calls, Detail, Look, Mirror};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use softrdma_wire::{ARMS, Error, Notice, PAGE, POLLS, POSTS_AT, Page, Post, Posts, Reader, SHOWN};

use super::translate;

/// The most completion queues of one program: the first page has the notices.
pub(super) const MOST_QUEUES: u32 = (POSTS_AT / PAGE) as u32 - 1;

const BYTES: usize = POSTS_AT + size_of::<Posts>();

/// The memory of one program.
pub(super) struct Pages {
    base: NonNull<Page>,
    memory: OwnedFd,
    places: Mutex<Places>,
}

// SAFETY: the pages consist of atomics, and the mapping lasts as long as this.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

#[derive(Default)]
struct Places {
    free: Vec<u32>,
    /// How many pages were ever taken: the numbers 1 to this.
    ever: u32,
}

impl Pages {
    pub(super) fn new() -> Result<Arc<Self>, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("softrdma", flags)?;
        rustix::fs::ftruncate(&memory, BYTES as u64)?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: mmap(2): a new mapping at a place that the kernel chooses, of a file that keeps
        // its size.
        let base = unsafe { rustix::mm::mmap(core::ptr::null_mut(), BYTES, access, shared, &memory, 0)? };
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Arc::new(Self { base, memory, places: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a descriptor of the memory, for the program.
    pub(super) fn descriptor(&self) -> Result<OwnedFd, Errno> {
        rustix::io::fcntl_dupfd_cloexec(&self.memory, 0)
    }

    pub(super) fn notice(&self) -> &Notice {
        // SAFETY: the first page of the mapping, which lasts as long as `self`, and belongs to no
        // queue. It is made of atomics, for which any bytes are valid and which others may write
        // meanwhile.
        unsafe { self.base.cast().as_ref() }
    }

    fn posts(&self) -> &Posts {
        // SAFETY: the end of the mapping, which lasts as long as `self`, from the boundary of a
        // page on. It is made of atomics, for which any bytes are valid and which others may write
        // meanwhile.
        unsafe { self.base.byte_add(POSTS_AT).cast().as_ref() }
    }

    pub(super) fn take(self: &Arc<Self>) -> Result<Place, Errno> {
        let mut places = self.lock();
        let number = match places.free.pop() {
            Some(number) => number,
            None if places.ever < MOST_QUEUES => {
                places.ever += 1;
                places.ever
            }
            None => return Err(Errno::NOMEM),
        };
        drop(places);
        let place = Place { pages: Arc::clone(self), number };
        place.page().clear();
        Ok(place)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: munmap(2): the mapping that `new` made; each page holds a reference to this.
        let _unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), BYTES) };
    }
}

/// A queue's page. It becomes free when both the session and the model have dropped it.
pub(super) struct Place {
    pages: Arc<Pages>,
    pub(super) number: u32,
}

impl Place {
    fn page(&self) -> &Page {
        // SAFETY: `take` gave a number of at most `MOST_QUEUES`, so it is a page of the mapping,
        // which lasts as long as `pages`. It is made of atomics, for which any bytes are valid and
        // which others may write meanwhile.
        unsafe { self.pages.base.add(self.number as usize).as_ref() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pages.lock().free.push(self.number);
    }
}

/// The posts of one program.
pub(super) struct Posted {
    pages: Arc<Pages>,
    reader: Reader,
}

impl Posted {
    pub(super) fn new(pages: Arc<Pages>) -> Self {
        Self { pages, reader: Reader::default() }
    }

    /// Puts a post into the ring, as the program does.
    #[cfg(test)]
    pub(super) fn put(&self, writer: &mut softrdma_wire::Writer, post: &Post<'_>) {
        assert!(writer.put(self.pages.posts(), post).expect("a post"));
    }

    /// Looks for posts. Returns whether there are any.
    pub(super) fn look(&mut self) -> Result<bool, Error> {
        self.reader.look(self.pages.posts())
    }

    /// Whether posts were seen that were not taken.
    pub(super) const fn has_seen(&self) -> bool {
        self.reader.has_seen()
    }

    /// Takes the next of the posts that were seen.
    pub(super) fn take(&mut self) -> Result<Option<Post<'_>>, Error> {
        self.reader.take(self.pages.posts())
    }

    /// Says that the thread sleeps, and looks once more.
    pub(super) fn fall_asleep(&mut self) -> Result<bool, Error> {
        self.pages.posts().fall_asleep();
        self.look()
    }

    /// Says that the thread looks for posts by itself.
    pub(super) fn wake_up(&self) {
        self.pages.posts().wake_up();
    }
}

/// A queue's page as the model sees it.
///
/// The fabric keeps its own positions. It believes the program's position only as far as it is
/// possible.
pub(super) struct Shown {
    place: Arc<Place>,
    /// How many completions the program has taken, when the fabric last looked.
    taken: AtomicU32,
    /// How many completions the program was shown.
    shown: AtomicU32,
}

impl Shown {
    pub(super) fn new(place: Arc<Place>) -> Self {
        Self { place, taken: AtomicU32::new(0), shown: AtomicU32::new(0) }
    }

    /// Returns how many more completions were taken, or `None` if that is impossible.
    fn more(&self, position: u32) -> Option<u32> {
        let taken = self.taken.load(Relaxed);
        let more = position.wrapping_sub(taken);
        (more <= self.shown.load(Relaxed).wrapping_sub(taken)).then_some(more)
    }

    fn advance(&self, position: u32) -> usize {
        let more = self.more(position).unwrap_or(0);
        self.taken.store(self.taken.load(Relaxed).wrapping_add(more), Relaxed);
        more as usize
    }
}

impl Mirror for Shown {
    fn look(&self) -> Look {
        let page = self.place.page();
        // The program writes these in the opposite order, so this count of taken completions is not
        // less than the arming's.
        let arming = page.take_arming();
        let taken = page.taken();
        let before = arming.map_or(0, |(position, _)| self.advance(position));
        let armed = arming.map(|(_, solicited)| if solicited { Arming::Solicited } else { Arming::All });
        Look { before, armed, after: self.advance(taken) }
    }

    fn show(&self, completion: &Completion, detail: Detail) -> bool {
        let shown = self.shown.load(Relaxed);
        if shown.wrapping_sub(self.taken.load(Relaxed)) >= SHOWN {
            return false;
        }
        self.place.page().show(shown, &translate::completion(completion, detail));
        self.shown.store(shown.wrapping_add(1), Relaxed);
        true
    }

    fn ask(&self, calls: Calls) {
        let Calls { polls, arms } = calls;
        self.place.page().set_calls(if polls { POLLS } else { 0 } | if arms { ARMS } else { 0 });
    }
}
