//! Windows of servers that grow: [`Config::grow_to`](rdma_proto::Config::grow_to).

use std::io::IoSlice;
use std::time::Duration;

use rdma_conn::{Endpoint, Event, Limits, Options};
use rdma_softsim::Simulation;

use crate::world::{End, asking, connected, hosts, pattern, simulation};

const WINDOW: u32 = 64 << 10;
const LONGEST: u32 = 4 * WINDOW;

fn growing(window: u32, longest: u32) -> Options {
    let options = Options::default();
    options.protocol(options.protocol.window(window).windows(1).grow_to(Some(longest)))
}

/// Has `from` send `bytes`, and returns how many windows it filled and was given.
fn windows_for(sim: &Simulation, bytes: &[u8], (from, here): &mut End, (to, there): &mut End) -> u64 {
    let (mut sent, mut read, mut piece) = (0, Vec::new(), vec![0; 1 << 20]);
    let mut turns = 0;
    while read.len() < bytes.len() {
        turns += 1;
        assert!(turns < 1_000_000, "{} bytes have come", read.len());
        if let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
            sent += from.write(*here, &[IoSlice::new(rest)]).expect("it is open").unwrap_or(0);
        }
        sim.step();
        from.progress().expect("the fabric stays");
        to.progress().expect("the fabric stays");
        if let Some(came) = to.read(*there, &mut piece).expect("it is open") {
            read.extend_from_slice(&piece[..came]);
        }
    }
    assert!(read == bytes);
    from.connection(*here).expect("it is there").counters().windows_received
}

/// VR-MEM-020, with the default options of a program, which are those of a client. The client has
/// them as well, and its windows keep their length (VR-MEM-008).
#[test]
fn the_window_of_a_server_that_listens_grows() {
    let sim = simulation();
    let options = growing(WINDOW, LONGEST);
    let (mut client, mut server) = connected(&sim, options, options);
    let registered = |(endpoint, id): &End| endpoint.connection(*id).expect("it is there").registered_bytes();
    assert_eq!(registered(&server) - registered(&client), (LONGEST - WINDOW) as usize);
    let bytes = pattern(12 * WINDOW as usize);
    // Of one, two, and then four times the length, of which the last one is not full.
    assert_eq!(windows_for(&sim, &bytes, &mut client, &mut server), 5);
    assert!(windows_for(&sim, &bytes, &mut server, &mut client) >= 12);
}

/// VR-SEC-007: a peer that is refused costs a page at most, and is told of no longer window.
#[test]
fn a_refused_peer_costs_no_region_to_grow_in() {
    const REFUSAL: &[u8] = b"-ERR max number of clients reached\r\n";
    for window in [100, 4096, 8192, 1 << 20] {
        let sim = simulation();
        let (server, client, address) = hosts(&sim);
        let mut server = Endpoint::new(&server, Limits::NONE).expect("a device");
        server.listen(address, growing(window, 16 << 20)).expect("a free address");
        let (mut client, own) = asking(&client, address, Options::default().eager_send_buffer(true));
        let (mut most, mut turns, mut read, mut tried) = (0, 0, Vec::new(), false);
        while read != REFUSAL || !tried {
            turns += 1;
            assert!(turns < 1_000_000, "it is not told");
            sim.step();
            server.progress().expect("the fabric stays");
            while let Some(event) = server.next_event() {
                if let Event::Opened { id, .. } = event {
                    server.write(id, &[IoSlice::new(REFUSAL)]).expect("it is open");
                    server.abandon(id, Duration::from_secs(2)).expect("it is there");
                }
            }
            most = most.max(server.usage().registered_bytes);
            client.progress().expect("the fabric stays");
            if client.is_open(own) && !tried {
                // More than it has a window for, before it learns of the end.
                tried = client.write(own, &[IoSlice::new(&[1; 65536])]).expect("it is open").is_some();
            }
            let mut piece = [0; 100];
            if let Ok(Some(came)) = client.read(own, &mut piece) {
                read.extend_from_slice(&piece[..came]);
            }
        }
        let told = client.connection(own).expect("it is there").counters().bytes_sent;
        assert_eq!(told, u64::from(window.min(4096)));
        let slots = 1280 * 32;
        assert_eq!(most, slots + 4096 + u64::from(window.min(4096)), "with a window of {window}");
    }
}
