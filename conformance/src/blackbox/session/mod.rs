//! A session of the suite's peer with the target, in either role.
//!
//! To a server the peer sends commands (ECHO, with unique bytes) and receives replies. It answers
//! the commands of a client, whose next step shows whether the answer was right.

mod ending;
pub mod legal;
mod receives;
mod stopped;

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use intercept::trace::words;
use rdma_backend::RemoteAddress;
use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Window};

use super::context::Context;
use super::hints::SILENT_CLIENT;
use super::responder::Responder;
use super::target::Running;
use crate::tester::{Incoming, Peer, Shape};
use crate::workload::Entry;
use suite::{Judged, Pass, Stop};

pub(super) use ending::KEPT;
pub use ending::reported;
pub(super) use receives::{MANY, counts, finds_room};
pub(super) use stopped::{LONG_VALUE, has_receives, last_reply, sends_again};

/// The number of a client's commands that are answered after the case has made its point.
const ENOUGH: u64 = 3000;
/// Lengths of a target's window that a case can fill: room for a command, and within the memory.
const USABLE: RangeInclusive<u32> = 256..=64 << 20;

/// The suite's peer, connected to the target.
pub struct Session<'a, B: Descriptors> {
    /// The suite's peer.
    pub peer: Peer<B>,
    context: &'a Context<'a, B>,
    responder: Responder,
    client: Option<Box<dyn Running>>,
    /// Whether the target sent something wrong, and not only too little.
    misspoke: bool,
    questions: u64,
    /// After this many commands a client counts as continuing.
    enough: u64,
}

/// One exchange of bytes.
pub struct Exchange {
    /// The bytes that the suite's peer sends.
    pub send: Vec<u8>,
    /// The bytes to receive then. A client answers by continuing or by reporting success instead.
    pub expect: Vec<u8>,
}

impl<'a, B: Descriptors> Session<'a, B> {
    pub(super) fn new(context: &'a Context<'a, B>, peer: Peer<B>, client: Option<Box<dyn Running>>) -> Self {
        Self {
            peer,
            context,
            responder: Responder::default(),
            client,
            misspoke: false,
            questions: 0,
            enough: ENOUGH,
        }
    }

    /// Returns the next exchange: a command with a payload of `length` bytes for a server, or the
    /// reply to a client's next command. `None` if a client has disconnected.
    ///
    /// # Errors
    /// The client sends no command.
    pub fn next_exchange(&mut self, length: usize) -> Result<Option<Exchange>, Stop> {
        if self.client.is_some() {
            return match self.hear()? {
                Heard::Commands { replies } => Ok(Some(Exchange { send: replies, expect: Vec::new() })),
                Heard::End => Ok(None),
                Heard::Nothing => Err(self.silent_client()),
            };
        }
        self.questions += 1;
        let payload = Entry { number: self.questions, value_len: length }.value();
        Ok(Some(question(&payload)))
    }

    /// Requires only a few commands of a client, if each takes long.
    pub const fn be_brief(&mut self) {
        self.enough = 10;
    }

    /// Returns whether a client has announced that it is idle, and has its answer.
    pub const fn is_idle(&self) -> bool {
        self.responder.idle
    }

    /// Ends a client's idle time.
    pub fn go_on(&mut self) {
        if let Some(client) = &mut self.client {
            client.go_on();
        }
    }

    /// Returns whether the target is a client, which sends the commands.
    pub const fn client_asks(&self) -> bool {
        self.client.is_some()
    }

    /// Returns the next exchange. A client that has disconnected cannot be judged.
    ///
    /// # Errors
    /// The client sends no command, or has disconnected.
    pub fn require_exchange(&mut self, length: usize) -> Result<Exchange, Stop> {
        self.next_exchange(length)?
            .ok_or_else(|| Stop::undecided("the client left before it could be shown; it should do more"))
    }

