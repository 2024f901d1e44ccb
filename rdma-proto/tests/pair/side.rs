use std::collections::VecDeque;

use rdma_proto::time::Instant;
use rdma_proto::wire::{MESSAGE_LEN, Message};
use rdma_proto::{Action, Config, Machine, RegionAddress, Role, Source, Span, State};
use rdma_proto::{CompletionError, CompletionStatus, RNR_RETRY_INFINITE};

use super::{Client, SendQueue, Server, failure, peer, put, stream_byte, take};

/// A completion that consumed a receive.
#[derive(Clone, Debug)]
pub(crate) enum Arrival {
    Message([u8; MESSAGE_LEN]),
    Immediate(u32),
}

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) action: Action,
    pub(super) lent: usize,
    /// What its memory must hold until this is known to have arrived.
    pub(super) bytes: Vec<u8>,
}

pub(crate) struct Side {
    pub(crate) machine: Machine,
    pub(crate) send_queue: SendQueue,
    pub(crate) log: Vec<Action>,
    pub(crate) arrivals: VecDeque<Arrival>,
    pub(crate) receives: usize,
    /// Our retries without a receive, as the peer chose.
    pub(crate) rnr_retry: u8,
    /// Whether [`Pair::settle`] lets this side handle arrivals.
    pub(crate) handles: bool,
    /// Whether it reports completions.
    pub(crate) reports: bool,
    /// Whether it carries requests.
    pub(crate) carries: bool,
    pub(crate) wrote: usize,
    pub(crate) read: usize,
    pub(super) role: Role,
    pub(super) regions: [Vec<u8>; 2],
    pub(super) addresses: [RegionAddress; 2],
    pub(super) buffer: Vec<u8>,
    pub(super) lent: Vec<Vec<u8>>,
    pub(super) slots: Vec<[u8; MESSAGE_LEN]>,
    pub(super) queue: VecDeque<Request>,
    pub(super) carried: VecDeque<Request>,
    pub(super) completions: VecDeque<(u64, Result<(), CompletionError>)>,
    pub(super) left: bool,
    pub(super) broken: bool,
}

impl Side {
    pub(super) fn new(config: Config, receives: u16) -> Self {
        let base = match config.role {
            Client => 0x10_0000_0000,
            Server => 0x20_0000_0001, // odd, because nothing says that a window is aligned
        };
        let addresses = [
            RegionAddress { address: base, rkey: base as u32 + 1 },
            RegionAddress { address: base + (1 << 32), rkey: base as u32 + 2 },
        ];
        Self {
            machine: Machine::new(config, addresses).expect("settings within their bounds"),
            send_queue: SendQueue::new(config),
            log: Vec::new(),
            arrivals: VecDeque::new(),
            receives: receives.into(),
            rnr_retry: RNR_RETRY_INFINITE,
            handles: true,
            reports: true,
            carries: true,
            wrote: 0,
            read: 0,
            role: config.role,
            regions: [vec![0; config.window as usize], vec![0; config.window as usize]],
            addresses,
            buffer: vec![0; config.send_buffer as usize],
            lent: Vec::new(),
            slots: vec![[0; MESSAGE_LEN]; config.send_depth.into()],
            queue: VecDeque::new(),
            carried: VecDeque::new(),
            completions: VecDeque::new(),
            left: false,
            broken: false,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.machine.state()
    }

    pub(crate) fn messages(&self) -> Vec<Message> {
        let message = |action: &Action| match action {
            Action::Send { message, .. } => {
                Some(Message::decode(message).expect("a message that can be read"))
            }
            _ => None,
        };
        self.log.iter().filter_map(message).collect()
    }

    pub(crate) fn registrations(&self) -> usize {
        self.messages().iter().filter(|message| matches!(message, Message::RegisterXferMemory(_))).count()
    }

    pub(crate) fn writes(&self) -> Vec<(u32, Option<u32>)> {
        let write = |action: &Action| match action {
            Action::Write { from, immediate, .. } => {
                Some((from.len(), immediate.map(|immediate| immediate.0)))
            }
            _ => None,
        };
        self.log.iter().filter_map(write).collect()
    }

    pub(crate) fn disconnects(&self) -> usize {
        self.log.iter().filter(|action| matches!(action, Action::Disconnect)).count()
    }

    pub(crate) fn write(&mut self, bytes: usize) -> usize {
        let mut left = bytes;
        while let Some(Span { offset, len }) = put(&mut self.machine, Instant::default(), left) {
            for place in &mut self.buffer[offset as usize..][..len as usize] {
                *place = stream_byte(self.role, self.wrote);
                self.wrote += 1;
            }
            left -= len as usize;
        }
        bytes - left
    }

    pub(super) fn post(&mut self, action: Action) {
        self.send_queue.post(&action);
        self.log.push(action);
        let lent = self.lent.len();
        let bytes = self.bytes_of(&action, lent);
        self.queue.push_back(Request { action, lent, bytes });
    }

    pub(crate) fn lend(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.machine.lendable() as usize);
        if self.machine.lend(bytes).is_err() {
            return 0;
        }
        if bytes > 0 {
            self.lent.push((self.wrote..self.wrote + bytes).map(|at| stream_byte(self.role, at)).collect());
        }
        self.wrote += bytes;
        bytes
    }

    pub(crate) fn read(&mut self, bytes: usize) -> usize {
        let mut left = bytes;
        while let Some(readable) = take(&mut self.machine, left) {
            let count = readable.len as usize;
            for byte in &self.regions[usize::from(readable.region)][readable.offset as usize..][..count] {
                let expected = stream_byte(peer(self.role), self.read);
                assert_eq!(*byte, expected, "byte {} of the stream", self.read);
                self.read += 1;
            }
            left -= count;
        }
        bytes - left
    }

    /// `lent` memories had been lent when it was posted.
    pub(super) fn bytes_of(&self, action: &Action, lent: usize) -> Vec<u8> {
        match *action {
            Action::Send { slot, .. } => self.slots[usize::from(slot)].to_vec(),
            Action::Write { from: Source::Buffer(Span { offset, len }), .. } => {
                self.buffer[offset as usize..][..len as usize].to_vec()
            }
            Action::Write { from: Source::Lent(Span { offset, len }), .. } => {
                self.lent[lent - 1][offset as usize..][..len as usize].to_vec()
            }
            Action::Disconnect => Vec::new(),
        }
    }

    pub(super) fn check_owned(&self, request: &Request) {
        let now = self.bytes_of(&request.action, request.lent);
        assert_eq!(now, request.bytes, "changed while it was owned by the device");
    }

    pub(super) fn complete(&mut self, request: Request) {
        if let Action::Send { id, signaled: true, .. } | Action::Write { id, signaled: true, .. } =
            request.action
        {
            self.completions.push_back((id, Ok(())));
        }
        self.carried.push_back(request);
    }

    pub(super) fn place(&mut self, rkey: u32, address: u64, bytes: &[u8]) {
        let region = self.addresses.iter().position(|region| region.rkey == rkey).expect("a known rkey");
        let offset = (address - self.addresses[region].address) as usize;
        self.regions[region][offset..][..bytes.len()].copy_from_slice(bytes);
    }

    /// The oldest request fails with `status`, all others are flushed.
    pub(crate) fn break_down(&mut self, status: CompletionStatus) {
        self.broken = true;
        let mut status = status;
        for request in self.queue.drain(..) {
            if let Action::Send { id, .. } | Action::Write { id, .. } = request.action {
                self.completions.push_back((id, Err(failure(status))));
                status = CompletionStatus::WR_FLUSH_ERR;
            }
        }
    }
}
