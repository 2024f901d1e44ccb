//! Hints: one line about what the target did instead, from the recording of the suite's side: for
//! example a field with swapped bytes, or a full window.

use std::collections::BTreeMap;
use std::time::Duration;

use intercept::trace::recording::{Entry, EntryKind, Op, Outcome, Recording, Request};
use intercept::trace::words::Direction;
use rdma_backend::CompletionStatus;
use rdma_proto::wire::{MESSAGE_LEN, Message, Opcode, Window};

use crate::requirements::Role;
use crate::tester::{ENDED, REFUSED_REQUEST, SILENCE, UNACKNOWLEDGED, UNTOLD};

/// The first words about a client that stops, and about one that reports a failure.
pub(super) const SILENT_CLIENT: &str = "the client said nothing more within ";
pub(super) const NOT_CONTENT: &str = "the client was not content: ";
const NO_CONNECTION: &str = "no connection: ";
/// How many of the suite's last requests are listed: the refused one may not be the last.
const LAST: usize = 3;
/// A pause between two of them that is mentioned.
const PAUSE: Duration = Duration::from_millis(50);

/// Returns the hint for a failed case. `held` says whether the suite held another connection.
#[must_use]
pub fn of(recording: &Recording, role: Role, reason: &str, held: bool) -> Option<String> {
    let mut ends = BTreeMap::<u32, Facts>::new();
    for Entry { at, end, what } in &recording.entries {
        match what {
            EntryKind::Dropped { .. } => ends.values_mut().for_each(Facts::miss),
            what => ends.entry(*end).or_default().take(*at, what),
        }
    }
    let made: Vec<_> = ends.into_values().filter(|facts| facts.is_made).collect();
    if reason.starts_with(NO_CONNECTION) {
        return match made.len() + usize::from(held) {
            0 => None,
            1 => Some("it took one connection before this one".into()),
            count => Some(format!("it took {count} connections before this one")),
        };
    }
    // With several connections, it is unknown which one the reason is about.
    let [facts] = &made[..] else { return None };
    facts
        .message()
        .or_else(|| facts.stray())
        .or_else(|| facts.window(reason))
        .or_else(|| facts.immediate())
        .or_else(|| (role == Role::Server).then(|| facts.answers(reason)).flatten())
        .or_else(|| facts.wait(reason))
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[derive(Default)]
struct Facts {
    is_made: bool,
    /// Invalid messages of the target.
    wrong: Vec<(u32, Vec<u8>)>,
    /// The target's windows, and the bytes that the suite notified in the last.
    windows: Vec<Window>,
    used: Option<u64>,
    /// The target's immediates, with their bytes.
    notified: Vec<(u32, Vec<u8>)>,
    /// The suite's window that the target writes to.
    own: Option<Window>,
    /// `select` of the suite's questions for features, and of the target's answers.
    asked: Vec<u16>,
    answered: Vec<u16>,
    /// The suite's requests: time, description, and whether it needs a receive.
    posted: Vec<(u64, String, bool)>,
    told: Vec<u32>,
    direction: Direction,
    done: usize,
    failed: Option<CompletionStatus>,
    /// The target disconnected first.
    left: bool,
    disconnects: bool,
    is_partial: bool,
}

impl Facts {
    fn miss(&mut self) {
        (self.is_partial, self.used) = (true, None);
        self.direction.missed();
    }

    fn take(&mut self, at: u64, what: &EntryKind) {
        match what {
            EntryKind::Event { event } if event.starts_with("Established") => self.is_made = true,
            EntryKind::Event { event } if event.starts_with("Disconnected") => self.left |= !self.disconnects,
            EntryKind::Called { call } => self.disconnects |= call == "disconnect",
            EntryKind::Posted(request) => self.post(at, request),
            EntryKind::Completed { outcome, .. } => self.complete(outcome),
            _ => {}
        }
    }

    fn post(&mut self, at: u64, request: &Request) {
        let message = (request.op == Op::Send).then(|| Message::decode(&request.bytes.0));
        match message {
            Some(Ok(Message::GetServerFeature { select, .. })) => self.asked.push(select),
            Some(Ok(Message::RegisterXferMemory(window))) => self.own = Some(window),
            _ => {}
        }
        if let (Op::Write, Some(count)) = (request.op, request.immediate) {
            self.used = self.used.map(|used| used.saturating_add(count.into()));
            self.told.push(count);
        }
        let needs_receive = request.op == Op::Send || request.immediate.is_some();
        self.posted.push((at, self.direction.request(request), needs_receive));
    }

    fn complete(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Done { .. } => self.done += 1,
            Outcome::Failed { status, .. } if CompletionStatus(*status) != CompletionStatus::WR_FLUSH_ERR => {
                self.failed.get_or_insert(CompletionStatus(*status));
            }
            Outcome::Failed { .. } => {}
            Outcome::Notified { immediate, bytes, .. } => self.notified.push((*immediate, bytes.0.clone())),
            Outcome::Received { len, bytes, .. } => match Message::decode(&bytes.0) {
                Ok(message) if *len as usize == bytes.0.len() => {
                    if let Some(request) = outcome.arrived(0) {
                        self.direction.announced(&request);
                    }
                    match message {
                        Message::RegisterXferMemory(window) => {
                            self.windows.push(window);
                            self.used = Some(0);
                        }
                        Message::GetServerFeature { select, .. } => self.answered.push(select),
                        _ => {}
                    }
                }
                _ => self.wrong.push((*len, bytes.0.clone())),
            },
        }
    }

    fn message(&self) -> Option<String> {
        let (len, bytes) = self.wrong.first()?;
        if bytes.starts_with(b"*") || bytes.starts_with(b"$") || bytes.starts_with(b"+") {
            let told =
                "these are bytes of RESP, by SEND: payload goes by WRITE_WITH_IMM into the peer's window";
            return Some(told.into());
        }
        if *len as usize != MESSAGE_LEN {
            let told =
                format!("a control message has {MESSAGE_LEN} bytes, reserved ones included, not {len}");
            return Some(told);
        }
        let opcode = u16::from_be_bytes(bytes.first_chunk().copied()?);
        let swapped = Opcode(opcode.swap_bytes());
        let is_defined = swapped.0 <= 3;
        is_defined.then(|| {
            format!(
                "opcode {opcode:#06x} is {:#06x}, {swapped}, with its bytes swapped: fields are big-endian",
                swapped.0
            )
        })
    }

    /// Describes a write of the target that the suite's device refused.
    fn stray(&self) -> Option<String> {
        (self.failed == Some(CompletionStatus::LOC_ACCESS_ERR)).then(|| {
            "it wrote where the suite has no window: over its end, to another address, or by another region's key".into()
        })
    }

    /// Describes an impossible window, or one that differs from earlier ones.
    fn window(&self, reason: &str) -> Option<String> {
        let Window { address, length, rkey } = *self.windows.last()?;
        let is_place = |address: u64| (4096..1 << 48).contains(&address);
        let is_length = |length: u32| (1..=1 << 30).contains(&length);
        if !is_place(address) && is_place(address.swap_bytes()) {
            return Some(format!(
                "RegisterXferMemory's address {address:#x} is {:#x} with its bytes swapped: fields are big-endian",
                address.swap_bytes()
            ));
        }
        if !is_length(length) && is_length(length.swap_bytes()) {
            return Some(format!(
                "RegisterXferMemory's length {length} is {} with its bytes swapped: fields are big-endian",
                length.swap_bytes()
            ));
        }
        if reason.contains(REFUSED_REQUEST) && self.failed == Some(CompletionStatus::REM_ACCESS_ERR) {
            let what = self.posted.iter().rev().find(|(_, text, _)| text.starts_with("WRITE"));
            return Some(format!(
                "{} of its own window was refused: rkey {rkey:#x} does not open it ({:#x} with its bytes swapped). Is it the key of that \
                 region, for REMOTE_WRITE, and of this connection's protection domain?",
                what.map_or("a WRITE", |(_, text, _)| text),
                rkey.swap_bytes()
            ));
        }
        let first = self.windows.first()?;
        (first.length != length).then(|| {
            format!("it registered windows of different lengths: {} bytes, then {length}", first.length)
        })
    }

    /// Describes an immediate that is not the number of written bytes.
    fn immediate(&self) -> Option<String> {
        let room = self.own?.length;
        self.notified.iter().find_map(|(count, bytes)| {
            let swapped = count.swap_bytes();
            if *count > room && (1..=room).contains(&swapped) {
                return Some(format!(
                    "imm {count} ({count:#010x}) is {swapped} with its bytes swapped: immediates are big-endian"
                ));
            }
            let is_whole = bytes.len() == *count as usize;
            (is_whole && bytes.ends_with(b"\r\n\0")).then(|| {
                format!("imm {count} is one more than the bytes that were written: the last is 0, behind \\r\\n")
            })
        })
    }

    fn answers(&self, reason: &str) -> Option<String> {
        let (asked, answered) = (self.asked.len(), self.answered.len());
        let questions = counted(asked, "question");
        if self.is_partial {
            return None;
        }
        if asked > 0 && answered < asked && reason.contains(SILENCE) {
            return Some(format!("{answered} of {questions} for features (GetServerFeature) have an answer"));
        }
        if !reason.contains("GetServerFeature") {
            return None;
        }
        if answered > asked {
            return Some(format!("{} came to {questions} for features", counted(answered, "answer")));
        }
        let (asked, answered) =
            self.asked.iter().zip(&self.answered).find(|(asked, answered)| asked != answered)?;
        Some(format!("an answer repeats the select of its question: {asked} was asked, {answered} answered"))
    }

    /// Describes the last action before the target stopped, ended, or lacked a receive.
    fn wait(&self, reason: &str) -> Option<String> {
        let is_silent = reason.contains(SILENCE) || reason.contains(SILENT_CLIENT);
        if is_silent && self.windows.is_empty() {
            return Some(
                "it has registered no window: each side sends RegisterXferMemory once it is connected".into(),
            );
        }
        let full = self.windows.last().filter(|window| self.used == Some(window.length.into()));
        if let Some(Window { length, .. }) = full
            && is_silent
        {
            return Some(format!("its window of {length} bytes is full, and it has registered no other"));
        }
        if reason.contains(UNACKNOWLEDGED) {
            let needed = self.posted.iter().filter(|(.., needs_receive)| *needs_receive).count();
            let done = self.done.min(needed);
            let found = match self.is_partial {
                true => "the suite's messages and immediates find no receive".into(),
                false => format!("{done} of {needed} messages and immediates of the suite's found a receive"),
            };
            return Some(format!("{found}: each is posted again when it was used"));
        }
        if self.left && (reason.contains(ENDED) || reason.contains(NOT_CONTENT)) {
            return self.last().map(|last| format!("{ENDED_AFTER}{last}"));
        }
        // If bytes came without an immediate, the reason says so.
        if is_silent && !reason.contains(UNTOLD) {
            let (least, most) = (self.told.iter().min()?, self.told.iter().max()?);
            let range = if least == most { most.to_string() } else { format!("{least} to {most}") };
            return self.last().map(|last| format!("{NOTHING_AFTER}{last}; each immediate told of {range}"));
        }
        None
    }

    fn last(&self) -> Option<String> {
        let last = self.posted.get(self.posted.len().saturating_sub(LAST)..)?;
        let (begin, first, _) = last.first()?;
        let mut before = *begin;
        let mut told = short(first).to_string();
        for (at, text, _) in last.iter().skip(1) {
            let pause = Duration::from_nanos(at.saturating_sub(before));
            let pause =
                if pause >= PAUSE { format!(" {} ms later", pause.as_millis()) } else { String::new() };
            told += &format!(", then{pause} {}", short(text));
            before = *at;
        }
        Some(told)
    }
}

