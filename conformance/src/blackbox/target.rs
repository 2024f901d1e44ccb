//! What is tested, as far as the suite can see it: an address, and perhaps a process.

use std::net::SocketAddr;
use std::time::Duration;

use crate::held::Held;

/// A server under test.
pub trait Server {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// Why it is gone, if it is known to be, or comes to be within `patience`.
    fn death(&self, patience: Duration) -> Option<String>;

    /// Starts it afresh. False if the suite cannot.
    ///
    /// # Errors
    /// It does not start.
    fn restart(&self) -> Result<bool, String>;

    /// What its process holds, if that can be seen.
    fn held(&self) -> Option<Held>;

    /// What its process has used of the processors, if that can be seen.
    fn processor_time(&self) -> Option<Duration>;
}

/// A client under test: a program that connects to an address, does what it does, and ends.
pub trait Clients {
    /// Has it connect to `address` for a case.
    ///
    /// # Errors
    /// It does not start.
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String>;

    /// Connections that it makes before the one that counts.
    fn first(&self) -> u32 {
        0
    }
}

/// A client under test at work.
pub trait Running {
    /// How it ended, if it does so within `patience`.
    fn ended(&mut self, patience: Duration) -> Option<Exit>;

    /// Whether its end can be seen at all.
    fn is_observed(&self) -> bool {
        true
    }
}

/// How a client under test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It says that all went well.
    Success,
    /// It reports an error.
    Failure(String),
    /// It does not know how to do this.
    Unsupported,
    /// It did not end itself.
    Crashed(String),
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Success => f.write_str("it reported success"),
            Self::Failure(what) => write!(f, "it reported an error: {what}"),
            Self::Unsupported => f.write_str("it says that it cannot do this"),
            Self::Crashed(how) => write!(f, "it crashed: {how}"),
        }
    }
}
