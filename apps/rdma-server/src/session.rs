//! A transport with what is common to all: a state, handlers, a last error, and calls that wait.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::event_loop::Handler;
use crate::poller::{SourceId, wait_for};
use crate::transport::{Interest, Kind, Transport};

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionState {
    /// It was requested, and its handler has not been called yet.
    Connecting,
    /// A peer has connected. It was not accepted yet, or is in the handshake.
    Accepting,
    /// Bytes can flow.
    Connected,
    /// The end of the stream was read. If the peer has ended only its own direction, as a socket
    /// can and RDMA cannot, it still reads what is written.
    Closed,
    /// It has failed; see [`Session::last_error`].
    Error,
}

/// Which handler comes first in a turn if both are due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Barrier {
    /// The read handler: replies leave in the turn that made them.
    #[default]
    ReadFirst,
    /// The write handler: replies leave in the next turn, after work such as syncing a log. A call
    /// of [`EventLoop::process_pending`](crate::EventLoop::process_pending) counts as a turn, so do
    /// that work before it, too.
    WriteFirst,
}

/// One connection of an [`EventLoop`](crate::EventLoop). [`Read`] and [`Write`] never wait.
pub struct Session<S> {
    transport: Box<dyn Transport>,
    state: SessionState,
    failure: Option<Arc<io::Error>>,
    read_handler: Option<Handler<S>>,
    write_handler: Option<Handler<S>>,
    barrier: Barrier,
    pub(crate) loop_state: LoopState<S>,
}

pub(crate) struct LoopState<S> {
    /// Called once at the end of the handshake. `None` before the accept and after the call.
    pub(crate) handshake: Option<Handler<S>>,
    /// Nesting depth of this connection's running handlers.
    pub(crate) entered: u32,
    pub(crate) stage: Stage,
    pub(crate) registered: Option<Registered>,
    pub(crate) refusal: Option<&'static [u8]>,
    /// When the handshake or the close must have ended.
    pub(crate) deadline: Option<Instant>,
    pub(crate) timer: Option<Instant>,
    pub(crate) touched: bool,
    pub(crate) pending: bool,
}

/// How a loop learns that a connection can continue.
#[derive(Clone, Copy)]
pub(crate) enum Registered {
    Own(SourceId),
    WithDriver,
}

/// Whether the owner has closed the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Owned,
    /// Closed in one of its handlers.
    Leaving,
    /// Closed, with the last bytes on their way.
    Parting,
}

impl<S> Session<S> {
    pub(crate) fn new(transport: Box<dyn Transport>, state: SessionState) -> Self {
        Self {
            transport,
            state,
            failure: None,
            read_handler: None,
            write_handler: None,
            barrier: Barrier::ReadFirst,
            loop_state: LoopState {
                handshake: None,
                entered: 0,
                stage: Stage::Owned,
                registered: None,
                refusal: None,
                deadline: None,
                timer: None,
                touched: false,
                pending: false,
            },
        }
    }

    /// Returns the kind of this connection.
    pub fn kind(&self) -> Kind {
        self.transport.kind()
    }

