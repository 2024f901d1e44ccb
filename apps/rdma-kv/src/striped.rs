use std::thread;
use std::time::Duration;

use crate::client::{Client, Counts, Part, inside};
use crate::error::Error;
use crate::login::Login;
use crate::memory::Memory;
use crate::transport::{Buffer, Transport};

/// Clients on several connections to one server. The keys of one call are spread over them, or the
/// parts of one large value. Each connection's part of a call runs on a thread of its own.
///
/// A lost connection is ended at once, and has released the buffer when the call returns. Without
/// any connection each call returns [`Error::Lost`].
#[derive(Debug)]
pub struct Striped<T: Transport> {
    pub(crate) clients: Vec<Client<T>>,
    counts: Counts,
}

/// Memory for the values of a [`Striped`], registered once for each protection domain.
#[derive(Debug)]
pub struct StripedBuffer<U> {
    buffers: Vec<U>,
}

impl<U: Buffer> Buffer for StripedBuffer<U> {
    fn len(&self) -> usize {
        self.buffers.first().map_or(0, U::len)
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.buffers.first().is_some_and(|buffer| buffer.read(offset, into))
    }

    fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        self.buffers.first_mut().is_some_and(|buffer| buffer.write(offset, from))
    }
}

impl<T: Transport + Send> Striped<T> {
    /// Returns a client on all of these connections.
    pub const fn new(clients: Vec<Client<T>>) -> Self {
        Self { clients, counts: Counts::NONE }
    }

    /// Allocates `len` bytes of memory for values.
    ///
    /// # Errors
    /// Those of [`Client::register`], or every connection is lost.
    pub fn buffer(&self, len: usize) -> Result<StripedBuffer<T::Buffer>, Error> {
        self.register(vec![0; len])
    }

    /// Registers existing memory, like [`Client::register`].
    ///
    /// # Errors
    /// Those of [`Client::register`], or every connection is lost.
    pub fn register(&self, memory: impl Into<Memory>) -> Result<StripedBuffer<T::Buffer>, Error> {
        let (memory, mut buffers) = (memory.into(), Vec::<T::Buffer>::new());
        for client in &self.clients {
            if !buffers.iter().any(|buffer| client.stream().takes(buffer)) {
                buffers.push(client.register(memory.clone())?);
            }
        }
        if buffers.is_empty() { Err(Error::Lost) } else { Ok(StripedBuffer { buffers }) }
    }

