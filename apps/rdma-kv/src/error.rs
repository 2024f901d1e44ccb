use std::io;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused the command, for example for lack of rights. The connection is usable.
    #[error("the server refused the command: {0}")]
    Refused(String),
    /// The server refused the user, the password or the database of a [`Login`](crate::Login). The
    /// connection is lost: its commands would run as another user, or on another database.
    #[error("the server refused to log in ({command}): {text}")]
    Login {
        /// The refused command: `AUTH` or `SELECT`.
        command: &'static str,
        /// The server's words, without arguments that it repeats.
        text: String,
    },
    /// The value is longer than its part of the buffer. It was dropped; the connection is usable.
    #[error("the value has {len} bytes, and there is room for {room}")]
    TooLong {
        /// Its length.
        len: u64,
        /// The length of the part.
        room: usize,
    },
    /// Another client changed the value each time that its parts were received, or the server has
    /// evicted parts that were sent. The connections are usable.
    #[error("the value changed while it was moved in parts")]
    Changed,
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
    /// The server sent an invalid or unexpected reply. The connection is lost.
    #[error("the server's reply is none to this command: {0}")]
    Unexpected(String),
    /// The connection is lost: it ended, or a time-out passed. Windows may lie in the buffer until
    /// the client is dropped.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The buffer belongs to other connections.
    #[error("the buffer was made for other connections: make one for these")]
    Foreign,
    /// No node of the cluster serves the slot, according to the nodes.
    #[error("no node of the cluster serves slot {slot}")]
    Unserved {
        /// The slot of the key.
        slot: u16,
    },
    /// An earlier error has lost the connection. The start of its next reply is unknown.
    #[error("this connection was lost by an earlier error; make another client")]
    Lost,
}
