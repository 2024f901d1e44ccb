//! The end of a session, and the verdict on the target that follows from it.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use suite::verdict::{lenient, pass};
use suite::{Judged, Stop};

use super::{Heard, Session};
use crate::blackbox::context::Context;
use crate::blackbox::results::Teardown;
use crate::blackbox::target::{Exit, Running, with_last_lines};
use crate::peer::Incoming;

/// How long a client is answered after the case has made its point.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// How long a target is kept waiting that may wait or end the connection.
pub(in crate::blackbox) const KEPT: Duration = Duration::from_secs(2);

impl<B: Descriptors> Session<'_, B> {
    /// Shows that the target took no harm: does an exchange, and ends the connection in order.
    ///
    /// # Errors
    /// The target took harm.
    pub fn unharmed(mut self) -> Judged {
        self.exchange()?;
        self.leave()
    }

    /// Ends the connection in order: leaves a server, and answers a client until it leaves.
    ///
    /// # Errors
    /// The target reports a failure.
    pub fn leave(mut self) -> Judged {
        if self.client.is_none() {
            return self.part();
        }
        match self.serve()? {
            ClientEnd::Itself => self.is_content(),
            ClientEnd::Never => {
                self.dismiss()?;
                if let Some(Exit::Crashed(how)) = self.exit() {
                    return Err(self.crashed(&how));
                }
                Ok(pass(format!("goes on ({} commands)", self.responder.answered)))
            }
        }
    }

    /// Answers a client until it leaves, disconnects, and ends with success.
    ///
    /// # Errors
    /// The client does not come to an end, or reports a failure.
    pub fn comes_to_an_end(mut self) -> Judged {
        match self.serve()? {
            ClientEnd::Never => Err(Stop::undecided(format!(
                "the client did not come to an end within {} commands; it should do less",
                self.responder.answered
            ))),
            ClientEnd::Itself if self.context.teardown.get() != Some(Teardown::Clean) => {
                Err(Stop::unmet(format!("no answer to the disconnect within {:?}", self.context.patience)))
            }
            ClientEnd::Itself => self.is_content(),
        }
    }

    /// Answers a client until it leaves. Stops when it has been answered long enough, with a command of it not answered, if it sends
    /// another: a client that is disconnected from then hears of it where it waits for the reply.
    fn serve(&mut self) -> Result<ClientEnd, Stop> {
        let begun = Instant::now();
        while !self.responder.quit {
            let enough = self.responder.answered >= self.enough || begun.elapsed() >= LONG_ENOUGH;
            match self.hear()? {
                Heard::End => {
                    self.context.note(Teardown::Clean);
                    return Ok(ClientEnd::Itself);
                }
                Heard::Nothing if enough => return Ok(ClientEnd::Never),
                Heard::Nothing => return Err(self.silent_client()),
                Heard::Commands { .. } if enough && !self.responder.quit => return Ok(ClientEnd::Never),
                Heard::Commands { replies } => self.peer.send_bytes(&replies)?,
            }
        }
        // It has said that it leaves, and a server disconnects then.
        self.dismiss()?;
        Ok(ClientEnd::Itself)
    }

    /// Disconnects from a target that may be leaving by itself just now, and waits for the end.
    ///
    /// # Errors
    /// What comes meanwhile cannot be read.
    pub fn dismiss(&mut self) -> Result<(), Stop> {
        // Refused if the target disconnected first.
        let _left = self.peer.disconnect();
        let ended = self.awaits_end(self.context.patience)? == End::Disconnected;
        self.context.note(if ended { Teardown::Clean } else { Teardown::Unclean });
        Ok(())
    }

    /// Waits for the end of a client that has left, which must report success.
    ///
    /// # Errors
    /// It does not.
    pub fn is_content(&mut self) -> Judged {
        let answered = self.responder.answered;
        match self.exit() {
            Some(Exit::Success) => Ok(pass(format!("{answered} commands"))),
            None if !self.is_observed() => Ok(pass(format!("{answered} commands"))),
            None => Err(Stop::hung(self.with_last_lines(format!(
                "the client left after {answered} commands, and did not end within {:?}",
                self.context.patience
            )))),
            Some(Exit::Crashed(how)) => Err(self.crashed(&how)),
            Some(Exit::Unsupported) => Err(Stop::unsupported("the client says so (status 89)")),
            Some(Exit::Failure(what)) => {
                Err(Stop::unmet(format!("after {answered} commands the client was not content: {what}")))
            }
        }
    }

    fn crashed(&self, how: &str) -> Stop {
        self.context.note(Teardown::Crashed);
        Stop::died(format!("the client crashed after {} commands: {how}", self.responder.answered))
    }

    fn is_observed(&self) -> bool {
        self.client.as_ref().is_some_and(|client| client.is_observed())
    }

    /// Disconnects from a server, and waits for its disconnect.
    fn part(&mut self) -> Judged {
        let mut early = false;
        while let Some(incoming) = self.peer.receive_within(Duration::ZERO)? {
            early |= matches!(incoming, Incoming::Gone(_));
        }
        if early {
            self.context.note(Teardown::WrongSide);
            return Err(Stop::unmet("it left in the middle of the connection"));
        }
        self.peer.disconnect()?;
        let teardown = if self.awaits_end(self.context.patience)? == End::Disconnected {
            Teardown::Clean
        } else {
            Teardown::Unclean
        };
        self.context.note(teardown);
        Ok(pass(""))
    }

    /// Waits until the target ends this connection, as it must.
    ///
    /// # Errors
    /// It does not.
    pub fn ends(self) -> Judged {
        self.ends_watched(|| {})
    }

    /// Waits until the target ends this connection, as it must. Calls `look` all the while, and once after the end.
    ///
    /// # Errors
    /// It does not.
    pub fn ends_watched(mut self, mut look: impl FnMut()) -> Judged {
        let deadline = Instant::now() + self.context.patience;
        let end = loop {
            look();
            let left = deadline.saturating_duration_since(Instant::now());
            match self.awaits_end(left.min(Duration::from_millis(20)))? {
                End::None if !left.is_zero() => {}
                end => break end,
            }
        };
        look();
        match end {
            End::Disconnected => self.context.note(Teardown::Clean),
            End::Failed => self.context.note(Teardown::Unclean),
            End::None => {
                self.context.note(Teardown::Unclean);
                return Err(self.still_there());
            }
        }
        self.reports()
    }

    /// Accepts either way of the target: to end the connection, as it should, or to serve it on.
    ///
    /// # Errors
    /// The target does neither.
    pub fn ends_or_serves(mut self) -> Judged {
        match self.awaits_end(self.context.patience.min(Duration::from_secs(2)))? {
            End::None => {
                self.unharmed()?;
                Ok(lenient("it serves the connection on"))
            }
            end => {
                self.context.note(if end == End::Disconnected { Teardown::Clean } else { Teardown::Unclean });
                self.reports()
            }
        }
    }

    /// Judges how a client reports that something went wrong; a server need not report.
    fn reports(&mut self) -> Judged {
        if self.client.is_none() {
            return Ok(pass("it ended the connection"));
        }
        self.tells_of_failure()
    }

    /// Judges how a client reports that it was cut off.
    ///
    /// # Errors
    /// The client crashes or hangs.
    pub fn tells_of_failure(&mut self) -> Judged {
        reported(self.context, self.client.as_deref_mut(), self.context.patience)
    }

    /// Releases the connection without a disconnect, as a process that is killed does, and judges how a client reports it.
    ///
    /// # Errors
    /// The client crashes or hangs.
    pub fn vanish(mut self) -> Judged {
        let (context, mut client) = (self.context, self.client.take());
        drop(self);
        context.note(Teardown::Unclean);
        reported(context, client.as_deref_mut(), context.patience)
    }

    /// Adds the last lines of the client under test to what went wrong.
    pub(super) fn with_last_lines(&self, reason: String) -> String {
        let lines = self.client.as_ref().map(|client| client.last_lines()).unwrap_or_default();
        with_last_lines(reason, &lines)
    }

    fn exit(&mut self) -> Option<Exit> {
        let patience = self.context.patience;
        self.client.as_mut().and_then(|client| client.ended(patience))
    }

    /// Leaves the connection as it is until the target ends it, for 2 s at most: a target may wait without end.
    pub(in crate::blackbox) fn lasts(&mut self) {
        let _either = self.awaits_end(self.context.patience.min(KEPT));
    }

    /// Returns how the connection ends within `patience`.
    fn awaits_end(&mut self, patience: Duration) -> Result<End, Stop> {
        let mut deadline = Instant::now() + patience;
        let mut end = End::None;
        while !self.gone {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.peer.receive_within(left)? {
                Some(Incoming::Gone(_)) => self.gone = true,
                // The queue pair is of no more use. A target that knows says so soon.
                Some(Incoming::Failed(_)) if end == End::None => {
                    end = End::Failed;
                    deadline = Instant::now() + self.context.patience.min(Duration::from_secs(1));
                }
                Some(_) => {}
                None => return Ok(end),
            }
        }
        Ok(End::Disconnected)
    }

    fn still_there(&mut self) -> Stop {
        let within = self.context.patience;
        if self.client.is_some() {
            return match self.client.as_mut().and_then(|client| client.ended(Duration::ZERO)) {
                Some(Exit::Crashed(how)) => {
                    self.context.note(Teardown::Crashed);
                    Stop::died(format!("the client crashed: {how}"))
                }
                Some(exit) => Stop::unmet(format!("the client ended without a disconnect: {exit}")),
                None => Stop::unmet(format!("it did not end the connection within {within:?}")),
            };
        }
        self.peer.set_patience(within.min(Duration::from_secs(1)));
        let serves = self.exchange().is_ok();
        Stop::unmet(if serves {
            format!("it did not end the connection within {within:?}, and serves it on")
        } else {
            format!("it did not end the connection within {within:?}, and serves it no more")
        })
    }

    /// Returns whether the client under test ends within `patience`.
    pub fn await_exit(&mut self, patience: Duration) -> bool {
        self.client.as_mut().is_none_or(|client| !client.is_observed() || client.ended(patience).is_some())
    }
}

