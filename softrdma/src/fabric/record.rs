//! Records what passes on a fabric, as the packets that RoCE v2 would carry, in a pcapng file.
//!
//! The model passes whole messages, under its lock. They are cut into packets there, and a thread
//! writes them. No program waits for the file: while [`WAITING`] frames are not written yet,
//! further ones are left out, and a comment on the next frame says how many.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, BufWriter};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rdma_backend::{RemoteAddress, SendOp};
use rdma_softsim::{Atomic, Capture, Content, Transfer};
use roce::{Kind, Message, Packet, SEQUENCES};
use rustix::fs::FileType;
use rustix::io::Errno;

/// How many frames may wait to be written, of about 4 KiB at most.
const WAITING: usize = 1 << 14;
/// How long the end of a recording waits for frames that are not written yet.
const PATIENCE: Duration = Duration::from_secs(10);

/// A frame: when it passed, its bytes, and how many frames before it were left out.
type Frame = (Duration, Vec<u8>, u64);

/// Turns messages into frames and passes them to the writer.
pub(super) struct Recorder {
    /// Taken at the end; `None` after the file failed.
    frames: Option<Sender<Frame>>,
    /// How many frames wait to be written.
    waiting: Arc<AtomicUsize>,
    /// How many frames were left out since the last one that was sent.
    lost: u64,
    connections: HashMap<u64, Sequences>,
    /// The time of day at which the fabric's clock began; computed when the first message passes.
    began: Option<Duration>,
}

/// Packet sequence numbers of the messages that one queue pair sends.
#[derive(Default)]
struct Sequences {
    next: u32,
    /// Messages without an answer, in order: each with the number of its first packet, and how many
    /// packets it takes.
    open: VecDeque<(u64, u32, u32)>,
}

impl Sequences {
    /// Returns the numbers of a message. A repeated message keeps its numbers.
    fn of(&mut self, message: u64, packets: u32) -> (u32, u32) {
        // Not one by one: a queue pair can have many messages in flight, and this is under the
        // model's lock.
        let place = self.open.partition_point(|(known, ..)| *known < message);
        if let Some(&(known, first, packets)) = self.open.get(place)
            && known == message
        {
            return (first, packets);
        }
        let first = self.next;
        self.next = first.wrapping_add(packets) % SEQUENCES;
        self.open.insert(place, (message, first, packets));
        (first, packets)
    }

    /// Forgets every message up to this one, as it was answered.
    fn answered(&mut self, message: u64) {
        self.open.drain(..self.open.partition_point(|(known, ..)| *known <= message));
    }
}

/// Writes a recording, once it is started.
pub(super) struct Writer {
    file: File,
    frames: Frames,
}

/// Frames that wait to be written.
struct Frames {
    receiver: Receiver<Frame>,
    /// How many frames wait.
    waiting: Arc<AtomicUsize>,
}

impl Frames {
    fn taken(&self, frame: Frame) -> Frame {
        self.waiting.fetch_sub(1, Relaxed);
        frame
    }
}

impl Drop for Frames {
    /// Lets the recorder build its next frame, and so notice that the writer is gone.
    fn drop(&mut self) {
        self.waiting.store(0, Relaxed);
    }
}

/// A recording that is being written.
pub(super) struct Writing {
    /// Closed when the thread ends.
    ended: Receiver<Infallible>,
}

/// Returns a recorder, and a writer for this file, which is not touched yet.
///
/// The file must be a regular one: the reader of a pipe could block the writer.
pub(super) fn recorder(file: OwnedFd) -> Result<(Recorder, Writer), Errno> {
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    let (sender, receiver) = channel();
    let waiting = Arc::default();
    let frames = Frames { receiver, waiting: Arc::clone(&waiting) };
    let connections = HashMap::new();
    let recorder = Recorder { frames: Some(sender), waiting, lost: 0, connections, began: None };
    Ok((recorder, Writer { file: File::from(file), frames }))
}

impl Writer {
    /// Empties the file and writes to it, on a thread of its own, until the recorder is dropped.
    pub(super) fn start(self) -> Result<Writing, Errno> {
        let (running, ended) = channel();
        let begin = || {
            self.file.set_len(0)?;
            let mut file = roce::File::new(BufWriter::new(self.file))?;
            let frames = self.frames;
            std::thread::Builder::new().name("record".into()).spawn(move || {
                if let Err(error) = write(&mut file, &frames) {
                    // This goes to the fabric's log. Later frames are not recorded.
                    eprintln!("the recording: {error}");
                }
                drop(running);
            })
        };
        let failed = |error: io::Error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
        begin().map(|_thread| Writing { ended }).map_err(failed)
    }
}

