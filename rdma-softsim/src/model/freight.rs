//! The bytes of a message with an end in another process, as somebody moves them.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::{Bytes, ForeignMemory, Unreachable};

/// Bytes moved in one step, ...
const STEP: usize = 256 * 1024;
/// ... and where so many are held already: each queue pair holds a page, whatever the others do.
const SMALL_STEP: usize = 4096;
/// Bytes of all messages that are held between two steps, and for a capture, before steps become small.
const MOST_HELD: usize = 64 << 20;

/// An end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Requester,
    Responder,
}

/// Where whoever moves a message is.
struct Place {
    /// In whose memory it is, or will be next.
    at: End,
    inside: bool,
    /// The message has ended: no step follows.
    ended: bool,
}

/// What those who move a message and the model both know of it.
pub(super) struct Track(Mutex<Place>);

impl Track {
    /// The first step is in the memory of this end.
    fn new(at: End) -> Self {
        Self(Mutex::new(Place { at, inside: false, ended: false }))
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next step begins, unless the message has ended.
    fn enter(&self, at: End) -> bool {
        let mut place = self.lock();
        (place.at, place.inside) = (at, !place.ended);
        place.inside
    }

    /// It is over.
    fn leave(&self, next: End) {
        let mut place = self.lock();
        (place.at, place.inside) = (next, false);
    }

    /// The message has ended. Returns in whose memory a step is under way.
    pub(super) fn end(&self) -> Option<End> {
        let mut place = self.lock();
        place.ended = true;
        place.inside.then_some(place.at)
    }

    pub(super) fn at(&self) -> End {
        self.lock().at
    }

    /// Returns whether a step in the memory of this end is under way.
    pub(super) fn is_inside(&self, end: End) -> bool {
        let place = self.lock();
        place.inside && place.at == end
    }
}

/// A part of a region that is reached without the model.
pub(super) struct Stretch {
    pub(super) memory: Bytes,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The stretches of the bytes from `skip` on, `len` of them.
fn within(list: &[Stretch], mut skip: usize, mut len: usize) -> impl Iterator<Item = (&Bytes, usize, usize)> {
    list.iter().filter_map(move |stretch| {
        let skipped = skip.min(stretch.len);
        skip -= skipped;
        let taken = len.min(stretch.len - skipped);
        len -= taken;
        (taken > 0).then_some((&stretch.memory, stretch.offset + skipped, taken))
    })
}

/// Where the bytes come from.
pub(super) enum Origin {
    Memory(Vec<Stretch>),
    Inline(Vec<u8>),
}

/// The bytes of a message on their way.
pub(crate) struct Freight {
    number: u64,
    track: Arc<Track>,
    reads: bool,
    origin: Origin,
    /// Where they go; nowhere if only a capture wants to see them.
    target: Option<Vec<Stretch>>,
    len: usize,
    /// How many have arrived.
    done: usize,
    /// Holds those that are on their way, ...
    buffer: Vec<u8>,
    /// ... so many.
    filled: usize,
    /// What a capture sees of them.
    seen: Option<Vec<u8>>,
    /// Bytes that all messages hold, and how many of these are this one's.
    held: Arc<AtomicUsize>,
    own: usize,
    /// How many move in one step, once there was one.
    most: usize,
    unreachable: Option<Unreachable>,
}

impl Drop for Freight {
    fn drop(&mut self) {
        self.held.fetch_sub(self.own, Relaxed);
    }
}

/// What becomes of a message.
pub(super) struct Outcome {
    /// None if its bytes go nowhere.
    pub(super) moved: Option<Result<(), Unreachable>>,
    /// What a capture has seen of them.
    pub(super) seen: Option<Vec<u8>>,
}

impl Freight {
    /// A message on its way. `held` counts the bytes of all messages.
    pub(super) fn new(
        number: u64,
        reads: bool,
        (origin, target, len): (Origin, Option<Vec<Stretch>>, usize),
        captured: bool,
        held: &Arc<AtomicUsize>,
    ) -> Self {
        let at = match (&origin, reads) {
            (Origin::Memory(_), false) => End::Requester,
            _ => End::Responder,
        };
        Self {
            number,
            track: Arc::new(Track::new(at)),
            reads,
            seen: (captured && matches!(origin, Origin::Memory(_))).then(Vec::new),
            origin,
            target,
            len,
            done: 0,
            buffer: Vec::new(),
            filled: 0,
            held: Arc::clone(held),
            own: 0,
            most: 0,
            unreachable: None,
        }
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) const fn track(&self) -> &Arc<Track> {
        &self.track
    }

