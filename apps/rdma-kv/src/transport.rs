//! Transports of a client: streams over RDMA, and TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_conn::{Access, CallerMemory, Descriptors, Options, Received, RegisteredBuffer, Stream};

use crate::memory::Memory;

/// Returns the settings of a connection for large values: the usual ones, with one receive window of its own. A second one
/// would be announced before the client knows how long a value is, and what arrives in it would be copied; with one, the next window is
/// announced where the value belongs, as soon. Only of values that are too short to land, the server waits for the copy of the first
/// window before it sends the rest.
pub fn options() -> Options {
    let mut options = Options::default();
    options.protocol.windows = 1;
    options
}

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

/// The moment by which a call must be done; none is waited for longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the deadline of a call that begins now and may take `timeout`; `None` is for ever.
    pub fn after(timeout: Option<Duration>) -> Self {
        // One that is beyond the clock never comes.
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// Returns how long the next wait may take; `None` is for ever.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`]: the deadline has passed.
    pub fn left(self) -> io::Result<Option<Duration>> {
        let Some(at) = self.0 else { return Ok(None) };
        match at.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Whether a call that sends waits for the peer to take something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It does not, and takes nothing where it would have to.
    Not,
    /// It takes at least one byte, or fails with [`io::ErrorKind::TimedOut`] when this has passed.
    Until(Deadline),
}

/// Bytes of a buffer that were taken to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sent {
    /// Those that the device sends from where they are.
    pub lent: usize,
    /// Those that were copied.
    pub copied: usize,
}

impl Sent {
    /// Returns how many there are.
    pub const fn bytes(self) -> usize {
        self.lent + self.copied
    }
}

/// A byte stream that can receive into memory of its own kind, and send from it. Every call that has a deadline fails with
/// [`io::ErrorKind::TimedOut`] when that has passed.
pub trait Transport {
    /// That memory: a handle, whose clones are handles on one memory.
    type Buffer: Buffer + Clone + Send;

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

    /// Returns memory that was not registered as a buffer for one call, if this transport needs no registration: TCP.
    fn unregistered(&self, _memory: impl FnOnce() -> Memory) -> Option<Self::Buffer> {
        None
    }

    /// Returns whether this stream can receive into `buffer` and send from it: another one may have made it.
    fn takes(&self, buffer: &Self::Buffer) -> bool;

    /// Waits for bytes and reads some; 0 at the end of the stream.
    ///
    /// # Errors
    /// The stream failed.
    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize>;

    /// Takes bytes to be sent, as many as there is room for, and returns how many.
    ///
    /// # Errors
    /// The stream has ended.
    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize>;

    /// Waits until `ahead`, which was read before, and the bytes of the stream behind it are in `range`. Returns how many the peer wrote
    /// there itself, and how many were copied.
    ///
    /// # Errors
    /// The stream ended before, or the range is not inside of the buffer.
    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Self::Buffer,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received>;

    /// Takes bytes to be sent from the beginning of `range`, from where they are if it can, and returns how many.
    ///
    /// # Errors
    /// The stream has ended.
    fn send(&mut self, buffer: &Self::Buffer, range: Range<usize>, wait: Wait) -> io::Result<Sent>;

    /// Waits until nothing uses the memory that was sent from.
    ///
    /// # Errors
    /// The stream ended before.
    fn returned(&mut self, buffer: &Self::Buffer, deadline: Deadline) -> io::Result<()>;

    /// Ends a stream that is of no more use, without a wait for what was written.
    fn end_now(&mut self);
}

/// A transport as a reader, until a deadline.
pub(crate) struct Until<'a, T> {
    pub(crate) stream: &'a mut T,
    pub(crate) deadline: Deadline,
}

impl<T: Transport> Read for Until<'_, T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read_by(into, self.deadline)
    }
}

impl Wait {
    /// Returns how long a stream may wait now.
    fn time(self) -> io::Result<Option<Duration>> {
        match self {
            Self::Not => Ok(Some(Duration::ZERO)),
            Self::Until(deadline) => deadline.left(),
        }
    }

