//! A setting of a Valkey, changed for a while.
//!
//! Before the change, a note on this machine's disk says what the setting was. The next program
//! that uses this Valkey restores it, if this one was killed. Without a note nothing is changed.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::Value;

use super::admin::{Admin, without_text};
use super::note::{Note, Said};
use super::{Server, field};
use crate::wait::{Limit, Stop};

/// How long a Valkey may take to restore a setting.
const UNDOING: Duration = Duration::from_secs(60);

/// A process of a Valkey, and the notes about its settings. A note names the process, not its
/// address: a restarted Valkey has the settings of its file.
#[derive(Clone)]
pub(super) struct Place {
    server: Server,
    run_id: String,
    notes: PathBuf,
}

impl Place {
    /// Returns the place of the process that gave this `INFO server`, if it names itself.
    pub(super) fn new(server: &Server, info: &str, notes: &Path) -> Option<Self> {
        let run_id =
            field(info, "run_id").filter(|id| id.bytes().all(|byte| byte.is_ascii_alphanumeric()))?;
        Some(Self { server: server.clone(), run_id: run_id.into(), notes: notes.into() })
    }

    fn note(&self, name: &str) -> String {
        format!("{name}-{}", self.run_id)
    }

    /// Restores a setting if a killed program has left a note, unless it was changed again since.
    pub(super) fn recover(&self, name: &str, admin: &mut Admin, limit: &Limit) -> io::Result<()> {
        let found = Note::find(&self.notes, &self.note(name)).unwrap_or_else(|error| {
            let (server, notes) = (&self.server, self.notes.display());
            tracing::warn!(%error, "notes of what is to be put back at {server} cannot be read in {notes}");
            None
        });
        let Some(mut note) = found else { return Ok(()) };
        let Some(said) = note.says()? else { return note.remove() };
        // Without the right to read it, the note stays for a program that has this right.
        let Some(now) = read(name, admin, limit)? else { return Ok(()) };
        if now == said.changed {
            self.set(name, &said.earlier, admin, limit)?;
            tracing::warn!(
                "a program that was killed had left {name} changed at {}: it is restored",
                self.server
            );
        }
        note.remove()
    }

    fn set(&self, name: &str, value: &str, admin: &mut Admin, limit: &Limit) -> io::Result<()> {
        let answer = admin.ask(&["CONFIG", "SET", name, value], limit)?;
        let refused = |code| self.server.failed("CONFIG SET", io::Error::other(format!("{name}: {code}")));
        without_text(&answer).map_err(refused)
    }
}

/// Returns a setting, `None` without the right to read it.
pub(super) fn read(name: &str, admin: &mut Admin, limit: &Limit) -> io::Result<Option<String>> {
    Ok(match admin.ask(&["CONFIG", "GET", name], limit)? {
        Value::Array(words) => match words.as_slice() {
            [_, Value::BulkString(value)] => String::from_utf8(value.clone()).ok(),
            _ => None,
        },
        _ => None,
    })
}

/// A changed setting. Dropping it restores it.
pub(super) struct Changed {
    place: Place,
    name: &'static str,
    earlier: String,
    stop: Stop,
    /// `None` once there is nothing to restore.
    note: Option<Note>,
}

impl Changed {
    /// Changes a setting. The inner error says why it stays as it is. A first call of
    /// [`Stop::stop`] does not end the undoing.
    ///
    /// # Errors
    /// The Valkey does not answer, and what could not be restored then.
    pub(super) fn begin(
        place: &Place,
        name: &'static str,
        to: &str,
        admin: &mut Admin,
        limit: &Limit,
        stop: &Stop,
    ) -> io::Result<Result<Self, String>> {
        let Some(earlier) = read(name, admin, limit)? else {
            return Ok(Err(format!("no right to CONFIG GET {name}")));
        };
        let said = Said { changed: to.into(), earlier: earlier.clone() };
        // Without a note the setting could not be restored after a kill.
        let note = match Note::take(&place.notes, &place.note(name), &said) {
            Ok(Some(note)) => note,
            Ok(None) => return Ok(Err("another program has just changed it".into())),
            Err(error) => {
                return Ok(Err(format!("no note can be kept in {}: {error}", place.notes.display())));
            }
        };
        let mut changed = Self { place: place.clone(), name, earlier, stop: stop.clone(), note: Some(note) };
        match admin.ask(&["CONFIG", "SET", name, to], limit) {
            Ok(answer) => match without_text(&answer) {
                Ok(()) => Ok(Ok(changed)),
                Err(code) => {
                    changed.note.take().map_or(Ok(()), Note::remove)?;
                    Ok(Err(format!("CONFIG SET {name}: {code}")))
                }
            },
            // The answer is lost, and it may be changed.
            Err(error) => Err(match changed.undo() {
                Ok(()) => error,
                Err(left) => io::Error::new(error.kind(), format!("{error}; {left}")),
            }),
        }
    }

    /// Restores it over `admin`.
    ///
    /// # Errors
    /// It is not restored. This can be tried again.
    pub(super) fn restore(&mut self, admin: &mut Admin, limit: &Limit) -> io::Result<()> {
        if self.note.is_some() {
            self.place.set(self.name, &self.earlier, admin, limit)?;
        }
        self.note.take().map_or(Ok(()), Note::remove)
    }

    /// Restores it over `admin` if that still answers, or else over a new connection.
    pub(super) fn put_back(mut self, admin: &mut Admin) -> io::Result<()> {
        let limit = Limit::of_undoing(&self.stop, UNDOING);
        self.restore(admin, &limit).or_else(|_| self.undo())
    }

    /// Leaves it changed, and the note where it is.
    pub(super) fn leave(mut self) {
        self.note = None;
    }

    fn undo(&mut self) -> io::Result<()> {
        if self.note.is_none() {
            return Ok(());
        }
        let limit = Limit::of_undoing(&self.stop, UNDOING);
        let restored =
            Admin::connect(&self.place.server, &limit).and_then(|mut admin| self.restore(&mut admin, &limit));
        restored.map_err(|error| {
            self.note = None;
            io::Error::new(error.kind(), format!("{} ({error})", left(self.name, &self.place.server)))
        })
    }
}

/// Says that a setting may not be restored, and what to do.
pub(super) fn left(name: &str, server: &Server) -> String {
    format!(
        "{name} may still be changed at {server}: the next run of this program with it, on this machine, restores it, \
         or CONFIG SET {name}"
    )
}

impl Drop for Changed {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            tracing::error!(%error, "not undone");
        }
    }
}
