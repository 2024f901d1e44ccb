//! The check of an RDB, before a Valkey gets any of it.
//!
//! A Valkey trusts an RDB. It gives a received one the name of its own file, and ends if it cannot
//! load it. So all of an RDB is checked before its first byte goes to a Valkey, or before its file
//! has a name: that it begins as an RDB, that each key and value is where the one before it ends,
//! that it has an end, and that its checksum (CRC-64) is that of its bytes.
//!
//! The check takes the bytes as they come, and keeps none. What a string, a packed list or a
//! function says is not looked at.

mod grammar;
mod walk;

use std::{fmt, io};

use crc::{CRC_64_REDIS, Crc, Digest, Table};

use walk::Walk;

static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_REDIS);

/// Bytes of the checksum at the end.
pub(crate) const CHECKSUM: usize = 8;

/// Computes the checksum of an RDB.
pub(crate) fn checksum() -> Digest<'static, u64, Table<16>> {
    CRC.digest()
}

/// What a Valkey must support to load an RDB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// The version of its format.
    pub(crate) version: u16,
    /// The highest index of a database.
    pub(crate) database: u64,
    /// The type of its first value of a module.
    pub(crate) module: Option<[u8; 9]>,
}

/// Why bytes are no RDB that a Valkey can load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("it does not begin as an RDB does")]
    Foreign,
    #[error("it has version {0} of the format, which is not known here (5 to 11 and 80 are)")]
    Version(u16),
    #[error("at byte {at} is {what}, which no RDB has there: it is damaged, or newer than this program")]
    Unknown { what: &'static str, at: u64 },
    #[error("at byte {at} is {what}, which a Valkey would not load")]
    Refused { what: &'static str, at: u64 },
    #[error("it is cut: it has no end within its {bytes} bytes")]
    Cut { bytes: u64 },
    #[error("bytes follow its end at byte {at}")]
    Longer { at: u64 },
    #[error("it is damaged: its checksum is not that of its bytes")]
    Damaged,
    #[error(
        "it has no checksum (rdbchecksum no), so nothing would show damage: load it into a Valkey, and publish from that"
    )]
    Unsummed,
}

impl Invalid {
    /// Returns the error of an input that has this name.
    pub(crate) fn of(self, name: &dyn fmt::Display) -> io::Error {
        let what = format!("{name} is no RDB that a Valkey could load: {self}");
        io::Error::new(io::ErrorKind::InvalidData, what)
    }
}

/// Checks an RDB that comes piece by piece.
pub(crate) struct Check {
    walk: Walk,
    digest: Digest<'static, u64, Table<16>>,
    /// The checksum, as far as it has come.
    sum: Vec<u8>,
}

impl Default for Check {
    fn default() -> Self {
        Self { walk: Walk::default(), digest: checksum(), sum: Vec::with_capacity(CHECKSUM) }
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl Check {
    /// Checks the next bytes.
    ///
    /// # Errors
    /// This is no RDB, whatever follows.
    pub(crate) fn update(&mut self, bytes: &[u8]) -> Result<(), Invalid> {
        let walked = self.walk.take(bytes)?;
        let (summed, rest) = bytes.split_at(walked.min(bytes.len()));
        self.digest.update(summed);
        let (sum, longer) = rest.split_at(rest.len().min(CHECKSUM - self.sum.len()));
        self.sum.extend_from_slice(sum);
        if longer.is_empty() { Ok(()) } else { Err(Invalid::Longer { at: self.bytes() }) }
    }

    fn bytes(&self) -> u64 {
        self.walk.bytes().saturating_add(self.sum.len() as u64)
    }

    /// Checks that all of it has come, and is right. Returns what a Valkey needs to load it.
    ///
    /// # Errors
    /// It is cut, it is damaged, or it has no checksum.
    pub(crate) fn finish(self) -> Result<Needs, Invalid> {
        let cut = Invalid::Cut { bytes: self.bytes() };
        let needs = self.walk.end().ok_or(cut)?;
        match <[u8; CHECKSUM]>::try_from(self.sum).map(u64::from_le_bytes) {
            Err(_) => Err(cut),
            Ok(0) => Err(Invalid::Unsummed),
            Ok(sum) if sum != self.digest.finalize() => Err(Invalid::Damaged),
            Ok(_) => Ok(needs),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
