//! The phases of a soak: files by which its two sides wait for each other. The sides share a
//! directory and, on purpose, no network except the one under test.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A directory that both sides can read.
#[derive(Clone, Debug)]
pub(super) struct Phases(pub PathBuf);

/// The phases that one side announces to the other, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// The servers are running.
    Ready,
    /// The clients have connected once and left: everything that is created only once exists.
    Warm,
    /// The servers' side has recorded what it holds without clients.
    Measured,
    /// The clients have finished and left.
    Ended,
}

impl Phases {
    fn file(&self, phase: Phase) -> PathBuf {
        self.0.join(format!("{phase:?}").to_lowercase())
    }

    pub(super) fn tell(&self, phase: Phase) -> io::Result<()> {
        std::fs::write(self.file(phase), [])
    }

    pub(super) fn told(&self, phase: Phase) -> bool {
        self.file(phase).exists()
    }

    /// Announces that a server ended on its own. Its clients are not blamed for the effects.
    pub(super) fn tell_end_of(&self, server: &str) -> io::Result<()> {
        std::fs::write(self.0.join(format!("ended.{server}")), [])
    }

    pub(super) fn has_ended(&self, server: &str) -> bool {
        self.0.join(format!("ended.{server}")).exists()
    }

    /// Waits until the other side has announced it. Returns at once if the other side has ended.
    pub(super) fn wait(&self, phase: Phase, limit: Duration) -> io::Result<()> {
        let begun = Instant::now();
        while !self.told(phase) {
            if begun.elapsed() > limit || self.told(Phase::Ended) {
                let what =
                    format!("the other side did not say `{phase:?}`, within {limit:?} or before it ended");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}
