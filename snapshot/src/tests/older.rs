//! Snapshots that a newer one has replaced.

use std::ops::Range;

use rdma_backend::Backend as _;

use super::*;
use crate::publisher::Filler;

/// A history of writes, with snapshots that `World::hosts[0]` publishes.
struct Scene {
    world: World,
    publisher: Publisher<SoftSim>,
    /// Of the newest snapshot.
    filler: Filler<SoftSim>,
    /// The snapshots, and the writes after the first.
    snapshots: [Vec<u8>; 3],
    log: Vec<u8>,
}

/// The first bytes of the log, which the second snapshot has, and those at which the first one's
/// log ends.
const SECOND: Range<usize> = 700..1000;
/// The same of the third and the second.
const THIRD: Range<usize> = 3300..4000;

impl Scene {
    /// Publishes the first snapshot with its log up to the second one.
    fn new(seed: u64, config: publisher::Config) -> Self {
        let world = World::new(seed, DeviceKind::Mlx5, 4, Vec::new());
        let mut publisher = world.publisher(1, config);
        let snapshots = [(seed, 5500), (seed + 1, 2300), (seed + 2, 3100)];
        let snapshots = snapshots.map(|(seed, length)| content(seed, length));
        publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
        let mut filler = publisher.filler(CHUNK);
        for chunk in snapshots[0].chunks(CHUNK as usize) {
            filler.write(chunk).expect("room");
            publisher.publish(filler.take().expect("a chunk")).expect("room");
        }
        publisher.mark().expect("a mark");
        let mut scene = Self { world, publisher, filler, snapshots, log: content(seed + 3, 7000) };
        scene.write(0..SECOND.start);
        scene.write(SECOND);
        scene
    }

    /// Replaces the snapshot by another one, with its log up to where the older one's ends.
    fn renew(&mut self, number: usize, both: Range<usize>) {
        let mut next = self.publisher.prepare();
        self.filler = next.filler(CHUNK as usize);
        for chunk in self.snapshots[number].chunks(CHUNK as usize) {
            self.filler.write(chunk).expect("room");
            next.publish(self.filler.take().expect("a chunk"));
        }
        next.mark().expect("a mark");
        let shared_from = next.bytes() + both.len() as u64;
        self.publisher.fit(next.taken()).expect("room");
        self.publisher.renew(next, offer(Layout::Chunks), shared_from).expect("an offer");
        self.write(both);
    }

    /// Appends these bytes of the log.
    fn write(&mut self, bytes: Range<usize>) {
        let mut left = &self.log[bytes];
        while !left.is_empty() {
            let (now, later) = left.split_at(self.filler.room().clamp(1, left.len()));
            self.filler.write(now).expect("room");
            self.publisher.publish(self.filler.take().expect("a chunk")).expect("room");
            left = later;
        }
    }

    fn run(&mut self, pull: &mut Pull, mut is_so: impl FnMut(&Pull, &Publisher<SoftSim>) -> bool) {
        while !is_so(pull, &self.publisher) {
            self.world.turn(&mut self.publisher, std::slice::from_mut(pull));
        }
    }

    /// Returns the memory of the publisher's device that is neither the newest snapshot's nor for
    /// control streams, of which there is one.
    fn of_older(&self) -> u64 {
        let all = self.world.sim.fabric().resources(address(1)).registered_bytes;
        all.saturating_sub(self.publisher.store.registered())
    }
}

/// VS-TABLE-007: the memory of an older snapshot is released once its readers have it. A reader
/// that has less of it is refused, and one that has all of it continues. After a lease without a
/// reader, the snapshot is gone. Memory that was released is the newest one's.
#[test]
fn an_older_snapshot_is_released_when_it_is_read() {
    // Each snapshot takes four slabs of a page, and entries.
    let memory = 35_400;
    let config = publisher::Config { memory, ..publisher::Config::default() };
    let mut scene = Scene::new(30, config);
    let mut early = scene.world.pull(2, 1, reading());
    scene.run(&mut early, |pull, _| pull.have.chunks >= 3);
    let part = early.have;
    scene.renew(1, SECOND);
    scene.write(SECOND.end..THIRD.end);
    let both = scene.publisher.kept();
    let newest = scene.publisher.store.taken();
    assert!(both >= newest + scene.snapshots[0].len() as u64, "{both} bytes are kept");
    // Entries of the log that both have stay.
    scene.run(&mut early, |_, publisher| publisher.kept() < newest + 4096);
    scene.write(THIRD.end..scene.log.len());
    let left = memory - (both - newest);
    assert!(scene.publisher.store.taken() > left, "more than was left beside the older");
    let mut again = scene.world.pull(3, 1, reading());
    again.have = part;
    scene.run(&mut again, |pull, _| pull.error.is_some());
    assert!(matches!(again.error, Some(Error::OtherSnapshot)), "{:?}", again.error);

    let all = early.have;
    drop(early.reader.take());
    let mut again = scene.world.pull(2, 1, reading());
    again.have = all;
    scene.run(&mut again, |pull, publisher| pull.error.is_some() || publisher.counts().reading == 1);
    assert!(again.error.is_none(), "{:?}", again.error);
    drop(again);
    let lease = publisher::Config::default().lease;
    let by = scene.world.sim.now().after(lease * 3);
    let mut nothing = scene.world.pull(4, 1, reading());
    nothing.done = true;
    let host = scene.world.hosts[0].clone();
    scene.run(&mut nothing, |_, _| host.now() >= by);
    let mut again = scene.world.pull(3, 1, reading());
    again.have = all;
    scene.run(&mut again, |pull, _| pull.error.is_some());
    assert!(matches!(again.error, Some(Error::OtherSnapshot)), "{:?}", again.error);
}

