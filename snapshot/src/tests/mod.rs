//! Whole sessions in virtual time.

mod misbehaviour;
mod older;
mod sim;
mod whole;
mod window;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_conn::{Endpoint, Event};
use rdma_softsim::{
    DeviceKind, FaultPlan, Limits as Device, Random, Resources, Simulation, SimulationSettings, SoftSim,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::channel::{self, Channel};
use crate::publisher::{self, Publisher};
use crate::reader::{self, Have, Offer, Reader};
use crate::wire::{Content, Frame, Hello, Layout, MAGIC, SnapshotId, VERSION};
use crate::{Error, Landed};

/// Chunks of the tests are small, so that there are many.
const CHUNK: u32 = 1000;
/// READs in flight at a time.
const DEPTH: u8 = 4;
/// No run needs more events.
const MOST_EVENTS: u64 = 2_000_000;

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host])
}

const fn offer(layout: Layout) -> Offer {
    Offer { layout, content: Content::Bytes, chunk_size: CHUNK, total: None, position: None }
}

/// Returns `len` bytes that `seed` determines.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.next() as u8).collect()
}

fn reading() -> reader::Config {
    reader::Config { depth: DEPTH, ..reader::Config::default() }
}

/// Returns whether a sleeper on these descriptors would wake.
fn is_readable(sources: &[BorrowedFd<'_>]) -> bool {
    let mut polled: Vec<_> = sources.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    poll(&mut polled, Some(&Timespec::default())).expect("descriptors") > 0
}

/// Returns the work of a peer that says Hello, and proves nothing: true once it has an answer.
fn stranger(host: &SoftSim, to: SocketAddr, snapshot: SnapshotId) -> impl FnMut() -> bool + use<> {
    let mut endpoint = Endpoint::new(host, channel::limits(1)).expect("a device");
    endpoint.connect(to, None, Duration::from_secs(5), channel::options()).expect("a connection");
    let mut stream = None;
    move || {
        endpoint.progress().expect("a device");
        while let Some(event) = endpoint.next_event() {
            if let Event::Opened { id, .. } = event {
                let (version, reserved, first) = (VERSION.into(), [0; 6], 0.into());
                let hello = Hello { magic: MAGIC, version, reserved, snapshot, first, nonce: [7; 32] };
                stream.insert(Channel::new(id)).send(&Frame::Hello(hello));
            }
        }
        let Some(channel) = &mut stream else { return false };
        channel.flush(&mut endpoint).expect("a connection");
        channel.receive(&mut endpoint).is_ok_and(|frame| frame.is_some())
    }
}

struct World {
    sim: Simulation,
    hosts: Vec<SoftSim>,
}

struct Pull {
    reader: Option<Reader<SoftSim>>,
    config: reader::Config,
    to: SocketAddr,
    host: SoftSim,
    domain: Option<reader::Shared<SoftSim>>,
    have: Have,
    bytes: Vec<u8>,
    /// Chunks that it takes at a time.
    room: usize,
    done: bool,
    /// What ended it.
    error: Option<Error>,
    /// Its requests to the device.
    counters: reader::Counters,
}

impl World {
    fn new(seed: u64, device_kind: DeviceKind, hosts: u8, plan: FaultPlan) -> Self {
        let sim = Simulation::new(seed, device_kind, SimulationSettings::default(), plan);
        let hosts = (1..=hosts).map(|host| sim.host(&[address(host)], Device::default())).collect();
        Self { sim, hosts }
    }

    fn publisher(&self, host: u8, config: publisher::Config) -> Publisher<SoftSim> {
        let backend = &self.hosts[usize::from(host) - 1];
        Publisher::bind(backend, SocketAddr::new(address(host), 7000), config).expect("a publisher")
    }

    fn pull(&self, host: u8, from: u8, config: reader::Config) -> Pull {
        Pull {
            reader: None,
            config,
            to: SocketAddr::new(address(from), 7000),
            host: self.hosts[usize::from(host) - 1].clone(),
            domain: None,
            have: Have::default(),
            bytes: Vec::new(),
            room: usize::from(DEPTH),
            done: false,
            error: None,
            counters: reader::Counters::default(),
        }
    }

    /// Lets time pass until the next event, or until `at`.
    fn step(&self, at: Option<Instant>) {
        // Something arrived while another program ran.
        if self.sim.has_woken() {
            return;
        }
        match (self.sim.deadline(), at) {
            (Some(event), Some(at)) if at < event => self.sim.advance(at),
            (Some(_), _) => assert!(self.sim.step()),
            (None, Some(at)) => self.sim.advance(at),
            (None, None) => panic!("everybody waits for ever"),
        }
        assert!(self.sim.events() < MOST_EVENTS, "a run without end");
    }

    /// Lets each program run, and time pass until the next event, for a second at most.
    fn turn(&self, publisher: &mut Publisher<SoftSim>, pulls: &mut [Pull]) {
        publisher.progress().expect("the publisher goes on");
        pulls.iter_mut().for_each(|pull| pull.progress(|_| {}));
        let soon = self.sim.now().after(Duration::from_secs(1));
        let at = pulls.iter().filter_map(Pull::next_timeout).chain(publisher.next_timeout());
        self.step(at.chain([soon]).min());
    }

    /// Runs until all readers have everything, or have failed.
    fn run(&self, publisher: &mut Publisher<SoftSim>, pulls: &mut [Pull]) {
        while pulls.iter().any(Pull::is_under_way) {
            self.turn(publisher, pulls);
        }
    }

    /// Ends everything, and returns whether nothing is left.
    fn is_empty(&self) -> bool {
        // Messages that are still in flight at the end arrive meanwhile.
        self.sim.advance(self.sim.now().after(Duration::from_secs(600)));
        (1..=self.hosts.len() as u8)
            .all(|host| self.sim.fabric().resources(address(host)) == Resources::default())
    }
}

impl Pull {
    fn is_under_way(&self) -> bool {
        self.error.is_none() && !self.done
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.reader.as_ref().map(Reader::next_timeout)
    }

    fn progress(&mut self, mut take: impl FnMut(&mut Option<Landed<SoftSim>>)) {
        if self.is_under_way()
            && let Err(error) = self.attempt(&mut take)
        {
            self.reader = None;
            self.error = Some(error);
        }
    }

    fn attempt(&mut self, take: &mut impl FnMut(&mut Option<Landed<SoftSim>>)) -> Result<(), Error> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                let domain = self.domain.clone();
                none.insert(Reader::connect(&self.host, self.to, self.config.clone(), self.have, domain)?)
            }
        };
        let worked = reader.progress(self.room);
        while let Some(landed) = reader.poll() {
            assert!(landed.bytes.len() <= CHUNK.max(reader::AREA) as usize);
            self.bytes.extend_from_slice(&landed.bytes);
            let mut landed = Some(landed);
            take(&mut landed);
            if let Some(landed) = landed {
                reader.recycle(landed.region);
            }
        }
        self.have = reader.have();
        self.counters = reader.counters();
        worked?;
        if reader.is_done() {
            self.done = true;
            self.reader = None;
        }
        Ok(())
    }
}
