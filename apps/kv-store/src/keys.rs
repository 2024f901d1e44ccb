//! Keys, their values, and the commands on them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use resp_rs::resp2::Frame;

#[derive(Default)]
pub(crate) struct Keys {
    values: HashMap<Bytes, Value>,
    changes: u64,
}

/// The most bytes of a value that grows, as Valkey's `proto-max-bulk-len`.
const LONGEST: usize = 512 << 20;

struct Value {
    bytes: Bytes,
    expires: Option<Instant>,
    version: u64,
}

impl Keys {
    /// Runs a command, whose name is in upper case. Returns the reply.
    pub(crate) fn execute(&mut self, name: &[u8], arguments: &[Bytes]) -> Frame {
        match (name, arguments) {
            (b"PING", []) => simple("PONG"),
            (b"PING" | b"ECHO", [message]) => bulk(message.clone()),
            (b"SET", [key, value]) => self.put(key, Bytes::copy_from_slice(value), None),
            (b"SET", [key, value, unit, time]) => match lifetime(unit, time) {
                Some(expires) => self.put(key, Bytes::copy_from_slice(value), expires),
                None => error("ERR of SET's options there are EX and PX, with a time above 0"),
            },
            (b"GET", [key]) => Frame::BulkString(self.get(key).map(|value| value.bytes.clone())),
            (b"DEL", [_, ..]) => self.count(arguments, |keys, key| keys.values.remove(key).is_some()),
            (b"EXISTS", [_, ..]) => self.count(arguments, |_, _| true),
            (b"STRLEN", [key]) => count(self.get(key).map_or(0, |value| value.bytes.len())),
            (b"GETRANGE", [key, first, last]) => self.range(key, number(first), number(last)),
            (b"SETRANGE", [key, offset, bytes]) => self.set_range(key, number(offset), bytes),
            (b"RENAME", [from, to]) => match self.get(from).is_some().then(|| self.values.remove(from)) {
                Some(Some(Value { bytes, expires, .. })) => self.put(to, bytes, expires),
                _ => error("ERR no such key"),
            },
            (b"INCR", [key]) => self.add(key, Some(1)),
            (b"DECR", [key]) => self.add(key, Some(-1)),
            (b"INCRBY", [key, by]) => self.add(key, number(by)),
            (b"EXPIRE", [key, time]) => self.expire(key, b"EX", time),
            (b"PEXPIRE", [key, time]) => self.expire(key, b"PX", time),
            (b"PERSIST", [key]) => {
                let version = self.change();
                Frame::Integer(i64::from(self.get(key).is_some_and(|value| {
                    value.version = version;
                    value.expires.take().is_some()
                })))
            }
            (b"TTL", [key]) => Frame::Integer(self.left(key, |left| left.as_millis().div_ceil(1000))),
            (b"PTTL", [key]) => Frame::Integer(self.left(key, |left| left.as_millis())),
            (b"DBSIZE", []) => count(self.values.len()),
            (b"FLUSHALL", _) => {
                self.values.clear();
                simple("OK")
            }
            (b"INFO", _) => bulk(info(self.values.len())),
            (b"COMMAND", _) => Frame::Array(Some(Vec::new())),
            // Clients ask before they run benchmarks. Nothing is configured here.
            (b"CONFIG", [get, ..]) if get.eq_ignore_ascii_case(b"GET") => Frame::Array(Some(Vec::new())),
            (b"SELECT" | b"CLIENT", [_, ..]) | (b"QUIT", []) => simple("OK"),
            // As in Valkey, no client is served meanwhile: the keys are locked.
            (b"DEBUG", [sleep, seconds]) if sleep.eq_ignore_ascii_case(b"SLEEP") => {
                let seconds = std::str::from_utf8(seconds).ok().and_then(|text| text.parse().ok());
                std::thread::sleep(Duration::try_from_secs_f64(seconds.unwrap_or(0.0)).unwrap_or_default());
                simple("OK")
            }
            // Nothing is ever saved. Tools that request it check that the connection survives it.
            (b"BGSAVE", _) => simple("Background saving started"),
            // It begins as Valkey's own does: clients look for that, as for a server without HELLO.
            _ => {
                let name = String::from_utf8_lossy(name);
                error(format!("ERR unknown command '{name}', or a wrong number of arguments for it"))
            }
        }
    }

    fn get(&mut self, key: &Bytes) -> Option<&mut Value> {
        let expires = self.values.get(key)?.expires;
        if expires.is_some_and(|at| at <= Instant::now()) {
            self.values.remove(key);
        }
        self.values.get_mut(key)
    }

    /// Sets a key. The name is copied: a slice of a receive buffer would keep all of it alive.
    fn put(&mut self, key: &[u8], bytes: Bytes, expires: Option<Instant>) -> Frame {
        let version = self.change();
        self.values.insert(Bytes::copy_from_slice(key), Value { bytes, expires, version });
        simple("OK")
    }

    const fn change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    pub(crate) fn version(&mut self, key: &Bytes) -> Option<u64> {
        self.get(key).map(|value| value.version)
    }

