//! Snapshots that a newer one has replaced.

use rdma_backend::Backend as _;

use super::*;
use crate::publisher::Store;

/// A history of writes, of which the newer snapshot is made after `BEFORE` bytes of the older one's
/// log. The older one's log ends later.
const BEFORE: usize = 700;

/// Two snapshots of a history, of which `World::hosts[0]` publishes the older one.
struct Scene {
    world: World,
    publisher: Publisher<SoftSim>,
    old: Vec<u8>,
    new: Vec<u8>,
    log: Vec<u8>,
}

impl Scene {
    fn new(seed: u64) -> Self {
        let world = World::new(seed, DeviceKind::Mlx5, 4, Vec::new());
        let mut publisher = world.publisher(1, publisher::Config::default());
        let (old, new, log) = (content(seed, 5500), content(seed + 1, 2300), content(seed + 2, 4000));
        publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
        for chunk in old.chunks(CHUNK as usize) {
            publisher.append(chunk).expect("a chunk");
        }
        publisher.mark().expect("a mark");
        publisher.append(&log[..BEFORE]).expect("a chunk");
        publisher.append(&log[BEFORE..1000]).expect("a chunk");
        Self { world, publisher, old, new, log }
    }

    /// Replaces the snapshot. The old one's log ends at byte 1000.
    fn renew(&mut self) {
        let mut next: Store<SoftSim> = self.publisher.prepare();
        let mut filler = next.filler(CHUNK as usize);
        for chunk in self.new.chunks(CHUNK as usize) {
            filler.write(chunk).expect("room");
            next.publish(filler.take().expect("a chunk")).expect("a chunk");
        }
        next.mark().expect("a mark");
        let shared_from = next.bytes() + (1000 - BEFORE) as u64;
        self.publisher.renew(next, offer(Layout::Chunks), shared_from).expect("an offer");
    }

    /// Appends the log from where the new snapshot begins.
    fn write(&mut self) {
        self.publisher.append(&self.log[BEFORE..1000]).expect("a chunk");
        for chunk in self.log[1000..].chunks(CHUNK as usize) {
            self.publisher.append(chunk).expect("a chunk");
        }
    }

    /// Runs until `is_so`.
    fn run(&mut self, pull: &mut Pull, mut is_so: impl FnMut(&Pull, &Publisher<SoftSim>) -> bool) {
        while !is_so(pull, &self.publisher) {
            self.publisher.progress().expect("the publisher goes on");
            pull.progress(|_| {});
            let soon = self.world.sim.now().after(Duration::from_secs(1));
            let at = pull.next_timeout().into_iter().chain(self.publisher.next_timeout());
            self.world.step(at.chain([soon]).min());
        }
    }
}

/// VS-TABLE-002, VS-TABLE-007: readers of both snapshots get the same history, each byte once.
#[test]
fn readers_of_an_older_snapshot_follow_the_same_history() {
    let mut scene = Scene::new(20);
    let mut early = scene.world.pull(2, 1, reading());
    scene.run(&mut early, |pull, _| pull.have.chunks >= 3);
    scene.renew();
    scene.write();
    let mut late = scene.world.pull(3, 1, reading());
    scene.run(&mut late, |pull, _| pull.have.chunks >= 2);
    scene.publisher.end();
    let mut pulls = [early, late];
    scene.world.run(&mut scene.publisher, &mut pulls);
    let [early, late] = pulls;
    assert!(early.error.is_none() && late.error.is_none(), "{:?} {:?}", early.error, late.error);
    assert!(early.bytes == [&scene.old[..], &scene.log].concat());
    assert!(late.bytes == [&scene.new[..], &scene.log[BEFORE..]].concat());
    let Scene { world, publisher, .. } = scene;
    drop((early, late, publisher));
    assert!(world.is_empty());
}

/// VS-TABLE-007: the memory of an older snapshot is released once its readers have it. A reader
/// that has less of it is refused, and one that has all of it continues. After a lease without a
/// reader, the snapshot is gone.
#[test]
fn an_older_snapshot_is_released_when_it_is_read() {
    let mut scene = Scene::new(30);
    let mut early = scene.world.pull(2, 1, reading());
    scene.run(&mut early, |pull, _| pull.have.chunks >= 3);
    let part = early.have;
    scene.renew();
    scene.write();
    let both = scene.publisher.kept();
    let newest = scene.publisher.store.bytes();
    assert!(both >= newest + scene.old.len() as u64, "{both} bytes are kept");
    scene.run(&mut early, |_, publisher| publisher.kept() == newest);
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

/// Memory that both snapshots need together counts.
#[test]
fn two_snapshots_stay_within_the_limit_of_memory() {
    let world = World::new(40, DeviceKind::Ibta, 1, Vec::new());
    let config = publisher::Config { memory: 8000, ..publisher::Config::default() };
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
        if let Err(error) = filler.write(&content(41, CHUNK as usize)) {
            break error;
        }
        next.publish(filler.take().expect("a chunk")).expect("within the limit");
        chunks += 1;
    };
    assert!(matches!(error, Error::TooMuch { .. }), "{error}");
    assert!((1..=3).contains(&chunks), "{chunks}");
}
