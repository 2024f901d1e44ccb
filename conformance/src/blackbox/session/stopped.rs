//! What shows only when the target stands still, or when its requests wait.

use std::time::Duration;

use intercept::Frozen;
use rdma_conn::Descriptors;
use rdma_proto::wire::Message;
use suite::verdict::pass;
use suite::{Judged, Stop};

use super::ending::ClientEnd;
use super::{Heard, Session, told};
use crate::blackbox::context::{Context, Side};
use crate::blackbox::results::Teardown;
use crate::tester::{Incoming, Shape};

/// Nearly all of the 1024 receives: a client may keep back a few while it works.
const CROWD: usize = 1016;
/// How long a target may take to handle what came before it is stopped. A slow one may need more.
const HANDLING: [Duration; 3] = [Duration::ZERO, Duration::from_millis(300), Duration::from_secs(3)];
/// How long a stopped target may stand still: its own peers and timers notice.
const STILL: Duration = Duration::from_secs(2);
/// The end of a reply that a stopped client gets: no longer than the shortest reply.
const END: usize = 4;
/// How long the suite waits until the other device has what it cannot see arrive.
const ARRIVING: Duration = Duration::from_millis(50);

/// The length of a value that wraps any send buffer.
pub(in crate::blackbox) const LONG_VALUE: usize = 3 << 20;
/// After so many bytes of a command, the rest waits again.
const STEP: usize = 512 << 10;
/// The receives of a peer whose target's requests wait.
const FEW: u32 = 4;
/// How long they wait.
const WAITING: Duration = Duration::from_millis(100);
const WAITS: usize = 5;
/// How often a server sends the value.
const ROUNDS: usize = 2;

impl<B: Descriptors> Session<'_, B> {
    fn freeze(&self) -> Result<Frozen, Stop> {
        let frozen = match (&self.client, self.context.side) {
            (Some(client), _) => client.freeze(),
            (None, Side::Server(server)) => server.freeze(),
            (None, Side::Client(..)) => None,
        };
        frozen.ok_or_else(|| {
            Stop::not_applicable("the target's process cannot be stopped from here (--exec shows it)")
        })
    }

    /// Sends keepalives, and returns when the target has acted on something that came behind them.
    fn spend(&mut self, keepalives: usize) -> Result<(), Stop> {
        self.peer.burst(&vec![Message::Keepalive; keepalives])?;
        self.exchange()?;
        if !self.client_asks() && keepalives > 0 {
            self.peer.ask_features(0)?;
            self.peer.await_answers()?;
        }
        Ok(())
    }

    /// Returns how many of a crowd of keepalives found a receive of the target that stood still.
    fn found(&mut self, before: usize, handling: Duration) -> Result<usize, Stop> {
        self.spend(before)?;
        // A client waits for its reply meanwhile.
        let reply = if self.client_asks() { Some(self.require_exchange(0)?) } else { None };
        self.listen(handling)?;
        self.peer.settle()?;
        let frozen = self.freeze()?;
        self.peer.set_patience(self.context.patience.min(STILL));
        let settled = self.peer.burst(&[Message::Keepalive; CROWD]).and_then(|()| self.peer.settle());
        let found = CROWD.saturating_sub(self.peer.outstanding());
        self.peer.set_patience(self.context.patience);
        drop(frozen);
        if let Some(reply) = reply {
            self.peer.send_bytes(&reply.send)?;
        }
        if settled.is_err() {
            self.peer.settle()?;
        }
        Ok(found)
    }

    /// Posts no receive for a while, and then all again.
    fn starve(&mut self) -> Result<(), Stop> {
        self.peer.set_reposts(false);
        self.listen(WAITING)?;
        self.peer.set_reposts(true);
        self.peer.post_receives(usize::MAX);
        Ok(())
    }

    /// Sends a reply but for its last bytes, which fit the client's window.
    fn send_start<'r>(&mut self, mut reply: &'r [u8]) -> Result<&'r [u8], Stop> {
        loop {
            let (_, room) = self.peer.room()?;
            let room = room as usize;
            let now = match reply.len().checked_sub(END) {
                Some(before @ 1..) => before.min(room),
                _ if reply.len() <= room => return Ok(reply),
                _ => room,
            };
            let (start, rest) = reply.split_at(now);
            self.peer.send_bytes(start)?;
            reply = rest;
        }
    }
}

