//! The requests of clients, and their rate.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use fastrand::Rng;
use kv_store::command;

use crate::prepare::CONNECTING;
use crate::target::Login;

/// A kind of requests to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Test {
    /// PING, as an array of one bulk string.
    Ping,
    /// SET of a value of the given size.
    Set,
    /// GET of such a value. The keys are stored before the clock runs.
    Get,
    /// Four GETs to one SET, at random.
    Mixed,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ping => "PING",
            Self::Set => "SET",
            Self::Get => "GET",
            Self::Mixed => "MIXED",
        })
    }
}

/// The parameters of a test.
#[derive(Clone, Debug)]
pub struct Load {
    /// Requests of all clients together.
    pub requests: u64,
    /// Clients at the same time.
    pub clients: usize,
    /// Threads that they are spread over.
    pub threads: usize,
    /// Requests that a client sends together, whose replies it awaits together.
    pub pipeline: usize,
    /// Bytes of a value.
    pub size: usize,
    /// Keys to choose from; all requests use one key if it is 1.
    pub keys: u64,
    /// Requests a second of all clients together, sent at their time whether earlier replies have
    /// come or not. `None` sends when the replies have come.
    pub rate: Option<f64>,
    /// The longest silence while replies are due.
    pub timeout: Duration,
    /// The commands that begin each connection.
    pub login: Login,
}

impl Load {
    /// Requests that one client sends together: one in an open loop.
    pub fn batch(&self) -> usize {
        let most = usize::try_from(self.requests).unwrap_or(usize::MAX);
        if self.rate.is_some() { 1 } else { self.pipeline.min(most) }
    }

    pub(crate) fn connecting(&self) -> Duration {
        self.timeout.max(CONNECTING)
    }
}

pub(crate) struct Requests {
    test: Test,
    value: Box<[u8]>,
    keys: u64,
    random: Rng,
    batch: usize,
    /// Requests that are sent together, if all are identical. They are encoded once.
    alike: Option<Box<[u8]>>,
}

#[derive(Default)]
pub(crate) struct Output {
    bytes: Vec<u8>,
    written: usize,
    left: usize,
}

impl Requests {
    pub(crate) fn new(test: Test, load: &Load, seed: u64) -> Self {
        let value = vec![b'x'; load.size].into();
        let mut requests = Self {
            test,
            value,
            keys: load.keys,
            random: Rng::with_seed(seed),
            batch: load.batch().max(1),
            alike: None,
        };
        let alike = match test {
            Test::Ping => true,
            Test::Set | Test::Get => load.keys == 1,
            Test::Mixed => false,
        };
        if alike {
            let mut batch = Vec::new();
            (0..requests.batch).for_each(|_| requests.append(&mut batch));
            requests.alike = Some(batch.into());
        }
        requests
    }

    pub(crate) fn add(&mut self, count: usize, to: &mut Output) {
        if let Some(alike) = &self.alike {
            to.left += alike.len() / self.batch * count;
        } else {
            to.forget_written();
            let before = to.bytes.len();
            (0..count).for_each(|_| self.append(&mut to.bytes));
            to.left += to.bytes.len() - before;
        }
    }

    pub(crate) fn unwritten<'a>(&'a self, of: &'a Output) -> &'a [u8] {
        let source = self.alike.as_deref().unwrap_or(&of.bytes);
        // Identical requests repeat from the beginning.
        let begin = of.written.checked_rem(source.len()).unwrap_or_default();
        let rest = source.get(begin..).unwrap_or_default();
        rest.get(..of.left).unwrap_or(rest)
    }

    fn append(&mut self, to: &mut Vec<u8>) {
        match self.test {
            Test::Ping => command(to, 1, &[b"PING"]),
            Test::Set => self.set(to),
            Test::Mixed if self.random.u8(..5) == 0 => self.set(to),
            Test::Get | Test::Mixed => {
                let key = self.random.u64(..self.keys);
                get(key, to);
            }
        }
    }

    fn set(&mut self, to: &mut Vec<u8>) {
        let key = self.random.u64(..self.keys);
        set(key, &self.value, to);
    }
}

impl Output {
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.written += bytes;
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            self.written = 0;
            self.bytes.clear();
        }
    }

    /// Drops written requests once they are the greater part: an open loop may always have others.
    fn forget_written(&mut self) {
        if self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
    }
}

