//! The suite's publisher. It is correct unless a case has it err.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rdma_backend::RemoteAddress;
use rdma_conn::{Descriptors, Listener};

use super::{BOUNDED, CHUNK, CHUNKS, LEASE, MEMORY, Reader, SNAPSHOT, content, snapshot};
use crate::data::{Data, Door};
use crate::wire::{
    Entry, Frame, Handshake, Heard, MAGIC, Talk, VERSION, digest, digest_of_chunks, kind, proof_address,
};
use conformance::blackbox::target::{Exit, Running};
use conformance::client::Failure;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    Chunks,
    Table,
}

pub(super) struct Publisher<'a, B: Descriptors> {
    pub(super) on: &'a Reader<B>,
    /// `None` when the reader must not come again.
    pub(super) listener: Option<Listener<B>>,
    pub(super) talk: Talk<B>,
    pub(super) reader: Box<dyn Running>,
    pub(super) file: PathBuf,
    pub(super) handshake: Handshake,
    pub(super) data: Option<Data<B>>,
    pub(super) lease: Duration,
}

impl<'a, B: Descriptors> Publisher<'a, B> {
    pub(super) fn meet(on: &'a Reader<B>, case: &'static str) -> Result<Self, Failure> {
        let environment = |error: &dyn std::fmt::Display| Failure::Environment(error.to_string());
        let listener = Listener::bind(&on.backend, on.listen).map_err(|error| environment(&error))?;
        let file = on.folder.join(format!("{case}.pulled"));
        if file.exists() {
            std::fs::remove_file(&file).map_err(|error| environment(&error))?;
        }
        let reader = on.readers.start(case, on.told, &file).map_err(Failure::Environment)?;
        let talk = accept(&listener, on)?;
        Ok(Self {
            on,
            listener: Some(listener),
            talk,
            reader,
            file,
            handshake: Handshake::default(),
            data: None,
            lease: LEASE,
        })
    }

    pub(super) fn meet_again(&mut self) -> Result<(), Failure> {
        self.data = None;
        let Some(listener) = &self.listener else {
            return Err(Failure::Environment("the suite listens no more".into()));
        };
        self.talk = accept(listener, self.on)?;
        Ok(())
    }

    /// Performs everything up to the first announcement.
    pub(super) fn open(on: &'a Reader<B>, case: &'static str, layout: Layout) -> Result<Self, Failure> {
        let mut publisher = Self::meet(on, case)?;
        publisher.enter(layout, 16)?;
        Ok(publisher)
    }

    /// Performs everything up to the first announcement, and grants `depth` READs at a time.
    /// Returns the first requested chunk.
    pub(super) fn enter(&mut self, layout: Layout, depth: u8) -> Result<u64, Failure> {
        let (hello, door) = self.hello(SNAPSHOT)?;
        self.proof()?;
        self.welcome(&self.on.secret, layout)?;
        let Some((data, asked)) = door.accept(depth, MEMORY, self.on.patience)? else {
            return Err(Failure::wrong("it does not connect for READs"));
        };
        if asked == 0 {
            return Err(Failure::wrong("VS-READ-001: it asks for no READs"));
        }
        data.fill(8, &snapshot())?;
        self.data = Some(data);
        Ok(hello.u64(32))
    }

    /// Takes Hello, and sends Challenge. Returns Hello, and the listener for READs.
    pub(super) fn hello(&mut self, snapshot: [u8; 16]) -> Result<(Frame, Door<B>), Failure> {
        self.hello_as(VERSION, snapshot)
    }

    pub(super) fn hello_as(&mut self, version: u16, snapshot: [u8; 16]) -> Result<(Frame, Door<B>), Failure> {
        let hello = self.expect(kind::HELLO)?;
        let is_right =
            hello.payload.starts_with(MAGIC) && hello.u16(8) == VERSION && hello.field(10) == [0; 6];
        if !is_right {
            return Err(Failure::wrong(format!("its Hello begins otherwise: {hello:02x?}")));
        }
        let door = Door::open(&self.on.backend, self.on.listen)?;
        let port = door.port.to_be_bytes();
        let begin = [&MAGIC[..], &version.to_be_bytes(), &port, &[0; 4], &snapshot, &[0x77; 32]];
        let challenge = Frame::new(kind::CHALLENGE, &begin);
        self.handshake.note(&hello);
        self.handshake.note(&challenge);
        self.talk.send(&challenge)?;
        Ok((hello, door))
    }