/// Omits keys from the description of a request, unless they are the mistake.
fn short(text: &str) -> &str {
    text.split_once(", rkey").filter(|(_, end)| !end.contains('[')).map_or(text, |(start, _)| start)
}

const ENDED_AFTER: &str = "it ended the connection after ";
const NOTHING_AFTER: &str = "nothing came after ";

/// Returns whether a hint describes the place of a failure. Failures of one cause differ in it.
#[must_use]
pub fn is_about_the_place(hint: &str) -> bool {
    [ENDED_AFTER, NOTHING_AFTER].iter().any(|start| hint.starts_with(start))
}

/// Returns what failures of one cause share: no numbers, no neighbour, no new connections.
#[must_use]
pub fn cause(text: &str) -> String {
    let text = text.split_once(NEIGHBOUR).map_or(text, |(start, _)| start);
    let text = text.split_once(NEWCOMER).map_or(text, |(start, _)| start);
    without_numbers(text)
}

/// Returns a text with each number replaced by one sign.
#[must_use]
pub fn without_numbers(text: &str) -> String {
    let mut cause = String::new();
    let mut is_number = false;
    for one in text.chars() {
        if one.is_ascii_digit() || is_number && one.is_ascii_alphanumeric() {
            if !is_number {
                cause.push('#');
            }
            is_number = true;
        } else {
            is_number = false;
            cause.push(one);
        }
    }
    cause
}

