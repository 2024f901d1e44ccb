//! The end of a session, and the resulting verdict on the target.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use suite::hex;
use suite::verdict::{lenient, pass};
use suite::{Cause, Judged, Pass, Stop, Verdict};

use super::{Heard, Session};
use crate::blackbox::context::Context;
use crate::blackbox::hints::NOT_CONTENT;
use crate::blackbox::results::Teardown;
use crate::blackbox::target::{Exit, Running, with_last_lines};
use crate::tester::Incoming;

/// How long a client is answered after the case has made its point.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// How long a target is kept waiting that may wait or end the connection.
pub(in crate::blackbox) const KEPT: Duration = Duration::from_secs(2);
/// After how many times its patience the suite calls a slow client hung.
const HUNG: u32 = 4;
/// Why a case about the end of a client does not apply to one that another program starts.
const UNSEEN: &str = "how the client ends cannot be seen from here (--exec shows it)";

impl<B: Descriptors> Session<'_, B> {
    /// Checks that the target is unharmed: does an exchange, and ends the connection in order.
    ///
    /// # Errors
    /// The target was harmed.
    pub fn unharmed(mut self) -> Judged {
        self.exchange()?;
        self.leave()
    }

    /// Ends the connection in order: disconnects from a server, or answers a client to its end.
    ///
    /// # Errors
    /// The target reports a failure.
    pub fn leave(mut self) -> Judged {
        self.leaves()
    }

    fn leaves(&mut self) -> Judged {
        if self.client.is_none() {
            return self.part();
        }
        match self.serve()? {
            ClientEnd::Itself => self.is_content(),
            ClientEnd::Never => {
                self.dismiss()?;
                if let Some(Exit::Crashed(how)) = self.exit(self.context.patience) {
                    return Err(self.crashed(&how));
                }
                Ok(pass(format!("goes on ({} commands)", self.responder.answered)))
            }
        }
    }

    /// Answers a client until it disconnects and ends with success.
    ///
    /// # Errors
    /// The client does not end, or reports a failure.
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

    /// Answers a client until it disconnects. After a long enough time, it leaves one command
    /// unanswered: a client that is then disconnected learns of it where it waits for the reply.
    pub(super) fn serve(&mut self) -> Result<ClientEnd, Stop> {
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
        // It has announced its end, and a server disconnects then.
        self.dismiss()?;
        Ok(ClientEnd::Itself)
    }

    /// Disconnects from a target that may be disconnecting at the same time, and waits for the end.
    ///
    /// # Errors
    /// Input that arrives meanwhile cannot be read.
    pub fn dismiss(&mut self) -> Result<(), Stop> {
        // Refused if the target disconnected first.
        let _left = self.peer.disconnect();
        let ended = self.awaits_end(self.context.patience)? == Notice::Disconnected;
        self.context.note(if ended { Teardown::Clean } else { Teardown::Unclean });
        Ok(())
    }

    /// Waits for the end of a client that has disconnected, which must report success.
    ///
    /// # Errors
    /// It does not.
    pub fn is_content(&mut self) -> Judged {
        let answered = self.responder.answered;
        if !self.is_observed() {
            return Ok(pass(format!("{answered} commands; what it made of the replies cannot be seen")));
        }
        let patience = self.context.patience;
        let exit = self.exit(patience);
        let is_late = exit.is_none();
        match exit.or_else(|| self.exit((HUNG - 1) * patience)) {
            Some(Exit::Success) if is_late => {
                Ok(lenient(format!("{answered} commands; the client took more than {patience:?} to end")))
            }
            Some(Exit::Success) => Ok(pass(format!("{answered} commands"))),
            None => Err(Stop::hung(self.with_last_lines(format!(
                "the client left after {answered} commands, and did not end within {:?}",
                HUNG * patience
            )))),
            Some(Exit::Crashed(how)) => Err(self.crashed(&how)),
            Some(Exit::Unsupported) => Err(Stop::unsupported("the client says so (status 89)")),
            Some(Exit::Failure(what)) => {
                Err(Stop::unmet(format!("after {answered} commands {NOT_CONTENT}{what}")))
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

    fn part(&mut self) -> Judged {
        let mut early = false;
        while let Some(incoming) = self.peer.receive_within(Duration::ZERO)? {
            match incoming {
                Incoming::Gone(_) => early = true,
                Incoming::Notified(_) => self.peer.absorb(incoming)?,
                _ => {}
            }
        }
        let rest = self.peer.take_received();
        if !rest.is_empty() {
            return Err(Stop::unmet(format!(
                "its immediates told of more bytes than its replies have: {} beyond them, {}",
                if rest.len() == 1 { "1 byte is".into() } else { format!("{} bytes are", rest.len()) },
                hex::start(&rest)
            )));
        }
        if early {
            self.context.note(Teardown::WrongSide);
            return Err(Stop::unmet("it ended the connection, which the suite still used"));
        }
        self.peer.disconnect()?;
        let ended = self.awaits_end(self.context.patience)? == Notice::Disconnected;
        self.context.note(if ended { Teardown::Clean } else { Teardown::Unclean });
        Ok(pass(""))
    }

    /// Waits until the target ends this connection, as required.
    ///
    /// # Errors
    /// It does not.
    pub fn ends(self) -> Judged {
        self.ends_watched(|| {})
    }

    /// Waits until the target ends this connection, as required. Calls `look` until after the end.
    ///
    /// # Errors
    /// It does not.
    pub fn ends_watched(mut self, mut look: impl FnMut()) -> Judged {
        let deadline = Instant::now() + self.context.patience;
        let end = loop {
            look();
            let left = deadline.saturating_duration_since(Instant::now());
            match self.awaits_end(left.min(Duration::from_millis(20)))? {
                // Its device's end is not the target's, which must learn of it.
                Notice::None | Notice::Failed if !left.is_zero() => {}
                end => break end,
            }
        };
        look();
        match end {
            Notice::Disconnected => self.context.note(Teardown::Clean),
            Notice::Failed => {
                self.context.note(Teardown::Unclean);
                return Err(Stop::unmet(format!(
                    "a device ended the connection, and the target did not within {:?}",
                    self.context.patience
                )));
            }
            Notice::None => {
                self.context.note(Teardown::Unclean);
                return Err(self.still_there());
            }
        }
        self.acted_on_nothing()?;
        self.reports()
    }

    /// Runs `body`, in which the target may also end this connection at any time: the one place for
    /// "… or ends this connection". Returns how it ended, if it did.
    ///
    /// An end counts whatever noticed it first. A client that reports an error has ended it.
    /// Mistakes before the end count as without it.
    ///
    /// # Errors
    /// The target does neither.
    pub fn or_ends(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), Stop>,
    ) -> Result<Option<Pass>, Stop> {
        let Err(stop) = body(self) else { return Ok(None) };
        let by_its_end = stop.cause == Cause::Requirement
            && matches!(stop.verdict, Verdict::Fail | Verdict::Inconclusive)
            && self.peer.is_lost()
            && !self.misspoke;
        if !by_its_end || self.awaits_end(self.context.patience)? != Notice::Disconnected {
            return Err(stop);
        }
        self.context.note(Teardown::Clean);
        self.reports()
            .map(|ended| Some(Pass { note: format!("ended this connection; {}", ended.note), ..ended }))
    }

    /// Does [`Session::unharmed`] within [`Session::or_ends`].
    ///
    /// # Errors
    /// The target was harmed.
    pub fn goes_on(&mut self) -> Result<(), Stop> {
        self.exchange()?;
        self.leaves().map(drop)
    }

    /// Fails if a server answered, other than by an error, before it ended the connection.
    fn acted_on_nothing(&mut self) -> Result<(), Stop> {
        let heard = self.peer.take_received();
        if self.client.is_some() || heard.is_empty() || heard.starts_with(b"-") {
            return Ok(());
        }
        let start = heard[..heard.len().min(20)].escape_ascii();
        Err(Stop::unmet(format!("it answered \"{start}\" before it ended the connection")))
    }

    /// Judges how a client reports a failure. A server need not report.
    fn reports(&mut self) -> Judged {
        if !self.is_observed() {
            return Ok(pass("it ended the connection"));
        }
        self.tells_of_failure()
    }

    /// Judges how a client reports that it was cut off.
    ///
    /// # Errors
    /// The client reports success, crashes or hangs, or its end cannot be seen.
    pub fn tells_of_failure(&mut self) -> Judged {
        reported(self.context, self.client.as_deref_mut(), self.context.patience)
    }

    /// Releases the connection without a disconnect, and judges how a client reports it.
    ///
    /// # Errors
    /// The client crashes or hangs.
    pub fn vanish(mut self) -> Judged {
        let (context, mut client) = (self.context, self.client.take());
        drop(self);
        context.note(Teardown::Unclean);
        reported(context, client.as_deref_mut(), context.patience)
    }

    pub(super) fn with_last_lines(&self, reason: String) -> String {
        let lines = self.client.as_ref().map(|client| client.last_lines()).unwrap_or_default();
        with_last_lines(reason, &lines)
    }

    fn exit(&mut self, patience: Duration) -> Option<Exit> {
        self.client.as_mut().and_then(|client| client.ended(patience))
    }

    /// Waits until the target ends the connection, for 2 s at most: it may wait forever.
    pub(in crate::blackbox) fn lasts(&mut self) {
        self.peer.drains = false;
        let _either = self.awaits_end(self.context.patience.min(KEPT));
    }

    fn awaits_end(&mut self, patience: Duration) -> Result<Notice, Stop> {
        let mut deadline = Instant::now() + patience;
        let mut end = if self.peer.is_lost() { Notice::Failed } else { Notice::None };
        while !self.peer.has_left() {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.peer.receive_within(left)? {
                // The queue pair is unusable. A target that knows says so soon.
                Some(Incoming::Failed(_)) if end == Notice::None => {
                    end = Notice::Failed;
                    deadline = Instant::now() + self.context.patience.min(Duration::from_secs(1));
                }
                Some(incoming @ Incoming::Notified(_)) if self.client.is_none() => {
                    // A broken rule is recorded as usual.
                    let _at_the_end = self.peer.absorb(incoming);
                }
                Some(_) => {}
                None => return Ok(end),
            }
        }
        Ok(Notice::Disconnected)
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
        let serves = if self.exchange().is_ok() { "and serves it on" } else { "and serves it no more" };
        Stop::unmet(format!("it did not end the connection within {within:?}, {serves}"))
    }

    /// Returns whether the client under test ends within `patience`.
    ///
    /// # Errors
    /// That cannot be seen.
    pub fn await_exit(&mut self, patience: Duration) -> Result<bool, Stop> {
        if !self.is_observed() {
            return Err(Stop::not_applicable(UNSEEN));
        }
        Ok(self.exit(patience).is_some())
    }
}

pub(super) enum ClientEnd {
    /// By itself, or after QUIT.
    Itself,
    /// Not within the time.
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Notice {
    Disconnected,
    Failed,
    None,
}

/// Judges how a client reports that it was cut off, or got no connection: it must end with an
/// error. A client that requests another connection has noticed.
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
        return Err(Stop::not_applicable(UNSEEN));
    }
    let begun = Instant::now();
    let at_most = patience + (HUNG - 1) * context.patience;
    loop {
        let left = at_most.saturating_sub(begun.elapsed());
        match client.ended(left.min(Duration::from_millis(50))) {
            Some(Exit::Failure(what)) if begun.elapsed() > patience => {
                return Ok(lenient(format!("after more than {patience:?}: {what}")));
            }
            Some(Exit::Failure(what)) => return Ok(pass(what)),
            Some(Exit::Success) => {
                return Err(Stop::unmet("the client did not get what it asked for, and reported success"));
            }
            Some(Exit::Unsupported) => return Err(Stop::unsupported("the client says so (status 89)")),
            Some(Exit::Crashed(how)) => {
                context.note(Teardown::Crashed);
                return Err(Stop::died(format!("the client crashed: {how}")));
            }
            None if context.is_asked_again()? => return Ok(pass("it asks for another connection")),
            None if left.is_zero() => {
                let reason = format!("the client did not end within {at_most:?}");
                return Err(Stop::hung(with_last_lines(reason, &client.last_lines())));
            }
            None => {}
        }
    }
}