/// How a client leaves.
enum ClientEnd {
    /// By itself, or because it asked for it.
    Itself,
    /// It did not leave in the time given.
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Disconnected,
    Failed,
    None,
}

/// Judges how a client under test reports that it was cut off, or got no connection: it must end with an error, and not crash. A
/// client that asks for another connection has noticed.
///
/// # Errors
/// It does not.
pub fn reported<B: Descriptors>(
    context: &Context<'_, B>,
    client: Option<&mut (dyn Running + 'static)>,
    patience: Duration,
) -> Judged {
    let Some(client) = client else { return Ok(pass("")) };
    if !client.is_observed() {
        return Ok(pass("it ended the connection"));
    }
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match client.ended(left.min(Duration::from_millis(50))) {
            Some(Exit::Failure(what)) => return Ok(pass(what)),
            Some(Exit::Success) => return Ok(lenient("the client ended, and reported success")),
            Some(Exit::Unsupported) => return Err(Stop::unsupported("the client says so (status 89)")),
            Some(Exit::Crashed(how)) => {
                context.note(Teardown::Crashed);
                return Err(Stop::died(format!("the client crashed: {how}")));
            }
            None if context.is_asked_again()? => return Ok(pass("it asks for another connection")),
            None if left.is_zero() => {
                let reason = format!("the client did not end within {patience:?}");
                return Err(Stop::hung(with_last_lines(reason, &client.last_lines())));
            }
            None => {}
        }
    }
}
