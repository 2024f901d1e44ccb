//! Notes on this machine's disk, about settings of Valkeys that must be restored.
//!
//! A process that holds a note's lock is at work. A note without a lock was left by a killed
//! program.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// The most bytes of a note.
const LONGEST: u64 = 64 << 10;

/// The value to which a setting was changed, and its earlier value. Either may be a password.
pub(super) struct Said {
    pub(super) changed: String,
    pub(super) earlier: String,
}

/// A note, locked by this process. Dropping it keeps the file.
pub(super) struct Note {
    file: File,
    path: PathBuf,
}

impl Note {
    /// Returns a note of this name that a dead process has left.
    pub(super) fn find(notes: &Path, name: &str) -> io::Result<Option<Self>> {
        let path = notes.join(name);
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Self::lock(file, path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a note on the disk. `None` if another process is at work.
    pub(super) fn take(notes: &Path, name: &str, said: &Said) -> io::Result<Option<Self>> {
        DirBuilder::new().recursive(true).mode(0o700).create(notes)?;
        let path = notes.join(name);
        // Only this user can read it.
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let Some(mut note) = Self::lock(file, path)? else { return Ok(None) };
        note.file.set_len(0)?;
        write!(note.file, "{}", json!({ "changed": said.changed, "earlier": said.earlier }))?;
        note.file.sync_all()?;
        File::open(notes)?.sync_all()?;
        Ok(Some(note))
    }

    /// Locks it. `None` if another process has locked it, or has removed it meanwhile.
    fn lock(file: File, path: PathBuf) -> io::Result<Option<Self>> {
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let is_there =
            fs::metadata(&path).is_ok_and(|now| file.metadata().is_ok_and(|own| own.ino() == now.ino()));
        Ok(is_there.then_some(Self { file, path }))
    }

    /// Returns what it says, if it was written completely. Before that the setting was not changed.
    pub(super) fn says(&mut self) -> io::Result<Option<Said>> {
        let mut said = Vec::new();
        (&mut self.file).take(LONGEST).read_to_end(&mut said)?;
        let said: Option<Value> = serde_json::from_slice(&said).ok();
        let word = |name| said.as_ref()?.get(name)?.as_str().map(String::from);
        Ok(word("changed").zip(word("earlier")).map(|(changed, earlier)| Said { changed, earlier }))
    }

    pub(super) fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}
