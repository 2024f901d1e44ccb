//! A recording of what passes on a fabric, as the packets that RoCE v2 would carry, in a pcapng file.
//!
//! The model hands over whole messages, under its lock; they are cut into packets there, and a thread writes them. Whoever has a
//! message on its way waits while more frames than [`WAITING`] are not written yet.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufWriter};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rdma_proto::backend::SendOp;
use rdma_softsim::{Capture, Content, Transfer};
use roce::{Kind, Message, Packet, SEQUENCES};
use rustix::fs::FileType;

/// Frames that wait for being written.
const WAITING: usize = 4096;

type Frame = (Duration, Vec<u8>);

/// What records.
pub(super) struct Recorder {
    /// Taken at the end.
    frames: Option<SyncSender<Frame>>,
    thread: Option<JoinHandle<()>>,
    connections: HashMap<u64, Sequences>,
    /// From the moment at which the fabric's clock began; taken when the first message passes.
    began: Option<Duration>,
}

/// Packet sequence numbers of what one queue pair sends.
#[derive(Default)]
struct Sequences {
    next: u32,
    /// Messages without an answer: each with its first packet's number, and how many packets it takes.
    open: VecDeque<(u64, u32, u32)>,
}

impl Sequences {
    /// The numbers of a message, which it keeps when it is repeated.
    fn of(&mut self, message: u64, packets: u32) -> (u32, u32) {
        if let Some(&(_, first, packets)) = self.open.iter().find(|(known, ..)| *known == message) {
            return (first, packets);
        }
        let first = self.next;
        self.next = first.wrapping_add(packets) % SEQUENCES;
        self.open.push_back((message, first, packets));
        (first, packets)
    }

    /// Every message up to this one has had its answer.
    fn answered(&mut self, message: u64) {
        self.open.retain(|(known, ..)| *known > message);
    }
}

impl Recorder {
    /// One that writes to this file, and its thread.
    pub(super) fn start(file: OwnedFd) -> io::Result<Self> {
        // Everybody would wait for whoever reads a pipe.
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (frames, written) = sync_channel(WAITING);
        let mut file = roce::File::new(BufWriter::new(File::from(file)))?;
        let thread = std::thread::Builder::new().name("record".into()).spawn(move || {
            if let Err(error) = write(&mut file, &written) {
                // To the fabric's log; what comes after it is not recorded.
                eprintln!("the recording: {error}");
            }
        })?;
        Ok(Self { frames: Some(frames), thread: Some(thread), connections: HashMap::new(), began: None })
    }

    fn send(&mut self, transfer: &Transfer<'_>, packet: Packet<'_>) {
        let since = transfer.at.since(rdma_proto::time::Instant::default());
        let began = *self.began.get_or_insert_with(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(since)
        });
        let packet = packet.between(transfer.from, transfer.to, transfer.pair);
        // The thread has ended when the file took no more.
        let frame = (began.saturating_add(since), packet.frame());
        let _ended = self.frames.as_ref().map(|frames| frames.send(frame));
    }
}

impl Drop for Recorder {
    /// Waits until all is written.
    fn drop(&mut self) {
        self.frames = None;
        let _ended = self.thread.take().map(JoinHandle::join);
    }
}

/// Writes until nobody records any more, and all of it whenever nothing waits, so that a fabric that is killed leaves what it saw.
fn write(file: &mut roce::File<BufWriter<File>>, frames: &Receiver<Frame>) -> io::Result<()> {
    loop {
        let (at, bytes) = match frames.try_recv() {
            Ok(frame) => frame,
            Err(TryRecvError::Disconnected) => return file.flush(),
            Err(TryRecvError::Empty) => {
                file.flush()?;
                match frames.recv() {
                    Ok(frame) => frame,
                    Err(_disconnected) => return Ok(()),
                }
            }
        };
        file.write(at, &bytes, None)?;
    }
}

impl Capture for Recorder {
    fn pass(&mut self, transfer: &Transfer<'_>) {
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
            Content::Bytes(bytes) => {
                let (first, _) = sequences.of(sequence, roce::count(bytes.len()));
                sequences.answered(sequence);
                let start = roce::answer(roce::ACKNOWLEDGED, executed(sequence));
                let kind = Kind::ReadResponse;
                for packet in
                    (Message { kind, start, immediate: None, bytes, len: bytes.len() }).packets(first)
                {
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

    fn end(&mut self, connection: u64) {
        self.connections.remove(&connection);
    }
}

impl Recorder {
    /// An answer without bytes. It names the last packet of the message, and a message that was not executed will come again.
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

/// How many messages were executed with this one, as far as the field goes.
const fn executed(sequence: u64) -> u32 {
    (sequence as u32).wrapping_add(1)
}
