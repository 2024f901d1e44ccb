//! Sources and sinks of snapshots.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::reader::{Offer, Position};
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

/// Where a snapshot goes to. It runs on a thread of its own. Dropping it before [`Sink::end`] undoes what was begun.
pub trait Sink: Send {
    /// A snapshot begins.
    ///
    /// # Errors
    /// It cannot go here: it is something else, or the target is not empty.
    fn begin(&mut self, offer: &Offer) -> io::Result<()>;
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
        let file = File::open(path)?;
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

/// A file, which appears under its name only when it is whole. Of a snapshot with a log it holds the snapshot.
#[derive(Debug)]
pub struct FileSink {
    path: PathBuf,
    /// The file under its other name, until it is whole.
    part: Option<(File, PathBuf)>,
    replace: bool,
    marked: bool,
}

impl FileSink {
    /// A file that will be called `path`. One of that name is an error unless it may be replaced.
    #[must_use]
    pub const fn new(path: PathBuf, replace: bool) -> Self {
        Self { path, part: None, replace, marked: false }
    }
}

impl Sink for FileSink {
    fn begin(&mut self, _offer: &Offer) -> io::Result<()> {
        if !self.replace && self.path.exists() {
            let what = format!("{} exists; --replace replaces it", self.path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        let mut name = self.path.clone().into_os_string();
        name.push(".part");
        let name = PathBuf::from(name);
        self.part = Some((File::create(&name)?, name));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.part {
            Some((file, _)) if !self.marked => file.write_all(bytes),
            _ => Ok(()),
        }
    }

    fn mark(&mut self) -> io::Result<()> {
        self.marked = true;
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        let Some((file, name)) = &self.part else { return Ok(()) };
        file.sync_all()?;
        fs::rename(name, &self.path)?;
        self.part = None;
        Ok(())
    }
}

impl Drop for FileSink {
    fn drop(&mut self) {
        if let Some((_, name)) = &self.part {
            // Whoever reads an error that ended it can do without another one.
            let _left = fs::remove_file(name);
        }
    }
}
