//! Many commands at once, for servers that limit pending output of a client.

use std::io::{Read, Write};

use crate::world::{bytes_of, over_rdma, over_tcp, pattern};
use kv_store::FrameReader;
use rdma_kv::{Buffer, Client, Part, Transport};

/// More than all windows and sockets between two sides hold.
const LEN: usize = 100 << 10;
const COMMANDS: usize = 300;

/// Reads no command while a reply is unread. Answers a GET by the key, a SET by as many words.
fn keeps_nothing<S: Read + Write>(stream: S) {
    let mut commands = FrameReader::new(stream);
    while let Ok(Some(command)) = commands.frame() {
        let mut words = command.into_array().expect("a command").into_iter();
        let name = words.next().and_then(|word| word.into_bulk_string().ok()).expect("a name");
        let key = words.next().and_then(|word| word.into_bulk_string().ok()).expect("a key");
        let reply = match &name[..] {
            b"GET" => [format!("${}\r\n", key.len()).as_bytes(), &key, b"\r\n"].concat(),
            _ => [b"+", &key[..LEN / 2], b"\r\n"].concat(),
        };
        if commands.stream().write_all(&reply).and_then(|()| commands.stream().flush()).is_err() {
            return;
        }
    }
}

fn many_at_once<T: Transport>(mut client: Client<T>) {
    let key: Vec<u8> = pattern(LEN, 0).into_iter().map(|byte| byte % 26 + b'a').collect();
    let mut buffer = client.buffer(LEN).expect("memory");
    let parts = vec![Part { key: &key, range: 0..LEN }; COMMANDS];
    let got = client.mget_into(&parts, &mut buffer).expect("the connection holds");
    assert!(got.len() == COMMANDS && got.iter().all(|got| matches!(got, Ok(Some(LEN)))));
    assert!(bytes_of(&buffer, 0..LEN) == key);
    let set = client.mset_from(&parts, &buffer).expect("the connection holds");
    assert!(set.len() == COMMANDS && set.iter().all(Result::is_ok));
    assert!(buffer.write(0, b"is mine"), "nothing uses it");
}

#[test]
fn a_server_that_keeps_nothing_is_no_obstacle() {
    many_at_once(over_rdma(keeps_nothing));
    many_at_once(over_tcp(keeps_nothing));
}
