//! The bytes of a work request: nearly always one part of one region, or several that make one
//! message.

use std::sync::Arc;

use crate::model::base::ids::RegionId;

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
    pub(in crate::model) fn list(&self) -> &[Part] {
        match self {
            Self::One(part) => std::slice::from_ref(part),
            Self::Several(parts) => parts,
        }
    }

    pub(crate) fn len(&self) -> usize {
        // Saturating: elements are another process's numbers, and their sum must not wrap.
        self.list().iter().fold(0, |sum, part| sum.saturating_add(part.len))
    }

    pub(in crate::model) fn touch(&self, region: RegionId) -> bool {
        self.list().iter().any(|part| part.region == region)
    }

    /// Returns the parts of at most `len` bytes after `skip`; none is empty.
    pub(in crate::model) fn within(
        &self,
        mut skip: usize,
        mut len: usize,
    ) -> impl Iterator<Item = Part> + '_ {
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
        // A list without elements is one part without bytes.
        let first = parts.next().unwrap_or(Part { region: RegionId::NONE, offset: 0, len: 0 });
        match parts.next() {
            None => Self::One(first),
            Some(second) => Self::Several([first, second].into_iter().chain(parts).collect()),
        }
    }
}
