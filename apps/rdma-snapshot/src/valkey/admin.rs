//! A connection for commands, whose every wait has a limit.

use std::io::{self, Read};

use redis::{Parser, Value};

use super::link::{Link, command};
use super::{PATIENCE, Server};
use crate::wait::Limit;

/// Bytes of an answer, at most.
const LONGEST_ANSWER: u64 = 16 << 20;

/// Codes of errors that say what is wrong without a word of the command.
const CODES: [&str; 8] =
    ["DENIED", "ERR", "LOADING", "MASTERDOWN", "NOAUTH", "NOPERM", "READONLY", "WRONGPASS"];

/// A connection for commands.
pub(super) struct Admin {
    server: Server,
    link: Link,
}

impl Admin {
    /// Connects, and says who asks if the URL does.
    pub(super) fn connect(server: &Server, limit: &Limit) -> io::Result<Self> {
        let mut admin = Self { link: Link::connect(server, limit)?, server: server.clone() };
        if let Some(password) = &server.password {
            let answer = match &server.user {
                Some(user) => admin.ask(&["AUTH", user, password], limit)?,
                None => admin.ask(&["AUTH", password], limit)?,
            };
            // An answer may repeat what it refuses.
            if let Err(code) = without_text(&answer) {
                return Err(server.failed("AUTH", io::Error::other(code)));
            }
        }
        Ok(admin)
    }

    /// The connection under it.
    pub(super) const fn link(&self) -> &Link {
        &self.link
    }

    /// Sends a command and returns its answer, which may be an error of the server's.
    pub(super) fn ask(&mut self, words: &[&str], limit: &Limit) -> io::Result<Value> {
        let what = words.first().copied().unwrap_or_default();
        let limit = limit.within(PATIENCE);
        let answered = (|| {
            self.link.write_all(&command(words), &limit)?;
            let mut answer = Answer { link: &mut self.link, limit: &limit, failed: None };
            let parsed = Parser::new().parse_value((&mut answer).take(LONGEST_ANSWER));
            match answer.failed {
                Some(error) => Err(error),
                // The parser's own words may have bytes of the answer in them.
                None => {
                    parsed.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the answer is no RESP"))
                }
            }
        })();
        answered.map_err(|error| self.server.failed(what, error))
    }

    /// The same for a command without secrets, whose refusal is an error in the server's words.
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

    /// The fields of `INFO section`, as text.
    pub(super) fn info(&mut self, section: &str, limit: &Limit) -> io::Result<String> {
        match self.get(&["INFO", section], limit)? {
            Value::BulkString(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            _ => Err(self.server.failed("INFO", io::Error::other("the answer is no text"))),
        }
    }
}

/// Returns whether an answer is no error; if it is one, its code, if that is a known one.
pub(super) fn without_text(answer: &Value) -> Result<(), &'static str> {
    let Value::ServerError(error) = answer else { return Ok(()) };
    Err(CODES.into_iter().find(|code| *code == error.code()).unwrap_or("refused"))
}

/// The bytes of an answer, as they come. Keeps the error that ended them.
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
    /// Keeps the error, and returns one that no reader takes for a reason to go on.
    fn fail(&mut self, error: io::Error) -> io::Error {
        self.failed = Some(error);
        io::ErrorKind::Other.into()
    }
}
