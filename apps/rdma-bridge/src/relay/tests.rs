//! Random relays in virtual time: sides that pause, read slowly, end one direction, end as a whole,
//! or break, over TCP and RDMA as this module models them. They are judged by the oracle.
//!
//! `RELAY_SEEDS=17` repeats one seed, and `RELAY_SEEDS=0..100000` runs many.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::*;
use link::{Link, Outer};
use oracle::{Seen, byte, for_seeds};

mod link;
#[path = "../../../rdma-server/tests/server/oracle.rs"]
mod oracle;

/// Longer than any run takes, in virtual time.
const FOR_EVER: Duration = Duration::from_secs(1_000_000);

/// How long a side waits for its peer's end before it ends itself.
const WAITS: Duration = Duration::from_secs(500);

fn milliseconds(random: &mut fastrand::Rng, range: Range<u64>) -> Duration {
    Duration::from_millis(random.u64(range))
}

fn pick<T: Copy>(random: &mut fastrand::Rng, of: &[T]) -> T {
    of[random.usize(..of.len())]
}

fn number(side: Side) -> u8 {
    if side == Side::Client { 0 } else { 0x5a }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// As soon as everything is written: its own direction over TCP, everything over RDMA.
    AtOnce,
    /// In the same way, once it has seen an end or waited for long.
    AfterThePeer,
    Breaks,
}

#[derive(Clone, Debug)]
struct Script {
    side: Side,
    writes: usize,
    pieces: [usize; 2],
    /// The longest pause before a write, and before a read, in milliseconds.
    pauses: [u64; 2],
    way: Way,
    reads: usize,
}

impl Script {
    fn new(random: &mut fastrand::Rng, side: Side, room: usize, good: bool) -> Self {
        let pieces = [(); 2].map(|()| pick(random, &[300, 3_000, 50_000]));
        // A few dozen turns, whatever the sizes are.
        let most = pick(random, &[0, 1, 100, 5_000, 100_000]).min(30 * pieces[0].min(room));
        let ways = [Way::AtOnce, Way::AtOnce, Way::AfterThePeer, Way::Breaks];
        Self {
            side,
            writes: random.usize(..=most),
            pieces,
            pauses: [(); 2].map(|()| pick(random, &[0, 1, 10, 300, if good { 300 } else { 3_000 }])),
            way: pick(random, if good { &ways[..3] } else { &ways }),
            reads: if good || random.u8(..8) > 0 { usize::MAX } else { random.usize(..=20_000) },
        }
    }
}

async fn act(outer: Outer, script: &Script, mut random: fastrand::Rng) -> Seen {
    let whole = outer.is_whole();
    let (from, to) = tokio::io::split(outer);
    let (over, sees_end) = watch::channel(false);
    let breaks = milliseconds(&mut random, 0..20_000);
    let (mut sent, mut ended, mut seen) = (0, false, Seen::default());
    let (told, tells) = watch::channel(false);
    let writing = writes(to, script, random.fork(), (&mut sent, &mut ended, told), sees_end);
    let reading = async {
        let outcome = reads(from, script, random.fork(), &mut seen).await;
        // A side that has ended as a whole sees its own end.
        seen.end = outcome.filter(|_| !(whole && *tells.borrow()));
        over.send_replace(true);
    };
    let both = async { tokio::join!(writing, reading) };
    // Dropping resets it here, unless it has ended.
    let limit = if script.way == Way::Breaks { breaks } else { FOR_EVER };
    let _broken = timeout(limit, both).await;
    Seen { sent, ended, ..seen }
}