    /// Takes Proof, whose code must be right.
    pub(super) fn proof(&mut self) -> Result<(), Failure> {
        let proof = self.expect(kind::PROOF)?;
        let code = self.handshake.readers(&self.on.secret, &proof.field(0));
        if proof.field(24) != code {
            return Err(Failure::wrong("the code in its Proof is wrong"));
        }
        // The reader must connect from this address, so it must name a real one.
        if proof.field(0) == proof_address(SocketAddr::from(([0; 16], 0))) {
            return Err(Failure::wrong("its Proof names no address"));
        }
        Ok(())
    }

    pub(super) fn welcome(&mut self, secret: &[u8], layout: Layout) -> Result<(), Failure> {
        let layout = if layout == Layout::Chunks { 1 } else { 2 };
        let code = self.handshake.publishers(secret);
        let lease = u32::try_from(self.lease.as_millis()).unwrap_or(u32::MAX).to_be_bytes();
        let size = (CHUNK as u32).to_be_bytes();
        let size = if layout == 1 { size } else { (4_u32 << 20).to_be_bytes() };
        self.talk.send(&Frame::new(
            kind::WELCOME,
            &[&code, &[layout, 1, 0, 0], &size, &lease, &[0; 8], &[0; 40], &[0; 8]],
        ))
    }

    pub(super) fn data(&self) -> Result<&Data<B>, Failure> {
        self.data.as_ref().ok_or_else(|| Failure::Environment("nothing is connected".into()))
    }

    pub(super) fn memory(&self) -> Result<RemoteAddress, Failure> {
        self.data()?.memory().ok_or_else(|| Failure::Environment("the suite has no memory".into()))
    }

    pub(super) fn entry(&self, index: u64) -> Result<Entry, Failure> {
        let at = self.memory()?;
        let bytes = content(index);
        let address = at.address + 8 + index * CHUNK as u64;
        Ok(Entry { index, address, rkey: at.rkey, length: CHUNK as u32, digest: digest(&bytes) })
    }

    pub(super) fn announce(&mut self, chunks: std::ops::Range<u64>) -> Result<(), Failure> {
        let entries =
            chunks.map(|index| Ok(self.entry(index)?.bytes())).collect::<Result<Vec<_>, Failure>>()?;
        self.talk.send(&Frame::new(kind::CHUNKS, &[&entries.concat()]))
    }

    /// Returns Mark and End after the whole snapshot, which is in `chunks` chunks.
    pub(super) fn ends(&self, chunks: u64) -> [Frame; 2] {
        let bytes = snapshot();
        // The whole snapshot is the one area of the seed's table.
        let size = if chunks == 1 { bytes.len() } else { CHUNK };
        let digests: Vec<_> = bytes.chunks(size).map(digest).collect();
        let digest = digest_of_chunks(&digests);
        let chunks = chunks.to_be_bytes();
        let mark = Frame::new(kind::MARK, &[&chunks, &(bytes.len() as u64).to_be_bytes(), &digest]);
        [mark, Frame::new(kind::END, &[&chunks])]
    }

    pub(super) fn end(&mut self) -> Result<(), Failure> {
        let [mark, end] = self.ends(CHUNKS);
        self.talk.send(&mark)?;
        self.talk.send(&end)
    }

    pub(super) fn expect(&mut self, wanted: u8) -> Result<Frame, Failure> {
        match self.talk.listen(self.on.patience)? {
            Heard::Frame(frame) if frame.kind == wanted => Ok(frame),
            Heard::Silence => Err(Failure::wrong("it says nothing")),
            other => Err(Failure::wrong(format!("instead of a frame of kind {wanted} came {other:02x?}"))),
        }
    }

