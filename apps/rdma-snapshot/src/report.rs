//! How far a run is, for people or as JSON.

use indicatif::{ProgressBar, ProgressStyle};
use rdma_snapshot::Error;
use rdma_snapshot::run::Progress;
use serde_json::json;

/// Tells of a run.
pub(crate) struct Report {
    what: &'static str,
    json: bool,
    bar: ProgressBar,
}

impl Report {
    pub(crate) fn new(what: &'static str, json: bool) -> Self {
        let bar = if json { ProgressBar::hidden() } else { ProgressBar::no_length() };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes} {msg}") {
            bar.set_style(style);
        }
        Self { what, json, bar }
    }

    pub(crate) fn tell(&mut self, progress: &Progress) {
        if self.json {
            println!("{}", self.line(progress, "state", "running"));
            return;
        }
        if let Some(total) = progress.total {
            self.bar.set_length(total);
        }
        self.bar.set_position(progress.bytes);
        let left = progress.left().filter(|_| !progress.marked);
        let left = left.map_or_else(String::new, |left| format!(", {:.0} s left", left.as_secs_f64()));
        let log = if progress.marked { ", snapshot complete" } else { "" };
        let rate = progress.rate() / f64::from(1 << 20);
        let readers = format!(", {} read, {} done", progress.readers, progress.done);
        self.bar.set_message(format!("at {rate:.0} MiB/s{left}{log}{readers}"));
    }

    fn line(&self, progress: &Progress, key: &str, value: &str) -> serde_json::Value {
        json!({
            "what": self.what,
            key: value,
            "bytes": progress.bytes,
            "total": progress.total,
            "snapshot_complete": progress.marked,
            "seconds": progress.elapsed.as_secs_f64(),
            "bytes_per_second": progress.rate(),
            "seconds_left": progress.left().map(|left| left.as_secs_f64()),
            "readers": progress.readers,
            "readers_done": progress.done,
        })
    }

    pub(crate) fn end(self, outcome: Result<Progress, Error>) -> Result<(), Box<dyn std::error::Error>> {
        self.bar.finish_and_clear();
        match outcome {
            Ok(progress) if self.json => println!("{}", self.line(&progress, "state", "done")),
            Ok(progress) => eprintln!(
                "valkey-rdma-sync: {} {} bytes in {:.3} s, {:.0} MiB/s",
                self.what,
                progress.bytes,
                progress.elapsed.as_secs_f64(),
                progress.rate() / f64::from(1 << 20)
            ),
            Err(error) => {
                if self.json {
                    println!(
                        "{}",
                        json!({ "what": self.what, "state": "failed", "error": error.to_string() })
                    );
                }
                return Err(error.into());
            }
        }
        Ok(())
    }
}
