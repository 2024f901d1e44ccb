//! The bytes of a work request: nearly always one part of one region, or several that make one
//! message.

use std::sync::Arc;

use rdma_backend::Access;

use super::memory::{Unreachable, copy};
use super::{Model, RegionId};

/// A part of a region, as posted.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) region: RegionId,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// The scatter-gather list of a work request.
#[derive(Clone)]
pub(crate) enum Parts {
    One(Part),
    Several(Arc<[Part]>),
}

impl Parts {
    pub(super) fn list(&self) -> &[Part] {
        match self {
            Self::One(part) => std::slice::from_ref(part),
            Self::Several(parts) => parts,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.list().iter().fold(0, |sum, part| sum.saturating_add(part.len))
    }

    pub(super) fn touch(&self, region: RegionId) -> bool {
        self.list().iter().any(|part| part.region == region)
    }

    /// Returns the parts of at most `len` bytes after `skip`; none is empty.
    pub(super) fn within(&self, mut skip: usize, mut len: usize) -> impl Iterator<Item = Part> + '_ {
        self.list().iter().filter_map(move |&Part { region, offset, len: all }| {
            let skipped = skip.min(all);
            skip -= skipped;
            let taken = len.min(all - skipped);
            len -= taken;
            (taken > 0).then_some(Part { region, offset: offset + skipped, len: taken })
        })
    }
}

impl FromIterator<Part> for Parts {
    fn from_iter<T: IntoIterator<Item = Part>>(parts: T) -> Self {
        let mut parts = parts.into_iter();
        let first = parts.next().unwrap_or(Part { region: RegionId::NONE, offset: 0, len: 0 });
        match parts.next() {
            None => Self::One(first),
            Some(second) => Self::Several([first, second].into_iter().chain(parts).collect()),
        }
    }
}

impl Model {
    /// Returns whether the first `len` bytes are all in regions that allow `access`.
    pub(super) fn allows(&self, parts: &Parts, len: usize, access: Access) -> bool {
        parts.within(0, len).all(|part| self.local(part.region, access).is_some())
    }

    /// Reads the first bytes. Returns false if some cannot be accessed.
    pub(super) fn gather(&self, parts: &Parts, into: &mut [u8]) -> bool {
        let mut rest = into;
        let len = rest.len();
        parts.within(0, len).all(|part| {
            let Some((piece, behind)) = core::mem::take(&mut rest).split_at_mut_checked(part.len) else {
                return false;
            };
            rest = behind;
            self.local(part.region, Access::NONE).is_some_and(|memory| memory.read(part.offset, piece))
        })
    }

    /// Writes `bytes` at offset `at`. Returns false if some cannot be accessed.
    pub(super) fn scatter(&self, parts: &Parts, at: usize, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        parts.within(at, bytes.len()).all(|part| {
            let Some((piece, behind)) = rest.split_at_checked(part.len) else { return false };
            rest = behind;
            self.local(part.region, Access::LOCAL_WRITE)
                .is_some_and(|memory| memory.write(part.offset, piece))
        })
    }

    /// Copies the first `len` bytes of one list to another, which must have room for them.
    pub(super) fn copy_parts(&self, from: &Parts, to: &Parts, len: usize) -> Result<(), Unreachable> {
        let mut done = 0;
        for part in from.within(0, len) {
            let source = self.local(part.region, Access::NONE).ok_or(Unreachable::Source)?;
            let mut offset = part.offset;
            for target in to.within(done, part.len) {
                let memory = self.local(target.region, Access::LOCAL_WRITE).ok_or(Unreachable::Target)?;
                copy((source, offset), (memory, target.offset), target.len)?;
                offset += target.len;
            }
            done += part.len;
        }
        Ok(())
    }
}
