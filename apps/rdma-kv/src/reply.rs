//! Replies of a server to this client's commands.

use std::io::Read;
use std::ops::Range;

use rdma_conn::Received;

use crate::error::Error;
use crate::transport::{Deadline, Transport, Until};

/// Bytes read at once where a line is expected. What follows the line is copied, so this is short.
const CHUNK: usize = 64;

/// The longest line that a server may send: an error's text, or a number.
const LONGEST_LINE: usize = 64 << 10;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// `+OK`
    Status(String),
    /// `:5`
    Number(i64),
    /// `$5`, and 5 bytes follow; `None` for a missing key.
    Value(Option<u64>),
    /// `*5`, and 5 replies follow; `None` for a transaction that was not executed.
    Many(Option<u64>),
}

#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// The bytes read, and how many of them were used.
    ahead: Vec<u8>,
    used: usize,
}

impl Replies {
    fn ahead(&self) -> &[u8] {
        self.ahead.get(self.used..).unwrap_or_default()
    }

    pub(crate) fn line(&mut self, stream: &mut impl Read) -> Result<Line, Error> {
        let mut looked = 0;
        loop {
            let ahead = self.ahead();
            if let Some(at) = ahead.iter().skip(looked).position(|byte| *byte == b'\n') {
                let line = ahead.get(..looked + at).unwrap_or_default();
                let parsed = parse(line);
                self.used += looked + at + 1;
                self.forget();
                return parsed;
            }
            looked = ahead.len();
            if looked > LONGEST_LINE {
                return Err(Error::Unexpected(format!("a line of more than {LONGEST_LINE} bytes")));
            }
            self.ahead.drain(..self.used);
            self.used = 0;
            let mut chunk = [0; CHUNK];
            match stream.read(&mut chunk)? {
                0 => return Err(Error::Io(std::io::ErrorKind::UnexpectedEof.into())),
                read => self.ahead.extend_from_slice(chunk.get(..read).unwrap_or_default()),
            }
        }
    }

    fn forget(&mut self) {
        if self.used == self.ahead.len() {
            self.ahead.clear();
            self.ahead.shrink_to(CHUNK);
            self.used = 0;
        }
    }

    fn take(&mut self, most: usize) -> &[u8] {
        let from = self.used;
        self.used = from + most.min(self.ahead.len() - from);
        self.ahead.get(from..self.used).unwrap_or_default()
    }

    pub(crate) fn value<T: Transport>(
        &mut self,
        stream: &mut T,
        buffer: &mut T::Buffer,
        range: Range<usize>,
        deadline: Deadline,
    ) -> Result<Received, Error> {
        let received = stream.receive(self.take(range.len()), buffer, range, deadline)?;
        self.end_of_value(&mut Until { stream, deadline })?;
        Ok(received)
    }

    pub(crate) fn drop_value(&mut self, stream: &mut impl Read, len: u64) -> Result<(), Error> {
        let most = usize::try_from(len).unwrap_or(usize::MAX);
        let mut left = len - self.take(most).len() as u64;
        let mut dropped = vec![0; usize::try_from(left).unwrap_or(usize::MAX).min(8 << 10)];
        while left > 0 {
            let most = left.min(dropped.len() as u64) as usize;
            let into = dropped.get_mut(..most).unwrap_or_default();
            stream.read_exact(into)?;
            left -= most as u64;
        }
        self.end_of_value(stream)
    }

    pub(crate) fn bytes(&mut self, stream: &mut impl Read, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = self.take(len).to_vec();
        let ahead = bytes.len();
        bytes.resize(len, 0);
        stream.read_exact(bytes.get_mut(ahead..).unwrap_or_default())?;
        self.end_of_value(stream)?;
        Ok(bytes)
    }

