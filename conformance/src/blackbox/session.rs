//! The adversary connected to the target, and what can be asked of the target there, whichever role it has.
//!
//! To a server the adversary says commands (ECHO, with bytes that nobody else uses) and hears replies. A client it answers,
//! and what the client does next shows what it made of that.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Window};

use super::context::Context;
use super::responder::Responder;
use super::target::{Exit, Running};
use super::verdict::{Judged, Pass, Stop, Teardown, lenient, pass};
use crate::peer::{Incoming, Peer, Shape};
use crate::workload::Entry;

/// Commands of a client that are answered after the case has shown what it has to show.
const ENOUGH: u64 = 3000;
/// How long a client is answered then.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// Lengths of a target's window that a case can fill: room for a command, and no more than there is memory for.
const USABLE: RangeInclusive<u32> = 256..=64 << 20;

/// The adversary connected to the target.
pub struct Session<'a, B: Descriptors> {
    /// The adversary.
    pub peer: Peer<B>,
    context: &'a Context<'a, B>,
    responder: Responder,
    client: Option<Box<dyn Running>>,
    /// The target has left.
    gone: bool,
    questions: u64,
    /// Commands of a client that are enough to see that it goes on.
    enough: u64,
}

/// One exchange of bytes.
pub struct Exchange {
    /// What the adversary has to say.
    pub send: Vec<u8>,
    /// What it will hear then. Empty for a client: that it goes on, or says it is content, is the answer.
    pub expect: Vec<u8>,
}

impl<'a, B: Descriptors> Session<'a, B> {
    pub(super) fn new(context: &'a Context<'a, B>, peer: Peer<B>, client: Option<Box<dyn Running>>) -> Self {
        Self {
            peer,
            context,
            responder: Responder::default(),
            client,
            gone: false,
            questions: 0,
            enough: ENOUGH,
        }
    }

    /// What can be said next: a question with a payload of `length` bytes to a server, the reply to what it asked, whatever
    /// that is, to a client. Nothing if a client has left.
    ///
    /// # Errors
    /// The client says nothing.
    pub fn next_exchange(&mut self, length: usize) -> Result<Option<Exchange>, Stop> {
        if self.client.is_some() {
            let replies = self.replies()?;
            return Ok(replies.map(|send| Exchange { send, expect: Vec::new() }));
        }
        self.questions += 1;
        let payload = Entry { number: self.questions, value_len: length }.value();
        Ok(Some(question(&payload)))
    }

    /// Where going on takes long: a client need not do so for more than a few commands.
    pub const fn be_brief(&mut self) {
        self.enough = 10;
    }

    /// Whether the target is a client: it asks, and the adversary answers.
    pub const fn client_asks(&self) -> bool {
        self.client.is_some()
    }

    /// The same, and a client that has left is one that cannot be judged.
    ///
    /// # Errors
    /// The client says nothing or has left.
    pub fn require_exchange(&mut self, length: usize) -> Result<Exchange, Stop> {
        self.next_exchange(length)?
            .ok_or_else(|| Stop::undecided("the client left before it could be shown; it should do more"))
    }

    /// Waits for commands, and makes the replies.
    fn replies(&mut self) -> Result<Option<Vec<u8>>, Stop> {
        loop {
            let heard = self.peer.take_received();
            let replies = self.responder.answer(&heard).map_err(Stop::unmet)?;
            if !replies.is_empty() {
                return Ok(Some(replies));
            }
            if self.gone {
                return Ok(None);
            }
            match self.peer.receive_within(self.context.patience)? {
                Some(Incoming::Gone(_)) => self.gone = true,
                Some(incoming) => self.peer.absorb(incoming)?,
                None => return Err(self.silent_client()),
            }
        }
    }

    fn silent_client(&mut self) -> Stop {
        let exit = self.client.as_mut().and_then(|client| client.ended(Duration::ZERO));
        match exit {
            Some(exit) => Stop::unmet(format!("the client ended without a disconnect: {exit}")),
            None => Stop::unmet(format!("the client said nothing more within {:?}", self.context.patience)),
        }
    }

    /// One exchange. False if a client has left instead.
    ///
    /// # Errors
    /// It goes wrong.
    pub fn exchange_of(&mut self, length: usize) -> Result<bool, Stop> {
        let Some(exchange) = self.next_exchange(length)? else { return Ok(false) };
        self.peer.send_bytes(&exchange.send)?;
        self.expect_reply(&exchange)?;
        Ok(true)
    }

    /// The same, of few bytes.
    ///
    /// # Errors
    /// It goes wrong.
    pub fn exchange(&mut self) -> Result<bool, Stop> {
        self.exchange_of(13)
    }