    /// Limits how long each call may take, like [`Client::set_timeout`].
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.clients.iter_mut().for_each(|client| client.set_timeout(timeout));
    }

    /// Limits how long keys live that are set from now on, like [`Client::set_time_to_live`].
    pub fn set_time_to_live(&mut self, lives: Option<Duration>) {
        self.clients.iter_mut().for_each(|client| client.set_time_to_live(lives));
    }

    /// Logs in on every connection at once, like [`Client::log_in`]. Drops those that fail.
    ///
    /// # Errors
    /// The error of a connection that failed; or every connection was lost before.
    pub fn log_in(&mut self, login: &Login) -> Result<(), Error> {
        if self.clients.is_empty() {
            return Err(Error::Lost);
        }
        let told = thread::scope(|scope| {
            let log_in = |client| scope.spawn(move || Client::log_in(client, login));
            let threads: Vec<_> = self.clients.iter_mut().map(log_in).collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            joined.fold(Ok(()), Result::and)
        });
        self.drop_lost();
        told
    }

    /// Returns the counts of all connections together.
    pub fn counts(&self) -> Counts {
        self.clients.iter().fold(self.counts, |sum, client| sum + client.counts())
    }

    /// Returns how many connections are left.
    pub const fn connections(&self) -> usize {
        self.clients.len()
    }

    /// Gets many values into parts of `buffer`, which do not overlap, like [`Client::mget_into`].
    /// One key of a lost connection has its error, the others have [`Error::Lost`].
    ///
    /// # Errors
    /// A part is outside the buffer, the buffer is another client's, or every connection is lost.
    pub fn mget_into(
        &mut self,
        parts: &[Part<'_>],
        buffer: &mut StripedBuffer<T::Buffer>,
    ) -> Result<Vec<Result<Option<usize>, Error>>, Error> {
        self.spread(parts, buffer, |client, parts, buffer| client.mget_into(parts, buffer))
    }

    /// Sets many keys to parts of `buffer`, like [`Client::mset_from`]. One key of a lost
    /// connection has its error, the others have [`Error::Lost`]: they may be set or not.
    ///
    /// # Errors
    /// A part is outside the buffer, the buffer is another client's, or every connection is lost.
    pub fn mset_from(
        &mut self,
        parts: &[Part<'_>],
        buffer: &StripedBuffer<T::Buffer>,
    ) -> Result<Vec<Result<(), Error>>, Error> {
        self.spread(parts, buffer, |client, parts, buffer| client.mset_from(parts, buffer))
    }

    /// Runs `act` on every connection with its share of the parts. Returns results in their order.
    pub(crate) fn spread<R: Send>(
        &mut self,
        parts: &[Part<'_>],
        buffer: &StripedBuffer<T::Buffer>,
        act: impl Fn(&mut Client<T>, &[Part<'_>], &mut T::Buffer) -> Result<Vec<Result<R, Error>>, Error> + Sync,
    ) -> Result<Vec<Result<R, Error>>, Error> {
        inside(parts, buffer)?;
        let shares = self.shares(parts, buffer)?;
        let mut results: Vec<Result<R, Error>> = parts.iter().map(|_| Err(Error::Lost)).collect();
        let done = thread::scope(|scope| {
            let mut busy = self.clients.iter_mut().zip(shares).filter(|(_, share)| !share.indices.is_empty());
            let run = |(client, mut share): (&mut Client<T>, Share<'_, T::Buffer>)| {
                let moved = act(client, &share.parts, &mut share.buffer);
                (share.indices, moved)
            };
            let first = busy.next();
            let others: Vec<_> = busy.map(|share| scope.spawn(move || run(share))).collect();
            let mut done: Vec<_> = first.map(run).into_iter().collect();
            for other in others {
                done.push(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            done
        });
        for (indices, share) in done {
            // Missing answers of a share were lost.
            let share = share.unwrap_or_else(|error| vec![Err(error)]);
            for (index, result) in indices.into_iter().zip(share) {
                if let Some(place) = results.get_mut(index) {
                    *place = result;
                }
            }
        }
        self.drop_lost();
        Ok(results)
    }

    pub(crate) fn drop_lost(&mut self) {
        for lost in self.clients.extract_if(.., |client| client.is_lost()) {
            self.counts = self.counts + lost.counts();
        }
    }

    /// Assigns each part to the connection with the fewest bytes to move so far.
    fn shares<'a>(
        &self,
        parts: &[Part<'a>],
        buffer: &StripedBuffer<T::Buffer>,
    ) -> Result<Vec<Share<'a, T::Buffer>>, Error> {
        let share = |client: &Client<T>| {
            let own =
                buffer.buffers.iter().find(|buffer| client.stream().takes(buffer)).ok_or(Error::Foreign)?;
            Ok(Share { parts: Vec::new(), indices: Vec::new(), bytes: 0, buffer: own.clone() })
        };
        let mut shares = self.clients.iter().map(share).collect::<Result<Vec<_>, Error>>()?;
        for (index, part) in parts.iter().enumerate() {
            let least = shares.iter_mut().min_by_key(|share| (share.bytes, share.indices.len()));
            let share = least.ok_or(Error::Lost)?;
            share.bytes += part.range.len();
            share.indices.push(index);
            share.parts.push(part.clone());
        }
        Ok(shares)
    }
}

struct Share<'a, U> {
    parts: Vec<Part<'a>>,
    indices: Vec<usize>,
    bytes: usize,
    buffer: U,
}
