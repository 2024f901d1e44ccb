//! A client's state between its commands: HELLO, MULTI, SUBSCRIBE.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::{Bytes, BytesMut};
use resp_rs::resp2::Frame;

use crate::keys::{bulk, count, error, simple};
use crate::kv::{Store, words};
use crate::resp::append;

/// The most commands of a transaction, and the most channels of a session.
const MOST: usize = 10_000;
/// The most bytes of memory for the commands of a transaction.
const MOST_QUEUED: usize = 16 << 20;
/// The most bytes of memory for a subscriber's messages. Further messages are lost to it.
const MOST_PUBLISHED: usize = 1 << 20;
/// Memory of a message or a word, beside its bytes: its place in a list, and the allocator's.
const BESIDE: usize = 192;

pub(crate) type Channels = HashMap<Bytes, Vec<Weak<Inbox>>>;

/// One client.
#[derive(Default)]
pub struct Session {
    /// It has sent HELLO 3.
    resp3: bool,
    queued: Option<Queued>,
    watched: Watched,
    channels: BTreeSet<Bytes>,
    subscriber: Option<Subscriber>,
}

#[derive(Default)]
struct Watched {
    /// The version that each key had. `None`: there was no such key. One that came and went since
    /// counts as unchanged.
    keys: HashMap<Bytes, Option<u64>>,
    /// What the names take.
    memory: usize,
}

/// The commands of a transaction. Slices of a receive buffer would keep all of that alive.
#[derive(Default)]
struct Queued {
    commands: Vec<Vec<Bytes>>,
    memory: usize,
}

/// A client that can subscribe. Its subscriptions end with it.
struct Subscriber {
    inbox: Arc<Inbox>,
    /// The store's channels, once it has subscribed to one.
    of: Option<Arc<Mutex<Channels>>>,
}

