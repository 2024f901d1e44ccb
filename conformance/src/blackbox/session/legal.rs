//! A peer that does anything the specification allows, drawn at random: its windows, writes,
//! notifications, messages, pauses, and when it disconnects. Beside the rules of every case, two
//! oracles judge the target: the stream, and the suite's memory but for notified bytes.

use std::ops::RangeInclusive;
use std::time::Duration;

use fastrand::Rng;
use rdma_backend::RemoteAddress;
use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, Message};
use suite::verdict::pass;
use suite::{Judged, Stop};

use super::{Exchange, Heard, Session};
use crate::blackbox::case::{Case, Role};
use crate::blackbox::context::Context;
use crate::blackbox::results::{CaseResult, Teardown};
use crate::tester::Shape;

const ID: &str = "random.legal-peer";
/// The prefix of the seed in the id of a peer that did not pass.
const OF_SEED: &str = "random.seed-";
/// The most notifications and messages of a trace, without registrations. All are fewer than the
/// receives posted at first, so that none need be proven to be handled (VR-FLOW-005).
const MOST: u32 = 600;
/// The most registrations of a trace after the first. Each makes room for a window of replies.
const REGISTRATIONS: usize = 200;
const MEMORY: u32 = 64 << 10;
/// More draws than any trace makes.
pub const ALL_DRAWS: u64 = 1 << 20;
/// Bytes of replies that a trace requests.
const REPLIES: usize = 256 << 10;

/// Returns `count` cases, each with a peer of its own: seed, seed + 1, and so on. A peer that has
/// drawn `draws` numbers does the plainest thing.
pub fn cases<'a, B: Descriptors>(role: Role, seed: u64, count: u64, draws: u64) -> Vec<Case<'a, B>> {
    let case = |seed: u64| Case {
        id: ID,
        role: Some(role),
        intent: "a peer that does anything the specification allows",
        expectation: "The stream is whole, and nothing is written beside it.",
        requirements: &["VR-XFER-001", "VR-XFER-006", "VR-XFER-007", "VR-CTRL-009", "VR-FLOW-001"],
        source: "",
        tags: &[],
        run: Box::new(move |context: &Context<'_, B>, _: &_| {
            let judged = trace(context, seed, draws);
            judged.map_err(|stop| Stop { reason: format!("seed {seed}: {}", stop.reason), ..stop })
        }),
    };
    (0..count).map(|number| case(seed.wrapping_add(number))).collect()
}

/// Combines all passes, and names other results by their seeds. `again` is the command to repeat,
/// with so many draws.
pub fn summed(results: Vec<CaseResult>, seed: u64, draws: Option<u64>, again: &str) -> Vec<CaseResult> {
    let draws = draws.map_or(String::new(), |draws| format!(" --draws {draws}"));
    let traces = results.len();
    let took: f64 = results.iter().map(|result| result.took).sum();
    let (passed, mut summed): (Vec<_>, Vec<_>) = (0..)
        .zip(results)
        .map(|(number, mut result)| {
            let seed = seed.wrapping_add(number);
            result.repro = format!("{again} --random 1 --seed {seed}{draws}");
            if !result.verdict.is_pass() {
                result.id = format!("{OF_SEED}{seed}");
            }
            result
        })
        .partition(|result| result.verdict.is_pass());
    let count = passed.len();
    if let Some(mut first) = passed.into_iter().next() {
        first.reason = format!("{count} of {traces} traces, from seed {seed} on");
        first.repro = format!("{again} --random {traces} --seed {seed}{draws}");
        first.took = took;
        summed.insert(0, first);
    }
    summed
}

/// Returns the seed in an id of [`summed`].
pub fn seed(id: &str) -> Option<u64> {
    id.strip_prefix(OF_SEED)?.parse().ok()
}

/// Returns how few draws suffice for a failure, by halving. `None` if it fails with none of up to
/// [`ALL_DRAWS`].
pub fn fewest_draws(mut fails: impl FnMut(u64) -> bool) -> Option<u64> {
    let doubled = |draws: &u64| Some(2 * draws).filter(|draws| *draws <= ALL_DRAWS);
    let mut most = std::iter::successors(Some(1), doubled).find(|draws| fails(*draws))?;
    let mut least = most / 2;
    while least + 1 < most {
        let middle = least.midpoint(most);
        if fails(middle) { most = middle } else { least = middle }
    }
    Some(most)
}