    /// What was said is answered.
    ///
    /// # Errors
    /// It is not, or wrongly.
    pub fn expect_reply(&mut self, exchange: &Exchange) -> Result<(), Stop> {
        let heard = self.peer.receive_bytes(exchange.expect.len())?;
        match exchange.expect.iter().zip(&heard).position(|(expected, heard)| expected != heard) {
            None => Ok(()),
            Some(at) => Err(Stop::unmet(format!(
                "byte {at} of a reply of {} bytes is {:#04x}, not {:#04x}",
                exchange.expect.len(),
                heard.get(at).copied().unwrap_or_default(),
                exchange.expect.get(at).copied().unwrap_or_default()
            ))),
        }
    }

    /// The next message, keepalives apart, is this one.
    ///
    /// # Errors
    /// It is another, or none comes.
    pub fn expect_message(&mut self, expected: Message) -> Result<(), Stop> {
        match self.peer.receive_message()? {
            message if message == expected => Ok(()),
            other => Err(Stop::unmet(format!("expected {expected:?}, got {other:?}"))),
        }
    }

    /// Takes what comes for a while.
    ///
    /// # Errors
    /// The connection ends, or what comes is not right.
    pub fn listen(&mut self, patience: Duration) -> Result<(), Stop> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(incoming) = self.peer.receive_within(left)? else { return Ok(()) };
            self.peer.absorb(incoming)?;
        }
    }

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
    fn is_content(&mut self) -> Judged {
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

    /// The target's window, where what a case says or allocates depends on its length.
    ///
    /// # Errors
    /// There is none, or it is of no use for that.
    pub fn usable_window(&mut self) -> Result<Window, Stop> {
        let window = self.peer.await_window()?;
        if USABLE.contains(&window.length) {
            Ok(window)
        } else {
            Err(Stop::undecided(format!("a window of {} bytes does not suit this case", window.length)))
        }
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

    /// What there is to say about the whole connection.
    fn account(&self) {
        self.context.breaches.borrow_mut().extend(self.peer.seen.breaches.iter().cloned());
    }
}

impl<B: Descriptors> Drop for Session<'_, B> {
    fn drop(&mut self) {
        self.account();
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

/// Asks a server `questions` without a window for the replies. A client has its own to ask.
///
/// # Errors
/// The connection ends.
pub fn asked_without_window<B: Descriptors>(
    session: &mut Session<'_, B>,
    questions: u32,
) -> Result<Vec<Exchange>, Stop> {
    session.peer.await_window()?;
    if session.client_asks() {
        return Ok(Vec::new());
    }
    let exchanges: Vec<_> =
        (0..questions).map(|number| question(format!("number {number}").as_bytes())).collect();
    exchanges.iter().try_for_each(|exchange| session.peer.send_bytes(&exchange.send))?;
    session.peer.settle()?;
    Ok(exchanges)
}

/// The target has something to say, and gets a window for it only after a while.
///
/// # Errors
/// It does not wait, or does not say it then.
pub fn registered_late<B: Descriptors>(context: &Context<'_, B>, questions: u32, late: Duration) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let exchanges = asked_without_window(&mut session, questions)?;
    // A notification would be an error: there is no window for it.
    session.listen(late)?;
    session.peer.register()?;
    exchanges.iter().try_for_each(|exchange| session.expect_reply(exchange))?;
    session.unharmed()
}

/// A server in the middle of a reply, of which it can write no more.
///
/// # Errors
/// It does not get that far.
pub fn half_heard<'a, B: Descriptors>(context: &'a Context<'a, B>) -> Result<Session<'a, B>, Stop> {
    let mut session = context.open()?;
    session.peer.drains = false;
    session.peer.send_bytes(&question(&[b'x'; 150_000]).send)?;
    session.peer.receive_bytes(64 << 10)?;
    Ok(session)
}

/// What a server is asked so that it answers with `payload`, and its answer.
pub fn question(payload: &[u8]) -> Exchange {
    let bulk = [format!("${}\r\n", payload.len()).as_bytes(), payload, b"\r\n"].concat();
    Exchange { send: [b"*2\r\n$4\r\nECHO\r\n", &bulk[..]].concat(), expect: bulk }
}

/// A command as bytes.
pub fn command(words: &[&[u8]]) -> Vec<u8> {
    let head = format!("*{}\r\n", words.len()).into_bytes();
    words.iter().fold(head, |mut bytes, word| {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
        bytes
    })
}

/// A pass that has more to tell than the judgement it rests on.
pub fn told(judged: Judged, note: impl FnOnce() -> String) -> Judged {
    judged.map(|judged| {
        let own = note();
        let note = if judged.note.is_empty() { own } else { format!("{own}; {}", judged.note) };
        Pass { note, ..judged }
    })
}
