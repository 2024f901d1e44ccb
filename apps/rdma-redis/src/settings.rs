//! Settings of connections, as a value and in a URL.

use std::borrow::Cow;
use std::collections::HashSet;
use std::time::Duration;

use rdma_conn::{Connect, Options, Setting};
use redis::{ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisError, RedisResult};

const SCHEME: &str = "valkey+rdma://";
const TLS_SCHEME: &str = "valkeys+rdma://";

/// Options of a URL beside those of [`rdma_conn::SETTINGS`].
const KNOWN: [&str; 4] = ["timeout", "response_timeout", "fallback", "protocol"];

/// Settings of all connections of a [`Client`](crate::Client). Options of its URL override them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Settings of the RDMA connection. Its `timeout`, by default 5 s, bounds all of connecting:
    /// the look-up of the name, the addresses, which share the time evenly, the fallback to TCP,
    /// and the handshake (HELLO, AUTH, SELECT, CLIENT SETINFO). URL option: `timeout=SECONDS`.
    ///
    /// A URL can also set what some networks and cards need: [`rdma_conn::SETTINGS`].
    pub connect: Connect,
    /// How long a request may wait for its reply before it fails. The connection stays. `None`
    /// waits as long as the connection lasts. URL option: `response_timeout=SECONDS` or
    /// `response_timeout=none`.
    ///
    /// The default is 5 minutes. The largest value that a Valkey server takes by default, 512 MiB,
    /// passes in that time at 2 MiB/s, which is slower than any network that carries RDMA. Commands
    /// that block (`BLPOP`, `XREAD BLOCK`) count as unanswered while they block.
    pub response_timeout: Option<Duration>,
    /// The fallback without RDMA; `None` fails. URL option: `fallback=tcp` or `fallback=tcp:PORT`.
    pub fallback: Option<Fallback>,
}

/// The fallback if a server cannot be reached by RDMA: no library, device or listener, or no
/// connection within half of the time for connecting. A refused handshake is not repeated by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Connect by TCP, with TLS if the URL asks for TLS.
    Tcp {
        /// The server's TCP port. The default is that of the URL.
        port: Option<u16>,
    },
}

impl Default for Settings {
    fn default() -> Self {
        Self { connect: Connect::default(), response_timeout: Some(Duration::from_secs(300)), fallback: None }
    }
}

impl Settings {
    /// Sets options for the protocol and memory of RDMA connections.
    #[must_use]
    pub fn with_options(mut self, options: Options) -> Self {
        self.connect.options = options;
        self
    }

    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        match (name, value) {
            ("timeout", _) => self.connect.timeout = seconds(value)?,
            ("response_timeout", "none") => self.response_timeout = None,
            ("response_timeout", _) => self.response_timeout = Some(seconds(value)?),
            ("fallback", "tcp") => self.fallback = Some(Fallback::Tcp { port: None }),
            ("fallback", _) => {
                let port = value.strip_prefix("tcp:")?.parse().ok().filter(|port| *port != 0)?;
                self.fallback = Some(Fallback::Tcp { port: Some(port) });
            }
            // redis-rs reads its value, and would repeat an invalid one in its error.
            ("protocol", "2" | "3" | "resp2" | "resp3") => {}
            _ => Setting::named(name)?.set(&mut self.connect.options, value).ok()?,
        }
        Some(())
    }
}

fn seconds(text: &str) -> Option<Duration> {
    let seconds = Duration::try_from_secs_f64(text.parse().ok()?).ok()?;
    (!seconds.is_zero()).then_some(seconds)
}

#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) info: ConnectionInfo,
    pub(crate) secure: bool,
}

