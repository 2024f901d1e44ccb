//! One end of a connection, with the program that uses it and how it ended; and the listening end.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use rdma_conn::{ConnectionId, Endpoint, Error, Listener, Options};
use rdma_softsim::SoftSim;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::app::{App, EndCause, Ending, Handle};

/// A connection's end, with its program.
pub struct End {
    /// Its host.
    pub host: u32,
    /// The scenario's connection that it belongs to.
    pub connection: usize,
    /// Whether the connection is established. The program begins then.
    open: bool,
    ending: Option<Ending>,
    app: App,
    pair: Option<u32>,
}

impl End {
    /// Creates the end of a connection that is being established.
    pub const fn new(host: u32, connection: usize, app: App) -> Self {
        Self { host, connection, open: false, ending: None, app, pair: None }
    }

    /// Returns whether the program may run.
    pub const fn is_open(&self) -> bool {
        self.open && self.ending.is_none()
    }

    /// The connection is established.
    pub const fn open(&mut self) {
        self.open = true;
    }

    /// It has this queue pair.
    pub const fn found(&mut self, pair: u32) {
        self.pair = Some(pair);
    }

    /// Returns how it ended, if it has.
    pub const fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    /// The program.
    pub const fn app(&self) -> &App {
        &self.app
    }

    /// The number of its queue pair.
    pub const fn pair(&self) -> Option<u32> {
        self.pair
    }

    /// Forgets its queue pair, whose events were recorded: its number may be reused.
    pub const fn forget_pair(&mut self) {
        self.pair = None;
    }

    /// Records how it ended, unless it had ended before.
    pub fn over(&mut self, cause: EndCause) {
        if self.ending.is_none() {
            self.ending = Some(self.app.ending(cause));
        }
    }

    /// Returns when its program wants to run, regardless of its endpoint.
    pub fn next_wake(&self) -> Option<rdma_backend::time::Instant> {
        if self.is_open() { self.app.next_wake() } else { None }
    }

    /// Runs the program when the endpoint has an event for it, or its time has come. Returns true
    /// if it has ended. Between its steps a diligent event loop lets the endpoint progress again.
    pub fn run(&mut self, handle: &mut Handle<'_>, diligent: bool) -> bool {
        loop {
            match self.app.run(handle) {
                Ok(true) if diligent => drop(handle.endpoint.progress()),
                Ok(true) => {}
                Ok(false) => return false,
                Err(ending) => {
                    // An abandoned connection may be gone already.
                    let ending = if handle.abandoned { ending } else { self.app.checked(ending, handle) };
                    self.ending = Some(ending);
                    return true;
                }
            }
        }
    }
}

/// Returns whether a descriptor is readable now.
pub fn is_readable(descriptor: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    // poll(2): with a time of zero it does not block.
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// The listening end of a server whose connections have an endpoint each.
pub struct Acceptor {
    listener: Option<Listener<SoftSim>>,
}

impl Acceptor {
    /// Listens.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn open(backend: &SoftSim, address: SocketAddr, options: Options) -> Result<Self, Error> {
        let listener = Listener::bind_with(backend, address, options, rdma_conn::Limits::default())?;
        Ok(Self { listener: Some(listener) })
    }

    /// Returns whether its descriptor is readable.
    pub fn is_readable(&self) -> bool {
        self.listener.as_ref().is_some_and(is_readable)
    }

    /// Returns the next connection. A device that is gone closes the acceptor.
    pub fn accept(&mut self) -> Option<(Endpoint<SoftSim>, ConnectionId)> {
        match self.listener.as_ref()?.try_accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                // The next one comes when its descriptor reports it.
                tracing::debug!(%error, "a connection was not accepted");
                if matches!(error, Error::DeviceRemoved | Error::Device { .. }) {
                    self.listener = None;
                }
                None
            }
        }
    }
}
