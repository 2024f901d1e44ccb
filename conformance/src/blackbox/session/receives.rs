//! A server with scarce receives, like Valkey's for a client: 1024, and no RNR retries.
//!
//! It posts its receives again only before it gives the client a proof of that (VR-FLOW-008): a
//! registration, the first bytes in a window of the client's, or an answer, which it holds back.
//! A client with more unhandled notifications than receives loses its connection.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use suite::verdict::lenient;
use suite::{Judged, Stop};

use super::{Session, told};
use crate::blackbox::context::Context;
use crate::tester::{Incoming, Shape};

/// The small commands of a client, which show whether it counts.
pub(in crate::blackbox) const MANY: usize = 2000;
/// The receives that every client can count on.
const RECEIVES: u64 = 1024;
/// Close to that: some may be kept, and the client counts notifications from before the suite did.
const NEAR: u64 = RECEIVES - 64;
/// How long a client is silent that has asked, and waits because it may not go on. One that goes
/// too far does so in that time, on a busy machine as well; a right one gives up later.
const QUIET: Duration = Duration::from_millis(500);
/// How often the silence is looked at.
const STEP: Duration = Duration::from_millis(100);

const NO_SHOW: &str =
    "the client left before it could be shown; it should do 2000 small commands, one by one";

struct Scarce<'a, B: Descriptors> {
    session: Session<'a, B>,
    context: &'a Context<'a, B>,
    /// The client's notifications whose receives were posted again, and its windows seen by then.
    handled: u64,
    windows: usize,
}

enum Reached {
    /// It waits, and has asked.
    Asked,
    /// It is silent, and has not asked.
    Silent,
    /// It has disconnected.
    End,
}

impl<'a, B: Descriptors> Scarce<'a, B> {
    fn open(context: &'a Context<'a, B>) -> Result<Self, Stop> {
        let shape = Shape::default().window(256 << 10).without_rnr_retries();
        let mut session = context.connect(shape)?;
        session.peer.handshake()?;
        // Questions from before its first command have their answers by then.
        if !session.exchange()? {
            return Err(Stop::undecided(NO_SHOW));
        }
        session.peer.set_reposts(false);
        session.peer.drains = false;
        session.peer.answers_late = true;
        let mut scarce = Self { session, context, handled: 0, windows: 1 };
        scarce.post();
        Ok(scarce)
    }

    fn post(&mut self) {
        self.session.peer.post_receives(usize::MAX);
        self.handled = self.session.peer.seen.all();
        self.windows = self.session.peer.seen.windows.len();
    }

    fn unhandled(&self) -> u64 {
        self.session.peer.seen.all() - self.handled
    }

    /// Answers commands, for as long as the client continues without a proof.
    fn press(&mut self) -> Result<Reached, Stop> {
        let mut since = Instant::now();
        loop {
            let heard = self.session.peer.take_received();
            let replies = self.session.responder.answer(&heard).map_err(Stop::unmet)?;
            // If a reply cannot be sent, the connection has ended.
            let lost =
                self.session.peer.is_lost() || self.reply(&replies).is_err() && self.session.peer.is_lost();
            if lost || self.session.responder.quit {
                self.session.dismiss()?;
                return Ok(Reached::End);
            }
            if self.session.peer.is_full() {
                self.post();
                self.session.peer.register()?;
            }
            match self.session.peer.receive_within(STEP)? {
                Some(Incoming::Gone(_) | Incoming::Failed(_)) => {}
                Some(incoming) => {
                    // A waiting client may send keepalives to check its server.
                    if !incoming.is_keepalive() {
                        since = Instant::now();
                    }
                    self.session.peer.absorb(incoming)?;
                }
                None => {
                    let (asked, waited) = (self.session.peer.owes_answers(), since.elapsed());
                    let half = self.context.patience / 2;
                    let quiet = if self.unhandled() >= NEAR { half.min(QUIET) } else { half };
                    if asked && waited >= quiet {
                        return Ok(Reached::Asked);
                    }
                    if waited >= self.context.patience {
                        return Ok(Reached::Silent);
                    }
                }
            }
        }
    }

    /// Sends replies. A window's first bytes prove that all before its registration was handled.
    fn reply(&mut self, mut replies: &[u8]) -> Result<(), Stop> {
        while !replies.is_empty() {
            let (_, room) = self.session.peer.room()?;
            if self.session.peer.seen.windows.len() != self.windows {
                self.post();
            }
            let (now, rest) = replies.split_at(replies.len().min(room as usize));
            self.session.peer.send_bytes(now)?;
            replies = rest;
        }
        Ok(())
    }

    fn relax(&mut self) -> Result<(), Stop> {
        self.post();
        let peer = &mut self.session.peer;
        peer.set_reposts(true);
        peer.drains = true;
        if peer.is_full() {
            peer.register()?;
        }
        Ok(peer.answer_now()?)
    }

    /// Judges a client that has disconnected: it went too far if it used up the receives and fails.
    fn left(mut self) -> Judged {
        let unhandled = self.unhandled();
        let content = self.session.is_content();
        if unhandled >= RECEIVES && content.is_err() {
            return Err(Stop::unmet(format!(
                "it had more than {RECEIVES} notifications unhandled, and lost its connection"
            )));
        }
        content?;
        Err(Stop::undecided(format!("with {unhandled} notifications unhandled {NO_SHOW}")))
    }
}

pub(in crate::blackbox) fn counts<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    judged(context, "", |scarce, unhandled| {
        // If it can still be reached, it has lost nothing.
        scarce.relax()?;
        scarce.session.peer.message(rdma_proto::wire::Message::Keepalive)?;
        scarce.session.peer.settle()?;
        Ok(lenient(format!("{unhandled} unhandled; it asks for no proof")))
    })
}

pub(in crate::blackbox) fn finds_room<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    judged(context, "asked with ", |_, unhandled| {
        let told = "notifications unhandled it waits for a proof, and has not asked for one";
        Err(Stop::unmet(format!("with {unhandled} {told}")))
    })
}

/// Judges how far a client went. `silent` judges one that waits and has not asked.
fn judged<'a, B: Descriptors>(
    context: &'a Context<'a, B>,
    asked: &str,
    silent: impl FnOnce(&mut Scarce<'a, B>, u64) -> Judged,
) -> Judged {
    let mut scarce = Scarce::open(context)?;
    let reached = scarce.press()?;
    let unhandled = scarce.unhandled();
    match reached {
        Reached::End => scarce.left(),
        Reached::Silent if unhandled < NEAR => Err(scarce.session.silent_client()),
        Reached::Silent => silent(&mut scarce, unhandled),
        Reached::Asked => {
            scarce.relax()?;
            told(scarce.session.leave(), || format!("{asked}{unhandled} unhandled"))
        }
    }
}
