//! The client: sends commands, and receives values in their final place.

use std::ops::{Add, Range, Sub};
use std::time::Duration;

use crate::error::Error;
use crate::login::Login;
use crate::memory::Memory;
use crate::pipeline::{Pipeline, Verb};
use crate::reply::{Line, Replies};
use crate::transport::{Buffer, Deadline, Transport, Until, Wait};

/// A value's part of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The place of its value. A shorter value leaves the end of the part unchanged.
    pub range: Range<usize>,
}

const LONGEST_INFO: usize = 64 << 10;

/// How much memory a server uses, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Memory in use (`used_memory`).
    pub used: u64,
    /// The limit (`maxmemory`); 0 if there is none.
    pub most: u64,
}

impl MemoryUse {
    fn parse(text: &str) -> Option<Self> {
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim_end().parse().ok());
        Some(Self { used: field("used_memory:")?, most: field("maxmemory:")? })
    }
}

/// Counts of bytes of values, by how they moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Bytes of values that the server wrote to their final place.
    pub bytes_landed: u64,
    /// Bytes of values that this side copied once, in either direction.
    pub bytes_copied: u64,
    /// Bytes of values that the device sent from the caller's buffer.
    pub bytes_lent: u64,
}

impl Counts {
    /// All zero.
    pub const NONE: Self = Self { bytes_landed: 0, bytes_copied: 0, bytes_lent: 0 };
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes_landed: self.bytes_landed + other.bytes_landed,
            bytes_copied: self.bytes_copied + other.bytes_copied,
            bytes_lent: self.bytes_lent + other.bytes_lent,
        }
    }
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            bytes_landed: self.bytes_landed - before.bytes_landed,
            bytes_copied: self.bytes_copied - before.bytes_copied,
            bytes_lent: self.bytes_lent - before.bytes_lent,
        }
    }
}

/// A client for large values on one connection.
///
/// [`Error::Refused`] and [`Error::TooLong`] leave the client usable. Any other error ends its
/// connection at once, and each later call returns [`Error::Lost`].
#[derive(Debug)]
pub struct Client<T: Transport> {
    stream: T,
    replies: Replies,
    counts: Counts,
    timeout: Option<Duration>,
    /// The TTL of keys in milliseconds.
    lives: Option<u64>,
    deadline: Deadline,
    lost: bool,
}

impl<T: Transport> Client<T> {
    /// The default limit of a call ([`Client::set_timeout`]); a pipeline of values is one call.
    pub const TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns a client on `stream`, on which no command has been sent.
    pub fn new(stream: T) -> Self {
        Self {
            stream,
            replies: Replies::default(),
            counts: Counts::default(),
            timeout: Some(Self::TIMEOUT),
            lives: None,
            deadline: Deadline::default(),
            lost: false,
        }
    }

    /// Allocates `len` bytes for values. RDMA registers them for this client's connection, so use
    /// them for many values.
    ///
    /// # Errors
    /// `len` is zero, or no more memory can be registered.
    pub fn buffer(&self, len: usize) -> Result<T::Buffer, Error> {
        Ok(self.stream.buffer(len)?)
    }

    /// Registers existing memory, to receive values into it and send from it: a `Vec<u8>`, a
    /// `Box<[u8]>`, or another [`Memory`]. Registering takes about as long as copying: do it once
    /// for memory that is used often, or for an arena ([`Registrations`](crate::Registrations)).
    ///
    /// The memory is deregistered, and the client's handle dropped, when the buffer was dropped and
    /// nothing uses it. [`Memory::try_into_vec`] returns it then.
    ///
    /// # Errors
    /// It has no bytes, or no more memory can be registered.
    pub fn register(&self, memory: impl Into<Memory>) -> Result<T::Buffer, Error> {
        Ok(self.stream.register(memory.into())?)
    }

    /// Limits how long each call may take, however slowly the server answers: by default
    /// [`Client::TIMEOUT`]; `None` waits forever. A call that takes longer loses the connection,
    /// with [`Error::Io`] of the kind [`TimedOut`](std::io::ErrorKind::TimedOut).
    pub const fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Sets the TTL of keys set from now on (`PX`): whole milliseconds, at least one. `None`, the
    /// default, is forever.
    pub fn set_time_to_live(&mut self, lives: Option<Duration>) {
        // Valkey counts in signed 64 bits from the beginning of 1970. A century counts as forever.
        const MOST: u64 = 100 * 366 * 24 * 3600 * 1000;
        self.lives = lives.map(|lives| u64::try_from(lives.as_millis()).unwrap_or(MOST).clamp(1, MOST));
    }

