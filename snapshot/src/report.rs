//! Reports a run's progress, for people or as JSON.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use rdma_snapshot::Error;
use rdma_snapshot::run::{Progress, Stop, TICK};
use serde_json::json;

/// The most lines waiting to be written.
const WAITING: usize = 16;

pub(crate) struct Report {
    what: &'static str,
    bar: ProgressBar,
    json: Option<Lines>,
}

/// Lines for a reader that may stop reading. A thread of their own writes them, so that the run
/// does not wait for it.
struct Lines {
    waiting: SyncSender<String>,
    /// Ends when all lines are written.
    over: Receiver<()>,
    stop: Stop,
}

impl Lines {
    fn new(mut to: impl Write + Send + 'static, stop: Stop) -> Self {
        let (waiting, lines) = sync_channel::<String>(WAITING);
        let (until_here, over) = sync_channel(0);
        std::thread::spawn(move || {
            let _until_here = until_here;
            // The reader may have closed the pipe.
            while let Ok(line) = lines.recv()
                && writeln!(to, "{line}").and_then(|()| to.flush()).is_ok()
            {}
        });
        Self { waiting, over, stop }
    }

    /// Queues a line, unless too many are queued already.
    fn tell(&self, line: String) {
        let _lost = self.waiting.try_send(line);
    }

    /// Queues the last line, and waits until it is written, or until the end is requested.
    fn end(self, line: String) {
        let mut line = line;
        while let Err(TrySendError::Full(again)) = self.waiting.try_send(line) {
            if self.over.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) && self.stop.is_stopped() {
                return;
            }
            line = again;
        }
        drop(self.waiting);
        while self.over.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) && !self.stop.is_stopped() {}
    }
}

impl Report {
    /// If `stop` ends the run, it also ends the wait for a reader of the lines.
    pub(crate) fn new(what: &'static str, json: bool, stop: Stop) -> Self {
        let bar = if json { ProgressBar::hidden() } else { ProgressBar::no_length() };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes} {msg}") {
            bar.set_style(style);
        }
        Self { what, bar, json: json.then(|| Lines::new(io::stdout(), stop)) }
    }

    pub(crate) fn tell(&mut self, progress: &Progress) {
        if let Some(lines) = &self.json {
            lines.tell(self.line(progress, "running"));
            return;
        }
        if let Some(total) = progress.total {
            self.bar.set_length(total);
        }
        self.bar.set_position(progress.bytes);
        let left = progress.left().filter(|_| !progress.marked);
        let left = left.map_or_else(String::new, |left| format!(", {:.0} s left", left.as_secs_f64()));
        let log = if progress.marked { ", snapshot complete" } else { "" };
        let rate = BinaryBytes(progress.rate() as u64);
        let readers = format!(", {} read, {} done", progress.readers, progress.done);
        self.bar.set_message(format!("at {rate}/s{left}{log}{readers}"));
    }

    fn line(&self, progress: &Progress, state: &str) -> String {
        let line = json!({
            "what": self.what,
            "state": state,
            "bytes": progress.bytes,
            "total": progress.total,
            "snapshot_complete": progress.marked,
            "seconds": progress.elapsed.as_secs_f64(),
            "bytes_per_second": progress.rate(),
            "seconds_left": progress.left().map(|left| left.as_secs_f64()),
            "readers": progress.readers,
            "readers_done": progress.done,
            "snapshots": progress.snapshots,
        });
        line.to_string()
    }

    pub(crate) fn end(mut self, outcome: Result<Progress, Error>) -> Result<(), Box<dyn std::error::Error>> {
        self.bar.finish_and_clear();
        if let Some(lines) = self.json.take() {
            lines.end(match &outcome {
                Ok(progress) => self.line(progress, "done"),
                Err(error) => {
                    json!({ "what": self.what, "state": "failed", "error": error.to_string() }).to_string()
                }
            });
        } else if let Ok(progress) = &outcome {
            crate::say(&summary(self.what, progress));
        }
        Ok(outcome.map(|_| ())?)
    }
}

fn summary(what: &str, progress: &Progress) -> String {
    let seconds = progress.elapsed.as_secs_f64();
    let rate = BinaryBytes(progress.rate() as u64);
    format!("{what} {} bytes in {seconds:.3} s, {rate}/s", progress.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that never reads.
    struct Stuck(Receiver<()>);

    impl Write for Stuck {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            let _never = self.0.recv();
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A run continues, and ends at a signal, although the reader of its lines has stopped reading.
    #[test]
    fn a_reader_that_stands_still_holds_up_nothing() {
        let (held, until) = sync_channel(0);
        let stop = Stop::default();
        let lines = Lines::new(Stuck(until), stop.clone());
        for number in 0..10 * WAITING {
            lines.tell(number.to_string());
        }
        stop.stop();
        lines.end("the last".into());
        drop(held);
    }

    /// The last line is written before the process may end, however many lines precede it.
    #[test]
    fn the_last_line_is_written() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let lines = Lines::new(writer, Stop::default());
        for number in 0..10 * WAITING {
            lines.tell(number.to_string());
        }
        lines.end("the last".into());
        let mut all = String::new();
        io::Read::read_to_string(&mut reader, &mut all).expect("text");
        assert_eq!(all.lines().last(), Some("the last"));
    }
}
