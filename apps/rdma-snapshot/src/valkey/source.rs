//! A primary, read as its replica.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::link::{Link, command};
use super::{PATIENCE, Server, field};
use crate::reader::Position;
use crate::source::{Piece, Source};
use crate::wire::Content;

/// How long the primary may take to make its snapshot, before the first byte and between two of them.
const SNAPSHOT: Duration = Duration::from_secs(60);

/// How long a read of later writes waits.
const QUIET: Duration = Duration::from_millis(50);

/// How often the primary is told how far we are: it drops replicas that are silent.
const ACKNOWLEDGE: Duration = Duration::from_secs(1);

/// Bytes of the mark behind an RDB whose length is not known before.
const MARK: usize = 40;

/// A live primary.
#[derive(Debug)]
pub struct LiveSource {
    server: Server,
    link: Link,
    position: Position,
    state: State,
    /// Where in the history the next byte of the log is.
    offset: u64,
    /// Where the log ends, once that was asked for.
    until: Option<u64>,
    acknowledged: Instant,
    /// Whether the log of later writes is wanted.
    follow: bool,
}

#[derive(Debug)]
enum State {
    /// So many bytes of the RDB are left.
    Length(u64),
    /// The RDB ends with these bytes. What was read and may be a part of them is kept.
    UpTo([u8; MARK], Vec<u8>),
    /// The RDB was handed over; what is behind it is the log.
    Log,
}

impl LiveSource {
    /// Becomes a replica of `server`, and waits until its snapshot begins. With `follow` the log of later writes comes behind it,
    /// until it is stopped.
    ///
    /// # Errors
    /// It does not answer, refuses, or is no primary that can be replicated from.
    pub fn open(server: Server, follow: bool) -> io::Result<Self> {
        let mut admin = server.admin()?;
        let info = server.info(&mut admin, "server")?;
        let version = field(&info, "valkey_version").or_else(|| field(&info, "redis_version"));
        // The RDB is of the version that we say we have, so say the primary's own: nothing is lost on the way.
        let version = version.unwrap_or("7.2.4").to_string();
        let address = (server.host.as_str(), server.port).to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other(format!("{} has no address", server.host)))?;
        let mut link = Link::new(TcpStream::connect_timeout(&address, PATIENCE)?, PATIENCE)?;
        if let Some(password) = &server.password {
            let answer = match &server.user {
                Some(user) => link.ask(&["AUTH", user, password])?,
                None => link.ask(&["AUTH", password])?,
            };
            expect(&answer, "+OK")?;
        }
        link.ask(&["REPLCONF", "capa", "eof", "capa", "psync2"])?;
        // Primaries before Valkey 8 do not know this, and do not need it.
        link.ask(&["REPLCONF", "version", &version])?;
        link.set_patience(SNAPSHOT)?;
        let answer = link.ask(&["PSYNC", "?", "-1"])?;
        let position = position(&answer)?;
        let begin = link.answer()?;
        let state = match begin.strip_prefix("$EOF:") {
            Some(mark) => {
                let mark = mark.as_bytes().try_into();
                State::UpTo(mark.map_err(|_| unexpected(&begin))?, Vec::new())
            }
            None => {
                let length = begin.strip_prefix('$').and_then(|length| length.parse().ok());
                State::Length(length.ok_or_else(|| unexpected(&begin))?)
            }
        };
        let offset = position.offset;
        Ok(Self { server, link, position, state, offset, until: None, acknowledged: Instant::now(), follow })
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        self.acknowledged = Instant::now();
        self.link.write_all(&command(&["REPLCONF", "ACK", &self.offset.to_string()]))
    }

    /// The RDB is over.
    fn mark(&mut self) -> io::Result<Piece> {
        self.state = State::Log;
        self.link.set_patience(QUIET)?;
        // The primary begins with the log when it hears this.
        self.acknowledge()?;
        Ok(Piece::Mark)
    }

    fn log(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if !self.follow || self.until.is_some_and(|until| self.offset >= until) {
            return Ok(Piece::End);
        }
        if self.acknowledged.elapsed() >= ACKNOWLEDGE {
            self.acknowledge()?;
        }
        let Some(count) = self.link.read(into)? else { return Ok(Piece::Idle) };
        self.offset += count as u64;
        Ok(Piece::Bytes(count))
    }
}

impl Source for LiveSource {
    fn content(&self) -> Content {
        Content::Rdb
    }

    fn total(&self) -> Option<u64> {
        if let State::Length(length) = self.state { Some(length) } else { None }
    }

    fn position(&self) -> Option<Position> {
        Some(self.position)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the primary stopped sending its snapshot");
        match &mut self.state {
            State::Length(0) => self.mark(),
            State::Length(left) => {
                let room = usize::try_from(*left).unwrap_or(usize::MAX).min(into.len());
                let count = self.link.read(into.get_mut(..room).unwrap_or_default())?.ok_or_else(late)?;
                *left = left.saturating_sub(count as u64);
                Ok(Piece::Bytes(count))
            }
            State::UpTo(mark, held) => loop {
                // The last bytes that came may be the mark, so they are kept until more come.
                let ready = held.len().saturating_sub(MARK).min(into.len());
                if ready > 0 {
                    for (to, from) in into.iter_mut().zip(held.drain(..ready)) {
                        *to = from;
                    }
                    return Ok(Piece::Bytes(ready));
                }
                if held == mark {
                    return self.mark();
                }
                let mut more = vec![0; 64 << 10];
                let count = self.link.read(&mut more)?.ok_or_else(late)?;
                held.extend_from_slice(more.get(..count).unwrap_or_default());
            },
            State::Log => self.log(into),
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        let mut admin = self.server.admin()?;
        let info = self.server.info(&mut admin, "replication")?;
        let offset = field(&info, "master_repl_offset").and_then(|offset| offset.parse().ok());
        self.until = Some(offset.ok_or_else(|| io::Error::other("the primary does not say how far it is"))?);
        Ok(())
    }
}

fn expect(answer: &str, expected: &str) -> io::Result<()> {
    if answer == expected { Ok(()) } else { Err(unexpected(answer)) }
}

fn unexpected(answer: &str) -> io::Error {
    io::Error::other(format!("the primary answered: {answer}"))
}

/// Parses `+FULLRESYNC id offset`.
fn position(answer: &str) -> io::Result<Position> {
    let mut words = answer.strip_prefix("+FULLRESYNC ").unwrap_or_default().split(' ');
    let history = words.next().and_then(|history| history.as_bytes().try_into().ok());
    let offset = words.next().and_then(|offset| offset.parse().ok());
    match (history, offset) {
        (Some(history), Some(offset)) => Ok(Position { history, offset }),
        _ => Err(unexpected(answer)),
    }
}
