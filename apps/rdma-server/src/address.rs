use std::fmt;
use std::io;
use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen, or to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// An IP address and a port, for TCP and RDMA.
    Ip(SocketAddr),
    /// A path, for Unix sockets. Empty for a client's unnamed end.
    Unix(PathBuf),
}

impl Address {
    /// Returns the IP address and port.
    ///
    /// # Errors
    /// Returns an error if this is a path.
    pub fn ip(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Ip(address) => Ok(*address),
            Self::Unix(_) => Err(self.unsuitable("an IP address and port")),
        }
    }

    pub(crate) fn unsuitable(&self, wanted: &str) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, format!("{self} is not {wanted}"))
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

/// Text that contains a slash is a path.
impl FromStr for Address {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        if text.contains('/') { Ok(Self::Unix(text.into())) } else { text.parse().map(Self::Ip) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Unix(path) if path.as_os_str().is_empty() => f.write_str("a Unix socket without a name"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}