    /// What has become of it.
    pub(super) fn end(mut self) -> Outcome {
        let moved = match self.unreachable {
            Some(unreachable) => Some(Err(unreachable)),
            None => self.target.is_some().then_some(Ok(())),
        };
        Outcome { moved, seen: self.seen.take() }
    }

    const fn source_end(&self) -> End {
        if self.reads { End::Responder } else { End::Requester }
    }

    const fn target_end(&self) -> End {
        if self.reads { End::Requester } else { End::Responder }
    }

    /// Whether the next step reads; else it writes.
    fn reads_next(&self) -> bool {
        self.filled == 0 && matches!(self.origin, Origin::Memory(_))
    }

    fn next_end(&self) -> End {
        if self.reads_next() { self.source_end() } else { self.target_end() }
    }

    /// Whether there is nothing left to do.
    pub(crate) fn is_at_its_end(&self) -> bool {
        self.unreachable.is_some()
            || self.done >= self.len
            || (self.target.is_none() && !matches!(self.origin, Origin::Memory(_)))
            || self.track.lock().ended
    }

    /// The memory in another process that the next step reaches into.
    pub(crate) fn next(&self) -> Option<Arc<dyn ForeignMemory>> {
        let list: &[Stretch] = match (&self.origin, &self.target) {
            (Origin::Memory(list), _) if self.reads_next() => list,
            (_, Some(list)) => list,
            (_, None) => &[],
        };
        let foreign = |memory: &Bytes| match memory {
            Bytes::Foreign { memory, .. } => Some(Arc::clone(memory)),
            Bytes::Own(_) => None,
        };
        within(list, self.done, self.len - self.done).find_map(|(memory, ..)| foreign(memory))
    }

    /// Moves some bytes out of the memory of one end, or into that of the other. Takes as long as that process lets it.
    pub(crate) fn step(&mut self) {
        let end = self.next_end();
        if self.is_at_its_end() || !self.track.enter(end) {
            return;
        }
        let reached = if self.reads_next() { self.fetch() } else { self.put() };
        if !reached {
            let source = end == self.source_end();
            self.unreachable = Some(if source { Unreachable::Source } else { Unreachable::Target });
        }
        self.track.leave(self.next_end());
    }

    fn fetch(&mut self) -> bool {
        let Origin::Memory(list) = &self.origin else { return true };
        if self.most == 0 {
            self.most = if self.held.load(Relaxed) < MOST_HELD { STEP } else { SMALL_STEP }.min(self.len);
            self.own = self.most;
            self.held.fetch_add(self.own, Relaxed);
        }
        let len = self.most.min(self.len - self.done);
        if self.buffer.len() < len {
            // Zeroed by the allocator, and once.
            self.buffer = vec![0; len];
        }
        let Some(mut rest) = self.buffer.get_mut(..len) else { return false };
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
        if let Some(seen) = &mut self.seen
            && self.held.load(Relaxed) < MOST_HELD
        {
            self.own += len;
            self.held.fetch_add(len, Relaxed);
            seen.extend_from_slice(self.buffer.get(..len).unwrap_or_default());
        }
        if self.target.is_none() {
            self.done += len;
        } else {
            self.filled = len;
        }
        true
    }

    fn put(&mut self) -> bool {
        let bytes: &[u8] = match &self.origin {
            Origin::Inline(bytes) => bytes,
            Origin::Memory(_) => self.buffer.get(..self.filled).unwrap_or_default(),
        };
        let mut rest = bytes;
        let list = self.target.as_deref().unwrap_or_default();
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