    /// Returns the state.
    pub const fn state(&self) -> SessionState {
        self.state
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<Address> {
        self.transport.local_addr()
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> Option<Address> {
        self.transport.peer_addr()
    }

    /// Returns whether the peer is known to be on this machine: a Unix socket, the loopback
    /// interface, or for RDMA a path that leads back to the address it leaves from (VR-SEC-008).
    pub fn is_local(&self) -> bool {
        self.transport.is_local()
    }

    /// Returns the peer's certificate as DER, or `None` without TLS.
    pub fn peer_certificate(&self) -> Option<&[u8]> {
        self.transport.peer_certificate()
    }

    /// Returns the error that made the state [`SessionState::Error`].
    pub fn last_error(&self) -> Option<&io::Error> {
        self.failure.as_deref()
    }

    /// Calls `handler` whenever a read would not have to wait. `None` removes it.
    pub fn set_read_handler(&mut self, handler: Option<Handler<S>>) {
        self.read_handler = handler;
    }

    /// Calls `handler` whenever a write would not have to wait. `None` removes it.
    pub fn set_write_handler(&mut self, handler: Option<Handler<S>>, barrier: Barrier) {
        self.write_handler = handler;
        self.barrier = barrier;
    }

    /// Ends both directions once the peer has all written bytes. The read handler is called for the
    /// end. The connection must still be closed.
    pub fn shutdown(&mut self, linger: Duration) {
        self.transport.shutdown(linger);
    }

    /// Reads until `into` is full, waiting for at most `timeout`. No handler is called meanwhile.
    ///
    /// # Errors
    /// Returns [`TimedOut`](ErrorKind::TimedOut), [`UnexpectedEof`](ErrorKind::UnexpectedEof), or
    /// the error that ended the connection. Bytes read before are lost.
    pub fn sync_read(&mut self, into: &mut [u8], timeout: Duration) -> io::Result<()> {
        let until = deadline(timeout);
        let mut rest = into;
        while !rest.is_empty() {
            let read = self.wait_until(Interest::READ, until, |connection| connection.read(rest))?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            rest = rest.get_mut(read..).unwrap_or_default();
        }
        Ok(())
    }

    /// Writes all of `from`, waiting for at most `timeout`. No handler is called meanwhile.
    ///
    /// # Errors
    /// Returns [`TimedOut`](ErrorKind::TimedOut), or the error that ended the connection. Some
    /// bytes may have been written.
    pub fn sync_write(&mut self, from: &[u8], timeout: Duration) -> io::Result<()> {
        let until = deadline(timeout);
        let mut rest = from;
        while !rest.is_empty() {
            let written = self.wait_until(Interest::WRITE, until, |connection| connection.write(rest))?;
            rest = rest.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads a line of at most `limit` bytes, without its `\n` or `\r\n`, for at most `timeout`.
    ///
    /// # Errors
    /// [`InvalidData`](ErrorKind::InvalidData) for a longer line, or as [`Session::sync_read`].
    pub fn sync_read_line(&mut self, limit: usize, timeout: Duration) -> io::Result<Vec<u8>> {
        let until = deadline(timeout);
        let mut line = Vec::new();
        loop {
            // One byte at a time, because bytes after the line must stay.
            let mut byte = [0];
            if self.wait_until(Interest::READ, until, |connection| connection.read(&mut byte))? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if byte == *b"\n" {
                line.pop_if(|last| *last == b'\r');
                return Ok(line);
            }
            if line.len() == limit {
                let longer = format!("the line is longer than {limit} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, longer));
            }
            line.extend(byte);
        }
    }

    fn wait_until<T>(
        &mut self,
        want: Interest,
        until: Option<Instant>,
        mut step: impl FnMut(&mut Self) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match step(self) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // After the step, so that a call without patience tries once.
            if left == Some(Duration::ZERO) {
                return Err(ErrorKind::TimedOut.into());
            }
            wait_for(&mut *self.transport, want, left)?;
        }
    }

    pub(crate) fn wait_established(&mut self, timeout: Duration) -> io::Result<()> {
        self.wait_until(Interest::BOTH, deadline(timeout), |connection| {
            if connection.go_on_establishing() { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
        })?;
        self.check()
    }

    /// Continues the handshake. Returns true at its end, successful or not.
    pub(crate) fn go_on_establishing(&mut self) -> bool {
        match self.transport.establish() {
            Ok(true) => self.state = SessionState::Connected,
            Ok(false) => return false,
            Err(error) => self.fail(error),
        }
        true
    }

    pub(crate) fn fail(&mut self, error: io::Error) {
        self.state = SessionState::Error;
        self.failure = Some(Arc::new(error));
    }

    /// Returns the failure, as a separate error for each caller.
    fn check(&self) -> io::Result<()> {
        // An `io::Error` cannot be cloned, so each caller gets one around the shared cause.
        match &self.failure {
            Some(failure) => Err(io::Error::new(failure.kind(), Arc::clone(failure))),
            None => Ok(()),
        }
    }

    fn book(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        match result {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Err(error)
            }
            Err(error) => {
                // Every later call returns it, too.
                self.fail(error);
                self.check().map(|()| 0)
            }
            done => done,
        }
    }

    pub(crate) fn half_closes(&self) -> bool {
        self.transport.half_closes()
    }

    pub(crate) fn economize(&mut self, why: &'static [u8]) {
        self.transport.economize();
        self.loop_state.refusal = Some(why);
    }

    pub(crate) fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    pub(crate) fn forget_handlers(&mut self) {
        self.read_handler = None;
        self.write_handler = None;
        self.loop_state.handshake = None;
    }

    pub(crate) const fn is_establishing(&self) -> bool {
        matches!(self.state, SessionState::Connecting | SessionState::Accepting)
    }

    fn wanted(&self) -> Interest {
        match self.loop_state.stage {
            // Closing continues when the peer has ended, or has sent bytes to discard.
            Stage::Parting => Interest::READ,
            // A handshake continues when something has arrived, not when something could be done.
            _ if self.is_establishing() => Interest::NONE,
            _ => Interest { read: self.read_handler.is_some(), write: self.write_handler.is_some() },
        }
    }

    pub(crate) fn due(&mut self) -> [Option<Due>; 2] {
        let ready = self.transport.ready().and(self.wanted());
        let due = [ready.read.then_some(Due::Read), ready.write.then_some(Due::Write)];
        match self.barrier {
            Barrier::ReadFirst => due,
            Barrier::WriteFirst => [due[1], due[0]],
        }
    }

    pub(crate) const fn handler(&self, due: Due) -> Option<Handler<S>> {
        match due {
            Due::Read => self.read_handler,
            Due::Write => self.write_handler,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Read,
    Write,
}

/// Returns `None` for a time that never comes.
fn deadline(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

impl<S> Read for Session<S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.state {
            SessionState::Connecting | SessionState::Accepting => Err(ErrorKind::NotConnected.into()),
            SessionState::Closed => Ok(0),
            SessionState::Error => self.check().map(|()| 0),
            SessionState::Connected if into.is_empty() => Ok(0),
            SessionState::Connected => {
                let result = self.transport.read(into);
                if matches!(result, Ok(0)) {
                    self.state = SessionState::Closed;
                }
                self.book(result)
            }
        }
    }
}

impl<S> Write for Session<S> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.state {
            SessionState::Connecting | SessionState::Accepting => Err(ErrorKind::NotConnected.into()),
            SessionState::Closed if !self.half_closes() => Err(ErrorKind::BrokenPipe.into()),
            SessionState::Error => self.check().map(|()| 0),
            _ if from.iter().all(|slice| slice.is_empty()) => Ok(0),
            SessionState::Connected | SessionState::Closed => {
                match self.transport.write(from) {
                    // The peer has left. Bytes that it sent before can still be read.
                    Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(error),
                    result => self.book(result),
                }
            }
        }
    }

    /// A connection holds nothing back.
    fn flush(&mut self) -> io::Result<()> {
        self.check()
    }
}

impl<S> std::fmt::Debug for Session<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("kind", &self.kind())
            .field("state", &self.state)
            .field("peer", &self.peer_addr())
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}
