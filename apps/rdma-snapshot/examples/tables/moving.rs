//! Measures moving from memory to memory.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_snapshot::wire::Content;
use rdma_snapshot::{Offer, Piece, Sink, Source, Stop, reader};
use rustix::time::ClockId;

use crate::place::{Place, Publishing, pull_all};
use crate::{Failure, Kind, Link, Measured, all, spent};

/// A source in memory.
struct Memory {
    bytes: Arc<[u8]>,
    at: usize,
    marked: bool,
}

impl Source for Memory {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn total(&self) -> Option<u64> {
        Some(self.bytes.len() as u64)
    }
    fn position(&self) -> Option<reader::Position> {
        None
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            return Ok(if std::mem::replace(&mut self.marked, true) { Piece::End } else { Piece::Mark });
        }
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(Piece::Bytes(count))
    }
    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A target in memory.
struct Kept {
    bytes: Vec<u8>,
    expected: Arc<[u8]>,
}

impl Kept {
    fn new(expected: &Arc<[u8]>) -> Self {
        Self { bytes: Vec::with_capacity(expected.len()), expected: Arc::clone(expected) }
    }
}

impl Sink for Kept {
    fn begin(&mut self, _offer: &Offer, _stop: &Stop) -> io::Result<()> {
        Ok(())
    }
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
    fn mark(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn end(&mut self) -> io::Result<()> {
        if self.bytes == self.expected[..] { Ok(()) } else { Err(io::Error::other("other bytes came")) }
    }
    fn undo(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Readers wait until the table is complete, so that preparing and moving are measured separately.
pub(crate) fn measure<P: Place>(
    place: &P,
    kind: Kind,
    bytes: &Arc<[u8]>,
    replicas: usize,
    link: Link,
) -> Result<Measured, Failure> {
    let kept = (0..replicas).map(|_| Kept::new(bytes)).collect();
    if kind == Kind::Tcp {
        let begun = Instant::now();
        let source_seconds = stream(link, kept, |stream, _| Ok(stream.write_all(bytes)?))?;
        return Ok(Measured { seconds: begun.elapsed().as_secs_f64(), source_seconds, making_seconds: 0.0 });
    }
    let source = Memory { bytes: Arc::clone(bytes), at: 0, marked: false };
    let begun = Instant::now();
    let publishing = Publishing::begin(place, kind, source, replicas, link)?;
    publishing.complete();
    let making_seconds = begun.elapsed().as_secs_f64();
    pull_all(place, kind, kept, Duration::ZERO)?;
    let seconds = begun.elapsed().as_secs_f64() - making_seconds;
    Ok(Measured { seconds, source_seconds: publishing.end()?, making_seconds })
}

/// Sends by TCP to every sink, with `send`. Returns the processor time of the senders.
pub(crate) fn stream<S: Sink + 'static>(
    link: Link,
    sinks: Vec<S>,
    send: impl Fn(&mut TcpStream, usize) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    let listener = TcpListener::bind((link.network, 0))?;
    let at = listener.local_addr()?;
    let count = sinks.len();
    let readers = sinks.into_iter().map(|mut sink| {
        std::thread::spawn(move || -> Result<(), Failure> {
            let mut stream = TcpStream::connect(at)?;
            sink.begin(&crate::whole::FILE, &Stop::default())?;
            let mut piece = vec![0; 1 << 20];
            while let read @ 1.. = stream.read(&mut piece)? {
                sink.write(&piece[..read])?;
            }
            sink.mark()?;
            Ok(sink.end()?)
        })
    });
    let readers: Vec<_> = readers.collect();
    let send = &send;
    let source_seconds = std::thread::scope(|scope| -> Result<f64, Failure> {
        let writers = (0..count).map(|number| {
            let stream = listener.accept().map(|(stream, _)| stream);
            scope.spawn(move || -> Result<f64, Failure> {
                send(&mut stream?, number)?;
                Ok(spent(ClockId::ThreadCPUTime))
            })
        });
        let writers: Vec<_> = writers.collect();
        let times = writers.into_iter().map(|writer| writer.join().map_err(|_| "a thread panicked")?);
        times.sum::<Result<f64, Failure>>()
    })?;
    all(readers)?;
    Ok(source_seconds)
}
