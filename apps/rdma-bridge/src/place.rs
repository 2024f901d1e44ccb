use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::str::FromStr;
use std::time::Duration;

use rdma_conn::{Descriptors, is_one_machine, leads_back};
use tokio::task::spawn_blocking;

use crate::error::Error;

/// Returns whether the kernel's route to an address leads back to where it leaves from. The connect
/// of a datagram socket chooses a route, and sends nothing: connect(2).
fn route_leads_back(to: SocketAddr) -> io::Result<bool> {
    let from: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
    let socket = UdpSocket::bind(from)?;
    socket.connect(to)?;
    Ok(is_one_machine(socket.local_addr()?.ip(), to.ip()))
}

/// One side of a bridge: `tcp://HOST:PORT`, `tls://…` or `rdma://…`. IPv6 needs brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The transport.
    pub carrier: Carrier,
    /// A name or an address.
    pub host: String,
    /// The port. To listen on, 0 picks a free port.
    pub port: u16,
}

/// A transport, on one side of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// TCP.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// Valkey's protocol over RDMA.
    Rdma,
}

impl Place {
    /// Returns the host and the port, for look-ups: a resolver takes no brackets around a scope.
    pub(crate) fn authority(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// Returns whether the route to one of the host's addresses leaves from and leads to one
    /// address of this machine: a server there takes the bridge's connections for local ones. False
    /// also if that is unknown, because the host or a device is missing.
    pub(crate) async fn is_here(&self, backend: &impl Descriptors, limit: Duration) -> bool {
        let Ok(addresses) = tokio::net::lookup_host(self.authority()).await else { return false };
        let addresses: Vec<_> = addresses.collect();
        let (backend, carrier) = (backend.clone(), self.carrier);
        let looking = spawn_blocking(move || {
            addresses.into_iter().any(|address| {
                let here = match carrier {
                    Carrier::Tcp | Carrier::Tls => route_leads_back(address),
                    Carrier::Rdma => leads_back(&backend, address, limit).map_err(io::Error::from),
                };
                here.unwrap_or(false)
            })
        });
        looking.await.unwrap_or(false)
    }

    pub(crate) fn at(carrier: Carrier, address: SocketAddr) -> Self {
        let mut host = address.ip().to_string();
        if let SocketAddr::V6(address) = address
            && address.scope_id() != 0
        {
            host = format!("{host}%{}", address.scope_id());
        }
        Self { carrier, host, port: address.port() }
    }
}

impl FromStr for Place {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        // Text before an @ may be a password.
        let shown = text.rsplit_once('@').map_or_else(|| text.into(), |(_, behind)| format!("…@{behind}"));
        let wrong = || Error::Place { text: shown.clone() };
        let (scheme, authority) = text.split_once("://").ok_or_else(wrong)?;
        let carrier = match scheme {
            "tcp" => Carrier::Tcp,
            "tls" => Carrier::Tls,
            "rdma" => Carrier::Rdma,
            _ => return Err(wrong()),
        };
        let (host, port) = authority.trim_end_matches('/').rsplit_once(':').ok_or_else(wrong)?;
        let bare = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(inner) => inner,
            // Without brackets, the end of an IPv6 address is ambiguous.
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        if bare.is_empty() || bare.contains(['/', '@']) {
            return Err(wrong());
        }
        Ok(Self { carrier, host: bare.into(), port: port.parse().map_err(|_| wrong())? })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { carrier, host, port } = self;
        if host.contains(':') {
            write!(f, "{carrier}://[{host}]:{port}")
        } else {
            write!(f, "{carrier}://{host}:{port}")
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Rdma => "rdma",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_they_are_read() {
        for text in [
            "tcp://127.0.0.1:6390",
            "tls://cache.example:0",
            "rdma://[2001:db8::1]:6379",
            "tcp://[fe80::1%2]:6379",
            "rdma://[fe80::1%eth0]:6379",
        ] {
            assert_eq!(text.parse::<Place>().expect(text).to_string(), text);
        }
        let scoped: SocketAddr = "[fe80::1%2]:6379".parse().expect("an address");
        assert_eq!(Place::at(Carrier::Tcp, scoped).to_string(), "tcp://[fe80::1%2]:6379");
        let slash: Place = "rdma://192.0.2.1:6379/".parse().expect("a slash at the end is harmless");
        assert_eq!(slash.to_string(), "rdma://192.0.2.1:6379");
    }

    #[test]
    fn no_password_is_printed() {
        for text in ["tcp://user:s3cret@a:1", "tcp://s3cret@a", "http://:s3cret@b@a:1", "s3cret@a:1"] {
            let error = text.parse::<Place>().expect_err(text);
            let said = format!("{error} {error:?}");
            assert!(said.contains('a') && !said.contains("s3cret"), "{said}");
        }
    }

    #[test]
    fn what_is_no_place_is_named() {
        for text in [
            "127.0.0.1:6390",
            "http://a:1",
            "tcp://a",
            "tcp://:1",
            "tcp://a:65536",
            "tcp://::1:6379",
            "tcp://a:1/0",
            "",
        ] {
            let error = text.parse::<Place>().expect_err(text).to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
