//! The values that a client expects of its keys. They are made from numbers, so that every byte can
//! be compared without being kept.
//!
//! A session has keys of its own. A command of an older connection may be executed long after that
//! connection is gone. So a key whose store was not answered is never used again. All other keys
//! must be there in the next session, unless the server was killed meanwhile.

use std::collections::BTreeMap;

use bytes::Bytes;
use fastrand::Rng;
use resp_rs::resp2::Frame;

const SLOTS: u32 = 12;
const LONGEST: usize = 2 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Set(String, Bytes),
    Get(String),
    Del(String),
    /// Sends text that the server echoes.
    Echo(Bytes),
}

impl Command {
    pub(super) fn words(&self) -> Vec<&[u8]> {
        match self {
            Self::Set(key, value) => vec![b"SET", key.as_bytes(), value],
            Self::Get(key) => vec![b"GET", key.as_bytes()],
            Self::Del(key) => vec![b"DEL", key.as_bytes()],
            Self::Echo(text) => vec![b"ECHO", text],
        }
    }

    /// Appends it in wire format, without a value to SET and its line end: the caller adds these.
    pub(super) fn write_head(&self, into: &mut Vec<u8>) {
        let words = self.words();
        // The value may be long, or lent, and is not copied here.
        let whole = words.len() - usize::from(self.value().is_some());
        kv_store::command(into, words.len(), &words[..whole]);
        if let Some(value) = self.value() {
            into.extend_from_slice(format!("${}\r\n", value.len()).as_bytes());
        }
    }

    pub(super) const fn value(&self) -> Option<&Bytes> {
        match self {
            Self::Set(_, value) => Some(value),
            Self::Get(_) | Self::Del(_) | Self::Echo(_) => None,
        }
    }
}

/// A value, given by the numbers that it is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    seed: u64,
    len: usize,
}

impl Value {
    fn any(rng: &mut Rng) -> Self {
        // Most are short. A few do not fit a window of 1 MiB.
        let most = match rng.u32(0..100) {
            0..60 => 4 << 10,
            60..92 => 64 << 10,
            92..99 => 512 << 10,
            _ => LONGEST,
        };
        Self { seed: rng.u64(..), len: rng.usize(0..=most) }
    }

    fn bytes(self) -> Bytes {
        let mut bytes = vec![0; self.len];
        Rng::with_seed(self.seed).fill(&mut bytes);
        bytes.into()
    }
}

/// Commands that belong together, and their expected replies.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    pub commands: Vec<Command>,
    expected: Vec<Expected>,
}

#[derive(Clone, Copy, Debug)]
enum Expected {
    Marked,
    Stored { slot: u32, value: Value },
    Mark(u64),
    Found(Option<Value>),
    Deleted { slot: Option<u32> },
    Said(Value),
}

impl Exchange {
    fn push(&mut self, command: Command, expected: Expected) {
        self.commands.push(command);
        self.expected.push(expected);
    }

    fn find(&mut self, key: String, value: Option<Value>) {
        self.push(Command::Get(key), Expected::Found(value));
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A key is missing on a server that may have lost everything. The next session's mark decides.
    Missing(String),
    /// A fault that no loss explains.
    Wrong(String),
}

#[derive(Debug)]
struct EndedSession {
    session: u64,
    certain: BTreeMap<u32, Option<Value>>,
}

pub(super) struct Keys {
    name: String,
    rng: Rng,
    session: u64,
    marked: bool,
    /// The value that each key of this session must have. Keys with unknown values are missing.
    certain: BTreeMap<u32, Option<Value>>,
    past: Option<EndedSession>,
    /// Keys of older sessions, to be deleted.
    rubbish: Vec<String>,
}

impl Keys {
    /// Creates the keys of a client with this name, which no other client has.
    pub(super) const fn new(name: String, rng: Rng) -> Self {
        Self {
            name,
            rng,
            session: 0,
            marked: false,
            certain: BTreeMap::new(),
            past: None,
            rubbish: Vec::new(),
        }
    }

    fn key(&self, session: u64, slot: u32) -> String {
        format!("soak:{}:{session}:{slot}", self.name)
    }

