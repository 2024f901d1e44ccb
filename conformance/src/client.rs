//! A RESP client on any stream.

use std::io::{self, IoSlice, Read, Write};

use bytes::Bytes;
use resp_rs::resp2::Frame;

use kv_store::FrameReader;
use suite::Stop;

/// A fault found by a check, or the reason why it could not run.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The stream failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The connection failed.
    #[error("{0}")]
    Connection(#[from] rdma_conn::Error),
    /// The stream ended in place of a reply.
    #[error("the server closed the connection instead of answering")]
    Closed,
    /// Something wrong arrived.
    #[error("{0}")]
    Wrong(String),
    /// The peer could not be reached.
    #[error("{0}")]
    Unreached(String),
    /// This side's own device or system failed.
    #[error("{0}")]
    Environment(String),
}

impl Failure {
    /// Builds [`Failure::Wrong`] from any text.
    pub fn wrong(what: impl Into<String>) -> Self {
        Self::Wrong(what.into())
    }

    /// Converts a failed attempt: the target took no connection, or this side could not ask.
    pub fn connecting(error: rdma_conn::Error) -> Self {
        use rdma_conn::Error;
        match error {
            Error::Refused { .. }
            | Error::Rejected { .. }
            | Error::Unreachable { .. }
            | Error::TimedOut { .. } => Self::Unreached(error.to_string()),
            Error::Backend { .. }
            | Error::RegisteredMemory { .. }
            | Error::TooManyConnections { .. }
            | Error::Wait(_)
            | Error::DeviceRemoved => Self::Environment(error.to_string()),
            // It did connect.
            _ => Self::Connection(error),
        }
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        let told = failure.to_string();
        match failure {
            Failure::Environment(_) => Self::broken(told),
            Failure::Unreached(_) => Self::refused(told),
            _ => Self::unmet(told),
        }
    }
}

/// Sends commands and reads replies.
pub struct RespClient<S> {
    reader: FrameReader<S>,
}

impl<S: Read + Write> RespClient<S> {
    /// Returns a client on a connected stream.
    pub fn new(stream: S) -> Self {
        Self { reader: FrameReader::new(stream) }
    }

    /// Returns the underlying stream.
    pub fn stream(&mut self) -> &mut S {
        self.reader.stream()
    }

    /// Sends a command, all of its parts in one vectored write.
    pub fn send(&mut self, words: &[&[u8]]) -> Result<(), Failure> {
        let heads: Vec<String> = std::iter::once(format!("*{}\r\n", words.len()))
            .chain(words.iter().map(|word| format!("${}\r\n", word.len())))
            .collect();
        let mut parts = vec![heads[0].as_bytes()];
        for (head, word) in heads[1..].iter().zip(words) {
            parts.extend([head.as_bytes(), word, b"\r\n"]);
        }
        let mut slices: Vec<IoSlice<'_>> = parts.into_iter().map(IoSlice::new).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let written = self.stream().write_vectored(rest)?;
            IoSlice::advance_slices(&mut rest, written);
        }
        Ok(())
    }

    /// Waits for the next reply.
    pub fn reply(&mut self) -> Result<Frame, Failure> {
        self.reader.frame()?.ok_or(Failure::Closed)
    }

    /// Sends a command and waits for its reply.
    pub fn call(&mut self, words: &[&[u8]]) -> Result<Frame, Failure> {
        self.send(words)?;
        self.reply()
    }

    /// Checks that the next reply is this status.
    pub fn expect(&mut self, status: &str) -> Result<(), Failure> {
        let reply = self.reply()?;
        match &reply {
            Frame::SimpleString(text) if text == status => Ok(()),
            other => Err(Failure::wrong(format!("expected +{status}, got {}", describe(other)))),
        }
    }

    /// Checks that the next reply is a bulk string.
    pub fn expect_bulk(&mut self) -> Result<Bytes, Failure> {
        match self.reply()? {
            Frame::BulkString(Some(bytes)) => Ok(bytes),
            other => Err(Failure::wrong(format!("expected a bulk string, got {}", describe(&other)))),
        }
    }

    /// Checks that the stream ends here.
    pub fn expect_end(&mut self) -> Result<(), Failure> {
        match self.reader.frame()? {
            None => Ok(()),
            Some(frame) => Err(Failure::wrong(format!("expected the end, got {}", describe(&frame)))),
        }
    }
}

/// Describes a reply in a few words.
pub fn describe(frame: &Frame) -> String {
    match frame {
        Frame::SimpleString(text) => format!("+{}", String::from_utf8_lossy(text)),
        Frame::Error(text) => format!("-{}", String::from_utf8_lossy(text)),
        Frame::Integer(number) => format!(":{number}"),
        Frame::BulkString(None) => "a null".into(),
        Frame::BulkString(Some(bytes)) => format!("a bulk string of {} bytes", bytes.len()),
        Frame::Array(None) => "a null array".into(),
        Frame::Array(Some(items)) => format!("an array of {}", items.len()),
    }
}