    /// Returns `none` for the time-out of a call that was not to wait.
    fn judge<R>(self, result: io::Result<R>, none: R) -> io::Result<R> {
        match result {
            Err(error) if self == Self::Not && error.kind() == io::ErrorKind::TimedOut => Ok(none),
            result => result,
        }
    }
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

    fn takes(&self, buffer: &Self::Buffer) -> bool {
        *buffer.domain() == self.domain()
    }

    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize> {
        self.set_read_timeout(deadline.left()?);
        Read::read(self, into)
    }

    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize> {
        self.set_write_timeout(wait.time()?);
        wait.judge(Write::write(self, bytes), 0)
    }

    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Self::Buffer,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received> {
        if !buffer.memory().write(range.start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.set_read_timeout(deadline.left()?);
        let mut received = Self::receive(self, buffer, range.start + ahead.len()..range.end)?;
        received.copied += ahead.len() as u64;
        Ok(received)
    }

    fn send(&mut self, buffer: &Self::Buffer, range: Range<usize>, wait: Wait) -> io::Result<Sent> {
        self.set_write_timeout(wait.time()?);
        let lent = wait.judge(self.lend(buffer, range).map_err(io::Error::from), 0)?;
        Ok(Sent { lent, copied: 0 })
    }

    fn returned(&mut self, buffer: &Self::Buffer, deadline: Deadline) -> io::Result<()> {
        self.set_write_timeout(deadline.left()?);
        Ok(Self::returned(self, buffer)?)
    }

    fn end_now(&mut self) {
        // Dropping it would linger for what the peer does not take. Why it did not end in order is what has lost it.
        _ = self.close(Duration::ZERO);
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

/// The kernel copies between the socket and the memory, nothing else does. Nothing is counted as landed or lent.
impl Transport for TcpStream {
    type Buffer = Memory;

    fn buffer(&self, len: usize) -> io::Result<Memory> {
        self.register(vec![0; len].into())
    }

    fn register(&self, memory: Memory) -> io::Result<Memory> {
        if memory.is_empty() { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(memory) }
    }

    fn unregistered(&self, memory: impl FnOnce() -> Memory) -> Option<Memory> {
        Some(memory())
    }

    fn takes(&self, _buffer: &Memory) -> bool {
        true
    }

    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize> {
        loop {
            self.set_read_timeout(deadline.left()?)?;
            match in_time(Read::read(self, into)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize> {
        written(self, bytes.is_empty(), wait, |stream, waits| {
            if waits {
                return Write::write(stream, bytes);
            }
            stream.set_nonblocking(true)?;
            let written = Write::write(stream, bytes);
            stream.set_nonblocking(false)?;
            written
        })
    }

    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Memory,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received> {
        let Range { start, end } = range;
        let mut at = start.saturating_add(ahead.len());
        if at > end || end > buffer.len() || !buffer.write(start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        while at < end {
            self.set_read_timeout(deadline.left()?)?;
            match in_time(buffer.receive_from(self, at..end)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => at += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut received = Received::default();
        received.copied = (end - start) as u64;
        Ok(received)
    }

    fn send(&mut self, buffer: &Memory, range: Range<usize>, wait: Wait) -> io::Result<Sent> {
        let copied = written(self, range.is_empty(), wait, |stream, waits| {
            buffer.send_to(stream, range.clone(), waits)
        })?;
        Ok(Sent { lent: 0, copied })
    }

    fn returned(&mut self, _buffer: &Memory, _deadline: Deadline) -> io::Result<()> {
        Ok(())
    }

    fn end_now(&mut self) {
        // The peer may have ended it before.
        _ = self.shutdown(Shutdown::Both);
    }
}

/// Writes by `write`, which is told whether it may wait.
fn written(
    stream: &mut TcpStream,
    nothing: bool,
    wait: Wait,
    write: impl Fn(&mut TcpStream, bool) -> io::Result<usize>,
) -> io::Result<usize> {
    let waits = wait != Wait::Not;
    loop {
        if waits {
            stream.set_write_timeout(wait.time()?)?;
        }
        match wait.judge(in_time(write(stream, waits)), 0) {
            Ok(0) if waits && !nothing => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Names a time-out of the socket what it is: the kernel says that it would block, socket(7).
fn in_time<R>(result: io::Result<R>) -> io::Result<R> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}
