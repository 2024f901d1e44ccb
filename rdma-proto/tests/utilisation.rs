//! How much of a link a long value uses, depending on where the client's windows lie: the machine
//! in a model of a link (100 Gb/s, a round trip of 10 µs) and of a processor that does one thing at
//! a time. The server sends windows of 1 MiB as Valkey 9.1.2 does a long reply: with one
//! notification when full, and the next part ready.

use core::time::Duration;

use rdma_proto::time::Instant;
use rdma_proto::wire::Message;
use rdma_proto::{Action, Config, Keepalive, Machine, Readable, RegionAddress};
use rdma_proto::{Immediate, RNR_RETRY_INFINITE};

const WINDOW: u32 = 1 << 20;
const VALUE: u64 = 64 << 20;
/// Nanoseconds that a byte takes at 100 Gb/s.
const WIRE: f64 = 8.0 / 100.0;
/// Nanoseconds one way.
const WAY: f64 = 5_000.0;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Registered again once it is read, as libvalkey does.
    OneRegion,
    TwoRegions,
    /// Where the value belongs, for windows wholly in it; otherwise in one region.
    Landing,
}

fn moment(nanos: f64) -> Instant {
    Instant::from_start(Duration::from_nanos(nanos as u64))
}

fn announced(machine: &mut Machine, now: f64) -> usize {
    let mut windows = 0;
    while let Some(action) = machine.poll_action(|| moment(now)) {
        let Action::Send { id, signaled, message, .. } = action else { panic!("{action:?}") };
        assert!(matches!(Message::decode(&message), Ok(Message::RegisterXferMemory(_))));
        if signaled {
            machine.handle_sent(moment(now), id);
        }
        windows += 1;
    }
    assert!(windows < 2, "one is announced at a time");
    windows
}

/// Returns the share of link time that [`VALUE`] uses, from the first byte that leaves the server
/// to the last in place, if the client copies `copies` bytes per nanosecond.
fn utilisation(way: Way, copies: f64) -> f64 {
    let windows = if way == Way::TwoRegions { 2 } else { 1 };
    let mut config = Config::client().window(WINDOW).windows(windows);
    config.keepalive = Some(Keepalive::NONE);
    let region = |rkey| RegionAddress { address: u64::from(rkey) << 40, rkey };
    let mut machine = Machine::new(config, [region(1), region(2)]).expect("in bounds");
    machine.handle_established(moment(0.0), RNR_RETRY_INFINITE);
    assert_eq!(announced(&mut machine, 0.0), 1);
    let (mut left, mut arrives, mut busy) = (VALUE, Some((WIRE * f64::from(WINDOW) + WAY, WINDOW)), 0.0_f64);
    let (mut unread, mut landed, mut asked) = (VALUE, 0, false);
    while unread > 0 {
        let Some((at, bytes)) = arrives.take() else {
            panic!("the server waits for ever, {unread} bytes before the end")
        };
        busy = busy.max(at);
        left -= u64::from(bytes);
        machine.handle_immediate(moment(busy), Immediate(bytes));
        if way == Way::Landing && !std::mem::replace(&mut asked, true) {
            machine.land(region(3), u32::try_from(VALUE).expect("short")).expect("nothing lands yet");
        }
        loop {
            if announced(&mut machine, busy) > 0 {
                let bytes = u32::try_from(left.min(u64::from(WINDOW))).expect("at most a window");
                arrives = (bytes > 0).then(|| (busy + 2.0 * WAY + WIRE * f64::from(bytes), bytes));
            }
            let Some(part) = machine.readable() else { break };
            if part.region == Readable::LANDED {
                landed += u64::from(part.len);
            } else {
                busy += f64::from(part.len) / copies;
            }
            unread -= u64::from(part.len);
            machine.consume(part.len).expect("there are as many");
        }
    }
    let least = if way == Way::Landing { VALUE - u64::from(WINDOW) } else { 0 };
    assert_eq!(landed, least, "all but what was announced before its length was known");
    100.0 * WIRE * VALUE as f64 / busy
}

/// Prints its table with `cargo test -p rdma-proto --test all utilisation -- --nocapture`.
#[test]
fn landing_uses_the_wire_whatever_a_copy_costs() {
    println!("{:>14}  {:>12}  {:>12}  {:>12}", "copies, GB/s", "one region", "two regions", "landing");
    // Cache to cache; where one region reaches 56 %; memory to memory, by one processor or more.
    // The model is exact: the table of apps/rdma-kv/README.md.
    let expected = [
        (40.0, ["69.9", "89.0", "89.4"]),
        (18.7, ["56.0", "88.6", "89.4"]),
        (10.0, ["42.2", "79.0", "89.3"]),
        (5.0, ["27.6", "39.7", "87.7"]),
    ];
    for (copies, expected) in expected {
        let shares = [Way::OneRegion, Way::TwoRegions, Way::Landing].map(|way| utilisation(way, copies));
        let [one, two, landing] = shares.map(|share| format!("{share:.1}"));
        println!("{copies:>14}  {one:>10} %  {two:>10} %  {landing:>10} %");
        assert_eq!([one, two, landing], expected, "{copies} GB/s");
    }
}