impl Writing {
    /// Waits a bounded time until everything is written. The recorder is gone by then.
    pub(super) fn finish(self) {
        if self.ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            eprintln!("the recording: its end is missing: the file was too slow");
        }
    }
}

impl Recorder {
    fn send(&mut self, transfer: &Transfer<'_>, packet: Packet<'_>) {
        let Some(frames) = &self.frames else { return };
        // Only this thread adds frames. A frame for which there is no room is not built.
        if self.waiting.load(Relaxed) >= WAITING {
            self.lost = self.lost.saturating_add(1);
            return;
        }
        let since = transfer.at.since(rdma_backend::time::Instant::default());
        let began = *self.began.get_or_insert_with(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(since)
        });
        let packet = Packet { traffic_class: transfer.traffic_class, ..packet };
        let packet = packet.between(transfer.from, transfer.to, transfer.pair);
        // Counted before the writer can take the frame and count it off.
        self.waiting.fetch_add(1, Relaxed);
        match frames.send((began.saturating_add(since), packet.frame(), self.lost)) {
            Ok(()) => self.lost = 0,
            // The writer has ended, as the file failed.
            Err(_disconnected) => self.frames = None,
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if self.lost > 0 {
            eprintln!("the recording: {} frames at its end are missing: the file was too slow", self.lost);
        }
    }
}

/// Writes until the recorder is dropped.
///
/// It flushes whenever no frame waits, so that the file is complete even if the fabric is killed.
fn write(file: &mut roce::File<BufWriter<File>>, frames: &Frames) -> io::Result<()> {
    loop {
        let (at, bytes, lost) = match frames.receiver.try_recv() {
            Ok(frame) => frames.taken(frame),
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match frames.receiver.recv() {
                    Ok(frame) => frames.taken(frame),
                    Err(_disconnected) => return Ok(()),
                }
            }
        };
        let comment =
            (lost > 0).then(|| format!("{lost} frames before this one are missing: the file was too slow"));
        file.write(at, &bytes, comment.as_deref())?;
    }
}

impl Capture for Recorder {
    fn pass(&mut self, transfer: &Transfer<'_>) -> ControlFlow<()> {
        self.see(transfer);
        if self.frames.is_some() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }

    fn end(&mut self, connection: u64) {
        self.connections.remove(&connection);
    }
}

impl Recorder {
    fn see(&mut self, transfer: &Transfer<'_>) {
        let &Transfer { connection, sequence, content, .. } = transfer;
        let sequences = self.connections.entry(connection).or_default();
        match content {
            Content::Message { op, len, bytes } => {
                let (first, _) = sequences.of(sequence, roce::count(len));
                let (kind, start, immediate) = match op {
                    SendOp::Send => (Kind::Send, Vec::new(), None),
                    SendOp::SendImmediate(immediate) => (Kind::Send, Vec::new(), Some(immediate.0)),
                    SendOp::Write(remote) => {
                        (Kind::Write, roce::remote(remote.address, remote.rkey, len), None)
                    }
                    SendOp::WriteImmediate(remote, immediate) => {
                        (Kind::Write, roce::remote(remote.address, remote.rkey, len), Some(immediate.0))
                    }
                    SendOp::Read(remote) => {
                        let headers = roce::remote(remote.address, remote.rkey, len);
                        let opcode = Kind::ReadRequest.opcode(true, true, false);
                        let packet = Packet::new(opcode, first);
                        return self.send(transfer, Packet { acknowledge: true, headers, ..packet });
                    }
                };
                for packet in (Message { kind, start, immediate, bytes, len }).packets(first) {
                    self.send(transfer, packet);
                }
            }
            Content::Datagram { source, key, immediate, bytes } => {
                let opcode = Kind::Datagram.opcode(true, true, immediate.is_some());
                let mut headers = roce::datagram(key, source);
                headers.extend(immediate.into_iter().flat_map(|immediate| immediate.0.to_be_bytes()));
                let packet = Packet::new(opcode, sequence as u32 % SEQUENCES);
                self.send(transfer, Packet { headers, payload: bytes, len: bytes.len(), ..packet });
            }
            Content::Atomic { remote: RemoteAddress { address, rkey }, atomic } => {
                let (first, _) = sequences.of(sequence, 1);
                let (kind, new, compare) = match atomic {
                    Atomic::FetchAdd(add) => (Kind::FetchAdd, add, 0),
                    Atomic::CompareSwap { compare, swap } => (Kind::CompareSwap, swap, compare),
                };
                let headers = roce::atomic(address, rkey, new, compare);
                let packet = Packet::new(kind.opcode(true, true, false), first);
                self.send(transfer, Packet { acknowledge: true, headers, ..packet });
            }
            Content::Found(number) => {
                let (first, _) = sequences.of(sequence, 1);
                sequences.answered(sequence);
                let mut headers = roce::answer(roce::ACKNOWLEDGED, executed(sequence));
                headers.extend(number.to_be_bytes());
                let opcode = Kind::AtomicAcknowledge.opcode(true, true, false);
                self.send(transfer, Packet { headers, ..Packet::new(opcode, first) });
            }
            Content::Bytes { bytes, len } => {
                let (first, _) = sequences.of(sequence, roce::count(len));
                sequences.answered(sequence);
                let start = roce::answer(roce::ACKNOWLEDGED, executed(sequence));
                let kind = Kind::ReadResponse;
                for packet in (Message { kind, start, immediate: None, bytes, len }).packets(first) {
                    self.send(transfer, packet);
                }
            }
            Content::Acknowledged => self.answer(transfer, roce::ACKNOWLEDGED),
            Content::NotReady(timer) => self.answer(transfer, roce::NOT_READY | timer.code()),
            Content::Refused(status) => {
                if let Some(syndrome) = roce::refused(status) {
                    self.answer(transfer, syndrome);
                }
            }
        }
    }

