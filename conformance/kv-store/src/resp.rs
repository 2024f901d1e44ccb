//! RESP frames from a byte stream.

use std::io::{self, Read};

use bytes::{Bytes, BytesMut};
use resp_rs::ParseError;
use resp_rs::resp2::{Frame, frame_to_bytes, parse_frame};

/// Bytes that were received, cut into frames, which share their memory.
#[derive(Default)]
pub struct Frames(Bytes);

impl Frames {
    /// Appends what was received.
    pub fn push(&mut self, received: &[u8]) {
        // Free of charge unless a frame that was cut from this memory is still in use.
        let unparsed = std::mem::take(&mut self.0);
        let mut buffer = unparsed.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
        buffer.extend_from_slice(received);
        if let Some(rest) = missing(&buffer) {
            buffer.reserve(rest.min(AHEAD));
        }
        self.0 = buffer.freeze();
    }

    /// Appends what `read` puts into the `most` bytes that it is given, and returns what it returns: how many it has put there.
    pub fn read<E>(
        &mut self,
        most: usize,
        read: impl FnOnce(&mut [u8]) -> Result<Option<usize>, E>,
    ) -> Result<Option<usize>, E> {
        let unparsed = std::mem::take(&mut self.0);
        let mut buffer = unparsed.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&shared[..]));
        let before = buffer.len();
        buffer.resize(before + most, 0);
        let result = read(&mut buffer[before..]);
        let added = result.as_ref().ok().copied().flatten().unwrap_or(0);
        buffer.truncate(before + added.min(most));
        self.0 = buffer.freeze();
        result
    }

    /// The next frame that is there whole.
    pub fn take(&mut self) -> io::Result<Option<Frame>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        match parse(self.0.clone()) {
            Ok((frame, rest)) => {
                self.0 = rest;
                Ok(Some(frame))
            }
            Err(ParseError::Incomplete) => Ok(None),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }
}

/// Room that is made together for a string that was begun, whatever length it says it has.
const AHEAD: usize = 1 << 20;

/// Returns how many bytes are missing of the string that begins `bytes`, if one does and says how long it is.
fn missing(bytes: &[u8]) -> Option<usize> {
    let (b'$', text) = bytes.split_first()? else { return None };
    // Twenty digits and the end of the line.
    let digits = text.iter().take(21).position(|byte| *byte == b'\r')?;
    let len: usize = std::str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    len.checked_add(digits + 5)?.checked_sub(bytes.len())
}

/// Reads frames from `S`, which blocks.
pub struct FrameReader<S> {
    stream: S,
    frames: Frames,
    chunk: Box<[u8]>,
}

impl<S: Read> FrameReader<S> {
    /// A reader at the beginning of a stream.
    pub fn new(stream: S) -> Self {
        Self { stream, frames: Frames::default(), chunk: vec![0; 256 << 10].into() }
    }

    /// The stream below, to write to.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// The next frame that has arrived whole.
    pub fn buffered(&mut self) -> io::Result<Option<Frame>> {
        self.frames.take()
    }

    /// Waits for more bytes; false at the end of the stream.
    pub fn fill(&mut self) -> io::Result<bool> {
        let read = self.stream.read(&mut self.chunk)?;
        self.frames.push(&self.chunk[..read]);
        Ok(read > 0)
    }

    /// Waits for a frame; `None` at the end of the stream.
    pub fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(Some(frame));
            }
            if !self.fill()? {
                return if self.frames.0.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }
}

/// Appends a frame as it goes over the wire. A string is copied once.
pub(crate) fn append(to: &mut BytesMut, frame: &Frame) {
    let Frame::BulkString(Some(bytes)) = frame else {
        return to.extend_from_slice(&frame_to_bytes(frame));
    };
    const END: &[u8] = b"\r\n";
    to.reserve(bytes.len() + 32);
    to.extend_from_slice(b"$");
    to.extend_from_slice(bytes.len().to_string().as_bytes());
    to.extend_from_slice(END);
    to.extend_from_slice(bytes);
    to.extend_from_slice(END);
}

/// A RESP frame, or an inline command such as `PING\r\n`, which becomes an array as a client would have sent it.
pub fn parse(bytes: Bytes) -> Result<(Frame, Bytes), ParseError> {
    if !bytes.first().is_some_and(u8::is_ascii_alphabetic) {
        return parse_frame(bytes);
    }
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(ParseError::Incomplete)?;
    let words = bytes[..end].split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let frame = words.map(|word| Frame::BulkString(Some(bytes.slice_ref(word)))).collect();
    Ok((Frame::Array(Some(frame)), bytes.slice(end + 1..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_of_a_string() {
        for (bytes, rest) in [
            (&b"$5\r\n"[..], Some(7)),
            (b"$5\r\nhe", Some(5)),
            (b"$5\r\nhello\r\n", Some(0)),
            (b"$5\r\nhello\r\n+OK", None),
            (b"$5", None),
            (b"$-1\r\n", None),
            (b"$99999999999999999999999\r\n", None),
            (b"$18446744073709551615\r\n", None),
            (b"+OK\r\n", None),
            (b"", None),
        ] {
            assert_eq!(missing(bytes), rest, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    /// Frames are the same however their bytes come, and those that were put there by a read are those that were pushed.
    #[test]
    fn frames_do_not_depend_on_how_bytes_come() {
        let all = b"$5\r\nhello\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n+OK\r\n";
        for len in 1..all.len() {
            let (mut pushed, mut read) = (Frames::default(), Frames::default());
            let mut frames = [Vec::new(), Vec::new()];
            for part in all.chunks(len) {
                pushed.push(part);
                let put = read.read(part.len() + 7, |into| {
                    into[..part.len()].copy_from_slice(part);
                    io::Result::Ok(Some(part.len()))
                });
                assert_eq!(put.unwrap(), Some(part.len()));
                assert_eq!(read.read(9, |_| io::Result::Ok(None)).unwrap(), None);
                for (from, frames) in [&mut pushed, &mut read].into_iter().zip(&mut frames) {
                    while let Some(frame) = from.take().unwrap() {
                        frames.push(frame);
                    }
                }
            }
            assert_eq!(frames[0].len(), 3, "{len}");
            assert_eq!(frames[0], frames[1], "{len}");
        }
    }
}
