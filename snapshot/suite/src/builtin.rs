//! This workspace's own publisher and reader, as targets of the suite.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_snapshot::run::{Progress, Publish, Pull, Stop, publish, pull};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Error, FileSink, FileSource, Secret, publisher, reader};

use super::reader::Readers;
use conformance::blackbox::target::{Exit, Running};

/// The secret of our own sides.
pub const SECRET: &[u8] = b"a secret of the suite";

/// Short, because cases wait for it, and long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(5);

/// Bytes that our publisher publishes: several chunks, and two areas of the seed's table.
const BYTES: usize = (4 << 20) + 100_000;

/// A running publisher of ours.
pub struct OwnPublisher {
    withdraw: Stop,
    thread: Option<JoinHandle<Result<Progress, Error>>>,
}

impl OwnPublisher {
    /// Publishes a file of `folder` on `address`. Its lease and its patience are short.
    ///
    /// # Errors
    /// The file cannot be written, or there is no RDMA at that address.
    pub fn start<B: Descriptors>(
        backend: &B,
        address: SocketAddr,
        layout: Layout,
        folder: &Path,
    ) -> Result<Self, String> {
        let file = folder.join("published");
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at * 31 + at / 977) as u8).collect();
        std::fs::write(&file, bytes).map_err(|error| error.to_string())?;
        let source = FileSource::open(&file, Content::Bytes).map_err(|error| error.to_string())?;
        let withdraw = Stop::default();
        let config = publisher::Config {
            secret: Secret::new(SECRET),
            lease: LIMIT,
            handshake: LIMIT,
            ..publisher::Config::default()
        };
        let how = Publish { config, layout, withdraw: withdraw.clone(), ..Publish::default() };
        let backend = backend.clone();
        let (sender, bound) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let told = &mut |_: &Progress| {};
            publish(&backend, address, source, &how, |at| sender.send(at).unwrap_or(()), told)
        });
        let publisher = Self { withdraw, thread: Some(thread) };
        match bound.recv() {
            Ok(_) => Ok(publisher),
            Err(_) => Err(publisher.end().err().unwrap_or_else(|| "it ended at once".into())),
        }
    }

    fn end(mut self) -> Result<(), String> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let ended = thread.join().map_err(|_| "it panicked".to_string())?;
        ended.map(drop).map_err(|error| error.to_string())
    }
}

impl Drop for OwnPublisher {
    fn drop(&mut self) {
        self.withdraw.stop();
        // A panic there fails the case.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// Readers of ours, in this process.
pub struct OwnReaders<B: Descriptors> {
    /// Their backend.
    pub backend: B,
    /// Whether they report success although they have lost a byte: a mistake.
    pub loses: bool,
}

impl<B: Descriptors> Readers for OwnReaders<B> {
    fn start(&self, _: &str, publisher: SocketAddr, file: &Path) -> Result<Box<dyn Running>, String> {
        let stop = Stop::default();
        let config =
            reader::Config { secret: Secret::new(SECRET), handshake: LIMIT, ..reader::Config::default() };
        let how = Pull { config, stop: stop.clone(), ..Pull::default() };
        let (backend, file, loses) = (self.backend.clone(), file.to_path_buf(), self.loses);
        let (sender, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let sink = FileSink::new(file.clone(), Content::Bytes, true);
            let outcome = pull(&backend, &[publisher], sink, &how, &mut |_| {});
            if loses && let Ok(bytes) = std::fs::read(&file) {
                let _shorter = std::fs::write(&file, bytes.get(1..).unwrap_or_default());
            }
            let exit = outcome.map_or_else(|error| Exit::Failure(error.to_string()), |_| Exit::Success);
            // The case may have ended.
            let _not_awaited = sender.send(exit);
        });
        Ok(Box::new(OwnReader { stop, ended, thread: Some(thread) }))
    }
}

struct OwnReader {
    stop: Stop,
    ended: Receiver<Exit>,
    thread: Option<JoinHandle<()>>,
}

impl Running for OwnReader {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        match self.ended.recv_timeout(patience) {
            Ok(exit) => Some(exit),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Exit::Crashed("it panicked".into())),
        }
    }
}

impl Drop for OwnReader {
    fn drop(&mut self) {
        self.stop.stop();
        // A panic there was reported, or belongs to a failed case.
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}