/// VS-TABLE-007: a reader of the first snapshot that stays keeps no memory but the newest one's,
/// however many snapshots follow.
#[test]
fn a_reader_that_stays_keeps_no_log_of_a_replaced_snapshot() {
    let mut scene = Scene::new(50, publisher::Config::default());
    let mut early = scene.world.pull(2, 1, reading());
    let written = |scene: &Scene, to: usize| (scene.snapshots[0].len() + to) as u64;
    let upto = written(&scene, SECOND.end);
    scene.run(&mut early, |pull, _| pull.have.bytes == upto);
    let streams = scene.of_older();
    for (number, both, to) in [(1, SECOND, THIRD.end), (2, THIRD, 7000)] {
        let end = both.end;
        scene.renew(number, both);
        scene.write(end..to);
        let upto = written(&scene, to);
        // The second snapshot has no reader, so it is gone after a lease.
        let by = scene.world.sim.now().after(publisher::Config::default().lease * 2);
        let host = scene.world.hosts[0].clone();
        scene.run(&mut early, |pull, publisher| {
            pull.have.bytes == upto && publisher.kept() == publisher.store.taken() || host.now() >= by
        });
        assert!(early.error.is_none() && early.have.bytes == upto, "{:?}", early.error);
        assert_eq!(scene.of_older(), streams, "after snapshot {number}");
    }
    assert!(early.bytes == [&scene.snapshots[0][..], &scene.log].concat());
}

/// VS-TABLE-007: where memory runs short, an older snapshot goes before the newest one fails. A
/// reader of it that takes nothing is told, and begins again.
#[test]
fn a_reader_that_takes_nothing_does_not_end_the_newest_snapshot() {
    let memory = 48_000;
    let mut scene = Scene::new(60, publisher::Config { memory, ..publisher::Config::default() });
    let mut early = scene.world.pull(2, 1, reading());
    scene.run(&mut early, |pull, _| pull.have.chunks >= 3);
    early.room = 0;
    scene.renew(1, SECOND);
    scene.write(SECOND.end..THIRD.end);
    let newest = scene.publisher.store.taken();
    assert!(scene.publisher.kept() > newest, "the older one is kept");
    scene.renew(2, THIRD);
    scene.write(THIRD.end..scene.log.len());
    assert!(scene.publisher.kept() <= memory, "{}", scene.publisher.kept());
    scene.run(&mut early, |pull, _| pull.error.is_some());
    assert!(matches!(early.error, Some(Error::OtherSnapshot)), "{:?}", early.error);
    let mut late = scene.world.pull(3, 1, reading());
    scene.publisher.end();
    scene.run(&mut late, |pull, _| !pull.is_under_way());
    assert!(late.bytes == [&scene.snapshots[2][..], &scene.log[THIRD.start..]].concat(), "{:?}", late.error);
}

/// VS-AUTH-003: a peer that names an older snapshot and proves nothing neither keeps its memory nor
/// releases it.
#[test]
fn a_stranger_has_no_say_in_what_is_kept() {
    let handshake = Duration::from_secs(600);
    let mut scene = Scene::new(70, publisher::Config { handshake, ..publisher::Config::default() });
    let mut early = scene.world.pull(2, 1, reading());
    scene.run(&mut early, |pull, _| pull.have.chunks >= 3);
    let have = early.have;
    scene.renew(1, SECOND);

    let mut is_challenged = stranger(&scene.world.hosts[2], scene.publisher.address(), have.snapshot);
    let mut nothing = scene.world.pull(4, 1, reading());
    nothing.done = true;
    // Without a reader, it is kept.
    drop(early.reader.take());
    while !is_challenged() {
        let mut passes = 0;
        scene.run(&mut nothing, |_, _| {
            passes += 1;
            passes > 1
        });
    }
    let newest = scene.publisher.store.taken();
    assert!(scene.publisher.kept() > newest, "a stranger released it");
    // A reader that takes the rest releases it, long before the stranger's session ends.
    let host = scene.world.hosts[0].clone();
    let by = host.now().after(handshake / 2);
    let mut early = scene.world.pull(2, 1, reading());
    early.have = have;
    scene.run(&mut early, |_, publisher| publisher.kept() == newest || host.now() >= by);
    assert_eq!(scene.publisher.kept(), newest, "a stranger keeps it");
}

/// Memory that both snapshots need together counts.
#[test]
fn two_snapshots_stay_within_the_limit_of_memory() {
    let world = World::new(40, DeviceKind::Ibta, 1, Vec::new());
    let config = publisher::Config { memory: 30_000, ..publisher::Config::default() };
    let mut publisher = world.publisher(1, config);
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    for chunk in content(40, 5000).chunks(CHUNK as usize) {
        publisher.append(chunk).expect("a chunk");
    }
    publisher.mark().expect("a mark");
    let mut next = publisher.prepare();
    let mut filler = next.filler(CHUNK as usize);
    let mut chunks = 0;
    let error = loop {
        filler.write(&content(41, CHUNK as usize)).expect("within the limit of one");
        next.publish(filler.take().expect("a chunk"));
        if let Err(error) = publisher.fit(next.taken()) {
            break error;
        }
        chunks += 1;
    };
    assert!(matches!(error, Error::TooMuch { .. }), "{error}");
    assert!((1..=4).contains(&chunks), "{chunks}");
}
