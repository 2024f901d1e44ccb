//! Test vectors of Valkey over RDMA, as text: what control messages mean, and what a connection
//! does when. JSON, without a parser; `vectors/README.md` tells how to read them, and the schemas
//! what each field is.
//!
//! ```
//! let (name, text) = valkey_rdma_vectors::TRACES[0];
//! assert_eq!(name, "close");
//! assert!(text.contains(r#""format": "trace-1""#));
//! ```

#![no_std]
#![forbid(unsafe_code)]

/// The version of the vectors, `FORMAT.NEW.MENDED`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Files of a folder, as name without extension and text.
macro_rules! files {
    ($folder:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!("../vectors/", $folder, "/", $name, ".json")))),*]
    };
}

/// `control/*.json` by name, in the format `control-1`.
pub const CONTROL: &[(&str, &str)] =
    files!("control": "get-server-feature" "invalid" "keepalive" "register-xfer-memory" "set-client-feature");

/// `trace/*.json` by name, in the format `trace-1`.
pub const TRACES: &[(&str, &str)] = files!("trace": "close" "credits" "features" "generated" "handshake" "keepalive"
    "limits" "receive" "refused" "stream");

/// `schema/*.json` by name: JSON Schemas of both formats, of the protocol between a runner of
/// vectors and an implementation, and of the requirements' files.
pub const SCHEMAS: &[(&str, &str)] = files!("schema": "control-1" "protocol-1" "requirements-2" "trace-1");

/// How to read them.
pub const README: &str = include_str!("../vectors/README.md");