    fn end_of_value(&mut self, stream: &mut impl Read) -> Result<(), Error> {
        let mut end = [0; 2];
        let (ahead, rest) = end.split_at_mut(self.ahead().len().min(2));
        ahead.copy_from_slice(self.take(ahead.len()));
        stream.read_exact(rest)?;
        if end == *b"\r\n" { Ok(()) } else { Err(Error::Unexpected("a value of another length".into())) }
    }
}

fn parse(line: &[u8]) -> Result<Line, Error> {
    let unexpected = || Error::Unexpected(format!("{:?}", String::from_utf8_lossy(line)));
    let text =
        std::str::from_utf8(line.strip_suffix(b"\r").ok_or_else(unexpected)?).map_err(|_| unexpected())?;
    let (kind, rest) = text.split_at_checked(1).ok_or_else(unexpected)?;
    let number = || rest.parse::<i64>().map_err(|_| unexpected());
    match kind {
        "+" => Ok(Line::Status(rest.into())),
        "-" => Err(Error::Refused(rest.into())),
        ":" => Ok(Line::Number(number()?)),
        "_" => Ok(Line::Value(None)),
        "$" | "*" => {
            let len = match number()? {
                -1 => None,
                len => Some(u64::try_from(len).map_err(|_| unexpected())?),
            };
            Ok(if kind == "$" { Line::Value(len) } else { Line::Many(len) })
        }
        _ => Err(unexpected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_however_they_are_cut() {
        let text = b"+OK\r\n:-7\r\n$5\r\nvalue\r\n$-1\r\n*0\r\n*-1\r\n_\r\n-ERR no\r\n";
        for cut in 1..text.len() {
            let (first, second) = text.split_at(cut);
            let mut stream = first.chain(second);
            let mut replies = Replies::default();
            for expected in [Line::Status("OK".into()), Line::Number(-7), Line::Value(Some(5))] {
                assert_eq!(replies.line(&mut stream).expect("a line"), expected);
            }
            replies.drop_value(&mut stream, 5).expect("a value");
            for expected in [Line::Value(None), Line::Many(Some(0)), Line::Many(None), Line::Value(None)] {
                assert_eq!(replies.line(&mut stream).expect("a line"), expected);
            }
            assert!(matches!(replies.line(&mut stream), Err(Error::Refused(text)) if text == "ERR no"));
            assert!(matches!(replies.line(&mut stream), Err(Error::Io(_))), "the end");
        }
    }

    #[test]
    fn a_long_line_keeps_no_memory() {
        let mut replies = Replies::default();
        for behind in ["", "+OK\r\n"] {
            let line = format!("-{}\r\n{behind}", "x".repeat(LONGEST_LINE - 100));
            let mut stream = line.as_bytes();
            assert!(matches!(replies.line(&mut stream), Err(Error::Refused(_))));
            if !behind.is_empty() {
                replies.line(&mut stream).expect("a line");
            }
            assert!(replies.ahead.capacity() <= CHUNK, "{}", replies.ahead.capacity());
        }
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        for bytes in [
            &b"\r\n"[..],
            b"hello\r\n",
            b"$x\r\n",
            b"$\r\n",
            b"$-2\r\n",
            b"$99999999999999999999\r\n",
            b"*-2\r\n",
            b"+OK\n",
            b"+\xff\r\n",
            b":\r\n",
        ] {
            let refused = Replies::default().line(&mut &*bytes).expect_err("no reply");
            assert!(matches!(refused, Error::Unexpected(_)), "{refused}");
        }
        let endless = [b'+'; LONGEST_LINE + 2 * CHUNK];
        assert!(matches!(Replies::default().line(&mut &endless[..]), Err(Error::Unexpected(_))));
        let mut wrong = &b"$3\r\nvalue\r\n"[..];
        let mut replies = Replies::default();
        assert_eq!(replies.line(&mut wrong).expect("a line"), Line::Value(Some(3)));
        assert!(matches!(replies.drop_value(&mut wrong, 3), Err(Error::Unexpected(_))));
    }
}
