//! One end of a connection: what an event loop does for it.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::{Dial, Error, Link, Listener, Options};
use rdma_proto::time::Instant;
use rdma_softsim::{Random, SoftSim};

use super::app::{App, Ending, Face, How};

/// A connection's end, with the program that uses it.
pub struct End {
    /// Its host.
    pub host: u32,
    /// Which of the scenario's connections it belongs to.
    pub connection: usize,
    stage: Stage,
    app: App,
    /// The number of its queue pair, once there was one.
    pair: Option<u32>,
}

enum Stage {
    Waiting {
        at: Instant,
        dial: Box<dyn FnOnce() -> Result<Dial<SoftSim>, Error>>,
    },
    Dialing(Box<Dial<SoftSim>>),
    Open(Box<Link<SoftSim>>),
    /// An endpoint drives it. The program begins when it is open.
    Seated {
        open: bool,
    },
    Over(Ending),
}

/// How long connecting may take.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(20);

impl End {
    /// A client that begins to connect at a certain time.
    pub fn dial(
        backend: SoftSim,
        peer: SocketAddr,
        options: Options,
        at: Instant,
        (host, connection): (u32, usize),
        app: App,
    ) -> Self {
        let dial = Box::new(move || Dial::new(&backend, peer, None, DIAL_TIMEOUT, options));
        Self { host, connection, stage: Stage::Waiting { at, dial }, app, pair: None }
    }

    /// The end of an accepted connection.
    pub fn accepted(link: Link<SoftSim>, host: u32, connection: usize, app: App) -> Self {
        let pair = Some(link.queue_pair_number());
        Self { host, connection, stage: Stage::Open(Box::new(link)), app, pair }
    }

    /// The end of a connection that an endpoint drives.
    pub const fn seated(host: u32, connection: usize, app: App) -> Self {
        Self { host, connection, stage: Stage::Seated { open: false }, app, pair: None }
    }

