//! A live Valkey at either end, by its own replication: the most exact way there is, because Valkey itself writes and reads every type,
//! encoding, TTL and function, and the point in time is one of its history.
//!
//! * [`LiveSource`] is a replica to the primary that it reads: `PSYNC` gives an RDB as of one moment, and every later write.
//! * [`LiveSink`] is a primary to the Valkey that it fills: that is told to be a replica of ours, gets the RDB and the later writes, and is
//!   made a primary again at the end.
//!
//! `SCAN` with `DUMP` and `RESTORE` would work in more places, and is neither of one moment nor complete: functions are no keys.
//! Neither end looks into the RDB.

mod link;
mod sink;
mod source;

use std::io;
use std::time::Duration;

use redis::{ConnectionAddr, IntoConnectionInfo};

pub use sink::{LiveSink, Target};
pub use source::LiveSource;

/// How long a Valkey may take to answer a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// A Valkey, by its URL: `valkey://[user[:password]@]host[:port]`.
#[derive(Clone, Debug)]
pub struct Server {
    client: redis::Client,
    host: String,
    port: u16,
    user: Option<String>,
    password: Option<String>,
}

impl Server {
    /// Understands a URL. Nothing is connected.
    ///
    /// # Errors
    /// It is none, or not one of a plain TCP port.
    pub fn new(url: &str) -> io::Result<Self> {
        let info = url.into_connection_info().map_err(io::Error::other)?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(io::Error::other(
                "only valkey://host:port, without TLS, can be replicated from or to",
            ));
        };
        let (host, port) = (host.clone(), *port);
        let (user, password) = (info.redis_settings().username(), info.redis_settings().password());
        let (user, password) = (user.map(String::from), password.map(String::from));
        let client = redis::Client::open(url).map_err(io::Error::other)?;
        Ok(Self { client, host, port, user, password })
    }

    /// A connection for commands.
    fn admin(&self) -> io::Result<redis::Connection> {
        let admin = self.client.get_connection_with_timeout(PATIENCE).map_err(|error| self.failed(&error))?;
        admin.set_read_timeout(Some(PATIENCE)).map_err(io::Error::other)?;
        admin.set_write_timeout(Some(PATIENCE)).map_err(io::Error::other)?;
        Ok(admin)
    }

    /// The fields of `INFO section`, as text.
    fn info(&self, admin: &mut redis::Connection, section: &str) -> io::Result<String> {
        redis::cmd("INFO").arg(section).query(admin).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &redis::RedisError) -> io::Error {
        io::Error::other(format!("{}:{}: {error}", self.host, self.port))
    }
}

/// A field of what `INFO` says.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_server_and_who_asks() {
        let server = Server::new("valkey://who:p%40ss@127.0.0.1:7000").expect("a URL");
        assert_eq!((server.host.as_str(), server.port), ("127.0.0.1", 7000));
        assert_eq!((server.user.as_deref(), server.password.as_deref()), (Some("who"), Some("p@ss")));
        assert!(Server::new("unix:///tmp/socket").is_err());
        assert!(Server::new("nonsense").is_err());
    }

    #[test]
    fn fields_of_info_are_found_by_their_whole_name() {
        let info = "# Replication\r\nrole:master\r\nmaster_repl_offset:12\r\nmaster_replid2:00\r\n";
        assert_eq!(field(info, "role"), Some("master"));
        assert_eq!(field(info, "master_repl_offset"), Some("12"));
        assert_eq!(field(info, "master_replid"), None);
    }
}
