//! Turns the source's `rdbcompression` off while the source forks for our snapshot.
//!
//! Compressing costs the source more than it saves on an RDMA network. No `REPLCONF capa` of Valkey
//! 9.1 asks for an RDB without it, so the setting itself is changed: from before `PSYNC` until
//! `+FULLRESYNC` has come. The source writes that line in the turn of its event loop in which it
//! forks, or when the fork already exists. It handles other clients' commands after that turn, so a
//! later `CONFIG SET` does not affect the child.
//!
//! A note on this machine's disk says that the setting must be restored. A process that holds the
//! note's lock is at work. A note without a lock was left by a killed program, and the next one
//! that opens this source restores the setting.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::Value;

use super::Server;
use super::admin::{Admin, without_text};
use crate::wait::{Limit, Stop};

/// How long the source may take to restore the setting.
const UNDOING: Duration = Duration::from_secs(60);

/// The setting.
const NAME: &str = "rdbcompression";

/// The contents of a note.
const WAS_ON: &[u8] = b"rdbcompression was yes\n";

/// Restores the setting at this source if a killed program has left a note.
pub(super) fn recover(
    server: &Server,
    admin: &mut Admin,
    run_id: &str,
    notes: &Path,
    limit: &Limit,
) -> io::Result<()> {
    let found = Note::find(notes, run_id).unwrap_or_else(|error| {
        tracing::warn!(%error, "notes of what is to be put back at {server} cannot be read in {}", notes.display());
        None
    });
    let Some(mut note) = found else { return Ok(()) };
    if note.says()? && read(admin, limit)?.as_deref() == Some("no") {
        set(server, admin, "yes", limit)?;
        tracing::warn!("a publisher that was killed had left {NAME} off at {server}: it is on again");
    }
    note.remove()
}

/// While this exists, the setting is off.
pub(super) struct Off {
    server: Server,
    stop: Stop,
    /// `None` once there is nothing to restore.
    note: Option<Note>,
}

impl Off {
    /// Turns it off. Logs why and returns `None` if it stays on.
    pub(super) fn begin(
        server: &Server,
        admin: &mut Admin,
        run_id: &str,
        notes: &Path,
        limit: &Limit,
        stop: &Stop,
    ) -> io::Result<Option<Self>> {
        match read(admin, limit)?.as_deref() {
            Some("yes") => {}
            Some(_) => return Ok(None),
            None => {
                tracing::warn!("no right to CONFIG GET {NAME} at {server}: the RDB is as it makes it");
                return Ok(None);
            }
        }
        // Without a note the setting could not be restored after a kill.
        let note = match Note::take(notes, run_id) {
            Ok(Some(note)) => note,
            Ok(None) => {
                tracing::warn!("another publisher is about to begin at {server}: the RDB is as it makes it");
                return Ok(None);
            }
            Err(error) => {
                let notes = notes.display();
                tracing::warn!(%error, "no note can be kept in {notes}: the RDB is as {server} makes it");
                return Ok(None);
            }
        };
        // The answer may be lost, so from here on the setting must be restored.
        let mut off = Self { server: server.clone(), stop: stop.clone(), note: Some(note) };
        let answer = admin.ask(&["CONFIG", "SET", NAME, "no"], limit)?;
        if let Err(code) = without_text(&answer) {
            tracing::warn!("{server} takes no CONFIG SET {NAME} ({code}): the RDB is as it makes it");
            off.note.take().map_or(Ok(()), Note::remove)?;
            return Ok(None);
        }
        Ok(Some(off))
    }

    /// Turns it on again, over `admin` if that still answers.
    pub(super) fn put_back(mut self, admin: &mut Admin) -> io::Result<()> {
        let limit = Limit::of_undoing(&self.stop, UNDOING);
        match set(&self.server, admin, "yes", &limit) {
            Ok(()) => self.note.take().map_or(Ok(()), Note::remove),
            Err(_) => self.undo(),
        }
    }

    /// Turns it on again over a new connection.
    fn undo(&mut self) -> io::Result<()> {
        if self.note.is_none() {
            return Ok(());
        }
        let limit = Limit::of_undoing(&self.stop, UNDOING);
        let put_back = Admin::connect(&self.server, &limit)
            .and_then(|mut admin| set(&self.server, &mut admin, "yes", &limit));
        let note = self.note.take();
        match put_back {
            Ok(()) => note.map_or(Ok(()), Note::remove),
            Err(error) => {
                let left = format!(
                    "{NAME} may still be off at {}: the next publish from it on this machine puts it back, \
                     or CONFIG SET {NAME} yes ({error})",
                    self.server
                );
                Err(io::Error::new(error.kind(), left))
            }
        }
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            tracing::error!(%error, "not undone");
        }
    }
}

/// Returns the setting, `None` without the right to read it.
fn read(admin: &mut Admin, limit: &Limit) -> io::Result<Option<String>> {
    Ok(match admin.ask(&["CONFIG", "GET", NAME], limit)? {
        Value::Array(words) => match words.as_slice() {
            [_, Value::BulkString(value)] => String::from_utf8(value.clone()).ok(),
            _ => None,
        },
        _ => None,
    })
}

fn set(server: &Server, admin: &mut Admin, value: &str, limit: &Limit) -> io::Result<()> {
    let answer = admin.ask(&["CONFIG", "SET", NAME, value], limit)?;
    without_text(&answer).map_err(|code| server.failed("CONFIG SET", io::Error::other(code)))
}

/// A note that the setting must be restored, locked by this process. Dropping it keeps the file.
struct Note {
    file: File,
    path: PathBuf,
}

impl Note {
    /// Returns a note about the source with this `run_id` that a dead process has left.
    fn find(notes: &Path, run_id: &str) -> io::Result<Option<Self>> {
        match OpenOptions::new().read(true).write(true).open(path(notes, run_id)) {
            Ok(file) => Self::lock(file, path(notes, run_id)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a note on the disk. `None` if another process is at work.
    fn take(notes: &Path, run_id: &str) -> io::Result<Option<Self>> {
        DirBuilder::new().recursive(true).mode(0o700).create(notes)?;
        let path = path(notes, run_id);
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let Some(mut note) = Self::lock(file, path)? else { return Ok(None) };
        note.file.write_all(WAS_ON)?;
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

    /// Returns whether it was written completely. Before that the setting was not changed.
    fn says(&mut self) -> io::Result<bool> {
        let mut said = Vec::new();
        (&mut self.file).take(WAS_ON.len() as u64).read_to_end(&mut said)?;
        Ok(said == WAS_ON)
    }

    fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// Names the note by the source's process, not its address: a restarted source has the setting of
/// its file.
fn path(notes: &Path, run_id: &str) -> PathBuf {
    notes.join(format!("{NAME}-{run_id}"))
}