    /// Whether an endpoint has said that the connection is there.
    pub const fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Seated { open: true })
    }

    /// An endpoint has said that the connection is there.
    pub fn open(&mut self) {
        if let Stage::Seated { open } = &mut self.stage {
            *open = true;
        }
    }

    /// It has this queue pair.
    pub const fn found(&mut self, pair: u32) {
        self.pair = Some(pair);
    }

    /// How it ended, if it did.
    pub const fn ending(&self) -> Option<&Ending> {
        match &self.stage {
            Stage::Over(ending) => Some(ending),
            _ => None,
        }
    }

    /// The program.
    pub const fn app(&self) -> &App {
        &self.app
    }

    /// The connection, while there is one.
    pub fn link(&self) -> Option<&Link<SoftSim>> {
        match &self.stage {
            Stage::Open(link) => Some(link),
            _ => None,
        }
    }

    /// The number of its queue pair.
    pub const fn pair(&self) -> Option<u32> {
        self.pair
    }

    /// All was noted of its queue pair, whose number may soon be another's.
    pub const fn forget_pair(&mut self) {
        self.pair = None;
    }

    /// Its process is gone, and everything with it.
    pub fn kill(&mut self) {
        self.over(How::Gone);
    }

    /// It ended, if it had not.
    pub fn over(&mut self, how: How) {
        if self.ending().is_none() {
            self.stage = Stage::Over(self.app.ending(how));
        }
    }

    /// What its descriptors would say.
    pub fn is_readable(&self) -> bool {
        match &self.stage {
            Stage::Waiting { .. } | Stage::Seated { .. } | Stage::Over(_) => false,
            Stage::Dialing(dial) => dial.sources().is_some_and(|(events, completions)| {
                events.is_readable() || completions.is_some_and(|queue| queue.is_readable())
            }),
            Stage::Open(link) => link.event_channel().is_readable() || link.completion_queue().is_readable(),
        }
    }

    /// When it wants to run, if its descriptors stay silent.
    pub fn next_wake(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Waiting { at, .. } => Some(*at),
            Stage::Dialing(dial) => Some(dial.deadline()),
            Stage::Open(link) => link.next_timeout().into_iter().chain(self.app.next_wake()).min(),
            Stage::Seated { open: true } => self.app.next_wake(),
            Stage::Seated { open: false } | Stage::Over(_) => None,
        }
    }

    /// One turn of the event loop: takes what woke it, does what can be done, and is ready to sleep again. This is all
    /// that ever runs, so a wake-up that is lost stays lost. Says whether more than one thing had woken it.
    pub fn run(&mut self, random: &mut Random) -> bool {
        let mut several = false;
        let stage = std::mem::replace(&mut self.stage, Stage::Over(self.app.ending(How::Gone)));
        self.stage = match stage {
            Stage::Waiting { dial, .. } => match dial() {
                Ok(dial) => self.dialed(Box::new(dial), random),
                Err(error) => Stage::Over(self.app.ending(How::Failed(error))),
            },
            Stage::Dialing(dial) => self.dialed(dial, random),
            Stage::Open(mut link) => {
                // Which descriptor is looked at first is the poller's affair.
                let events_first = random.chance(1, 2);
                several = link.event_channel().is_readable() && link.completion_queue().is_readable();
                if events_first && link.event_channel().is_readable() {
                    link.take_events();
                }
                if link.completion_queue().is_readable() {
                    link.take_completion_events();
                }
                if !events_first && link.event_channel().is_readable() {
                    link.take_events();
                }
                self.opened(link, random)
            }
            other @ (Stage::Seated { .. } | Stage::Over(_)) => other,
        };
        several
    }

    fn dialed(&mut self, mut dial: Box<Dial<SoftSim>>, random: &mut Random) -> Stage {
        match dial.progress() {
            Ok(Some(link)) => self.opened(Box::new(link), random),
            Ok(None) => Stage::Dialing(dial),
            Err(error) => Stage::Over(self.app.ending(How::Failed(error))),
        }
    }

    /// Between two things that the program does, some event loops look at the connection again. It must not need that.
    fn opened(&mut self, mut link: Box<Link<SoftSim>>, random: &mut Random) -> Stage {
        self.pair = Some(link.queue_pair_number());
        let diligent = random.chance(1, 2);
        let mut looks = true;
        loop {
            if looks {
                link.arm();
                link.progress();
            }
            looks = diligent;
            match self.app.run(&mut *link) {
                Ok(true) => {}
                Ok(false) => return Stage::Open(link),
                Err(ending) => return Stage::Over(checked(ending, &mut *link)),
            }
        }
    }

    /// What the program does when an endpoint has told something, or its time has come; true if that was the last.
    pub fn run_seated(&mut self, face: &mut impl Face) -> bool {
        loop {
            match self.app.run(face) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(ending) => {
                    self.stage = Stage::Over(checked(ending, face));
                    return true;
                }
            }
        }
    }
}

/// An error must be the same one from then on.
fn checked(ending: Ending, face: &mut impl Face) -> Ending {
    if let How::Failed(error) = &ending.how {
        let again = face.read(&mut [0]).err().map(|error| error.to_string());
        if again != Some(error.to_string()) || face.check().is_ok() {
            let how = How::Failed(rdma_proto::Error::Unreachable("an error that was not sticky").into());
            return Ending { how, ..ending };
        }
    }
    ending
}

/// The listening end.
pub struct Door {
    listener: Option<Listener<SoftSim>>,
}

impl Door {
    /// Listens.
    pub fn open(backend: &SoftSim, address: SocketAddr, options: Options) -> Result<Self, Error> {
        Ok(Self { listener: Some(Listener::bind(backend, address, options)?) })
    }

    /// What its descriptor would say.
    pub fn is_readable(&self) -> bool {
        self.listener.as_ref().is_some_and(|listener| listener.event_channel().is_readable())
    }

    /// The next connection. A device that is gone closes the door.
    pub fn accept(&mut self) -> Option<Link<SoftSim>> {
        match self.listener.as_ref()?.try_accept() {
            Ok(link) => link,
            Err(error) => {
                // It goes on with the next one, when its descriptor says that there is one.
                tracing::debug!(%error, "a connection was not accepted");
                if matches!(error, Error::DeviceRemoved | Error::Device { .. }) {
                    self.listener = None;
                }
                None
            }
        }
    }
}