async fn writes(
    mut to: WriteHalf<Outer>,
    script: &Script,
    mut random: fastrand::Rng,
    (sent, ended, told): (&mut usize, &mut bool, watch::Sender<bool>),
    mut sees_end: watch::Receiver<bool>,
) -> WriteHalf<Outer> {
    while *sent < script.writes {
        pause(&mut random, script.pauses[0]).await;
        let upto = script.writes.min(*sent + random.usize(1..=script.pieces[0]));
        let bytes: Vec<u8> = (*sent..upto).map(|at| byte(number(script.side), at)).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let Ok(written) = to.write(rest).await else { return to };
            *sent += written;
            rest = &rest[written..];
        }
    }
    if script.way == Way::AfterThePeer {
        let _in_time = timeout(WAITS, sees_end.wait_for(|over| *over)).await;
    }
    told.send_replace(true);
    *ended = to.shutdown().await.is_ok();
    to
}

async fn pause(random: &mut fastrand::Rng, longest: u64) {
    if longest > 0 {
        sleep(milliseconds(random, 0..longest)).await;
    }
}

async fn reads(
    mut from: ReadHalf<Outer>,
    script: &Script,
    mut random: fastrand::Rng,
    seen: &mut Seen,
) -> Option<bool> {
    let mut bytes = vec![0; script.pieces[1]];
    while seen.received < script.reads {
        pause(&mut random, script.pauses[1]).await;
        match from.read(&mut bytes).await {
            Ok(0) => return Some(true),
            Ok(read) => seen.receive(number(script.side.other()), &bytes[..read]),
            Err(_) => return Some(false),
        }
    }
    // It stops reading, but stays connected.
    sleep(WAITS * 2).await;
    None
}

async fn run(seed: u64) -> [usize; 2] {
    let mut random = fastrand::Rng::with_seed(seed);
    // No side breaks, stops, or pauses for too long.
    let good = random.bool();
    let whole = pick(&mut random, &[[false, false], [false, true], [true, false]]);
    let rooms = [(); 2].map(|()| pick(&mut random, &[1, 7, 1_000, 20_000, 100_000]));
    let patience = Patience {
        stall: if good { FOR_EVER / 10 } else { milliseconds(&mut random, 1..10_000) },
        quiet: milliseconds(&mut random, 0..1_000),
    };
    let cut = (!good && random.u8(..8) == 0).then(|| milliseconds(&mut random, 0..20_000));
    let room = rooms[0].min(rooms[1]);
    let scripts = [Side::Client, Side::Server].map(|side| Script::new(&mut random, side, room, good));
    let [(client, near), (server, far)] = [0, 1].map(|at| Link::pair(random.fork(), whole[at], rooms[at]));
    let counters = Counters::default();
    let relaying = timeout(cut.unwrap_or(FOR_EVER), relay(near, far, &counters, patience));
    let all = async {
        let (mine, yours) = (random.fork(), random.fork());
        tokio::join!(relaying, act(client, &scripts[0], mine), act(server, &scripts[1], yours))
    };
    let (relayed, client, server) = timeout(FOR_EVER / 2, all).await.expect("it waits for ever");
    let story = || {
        format!(
            "{scripts:#?}\n{whole:?} {patience:?} {cut:?}\n{relayed:?}\nclient: {client:?}\nserver: {server:?}"
        )
    };
    for (one, other, at) in [(client, server, 0), (server, client, 1)] {
        one.judge(&other, whole[1 - at], story);
        if good && other.ended {
            // A side that ended as a whole did not wait for it.
            let own = whole[at] && one.end.is_none();
            assert!(own || one.end == Some(true), "side {at} saw a break that is none\n{}", story());
        }
    }
    if good && whole == [false, false] {
        assert!(client.ended && server.ended && matches!(relayed, Ok(Ok(()))), "{}", story());
    }
    [true, false].map(|order| [client, server].iter().filter(|seen| seen.end == Some(order)).count())
}

const USUAL: Patience = Patience { stall: Duration::from_secs(60), quiet: Duration::from_millis(200) };

