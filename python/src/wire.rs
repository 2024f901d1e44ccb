//! What a client speaks over: TCP, an RDMA device, or the fabric inside this process. A Python class has one type for all three, so the
//! transport is behind a trait object here.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_conn::Received;
use rdma_kv::{Registrations, Transport};

use crate::memory::{Memory, Pieces};

/// Bytes that are copied at once between a stream and memory that is not registered.
const SCRATCH: usize = 64 << 10;

/// Registered memory that all connections of a client and its siblings use, found by its address.
pub(crate) type Arenas<T> = Arc<Mutex<Registrations<<T as Transport>::Buffer>>>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it has one of these locks in the middle of a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection that receives into memory of Python objects and sends from it: without copies where it is registered and the transport
/// can, by copying elsewhere.
pub(crate) trait Wire: Read + Write + Send {
    /// Registers memory for this connection and its siblings. False if some of it is registered.
    fn register(&self, memory: rdma_kv::Memory) -> io::Result<bool>;

    /// As [`Transport::receive`].
    fn receive(&mut self, ahead: &[u8], memory: &Memory, range: Range<usize>) -> io::Result<Received>;

    /// As [`Transport::send`].
    fn send(&mut self, memory: &Memory, range: Range<usize>) -> io::Result<u64>;

    /// As [`Transport::returned`].
    fn returned(&mut self, memory: &Memory) -> io::Result<()>;

    /// As [`Transport::set_timeout`].
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()>;
}

/// A transport and the memory that is registered for it.
pub(crate) struct Line<T: Transport> {
    pub(crate) stream: T,
    pub(crate) arenas: Arenas<T>,
}

impl<T: Transport<Buffer: Clone>> Line<T> {
    /// Returns the registered buffer that has these bytes, and where in it.
    fn arena(&self, memory: &Memory, range: &Range<usize>) -> Option<(T::Buffer, Range<usize>)> {
        let address = memory.at(range)?.addr();
        let mut arenas = lock(&self.arenas);
        arenas.find(address, range.len()).map(|(buffer, range)| (buffer.clone(), range))
    }
}

impl<T: Transport> Read for Line<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl<T: Transport> Write for Line<T> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl<T: Transport<Buffer: Clone + Send> + Send> Wire for Line<T> {
    fn register(&self, memory: rdma_kv::Memory) -> io::Result<bool> {
        let buffer = self.stream.register(memory.clone())?;
        Ok(lock(&self.arenas).add(&memory, buffer).is_ok())
    }

    fn receive(&mut self, ahead: &[u8], memory: &Memory, range: Range<usize>) -> io::Result<Received> {
        if let Some((mut buffer, range)) = self.arena(memory, &range) {
            return self.stream.receive(ahead, &mut buffer, range);
        }
        let mut at = range.start.saturating_add(ahead.len());
        if at > range.end || !memory.write(range.start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut scratch = vec![0; SCRATCH.min(range.end - at)];
        while at < range.end {
            let most = scratch.len().min(range.end - at);
            let read = match self.stream.read(scratch.get_mut(..most).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if !memory.write(at, scratch.get(..read).unwrap_or_default()) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            at += read;
        }
        let mut received = Received::default();
        received.copied = range.len() as u64;
        Ok(received)
    }

    fn send(&mut self, memory: &Memory, mut range: Range<usize>) -> io::Result<u64> {
        if let Some((buffer, range)) = self.arena(memory, &range) {
            return self.stream.send(&buffer, range);
        }
        let mut scratch = vec![0; SCRATCH.min(range.len())];
        while !range.is_empty() {
            let most = scratch.len().min(range.len());
            let part = scratch.get_mut(..most).unwrap_or_default();
            if !memory.read(range.start, part) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            self.stream.write_all(part)?;
            range.start += most;
        }
        Ok(0)
    }

    fn returned(&mut self, memory: &Memory) -> io::Result<()> {
        let Some((buffer, _)) = self.arena(memory, &(0..memory.len())) else { return Ok(()) };
        self.stream.returned(&buffer)
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.stream.set_timeout(timeout)
    }
}

/// The transport that `rdma-kv` sees. Its buffers are pieces of memory, each of which may be registered or not.
pub(crate) struct Connection(pub(crate) Box<dyn Wire>);

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Connection {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Transport for Connection {
    type Buffer = Pieces;

    /// Memory comes from Python alone.
    fn buffer(&self, _len: usize) -> io::Result<Pieces> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// By [`Wire::register`] alone, which keeps what it makes.
    fn register(&self, _memory: rdma_kv::Memory) -> io::Result<Pieces> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn receive(&mut self, ahead: &[u8], buffer: &mut Pieces, range: Range<usize>) -> io::Result<Received> {
        let (memory, range) = buffer.locate(&range).ok_or(io::ErrorKind::InvalidInput)?;
        self.0.receive(ahead, memory, range)
    }

    fn send(&mut self, buffer: &Pieces, range: Range<usize>) -> io::Result<u64> {
        let (memory, range) = buffer.locate(&range).ok_or(io::ErrorKind::InvalidInput)?;
        self.0.send(memory, range)
    }

    fn returned(&mut self, buffer: &Pieces) -> io::Result<()> {
        buffer.memories().try_for_each(|memory| self.0.returned(memory))
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_timeout(timeout)
    }
}
