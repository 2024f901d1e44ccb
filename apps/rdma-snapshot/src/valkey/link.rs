//! A replication link: the lines of its handshake, and the commands that go over it.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A line of a handshake is no longer.
const LONGEST_LINE: u64 = 4096;

/// Words of a command of a handshake, and bytes in one.
const MOST_WORDS: usize = 64;
const LONGEST_WORD: usize = 4096;

/// One end of a replication link.
#[derive(Debug)]
pub(super) struct Link {
    stream: BufReader<TcpStream>,
    /// Part of a line whose rest has not come.
    line: Vec<u8>,
    /// Words of a command whose rest has not come.
    words: Vec<String>,
    missing: usize,
}

impl Link {
    pub(super) fn new(stream: TcpStream, patience: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self {
            stream: BufReader::with_capacity(256 << 10, stream),
            line: Vec::new(),
            words: Vec::new(),
            missing: 0,
        })
    }

    pub(super) fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(patience))
    }

    pub(super) fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Reads some bytes; `None` if none come in time.
    pub(super) fn read(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match self.stream.read(into) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the replication link was closed")),
            Ok(count) => Ok(Some(count)),
            Err(error) if is_timeout(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The next line, without its end; `None` if it does not come in time.
    pub(super) fn line(&mut self) -> io::Result<Option<String>> {
        loop {
            let left = LONGEST_LINE.saturating_sub(self.line.len() as u64);
            let read = (&mut self.stream).take(left).read_until(b'\n', &mut self.line);
            match read {
                Ok(_) if self.line.last() == Some(&b'\n') => {
                    let line = std::mem::take(&mut self.line);
                    return Ok(Some(String::from_utf8_lossy(line.trim_ascii_end()).into_owned()));
                }
                Ok(0) if left > 0 => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the replication link was closed",
                    ));
                }
                Ok(_) if self.line.len() as u64 >= LONGEST_LINE => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no replication link"));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a command and returns the line that answers it. Empty lines say that the other side is alive.
    pub(super) fn ask(&mut self, words: &[&str]) -> io::Result<String> {
        self.write_all(&command(words))?;
        self.answer()
    }

    pub(super) fn answer(&mut self) -> io::Result<String> {
        loop {
            match self.line()? {
                Some(line) if line.is_empty() => {}
                Some(line) => return Ok(line),
                None => {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer on the replication link"));
                }
            }
        }
    }

    /// The next command, if one comes in time: an array of short words.
    pub(super) fn command(&mut self) -> io::Result<Option<Vec<String>>> {
        let invalid =
            || io::Error::new(io::ErrorKind::InvalidData, "the target sent something that is no command");
        loop {
            let Some(line) = self.line()? else { return Ok(None) };
            if self.missing == 0 {
                if line.is_empty() {
                    continue;
                }
                let count = line.strip_prefix('*').and_then(|count| count.parse().ok());
                self.missing = count.filter(|count| (1..=MOST_WORDS).contains(count)).ok_or_else(invalid)?;
                continue;
            }
            // A word's length, and the word, which has no line end within in any command of a replica.
            if let Some(length) = line.strip_prefix('$')
                && self.words.len() < self.missing
                && length.parse::<usize>().is_ok_and(|length| length <= LONGEST_WORD)
            {
                let word = loop {
                    if let Some(word) = self.line()? {
                        break word;
                    }
                };
                self.words.push(word);
                if self.words.len() == self.missing {
                    self.missing = 0;
                    return Ok(Some(std::mem::take(&mut self.words)));
                }
            } else {
                return Err(invalid());
            }
        }
    }
}

/// A command as it is sent.
pub(super) fn command(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    bytes
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