impl Subscriber {
    fn leave<'a>(&self, left: impl IntoIterator<Item = &'a Bytes>) {
        let Some(of) = &self.of else { return };
        let mut channels = lock(of);
        for channel in left {
            if let Some(subscribers) = channels.get_mut(channel) {
                subscribers.retain(|one| !std::ptr::eq(one.as_ptr(), Arc::as_ptr(&self.inbox)));
                if subscribers.is_empty() {
                    channels.remove(channel);
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(subscriber) = &self.subscriber {
            subscriber.leave(&self.channels);
        }
    }
}

pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Waiting {
    messages: Vec<(Bytes, Bytes)>,
    memory: usize,
}

impl Inbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message, unless too many are waiting, in memory of its own, like [`Queued`].
    fn take(&self, channel: &Bytes, payload: &Bytes) -> bool {
        let mut waiting = self.waiting();
        let memory = waiting.memory + channel.len() + payload.len() + BESIDE;
        if memory > MOST_PUBLISHED {
            return false;
        }
        waiting.memory = memory;
        waiting.messages.push((channel.clone(), payload.clone()));
        drop(waiting);
        (self.wake)();
        true
    }
}

impl Session {
    /// Returns a client that can subscribe. A publishing thread calls `wake` when there is
    /// something for [`published`](Self::published).
    pub fn with_waker(wake: impl Fn() + Send + Sync + 'static) -> Self {
        let inbox = Arc::new(Inbox { waiting: Mutex::default(), wake: Box::new(wake) });
        let mut session = Self::default();
        session.subscriber = Some(Subscriber { inbox, of: None });
        session
    }

    /// Appends the reply to `command`. Returns true if the connection must be closed.
    pub fn answer(&mut self, store: &Store, command: Frame, replies: &mut BytesMut) -> bool {
        let words = words(command);
        let Some((name, arguments)) = words.split_first() else { return false };
        let name = name.to_ascii_uppercase();
        match (name.as_slice(), arguments) {
            (b"HELLO", _) => self.hello(arguments, replies),
            (b"MULTI", []) if self.queued.is_none() => {
                self.queued = Some(Queued::default());
                reply(replies, &simple("OK"));
            }
            (b"EXEC" | b"DISCARD", []) => match self.queued.take() {
                None => reply(replies, &error("ERR there is no MULTI before it")),
                Some(_) if name == b"DISCARD" => {
                    self.watched = Watched::default();
                    reply(replies, &simple("OK"));
                }
                Some(Queued { commands, .. }) => {
                    let mut keys = store.keys();
                    let mut watched = std::mem::take(&mut self.watched).keys.into_iter();
                    if watched.any(|(key, version)| keys.version(&key) != version) {
                        reply(replies, &Frame::Array(None));
                        return false;
                    }
                    let all = commands.iter().filter_map(|words| words.split_first());
                    let all =
                        all.map(|(name, arguments)| keys.execute(&name.to_ascii_uppercase(), arguments));
                    let all = all.collect();
                    drop(keys);
                    reply(replies, &Frame::Array(Some(all)));
                }
            },
            (b"MULTI" | b"WATCH" | b"SUBSCRIBE" | b"UNSUBSCRIBE" | b"PUBLISH" | b"QUIT", _)
                if self.queued.is_some() =>
            {
                let name = String::from_utf8_lossy(&name);
                reply(replies, &error(format!("ERR {name} is not allowed in transactions")));
            }
            _ if self.queued.is_some() => reply(replies, &self.queue(&words)),
            (b"WATCH", [_, ..]) => reply(replies, &self.watch(store, arguments)),
            (b"UNWATCH", []) => {
                self.watched = Watched::default();
                reply(replies, &simple("OK"));
            }
            (b"SUBSCRIBE", [_, ..]) => self.subscribe(store, arguments, replies),
            (b"UNSUBSCRIBE", _) => self.unsubscribe(arguments, replies),
            (b"PUBLISH", [channel, payload]) => {
                let channels = lock(store.channels());
                let heard = channels.get_key_value(channel).map_or(0, |(channel, subscribers)| {
                    let payload = Bytes::copy_from_slice(payload);
                    let subscribers = subscribers.iter().filter_map(Weak::upgrade);
                    subscribers.filter(|inbox| inbox.take(channel, &payload)).count()
                });
                drop(channels);
                reply(replies, &count(heard));
            }
            _ => {
                reply(replies, &store.keys().execute(&name, arguments));
                return name == b"QUIT";
            }
        }
        false
    }

    /// Appends what was published since the last call.
    pub fn published(&self, replies: &mut BytesMut) {
        let Some(subscriber) = &self.subscriber else { return };
        let waiting = std::mem::take(&mut *subscriber.inbox.waiting());
        for (channel, payload) in waiting.messages {
            self.push([bulk("message"), bulk(channel), bulk(payload)], replies);
        }
    }

    fn queue(&mut self, command: &[Bytes]) -> Frame {
        let memory = command.iter().map(|word| word.len() + BESIDE).sum();
        match &mut self.queued {
            Some(queued) if queued.commands.len() < MOST && MOST_QUEUED - queued.memory >= memory => {
                queued.memory += memory;
                queued.commands.push(command.iter().map(|word| Bytes::copy_from_slice(word)).collect());
                simple("QUEUED")
            }
            _ => error("ERR too much in one transaction"),
        }
    }

    fn watch(&mut self, store: &Store, keys: &[Bytes]) -> Frame {
        let mut values = store.keys();
        for key in keys {
            if self.watched.keys.contains_key(key) {
                continue;
            }
            self.watched.memory += key.len() + BESIDE;
            if self.watched.memory > MOST_QUEUED {
                self.watched.memory -= key.len() + BESIDE;
                return error("ERR too many watched keys");
            }
            self.watched.keys.insert(Bytes::copy_from_slice(key), values.version(key));
        }
        simple("OK")
    }

    fn hello(&mut self, arguments: &[Bytes], replies: &mut BytesMut) {
        match arguments.first().map(|version| &version[..]) {
            None => {}
            Some(b"2") => self.resp3 = false,
            Some(b"3") => self.resp3 = true,
            Some(_) => return reply(replies, &error("NOPROTO unsupported protocol version")),
        }
        let version = if self.resp3 { 3 } else { 2 };
        let told = [
            (bulk("server"), bulk("kv-store")),
            (bulk("version"), bulk(env!("CARGO_PKG_VERSION"))),
            (bulk("proto"), Frame::Integer(version)),
            (bulk("mode"), bulk("standalone")),
            (bulk("role"), bulk("master")),
        ];
        // A map; in RESP2 an array of its entries.
        let head =
            if self.resp3 { format!("%{}\r\n", told.len()) } else { format!("*{}\r\n", 2 * told.len()) };
        replies.extend_from_slice(head.as_bytes());
        for (name, value) in &told {
            reply(replies, name);
            reply(replies, value);
        }
    }

    fn subscribe(&mut self, store: &Store, channels: &[Bytes], replies: &mut BytesMut) {
        let Some(subscriber) = &mut self.subscriber else {
            return reply(replies, &error("ERR this kind of connection cannot subscribe here"));
        };
        let of = Arc::clone(subscriber.of.get_or_insert_with(|| Arc::clone(store.channels())));
        let inbox = Arc::downgrade(&subscriber.inbox);
        for channel in channels {
            if !self.channels.contains(channel) {
                if self.channels.len() >= MOST {
                    return reply(replies, &error("ERR too many channels"));
                }
                // Copied, like keys.
                let channel = Bytes::copy_from_slice(channel);
                lock(&of).entry(channel.clone()).or_default().push(inbox.clone());
                self.channels.insert(channel);
            }
            self.push([bulk("subscribe"), bulk(channel.clone()), count(self.channels.len())], replies);
        }
    }

    /// Unsubscribes from all channels, if none is named.
    fn unsubscribe(&mut self, channels: &[Bytes], replies: &mut BytesMut) {
        let all: Vec<Bytes> = self.channels.iter().cloned().collect();
        let named = if channels.is_empty() { &all[..] } else { channels };
        for channel in named {
            self.channels.remove(channel);
            if let Some(subscriber) = &self.subscriber {
                subscriber.leave([channel]);
            }
            self.push([bulk("unsubscribe"), bulk(channel.clone()), count(self.channels.len())], replies);
        }
        if named.is_empty() {
            self.push([bulk("unsubscribe"), Frame::BulkString(None), Frame::Integer(0)], replies);
        }
    }

    /// In RESP3 a message that is no reply to a command has a type of its own.
    fn push(&self, frames: [Frame; 3], replies: &mut BytesMut) {
        replies.extend_from_slice(if self.resp3 { b">3\r\n" } else { b"*3\r\n" });
        frames.iter().for_each(|frame| reply(replies, frame));
    }
}

fn lock(channels: &Mutex<Channels>) -> MutexGuard<'_, Channels> {
    channels.lock().unwrap_or_else(PoisonError::into_inner)
}

