//! Why a bridge cannot be built.

use std::io;
use std::path::PathBuf;

use crate::place::Place;

/// Why a bridge cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A side is not written as a URL of a known scheme with a host and a port.
    #[error("{text:?} is no side of a bridge: write tcp://HOST:PORT, tls://HOST:PORT or rdma://HOST:PORT")]
    Place {
        /// As it was written, without what stands before an `@`.
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
        /// Why.
        reason: String,
    },
    /// There is no RDMA here, through which the bridge could connect.
    #[error("cannot connect to {place}: {source}")]
    Connect {
        /// To where.
        place: Place,
        /// Why not.
        source: io::Error,
    },
    /// The bridge cannot listen there.
    #[error("cannot listen on {place}: {source}")]
    Listen {
        /// Where.
        place: Place,
        /// Why not.
        source: io::Error,
    },
}
