//! The moving of a message's bytes with an end in another process.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::model::regions::memory::{Bytes, ForeignMemory, Unreachable};
use crate::request::Atomic;

/// Bytes moved in one step.
const STEP: usize = 256 * 1024;
/// Bytes moved in one step if many are held already. Each queue pair then holds a page.
pub(in crate::model) const SMALL_STEP: usize = 4096;
/// Bytes of all messages held between two steps, and for a capture, before steps become small.
const MOST_HELD: usize = 64 << 20;
/// Buffers of [`STEP`] bytes that are kept for later messages.
const MOST_SPARE: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum End {
    Requester,
    Responder,
}

/// The position of a message's mover.
struct Place {
    /// The end whose memory it accesses, now or next.
    at: End,
    inside: bool,
    /// Whether the message has ended, so that no step follows.
    ended: bool,
    /// How many steps it has taken.
    steps: u64,
}

/// What its mover and the model share of a message.
pub(in crate::model) struct Track {
    place: Mutex<Place>,
    reads: bool,
    origin: Origin,
    /// The target; `None` if the bytes are only kept.
    target: Option<Vec<Stretch>>,
}

/// How far a message is: the steps that it has taken, and the accesses that have ended in the
/// memory that the next one is in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct Progress(u64, u64);

impl Track {
    fn new(reads: bool, origin: Origin, target: Option<Vec<Stretch>>) -> Self {
        let at = match (&origin, reads) {
            (Origin::Memory(_), false) => End::Requester,
            _ => End::Responder,
        };
        let place = Mutex::new(Place { at, inside: false, ended: false, steps: 0 });
        Self { place, reads, origin, target }
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        // Held for assignments only, so that a panic elsewhere leaves the place whole.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next step. Returns false if the message has ended.
    fn enter(&self, at: End) -> bool {
        let mut place = self.lock();
        // Under one lock, so that `end` knows whether an access is in progress.
        (place.at, place.inside) = (at, !place.ended);
        place.inside
    }

    fn leave(&self, next: End) {
        let mut place = self.lock();
        (place.at, place.inside) = (next, false);
        place.steps += 1;
    }

    /// Ends the message. Returns the end whose memory is being accessed, if any.
    pub(in crate::model) fn end(&self) -> Option<End> {
        let mut place = self.lock();
        place.ended = true;
        place.inside.then_some(place.at)
    }

    pub(in crate::model) fn at(&self) -> End {
        self.lock().at
    }

    /// Returns whether a step in the memory of this end is in progress.
    pub(in crate::model) fn is_inside(&self, end: End) -> bool {
        let place = self.lock();
        place.inside && place.at == end
    }

    /// Returns a value that changes whenever something happens in the memory that the message waits
    /// for, to the message or to others before it.
    pub(in crate::model) fn progress(&self) -> Progress {
        let Place { at, steps, .. } = *self.lock();
        let list: &[Stretch] = match (&self.origin, &self.target) {
            (Origin::Memory(list), _) if at == self.source_end() => list,
            (_, Some(list)) => list,
            (_, None) => &[],
        };
        // All regions of a queue pair are of one program.
        let memory = list.iter().find_map(|stretch| stretch.memory.foreign());
        Progress(steps, memory.map_or(0, |memory| memory.progress()))
    }

    const fn source_end(&self) -> End {
        if self.reads { End::Responder } else { End::Requester }
    }

    const fn target_end(&self) -> End {
        if self.reads { End::Requester } else { End::Responder }
    }
}

/// A part of a region that can be accessed without the model.
pub(in crate::model) struct Stretch {
    pub(in crate::model) memory: Bytes,
    pub(in crate::model) offset: usize,
    pub(in crate::model) len: usize,
}

/// Returns the stretches of `len` bytes after `skip`.
fn within(list: &[Stretch], mut skip: usize, mut len: usize) -> impl Iterator<Item = (&Bytes, usize, usize)> {
    list.iter().filter_map(move |stretch| {
        let skipped = skip.min(stretch.len);
        skip -= skipped;
        let taken = len.min(stretch.len - skipped);
        len -= taken;
        (taken > 0).then_some((&stretch.memory, stretch.offset + skipped, taken))
    })
}

pub(in crate::model) enum Origin {
    Memory(Vec<Stretch>),
    Inline(Vec<u8>),
}

/// What all messages share.
#[derive(Default)]
pub(in crate::model) struct Store {
    /// How many bytes they hold.
    pub(in crate::model) held: AtomicUsize,
    /// Buffers of [`STEP`] bytes that no message uses. A fresh one costs a page fault for each of
    /// its pages.
    spare: Mutex<Vec<Vec<u8>>>,
}

impl Store {
    pub(in crate::model) fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that count as held while this exists.
pub(in crate::model) struct Held {
    store: Arc<Store>,
    own: usize,
    /// Holds bytes between the ends of a message.
    buffer: Vec<u8>,
}

impl Held {
    pub(in crate::model) fn new(store: &Arc<Store>) -> Self {
        Self { store: Arc::clone(store), own: 0, buffer: Vec::new() }
    }