pub(crate) fn parse(url: &str, settings: &mut Settings) -> RedisResult<Target> {
    let invalid = || {
        let form = "expected a URL valkey+rdma://[USER[:PASSWORD]@]HOST[:PORT][/DB][?OPTIONS], or valkeys+rdma:// for TLS";
        RedisError::from((ErrorKind::InvalidClientConfig, form))
    };
    // The rest has the form of redis-rs's URLs.
    let secure = url.starts_with(TLS_SCHEME);
    let rest = url.strip_prefix(if secure { TLS_SCHEME } else { SCHEME }).ok_or_else(invalid)?;
    let url = redis::parse_redis_url(&format!("redis://{rest}")).ok_or_else(invalid)?;
    let mut given: HashSet<Cow<'_, str>> = HashSet::new();
    for (index, (name, value)) in url.query_pairs().enumerate() {
        if settings.set(&name, &value).is_none() || given.contains(&name) {
            // An unknown option may be a password, by its name or its value.
            let which = match KNOWN.contains(&&*name) || Setting::named(&name).is_some() {
                true => format!("{name} is there twice, or has another value"),
                false => format!("option {} is none of these", index + 1),
            };
            let known = "in the URL: the options are timeout=SECONDS, response_timeout=SECONDS|none, \
                         fallback=tcp[:PORT], protocol=resp2|resp3, and, for networks and cards, those below, each once";
            let what = format!("{which} ({})", Setting::list());
            return Err((ErrorKind::InvalidClientConfig, known, what).into());
        }
        given.insert(name);
    }
    if url.fragment().is_some() {
        return Err(invalid());
    }
    let info = url.into_connection_info()?;
    matches!(info.addr(), ConnectionAddr::Tcp(..)).then_some(Target { info, secure }).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use rdma_softsim::{Fabric, SoftSim};

    use super::*;
    use crate::Client;

    #[test]
    fn a_url_has_what_networks_and_cards_want() {
        let url = "valkey+rdma://host?traffic_class=104&ack_timeout=16&relaxed_ordering=yes&huge_pages=yes\
                   &timeout=0.5&response_timeout=none&fallback=tcp:6380";
        let mut settings = Settings::default();
        parse(url, &mut settings).expect("is well formed");
        let options = Options::default().traffic_class(Some(104)).ack_timeout(Some(16));
        let options = options.relaxed_ordering(true).huge_pages(true);
        let expected = Settings {
            connect: Connect::default().timeout(Duration::from_millis(500)).options(options),
            response_timeout: None,
            fallback: Some(Fallback::Tcp { port: Some(6380) }),
        };
        assert_eq!(settings, expected);
        for wrong in ["traffic_class=256", "ack_timeout=32", "relaxed_ordering=1", "huge_pages="] {
            let error = parse(&format!("valkey+rdma://host?{wrong}"), &mut settings).expect_err(wrong);
            assert!(error.to_string().contains("traffic_class=0..255"), "{error}");
        }
    }

    #[test]
    fn no_password_is_printed() {
        let backend = Fabric::new().host(&[]);
        let urls = [
            "valkey+rdma://s3cret",
            "valkey+rdma://:s3cret@host",
            "valkey+rdma://user:s3cret@host:6379/2?timeout=1",
            "valkey+rdma://:s3cret@host/s3cret",
            "valkey+rdma://:s3cret@host:s3cret",
            "valkey+rdma://:s3cret@",
            "valkey+rdma://host?password=s3cret",
            "valkey+rdma://host?s3cret",
            "valkey+rdma://host?s3cret=",
            "valkey+rdma://host?timeout=s3cret",
            "valkey+rdma://host?response_timeout=s3cret",
            "valkey+rdma://host?fallback=s3cret",
            "valkey+rdma://host?protocol=s3cret",
            "valkey+rdma://host?timeout=1&timeout=s3cret",
            "valkey+rdma://host?traffic_class=s3cret",
            "valkey+rdma://host?ack_timeout=s3cret",
            "valkey+rdma://host?huge_pages=s3cret",
            "valkey+rdma://host#s3cret",
            "valkeys+rdma://:s3cret@host?fallback=tcp:s3cret",
            "redis://:s3cret@host",
            ":s3cret@host",
        ];
        let mut refused = 0;
        for url in urls {
            let opened = Client::<SoftSim>::open(backend.clone(), url);
            refused += usize::from(opened.is_err());
            let said = match &opened {
                // The host is no secret.
                Ok(_) if url == "valkey+rdma://s3cret" => String::new(),
                Ok(client) => format!("{client:?} {client:#?}"),
                Err(error) => format!("{error} {error:?} {error:#?}"),
            };
            assert!(!said.contains("s3cret"), "{url}: {said}");
        }
        assert_eq!(refused, urls.len() - 3);
    }
}