/// Sends `before` keepalives that are handled, and then as many as there are receives to a target
/// that stands still.
pub(in crate::blackbox) fn has_receives<B: Descriptors>(context: &Context<'_, B>, before: usize) -> Judged {
    let mut session = context.open_as(Shape { sends: 2048, ..Shape::default() })?;
    let interrupts = session.client.as_ref().is_some_and(|client| client.pause().is_none());
    let mut found = None;
    for handling in HANDLING {
        match (session.found(before, handling), found) {
            (Ok(CROWD), _) => {
                let judged = session.unharmed();
                return match judged {
                    Err(stop) if interrupts => Ok(pass(format!(
                        "{CROWD} at once; a call was interrupted, and then: {}",
                        stop.reason
                    ))),
                    judged => told(judged, || format!("{CROWD} at once")),
                };
            }
            (Ok(count), _) => found = Some(count),
            (Err(stop), Some(_)) if interrupts => {
                let reason = format!("a call of the client was interrupted, and then: {}", stop.reason);
                return Err(Stop::undecided(reason));
            }
            (Err(stop), None) => return Err(stop),
            (Err(_), Some(_)) => break,
        }
    }
    let found = found.unwrap_or_default();
    Err(Stop::unmet(format!("{found} of {CROWD} keepalives found a receive while the target stood still")))
}

/// Answers a client's last command, and disconnects before the client can look at the reply.
pub(in crate::blackbox) fn last_reply<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const TIMES: usize = 5;
    let all = counted(context.open()?)?;
    let mut left_first = 0;
    for round in 1..=TIMES {
        let mut session = context.open()?;
        let reply = loop {
            match session.hear()? {
                Heard::Commands { replies } if session.responder.answered >= all => break replies,
                Heard::Commands { replies } => session.peer.send_bytes(&replies)?,
                Heard::End => return Err(Stop::undecided("the client does not do the same each time")),
                Heard::Nothing => return Err(session.silent_client()),
            }
        };
        let end = session.send_start(&reply)?;
        session.peer.settle()?;
        // A call that is interrupted may be an error of the client's.
        let paused = session.client.as_ref().and_then(|client| client.pause());
        session.peer.send_bytes(end)?;
        session.peer.settle()?;
        // A client that could not be stopped may have left by itself.
        let disconnected = session.peer.disconnect();
        let within = if disconnected.is_ok() { ARRIVING } else { context.patience };
        while !session.peer.has_left() && session.peer.receive_within(within)?.is_some() {}
        if session.peer.has_left() {
            left_first += usize::from(disconnected.is_err());
        } else {
            disconnected?;
        }
        drop(paused);
        context.note(Teardown::Clean);
        session.is_content().map_err(|stop| Stop {
            reason: format!(
                "in round {round} of {TIMES}, with the end right behind the reply: {}",
                stop.reason
            ),
            ..stop
        })?;
    }
    let behind = TIMES - left_first;
    Ok(pass(format!("{behind} times, after {all} commands; {left_first} times the client left first")))
}

/// Returns the number of commands of a client that is answered to its end.
fn counted<B: Descriptors>(mut session: Session<'_, B>) -> Result<u64, Stop> {
    match session.serve()? {
        ClientEnd::Never => Err(Stop::undecided("the client did not come to an end; it should do less")),
        ClientEnd::Itself => {
            session.is_content()?;
            Ok(session.responder.answered)
        }
    }
}

/// Keeps the target's requests waiting for a receive while it has more to send.
pub(in crate::blackbox) fn sends_again<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default().window(1 << 20).receives(FEW))?;
    session.peer.hurries()?;
    session.peer.handshake()?;
    if session.client_asks() {
        return sends_slowly(session);
    }
    for _ in 0..ROUNDS {
        let exchange = session.require_exchange(LONG_VALUE)?;
        session.peer.send_bytes(&exchange.send)?;
        for _ in 0..WAITS {
            session.starve()?;
        }
        session.expect_reply(&exchange)?;
    }
    session.leave()
}

fn sends_slowly<B: Descriptors>(mut session: Session<'_, B>) -> Judged {
    let (mut waited, mut since) = (0, 0);
    while !session.peer.has_left() && !session.responder.quit {
        let heard = session.peer.take_received();
        let replies = session.responder.answer(&heard).map_err(Stop::unmet)?;
        if !replies.is_empty() {
            session.peer.send_bytes(&replies)?;
        }
        let unparsed = session.responder.unparsed();
        if unparsed < since {
            since = 0;
        } else if unparsed - since >= STEP {
            (since, waited) = (unparsed, waited + 1);
            session.starve()?;
            continue;
        }
        match session.peer.receive_in_time()? {
            Some(Incoming::Gone(_)) => {}
            Some(incoming) => session.peer.absorb(incoming)?,
            None => return Err(session.silent_client()),
        }
    }
    if session.peer.has_left() {
        session.context.note(Teardown::Clean);
    } else {
        session.dismiss()?;
    }
    let content = session.is_content()?;
    if waited == 0 {
        return Err(Stop::undecided(format!(
            "the client should SET a value of {LONG_VALUE} bytes in this case"
        )));
    }
    told(Ok(content), || format!("waited {waited} times"))
}
