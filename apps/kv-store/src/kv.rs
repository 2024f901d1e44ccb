//! The store, and serving one client on a blocking stream.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use resp_rs::resp2::Frame;

use crate::buffer::Buffer;
use crate::keys::{self, Keys};
use crate::resp::{FrameReader, append};
use crate::session::{Channels, Session};

/// Replies are sent once this many bytes are waiting, also in a long pipeline.
pub const REPLY_BATCH: usize = 256 << 10;

/// All keys and their values, and the subscribers.
#[derive(Default)]
pub struct Store {
    keys: Mutex<Keys>,
    channels: Arc<Mutex<Channels>>,
}

impl Store {
    /// Serves one client until it disconnects. Replies to commands that arrived together are sent
    /// together. The client cannot subscribe: its reading thread cannot be woken.
    ///
    /// # Errors
    /// Those of the stream, and invalid RESP.
    pub fn serve(&self, stream: impl Read + Write) -> io::Result<()> {
        let mut reader = FrameReader::new(stream);
        let (mut session, mut replies) = (Session::default(), Buffer::default());
        loop {
            match reader.buffered() {
                Ok(Some(command)) => {
                    let quits = session.answer(self, command, &mut replies.bytes);
                    if quits || replies.bytes.len() >= REPLY_BATCH {
                        send(reader.stream(), &mut replies)?;
                    }
                    if quits {
                        return Ok(());
                    }
                }
                Ok(None) => {
                    send(reader.stream(), &mut replies)?;
                    if !reader.fill()? {
                        return Ok(());
                    }
                }
                Err(error) => {
                    refuse(&mut replies.bytes, &error);
                    send(reader.stream(), &mut replies)?;
                    return Err(error);
                }
            }
        }
    }

    /// Appends the reply to a command that needs no [`Session`]. Returns true if the connection
    /// must be closed.
    pub fn answer(&self, command: Frame, replies: &mut BytesMut) -> bool {
        let words = words(command);
        let Some((name, arguments)) = words.split_first() else {
            return false; // an empty command has no reply
        };
        let name = name.to_ascii_uppercase();
        append(replies, &self.keys().execute(&name, arguments));
        name == b"QUIT"
    }

    pub(crate) fn keys(&self) -> MutexGuard<'_, Keys> {
        // A poisoned lock only means that a thread died between two whole operations.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) const fn channels(&self) -> &Arc<Mutex<Channels>> {
        &self.channels
    }
}

fn send(to: &mut impl Write, replies: &mut Buffer) -> io::Result<()> {
    to.write_all(&replies.bytes)?;
    replies.grown();
    replies.bytes.clear();
    replies.settle();
    Ok(())
}

pub(crate) fn refuse(replies: &mut BytesMut, error: &io::Error) {
    append(replies, &keys::error(format!("ERR {error}")));
}

pub(crate) fn words(command: Frame) -> Vec<Bytes> {
    let words = command.into_array().unwrap_or_default().into_iter();
    words.filter_map(|word| word.into_bulk_string().ok()).collect()
}
