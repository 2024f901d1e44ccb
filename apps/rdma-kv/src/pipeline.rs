//! Sends commands while replies come back.
//!
//! A server may stop reading at any time if its replies are not read. So while it owes a reply to a
//! complete command, writing does not wait, and that reply is read next. If it owes none, it must
//! be reading, and writing waits.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::slice;

use crate::client::{Counts, Part, arguments, command};
use crate::transport::{Deadline, Transport, Wait};

/// How many bytes of commands are made ahead.
const AHEAD: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Get,
    /// The TTL of the keys in milliseconds, if limited.
    Set(Option<u64>),
    /// A part of a value. The value would begin in the buffer here.
    GetRange(usize),
    /// The same, to set it.
    SetRange(usize),
    Exists,
    Del,
    Strlen,
}

impl Verb {
    const fn name(self) -> &'static [u8] {
        match self {
            Self::Get => b"GET",
            Self::Set(_) => b"SET",
            Self::GetRange(_) => b"GETRANGE",
            Self::SetRange(_) => b"SETRANGE",
            Self::Exists => b"EXISTS",
            Self::Del => b"DEL",
            Self::Strlen => b"STRLEN",
        }
    }
}

pub(crate) struct Pipeline<'a> {
    verb: Verb,
    parts: slice::Iter<'a, Part<'a>>,
    bytes: Vec<u8>,
    /// How many of these bytes the stream has taken.
    at: usize,
    ends: VecDeque<usize>,
    /// The value after these bytes, in a command whose end is not encoded yet.
    value: Option<Range<usize>>,
    /// How many complete commands the stream has taken.
    whole: usize,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(verb: Verb, parts: &'a [Part<'a>]) -> Self {
        let (bytes, ends) = (Vec::new(), VecDeque::new());
        Self { verb, parts: parts.iter(), bytes, at: 0, ends, value: None, whole: 0 }
    }

    pub(crate) fn go_on<T: Transport>(
        &mut self,
        stream: &mut T,
        buffer: Option<&T::Buffer>,
        replies: usize,
        deadline: Deadline,
        counts: &mut Counts,
    ) -> io::Result<()> {
        loop {
            let wait = if self.whole > replies { Wait::Not } else { Wait::Until(deadline) };
            let bytes = self.bytes.get(self.at..).unwrap_or_default();
            let taken = if !bytes.is_empty() {
                self.wrote(stream.write_with(bytes, wait)?)
            } else if let Some(value) = self.value.as_mut().filter(|value| value.start < value.end)
                && let Some(buffer) = buffer
            {
                let sent = stream.send(buffer, value.clone(), wait)?;
                value.start += sent.bytes();
                counts.bytes_lent += sent.lent as u64;
                counts.bytes_copied += sent.copied as u64;
                sent.bytes()
            } else if self.make() {
                continue;
            } else {
                return Ok(());
            };
            if taken == 0 {
                return if wait == Wait::Not { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) };
            }
        }
    }

    fn wrote(&mut self, written: usize) -> usize {
        self.at += written;
        while self.ends.front().is_some_and(|end| *end <= self.at) {
            self.ends.pop_front();
            self.whole += 1;
        }
        written
    }

    /// Encodes commands, up to the next value. Returns false if there are no more.
    fn make(&mut self) -> bool {
        self.bytes.clear();
        self.at = 0;
        if self.value.take().is_some() {
            self.bytes.extend_from_slice(b"\r\n");
            if let Verb::Set(Some(lives)) = self.verb {
                arguments(&mut self.bytes, &[b"PX", lives.to_string().as_bytes()]);
            }
            self.ends.push_back(self.bytes.len());
        }
        while self.bytes.len() < AHEAD
            && let Some(Part { key, range }) = self.parts.next()
        {
            let name = self.verb.name();
            match self.verb {
                Verb::Get | Verb::Exists | Verb::Del | Verb::Strlen => {
                    command(&mut self.bytes, 2, &[name, key]);
                    self.ends.push_back(self.bytes.len());
                }
                Verb::GetRange(begin) => {
                    // No part is empty: the last byte is named, not the end.
                    let first = range.start.saturating_sub(begin).to_string();
                    let last = range.end.saturating_sub(begin + 1).to_string();
                    command(&mut self.bytes, 4, &[name, key, first.as_bytes(), last.as_bytes()]);
                    self.ends.push_back(self.bytes.len());
                }
                Verb::SetRange(begin) => {
                    let offset = range.start.saturating_sub(begin).to_string();
                    command(&mut self.bytes, 4, &[name, key, offset.as_bytes()]);
                    self.bytes.extend_from_slice(format!("${}\r\n", range.len()).as_bytes());
                    self.value = Some(range.clone());
                    break;
                }
                Verb::Set(lives) => {
                    // The bytes of the third argument are not copied into the command.
                    command(&mut self.bytes, if lives.is_some() { 5 } else { 3 }, &[name, key]);
                    self.bytes.extend_from_slice(format!("${}\r\n", range.len()).as_bytes());
                    self.value = Some(range.clone());
                    break;
                }
            }
        }
        !self.bytes.is_empty()
    }
}
