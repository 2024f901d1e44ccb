//! The transports of a client behind a trait object, because a Python class has one type.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_conn::Received;
use rdma_kv::{Deadline, Registrations, Sent, Transport, Wait};

use crate::memory::{Memory, Pieces};

/// Bytes of one copy between a stream and memory that is not registered.
const SCRATCH: usize = 64 << 10;

/// The registered memory of a client and its siblings, found by its address.
pub(crate) type Arenas<T> = Arc<Mutex<Registrations<<T as Transport>::Buffer>>>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No thread panics in the middle of a change under one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection that receives into memory of Python objects and sends from it, with the methods of
/// [`Transport`]. It copies memory that the transport would need registered.
pub(crate) trait Wire: Send {
    /// Registers memory for this connection and its siblings. False if a part is registered.
    fn register(&self, memory: rdma_kv::Memory) -> io::Result<bool>;

    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize>;

    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize>;

    fn receive(
        &mut self,
        ahead: &[u8],
        memory: &Memory,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received>;

    fn send(&mut self, memory: &Memory, range: Range<usize>, wait: Wait) -> io::Result<Sent>;

    fn returned(&mut self, memory: &Memory, deadline: Deadline) -> io::Result<()>;

    fn end_now(&mut self);
}

pub(crate) struct Line<T: Transport> {
    stream: T,
    arenas: Arenas<T>,
    /// For copies; empty until one is needed.
    scratch: Vec<u8>,
}

impl<T: Transport> Line<T> {
    pub(crate) const fn new(stream: T, arenas: Arenas<T>) -> Self {
        Self { stream, arenas, scratch: Vec::new() }
    }

    /// Returns the buffer that has these bytes, and their range in it. `None` if the transport
    /// needs registered memory and this is not.
    fn arena(&self, memory: &Memory, range: &Range<usize>) -> Option<(T::Buffer, Range<usize>)> {
        if let Some(buffer) = self.stream.unregistered(|| memory.to_register()) {
            return Some((buffer, range.clone()));
        }
        let address = memory.at(range)?.addr();
        let mut arenas = lock(&self.arenas);
        let (buffer, range) = arenas.find(address, range.len())?;
        self.stream.takes(buffer).then(|| (buffer.clone(), range))
    }
}

impl<T: Transport + Send> Wire for Line<T> {
    fn register(&self, memory: rdma_kv::Memory) -> io::Result<bool> {
        if lock(&self.arenas).find(memory.address(), memory.len()).is_some() {
            return Ok(false);
        }
        let buffer = self.stream.register(memory.clone())?;
        Ok(lock(&self.arenas).add(&memory, buffer).is_ok())
    }

    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize> {
        self.stream.read_by(into, deadline)
    }

    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize> {
        self.stream.write_with(bytes, wait)
    }

    fn receive(
        &mut self,
        ahead: &[u8],
        memory: &Memory,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received> {
        if let Some((mut buffer, range)) = self.arena(memory, &range) {
            return self.stream.receive(ahead, &mut buffer, range, deadline);
        }
        let mut at = range.start.saturating_add(ahead.len());
        if at > range.end || !memory.write(range.start, ahead) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.scratch.resize(SCRATCH, 0);
        while at < range.end {
            let most = SCRATCH.min(range.end - at);
            let into = self.scratch.get_mut(..most).unwrap_or_default();
            let read = match self.stream.read_by(into, deadline)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => read,
            };
            if !memory.write(at, self.scratch.get(..read).unwrap_or_default()) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            at += read;
        }
        let mut received = Received::default();
        received.copied = range.len() as u64;
        Ok(received)
    }

    fn send(&mut self, memory: &Memory, range: Range<usize>, wait: Wait) -> io::Result<Sent> {
        if let Some((buffer, range)) = self.arena(memory, &range) {
            return self.stream.send(&buffer, range, wait);
        }
        self.scratch.resize(SCRATCH, 0);
        let part = self.scratch.get_mut(..SCRATCH.min(range.len())).unwrap_or_default();
        if !memory.read(range.start, part) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let copied = self.stream.write_with(part, wait)?;
        Ok(Sent { lent: 0, copied })
    }

    fn returned(&mut self, memory: &Memory, deadline: Deadline) -> io::Result<()> {
        let Some((buffer, range)) = self.arena(memory, &(0..memory.len())) else { return Ok(()) };
        self.stream.returned(&buffer, range, deadline)
    }

    fn end_now(&mut self) {
        self.stream.end_now();
    }
}

/// The transport that `rdma-kv` sees. Each piece of its buffers may be registered or not.
pub(crate) struct Connection(pub(crate) Box<dyn Wire>);

impl Transport for Connection {
    type Buffer = Pieces;

    /// Unsupported: all memory is that of Python objects.
    fn buffer(&self, _len: usize) -> io::Result<Pieces> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Unsupported: [`Wire::register`] registers memory, and keeps it.
    fn register(&self, _memory: rdma_kv::Memory) -> io::Result<Pieces> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Always true: memory that is not registered is copied.
    fn takes(&self, _buffer: &Pieces) -> bool {
        true
    }

    fn read_by(&mut self, into: &mut [u8], deadline: Deadline) -> io::Result<usize> {
        self.0.read_by(into, deadline)
    }

    fn write_with(&mut self, bytes: &[u8], wait: Wait) -> io::Result<usize> {
        self.0.write_with(bytes, wait)
    }

    fn receive(
        &mut self,
        ahead: &[u8],
        buffer: &mut Pieces,
        range: Range<usize>,
        deadline: Deadline,
    ) -> io::Result<Received> {
        let (memory, range) = buffer.locate(&range).ok_or(io::ErrorKind::InvalidInput)?;
        self.0.receive(ahead, memory, range, deadline)
    }

    fn send(&mut self, buffer: &Pieces, range: Range<usize>, wait: Wait) -> io::Result<Sent> {
        let (memory, range) = buffer.locate(&range).ok_or(io::ErrorKind::InvalidInput)?;
        self.0.send(memory, range, wait)
    }

    fn returned(&mut self, buffer: &Pieces, range: Range<usize>, deadline: Deadline) -> io::Result<()> {
        buffer.within(&range).try_for_each(|memory| self.0.returned(memory, deadline))
    }

    fn end_now(&mut self) {
        self.0.end_now();
    }
}
