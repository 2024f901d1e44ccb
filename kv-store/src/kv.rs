//! A key-value store that answers enough of RESP for `valkey-cli` and `valkey-benchmark`.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use resp_rs::resp2::{Frame, frame_to_bytes};

use crate::resp::FrameReader;

/// Replies are sent once this many bytes are waiting, so that a long pipeline does not pile them up.
pub const REPLY_BATCH: usize = 256 << 10;

/// All keys and their values.
#[derive(Default)]
pub struct Store(Mutex<HashMap<Bytes, Bytes>>);

impl Store {
    /// Serves one client on a blocking stream until it leaves. Replies to commands that arrived together leave together.
    pub fn serve(&self, stream: impl Read + Write) -> io::Result<()> {
        let mut reader = FrameReader::new(stream);
        let mut replies = BytesMut::new();
        loop {
            while let Some(command) = reader.buffered()? {
                let quit = self.answer(command, &mut replies);
                if quit || replies.len() >= REPLY_BATCH {
                    reader.stream().write_all(&replies)?;
                    replies.clear();
                }
                if quit {
                    return Ok(());
                }
            }
            reader.stream().write_all(&replies)?;
            replies.clear();
            if !reader.fill()? {
                return Ok(());
            }
        }
    }

    /// Appends the reply to `command`; true if the connection is to be closed.
    pub fn answer(&self, command: Frame, replies: &mut BytesMut) -> bool {
        let words: Vec<Bytes> = command
            .into_array()
            .unwrap_or_default()
            .into_iter()
            .filter_map(|word| word.into_bulk_string().ok())
            .collect();
        let Some((name, arguments)) = words.split_first() else {
            return false; // an empty command has no reply
        };
        let name = name.to_ascii_uppercase();
        let reply = self.execute(&name, arguments);
        replies.extend_from_slice(&frame_to_bytes(&reply));
        name == b"QUIT"
    }

    fn execute(&self, name: &[u8], arguments: &[Bytes]) -> Frame {
        // A poisoned lock only means that another client's thread died between two whole operations.
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match (name, arguments) {
            (b"PING", []) => simple("PONG"),
            (b"PING" | b"ECHO", [message]) => bulk(message.clone()),
            (b"SET", [key, value]) => {
                // Copies: what was cut from the receive buffer would keep all of it alive.
                keys.insert(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value));
                simple("OK")
            }
            (b"GET", [key]) => Frame::BulkString(keys.get(key).cloned()),
            (b"DEL", [_, ..]) => count(arguments.iter().filter(|key| keys.remove(*key).is_some()).count()),
            (b"EXISTS", [_, ..]) => count(arguments.iter().filter(|key| keys.contains_key(*key)).count()),
            (b"STRLEN", [key]) => count(keys.get(key).map_or(0, Bytes::len)),
            (b"DBSIZE", []) => count(keys.len()),
            (b"FLUSHALL", _) => {
                keys.clear();
                simple("OK")
            }
            (b"INFO", _) => bulk(info(keys.len())),
            (b"COMMAND", _) => Frame::Array(Some(Vec::new())),
            // Clients ask before they run benchmarks; nothing is configured here.
            (b"CONFIG", [get, ..]) if get.eq_ignore_ascii_case(b"GET") => Frame::Array(Some(Vec::new())),
            (b"SELECT" | b"CLIENT", [_, ..]) | (b"QUIT", []) => simple("OK"),
            // As in Valkey, nobody is served meanwhile: the lock is held.
            (b"DEBUG", [sleep, seconds]) if sleep.eq_ignore_ascii_case(b"SLEEP") => {
                let seconds = std::str::from_utf8(seconds).ok().and_then(|text| text.parse().ok());
                std::thread::sleep(Duration::try_from_secs_f64(seconds.unwrap_or(0.0)).unwrap_or_default());
                simple("OK")
            }
            // Nothing is ever saved; tools that ask for it want to see that the connection survives it.
            (b"BGSAVE", _) => simple("Background saving started"),
            _ => {
                let name = String::from_utf8_lossy(name);
                Frame::Error(format!("ERR unknown command or wrong number of arguments for '{name}'").into())
            }
        }
    }
}

fn simple(text: &'static str) -> Frame {
    Frame::SimpleString(Bytes::from_static(text.as_bytes()))
}

fn bulk(bytes: impl Into<Bytes>) -> Frame {
    Frame::BulkString(Some(bytes.into()))
}

fn count(number: usize) -> Frame {
    Frame::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn info(keys: usize) -> String {
    format!(
        "# Server\r\nserver_name:kv_server\r\nvalkey_version:0.0.0\r\nredis_version:0.0.0\r\nredis_mode:standalone\r\n\
         tcp_port:0\r\n# Clients\r\nmaxclients:10000\r\n# Persistence\r\nloading:0\r\n# Replication\r\nrole:master\r\n\
         # Keyspace\r\ndb0:keys={keys},expires=0,avg_ttl=0\r\n"
    )
}
