//! A connection for commands. Every wait on it has a limit.

use std::io::{self, Read};

use redis::{Parser, Value};

use super::link::{Link, command};
use super::{PATIENCE, Server};
use crate::wait::Limit;

/// The most bytes of an answer.
const LONGEST_ANSWER: u64 = 16 << 20;

/// Error codes that explain the error without repeating the command.
const CODES: [&str; 8] =
    ["DENIED", "ERR", "LOADING", "MASTERDOWN", "NOAUTH", "NOPERM", "READONLY", "WRONGPASS"];

/// A connection for commands.
pub(super) struct Admin {
    server: Server,
    link: Link,
}

impl Admin {
    /// Connects, and authenticates if the URL has a password.
    pub(super) fn connect(server: &Server, limit: &Limit) -> io::Result<Self> {
        let mut admin = Self { link: Link::connect(server, limit)?, server: server.clone() };
        if let Some(password) = &server.password {
            let answer = match &server.user {
                Some(user) => admin.ask(&["AUTH", user, password], limit)?,
                None => admin.ask(&["AUTH", password], limit)?,
            };
            // An answer may repeat the refused command.
            if let Err(code) = without_text(&answer) {
                return Err(server.failed("AUTH", io::Error::other(code)));
            }
        }
        Ok(admin)
    }

    /// Returns the underlying connection.
    pub(super) const fn link(&self) -> &Link {
        &self.link
    }

    /// Sends a command and returns its answer, which may be a server's error.
    pub(super) fn ask(&mut self, words: &[&str], limit: &Limit) -> io::Result<Value> {
        let what = words.first().copied().unwrap_or_default();
        let limit = limit.within(PATIENCE);
        let answered = (|| {
            self.link.write_all(&command(words), &limit)?;
            let mut answer = Answer { link: &mut self.link, limit: &limit, failed: None };
            let parsed = Parser::new().parse_value((&mut answer).take(LONGEST_ANSWER));
            match answer.failed {
                Some(error) => Err(error),
                // The parser's own words may contain bytes of the answer.
                None => {
                    parsed.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the answer is no RESP"))
                }
            }
        })();
        answered.map_err(|error| self.server.failed(what, error))
    }

    /// Sends a command without secrets. A refusal is an error in the server's words.
    pub(super) fn get(&mut self, words: &[&str], limit: &Limit) -> io::Result<Value> {
        let what = words.first().copied().unwrap_or_default();
        match self.ask(words, limit)? {
            Value::ServerError(error) => {
                let text = format!("{} {}", error.code(), error.details().unwrap_or_default());
                Err(self.server.failed(what, io::Error::other(self.server.printable(text.trim_end()))))
            }
            value => Ok(value),
        }
    }

    /// Returns the text of `INFO section`.
    pub(super) fn info(&mut self, section: &str, limit: &Limit) -> io::Result<String> {
        match self.get(&["INFO", section], limit)? {
            Value::BulkString(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            _ => Err(self.server.failed("INFO", io::Error::other("the answer is no text"))),
        }
    }
}

/// Returns the code of an error answer, if it is a known one. Other answers are `Ok`.
pub(super) fn without_text(answer: &Value) -> Result<(), &'static str> {
    let Value::ServerError(error) = answer else { return Ok(()) };
    Err(CODES.into_iter().find(|code| *code == error.code()).unwrap_or("refused"))
}

/// The bytes of an answer, as they arrive. Keeps the error that ended them.
struct Answer<'a> {
    link: &'a mut Link,
    limit: &'a Limit,
    failed: Option<io::Error>,
}

impl Read for Answer<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.limit.nap().and_then(|_| self.link.read(into, self.limit));
        match read {
            Ok(Some(count)) => Ok(count),
            Ok(None) => Err(self.fail(io::ErrorKind::TimedOut.into())),
            Err(error) => Err(self.fail(error)),
        }
    }
}

impl Answer<'_> {
    /// Keeps the error, and returns one that no reader retries.
    fn fail(&mut self, error: io::Error) -> io::Error {
        self.failed = Some(error);
        io::ErrorKind::Other.into()
    }
}
