//! Finds the ends of frames, in bytes that come in any pieces.

use std::io;

use bytes::{Bytes, BytesMut};
use resp_rs::ParseError;
use resp_rs::resp2::{Frame, parse_frame};

/// The most bytes of a line, Valkey's `PROTO_INLINE_MAX_SIZE`: inline command, number or status.
const LONGEST_LINE: usize = 64 << 10;

/// The most frames in one frame, as in Valkey.
const MOST: usize = 1 << 20;

/// The most bytes of a frame: Valkey's `proto-max-bulk-len`, and the bytes around such a string.
const LONGEST: usize = (512 << 20) + LONGEST_LINE;

/// Cuts frames off received bytes, in whatever pieces they come. Each byte is examined once.
#[derive(Debug, Default)]
pub struct Cut {
    /// Where the next part of the frame begins, possibly beyond the received bytes.
    at: usize,
    /// No line that begins at `at` ends before this.
    searched: usize,
    /// How many frames in this one have begun or are missing; `None` before it begins.
    frames: Option<usize>,
    ended: usize,
}

impl Cut {
    /// Takes the next complete frame off the bytes, whose memory it shares. An inline command, such
    /// as `PING\r\n`, becomes an array as a client would have sent it.
    ///
    /// # Errors
    /// The bytes are no frame; or a frame of more than 512 MiB, with more than 1,048,576 frames in
    /// it, or with a line of more than 64 KiB.
    pub fn take(&mut self, bytes: &mut BytesMut) -> io::Result<Option<Frame>> {
        let Some(end) = self.end(bytes)? else { return Ok(None) };
        *self = Self::default();
        match parse(bytes.split_to(end).freeze()) {
            Ok((frame, rest)) if rest.is_empty() => Ok(Some(frame)),
            Ok(_) | Err(ParseError::Incomplete) => Err(wrong("malformed frame")),
            Err(error) => Err(wrong(error)),
        }
    }

    /// Returns the least number of missing bytes, if [`Cut::take`] left `here` bytes.
    pub(crate) const fn missing(&self, here: usize) -> usize {
        self.at.saturating_sub(here)
    }

    /// Returns the end of the frame. A malformed one ends where the mistake is found.
    fn end(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        while self.frames != Some(self.ended) {
            let Some(first) = bytes.get(self.at) else { return Ok(None) };
            let inline = self.frames.is_none() && first.is_ascii_alphabetic();
            let Some(line) = self.line(bytes, inline)? else { return Ok(None) };
            self.at += line.len();
            self.searched = self.at;
            let frames = self.frames.get_or_insert(1);
            self.ended += 1;
            match (first, number(line)) {
                (b'$', Some(len)) => self.at = self.at.saturating_add(len).saturating_add(2),
                (b'*', Some(more)) => *frames = frames.saturating_add(more),
                // Malformed; the parser reports it.
                (b'$' | b'*', None) if !line.ends_with(b"-1\r\n") => *frames = self.ended,
                _ => {}
            }
            if *frames > MOST {
                return Err(wrong("invalid multibulk length"));
            }
            if self.at > LONGEST {
                return Err(wrong("invalid bulk length"));
            }
        }
        Ok((self.at <= bytes.len()).then_some(self.at))
    }

    fn line<'a>(&mut self, bytes: &'a [u8], inline: bool) -> io::Result<Option<&'a [u8]>> {
        let most = bytes.len().min(self.at.saturating_add(LONGEST_LINE));
        let from = self.searched.max(self.at);
        if let Some(found) =
            bytes.get(from..most).and_then(|bytes| bytes.iter().position(|byte| *byte == b'\n'))
        {
            return Ok(bytes.get(self.at..=from + found));
        }
        self.searched = most;
        match most - self.at {
            LONGEST_LINE if inline => Err(wrong("too big inline request")),
            LONGEST_LINE => Err(wrong("too long a line")),
            _ => Ok(None),
        }
    }
}

/// Returns the number after the first byte of a line, if any. A length has at most twenty digits.
fn number(line: &[u8]) -> Option<usize> {
    let digits = line.get(1..)?.strip_suffix(b"\r\n")?;
    let right = digits.len() <= 20 && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| right)?.parse().ok()
}

fn wrong(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("Protocol error: {}", why.into()))
}

