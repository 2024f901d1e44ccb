//! Errors of a client, by who is at fault.

use std::io;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused the command: a wrong type, missing rights, a full memory. The connection can be used further.
    #[error("the server refused the command: {0}")]
    Refused(String),
    /// The server refused the user, the password or the database of a [`Login`](crate::Login). The connection is lost: its commands would be
    /// those of another user, or go to another database.
    #[error("the server refused to log in ({command}): {text}")]
    Login {
        /// The command that it refused: `AUTH` or `SELECT`.
        command: &'static str,
        /// Its words, without arguments that it repeats.
        text: String,
    },
    /// The value is longer than the part of the buffer that was given for it. It was read and dropped, so the connection can be used
    /// further.
    #[error("the value has {len} bytes, and there is room for {room}")]
    TooLong {
        /// Its length.
        len: u64,
        /// The length of the part.
        room: usize,
    },
    /// The part does not lie in the buffer.
    #[error("bytes {start} to {end} of a buffer that has {len}")]
    Outside {
        /// Its first byte.
        start: usize,
        /// The byte behind its last.
        end: usize,
        /// The length of the buffer.
        len: usize,
    },
    /// The server sent no reply of its protocol, or one that does not belong to the command. The connection is lost.
    #[error("the server's reply is none to this command: {0}")]
    Unexpected(String),
    /// The connection ended, or a time-out passed. The connection is lost; windows may lie in the buffer until the client is dropped.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The buffer was made for other connections.
    #[error("the buffer was made for other connections: make one for these")]
    Foreign,
    /// No node of the cluster serves the slot, as far as the nodes say.
    #[error("no node of the cluster serves slot {slot}")]
    Unserved {
        /// The slot of the key.
        slot: u16,
    },
    /// An earlier error has lost the connection: it is not known where its next reply begins.
    #[error("this connection was lost by an earlier error; make another client")]
    Lost,
}
