use std::io::{self, ErrorKind, Write};

use bytes::{Buf, BytesMut};

use crate::buffer::Buffer;

/// Replies that a client has not taken yet, oldest first.
#[derive(Debug)]
pub struct Replies {
    buffer: Buffer,
    budget: usize,
}

/// Why bytes could not be sent to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The client has left or never existed.
    #[error("there is no such client: it has left")]
    NoSuchClient,
    /// The client does not read.
    #[error(
        "{waiting} bytes of replies wait for the client, which reads too slowly; at most {budget} may wait: send again when it \
         has read, or close the client"
    )]
    Full {
        /// Bytes that wait.
        waiting: usize,
        /// Bytes that may wait: [`reply_budget`](crate::ServerSettings::reply_budget).
        budget: usize,
    },
}

impl Replies {
    pub(crate) fn new(budget: usize) -> Self {
        Self { buffer: Buffer::default(), budget }
    }

    /// Appends bytes. The budget never refuses them; see [`Replies::is_full`].
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.buffer.bytes.extend_from_slice(bytes);
    }

    /// Returns the buffer, for encoders that append to one. Do not change the bytes in it.
    pub fn buffer(&mut self) -> &mut BytesMut {
        &mut self.buffer.bytes
    }

    /// Returns how many bytes wait.
    pub fn len(&self) -> usize {
        self.buffer.bytes.len()
    }

    /// Returns whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.buffer.bytes.is_empty()
    }

    /// Returns whether the budget is used up. A service then stops and returns
    /// [`Flow::Again`](crate::Flow::Again).
    pub fn is_full(&self) -> bool {
        self.buffer.bytes.len() >= self.budget
    }

    pub(crate) fn memory(&self) -> usize {
        self.buffer.memory()
    }

    pub(crate) fn borrow_from(&mut self, spare: &mut Buffer) {
        self.buffer.borrow_from(spare);
    }

    pub(crate) fn settle(&mut self, spare: &mut Buffer) {
        self.buffer.settle(spare);
    }

    /// Appends a message that is no reply to a current command.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), SendError> {
        // A message longer than the budget can be sent when nothing else waits.
        let fits = self.is_empty() || self.len().saturating_add(bytes.len()) <= self.budget;
        if !fits {
            return Err(SendError::Full { waiting: self.len(), budget: self.budget });
        }
        self.buffer.bytes.extend_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn write_to(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.buffer.bytes.is_empty() {
            match to.write(&self.buffer.bytes) {
                // Not 0: a session takes something, would block, or fails.
                Ok(written) => self.buffer.bytes.advance(written),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The write handler continues when there is room.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