    fn mark(&self, session: u64) -> String {
        format!("soak:{}:{session}:mark", self.name)
    }

    /// Begins a session. The exchange requests all keys of the last session that left any, its mark
    /// first: together, because a connection that reconnects may find another server each time.
    pub(super) fn begin(&mut self) -> Option<Exchange> {
        // A session without its mark knows of no keys that must be there; those before it stay.
        let certain = std::mem::take(&mut self.certain);
        if self.marked {
            self.past = Some(EndedSession { session: self.session, certain });
        }
        if self.session > 0 {
            let (session, mut old) = (self.session, vec![self.mark(self.session)]);
            old.extend((0..SLOTS).map(|slot| self.key(session, slot)));
            // For `open`, once they are checked.
            self.rubbish.extend(old);
        }
        self.session += 1;
        self.marked = false;
        let past = self.past.as_ref()?;
        let mut exchange = Exchange::default();
        exchange.push(Command::Get(self.mark(past.session)), Expected::Mark(past.session));
        for (slot, value) in &past.certain {
            exchange.find(self.key(past.session, *slot), *value);
        }
        Some(exchange)
    }

    /// Judges the replies to [`Keys::begin`]. A key missing beside the mark is a fault. Without the
    /// mark all keys are gone, as after a kill: then it returns the mark's key.
    pub(super) fn remembered(
        &mut self,
        exchange: &Exchange,
        replies: &[Frame],
    ) -> Result<Option<String>, String> {
        if let (Some(past), Some(Frame::BulkString(None))) = (&self.past, replies.first()) {
            let mark = self.mark(past.session);
            self.past = None;
            // Keys of older sessions have gone with the mark.
            self.rubbish.clear();
            return Ok(Some(mark));
        }
        match self.judge(exchange, replies) {
            Ok(()) => Ok(None),
            Err(Fault::Missing(what) | Fault::Wrong(what)) => Err(what),
        }
    }

    /// Deletes the keys of older sessions; they were checked.
    pub(super) fn open(&mut self) -> Exchange {
        self.past = None;
        let mut exchange = Exchange::default();
        for key in &self.rubbish {
            exchange.push(Command::Del(key.clone()), Expected::Deleted { slot: None });
        }
        exchange
    }

    /// Afterwards: stores this session's mark. Its keys count once the mark is answered.
    pub(super) fn leave_mark(&mut self) -> Exchange {
        self.rubbish.clear();
        let mut exchange = Exchange::default();
        let number = self.session.to_string().into();
        exchange.push(Command::Set(self.mark(self.session), number), Expected::Marked);
        exchange
    }

    pub(super) fn forget(&mut self) {
        (self.past, self.marked) = (None, false);
        self.certain.clear();
    }

    /// Returns commands. What they store or delete is unknown until they are answered.
    pub(super) fn any(&mut self) -> Exchange {
        let mut exchange = Exchange::default();
        let usable: Vec<u32> = self.certain.keys().copied().collect();
        let count = 1 + if self.rng.u32(0..4) == 0 { self.rng.usize(0..16) } else { 0 };
        let chosen: Vec<u32> = self.rng.choose_multiple(usable, count);
        match self.rng.u32(0..10) {
            0..4 => {
                for slot in chosen {
                    let value = Value::any(&mut self.rng);
                    // Never used again without a reply: the command may be executed much later.
                    self.certain.remove(&slot);
                    exchange.push(
                        Command::Set(self.key(self.session, slot), value.bytes()),
                        Expected::Stored { slot, value },
                    );
                }
            }
            4..8 => {
                for slot in chosen {
                    exchange.find(self.key(self.session, slot), self.certain.get(&slot).copied().flatten());
                }
            }
            8 => {
                for slot in chosen {
                    self.certain.remove(&slot);
                    exchange.push(
                        Command::Del(self.key(self.session, slot)),
                        Expected::Deleted { slot: Some(slot) },
                    );
                }
            }
            _ => self.say(count, &mut exchange),
        }
        exchange
    }

