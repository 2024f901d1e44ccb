//! Programs with memory that peers may write to, and connected queue pairs.
#![allow(dead_code, reason = "each test uses what it needs")]

#[path = "../queue/mod.rs"]
mod queue;

use std::borrow::Cow;
use std::sync::Arc;

use queue::Queue;
use softrdma::fabric::Fabric;
use softrdma_wire::{
    Access, Completion, Local, Op, Receive, Reply, Request, Send, Service, Sge, Socket, Transition,
};

use crate::session::{address, ask, open};

/// The bytes of a page.
const PAGE: u64 = 4096;

/// One request was posted.
pub(crate) const POSTED: Reply = Reply::Posted { count: 1, errno: 0, room: 0 };

/// A program with three pages that peers may write to.
pub(crate) struct Program {
    pub(crate) socket: Socket,
    pub(crate) last: u8,
    domain: u32,
    queue: Queue,
    pub(crate) region: u32,
    pub(crate) key: u32,
    pub(crate) at: u64,
}

/// A queue pair: its name, and its number.
pub(crate) type Pair = (u32, u32);

impl Program {
    pub(crate) fn new(fabric: &Arc<Fabric>, last: u8, at: u64) -> Self {
        Self::on(open(fabric, last), last, at)
    }

    /// A program with an open session.
    pub(crate) fn on(mut socket: Socket, last: u8, at: u64) -> Self {
        let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
        let queue = Queue::create(&mut socket, 8, None);
        let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
        let len = 3 * PAGE;
        let Reply::Region { name: region, key } =
            ask(&mut socket, &Request::Register { domain, at, address: at, len, access })
        else {
            panic!("no region")
        };
        Self { socket, last, domain, queue, region, key, at }
    }

    pub(crate) fn pair(&mut self) -> Pair {
        self.pair_for(Service::Connected)
    }

    pub(crate) fn pair_for(&mut self, service: Service) -> Pair {
        let (domain, queue) = (self.domain, self.queue.name);
        let request = Request::CreatePair {
            domain,
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            service,
            send_depth: 4,
            receive_depth: 4,
            elements: [16; 2],
            inline: 64,
        };
        let Reply::Pair { name, number, .. } = ask(&mut self.socket, &request) else { panic!("no pair") };
        (name, number)
    }

    /// Connects a queue pair with the one of this number on the machine with this address.
    pub(crate) fn connect(&mut self, (pair, _): Pair, last: u8, number: u32) {
        let (local, remote) = (address(self.last), address(last));
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote, number, timer: 12 },
            Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
        ] {
            assert_eq!(ask(&mut self.socket, &Request::Modify { pair, to }), Reply::Done);
        }
    }

    /// Makes a queue pair for datagrams, with a receive in the middle page.
    pub(crate) fn for_datagrams(&mut self) -> Pair {
        let (pair, number) = self.pair_for(Service::Datagram);
        let to = |to| Request::Modify { pair, to };
        let local = vec![Sge { address: self.at + PAGE, len: 1000, lkey: self.key }];
        for request in [
            to(Transition::Initialise),
            Request::SetKey { pair, key: 1 },
            to(Transition::ReceiveDatagrams),
            to(Transition::Send { retry: 0, rnr_retry: 0, read_depth: 0 }),
        ] {
            assert_eq!(ask(&mut self.socket, &request), Reply::Done);
        }
        let receive = Request::PostReceive { pair, work: vec![Receive { id: 100, local }] };
        assert_eq!(ask(&mut self.socket, &receive), POSTED);
        (pair, number)
    }

    /// Posts one request with bytes of the first page.
    pub(crate) fn post(&mut self, (pair, _): Pair, id: u64, op: Op) -> Reply {
        let local = Local::Memory(vec![Sge { address: self.at, len: 8, lkey: self.key }]);
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        match ask(&mut self.socket, &Request::PostSend { pair, room: 0, work }) {
            Reply::Posted { count, errno, .. } => Reply::Posted { count, errno, room: 0 },
            other => other,
        }
    }

    /// Writes some bytes to the middle page of the peer.
    pub(crate) fn write(&mut self, pair: Pair, id: u64, peer: &Self) {
        self.write_to(pair, id, peer.at + PAGE, peer.key);
    }

    pub(crate) fn write_to(&mut self, (pair, _): Pair, id: u64, address: u64, rkey: u32) {
        let op = Op::Write { address, rkey };
        let local = Local::Inline(Cow::Borrowed(&[7; 64]));
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        let posted = ask(&mut self.socket, &Request::PostSend { pair, room: 0, work });
        assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
    }

    /// Waits for a completion. Returns its id and status.
    pub(crate) fn completion(&mut self) -> (u64, u32) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            if let Some(Completion { id, status, .. }) = self.queue.next() {
                return (id, status);
            }
            assert!(std::time::Instant::now() < deadline, "no completion");
            std::thread::yield_now();
        }
    }
}

/// Allocates ordinary memory of three pages.
pub(crate) fn pages() -> u64 {
    Vec::leak(vec![0_u8; 3 * PAGE as usize]).as_ptr().expose_provenance() as u64
}

pub(crate) fn connected(one: &mut Program, other: &mut Program) -> (Pair, Pair) {
    let (own, theirs) = (one.pair(), other.pair());
    one.connect(own, other.last, theirs.1);
    other.connect(theirs, one.last, own.1);
    (own, theirs)
}
