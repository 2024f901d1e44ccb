//! Sources and sinks of snapshots.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::rdb::Check;
use crate::reader::{Offer, Position};
use crate::wait::Stop;
use crate::wire::Content;

/// A piece of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A number of bytes, at least one.
    Bytes(usize),
    /// The snapshot is complete. The log of later writes follows.
    Mark,
    /// Nothing now. After the mark, bytes so far are published at once.
    Idle,
    /// The end, only after the mark.
    End,
}

/// How long a [`Source`] may wait for bytes after its mark.
pub const QUIET: Duration = Duration::from_millis(40);

/// A source of a snapshot. It runs on a thread of its own.
pub trait Source: Send {
    /// Returns the kind of its bytes.
    fn content(&self) -> Content;
    /// Returns the bytes of the snapshot, if known beforehand.
    fn total(&self) -> Option<u64> {
        None
    }
    /// Returns the position in a primary's history at which it was made.
    fn position(&self) -> Option<Position> {
        None
    }
    /// Reads more into `into`, which is not empty. May take any time before the mark. After the
    /// mark it returns within [`QUIET`], so that no write waits longer than 100 ms to leave.
    ///
    /// # Errors
    /// The snapshot cannot be completed.
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece>;
    /// Ends the log at the operator's request: [`Piece::End`] must come once everything written
    /// until now was read.
    ///
    /// # Errors
    /// The current end cannot be determined.
    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Keeps the source alive without a read. While its log has to wait, this is called about every
    /// second.
    ///
    /// # Errors
    /// It is gone.
    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Returns a function that opens another snapshot of the same history, if there is one.
    fn again(&self) -> Option<Again> {
        None
    }
    /// Returns the offset in the history of the next byte of the log.
    fn offset(&self) -> Option<u64> {
        None
    }
    /// Ends a read of the log at this offset, which is not behind the next byte, and returns
    /// [`Piece::Idle`] there once.
    fn cut_at(&mut self, _offset: u64) {}
}

/// Opens another snapshot of the history of a [`Source`]. The argument ends the wait for it.
pub type Again = Arc<dyn Fn(&Stop) -> io::Result<Box<dyn Source>> + Send + Sync>;

/// A target of a snapshot. It runs on a thread of its own. Steps for which it has nothing to do are
/// left out.
pub trait Sink: Send {
    /// Checks whether a snapshot can go here at all, before one is requested.
    ///
    /// # Errors
    /// It cannot: the target is not empty, or cannot be reached.
    fn prepare(&mut self, _stop: &Stop) -> io::Result<()> {
        Ok(())
    }
    /// Begins a snapshot. Every wait, in this call and in later ones, calls [`Stop::check`] of
    /// `stop` within every [`TICK`](crate::run::TICK).
    ///
    /// # Errors
    /// It cannot go here: it is of another kind, or the target is not empty.
    fn begin(&mut self, _offer: &Offer, _stop: &Stop) -> io::Result<()> {
        Ok(())
    }
    /// Writes more of it.
    ///
    /// # Errors
    /// The target failed.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Marks the snapshot as complete. Its digest was right. The log of later writes follows.
    ///
    /// # Errors
    /// The target failed.
    fn mark(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Ends the snapshot and makes it permanent.
    ///
    /// # Errors
    /// The target failed.
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Undoes all changes, after a failure or a stop. Nothing is called after this. A wait here
    /// continues after the first call of [`Stop::stop`], and ends at [`Stop::is_forced`].
    ///
    /// # Errors
    /// What could not be undone, and what to do about it.
    fn undo(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the check of an RDB, if that is the content of a file.
fn check(content: Content) -> Option<Check> {
    (content == Content::Rdb).then(Check::default)
}

/// A file. Of an RDB all is checked, at the latest before its mark: magic, version, structure, end
/// and checksum.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: PathBuf,
    length: u64,
    content: Content,
    /// Of an RDB, until its mark.
    check: Option<Check>,
    marked: bool,
}

impl FileSource {
    /// Opens a file.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path, content: Content) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = File::open(path).map_err(named)?;
        let length = file.metadata()?.len();
        Ok(Self { file, path: path.into(), length, content, check: check(content), marked: false })
    }
}

impl Source for FileSource {
    fn content(&self) -> Content {
        self.content
    }

    fn total(&self) -> Option<u64> {
        Some(self.length)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if self.marked {
            return Ok(Piece::End);
        }
        let count = self.file.read(into)?;
        self.marked = count == 0;
        let checked = match &mut self.check {
            Some(check) if !self.marked => check.update(into.get(..count).unwrap_or_default()),
            check => check.take().map_or(Ok(()), |check| check.finish().map(drop)),
        };
        checked.map_err(|invalid| invalid.of(&self.path.display()))?;
        Ok(if self.marked { Piece::Mark } else { Piece::Bytes(count) })
    }
}

/// Bytes written between two syncs to the disk, so that no sync has to wait for the whole file.
const UNSYNCED: u64 = 64 << 20;

/// A file that appears under its name only when it is complete and on the disk. Until then its name
/// is `NAME.DIGITS.part`, with digits of its own. Of a snapshot with a log it holds the snapshot.
/// An RDB gets its name only if it is one: see [`FileSource`].
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    content: Content,
    /// Of an RDB, until its mark.
    check: Option<Check>,
    /// The file under its temporary name, until it is complete.
    part: Option<(File, PathBuf)>,
    replace: bool,
    marked: bool,
    unsynced: u64,
}

impl FileSink {
    /// Returns a sink for the file `path`. An existing file is an error unless it may be replaced.
    #[must_use]
    pub fn new(path: PathBuf, content: Content, replace: bool) -> Self {
        Self { path, content, check: None, part: None, replace, marked: false, unsynced: 0 }
    }

    fn exists(&self) -> io::Error {
        let what = format!("{} exists; --replace replaces it", self.path.display());
        io::Error::new(io::ErrorKind::AlreadyExists, what)
    }

    /// Gives the file its name. A file that has appeared since the beginning stays, unless it may
    /// be replaced.
    fn name(&self, part: &Path) -> io::Result<()> {
        if self.replace {
            return fs::rename(part, &self.path);
        }
        match renameat_with(CWD, part, CWD, &self.path, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(self.exists()),
            // Not every file system supports that. A hard link never replaces a file either.
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
        // `exists` would return false if it cannot check.
        if !self.replace && self.path.symlink_metadata().is_ok() {
            return Err(self.exists());
        }
        Ok(())
    }

    fn begin(&mut self, _offer: &Offer, stop: &Stop) -> io::Result<()> {
        // The file may have appeared meanwhile.
        self.prepare(stop)?;
        let digits = crate::hex(&crate::random::<8>().map_err(io::Error::other)?);
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{digits}.part"));
        let name = PathBuf::from(name);
        self.part = Some((File::create_new(&name)?, name));
        self.check = check(self.content);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some((file, _)) = self.part.as_mut().filter(|_| !self.marked) else { return Ok(()) };
        if let Some(check) = &mut self.check {
            check.update(bytes).map_err(|invalid| invalid.of(&"what is published"))?;
        }
        file.write_all(bytes)?;
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= UNSYNCED {
            self.unsynced = 0;
            file.sync_data()?;
        }
        Ok(())
    }

    fn mark(&mut self) -> io::Result<()> {
        if let Some(check) = self.check.take() {
            check.finish().map_err(|invalid| invalid.of(&"what is published"))?;
        }
        self.marked = true;
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        let Some((file, part)) = &self.part else { return Ok(()) };
        file.sync_all()?;
        self.name(part)?;
        self.part = None;
        // The name is on the disk once its directory is.
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
