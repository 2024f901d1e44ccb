//! Sources and sinks of snapshots.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::reader::{Offer, Position};
use crate::wait::Stop;
use crate::wire::Content;

/// A piece that a source gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// So many bytes, at least one.
    Bytes(usize),
    /// The snapshot is complete. What comes from now on is the log of later writes.
    Mark,
    /// Nothing now: what has come is better published than held back.
    Idle,
    /// Nothing more will come. Only after the mark.
    End,
}

/// A source of a snapshot. It runs on a thread of its own.
pub trait Source: Send {
    /// Returns the kind of its bytes.
    fn content(&self) -> Content;
    /// Returns how many bytes the snapshot has, if that is known before it is read.
    fn total(&self) -> Option<u64>;
    /// Returns the position in a primary's history at which it was made.
    fn position(&self) -> Option<Position>;
    /// Reads more into `into`, which is not empty. May take as long as it likes before the mark, and returns [`Piece::Idle`] within a
    /// second behind it.
    ///
    /// # Errors
    /// The snapshot cannot be completed.
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece>;
    /// The operator wants the log to end: [`Piece::End`] shall come once what was written until now was read.
    ///
    /// # Errors
    /// It cannot be found out how far that is.
    fn stop(&mut self) -> io::Result<()>;
}

/// Where a snapshot goes to. It runs on a thread of its own.
pub trait Sink: Send {
    /// Looks whether a snapshot could go here at all, before one is asked for.
    ///
    /// # Errors
    /// It cannot go here: the target is not empty, or is not there.
    fn prepare(&mut self, _stop: &Stop) -> io::Result<()> {
        Ok(())
    }
    /// A snapshot begins. Whatever waits, in this call and in later ones, calls [`Stop::check`] of
    /// `stop` within every [`TICK`](crate::run::TICK).
    ///
    /// # Errors
    /// It cannot go here: it is something else, or the target is not empty.
    fn begin(&mut self, offer: &Offer, stop: &Stop) -> io::Result<()>;
    /// More of it.
    ///
    /// # Errors
    /// The target failed.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// The snapshot is complete and, if that was asked for, its digest was right. What comes from now on is the log of later writes.
    ///
    /// # Errors
    /// The target failed.
    fn mark(&mut self) -> io::Result<()>;
    /// Nothing more comes: what was written is made to stay.
    ///
    /// # Errors
    /// The target failed.
    fn end(&mut self) -> io::Result<()>;
    /// Undoes what was begun: something failed, or the run was stopped. Nothing is called after
    /// this. What waits here goes on after the first call of [`Stop::stop`], and ends at
    /// [`Stop::is_forced`].
    ///
    /// # Errors
    /// What is left, and what to do about it.
    fn undo(&mut self) -> io::Result<()>;
}

/// A file.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    length: u64,
    content: Content,
    marked: bool,
}

impl FileSource {
    /// Opens a file. An RDB is not looked into.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, content: Content) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = File::open(path).map_err(named)?;
        let length = file.metadata()?.len();
        Ok(Self { file, length, content, marked: false })
    }
}

impl Source for FileSource {
    fn content(&self) -> Content {
        self.content
    }

    fn total(&self) -> Option<u64> {
        Some(self.length)
    }

    fn position(&self) -> Option<Position> {
        None
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if self.marked {
            return Ok(Piece::End);
        }
        match self.file.read(into)? {
            0 => {
                self.marked = true;
                Ok(Piece::Mark)
            }
            count => Ok(Piece::Bytes(count)),
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes that are written between two times that the disk is waited for, so that no wait is for all
/// of a file.
const UNSYNCED: u64 = 64 << 20;

/// A file, which appears under its name only when it is whole and on the disk. Until then it is
/// called `NAME.DIGITS.part`, with digits of its own. Of a snapshot with a log it holds the
/// snapshot.
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    /// The file under its other name, until it is whole.
    part: Option<(File, PathBuf)>,
    replace: bool,
    marked: bool,
    unsynced: u64,
}

impl FileSink {
    /// A file that will be called `path`. One of that name is an error unless it may be replaced.
    #[must_use]
    pub const fn new(path: PathBuf, replace: bool) -> Self {
        Self { path, part: None, replace, marked: false, unsynced: 0 }
    }

    fn exists(&self) -> io::Error {
        let what = format!("{} exists; --replace replaces it", self.path.display());
        io::Error::new(io::ErrorKind::AlreadyExists, what)
    }

    /// Gives the file its name. One that has come since the beginning stays, unless it may be
    /// replaced.
    fn name(&self, part: &Path) -> io::Result<()> {
        if self.replace {
            return fs::rename(part, &self.path);
        }
        match renameat_with(CWD, part, CWD, &self.path, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(self.exists()),
            // Not every file system knows that. A second name never replaces one either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                fs::hard_link(part, &self.path).map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => self.exists(),
                    _ => error,
                })?;
                fs::remove_file(part)
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Sink for FileSink {
    fn prepare(&mut self, _stop: &Stop) -> io::Result<()> {
        // `exists` would say no where it cannot look.
        if !self.replace && self.path.symlink_metadata().is_ok() {
            return Err(self.exists());
        }
        Ok(())
    }

    fn begin(&mut self, _offer: &Offer, stop: &Stop) -> io::Result<()> {
        // It may have come meanwhile.
        self.prepare(stop)?;
        let digits = crate::hex(&crate::random::<8>().map_err(io::Error::other)?);
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{digits}.part"));
        let name = PathBuf::from(name);
        self.part = Some((File::create_new(&name)?, name));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some((file, _)) = self.part.as_mut().filter(|_| !self.marked) else { return Ok(()) };
        file.write_all(bytes)?;
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= UNSYNCED {
            self.unsynced = 0;
            file.sync_data()?;
        }
        Ok(())
    }

    fn mark(&mut self) -> io::Result<()> {
        self.marked = true;
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        let Some((file, part)) = &self.part else { return Ok(()) };
        file.sync_all()?;
        self.name(part)?;
        self.part = None;
        // The name is on the disk when its directory is.
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn undo(&mut self) -> io::Result<()> {
        let Some((_, part)) = self.part.take() else { return Ok(()) };
        fs::remove_file(&part)
            .map_err(|error| io::Error::new(error.kind(), format!("{} is left: {error}", part.display())))
    }
}

impl Drop for FileSink {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            tracing::error!(%error, "not undone");
        }
    }
}