/// Parses a RESP frame, or an inline command into an array. Returns also the bytes after it.
///
/// # Errors
/// The bytes are no frame, or an incomplete one.
pub fn parse(bytes: Bytes) -> Result<(Frame, Bytes), ParseError> {
    if !bytes.first().is_some_and(u8::is_ascii_alphabetic) {
        return parse_frame(bytes);
    }
    let line = bytes.get(..LONGEST_LINE).unwrap_or(&bytes);
    let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
        return Err(if line.len() == LONGEST_LINE { ParseError::BadLength } else { ParseError::Incomplete });
    };
    let words = line[..end].split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let frame = words.map(|word| Frame::BulkString(Some(bytes.slice_ref(word)))).collect();
    Ok((Frame::Array(Some(frame)), bytes.slice(end + 1..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &'static [u8]) -> Frame {
        Frame::BulkString(Some(Bytes::from_static(text)))
    }

    fn cut(all: &[u8], len: usize) -> io::Result<Vec<Frame>> {
        let (mut cut, mut bytes, mut frames) = (Cut::default(), BytesMut::new(), Vec::new());
        for part in all.chunks(len) {
            bytes.extend_from_slice(part);
            while let Some(frame) = cut.take(&mut bytes)? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    #[test]
    fn frames_do_not_depend_on_how_bytes_come() {
        let all = b"$5\r\nhello\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n+OK\r\nPING  a\n*0\r\n$-1\r\n*-1\r\n*2\r\n*1\r\n:7\r\n$0\r\n\r\n-ERR x\r\n$2\r\n\r\n\r\n";
        let array = |frames| Frame::Array(Some(frames));
        let right = [
            bulk(b"hello"),
            array(vec![bulk(b"GET"), bulk(b"k")]),
            Frame::SimpleString(Bytes::from_static(b"OK")),
            array(vec![bulk(b"PING"), bulk(b"a")]),
            array(vec![]),
            Frame::BulkString(None),
            Frame::Array(None),
            array(vec![array(vec![Frame::Integer(7)]), bulk(b"")]),
            Frame::Error(Bytes::from_static(b"ERR x")),
            bulk(b"\r\n"),
        ];
        for len in 1..=all.len() {
            assert_eq!(cut(all, len).unwrap(), right, "{len}");
        }
    }

    #[test]
    fn what_is_no_frame_is_an_error() {
        for wrong in [
            &b"$x\r\n"[..],
            b"$-2\r\n",
            b"$+5\r\nhello\r\n",
            b"$99999999999999999999999\r\n",
            b"$18446744073709551615\r\n",
            b"*18446744073709551615\r\n",
            b"*1048577\r\n",
            b"*2\r\n*524288\r\n*524287\r\n",
            b"$536936448\r\n",
            b"$5\r\nhelloxx",
            b"?\r\n",
            b"\r\n",
            b"+a\n",
            b":\r\n",
        ] {
            for len in [1, wrong.len()] {
                let text = String::from_utf8_lossy(wrong);
                let error = cut(wrong, len).err().unwrap_or_else(|| panic!("{text}"));
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            }
        }
    }

    #[test]
    fn a_line_has_an_end() {
        for (begin, why) in [(b'P', "inline"), (b'+', "line"), (b'*', "line")] {
            let mut line = vec![begin; LONGEST_LINE - 1];
            assert_eq!(cut(&line, 1000).unwrap(), []);
            line.push(b'x');
            let error = cut(&line, 1000).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        let mut line = vec![b'P'; LONGEST_LINE - 2];
        line.extend_from_slice(b"\r\n");
        assert_eq!(cut(&line, 1000).unwrap().len(), 1);
    }

    /// No byte is examined twice: earlier ones are never read again, so they may even change.
    #[test]
    fn what_was_searched_is_not_searched_again() {
        let (mut cut, mut bytes) = (Cut::default(), BytesMut::new());
        for piece in [&b"*2\r\n$3\r\nGET\r\n$1"[..], b"", b"0"] {
            bytes.extend_from_slice(piece);
            assert_eq!(cut.take(&mut bytes).unwrap(), None);
            bytes.fill(b'\n');
        }
        // The incomplete line begins there.
        assert_eq!((cut.at, cut.searched, bytes.len()), (13, 16, 16));
        let (mut cut, mut bytes) = (Cut::default(), BytesMut::from(&b"PING"[..]));
        assert_eq!(cut.take(&mut bytes).unwrap(), None);
        bytes.fill(b'\n');
        bytes.extend_from_slice(b"PONG");
        assert_eq!(cut.take(&mut bytes).unwrap(), None);
    }
}
