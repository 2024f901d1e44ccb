//! A source that reads by a closure.

use std::io;

use rdma_snapshot::reader::Position;
use rdma_snapshot::wire::Content;
use rdma_snapshot::{Again, Piece, Source};

/// A source of unknown length that needs nothing to stop.
pub(crate) struct Reading<F> {
    pub(crate) read: F,
    /// Where it is in its history, if it has one.
    pub(crate) offset: Option<u64>,
    pub(crate) again: Option<Again>,
}

impl<F: FnMut(&mut [u8]) -> io::Result<Piece> + Send> Source for Reading<F> {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn total(&self) -> Option<u64> {
        None
    }
    fn position(&self) -> Option<Position> {
        self.offset.map(|offset| Position { history: [b'a'; 40], offset })
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        (self.read)(into)
    }
    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn again(&self) -> Option<Again> {
        self.again.clone()
    }
    fn offset(&self) -> Option<u64> {
        self.offset
    }
}
