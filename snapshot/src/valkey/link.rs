//! A plain connection to or from a Valkey: bytes, the lines of a replication handshake, and
//! commands.
//!
//! Every call has a [`Limit`], even if the other side sends slowly.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{PATIENCE, Server};
use crate::wait::{Limit, Stop};

/// The longest line of a handshake.
const LONGEST_LINE: usize = 4096;

/// The most words of a handshake's command, and the most bytes of all of it.
const MOST_WORDS: usize = 64;
const LONGEST_COMMAND: usize = 16 << 10;

/// One end of a connection.
pub(super) struct Link {
    stream: TcpStream,
    /// Received bytes that were not used yet: part of a line or a command.
    inbox: Vec<u8>,
}

impl Link {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, inbox: Vec::new() })
    }

    /// Connects to the first address of `server` that answers. The system's resolver may take any
    /// time to find the addresses, so it runs on a thread of its own.
    pub(super) fn connect(server: &Server, limit: &Limit) -> io::Result<Self> {
        let (host, port) = (server.host.clone(), server.port);
        let connected = limit.within(PATIENCE).aside(move || {
            let mut failed = io::Error::other(format!("{host} has no address"));
            for address in (host.as_str(), port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, PATIENCE) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        });
        Self::new(connected.map_err(|error| server.failed("connecting", error))?)
    }

    pub(super) fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    pub(super) fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Sends all of it. The other side may be slow, but not stand still for longer than
    /// [`PATIENCE`].
    pub(super) fn write_all(&mut self, mut bytes: &[u8], limit: &Limit) -> io::Result<()> {
        let mut moving = limit.within(PATIENCE);
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    bytes = bytes.get(count..).unwrap_or_default();
                    moving = limit.within(PATIENCE);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    moving.until_writable(self.as_fd())?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads some bytes; `None` if none come in time.
    pub(super) fn read(&mut self, into: &mut [u8], limit: &Limit) -> io::Result<Option<usize>> {
        if !self.inbox.is_empty() {
            let count = self.inbox.len().min(into.len());
            for (to, from) in into.iter_mut().zip(self.inbox.drain(..count)) {
                *to = from;
            }
            return Ok(Some(count));
        }
        loop {
            match self.stream.read(into) {
                Ok(0) => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed"));
                }
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            match limit.until_readable(&[self.as_fd()]) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(None),
                other => other?,
            }
        }
    }

    /// Checks that the other side has not ended. It may have sent bytes that were not read.
    ///
    /// # Errors
    /// It has ended, or the connection failed.
    pub(super) fn check(&self) -> io::Result<()> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec::default()))?;
        let [polled] = polled;
        match polled.revents().is_empty() {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")),
        }
    }

    /// Reads more after the bytes so far. Returns false if nothing arrives in time.
    fn fill(&mut self, limit: &Limit) -> io::Result<bool> {
        let mut bytes = [0; 4096];
        let held = std::mem::take(&mut self.inbox);
        let read = self.read(&mut bytes, limit);
        self.inbox = held;
        let Some(count) = read? else { return Ok(false) };
        self.inbox.extend_from_slice(bytes.get(..count).unwrap_or_default());
        Ok(true)
    }

    /// Returns the next line, without its end.
    fn line(&mut self, limit: &Limit) -> io::Result<String> {
        loop {
            if let Some((line, taken)) = line(&self.inbox, 0) {
                let line = String::from_utf8_lossy(line).into_owned();
                self.inbox.drain(..taken);
                return Ok(line);
            }
            if self.inbox.len() >= LONGEST_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no replication link"));
            }
            if !self.fill(limit)? {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer on the replication link"));
            }
            // The limit holds even while bytes keep arriving.
            limit.nap()?;
        }
    }

    /// Sends a command and returns the line that answers it.
    pub(super) fn ask(&mut self, words: &[&str], limit: &Limit) -> io::Result<String> {
        self.write_all(&command(words), limit)?;
        self.answer(limit, PATIENCE)
    }

    /// Returns the next line that is not empty. Empty lines say that the other side is alive, which
    /// it must within each `silence`.
    pub(super) fn answer(&mut self, limit: &Limit, silence: Duration) -> io::Result<String> {
        loop {
            let line = self.line(&limit.within(silence))?;
            if !line.is_empty() {
                return Ok(line);
            }
            // The limit also holds for a peer that never stops sending them.
            limit.nap()?;
        }
    }

    /// Returns the next command, an array of words, if all of it arrives in time. Part of one is
    /// kept.
    pub(super) fn command(&mut self, limit: &Limit) -> io::Result<Option<Vec<Vec<u8>>>> {
        let mut is_late = false;
        loop {
            // Empty lines say that the other side is alive, and may be all that arrives for a long
            // time.
            let blank = self.inbox.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            self.inbox.drain(..blank);
            if let Some((words, taken)) = parse(&self.inbox)? {
                self.inbox.drain(..taken);
                return Ok(Some(words));
            }
            if self.inbox.len() >= LONGEST_COMMAND {
                return Err(no_command());
            }
            if is_late || !self.fill(limit)? {
                return Ok(None);
            }
            // The limit holds even while bytes keep arriving.
            is_late = match limit.nap() {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => true,
                other => other.map(|_| false)?,
            };
        }
    }

    /// Returns the next command, if it has arrived.
    pub(super) fn command_now(&mut self, stop: &Stop) -> io::Result<Option<Vec<Vec<u8>>>> {
        self.command(&Limit::new(stop, Duration::ZERO))
    }
}

impl fmt::Debug for Link {
    /// Received bytes may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("peer", &self.stream.peer_addr().ok()).finish_non_exhaustive()
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns the line at `at`, without its end, and the start of the next one.
fn line(bytes: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    Some((rest.get(..end)?.trim_ascii_end(), at + end + 1))
}

fn no_command() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the target sent something that is no command")
}

/// Parses a command at the beginning of `bytes`. `None` if it is incomplete.
fn parse(bytes: &[u8]) -> io::Result<Option<(Vec<Vec<u8>>, usize)>> {
    let number = |line: &[u8], kind: u8, most: usize| {
        let digits = line.strip_prefix(&[kind]).and_then(|digits| std::str::from_utf8(digits).ok());
        digits.and_then(|digits| digits.parse().ok()).filter(|number| *number <= most).ok_or_else(no_command)
    };
    let Some((header, mut at)) = line(bytes, 0) else { return Ok(None) };
    let count = number(header, b'*', MOST_WORDS)?;
    let mut words = Vec::new();
    for _ in 0..count {
        let Some((header, next)) = line(bytes, at) else { return Ok(None) };
        let end = next + number(header, b'$', LONGEST_COMMAND)?;
        let (Some(word), Some(behind)) = (bytes.get(next..end), bytes.get(end..end + 2)) else {
            return Ok(None);
        };
        if behind != b"\r\n" {
            return Err(no_command());
        }
        words.push(word.to_vec());
        at = end + 2;
    }
    if words.is_empty() { Err(no_command()) } else { Ok(Some((words, at))) }
}

/// Encodes a command.
pub(super) fn command(words: &[&str]) -> Vec<u8> {
    redis::Cmd::new().arg(words).get_packed_command()
}