fn reply(replies: &mut BytesMut, frame: &Frame) {
    append(replies, frame);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn ask(session: &mut Session, store: &Store, commands: &[&str]) -> String {
        let mut replies = BytesMut::new();
        for command in commands {
            let words = command.split(' ').map(|word| bulk(word.to_string())).collect();
            session.answer(store, Frame::Array(Some(words)), &mut replies);
        }
        String::from_utf8(replies.to_vec()).unwrap()
    }

    #[test]
    fn numbers_and_lifetimes() {
        let (store, mut session) = (Store::default(), Session::default());
        let mut one = |commands: &[&str]| ask(&mut session, &store, commands);
        assert_eq!(one(&["INCR n", "INCRBY n 41", "DECR n", "GET n"]), ":1\r\n:42\r\n:41\r\n$2\r\n41\r\n");
        assert_eq!(one(&["SET n 9223372036854775807", "TTL n"]), "+OK\r\n:-1\r\n");
        for wrong in ["INCR n", "INCRBY n x", "EXPIRE n x", "SET n 1 EX 0", "SET n 1 XX 5"] {
            assert!(one(&[wrong]).starts_with("-ERR "), "{wrong}");
        }
        assert_eq!(one(&["EXPIRE n 100", "TTL n", "PERSIST n", "TTL n"]), ":1\r\n:100\r\n:1\r\n:-1\r\n");
        assert_eq!(one(&["EXPIRE n 0", "TTL n", "EXISTS n", "EXPIRE n 1"]), ":1\r\n:-2\r\n:0\r\n:0\r\n");
        // Beyond any clock's range.
        assert_eq!(one(&["SET n 1 EX 9223372036854775807", "TTL n"]), "+OK\r\n:-1\r\n");
        assert_eq!(one(&["SET n 1 PX 1"]), "+OK\r\n");
        while one(&["EXISTS n"]) != ":0\r\n" {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_transaction_happens_as_a_whole_or_not() {
        let (store, mut session) = (Store::default(), Session::default());
        let mut one = |commands: &[&str]| ask(&mut session, &store, commands);
        assert_eq!(one(&["MULTI", "SET a 1", "INCR a"]), "+OK\r\n+QUEUED\r\n+QUEUED\r\n");
        assert_eq!(ask(&mut Session::default(), &store, &["GET a"]), "$-1\r\n");
        assert!(one(&["MULTI"]).starts_with("-ERR") && one(&["SUBSCRIBE c"]).starts_with("-ERR"));
        assert_eq!(one(&["EXEC", "GET a"]), "*2\r\n+OK\r\n:2\r\n$1\r\n2\r\n");
        assert_eq!(one(&["MULTI", "SET a 3", "DISCARD", "GET a"]), "+OK\r\n+QUEUED\r\n+OK\r\n$1\r\n2\r\n");
        assert!(one(&["EXEC"]).starts_with("-ERR"));
    }

    #[test]
    fn a_transaction_on_changed_keys_does_not_happen() {
        let (store, mut session) = (Store::default(), Session::default());
        let mut one = |commands: &[&str]| ask(&mut session, &store, commands);
        let other = |command: &str| ask(&mut Session::default(), &store, &[command]);
        for change in
            ["SET a 1", "SET a 1", "INCR a", "PEXPIRE a 9999", "PERSIST a", "SETRANGE a 0 7", "DEL a"]
        {
            assert_eq!(one(&["WATCH a b", "MULTI", "EXEC"]), "+OK\r\n+OK\r\n*0\r\n");
            one(&["WATCH a b", "MULTI", "SET c 1"]);
            other(change);
            assert_eq!(one(&["EXEC", "GET c"]), "*-1\r\n$-1\r\n", "{change}");
            assert_eq!(one(&["MULTI", "EXEC"]), "+OK\r\n*0\r\n", "nothing is watched any more");
        }
        one(&["WATCH a", "UNWATCH", "MULTI"]);
        assert!(one(&["WATCH b"]).starts_with("-ERR"));
        other("SET a 1");
        assert_eq!(one(&["EXEC", "WATCH a", "MULTI", "DISCARD"]), "*0\r\n+OK\r\n+OK\r\n+OK\r\n");
        other("RENAME a b");
        assert_eq!(one(&["MULTI", "EXEC"]), "+OK\r\n*0\r\n");
        for _again in 0..3 {
            assert_eq!(one(&[&format!("WATCH {}", "x".repeat(MOST_QUEUED / 2))]), "+OK\r\n");
        }
        let long = format!("WATCH {}", "y".repeat(MOST_QUEUED / 2));
        assert!(one(&[&long]).starts_with("-ERR too many"));
    }

    #[test]
    fn values_have_parts() {
        let (store, mut session) = (Store::default(), Session::default());
        let mut one = |commands: &[&str]| ask(&mut session, &store, commands);
        assert_eq!(one(&["SETRANGE a 3 de", "GET a"]), ":5\r\n$5\r\n\0\0\0de\r\n");
        assert_eq!(one(&["SETRANGE a 0 abc", "SETRANGE a 9 ", "GET a"]), ":5\r\n:5\r\n$5\r\nabcde\r\n");
        for (range, part) in
            [("0 -1", "abcde"), ("1 2", "bc"), ("-2 99", "de"), ("3 1", ""), ("9 9", ""), ("-9 0", "a")]
        {
            assert_eq!(one(&[&format!("GETRANGE a {range}")]), format!("${}\r\n{part}\r\n", part.len()));
        }
        assert_eq!(one(&["GETRANGE none 0 -1", "SETRANGE none 0 ", "EXISTS none"]), "$0\r\n\r\n:0\r\n:0\r\n");
        for wrong in ["SETRANGE a -1 x", "SETRANGE a 536870912 x", "SETRANGE a x y", "GETRANGE a x 1"] {
            assert!(one(&[wrong]).starts_with("-ERR "), "{wrong}");
        }
        assert_eq!(one(&["PEXPIRE a 99999", "SETRANGE a 0 x", "RENAME a b"]), ":1\r\n:5\r\n+OK\r\n");
        assert_eq!(one(&["PERSIST b", "EXISTS a", "GET b"]), ":1\r\n:0\r\n$5\r\nxbcde\r\n");
        assert_eq!(one(&["RENAME a b"]), "-ERR no such key\r\n");
    }

    #[test]
    fn what_is_published_wakes_those_who_subscribed() {
        static WOKEN: AtomicUsize = AtomicUsize::new(0);
        let store = Store::default();
        let listening = || {
            Session::with_waker(|| {
                WOKEN.fetch_add(1, Ordering::Relaxed);
            })
        };
        let (mut two, mut three, mut other) = (listening(), listening(), Session::default());
        assert_eq!(ask(&mut two, &store, &["SUBSCRIBE c"]), "*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n");
        let hello = ask(&mut three, &store, &["HELLO 3"]);
        assert!(hello.starts_with("%5\r\n") && hello.contains("$5\r\nproto\r\n:3\r\n"), "{hello}");
        assert!(ask(&mut three, &store, &["SUBSCRIBE c"]).starts_with(">3\r\n$9\r\nsubscribe"));
        assert!(ask(&mut other, &store, &["SUBSCRIBE c"]).starts_with("-ERR"));

        assert_eq!(ask(&mut other, &store, &["PUBLISH c hi", "PUBLISH d hi"]), ":2\r\n:0\r\n");
        assert_eq!(WOKEN.load(Ordering::Relaxed), 2);
        let mut published = BytesMut::new();
        two.published(&mut published);
        assert_eq!(&published[..], b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nhi\r\n");
        // A subscriber that reads nothing misses messages beyond a bound.
        let long = format!("PUBLISH c {}", "x".repeat(MOST_PUBLISHED - BESIDE - 1));
        assert_eq!(ask(&mut other, &store, &[&long]), ":1\r\n");

        assert_eq!(ask(&mut three, &store, &["SUBSCRIBE e"]).matches("subscribe").count(), 1);
        drop(three);
        assert_eq!(
            lock(store.channels()).keys().collect::<Vec<_>>(),
            ["c"],
            "its subscriptions are left behind"
        );
        assert_eq!(ask(&mut two, &store, &["UNSUBSCRIBE"]), "*3\r\n$11\r\nunsubscribe\r\n$1\r\nc\r\n:0\r\n");
        assert_eq!(ask(&mut other, &store, &["PUBLISH c hi"]), ":0\r\n");
        assert!(ask(&mut other, &store, &["HELLO 4"]).starts_with("-NOPROTO"));
    }

    /// Returns a command whose words are slices of a long buffer, and that buffer.
    fn cut(words: &[&str]) -> (Frame, Bytes) {
        let mut buffer = Bytes::from(format!("{}{}", words.concat(), "x".repeat(1 << 20)));
        let all = buffer.clone();
        let words = words.iter().map(|word| bulk(buffer.split_to(word.len()))).collect();
        (Frame::Array(Some(words)), all)
    }

    #[test]
    fn what_waits_keeps_no_receive_buffer() {
        let (store, mut replies) = (Store::default(), BytesMut::new());
        let mut session = Session::with_waker(|| ());
        for words in
            [&["SUBSCRIBE", "c"][..], &["PUBLISH", "c", "hi"], &["MULTI"], &["SET", "a", "1"], &["GET", "a"]]
        {
            let (command, buffer) = cut(words);
            session.answer(&store, command, &mut replies);
            assert!(buffer.is_unique(), "{words:?}");
        }
        assert!(replies.ends_with(b":1\r\n+OK\r\n+QUEUED\r\n+QUEUED\r\n"), "{replies:?}");
    }

    #[test]
    fn what_waits_is_bounded_by_its_memory() {
        let (store, mut other) = (Store::default(), Session::default());
        let subscriber = || {
            let mut session = Session::with_waker(|| ());
            ask(&mut session, &store, &["SUBSCRIBE "]);
            session
        };
        let two = [subscriber(), subscriber()];
        let heard = (0..100_000).take_while(|_| ask(&mut other, &store, &["PUBLISH  "]) == ":2\r\n").count();
        assert_eq!(heard, MOST_PUBLISHED / BESIDE);
        // Sending makes room again.
        two[0].published(&mut BytesMut::new());
        assert_eq!(ask(&mut other, &store, &["PUBLISH  "]), ":1\r\n");

        ask(&mut other, &store, &["MULTI"]);
        let long = format!("SET a {}", "x".repeat(1 << 20));
        let queued = (0..100_000).take_while(|_| ask(&mut other, &store, &[&long]) == "+QUEUED\r\n").count();
        assert_eq!(queued, 15);
        assert!(ask(&mut other, &store, &[&long]).starts_with("-ERR too much"));
        assert_eq!(ask(&mut other, &store, &["GET a"]), "+QUEUED\r\n");
    }
}