    /// Returns the bytes from `first` to `last`, both included. Negative ones count from the end.
    fn range(&mut self, key: &Bytes, first: Option<i64>, last: Option<i64>) -> Frame {
        let Some((first, last)) = first.zip(last) else { return no_number() };
        let Some(bytes) = self.get(key).map(|value| &value.bytes) else { return bulk("") };
        let len = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        let place = |at: i64| if at < 0 { len.saturating_add(at).max(0) } else { at.min(len) };
        let [first, end] = [place(first), place(last).saturating_add(1).min(len)];
        let range = usize::try_from(first).unwrap_or(0)..usize::try_from(end).unwrap_or(0);
        bulk(if range.start < range.end { bytes.slice(range) } else { Bytes::new() })
    }

    /// Writes `bytes` from `offset` on. The value grows if it ends before, by zeros.
    fn set_range(&mut self, key: &Bytes, offset: Option<i64>, bytes: &[u8]) -> Frame {
        let Some(offset) = offset.and_then(|offset| usize::try_from(offset).ok()) else { return no_number() };
        let end = offset.saturating_add(bytes.len());
        if end > LONGEST {
            return error("ERR string exceeds maximum allowed size (proto-max-bulk-len)");
        }
        let (before, expires) = self
            .get(key)
            .map_or((Bytes::new(), None), |value| (std::mem::take(&mut value.bytes), value.expires));
        if bytes.is_empty() && before.is_empty() {
            return count(0);
        }
        let mut value = if before.is_empty() {
            // Of the system: pages without an access take no memory.
            BytesMut::zeroed(end)
        } else {
            // A copy if a reply still has it.
            BytesMut::from(before)
        };
        if !bytes.is_empty() && value.len() < end {
            value.resize(end, 0);
        }
        if let Some(place) = value.get_mut(offset..end) {
            place.copy_from_slice(bytes);
        }
        let len = count(value.len());
        self.put(key, value.freeze(), expires);
        len
    }

    fn count(&mut self, keys: &[Bytes], test: fn(&mut Self, &Bytes) -> bool) -> Frame {
        count(keys.iter().filter(|key| self.get(key).is_some() && test(self, key)).count())
    }

    fn add(&mut self, key: &Bytes, by: Option<i64>) -> Frame {
        let before = self.get(key).map_or(Some(0), |value| number(&value.bytes));
        let Some(sum) = before.zip(by).and_then(|(before, by)| before.checked_add(by)) else {
            return no_number();
        };
        let expires = self.get(key).and_then(|value| value.expires);
        self.put(key, Bytes::from(sum.to_string()), expires);
        Frame::Integer(sum)
    }

    fn expire(&mut self, key: &Bytes, unit: &[u8], time: &[u8]) -> Frame {
        let Some(time) = number(time) else { return no_number() };
        let version = self.change();
        let Some(value) = self.get(key) else { return Frame::Integer(0) };
        if time <= 0 {
            self.values.remove(key);
        } else {
            value.version = version;
            value.expires = lifetime(unit, time.to_string().as_bytes()).flatten();
        }
        Frame::Integer(1)
    }

    /// Returns a key's remaining time; -1 if it stays, -2 if there is no such key.
    fn left(&mut self, key: &Bytes, told: fn(Duration) -> u128) -> i64 {
        match self.get(key).map(|value| value.expires) {
            None => -2,
            Some(None) => -1,
            Some(Some(at)) => {
                i64::try_from(told(at.saturating_duration_since(Instant::now()))).unwrap_or(i64::MAX)
            }
        }
    }
}

/// Returns when a lifetime of SET ends, if ever. `None` if it is invalid.
fn lifetime(unit: &[u8], time: &[u8]) -> Option<Option<Instant>> {
    let time = u64::try_from(number(time)?).ok().filter(|time| *time > 0)?;
    let time = match unit.to_ascii_uppercase().as_slice() {
        b"EX" => Duration::from_secs(time),
        b"PX" => Duration::from_millis(time),
        _ => return None,
    };
    Some(Instant::now().checked_add(time))
}

fn no_number() -> Frame {
    error("ERR value is not an integer or out of range")
}

fn number(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

pub(crate) fn simple(text: &'static str) -> Frame {
    Frame::SimpleString(Bytes::from_static(text.as_bytes()))
}

pub(crate) fn bulk(bytes: impl Into<Bytes>) -> Frame {
    Frame::BulkString(Some(bytes.into()))
}

pub(crate) fn error(text: impl Into<Bytes>) -> Frame {
    Frame::Error(text.into())
}

pub(crate) fn count(number: usize) -> Frame {
    Frame::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn info(keys: usize) -> String {
    format!(
        "# Server\r\nserver_name:kv_server\r\nvalkey_version:0.0.0\r\nredis_version:0.0.0\r\nredis_mode:standalone\r\n\
         tcp_port:0\r\n# Clients\r\nmaxclients:10000\r\n# Persistence\r\nloading:0\r\n# Replication\r\nrole:master\r\n\
         # Keyspace\r\ndb0:keys={keys},expires=0,avg_ttl=0\r\n"
    )
}
