//! A live Valkey at either end, by its own replication. This is the most exact way, because Valkey
//! itself writes and reads every type, encoding, TTL and function, and the point in time is one of
//! its history.
//!
//! * [`LiveSource`] is a replica of the primary that it reads: `PSYNC` gives an RDB of one moment,
//!   and every later write.
//! * [`LiveSink`] is a primary of the Valkey that it fills. That becomes our replica once all of
//!   the RDB is here and was checked, gets it and the later writes, and becomes a primary again at
//!   the end.
//!
//! `SCAN` with `DUMP` and `RESTORE` would work in more places, but is neither of one moment nor
//! complete: functions are no keys. No value of the RDB is looked into.

mod admin;
mod arriving;
mod compression;
mod door;
mod link;
mod note;
mod setting;
mod sink;
mod source;
mod spool;
#[cfg(test)]
mod tests;

use std::time::Duration;
use std::{fmt, io};

use redis::{ConnectionAddr, IntoConnectionInfo};

pub use sink::{LiveSink, Target};
pub use source::{LiveSource, Opening};

/// How long a Valkey may take to answer a command, and how long it may take nothing of what it is
/// sent. Tests allow more.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 10 });

/// A Valkey, by its URL: `valkey://[user[:password]@]host[:port]`. Its password is never printed.
#[derive(Clone)]
pub struct Server {
    host: String,
    port: u16,
    user: Option<String>,
    password: Option<String>,
}

impl Server {
    /// Parses a URL. Does not connect.
    ///
    /// # Errors
    /// It is no URL, or not one of a plain TCP port.
    pub fn new(url: &str) -> io::Result<Self> {
        // The parser's own words may contain a part of the URL.
        let invalid = "this is no URL of a Valkey: valkey://USER:PASSWORD@HOST:PORT, of which HOST is enough";
        let info = url.into_connection_info().map_err(|_| io::Error::other(invalid))?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(io::Error::other(
                "only valkey://host:port, without TLS, can be replicated from or to",
            ));
        };
        let (host, port) = (host.clone(), *port);
        let (user, password) = (info.redis_settings().username(), info.redis_settings().password());
        Ok(Self { host, port, user: user.map(String::from), password: password.map(String::from) })
    }

    /// Returns an error of an operation at this server. Its cause remains recognisable.
    fn failed(&self, doing: &str, error: io::Error) -> io::Error {
        if crate::wait::is_stop(&error) {
            return error;
        }
        let why = match error.kind() {
            io::ErrorKind::TimedOut => "it did not answer in time".to_string(),
            _ => error.to_string(),
        };
        io::Error::new(error.kind(), format!("{}:{}: {doing}: {why}", self.host, self.port))
    }

    /// Returns the server's words for a message: without its password, which it may repeat, and
    /// without control sequences.
    fn printable(&self, said: &str) -> String {
        let password = self.password.as_deref().filter(|password| !password.is_empty());
        let said = password.map_or_else(|| said.into(), |password| said.replace(password, "..."));
        said.chars().take(200).flat_map(char::escape_debug).collect()
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "..");
        f.debug_struct("Server")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user)
            .field("password", &password)
            .finish()
    }
}

/// Returns a field of `INFO`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}