    pub(super) fn hears_of(&mut self, chunks: u64) -> Result<(), Failure> {
        let (mut by, mut has) = (Instant::now() + self.on.patience, 0);
        while has < chunks {
            let told = match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
                Heard::Frame(frame) if frame.kind == kind::PROGRESS => frame.u64(0),
                Heard::Silence => {
                    return Err(Failure::wrong(format!("it does not say that it has {chunks} chunks")));
                }
                other => return Err(Failure::wrong(format!("instead of Progress came {other:02x?}"))),
            };
            // Each chunk starts the time again.
            if told > has {
                (by, has) = (Instant::now() + self.on.patience, told);
            }
        }
        Ok(())
    }

    pub(super) fn cut(&mut self) {
        self.data = None;
        self.talk.end();
    }

    /// Checks that the reader ends the session without sending Done.
    pub(super) fn gives_up(&mut self, patience: Duration) -> Result<(), Failure> {
        self.talk.until(patience, |heard| match heard {
            Heard::End => Ok(Some(())),
            Heard::Frame(frame) if frame.kind == kind::PROGRESS => Ok(None),
            Heard::Silence => Err(Failure::wrong("the session goes on")),
            other => Err(Failure::wrong(format!("the session should end, and {other:02x?} came"))),
        })
    }

    /// Checks that the reader comes again, for one of these chunks, and then succeeds.
    pub(super) fn resumes(&mut self, first: std::ops::RangeInclusive<u64>) -> Result<String, Failure> {
        let before = self.handshake.reader_nonce;
        self.meet_again()?;
        let asked = self.enter(Layout::Chunks, 16)?;
        let again = self.handshake.reader_nonce;
        if before[..16] != again[..16] || before[16..] == again[16..] {
            return Err(Failure::wrong("its nonces are not one name, and another number each"));
        }
        if !first.contains(&asked) {
            return Err(Failure::wrong(format!("it asks for chunk {asked} and what is behind")));
        }
        self.announce(asked..CHUNKS)?;
        self.end()?;
        self.is_whole()?;
        Ok(format!("from chunk {asked} on"))
    }

    /// Checks that the reader sends Done and succeeds, with the whole snapshot in its file.
    pub(super) fn is_whole(&mut self) -> Result<String, Failure> {
        let (mut by, mut has) = (Instant::now() + self.on.patience, 0);
        loop {
            match self.talk.listen(by.saturating_duration_since(Instant::now()))? {
                Heard::Frame(frame) if frame.kind == kind::DONE => break,
                Heard::Frame(frame) if frame.kind == kind::PROGRESS => {
                    if (has + 1..=CHUNKS).contains(&frame.u64(0)) {
                        (by, has) = (Instant::now() + self.on.patience, frame.u64(0));
                    }
                }
                Heard::Silence => return Err(Failure::wrong("it does not say Done")),
                other => return Err(Failure::wrong(format!("instead of Done came {other:02x?}"))),
            }
        }
        self.cut();
        match self.reader.ended(self.on.patience) {
            Some(Exit::Success) => {}
            Some(exit) => return Err(Failure::wrong(exit.to_string())),
            None => return Err(Failure::wrong("it does not end")),
        }
        let pulled =
            std::fs::read(&self.file).map_err(|error| Failure::wrong(format!("no file: {error}")))?;
        if pulled == snapshot() {
            Ok(format!("{} bytes", pulled.len()))
        } else {
            Err(Failure::wrong("its file has other bytes"))
        }
    }

    /// Checks that the reader fails, and leaves nothing that was not published.
    pub(super) fn fails(&mut self) -> Result<String, Failure> {
        // No listener is there if the reader tries again.
        self.listener = None;
        let told = match self.reader.ended(BOUNDED * self.on.patience) {
            Some(Exit::Success) => return Err(Failure::wrong("it reports success")),
            Some(Exit::Crashed(how)) => return Err(Failure::wrong(format!("it crashed: {how}"))),
            Some(exit) => exit.to_string(),
            None => return Err(Failure::wrong("it does not end")),
        };
        match std::fs::read(&self.file) {
            Ok(pulled) if !snapshot().starts_with(&pulled) => Err(Failure::wrong("its file has other bytes")),
            _ => Ok(told),
        }
    }
}

fn accept<B: Descriptors>(listener: &Listener<B>, on: &Reader<B>) -> Result<Talk<B>, Failure> {
    match listener.accept_timeout(on.patience) {
        Ok((stream, _)) => Ok(Talk::new(stream, on.patience)),
        Err(error) => Err(Failure::Unreached(format!("no reader comes: {error}"))),
    }
}
