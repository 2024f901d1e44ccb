//! Files by which the two sides of a soak wait for each other. They share a directory and, on purpose, no network but the one under test.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A directory that both sides see.
#[derive(Clone, Debug)]
pub(super) struct Meeting(pub PathBuf);

/// What one side tells the other, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sign {
    /// The servers run.
    Ready,
    /// The clients have connected once and left: whatever is made only once exists.
    Warm,
    /// The servers' side knows what it holds without clients.
    Measured,
    /// The clients are done and gone.
    Ended,
}

impl Meeting {
    fn file(&self, sign: Sign) -> PathBuf {
        self.0.join(format!("{sign:?}").to_lowercase())
    }

    /// Tells the other side.
    pub(super) fn tell(&self, sign: Sign) -> io::Result<()> {
        std::fs::write(self.file(sign), [])
    }

    /// Whether the other side has told.
    pub(super) fn told(&self, sign: Sign) -> bool {
        self.file(sign).exists()
    }

    /// Tells that a server ended by itself. What its clients see of that is no fault of theirs.
    pub(super) fn tell_end_of(&self, server: &str) -> io::Result<()> {
        std::fs::write(self.0.join(format!("ended.{server}")), [])
    }

    /// Whether this server has ended by itself.
    pub(super) fn has_ended(&self, server: &str) -> bool {
        self.0.join(format!("ended.{server}")).exists()
    }

    /// Waits until the other side has told; not for one that has ended.
    pub(super) fn wait(&self, sign: Sign, limit: Duration) -> io::Result<()> {
        let begun = Instant::now();
        while !self.told(sign) {
            if begun.elapsed() > limit || self.told(Sign::Ended) {
                let what =
                    format!("the other side did not say `{sign:?}`, within {limit:?} or before it ended");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}
