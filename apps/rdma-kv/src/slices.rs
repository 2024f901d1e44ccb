use std::io;
use std::ops::Range;
use std::sync::Arc;

use rdma_conn::{Access, Descriptors, RegisteredBuffer, Stream};

use crate::memory::Memory;
use crate::transport::Buffer;

/// Registered memory of a stream, or of all streams in its protection domain: one registration, or
/// several in a row ([`Memory::in_slices`]).
#[derive(Debug)]
pub struct Slices<B: Descriptors> {
    /// Of one length, but for the last.
    slices: Arc<[Arc<RegisteredBuffer<B>>]>,
    each: usize,
    len: usize,
}

impl<B: Descriptors> Clone for Slices<B> {
    fn clone(&self) -> Self {
        Self { slices: Arc::clone(&self.slices), ..*self }
    }
}

impl<B: Descriptors> Slices<B> {
    pub(crate) fn one(buffer: RegisteredBuffer<B>) -> Self {
        let len = buffer.len();
        Self { slices: Arc::new([Arc::new(buffer)]), each: len, len }
    }

    /// Registers each slice of the memory. If one is refused, none stays registered.
    pub(crate) fn register(stream: &Stream<B>, memory: &Memory) -> io::Result<Self> {
        let slices = memory.slices().map(|slice| {
            Ok::<_, rdma_conn::Error>(Arc::new(stream.register_memory(slice, Access::REMOTE_WRITE)?))
        });
        let slices: Arc<[_]> = slices.collect::<Result<_, _>>()?;
        if slices.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { slices, each: memory.slice_len(), len: memory.len() })
    }

    pub(crate) fn first(&self) -> Option<&Arc<RegisteredBuffer<B>>> {
        self.slices.first()
    }

    pub(crate) fn parts(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (&Arc<RegisteredBuffer<B>>, Range<usize>)> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let index = at.checked_div(self.each)?;
            let slice = self.slices.get(index)?;
            let start = index * self.each;
            let end = range.end.min(start.saturating_add(slice.len()));
            let inside = at - start..end - start;
            at = end;
            Some((slice, inside))
        })
    }

    fn inside(&self, offset: usize, len: usize) -> Option<Range<usize>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len)?;
        Some(offset..end)
    }

    /// Copies `from` to `offset` on, even if the memory is in use. False if it does not all fit.
    #[must_use]
    pub(crate) fn put(&self, offset: usize, mut from: &[u8]) -> bool {
        let Some(range) = self.inside(offset, from.len()) else { return false };
        self.parts(range).all(|(slice, part)| {
            let (first, rest) = from.split_at(part.len());
            from = rest;
            slice.memory().write(part.start, first)
        })
    }
}

impl<B: Descriptors> Buffer for Slices<B> {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, mut into: &mut [u8]) -> bool {
        let Some(range) = self.inside(offset, into.len()) else { return false };
        self.parts(range).all(|(slice, part)| {
            let (first, rest) = std::mem::take(&mut into).split_at_mut(part.len());
            into = rest;
            slice.read(part.start, first)
        })
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        let Some(slices) = Arc::get_mut(&mut self.slices) else { return false };
        let unused = slices.iter_mut().all(|slice| Arc::get_mut(slice).is_some());
        unused && self.put(offset, from)
    }
}
