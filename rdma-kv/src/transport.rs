//! Transports of a client: streams over RDMA, and TCP.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rdma_conn::{Descriptors, Received, RegisteredBuffer, Stream};

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

impl Buffer for Vec<u8> {
    fn len(&self) -> usize {
        self.len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let from = offset.checked_add(into.len()).and_then(|end| self.get(offset..end));
        from.map(|from| into.copy_from_slice(from)).is_some()
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        let into = offset.checked_add(from.len()).and_then(|end| self.get_mut(offset..end));
        into.map(|into| into.copy_from_slice(from)).is_some()
    }
}

/// Memory is the program's own here, and the kernel copies: nothing is counted as landed or lent.
impl Transport for TcpStream {
    type Buffer = Vec<u8>;

    fn buffer(&self, len: usize) -> io::Result<Vec<u8>> {
        Ok(vec![0; len])
    }

    fn receive(&mut self, ahead: &[u8], buffer: &mut Vec<u8>, range: Range<usize>) -> io::Result<Received> {
        let mut received = Received::default();
        received.copied = range.len() as u64;
        let into = buffer.get_mut(range).and_then(|into| into.split_at_mut_checked(ahead.len()));
        let (first, rest) = into.ok_or(io::ErrorKind::InvalidInput)?;
        first.copy_from_slice(ahead);
        self.read_exact(rest)?;
        Ok(received)
    }

    fn send(&mut self, buffer: &Vec<u8>, range: Range<usize>) -> io::Result<u64> {
        self.write_all(buffer.get(range).ok_or(io::ErrorKind::InvalidInput)?)?;
        Ok(0)
    }

    fn returned(&mut self, _buffer: &Vec<u8>) -> io::Result<()> {
        Ok(())
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(timeout)?;
        self.set_write_timeout(timeout)
    }
}
