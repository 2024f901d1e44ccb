//! Runs the fuzzer's body on its seeds, and on generated inputs that are the same every time.

mod bodies;
mod queue;

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use softrdma_wire::{Access, MAX_INLINE, PAGE, Post, Receive, Reply, Request, Send, Sge, Transition};

fn packet(into: &mut Vec<u8>, program: u8, request: &impl serde::Serialize) {
    let bytes = postcard::to_stdvec(request).expect("encodes");
    into.extend([program, u8::try_from(bytes.len()).expect("is short")]);
    into.extend(bytes);
}

/// Returns the fuzzer's first seed: two programs that connect queue pairs and write.
fn honest() -> Vec<u8> {
    let mut input = Vec::new();
    let machine = |program: u8| std::net::IpAddr::from([192, 0, 2, program + 1]);
    for program in [0, 1] {
        let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
        for request in [
            Request::AllocateDomain(0),
            Request::Register { domain: 1, at: 0, address: 4096, len: 4096, access },
            Request::CreateCompletionChannel,
            Request::CreateQueue { device: 0, depth: 8, channel: Some(3), vector: 0 },
            Request::CreateShared { domain: 1, depth: 4, limit: 1, elements: 16 },
            Request::CreatePair {
                domain: 1,
                send_queue: 4,
                receive_queue: 4,
                shared: None,
                service: softrdma_wire::Service::Connected,
                send_depth: 4,
                receive_depth: 4,
                elements: [16; 2],
                inline: MAX_INLINE as u32,
            },
        ] {
            packet(&mut input, program, &request);
        }
    }
    // Each program connects to the other's queue pair.
    for program in [0, 1] {
        let (local, remote, number) = (machine(program), machine(1 - program), 3 - u32::from(program));
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote, number, timer: 12 },
            Transition::Send { retry: 1, rnr_retry: 1, read_depth: 1 },
        ] {
            packet(&mut input, program, &Request::Modify { pair: 6, to });
        }
    }
    let local = softrdma_wire::Local::Memory(vec![Sge { address: 4096, len: 64, lkey: 0x101 }]);
    let op = softrdma_wire::Op::Write { address: 4200, rkey: 0x202 };
    let work = vec![Send { id: 1, op, signaled: true, solicited: false, local }];
    // The program arms its queue, in the page after that of the notices.
    input.extend([bodies::SCRIBBLE, 3, queue::ARMED as u8, (PAGE >> 8) as u8, 2]);
    let receives = vec![Receive { id: 2, local: Vec::new() }];
    packet(&mut input, bodies::POST, &Post::Receive { pair: 6, work: receives });
    packet(&mut input, 0, &Request::PostSend { pair: 6, room: 0, work });
    packet(&mut input, 0, &Request::Poll(4));
    input
}

#[test]
fn seeds_and_generated_inputs() {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/fabric");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).expect("there are seeds") {
        bodies::run(&std::fs::read(seed.expect("an entry").path()).expect("a file"));
        count += 1;
    }
    assert!(count > 0);
    let mut runner = TestRunner::deterministic();
    // Arbitrary bytes, and a valid conversation with some bytes changed.
    let (bytes, honest) = (proptest::collection::vec(proptest::num::u8::ANY, 0..2000), honest());
    let places = proptest::collection::vec((0..honest.len(), proptest::num::u8::ANY), 0..6);
    for _ in 0..100 {
        bodies::run(&bytes.new_tree(&mut runner).expect("bytes").current());
        let mut bent = honest.clone();
        for (place, byte) in places.new_tree(&mut runner).expect("places").current() {
            bent[place] = byte;
        }
        bodies::run(&bent);
    }
}

/// The valid conversation ends with one completion, of the WRITE, which is a success.
#[test]
fn the_honest_conversation_ends_well() {
    // The bytes may still be in flight.
    let shown = |memory: Option<&std::os::fd::OwnedFd>| {
        let mut page = [0; queue::ENTRIES as usize + 40];
        let read = rustix::io::pread(memory.expect("is there"), &mut page, PAGE as u64);
        assert_eq!(read, Ok(page.len()));
        let word = |at: u64| page[at as usize];
        // The positions are those of the count, the id and the status.
        word(queue::SHOWS) == 1 && word(queue::ENTRIES) == 1 && word(queue::ENTRIES + 12) == 0
    };
    let last = bodies::converse(&honest(), shown).expect("an answer");
    assert_eq!(postcard::from_bytes(&last), Ok(Reply::Done));
}

/// The seed is that conversation, in this version of the protocol.
#[test]
fn the_seed_is_an_honest_conversation() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/fabric/honest");
    if std::env::var_os("RENEW").is_some() {
        std::fs::write(path, honest()).expect("a file");
    }
    assert_eq!(std::fs::read(path).expect("a file"), honest(), "RENEW=1 writes it anew");
}