    pub(in crate::model) fn add(&mut self, bytes: usize) {
        self.own += bytes;
        // Relaxed: the sum bounds memory, and orders nothing.
        self.store.held.fetch_add(bytes, Relaxed);
    }

    /// Returns whether all together are not too many.
    pub(in crate::model) fn has_room(&self) -> bool {
        self.store.held.load(Relaxed) < MOST_HELD
    }

    /// Makes the buffer at least this long. It may have bytes of earlier messages.
    pub(in crate::model) fn widen(&mut self, len: usize) {
        if self.buffer.len() < len {
            let spare = if len == STEP { self.store.spare().pop() } else { None };
            // Zeroed by the allocator, once.
            self.buffer = spare.unwrap_or_else(|| vec![0; len]);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.store.held.fetch_sub(self.own, Relaxed);
        if self.buffer.len() == STEP {
            let mut spare = self.store.spare();
            if spare.len() < MOST_SPARE {
                spare.push(core::mem::take(&mut self.buffer));
            }
        }
    }
}

pub(crate) struct Freight {
    number: u64,
    track: Arc<Track>,
    len: usize,
    done: usize,
    /// Number of bytes between the ends, in the buffer of `held`.
    filled: usize,
    /// The bytes that are kept, for a capture or as those of a datagram.
    seen: Option<Vec<u8>>,
    /// Whether they are kept however many are held.
    keeps: bool,
    held: Held,
    /// Bytes per step, fixed by the first step.
    most: usize,
    unreachable: Option<Unreachable>,
    /// The change of what is read, of an atomic operation: in the same step, so that no other
    /// access of the fabric comes between.
    pub(in crate::model) atomic: Option<Atomic>,
}

pub(in crate::model) struct Outcome {
    /// `None` if its bytes have no target.
    pub(in crate::model) moved: Option<Result<(), Unreachable>>,
    /// The bytes for a capture.
    pub(in crate::model) seen: Option<Vec<u8>>,
}

impl Freight {
    /// Starts a message.
    pub(in crate::model) fn new(
        number: u64,
        reads: bool,
        (origin, target, len): (Origin, Option<Vec<Stretch>>, usize),
        [captured, keeps]: [bool; 2],
        store: &Arc<Store>,
    ) -> Self {
        Self {
            number,
            // Inline bytes are in the request, where a capture finds them.
            seen: ((captured || keeps) && matches!(origin, Origin::Memory(_))).then(Vec::new),
            track: Arc::new(Track::new(reads, origin, target)),
            keeps,
            len,
            done: 0,
            filled: 0,
            held: Held::new(store),
            most: 0,
            unreachable: None,
            atomic: None,
        }
    }

    pub(in crate::model) const fn number(&self) -> u64 {
        self.number
    }

    pub(in crate::model) const fn track(&self) -> &Arc<Track> {
        &self.track
    }

    pub(in crate::model) fn end(mut self) -> Outcome {
        let moved = match self.unreachable {
            Some(unreachable) => Some(Err(unreachable)),
            None => self.track.target.is_some().then_some(Ok(())),
        };
        Outcome { moved, seen: self.seen.take() }
    }