    fn hear(&mut self) -> Result<Heard, Stop> {
        loop {
            let heard = self.peer.take_received();
            let replies = self.responder.answer(&heard).map_err(|wrong| {
                self.misspoke = true;
                Stop::unmet(wrong)
            })?;
            if !replies.is_empty() {
                return Ok(Heard::Commands { replies });
            }
            if self.peer.has_left() {
                return Ok(Heard::End);
            }
            match self.peer.receive_in_time()? {
                Some(Incoming::Gone(_)) => {}
                Some(incoming) => self.peer.absorb(incoming)?,
                None => return Ok(Heard::Nothing),
            }
        }
    }

    fn silent_client(&mut self) -> Stop {
        let exit = self.client.as_mut().and_then(|client| client.ended(Duration::ZERO));
        match exit {
            Some(exit) => Stop::unmet(format!("the client ended without a disconnect: {exit}")),
            None => Stop::unmet(self.with_last_lines(format!(
                "{SILENT_CLIENT}{:?}{}",
                self.context.patience,
                self.peer.untold()
            ))),
        }
    }

    /// Does one exchange with a payload of `length` bytes. Returns false if a client has left.
    ///
    /// # Errors
    /// The exchange fails.
    pub fn exchange_of(&mut self, length: usize) -> Result<bool, Stop> {
        let Some(exchange) = self.next_exchange(length)? else { return Ok(false) };
        self.peer.send_bytes(&exchange.send)?;
        self.expect_reply(&exchange)?;
        Ok(true)
    }

    /// Does one exchange of few bytes.
    ///
    /// # Errors
    /// The exchange fails.
    pub fn exchange(&mut self) -> Result<bool, Stop> {
        self.exchange_of(13)
    }

    /// Waits for the reply of an exchange.
    ///
    /// # Errors
    /// The reply does not come, or is another.
    pub fn expect_reply(&mut self, exchange: &Exchange) -> Result<(), Stop> {
        let heard = self.peer.receive_bytes(exchange.expect.len());
        // Bytes before an end must be right, too.
        let (heard, failure) = match heard {
            Ok(heard) => (heard, None),
            Err(failure) => (self.peer.take_received(), Some(failure)),
        };
        match exchange.expect.iter().zip(&heard).position(|(expected, heard)| expected != heard) {
            None => failure.map_or(Ok(()), |failure| Err(failure.into())),
            Some(at) => {
                self.misspoke = true;
                Err(Stop::unmet(format!(
                    "byte {at} of a reply of {} bytes is {:#04x}, not {:#04x}{}",
                    exchange.expect.len(),
                    heard.get(at).copied().unwrap_or_default(),
                    exchange.expect.get(at).copied().unwrap_or_default(),
                    self.elsewhere(&exchange.expect, &heard, at)
                )))
            }
        }
    }

    /// Describes where misplaced bytes of a reply are, or what is there instead.
    fn elsewhere(&self, expect: &[u8], heard: &[u8], at: usize) -> String {
        let wanted = &expect[at..expect.len().min(at + 8)];
        if let Some(found) = heard.windows(wanted.len()).position(|here| here == wanted) {
            let (by, way) = if found > at { (found - at, "behind") } else { (at - found, "before") };
            return format!("; what belongs there came {by} byte{} {way}", if by == 1 { "" } else { "s" });
        }
        if at == 0 && heard.starts_with(b"-") {
            return format!("; the reply is an error: {}", heard.trim_ascii_end().escape_ascii());
        }
        let last = &expect[expect.len().saturating_sub(8)..];
        if [wanted, last].iter().any(|wanted| self.peer.earlier_window_holds(wanted)) {
            return "; it wrote into an earlier window, which was full".into();
        }
        String::new()
    }

    /// Waits for the next message other than a keepalive, which must be this one.
    ///
    /// # Errors
    /// Another message comes, or none.
    pub fn expect_message(&mut self, expected: Message) -> Result<(), Stop> {
        match self.peer.receive_message()? {
            message if message == expected => Ok(()),
            other => Err(Stop::unmet(format!(
                "expected {}, got {}",
                words::control(&expected),
                words::control(&other)
            ))),
        }
    }

