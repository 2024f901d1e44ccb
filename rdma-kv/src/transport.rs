//! Transports of a client: streams over RDMA, and TCP.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rdma_conn::{Access, CallerMemory, Descriptors, Received, RegisteredBuffer, Stream};

use crate::memory::Memory;

/// Memory for values, in which a program reads and writes them by copying.
pub trait Buffer {
    /// Returns its length in bytes.
    fn len(&self) -> usize;

    /// Returns whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if they are not all inside.
    #[must_use]
    fn read(&self, offset: usize, into: &mut [u8]) -> bool;

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not all fit, or the device or the server uses it.
    #[must_use]
    fn write(&mut self, offset: usize, from: &[u8]) -> bool;
}

/// A byte stream that can receive into memory of its own kind, and send from it.
pub trait Transport: Read + Write {
    /// That memory.
    type Buffer: Buffer;

    /// Makes `len` bytes of it, all zero.
    ///
    /// # Errors
    /// There is no such memory.
    fn buffer(&self, len: usize) -> io::Result<Self::Buffer>;

    /// Makes it of memory that exists.
    ///
    /// # Errors
    /// That has no bytes, or cannot be used.
    fn register(&self, memory: Memory) -> io::Result<Self::Buffer>;

    /// Waits until `ahead`, which was read before, and the bytes of the stream behind it are in `range`. Returns how many the peer wrote
    /// there itself, and how many were copied.
    ///
    /// # Errors
    /// The stream ended before, or a time-out passed, or the range is not inside of the buffer.
    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Self::Buffer,
        range: Range<usize>,
    ) -> io::Result<Received>;

    /// Sends the bytes of `range`, from where they are if it can. Returns how many were not copied.
    ///
    /// # Errors
    /// The stream ended before, or a time-out passed.
    fn send(&mut self, buffer: &Self::Buffer, range: Range<usize>) -> io::Result<u64>;

    /// Waits until nothing uses the memory that was sent from.
    ///
    /// # Errors
    /// The stream ended before, or a time-out passed.
    fn returned(&mut self, buffer: &Self::Buffer) -> io::Result<()>;

    /// Limits how long each wait may take; `None` waits for ever.
    ///
    /// # Errors
    /// The time-out is zero.
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;
}

impl<B: Descriptors> Buffer for Arc<RegisteredBuffer<B>> {
    fn len(&self) -> usize {
        RegisteredBuffer::len(self)
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        RegisteredBuffer::read(self, offset, into)
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        Self::get_mut(self).is_some_and(|buffer| buffer.write(offset, from))
    }
}

impl<B: Descriptors> Transport for Stream<B> {
    type Buffer = Arc<RegisteredBuffer<B>>;

    fn buffer(&self, len: usize) -> io::Result<Self::Buffer> {
        Ok(Arc::new(self.register_landing(len)?))
    }

    fn register(&self, memory: Memory) -> io::Result<Self::Buffer> {
        Ok(Arc::new(self.register_memory(memory, Access::REMOTE_WRITE)?))
    }

    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Self::Buffer,
        range: Range<usize>,
    ) -> io::Result<Received> {
        if !buffer.memory().write(range.start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut received = Self::receive(self, buffer, range.start + ahead.len()..range.end)?;
        received.copied += ahead.len() as u64;
        Ok(received)
    }

    fn send(&mut self, buffer: &Self::Buffer, mut range: Range<usize>) -> io::Result<u64> {
        let wanted = range.len() as u64;
        while !range.is_empty() {
            range.start += self.lend(buffer, range.clone())?;
        }
        Ok(wanted)
    }

    fn returned(&mut self, buffer: &Self::Buffer) -> io::Result<()> {
        Ok(Self::returned(self, buffer)?)
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout);
        self.set_write_timeout(timeout);
        Ok(())
    }
}

impl Buffer for Memory {
    fn len(&self) -> usize {
        self.shared().len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.shared().read(offset, into)
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        self.shared().write(offset, from)
    }
}

/// Bytes on their way between the kernel and memory that others may change, for which the kernel takes no reference.
const BOUNCED: usize = 16 << 10;

/// The kernel copies, and nothing is counted as landed or lent.
impl Transport for TcpStream {
    type Buffer = Memory;

    fn buffer(&self, len: usize) -> io::Result<Memory> {
        self.register(vec![0; len].into())
    }

    fn register(&self, memory: Memory) -> io::Result<Memory> {
        if memory.is_empty() { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(memory) }
    }

    fn receive(&mut self, ahead: &[u8], buffer: &mut Memory, range: Range<usize>) -> io::Result<Received> {
        let (Range { start, end }, mut bytes) = (range, [0; BOUNCED]);
        let mut at = start.saturating_add(ahead.len());
        if at > end || end > buffer.len() || !buffer.write(start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        while at < end {
            let part = bytes.get_mut(..BOUNCED.min(end - at)).unwrap_or_default();
            let read = match self.read(part) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let _inside = buffer.write(at, part.get(..read).unwrap_or_default());
            at += read;
        }
        let mut received = Received::default();
        received.copied = (end - start) as u64;
        Ok(received)
    }

    fn send(&mut self, buffer: &Memory, mut range: Range<usize>) -> io::Result<u64> {
        let mut bytes = [0; BOUNCED];
        while !range.is_empty() {
            let part = bytes.get_mut(..BOUNCED.min(range.len())).unwrap_or_default();
            if !buffer.read(range.start, part) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            self.write_all(part)?;
            range.start += part.len();
        }
        Ok(0)
    }

    fn returned(&mut self, _buffer: &Memory) -> io::Result<()> {
        Ok(())
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }
}
