//! What programs may take of a fabric, and what a refusal says.

use std::fmt;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// A resource of the fabric's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Resource {
    /// The bytes that objects take, with all that they may hold.
    Memory,
    /// Descriptors of channels and sessions.
    Descriptors,
    /// Sessions, each with at most three threads.
    Sessions,
}

impl Resource {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Descriptors, Self::Sessions];
}

/// So much of each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the resources' own names")]
pub struct Amounts {
    pub memory: u64,
    pub descriptors: u64,
    pub sessions: u64,
}

impl Amounts {
    /// Returns the amount of one resource.
    #[must_use]
    pub const fn of(&self, resource: Resource) -> u64 {
        match resource {
            Resource::Memory => self.memory,
            Resource::Descriptors => self.descriptors,
            Resource::Sessions => self.sessions,
        }
    }
}

/// A bound that a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Exceeded {
    /// The resource.
    pub resource: Resource,
    /// Whether it is the bound of each program, or that of all programs of the fabric together.
    pub each: bool,
    /// The bound.
    pub most: u64,
}

impl Exceeded {
    /// Returns the `errno(3)` of the request.
    #[must_use]
    pub const fn errno(&self) -> i32 {
        let errno = match (self.resource, self.each) {
            (Resource::Memory, _) => Errno::NOMEM,
            (Resource::Descriptors | Resource::Sessions, true) => Errno::MFILE,
            (Resource::Descriptors | Resource::Sessions, false) => Errno::NFILE,
        };
        errno.raw_os_error()
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resource, each, most } = *self;
        let who = if each { "a program has" } else { "all programs of a fabric together have" };
        match resource {
            Resource::Memory => write!(f, "{who} objects of at most {} MiB", most >> 20),
            Resource::Descriptors => write!(f, "{who} at most {most} of the fabric's descriptors"),
            Resource::Sessions => write!(f, "{who} at most {most} sessions"),
        }
    }
}