/// The client writes `requests`, ends its direction, and reads after a pause much longer than
/// `quiet`. The server writes `replies` at once and then reads.
async fn paused(whole: bool, requests: usize, replies: usize) -> [Vec<u8>; 2] {
    let mut random = fastrand::Rng::with_seed(1);
    let [(mut client, near), (server, far)] =
        [false, whole].map(|whole| Link::pair(random.fork(), whole, 16_384));
    let counters = Counters::default();
    let client = async {
        client.write_all(&vec![b'q'; requests]).await.expect("written");
        client.shutdown().await.expect("ended");
        sleep(50 * USUAL.quiet).await;
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.expect("an orderly end");
        all
    };
    let server = async {
        let (mut from, mut to) = tokio::io::split(server);
        let writing = async {
            to.write_all(&vec![b'r'; replies]).await.expect("written");
            to.shutdown().await.expect("ended");
        };
        let mut all = Vec::new();
        let (read, ()) = tokio::join!(from.read_to_end(&mut all), writing);
        read.expect("an orderly end");
        all
    };
    let (relayed, replies, requests) = tokio::join!(relay(near, far, &counters, USUAL), client, server);
    relayed.expect("nothing broke");
    [requests, replies]
}

#[tokio::test(start_paused = true)]
async fn a_client_that_pauses_with_a_full_socket_gets_the_rest() {
    for whole in [true, false] {
        let [requests, replies] = paused(whole, 10, 300_000).await;
        assert_eq!((requests.len(), replies.len()), (10, 300_000));
    }
}

/// A side takes a few bytes before each time limit, in all much later than that, and the bridge has
/// nothing left to do but to flush or to end its connection.
#[tokio::test(start_paused = true)]
async fn a_side_that_takes_its_last_bytes_slowly_gets_them() {
    const ROOM: usize = 16_384;
    let mut random = fastrand::Rng::with_seed(1);
    let [(mut client, near), (server, far)] =
        [false, true].map(|whole| Link::pair(random.fork(), whole, ROOM));
    let counters = Counters::default();
    let writing = async {
        client.write_all(&[b'q'; ROOM]).await.expect("written");
        client.shutdown().await.expect("ended");
        client.read_to_end(&mut Vec::new()).await.expect("an orderly end")
    };
    let reading = async {
        let (mut from, to) = tokio::io::split(server);
        let (mut all, mut bytes) = (0, [0; ROOM / 64]);
        loop {
            sleep(USUAL.stall * 3 / 4).await;
            match from.read(&mut bytes).await.expect("no break") {
                0 => break,
                read => all += read,
            }
        }
        drop(to);
        all
    };
    let (relayed, _, read) = tokio::join!(relay(near, far, &counters, USUAL), writing, reading);
    relayed.expect("nothing broke");
    assert_eq!(read, ROOM);
}

/// The same side, which stops.
#[tokio::test(start_paused = true)]
async fn a_side_that_takes_nothing_more_is_reset_in_time() {
    const ROOM: usize = 16_384;
    let mut random = fastrand::Rng::with_seed(1);
    let [(mut client, near), (mut server, far)] =
        [false, true].map(|whole| Link::pair(random.fork(), whole, ROOM));
    let counters = Counters::default();
    let writing = async {
        client.write_all(&[b'q'; ROOM]).await.expect("written");
        client.shutdown().await.expect("ended");
    };
    let reading = async {
        sleep(USUAL.stall / 2).await;
        server.read_exact(&mut [0; 100]).await.expect("read");
    };
    let begun = tokio::time::Instant::now();
    let (relayed, (), _) = tokio::join!(relay(near, far, &counters, USUAL), writing, reading);
    let broken = relayed.expect_err("it takes nothing");
    assert_eq!((broken.side, broken.error.kind()), (Side::Server, io::ErrorKind::TimedOut));
    assert!(begun.elapsed() <= USUAL.stall * 3, "{:?}", begun.elapsed());
}

#[test]
fn who_saw_an_orderly_end_saw_every_byte() {
    for_seeds("RELAY_SEEDS", 0..2_000, |seed| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(run(seed))
    });
}