fn trace<B: Descriptors>(context: &Context<'_, B>, seed: u64, draws: u64) -> Judged {
    let mut legal = Legal { rng: Draws { rng: Rng::with_seed(seed), left: draws }, said: 0, pauses: 0 };
    legal.pauses = legal.pick(&[0, 0, 4, 30]);
    let shape = Shape::default().window(MEMORY).receives(legal.pick(&[1024, 1024, 1025, 2000]));
    let mut session = context.connect(shape)?;
    let length = legal.windows(&mut session);
    session.peer.mirror();
    legal.interject(&mut session)?;
    match session.client_asks() {
        true => legal.serve(session),
        false => legal.ask(session, length),
    }
}

/// A limited number of draws. Then each is the last of its range.
struct Draws {
    rng: Rng,
    left: u64,
}

macro_rules! draws {
    ($($integer:ident)+) => { $(
        fn $integer(&mut self, range: RangeInclusive<$integer>) -> $integer {
            if self.is_spent() {
                return *range.end();
            }
            self.left -= 1;
            self.rng.$integer(range)
        }
    )+ };
}

impl Draws {
    draws! { u8 u32 u64 usize }

    const fn is_spent(&self) -> bool {
        self.left == 0
    }
}

/// The drawn parameters, and what is used up.
struct Legal {
    rng: Draws,
    /// Notifications and messages so far.
    said: u32,
    /// The share of steps, in 256, before which the peer pauses.
    pauses: u8,
}