    /// Returns whether an error has lost the connection.
    pub const fn is_lost(&self) -> bool {
        self.lost
    }

    /// Returns the counts of this client.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the stream.
    pub const fn stream(&self) -> &T {
        &self.stream
    }

    /// Logs in and selects a database, before the first command. Each connection needs it: a new
    /// one begins as the default user, in database 0.
    ///
    /// # Errors
    /// [`Error::Login`]: the server refused. The connection is lost after this and any other error.
    pub fn log_in(&mut self, login: &Login) -> Result<(), Error> {
        let (commands, names) = login.commands();
        self.exchange(|client| {
            client.send(&commands)?;
            names.into_iter().try_for_each(|command| {
                client.status().map_err(|error| match error {
                    Error::Refused(text) => {
                        // A server without the command may repeat its arguments (`…, with args
                        // beginning with: …`), among them a password.
                        let text = text.split(", with args").next().unwrap_or_default();
                        Error::Login { command, text: login.without_password(text) }
                    }
                    Error::Unexpected(_) => Error::Unexpected(format!("it is none to {command}")),
                    error => error,
                })
            })
        })
    }

    /// Gets a value into `range` of `buffer`. Returns its length; `None` if there is no such key.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn get_into(
        &mut self,
        key: &[u8],
        buffer: &mut T::Buffer,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let mut lengths = self.mget_into(&[Part { key, range }], buffer)?;
        lengths.pop().unwrap_or(Ok(None))
    }

    /// Gets many values into parts of `buffer`, with one GET each, sent ahead of the replies.
    /// Returns the length of each value, `None` for a missing key; or why that one failed.
    ///
    /// # Errors
    /// Errors that lose the connection.
    pub fn mget_into(
        &mut self,
        parts: &[Part<'_>],
        buffer: &mut T::Buffer,
    ) -> Result<Vec<Result<Option<usize>, Error>>, Error> {
        self.many_into(Verb::Get, parts, buffer)
    }

    pub(crate) fn many_into(
        &mut self,
        verb: Verb,
        parts: &[Part<'_>],
        buffer: &mut T::Buffer,
    ) -> Result<Vec<Result<Option<usize>, Error>>, Error> {
        inside(parts, buffer)?;
        self.exchange(|client| {
            let mut commands = Pipeline::new(verb, parts);
            let one = |(replies, part): (usize, &Part<'_>)| {
                client.go_on(&mut commands, Some(buffer), replies)?;
                lasting(client.value(buffer, part.range.clone()))
            };
            parts.iter().enumerate().map(one).collect()
        })
    }

    fn value(&mut self, buffer: &mut T::Buffer, range: Range<usize>) -> Result<Option<usize>, Error> {
        let len = match self.line()? {
            Line::Value(Some(len)) => len,
            Line::Value(None) => return Ok(None),
            other => return Err(unexpected(&other)),
        };
        let room = range.len();
        match usize::try_from(len).ok().filter(|len| *len <= room) {
            Some(len) => {
                let range = range.start..range.start + len;
                let received = self.replies.value(&mut self.stream, buffer, range, self.deadline)?;
                self.counts.bytes_landed += received.landed;
                self.counts.bytes_copied += received.copied;
                Ok(Some(len))
            }
            None => {
                self.replies
                    .drop_value(&mut Until { stream: &mut self.stream, deadline: self.deadline }, len)?;
                Err(Error::TooLong { len, room })
            }
        }
    }

    /// Sets a key to the bytes of `range`, which are sent without a copy. Returns when the server
    /// has them and nothing uses the buffer.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn set_from(&mut self, key: &[u8], buffer: &T::Buffer, range: Range<usize>) -> Result<(), Error> {
        let mut done = self.mset_from(&[Part { key, range }], buffer)?;
        done.pop().unwrap_or(Ok(()))
    }

    /// Sets many keys to parts of `buffer`, with one SET each, sent ahead of the replies. Returns
    /// for each why the server refused it, if it did.
    ///
    /// # Errors
    /// Errors that lose the connection.
    pub fn mset_from(
        &mut self,
        parts: &[Part<'_>],
        buffer: &T::Buffer,
    ) -> Result<Vec<Result<(), Error>>, Error> {
        self.many_from(Verb::Set(self.lives), parts, buffer, Self::status)
    }

    pub(crate) fn many_from<R>(
        &mut self,
        verb: Verb,
        parts: &[Part<'_>],
        buffer: &T::Buffer,
        told: impl Fn(&mut Self) -> Result<R, Error>,
    ) -> Result<Vec<Result<R, Error>>, Error> {
        inside(parts, buffer)?;
        self.exchange(|client| {
            let mut commands = Pipeline::new(verb, parts);
            let one = |replies| {
                client.go_on(&mut commands, Some(buffer), replies)?;
                lasting(told(client))
            };
            let done = (0..parts.len()).map(one).collect::<Result<Vec<_>, _>>()?;
            for sent in merged(parts) {
                client.stream.returned(buffer, sent, client.deadline)?;
            }
            Ok(done)
        })
    }

    pub(crate) fn ask<R>(
        &mut self,
        arguments: &[&[u8]],
        told: impl FnOnce(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        self.ask_all(&[arguments], told)
    }

    /// Sends commands together. `told` reads each reply, also after a refusal.
    pub(crate) fn ask_all<R>(
        &mut self,
        commands: &[&[&[u8]]],
        told: impl FnOnce(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let mut bytes = Vec::new();
        for arguments in commands {
            command(&mut bytes, arguments.len(), arguments);
        }
        self.exchange(|client| {
            client.send(&bytes)?;
            lasting(told(client))
        })?
    }

    pub(crate) fn status(&mut self) -> Result<(), Error> {
        match self.line()? {
            Line::Status(_) => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns how many of these keys exist.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn exists(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        self.number(b"EXISTS", keys)
    }

    /// Returns for each key whether it exists, or why that is not known. Sends one EXISTS each.
    ///
    /// # Errors
    /// Errors that lose the connection.
    pub fn present(&mut self, keys: &[&[u8]]) -> Result<Vec<Result<bool, Error>>, Error> {
        let there = self.numbers(Verb::Exists, keys)?;
        Ok(there.into_iter().map(|there| there.map(|there| there > 0)).collect())
    }

    pub(crate) fn numbers(&mut self, verb: Verb, keys: &[&[u8]]) -> Result<Vec<Result<u64, Error>>, Error> {
        let parts: Vec<Part<'_>> = keys.iter().map(|key| Part { key, range: 0..0 }).collect();
        self.exchange(|client| {
            let mut commands = Pipeline::new(verb, &parts);
            let one = |replies| {
                client.go_on(&mut commands, None, replies)?;
                lasting(client.natural())
            };
            (0..parts.len()).map(one).collect()
        })
    }

    pub(crate) fn text(&mut self, arguments: &[&[u8]], most: usize) -> Result<String, Error> {
        let text = self.ask(arguments, |client| {
            let len = match client.line()? {
                Line::Value(Some(len)) => len,
                other => return Err(unexpected(&other)),
            };
            let len = usize::try_from(len).ok().filter(|len| *len <= most);
            let len = len.ok_or_else(|| Error::Unexpected(format!("a text of more than {most} bytes")))?;
            client.replies.bytes(&mut Until { stream: &mut client.stream, deadline: client.deadline }, len)
        });
        String::from_utf8(text?).map_err(|_| self.lose(Error::Unexpected("a text that is none".into())))
    }

    /// Returns how much memory the server uses, by `INFO memory`.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn memory(&mut self) -> Result<MemoryUse, Error> {
        let text = self.text(&[b"INFO", b"memory"], LONGEST_INFO)?;
        MemoryUse::parse(&text).ok_or_else(|| self.lose(Error::Unexpected("no INFO of memory".into())))
    }

    /// Sends `ASKING`: the next command is about a key that its node has not given away yet.
    pub(crate) fn asking(&mut self) -> Result<(), Error> {
        self.ask(&[b"ASKING"], Self::status)
    }

    /// Deletes keys. Returns how many existed.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn del(&mut self, keys: &[&[u8]]) -> Result<u64, Error> {
        self.number(b"DEL", keys)
    }

    /// Returns the length of a value, 0 if there is no such key.
    ///
    /// # Errors
    /// [`Error`] says for each variant whether the client can be used further.
    pub fn strlen(&mut self, key: &[u8]) -> Result<u64, Error> {
        self.number(b"STRLEN", &[key])
    }

    fn number(&mut self, name: &[u8], keys: &[&[u8]]) -> Result<u64, Error> {
        let arguments: Vec<&[u8]> = [name].into_iter().chain(keys.iter().copied()).collect();
        self.ask(&arguments, Self::natural)
    }

    pub(crate) fn natural(&mut self) -> Result<u64, Error> {
        self.line().and_then(|line| natural(&line))
    }

    /// Reads the reply to `PTTL`: the milliseconds left; 0 if there is no key, or it has no end.
    pub(crate) fn time_left(&mut self) -> Result<u64, Error> {
        match self.line()? {
            Line::Number(time) => Ok(u64::try_from(time).unwrap_or(0)),
            other => Err(unexpected(&other)),
        }
    }

    /// Reads the reply to `EXEC`, up to those of `count` commands. False if a watched key changed.
    pub(crate) fn executed(&mut self, count: u64) -> Result<bool, Error> {
        match self.line()? {
            Line::Many(Some(replies)) if replies == count => Ok(true),
            Line::Many(None) | Line::Value(None) => Ok(false),
            other => Err(unexpected(&other)),
        }
    }

    pub(crate) const fn times(&self) -> (Option<u64>, Option<Duration>) {
        (self.lives, self.timeout)
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let written = self.stream.write_with(bytes, Wait::Until(self.deadline))?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    fn go_on(
        &mut self,
        commands: &mut Pipeline<'_>,
        buffer: Option<&T::Buffer>,
        replies: usize,
    ) -> Result<(), Error> {
        Ok(commands.go_on(&mut self.stream, buffer, replies, self.deadline, &mut self.counts)?)
    }

    fn line(&mut self) -> Result<Line, Error> {
        self.replies.line(&mut Until { stream: &mut self.stream, deadline: self.deadline })
    }

    fn exchange<R>(&mut self, act: impl FnOnce(&mut Self) -> Result<R, Error>) -> Result<R, Error> {
        if self.lost {
            return Err(Error::Lost);
        }
        self.deadline = Deadline::after(self.timeout);
        act(self).map_err(|error| self.lose(error))
    }

    fn lose(&mut self, error: Error) -> Error {
        self.lost = true;
        self.stream.end_now();
        error
    }
}

pub(crate) fn inside(parts: &[Part<'_>], buffer: &impl Buffer) -> Result<(), Error> {
    let len = buffer.len();
    match parts.iter().find(|part| part.range.start > part.range.end || part.range.end > len) {
        Some(Part { range: Range { start, end }, .. }) => {
            Err(Error::Outside { start: *start, end: *end, len })
        }
        None => Ok(()),
    }
}

/// Returns the bytes of all parts, in order: few ranges, and none of the bytes that lie between.
fn merged(parts: &[Part<'_>]) -> Vec<Range<usize>> {
    let mut ranges: Vec<_> = parts.iter().map(|part| part.range.clone()).collect();
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let touches = next.start <= range.end;
        if touches {
            range.end = range.end.max(next.end);
        }
        touches
    });
    ranges
}

/// Separates errors after which the next reply can be read from those that lose the connection.
pub(crate) fn lasting<R>(result: Result<R, Error>) -> Result<Result<R, Error>, Error> {
    match result {
        Err(error @ (Error::Refused(_) | Error::TooLong { .. } | Error::Changed)) => Ok(Err(error)),
        Err(error) => Err(error),
        Ok(done) => Ok(Ok(done)),
    }
}

fn natural(line: &Line) -> Result<u64, Error> {
    match line {
        Line::Number(number) => u64::try_from(*number).map_err(|_| unexpected(line)),
        other => Err(unexpected(other)),
    }
}

fn unexpected(line: &Line) -> Error {
    Error::Unexpected(format!("{line:?}"))
}

pub(crate) fn command(into: &mut Vec<u8>, count: usize, first: &[&[u8]]) {
    into.extend_from_slice(format!("*{count}\r\n").as_bytes());
    arguments(into, first);
}

pub(crate) fn arguments(into: &mut Vec<u8>, arguments: &[&[u8]]) {
    for argument in arguments {
        into.extend_from_slice(format!("${}\r\n", argument.len()).as_bytes());
        into.extend_from_slice(argument);
        into.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An arena has many slices, each of which may be asked for what was sent from it.
    #[test]
    fn what_lies_between_parts_was_not_sent() {
        let parts = [90..100, 0..10, 10..20, 5..12, 30..30, 95..99].map(|range| Part { key: b"", range });
        assert_eq!(merged(&parts), [0..20, 90..100]);
    }
}
