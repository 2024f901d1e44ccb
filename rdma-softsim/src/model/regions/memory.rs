//! Memory of regions, in this process and in others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rdma_memory::{CallerMemory, SharedMemory, Zeroed};

use crate::error::Error;
use crate::load::Load;

/// The bytes of a region in this process. They outlive its registration while a handle reads them.
pub(crate) enum Memory {
    /// Allocated for the region.
    Own(Zeroed),
    /// A program's memory.
    Caller(Box<dyn CallerMemory>),
}

impl Memory {
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        Zeroed::new(len).map(Self::Own).ok_or(Error::Allocation(len))
    }

    pub(crate) fn len(&self) -> usize {
        self.shared().len()
    }

    /// Returns the bytes, or none if the program's code panics when asked for them. Only requests
    /// that need them then fail.
    pub(crate) fn shared(&self) -> SharedMemory<'_> {
        match self {
            Self::Own(memory) => memory.shared(),
            Self::Caller(memory) => {
                // Within a call of the model, which a panic would leave half done.
                catch_unwind(AssertUnwindSafe(|| memory.shared())).unwrap_or_else(|_| SharedMemory::new(&[]))
            }
        }
    }
}

/// Bytes of a region in another process: a program that this fabric serves.
///
/// They are accessed without the fabric's lock, because a call may take as long as the process lets
/// it. It must not call the fabric.
pub trait ForeignMemory: Send + Sync {
    /// Takes the next step of `load`, which accesses this memory ([`Load::step`]). Either at once,
    /// and returns the load. Or later, on another thread, which then lets it [continue](Load::go).
    fn carry(&self, mut load: Load) -> Option<Load> {
        load.step();
        Some(load)
    }

    /// Returns how many accesses to the memory of its process have ended, whatever region they were
    /// to. Loads may wait for each other there: [`Parameters::reach`](crate::Parameters::reach)
    /// begins anew whenever this changes. By default only the steps of the load itself count.
    fn progress(&self) -> u64 {
        0
    }

    /// Copies `into.len()` bytes at `offset` out, within the region. Returns false if they cannot
    /// be accessed, because their process has ended or has unmapped them.
    fn read(&self, offset: usize, into: &mut [u8]) -> bool;

    /// Copies `from` to `offset`, within the region. Returns false if the bytes cannot be accessed;
    /// some may have changed.
    fn write(&self, offset: usize, from: &[u8]) -> bool;
}

#[derive(Clone)]
pub(crate) enum Bytes {
    /// In this process; a handle may read them too.
    Own(Arc<Memory>),
    /// In another process.
    Foreign { memory: Arc<dyn ForeignMemory>, len: usize },
}

impl Bytes {
    pub(in crate::model) fn len(&self) -> usize {
        match self {
            Self::Own(memory) => memory.len(),
            Self::Foreign { len, .. } => *len,
        }
    }

    /// Returns the memory, if it is in another process.
    pub(in crate::model) fn foreign(&self) -> Option<&Arc<dyn ForeignMemory>> {
        match self {
            Self::Own(_) => None,
            Self::Foreign { memory, .. } => Some(memory),
        }
    }

    /// Copies bytes out. Returns false if they are not all inside, or are in another process, which
    /// cannot be accessed under the lock.
    #[must_use]
    pub(in crate::model) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        matches!(self, Self::Own(memory) if memory.shared().read(offset, into))
    }

    /// Copies bytes in. Returns false if they do not all fit, or are in another process.
    #[must_use]
    pub(in crate::model) fn write(&self, offset: usize, from: &[u8]) -> bool {
        matches!(self, Self::Own(memory) if memory.shared().write(offset, from))
    }

    /// Reads like [`Bytes::read`], also in another process: never under the lock.
    #[must_use]
    pub(in crate::model) fn reach_read(&self, offset: usize, into: &mut [u8]) -> bool {
        match self {
            Self::Own(_) => self.read(offset, into),
            // Implementations may rely on it: they are asked only for bytes within the region.
            Self::Foreign { memory, len } => inside(offset, into.len(), *len) && memory.read(offset, into),
        }
    }

    /// Writes like [`Bytes::write`], also in another process: never under the lock.
    #[must_use]
    pub(in crate::model) fn reach_write(&self, offset: usize, from: &[u8]) -> bool {
        match self {
            Self::Own(_) => self.write(offset, from),
            Self::Foreign { memory, len } => inside(offset, from.len(), *len) && memory.write(offset, from),
        }
    }
}

pub(in crate::model) fn inside(offset: usize, count: usize, len: usize) -> bool {
    offset.checked_add(count).is_some_and(|end| end <= len)
}

/// The end of a copy that could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Unreachable {
    Source,
    Target,
}

/// Copies `len` bytes from one region of this process to another.
pub(in crate::model) fn copy(
    (from, from_offset): (&Bytes, usize),
    (to, to_offset): (&Bytes, usize),
    len: usize,
) -> Result<(), Unreachable> {
    // `copy_to` does not say which end failed. After this check it is the target.
    if !inside(from_offset, len, from.len()) {
        return Err(Unreachable::Source);
    }
    // Memory of another process is not accessed under the lock.
    let (Bytes::Own(from), Bytes::Own(to)) = (from, to) else { return Err(Unreachable::Target) };
    let copied = from.shared().copy_to(from_offset, to.shared(), to_offset, len);
    if copied { Ok(()) } else { Err(Unreachable::Target) }
}