    /// Handles all input for a while.
    ///
    /// # Errors
    /// The connection ends, or the target breaks a rule.
    pub fn listen(&mut self, patience: Duration) -> Result<(), Stop> {
        self.listen_until(patience, |_| false)
    }

    /// Handles all input for a while, or until there is `enough`.
    ///
    /// # Errors
    /// The connection ends, or the target breaks a rule.
    pub fn listen_until(
        &mut self,
        patience: Duration,
        enough: impl Fn(&Peer<B>) -> bool,
    ) -> Result<(), Stop> {
        let deadline = Instant::now() + patience;
        while !enough(&self.peer) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(incoming) = self.peer.receive_within(left)? else { return Ok(()) };
            self.peer.absorb(incoming)?;
        }
        Ok(())
    }

    /// Returns the target's window, for cases that send or allocate its length.
    ///
    /// # Errors
    /// There is no window, or it is too short or too long.
    pub fn usable_window(&mut self) -> Result<Window, Stop> {
        let window = self.peer.await_window()?;
        if USABLE.contains(&window.length) {
            Ok(window)
        } else {
            Err(Stop::undecided(format!("a window of {} bytes does not suit this case", window.length)))
        }
    }

    /// Returns the place of the next byte in the target's window, for a case that writes `len`
    /// bytes.
    ///
    /// # Errors
    /// The window has no room for them.
    pub fn room_for(&mut self, len: usize) -> Result<RemoteAddress, Stop> {
        match self.peer.room()? {
            (to, room) if len <= room as usize => Ok(to),
            (_, room) => {
                Err(Stop::undecided(format!("{len} bytes to say do not suit a window with room for {room}")))
            }
        }
    }
}

enum Heard {
    /// It sent commands, with these replies.
    Commands {
        replies: Vec<u8>,
    },
    /// It disconnected.
    End,
    Nothing,
}

impl<B: Descriptors> Drop for Session<'_, B> {
    fn drop(&mut self) {
        self.context.breaches.borrow_mut().extend(self.peer.seen.breaches.iter().cloned());
        if let Some(client) = &self.client {
            self.context.printed.replace(client.last_lines());
        }
    }
}

/// Sends a server `questions` commands before it has a window for the replies; a client nothing.
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

/// Gives the target a late window, when it has data waiting for one.
///
/// # Errors
/// The target does not wait, or does not send the data then.
pub fn registered_late<B: Descriptors>(context: &Context<'_, B>, questions: u32, late: Duration) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let exchanges = asked_without_window(&mut session, questions)?;
    // A notification would be an error: it has no window.
    session.listen(late)?;
    session.peer.register()?;
    exchanges.iter().try_for_each(|exchange| session.expect_reply(exchange))?;
    session.unharmed()
}

/// Opens a session with a server in the middle of a reply, without a window for the rest.
///
/// # Errors
/// The server does not get that far.
pub fn half_heard<'a, B: Descriptors>(context: &'a Context<'a, B>) -> Result<Session<'a, B>, Stop> {
    let mut session = context.open()?;
    session.peer.drains = false;
    session.peer.send_bytes(&question(&[b'x'; 150_000]).send)?;
    session.peer.receive_bytes(64 << 10)?;
    Ok(session)
}

/// Returns a command that a server answers with `payload`, and the reply.
pub fn question(payload: &[u8]) -> Exchange {
    let bulk = [format!("${}\r\n", payload.len()).as_bytes(), payload, b"\r\n"].concat();
    Exchange { send: [b"*2\r\n$4\r\nECHO\r\n", &bulk[..]].concat(), expect: bulk }
}

/// Returns a command in RESP.
pub fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    kv_store::command(&mut bytes, words.len(), words);
    bytes
}

/// Adds a note to a pass.
pub fn told(judged: Judged, note: impl FnOnce() -> String) -> Judged {
    judged.map(|judged| {
        let own = note();
        let note = if judged.note.is_empty() { own } else { format!("{own}; {}", judged.note) };
        Pass { note, ..judged }
    })
}
