//! How a session ends, and what of that the target has to answer for.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use suite::verdict::{lenient, pass};
use suite::{Judged, Stop};

use super::Session;
use crate::blackbox::context::Context;
use crate::blackbox::results::Teardown;
use crate::blackbox::target::{Exit, Running};
use crate::peer::Incoming;

/// How long a client is answered after the case has shown what it has to show.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// How long a target is kept waiting that may wait or end the connection.
pub(in crate::blackbox) const KEPT: Duration = Duration::from_secs(2);

impl<B: Descriptors> Session<'_, B> {
    /// The target must have taken no harm: it talks, and the connection ends when it should.
    ///
    /// # Errors
    /// It has.
    pub fn unharmed(mut self) -> Judged {
        self.exchange()?;
        self.leave()
    }

    /// Ends the connection as one does: a server is left, a client leaves when it has done what it came for.
    ///
    /// # Errors
    /// The target is not content.
    pub fn leave(mut self) -> Judged {
        if self.client.is_none() {
            return self.part();
        }
        match self.serve()? {
            Leaving::Itself => self.is_content(),
            Leaving::Never => {
                self.dismiss()?;
                if let Some(Exit::Crashed(how)) = self.exit() {
                    return Err(self.crashed(&how));
                }
                Ok(pass(format!("goes on ({} commands)", self.responder.answered)))
            }
        }
    }

    /// A client does what it came for, leaves, and ends.
    ///
    /// # Errors
    /// It does not, or is not content.
    pub fn comes_to_an_end(mut self) -> Judged {
        match self.serve()? {
            Leaving::Never => Err(Stop::undecided(format!(
                "the client did not come to an end within {} commands; it should do less",
                self.responder.answered
            ))),
            Leaving::Itself if self.context.teardown.get() != Some(Teardown::Clean) => {
                Err(Stop::unmet(format!("no answer to the disconnect within {:?}", self.context.patience)))
            }
            Leaving::Itself => self.is_content(),
        }
    }

    /// Answers a client until it leaves, or has been answered long enough.
    fn serve(&mut self) -> Result<Leaving, Stop> {
        let begun = Instant::now();
        while self.responder.answered < self.enough && begun.elapsed() < LONG_ENOUGH && !self.responder.quit {
            if !self.exchange()? {
                self.context.note(Teardown::Clean);
                return Ok(Leaving::Itself);
            }
        }
        if !self.responder.quit {
            return Ok(Leaving::Never);
        }
        // It has said that it leaves, and a server disconnects then.
        self.dismiss()?;
        Ok(Leaving::Itself)
    }

    /// Disconnects from a client, which may be leaving by itself just now.
    fn dismiss(&mut self) -> Result<(), Stop> {
        // Refused if it was the first.
        let _left = self.peer.disconnect();
        let ended = self.awaits_end(self.context.patience)? == End::Disconnected;
        self.context.note(if ended { Teardown::Clean } else { Teardown::Unclean });
        Ok(())
    }

    /// A client that has left must end, and say that all was well.
    ///
    /// # Errors
    /// It does not.
    pub fn is_content(&mut self) -> Judged {
        let answered = self.responder.answered;
        match self.exit() {
            Some(Exit::Success) => Ok(pass(format!("{answered} commands"))),
            None if !self.is_observed() => Ok(pass(format!("{answered} commands"))),
            None => Err(Stop::hung(format!(
                "the client left after {answered} commands, and did not end within {:?}",
                self.context.patience
            ))),
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

    /// Disconnects, and waits for the answer to that.
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

    /// The target must end this connection.
    ///
    /// # Errors
    /// It does not.
    pub fn ends(self) -> Judged {
        self.ends_watched(|| {})
    }

    /// The target must end this connection; `look` is called all the while, and once when it has.
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

    /// The target may end the connection or serve it on; the first is what it should do.
    ///
    /// # Errors
    /// It does neither.
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

    /// A client must say that something went wrong, and not by crashing.
    fn reports(&mut self) -> Judged {
        if self.client.is_none() {
            return Ok(pass("it ended the connection"));
        }
        self.tells_of_failure()
    }

    /// A client, which has been cut off, says so.
    ///
    /// # Errors
    /// It crashes or hangs.
    pub fn tells_of_failure(&mut self) -> Judged {
        reported(self.context, self.client.as_deref_mut(), self.context.patience)
    }

    /// Gives everything back, as a process that ends, and asks a client what it makes of that.
    ///
    /// # Errors
    /// It crashes or hangs.
    pub fn vanish(mut self) -> Judged {
        let (context, mut client) = (self.context, self.client.take());
        drop(self);
        context.note(Teardown::Unclean);
        reported(context, client.as_deref_mut(), context.patience)
    }

    fn exit(&mut self) -> Option<Exit> {
        let patience = self.context.patience;
        self.client.as_mut().and_then(|client| client.ended(patience))
    }

    /// Keeps the connection as it is until the target ends it, but not for long: a target that waits for a peer without end is
    /// not wrong.
    pub(in crate::blackbox) fn lasts(&mut self) {
        let _either = self.awaits_end(self.context.patience.min(KEPT));
    }

    /// How the connection ends within `patience`.
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

    /// Whether the client under test ends within `patience`.
    pub fn await_exit(&mut self, patience: Duration) -> bool {
        self.client.as_mut().is_none_or(|client| !client.is_observed() || client.ended(patience).is_some())
    }
}

/// How a client comes to leave.
enum Leaving {
    /// By itself, or because it asked for it.
    Itself,
    /// It would go on for ever.
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Disconnected,
    Failed,
    None,
}

/// A client under test that was cut off, or got no connection, must say so, and not by crashing. One that tries again has
/// noticed.
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
                return Err(Stop::hung(format!("the client did not end within {patience:?}")));
            }
            None => {}
        }
    }
}