impl Legal {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        match self.rng.is_spent() {
            true => from[0],
            false => from[self.rng.usize(0..=from.len() - 1)],
        }
    }

    fn chance(&mut self, one_in: u32) -> bool {
        !self.rng.is_spent() && self.rng.u32(0..=one_in - 1) == 0
    }

    fn is_spent(&self) -> bool {
        self.said >= MOST
    }

    /// Draws windows at up to three places, and returns the first one's length. A client's have one
    /// length (VR-MEM-008), a server's may grow (VR-MEM-020).
    fn windows<B: Descriptors>(&mut self, session: &mut Session<'_, B>) -> u32 {
        // A client sends any amount. Its windows are long, so that it needs few registrations.
        let length = if session.client_asks() {
            self.pick(&[4096, 5000, 16_384, 30_000, 65_535, MEMORY])
        } else {
            self.pick(&[1, 2, 3, 31, 32, 33, 100, 511, 1000, 4096, 16_384, 65_535, MEMORY])
        };
        if session.client_asks() && self.chance(4) {
            let doubled = |length: &u32| length.checked_mul(2).filter(|length| *length < MEMORY);
            let lengths = std::iter::successors(Some(length), doubled).chain([MEMORY]);
            session.peer.plan = lengths.map(|length| (0, length)).collect();
            session.peer.plan_ends = true;
            return length;
        }
        let places = self.rng.usize(1..=3);
        session.peer.plan = (0..places).map(|_| (self.rng.u32(0..=MEMORY - length), length)).collect();
        length
    }

    fn pause(&mut self) {
        if self.rng.u8(0..=u8::MAX) < self.pauses {
            std::thread::sleep(Duration::from_micros(self.rng.u64(1..=1999)));
        }
    }

    /// Sends something allowed at any time, or nothing.
    fn interject<B: Descriptors>(&mut self, session: &mut Session<'_, B>) -> Result<(), Stop> {
        self.pause();
        if self.is_spent() || !self.chance(4) {
            return Ok(());
        }
        self.said += 1;
        let is_client = !session.client_asks();
        let peer = &mut session.peer;
        match self.rng.u8(0..=5) {
            0 => peer.message(Message::Keepalive)?,
            1 => {
                // A receiver ignores reserved bytes (VR-CTRL-006).
                let mut bytes = Message::Keepalive.encode();
                bytes.iter_mut().skip(2).for_each(|byte| *byte = self.rng.u8(0..=u8::MAX));
                peer.send(&bytes)?;
            }
            2 if is_client => peer.ask_features(self.pick(&[0, 1, 0xff, u16::MAX]))?,
            3 if is_client => {
                peer.message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
            }
            4 if peer.has_window() => peer.notify(0)?,
            _ => {}
        }
        Ok(())
    }

    /// Sends bytes, cut anywhere. Each part is any number of WRITEs with one notification.
    fn say<B: Descriptors>(&mut self, session: &mut Session<'_, B>, mut bytes: &[u8]) -> Result<(), Stop> {
        while !bytes.is_empty() {
            self.interject(session)?;
            let (mut to, room) = session.peer.room()?;
            let most = bytes.len().min(room as usize).min(MEMORY as usize);
            let cut = match self.rng.u8(0..=7) {
                _ if self.is_spent() => most,
                0 => 1,
                1 | 2 => self.rng.usize(1..=most),
                _ => most,
            };
            let (now, rest) = bytes.split_at(cut);
            let count = u32::try_from(now.len()).unwrap_or(u32::MAX);
            let mut left = now;
            let parts = self.pick(&[0, 0, 0, 1, 2, 5]);
            for _ in 0..parts {
                let (part, behind) = left.split_at(self.rng.usize(0..=left.len()));
                session.peer.write(to, part)?;
                to = beyond(to, part.len());
                left = behind;
                self.pause();
            }
            if self.chance(8) {
                // The notification is on a WRITE of its own, which is empty (VR-XFER-006).
                session.peer.write(to, left)?;
                self.interject(session)?;
                session.peer.notify(count)?;
            } else {
                session.peer.write_immediate(to, left, count)?;
            }
            self.said += 1;
            session.peer.advance(now)?;
            bytes = rest;
        }
        Ok(())
    }

    fn ask<B: Descriptors>(&mut self, mut session: Session<'_, B>, window: u32) -> Judged {
        // Commands may come before the window for their replies (VR-FLOW-004 binds the server), if
        // the peer need not wait for anything before it registers (VR-MEM-001).
        let mut early = 0;
        if self.chance(4) {
            early = session.peer.await_window()?.length as usize;
        } else {
            session.peer.register()?;
        }
        let most = REPLIES.min(REGISTRATIONS * window as usize);
        let leaves = self.chance(12);
        let mut asked = 0;
        let mut expected = Vec::new();
        let exchanges = if self.rng.is_spent() { 1 } else { self.rng.usize(1..=20) };
        for _ in 0..exchanges {
            let longest = self.pick(&[0, 20, 20, 300, 5000, 70_000]);
            let Exchange { send, expect } = session.require_exchange(self.rng.usize(0..=longest))?;
            asked += expect.len();
            if asked > most {
                break;
            }
            if !session.peer.has_registered() && (send.len() > early || self.chance(4)) {
                session.peer.register()?;
            }
            early = early.saturating_sub(send.len());
            if leaves && self.chance(4) {
                self.say(&mut session, &send[..send.len() / 2])?;
                session.dismiss()?;
                return Ok(pass("left in the middle of a command"));
            }
            self.say(&mut session, &send)?;
            expected.extend_from_slice(&expect);
            if session.peer.has_registered() && self.chance(3) {
                self.hear_out(&mut session, &mut expected)?;
            }
        }
        if !session.peer.has_registered() {
            session.peer.register()?;
        }
        self.hear_out(&mut session, &mut expected)?;
        session.peer.await_answers()?;
        is_untouched(&session)?;
        session.leave()
    }

    fn hear_out<B: Descriptors>(
        &mut self,
        session: &mut Session<'_, B>,
        expected: &mut Vec<u8>,
    ) -> Result<(), Stop> {
        let expect = std::mem::take(expected);
        let mut heard = 0;
        while heard < expect.len() {
            self.pause();
            let now = (expect.len() - heard).min(self.rng.usize(1..=20_000));
            let expect = expect[heard..heard + now].to_vec();
            session.expect_reply(&Exchange { send: Vec::new(), expect })?;
            heard += now;
        }
        Ok(())
    }

    fn serve<B: Descriptors>(&mut self, mut session: Session<'_, B>) -> Judged {
        session.peer.register()?;
        loop {
            self.pause();
            match session.hear()? {
                Heard::Commands { replies } => self.say(&mut session, &replies)?,
                Heard::Nothing => return Err(session.silent_client()),
                Heard::End => session.context.note(Teardown::Clean),
            }
            if session.responder.quit {
                // It has announced its end, and a server disconnects then.
                session.dismiss()?;
            }
            if session.responder.quit || session.peer.has_left() {
                is_untouched(&session)?;
                return session.is_content();
            }
        }
    }
}

const fn beyond(RemoteAddress { address, rkey }: RemoteAddress, len: usize) -> RemoteAddress {
    // Within a window of the target.
    RemoteAddress { address: address.wrapping_add(len as u64), rkey }
}

/// Fails if the memory for windows holds anything but the notified bytes.
fn is_untouched<B: Descriptors>(session: &Session<'_, B>) -> Result<(), Stop> {
    match session.peer.strayed() {
        None => Ok(()),
        Some(offset) => Err(Stop::unmet(format!(
            "byte {offset} of the suite's memory is not what the notifications said (VR-XFER-009)"
        ))),
    }
}