    fn reads_next(&self) -> bool {
        self.filled == 0 && matches!(self.track.origin, Origin::Memory(_))
    }

    fn next_end(&self) -> End {
        if self.reads_next() { self.track.source_end() } else { self.track.target_end() }
    }

    pub(crate) fn is_at_its_end(&self) -> bool {
        self.unreachable.is_some()
            || self.done >= self.len
            || (self.track.target.is_none() && !matches!(self.track.origin, Origin::Memory(_)))
            || self.track.lock().ended
    }

    /// The memory in another process that the next step reaches into.
    pub(crate) fn next(&self) -> Option<Arc<dyn ForeignMemory>> {
        let list: &[Stretch] = match (&self.track.origin, &self.track.target) {
            (Origin::Memory(list), _) if self.reads_next() => list,
            (_, Some(list)) => list,
            (_, None) => &[],
        };
        within(list, self.done, self.len - self.done)
            .find_map(|(memory, ..)| memory.foreign())
            .map(Arc::clone)
    }

    /// Moves some bytes out of the memory of one end, or into that of the other. Takes as long as
    /// that process lets it.
    pub(crate) fn step(&mut self) {
        let end = self.next_end();
        // Once the message has ended, its memory may be its owner's again: no access begins.
        if self.is_at_its_end() || !self.track.enter(end) {
            return;
        }
        let reached = if self.reads_next() { self.fetch() } else { self.put() };
        if !reached {
            let source = end == self.track.source_end();
            self.unreachable = Some(if source { Unreachable::Source } else { Unreachable::Target });
        }
        self.track.leave(self.next_end());
    }

    fn fetch(&mut self) -> bool {
        let Origin::Memory(list) = &self.track.origin else { return true };
        // Once a message, which counts as held by its step until it is dropped.
        if self.most == 0 {
            self.most = if self.held.has_room() { STEP } else { SMALL_STEP }.min(self.len);
            self.held.add(self.most);
        }
        let len = self.most.min(self.len - self.done);
        self.held.widen(len);
        let Some(mut rest) = self.held.buffer.get_mut(..len) else { return false };
        let reached = within(list, self.done, len).all(|(memory, offset, count)| {
            let Some((piece, behind)) = core::mem::take(&mut rest).split_at_mut_checked(count) else {
                return false;
            };
            rest = behind;
            memory.reach_read(offset, piece)
        });
        if !reached {
            return false;
        }
        if let Some(atomic) = self.atomic
            && let Some(found) = self.held.buffer.first_chunk()
            && let Some(new) = atomic.apply(*found)
        {
            // One write: `Pairs::route` gives an atomic operation one part of one region.
            // A message that has ended while its page came is not executed.
            let changed = !self.track.lock().ended
                && within(list, self.done, len).all(|(memory, offset, _)| memory.reach_write(offset, &new));
            if !changed {
                return false;
            }
        }
        // A capture has fewer bytes rather than memory without bound.
        if let Some(seen) = &mut self.seen
            && (self.keeps || self.held.has_room())
        {
            self.held.add(len);
            seen.extend_from_slice(self.held.buffer.get(..len).unwrap_or_default());
        }
        // Only read, for a capture or as a datagram: nothing is put.
        if self.track.target.is_none() {
            self.done += len;
        } else {
            self.filled = len;
        }
        true
    }

    fn put(&mut self) -> bool {
        let bytes: &[u8] = match &self.track.origin {
            Origin::Inline(bytes) => bytes,
            Origin::Memory(_) => self.held.buffer.get(..self.filled).unwrap_or_default(),
        };
        // In one step, also inline bytes: these are few (`max_inline`, or a datagram).
        let mut rest = bytes;
        let list = self.track.target.as_deref().unwrap_or_default();
        let reached = within(list, self.done, bytes.len()).all(|(memory, offset, count)| {
            let Some((piece, behind)) = rest.split_at_checked(count) else { return false };
            rest = behind;
            memory.reach_write(offset, piece)
        });
        self.done += bytes.len();
        self.filled = 0;
        reached
    }
}
