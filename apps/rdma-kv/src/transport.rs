//! Transports of a client: streams over RDMA, and TCP.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use rdma_conn::{CallerMemory, Descriptors, Options, Received, Stream};

use crate::memory::Memory;
use crate::slices::Slices;

/// Returns the settings of a connection for large values: the defaults, with one receive window. A
/// second one would be announced before a value's length is known, and its bytes would be copied.
/// With one, the next is announced inside the value's buffer, just as early. Only for values too
/// short to land, the server waits for the copy of the first window.
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

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if some are outside.
    #[must_use]
    fn read(&self, offset: usize, into: &mut [u8]) -> bool;

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not fit or is in use.
    #[must_use]
    fn write(&mut self, offset: usize, from: &[u8]) -> bool;
}

/// The deadline of a call. No wait in it takes longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// Returns the deadline of a call that begins now and may take `timeout`; `None` is forever.
    pub fn after(timeout: Option<Duration>) -> Self {
        // A deadline beyond the clock's range never comes.
        Self(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// Returns how long the next wait may take; `None` is forever.
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

/// Whether a call that sends waits for the peer to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It does not wait, and takes nothing if there is no room.
    Not,
    /// It takes at least one byte, or fails with [`io::ErrorKind::TimedOut`] after this deadline.
    Until(Deadline),
}

/// Bytes of a buffer that were taken for sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sent {
    /// Bytes that the device sends directly from the buffer.
    pub lent: usize,
    /// Bytes that were copied.
    pub copied: usize,
}

impl Sent {
    /// Returns the total.
    pub const fn bytes(self) -> usize {
        self.lent + self.copied
    }
}

/// A byte stream that can receive into memory of its own kind, and send from it. A call fails with
/// [`io::ErrorKind::TimedOut`] after its deadline.
pub trait Transport {
    /// Memory of this transport: a handle, whose clones are handles on the same memory.
    type Buffer: Buffer + Clone + Send;

    /// Allocates `len` bytes of it, all zero.
    ///
    /// # Errors
    /// There is no such memory.
    fn buffer(&self, len: usize) -> io::Result<Self::Buffer>;

    /// Turns existing memory into a buffer.
    ///
    /// # Errors
    /// It has no bytes, or cannot be used.
    fn register(&self, memory: Memory) -> io::Result<Self::Buffer>;

    /// Returns memory as a buffer for one call, if this transport needs no registration: TCP.
    fn unregistered(&self, _memory: impl FnOnce() -> Memory) -> Option<Self::Buffer> {
        None
    }

    /// Returns whether this stream can use `buffer`, which another one may have created.
    fn takes(&self, buffer: &Self::Buffer) -> bool;

    /// Waits for bytes and reads some; 0 at the end of the stream.
    ///
    /// # Errors
    /// The stream failed.
    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize>;

    /// Takes bytes to send, as many as there is room for, and returns how many.
    ///
    /// # Errors
    /// The stream has ended.
    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize>;

    /// Waits until `range` holds `ahead`, read before, and the bytes that follow it. Returns how
    /// many the peer wrote there itself, and how many were copied.
    ///
    /// # Errors
    /// The stream ended before, or the range is not inside the buffer.
    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Self::Buffer,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received>;

    /// Takes bytes to send from the beginning of `range`, without a copy if possible.
    ///
    /// # Errors
    /// The stream has ended.
    fn send(&mut self, buffer: &Self::Buffer, range: Range<usize>, wait: Wait) -> io::Result<Sent>;

    /// Waits until nothing uses the memory of `range`, which was sent.
    ///
    /// # Errors
    /// The stream ended before.
    fn returned(&mut self, buffer: &Self::Buffer, range: Range<usize>, deadline: Deadline) -> io::Result<()>;

    /// Aborts the stream; written bytes may be discarded.
    fn end_now(&mut self);
}

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
    fn time(self) -> io::Result<Option<Duration>> {
        match self {
            Self::Not => Ok(Some(Duration::ZERO)),
            Self::Until(deadline) => deadline.left(),
        }
    }

    /// Returns `none` in place of a time-out, for a call that must not wait.
    fn judge<R>(self, result: io::Result<R>, none: R) -> io::Result<R> {
        match result {
            Err(error) if self == Self::Not && error.kind() == io::ErrorKind::TimedOut => Ok(none),
            result => result,
        }
    }
}

impl<B: Descriptors> Transport for Stream<B> {
    type Buffer = Slices<B>;

    fn buffer(&self, len: usize) -> io::Result<Self::Buffer> {
        Ok(Slices::one(self.register_landing(len)?))
    }

    fn register(&self, memory: Memory) -> io::Result<Self::Buffer> {
        Slices::register(self, &memory)
    }

    fn takes(&self, buffer: &Self::Buffer) -> bool {
        // One stream has registered all slices.
        buffer.first().is_some_and(|slice| *slice.domain() == self.domain())
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
        if range.end > buffer.len() || !buffer.put(range.start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut received = Received::default();
        received.copied = ahead.len() as u64;
        for (slice, part) in buffer.parts(range.start + ahead.len()..range.end) {
            self.set_read_timeout(deadline.left()?);
            let here = Self::receive(self, slice, part)?;
            received.landed += here.landed;
            received.copied += here.copied;
        }
        Ok(received)
    }

    fn send(&mut self, buffer: &Self::Buffer, range: Range<usize>, wait: Wait) -> io::Result<Sent> {
        let Some((slice, part)) = buffer.parts(range).next() else { return Ok(Sent::default()) };
        self.set_write_timeout(wait.time()?);
        let lent = wait.judge(self.lend(slice, part).map_err(io::Error::from), 0)?;
        Ok(Sent { lent, copied: 0 })
    }

    fn returned(&mut self, buffer: &Self::Buffer, range: Range<usize>, deadline: Deadline) -> io::Result<()> {
        for (slice, _) in buffer.parts(range) {
            self.set_write_timeout(deadline.left()?);
            Self::returned(self, slice)?;
        }
        Ok(())
    }

    fn end_now(&mut self) {
        // Dropping it would linger for bytes that the peer does not take. It is lost already.
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

/// Only the kernel copies, between the socket and the memory. No bytes count as landed or lent.
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

    fn returned(&mut self, _buffer: &Memory, _range: Range<usize>, _deadline: Deadline) -> io::Result<()> {
        Ok(())
    }

    fn end_now(&mut self) {
        // The peer may have ended it before.
        _ = self.shutdown(Shutdown::Both);
    }
}

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

/// Turns `WouldBlock`, the kernel's error for a time-out, into `TimedOut`; socket(7).
fn in_time<R>(result: io::Result<R>) -> io::Result<R> {
    result.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}
