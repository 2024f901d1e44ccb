//! An RDB on its way to a target: in a file without a name, until all of it was checked
//! (VS-READ-007).

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;

use crate::rdb::{Check, Needs};

/// Bytes that are read at a time.
const PIECE: usize = 256 << 10;

/// The RDB so far. The system releases the file's space when this process ends, in whatever way.
pub(super) struct Spool {
    file: File,
    check: Check,
}

impl Spool {
    /// Creates the file in the folder that `TMPDIR` names, or in `/var/tmp`, because `/tmp` may be
    /// memory.
    pub(super) fn new() -> io::Result<Self> {
        let folder = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
        let file = tempfile::tempfile_in(&folder).map_err(|error| {
            let what = format!("a file for the RDB in {} (TMPDIR names another folder)", folder.display());
            io::Error::new(error.kind(), format!("{what}: {error}"))
        })?;
        Ok(Self { file, check: Check::default() })
    }

    /// Keeps more of the RDB.
    ///
    /// # Errors
    /// This is no RDB, or the file takes no more.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.check.update(bytes).map_err(|invalid| invalid.of(&"what is published"))?;
        self.file.write_all(bytes).map_err(|error| {
            let what = format!("the file that keeps the RDB until it is checked (in TMPDIR): {error}");
            io::Error::new(error.kind(), what)
        })
    }

    /// Returns the RDB, and what it needs, once all of it has come.
    ///
    /// # Errors
    /// It is no RDB that a Valkey can load.
    pub(super) fn whole(self) -> io::Result<(Whole, Needs)> {
        let needs = self.check.finish().map_err(|invalid| invalid.of(&"what is published"))?;
        let mut file = self.file;
        file.rewind()?;
        Ok((Whole { file, piece: vec![0; PIECE] }, needs))
    }
}

/// An RDB that was checked.
pub(super) struct Whole {
    file: File,
    piece: Vec<u8>,
}

impl Whole {
    /// Returns the next bytes; none at the end.
    pub(super) fn next(&mut self) -> io::Result<&[u8]> {
        let count = self.file.read(&mut self.piece)?;
        Ok(self.piece.get(..count).unwrap_or_default())
    }
}