    /// Sends an answer without bytes. It names the last packet of the message; a message that was
    /// not executed will be repeated.
    fn answer(&mut self, transfer: &Transfer<'_>, syndrome: u8) {
        let sequences = self.connections.entry(transfer.connection).or_default();
        let (first, packets) = sequences.of(transfer.sequence, 1);
        let done = syndrome == roce::ACKNOWLEDGED;
        if done {
            sequences.answered(transfer.sequence);
        }
        let last = if done { first.wrapping_add(packets.saturating_sub(1)) % SEQUENCES } else { first };
        let executed = if done { executed(transfer.sequence) } else { transfer.sequence as u32 };
        let opcode = Kind::Acknowledge.opcode(true, true, false);
        let headers = roce::answer(syndrome, executed);
        self.send(transfer, Packet { headers, ..Packet::new(opcode, last) });
    }
}

/// Returns how many messages are executed with this one, modulo the size of the field.
const fn executed(sequence: u64) -> u32 {
    (sequence as u32).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};
    use std::net::IpAddr;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const ACKNOWLEDGED: Transfer<'static> = Transfer {
        at: rdma_backend::time::Instant::from_start(Duration::ZERO),
        connection: 1,
        sequence: 0,
        from: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        to: IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        pair: 1,
        traffic_class: 0,
        content: Content::Acknowledged,
    };

    fn on_memory() -> (Recorder, Writer, File) {
        let file = memfd_create("recording", MemfdFlags::CLOEXEC).expect("a file");
        let (recorder, writer) = recorder(file.try_clone().expect("a file")).expect("a regular file");
        (recorder, writer, File::from(file))
    }

    #[test]
    fn a_slow_file_delays_no_program_and_missing_frames_are_counted() {
        let (mut recorder, writer, mut file) = on_memory();
        for _ in 0..WAITING + 10 {
            assert!(recorder.pass(&ACKNOWLEDGED).is_continue());
        }
        assert_eq!(recorder.lost, 10);
        let writing = writer.start().expect("a thread");
        while recorder.lost > 0 {
            assert!(recorder.pass(&ACKNOWLEDGED).is_continue());
        }
        drop(recorder);
        writing.finish();
        let mut content = Vec::new();
        file.rewind().expect("a file");
        file.read_to_end(&mut content).expect("a file");
        let said = b" frames before this one are missing";
        assert_eq!(content.windows(said.len()).filter(|bytes| bytes == said).count(), 1);
    }

    #[test]
    fn a_file_that_takes_no_more_ends_the_recording() {
        let (mut recorder, writer, _file) = on_memory();
        // The recorder must notice the dropped writer even if it had no room before.
        for _ in 0..WAITING + 10 {
            assert!(recorder.pass(&ACKNOWLEDGED).is_continue());
        }
        drop(writer);
        assert!(recorder.pass(&ACKNOWLEDGED).is_break());
    }
}
