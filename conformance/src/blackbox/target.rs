//! Targets from the suite's point of view: an address, and possibly a process.

use std::net::SocketAddr;
use std::sync::MutexGuard;
use std::time::Duration;

use intercept::Frozen;

use crate::resources::ProcessResources;

/// A server under test.
pub trait TargetServer {
    /// Returns the address at which it listens.
    fn address(&self) -> SocketAddr;

    /// Returns how its process ended, if it has ended or does so within `patience`.
    fn death(&self, patience: Duration) -> Option<String>;

    /// Starts it again. Returns false if the suite cannot.
    ///
    /// # Errors
    /// It does not start.
    fn restart(&self) -> Result<bool, String>;

    /// Returns the resources of its process, if visible.
    fn held(&self) -> Option<ProcessResources>;

    /// Returns the processor time of its process, if visible.
    fn processor_time(&self) -> Option<Duration>;

    /// Returns the last lines of its process's output; empty if not visible.
    fn last_lines(&self) -> String {
        String::new()
    }

    /// Keeps it from serving connections that it accepts until the guard is dropped, if it can.
    fn hold(&self) -> Option<MutexGuard<'_, ()>> {
        None
    }

    /// Stops it until the result is dropped, if it can: it handles nothing, and posts no receive.
    /// Its device goes on.
    fn freeze(&self) -> Option<Frozen> {
        None
    }
}

/// Clients under test: programs that connect to an address, exchange bytes, and end.
pub trait TargetClients {
    /// Starts one that connects to `address`, for a case.
    ///
    /// # Errors
    /// It does not start.
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String>;

    /// Returns the number of connections that it makes before the one that is tested.
    fn first(&self) -> u32 {
        0
    }
}

/// A running client under test.
pub trait Running {
    /// Returns how it ended, if it does so within `patience`.
    fn ended(&mut self, patience: Duration) -> Option<Exit>;

    /// Ends the idle time of a client that has sent `ECHO idle`: closes its stdin.
    fn go_on(&mut self) {}

    /// Stops it until the result is dropped, if it can, as [`TargetServer::freeze`] does. A call
    /// of it may be interrupted by that (`signal(7)`).
    fn freeze(&self) -> Option<Frozen> {
        self.pause()
    }

    /// Stops it until the result is dropped, if it can without an interrupted call.
    fn pause(&self) -> Option<Frozen> {
        None
    }

    /// Returns whether its end is visible at all.
    fn is_observed(&self) -> bool {
        true
    }

    /// Returns the last lines of its output; empty if not visible.
    fn last_lines(&self) -> String {
        String::new()
    }
}

/// Adds the last lines of a process to a reason, if there are any.
pub fn with_last_lines(reason: impl Into<String>, lines: &str) -> String {
    let reason = reason.into();
    if lines.is_empty() { reason } else { format!("{reason}; the last that it printed: {lines}") }
}

/// How a client under test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It reports success.
    Success,
    /// It reports an error.
    Failure(String),
    /// It cannot do this.
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
