//! A completion queue from the program's side: reads and writes its page (`softrdma_wire::Page`)
//! through the memory's descriptor.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::os::fd::OwnedFd;

use softrdma_wire::{Completion, Name, PAGE, POLLS, Reply, Request, SHOWN, Socket, Source};

/// Offsets of the words that the program writes.
pub(crate) const TAKEN: u64 = 0;
pub(crate) const ARMED: u64 = 8;
/// Offsets of the words that the fabric writes.
pub(crate) const SHOWS: u64 = 64;
pub(crate) const CALLS: u64 = 68;
pub(crate) const ENTRIES: u64 = 128;
const ENTRY: u64 = 40;

/// A queue, and how many completions were taken.
pub(crate) struct Queue {
    pub(crate) name: Name,
    pub(crate) memory: OwnedFd,
    page: u32,
    pub(crate) taken: u32,
}

impl Queue {
    /// Asks the fabric for a queue.
    pub(crate) fn create(socket: &mut Socket, depth: u32, channel: Option<Name>) -> Self {
        let request = Request::CreateQueue { device: 0, depth, channel, vector: 0 };
        socket.send(&request, None).expect("the fabric listens");
        match socket.receive().expect("the fabric answers") {
            (Reply::Queue { name, page }, Some(memory)) => Self { name, memory, page, taken: 0 },
            other => panic!("no queue: {other:?}"),
        }
    }

    fn at(&self, offset: u64) -> u64 {
        u64::from(self.page) * PAGE as u64 + offset
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.memory, bytes, self.at(offset)), Ok(bytes.len()));
    }

    fn read<const LEN: usize>(&self, offset: u64) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        assert_eq!(rustix::io::pread(&self.memory, &mut bytes, self.at(offset)), Ok(LEN));
        bytes
    }

    /// Reads a number of the page.
    pub(crate) fn number(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    /// Arms the queue for any completion.
    pub(crate) fn arm(&self) {
        self.write(ARMED, &(u64::from(self.taken) << 32 | 2).to_le_bytes());
    }

    /// Takes the next completion that is shown.
    pub(crate) fn next(&mut self) -> Option<Completion> {
        if self.taken == self.number(SHOWS) {
            return None;
        }
        let place = ENTRIES + u64::from(self.taken % SHOWN) * ENTRY;
        let id = u64::from_le_bytes(self.read(place));
        let number = |word: u64| self.number(place + 4 * word);
        let completion = Completion {
            id,
            pair: number(2),
            status: number(3),
            vendor: number(4),
            opcode: number(5),
            len: number(6),
            immediate: (number(8) & 1 != 0).then(|| number(7)),
            source: (number(8) & 2 != 0).then(|| Source { number: number(9), ip4: number(8) & 4 != 0 }),
        };
        self.taken = self.taken.wrapping_add(1);
        self.write(TAKEN, &self.taken.to_le_bytes());
        Some(completion)
    }

    /// Takes all completions that are shown.
    pub(crate) fn take_shown(&mut self) -> Vec<Completion> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// Whether the page says that the program must ask the fabric.
    pub(crate) fn must_call(&self) -> bool {
        self.number(CALLS) & POLLS != 0
    }
}