fn get(key: u64, to: &mut Vec<u8>) {
    command(to, 2, &[b"GET", name(key).as_slice()]);
}

pub(crate) fn set(key: u64, value: &[u8], to: &mut Vec<u8>) {
    command(to, 3, &[b"SET", name(key).as_slice(), value]);
}

/// Keys are as long as those of `valkey-benchmark`.
fn name(key: u64) -> [u8; 16] {
    let mut name = *b"key:000000000000";
    let mut rest = key;
    for digit in name[4..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    name
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn load() -> Load {
        Load {
            requests: 1,
            clients: 1,
            threads: 1,
            pipeline: 1,
            size: 3,
            keys: 10,
            rate: None,
            timeout: Duration::from_secs(1),
            login: Login::default(),
        }
    }

    fn written(requests: &mut Requests, counts: &[usize], most: usize) -> Vec<u8> {
        let (mut output, mut bytes) = (Output::default(), Vec::new());
        let mut write = |requests: &Requests, output: &mut Output| {
            let next = requests.unwritten(output);
            let next = &next[..next.len().min(most)];
            bytes.extend_from_slice(next);
            let len = next.len();
            output.advance(len);
            len > 0
        };
        for count in counts {
            requests.add(*count, &mut output);
            write(requests, &mut output);
        }
        while write(requests, &mut output) {}
        bytes
    }

    const SET: &[u8] = b"*3\r\n$3\r\nSET\r\n$16\r\nkey:000000000000\r\n$3\r\nxxx\r\n";

    #[test]
    fn requests_are_what_valkey_takes() {
        let set = written(&mut Requests::new(Test::Set, &Load { keys: 1, ..load() }, 7), &[1], usize::MAX);
        assert_eq!(set, SET);
        let mut key = Vec::new();
        get(1_234_567, &mut key);
        assert_eq!(key, b"*2\r\n$3\r\nGET\r\n$16\r\nkey:000001234567\r\n");
    }

    #[test]
    fn requests_that_are_alike_are_written_whole() {
        for most in 1..3 * SET.len() {
            let mut requests = Requests::new(Test::Set, &Load { keys: 1, pipeline: 3, ..load() }, 7);
            assert!(requests.alike.is_some());
            assert_eq!(written(&mut requests, &[3, 1, 3, 2], most), SET.repeat(9), "{most} at once");
            let mut requests = Requests::new(Test::Set, &load(), 7);
            assert!(requests.alike.is_none());
            assert_eq!(written(&mut requests, &[3, 1, 3, 2], most).len(), SET.len() * 9, "{most} at once");
        }
    }

    #[test]
    fn output_that_is_never_empty_does_not_grow() {
        let mut requests = Requests::new(Test::Set, &load(), 7);
        let (mut output, mut bytes) = (Output::default(), Vec::new());
        requests.add(3, &mut output);
        for _ in 0..1000 {
            requests.add(1, &mut output);
            let next = &requests.unwritten(&output)[..SET.len()];
            bytes.extend_from_slice(next);
            output.advance(SET.len());
            assert!(output.bytes.len() <= 2 * 4 * SET.len() + SET.len(), "{} bytes", output.bytes.len());
        }
        bytes.extend_from_slice(requests.unwritten(&output));
        let mut same = Requests::new(Test::Set, &load(), 7);
        assert_eq!(bytes, written(&mut same, &[1003], usize::MAX));
    }

    #[test]
    fn no_more_is_sent_together_than_there_is() {
        let batch = |requests, pipeline, rate| Load { requests, pipeline, rate, ..load() }.batch();
        assert_eq!((batch(10, 1 << 40, None), batch(10, 3, None)), (10, 3));
        assert_eq!(batch(10, 3, Some(1.0)), 1);
    }

    #[test]
    fn requests_are_repeatable() {
        let take = |seed| written(&mut Requests::new(Test::Mixed, &load(), seed), &[200], usize::MAX);
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
        let text = String::from_utf8(take(1)).expect("plain text");
        assert!(text.matches("GET").count() > text.matches("SET").count());
        for key in 0..10 {
            assert!(text.contains(&format!("key:{key:012}")), "{key}");
        }
    }
}
