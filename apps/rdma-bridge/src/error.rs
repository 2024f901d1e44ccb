use std::io;
use std::path::PathBuf;

use crate::place::Place;

/// An error that prevents building a bridge.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text of a side is not a URL of a known scheme with a host and a port.
    #[error("{text:?} is no side of a bridge: write tcp://HOST:PORT, tls://HOST:PORT or rdma://HOST:PORT")]
    Place {
        /// The text, without everything before an `@`.
        text: String,
    },
    /// A side needs a certificate, a key or trusted authorities that the settings lack.
    #[error("{place} needs {what}")]
    Tls {
        /// The side.
        place: Place,
        /// The missing part.
        what: &'static str,
    },
    /// A file of certificates or keys cannot be used.
    #[error("cannot use {path:?} for TLS: {reason}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The bridge needs RDMA to connect, and there is none.
    #[error("cannot connect to {place}: {source}")]
    Connect {
        /// The place to connect to.
        place: Place,
        /// The cause.
        source: io::Error,
    },
    /// The bridge cannot listen there.
    #[error("cannot listen on {place}: {source}")]
    Listen {
        /// The place to listen on.
        place: Place,
        /// The cause.
        source: io::Error,
    },
}