    pub(super) fn echoes(&mut self) -> Exchange {
        let mut exchange = Exchange::default();
        let count = self.rng.usize(1..8);
        self.say(count, &mut exchange);
        exchange
    }

    /// Appends commands that fit one window, for a client that writes all before it reads.
    fn say(&mut self, count: usize, exchange: &mut Exchange) {
        for _ in 0..count {
            let value = Value { seed: self.rng.u64(..), len: self.rng.usize(0..=16 << 10) };
            exchange.push(Command::Echo(value.bytes()), Expected::Said(value));
        }
    }

    /// Compares the replies byte for byte, and records what they prove.
    pub(super) fn judge(&mut self, exchange: &Exchange, replies: &[Frame]) -> Result<(), Fault> {
        if replies.len() != exchange.commands.len() {
            let what = format!("{} replies to {} commands", replies.len(), exchange.commands.len());
            return Err(Fault::Wrong(what));
        }
        for ((command, expected), reply) in exchange.commands.iter().zip(&exchange.expected).zip(replies) {
            let wrong = |what: String| {
                let mut words = command.words();
                // The key, or the beginning of a text: enough to find the command in a log.
                words.truncate(2);
                let words: Vec<_> =
                    words.iter().map(|word| String::from_utf8_lossy(&word[..word.len().min(60)])).collect();
                format!("{}: {what}", words.join(" "))
            };
            match (expected, reply) {
                (Expected::Marked, Frame::SimpleString(status)) if status == "OK" => {
                    self.marked = true;
                    // Of a new session no key exists yet.
                    self.certain = (0..SLOTS).map(|slot| (slot, None)).collect();
                }
                (Expected::Stored { slot, value }, Frame::SimpleString(status)) if status == "OK" => {
                    self.certain.insert(*slot, Some(*value));
                }
                // DEL counts the keys that were there, and not all of these were stored.
                (Expected::Deleted { slot }, Frame::Integer(0 | 1)) => {
                    if let Some(slot) = slot {
                        self.certain.insert(*slot, None);
                    }
                }
                (Expected::Mark(session), Frame::BulkString(Some(mark)))
                    if **mark == *session.to_string().as_bytes() => {}
                (Expected::Found(None), Frame::BulkString(None)) => {}
                (Expected::Found(Some(value)) | Expected::Said(value), Frame::BulkString(Some(found))) => {
                    if let Some(difference) = difference(&value.bytes(), found) {
                        return Err(Fault::Wrong(wrong(difference)));
                    }
                }
                (expected, reply) => {
                    let wanted = match expected {
                        Expected::Marked | Expected::Stored { .. } => "+OK".into(),
                        Expected::Mark(session) => format!("the mark {session}"),
                        Expected::Found(None) => "nothing".into(),
                        Expected::Deleted { .. } => ":0 or :1".into(),
                        Expected::Found(Some(value)) | Expected::Said(value) => {
                            format!("{} bytes", value.len)
                        }
                    };
                    let what = wrong(format!("{} came back and not {wanted}", told(Some(reply))));
                    let is_gone = matches!(reply, Frame::BulkString(None));
                    return Err(if is_gone { Fault::Missing(what) } else { Fault::Wrong(what) });
                }
            }
        }
        Ok(())
    }
}

fn difference(expected: &[u8], found: &[u8]) -> Option<String> {
    if expected.len() != found.len() {
        return Some(format!("{} bytes came back of {}", found.len(), expected.len()));
    }
    let at = expected.iter().zip(found).position(|(expected, found)| expected != found)?;
    Some(format!("byte {at} of {} differs", expected.len()))
}

fn told(reply: Option<&Frame>) -> String {
    match reply {
        None => "no reply".into(),
        Some(Frame::SimpleString(text)) => format!("+{}", String::from_utf8_lossy(text)),
        Some(Frame::Error(text)) => format!("-{}", String::from_utf8_lossy(text)),
        Some(Frame::Integer(number)) => format!(":{number}"),
        Some(Frame::BulkString(None)) => "nothing".into(),
        Some(Frame::BulkString(Some(bytes))) => format!("{} bytes", bytes.len()),
        Some(Frame::Array(_)) => "an array".into(),
    }
}
