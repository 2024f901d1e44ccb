//! RESP frames from a byte stream.

use std::io::{self, Read};

use bytes::{BufMut, BytesMut};
use resp_rs::resp2::{Frame, frame_to_bytes};

use crate::buffer::Buffer;
use crate::cut::Cut;

/// Received bytes, cut into frames, which share their memory. It is in proportion to what is left.
#[derive(Debug, Default)]
pub struct Frames {
    buffer: Buffer,
    cut: Cut,
}

impl Frames {
    /// Appends received bytes.
    pub fn push(&mut self, received: &[u8]) {
        self.buffer.bytes.extend_from_slice(received);
        self.buffer.grown();
    }

    /// Appends what `read` puts into the `most` bytes that it gets, and returns its result.
    pub fn read<E>(
        &mut self,
        most: usize,
        read: impl FnOnce(&mut [u8]) -> Result<Option<usize>, E>,
    ) -> Result<Option<usize>, E> {
        let bytes = &mut self.buffer.bytes;
        let before = bytes.len();
        bytes.resize(before + most, 0);
        let result = read(&mut bytes[before..]);
        let added = result.as_ref().ok().copied().flatten().unwrap_or(0);
        bytes.truncate(before + added.min(most));
        self.buffer.grown();
        result
    }

    /// Returns the next complete frame.
    ///
    /// # Errors
    /// Those of [`Cut::take`].
    pub fn take(&mut self) -> io::Result<Option<Frame>> {
        let taken = self.cut.take(&mut self.buffer.bytes);
        self.buffer.settle();
        taken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.buffer.bytes.is_empty()
    }

    pub(crate) fn missing(&self) -> usize {
        self.cut.missing(self.buffer.bytes.len())
    }
}

/// Bytes to read from a stream if it is unknown how many come: what a waiting reader uses.
const CHUNK: usize = 16 << 10;
/// Bytes to read together, of a longer string, if as many have come before: they are cleared first.
const AHEAD: std::ops::RangeInclusive<usize> = 4 << 10..=1 << 20;

const END: &[u8] = b"\r\n";

/// Reads frames from a blocking `S`.
pub struct FrameReader<S> {
    stream: S,
    frames: Frames,
    chunk: Box<[u8]>,
    ahead: usize,
}

impl<S: Read> FrameReader<S> {
    /// Returns a reader at the beginning of a stream.
    pub fn new(stream: S) -> Self {
        Self { stream, frames: Frames::default(), chunk: vec![0; CHUNK].into(), ahead: *AHEAD.start() }
    }

    /// Returns the underlying stream, for writing.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Returns the next frame that has arrived completely.
    pub fn buffered(&mut self) -> io::Result<Option<Frame>> {
        self.frames.take()
    }

    /// Waits for more bytes. Returns false at the end of the stream.
    pub fn fill(&mut self) -> io::Result<bool> {
        let missing = self.frames.missing();
        let read = if missing > CHUNK {
            let stream = &mut self.stream;
            let most = missing.min(self.ahead);
            let read = self.frames.read(most, |into| stream.read(into).map(Some))?.unwrap_or(0);
            self.ahead = (2 * read).clamp(*AHEAD.start(), *AHEAD.end());
            read
        } else {
            let read = self.stream.read(&mut self.chunk)?;
            self.frames.push(&self.chunk[..read]);
            read
        };
        Ok(read > 0)
    }

    /// Waits for a frame; `None` at the end of the stream.
    pub fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(Some(frame));
            }
            if !self.fill()? {
                return if self.frames.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }
}

/// Appends an encoded frame. A string is copied once.
pub(crate) fn append(to: &mut BytesMut, frame: &Frame) {
    let Frame::BulkString(Some(bytes)) = frame else {
        return to.extend_from_slice(&frame_to_bytes(frame));
    };
    to.reserve(bytes.len() + 32);
    string(to, bytes);
}

/// Appends an encoded command of `count` words, up to the end of `words`.
pub fn command(to: &mut impl BufMut, count: usize, words: &[&[u8]]) {
    head(to, b'*', count);
    words.iter().for_each(|word| string(to, word));
}

fn string(to: &mut impl BufMut, bytes: &[u8]) {
    head(to, b'$', bytes.len());
    to.put_slice(bytes);
    to.put_slice(END);
}

fn head(to: &mut impl BufMut, kind: u8, len: usize) {
    to.put_u8(kind);
    to.put_slice(len.to_string().as_bytes());
    to.put_slice(END);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_were_read_are_those_that_were_pushed() {
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

    #[test]
    fn a_reader_reads_long_strings_and_short_ones() {
        let mut stream = Vec::new();
        for len in [0, 5, CHUNK - 10, CHUNK, 3 * AHEAD.end(), 1] {
            let frame = Frame::BulkString(Some(vec![b'x'; len].into()));
            stream.extend_from_slice(&frame_to_bytes(&frame));
        }
        let mut reader = FrameReader::new(&stream[..]);
        for len in [0, 5, CHUNK - 10, CHUNK, 3 * AHEAD.end(), 1] {
            let frame = reader.frame().unwrap().unwrap();
            assert_eq!(frame.as_bytes().map(|bytes| bytes.len()), Some(len));
        }
        assert_eq!(reader.frame().unwrap(), None);
    }

    /// A stream that has few bytes at once, and counts those that it is asked for.
    struct Drips<'a> {
        left: &'a [u8],
        asked: usize,
    }

    impl Read for Drips<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.asked += into.len();
            let most = into.len().min(3_000);
            self.left.read(&mut into[..most])
        }
    }

    #[test]
    fn a_long_string_in_pieces_costs_its_length() {
        let string = frame_to_bytes(&Frame::BulkString(Some(vec![b'x'; 8 << 20].into())));
        let mut reader = FrameReader::new(Drips { left: &string, asked: 0 });
        assert!(reader.frame().unwrap().is_some());
        let asked = reader.stream().asked;
        assert!(asked <= 3 * string.len(), "{asked} bytes were prepared");
    }

    #[test]
    fn memory_does_not_outlast_a_frame() {
        let (long, mut frames) = (vec![b'x'; 16 << 20], Frames::default());
        for rest in [&b""[..], b"*1\r\n$4\r\nPI"] {
            frames.push(format!("${}\r\n", long.len()).as_bytes());
            long.chunks(100_000).for_each(|part| frames.push(part));
            frames.push(&[b"\r\n", rest].concat());
            let frame = frames.take().unwrap().unwrap();
            assert!(frame.as_bytes().unwrap().len() == long.len());
            assert_eq!(frames.take().unwrap(), None);
            drop(frame);
            assert!(!frames.buffer.bytes.try_reclaim(20_000), "{} bytes", frames.buffer.bytes.capacity());
            frames.push(b"NG\r\n".get(..2 * rest.len()).unwrap_or(b"NG\r\n"));
            assert_eq!(frames.take().unwrap().is_some(), !rest.is_empty());
        }
    }
}