pub(super) const NEIGHBOUR: &str = "; the neighbour, connected before, is no longer served";
pub(super) const NEWCOMER: &str = "; a new connection is not served";

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_backend::{Immediate, RemoteAddress, SendOp};
    use suite::hex::Bytes;

    const WINDOW: Window = Window { address: 0x7000_0000_2000, length: 65536, rkey: 0x0102 };

    fn event(event: &str) -> EntryKind {
        EntryKind::Event { event: event.into() }
    }

    fn came(bytes: &[u8]) -> EntryKind {
        let len = u32::try_from(bytes.len()).unwrap();
        let outcome = Outcome::Received { len, immediate: None, bytes: Bytes(bytes.into()) };
        EntryKind::Completed { id: 1, outcome }
    }

    fn notified(immediate: u32, bytes: &[u8]) -> EntryKind {
        let outcome = Outcome::Notified { immediate, place: None, bytes: Bytes(bytes.into()) };
        EntryKind::Completed { id: 1, outcome }
    }

    fn registers(window: Window) -> EntryKind {
        came(&Message::RegisterXferMemory(window).encode())
    }

    fn says(message: Message) -> EntryKind {
        let bytes = message.encode().to_vec();
        EntryKind::Posted(Request::new(2, SendOp::Send, bytes.len(), true, bytes))
    }

    fn writes(count: u32) -> EntryKind {
        let to = RemoteAddress { address: WINDOW.address, rkey: WINDOW.rkey };
        let op = SendOp::WriteImmediate(to, Immediate(count));
        EntryKind::Posted(Request::new(3, op, count as usize, true, Vec::new()))
    }

    fn hint(reason: &str, entries: Vec<EntryKind>) -> Option<String> {
        let made = std::iter::once(event("Established"));
        let entries = made.chain(entries).map(|what| Entry { at: 0, end: 1, what }).collect();
        of(&Recording { entries }, Role::Server, reason, true)
    }

    #[track_caller]
    fn says_so(reason: &str, entries: Vec<EntryKind>, expected: &str) {
        let hint = hint(reason, entries).unwrap_or_default();
        assert!(hint.contains(expected), "{hint}");
    }

    #[test]
    fn swapped_fields_are_told() {
        let swapped = Window { address: WINDOW.address.swap_bytes(), ..WINDOW };
        says_so("", vec![registers(swapped)], "is 0x700000002000 with its bytes swapped");
        let long = Window { length: 128_u32.swap_bytes(), ..WINDOW };
        says_so("", vec![registers(long)], "length 2147483648 is 128 with its bytes swapped");
        let mut opcode = Message::Keepalive.encode();
        opcode.swap(0, 1);
        says_so("", vec![came(&opcode)], "opcode 0x0200 is 0x0002, Keepalive, with its bytes swapped");
        let own = says(Message::RegisterXferMemory(WINDOW));
        says_so("", vec![own, notified(20_u32.swap_bytes(), &[])], "is 20 with its bytes swapped");
    }

    #[test]
    fn a_key_that_does_not_open_the_window_is_told() {
        let status = CompletionStatus::REM_ACCESS_ERR.0;
        let refused = EntryKind::Completed { id: 3, outcome: Outcome::Failed { status, vendor: 0 } };
        let entries = vec![registers(WINDOW), writes(20), refused];
        says_so(&format!("{REFUSED_REQUEST}…"), entries, "rkey 0x102 does not open it (0x2010000 with");
    }

    #[test]
    fn lengths_and_immediates_are_told() {
        says_so("", vec![came(&[0; 31])], "a control message has 32 bytes");
        says_so("", vec![came(b"+PONG\r\n")], "payload goes by WRITE_WITH_IMM");
        let own = says(Message::RegisterXferMemory(WINDOW));
        says_so("", vec![own, notified(8, b"+PONG\r\n\0")], "imm 8 is one more");
        let shorter = Window { length: 65535, ..WINDOW };
        says_so("", vec![registers(WINDOW), registers(shorter)], "65536 bytes, then 65535");
    }

    #[test]
    fn what_did_not_come_is_told() {
        let silence = format!("{SILENCE}1.5s");
        says_so(&silence, vec![], "has registered no window");
        says_so(&silence, vec![registers(WINDOW), writes(65536)], "is full, and it has registered no other");
        says_so(&silence, vec![registers(WINDOW), writes(1)], "each immediate told of 1");
        let question =
            || says(Message::GetServerFeature { select: 1, features: rdma_proto::wire::FeatureSet::NONE });
        says_so(&silence, vec![registers(WINDOW), question()], "0 of 1 question for features");
        let entries = vec![registers(WINDOW), says(Message::Keepalive)];
        says_so(&format!("{UNACKNOWLEDGED}1.5s"), entries, "0 of 1 messages and immediates");
    }

    #[test]
    fn the_last_before_an_end_is_told() {
        let ended = format!("{ENDED}disconnected");
        let entries = || vec![registers(WINDOW), writes(20), says(Message::Keepalive), event("Disconnected")];
        says_so(&ended, entries(), "after WRITE 20 bytes at 0 of 65536, imm 20, then Keepalive");
        let told = hint(&format!("{SILENCE}1s; 20 {UNTOLD}"), vec![registers(WINDOW), writes(20)]);
        assert_eq!(told, None);
        // Not if the suite disconnected first.
        let mut entries = entries();
        entries.insert(3, EntryKind::Called { call: "disconnect".into() });
        assert_eq!(hint(&ended, entries), None);
    }

    #[test]
    fn connections_before_are_counted() {
        says_so("no connection: rejected", vec![], "it took 2 connections before this one");
    }

    #[test]
    fn a_cause_has_no_numbers() {
        let one = cause("byte 8192 of a reply of 200011 bytes is 0x00, not 0x52");
        assert_eq!(
            one,
            cause("byte 4 of a reply of 20 bytes is 0xee, not 0x24; a new connection is not served: x")
        );
        assert_eq!(one, "byte # of a reply of # bytes is #, not #");
    }
}
