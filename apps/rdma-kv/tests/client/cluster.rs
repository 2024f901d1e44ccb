//! Clusters of scripted nodes. Tests of the Python package use a cluster of real ones.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use rdma_conn::Stream;
use rdma_kv::{Buffer, Client, Cluster, Error, Part};

use crate::world::{LONG, WINDOW, bytes_of, client, fabric, how, pattern};

type Words = Vec<Vec<u8>>;

type Asked = Arc<Mutex<Vec<(usize, Words)>>>;

fn number(stream: &mut impl BufRead) -> io::Result<usize> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    line.trim_end().get(1..).and_then(|text| text.parse().ok()).ok_or(io::ErrorKind::UnexpectedEof.into())
}

fn command(stream: &mut BufReader<impl Read>) -> io::Result<Words> {
    let count = number(stream)?;
    let word = |_| {
        let mut word = vec![0; number(stream)? + 2];
        stream.read_exact(&mut word)?;
        word.truncate(word.len() - 2);
        Ok(word)
    };
    (0..count).map(word).collect()
}

fn speak<S: Read + Write>(stream: S, answer: impl Fn(&Words) -> Option<Vec<u8>>) {
    let mut stream = BufReader::new(stream);
    while let Ok(words) = command(&mut stream) {
        let Some(reply) = answer(&words) else { return };
        if stream.get_mut().write_all(&reply).and_then(|()| stream.get_mut().flush()).is_err() {
            return;
        }
    }
}

/// Starts nodes. `answer` gets a node's number, all addresses, a command, and how often it came.
fn nodes(
    count: usize,
    answer: impl Fn(usize, &[String], &Words, usize) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> (Vec<String>, Asked) {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("is free")).collect();
    let address = |one: &TcpListener| one.local_addr().expect("it listens").to_string();
    let addresses: Vec<String> = listeners.iter().map(address).collect();
    let (asked, answer) = (Asked::default(), Arc::new(answer));
    for (node, listener) in listeners.into_iter().enumerate() {
        let (addresses, asked, answer) = (addresses.clone(), Arc::clone(&asked), Arc::clone(&answer));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (addresses, asked, answer) = (addresses.clone(), Arc::clone(&asked), Arc::clone(&answer));
                thread::spawn(move || {
                    speak(stream, |words| {
                        let before = {
                            let mut asked = asked.lock().expect("no panic");
                            let same = |(other, said): &&(usize, Words)| {
                                *other == node && said.first() == words.first()
                            };
                            let before = asked.iter().filter(same).count();
                            asked.push((node, words.clone()));
                            before
                        };
                        answer(node, &addresses, words, before)
                    });
                });
            }
        });
    }
    (addresses, asked)
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

fn map(addresses: &[String]) -> Vec<u8> {
    let share = 16384 / addresses.len();
    let line = |(node, address): (usize, &String)| {
        let last = if node + 1 == addresses.len() { 16383 } else { (node + 1) * share - 1 };
        format!("id{node} {address}@1 master - 0 0 1 connected {}-{last}\n", node * share)
    };
    bulk(addresses.iter().enumerate().map(line).collect::<String>().as_bytes())
}

fn over_tcp(seeds: &[String]) -> Cluster<TcpStream, impl FnMut(&str) -> Result<Client<TcpStream>, Error>> {
    let mut cluster = Cluster::new(seeds, |node: &str| Ok(Client::new(TcpStream::connect(node)?)));
    cluster.set_timeout(Some(LONG));
    cluster
}

fn count(asked: &Asked, name: &[u8]) -> usize {
    asked
        .lock()
        .expect("no panic")
        .iter()
        .filter(|(_, words)| words.first().is_some_and(|first| first == name))
        .count()
}

/// `foo` has slot 12182, the third part of three; `bar` 5061, the first.
#[test]
fn keys_go_to_their_nodes_and_live_as_long_as_told() {
    let values = Mutex::new(HashMap::<Vec<u8>, Vec<u8>>::new());
    let (addresses, asked) = nodes(3, move |_node, addresses, words, _before| {
        let mut values = values.lock().expect("no panic");
        Some(match &words[..] {
            [name, ..] if name == b"CLUSTER" => map(addresses),
            [name, key, value, ..] if name == b"SET" => {
                values.insert(key.clone(), value.clone());
                b"+OK\r\n".into()
            }
            [name, ..] if name == b"INFO" => {
                bulk(b"# Memory\r\nused_memory:123\r\nused_memory_peak:9\r\nmaxmemory:0\r\n")
            }
            [name, key] if name == b"GET" => values.get(key).map_or(b"$-1\r\n".into(), |value| bulk(value)),
            [name, key] if name == b"EXISTS" => format!(":{}\r\n", u8::from(values.contains_key(key))).into(),
            [name, key] if name == b"DEL" => {
                format!(":{}\r\n", u8::from(values.remove(key).is_some())).into()
            }
            _ => b"-ERR what\r\n".into(),
        })
    });
    let mut cluster = over_tcp(&addresses[..1]);
    let mut buffer = cluster.register(pattern(1000, 1));
    let parts = [Part { key: b"foo", range: 0..400 }, Part { key: b"bar", range: 400..1000 }];
    cluster.set_time_to_live(Some(std::time::Duration::from_millis(1500)));
    assert!(cluster.mset_from(&parts, &mut buffer).expect("set").iter().all(Result::is_ok));
    cluster.set_time_to_live(None);
    cluster.set_from(b"bar", &mut buffer, 400..1000).expect("set");
    assert!(buffer.write(0, &[0; 1000]), "nothing uses it");
    let got = cluster.mget_into(&parts, &mut buffer).expect("got");
    assert!(matches!(got[..], [Ok(Some(400)), Ok(Some(600))]), "{got:?}");
    assert!(bytes_of(&buffer, 0..1000) == pattern(1000, 1));
    let there = cluster.present(&[b"bar", b"none", b"foo"]).expect("answered");
    assert!(matches!(there[..], [Ok(true), Ok(false), Ok(true)]), "{there:?}");
    assert_eq!(cluster.del(&[b"foo", b"bar", b"none"]).expect("answered"), 2);
    assert_eq!((cluster.routing().moved, cluster.routing().refreshed), (0, 1));
    let memory = cluster.memory().expect("told");
    assert!(
        memory.len() == 3 && memory.iter().all(|(_, memory)| (memory.used, memory.most) == (123, 0)),
        "{memory:?}"
    );

    let asked = asked.lock().expect("no panic");
    let sets: Vec<_> = asked.iter().filter(|(_, words)| words[0] == b"SET").collect();
    assert!(sets.iter().all(|(node, words)| *node == if words[1] == b"foo" { 2 } else { 0 }));
    assert_eq!(sets.iter().filter(|(_, words)| words[3..] == [&b"PX"[..], b"1500"]).count(), 2);
    assert_eq!(sets.iter().filter(|(_, words)| words.len() == 3).count(), 1);
}

#[test]
fn a_key_that_has_moved_is_found() {
    let (addresses, asked) = nodes(2, |node, addresses, words, _before| {
        Some(match (node, &words[0][..]) {
            // A map that is outdated, and stays so.
            (_, b"CLUSTER") => map(&addresses[..1]),
            (0, _) => format!("-MOVED 12182 {}\r\n", addresses[1]).into(),
            _ => bulk(b"value"),
        })
    });
    let mut cluster = over_tcp(&addresses[..1]);
    let mut buffer = cluster.buffer(5);
    for _again in 0..2 {
        assert_eq!(cluster.get_into(b"foo", &mut buffer, 0..5).expect("got"), Some(5));
    }
    assert_eq!(bytes_of(&buffer, 0..5), b"value");
    assert_eq!(
        (cluster.routing().moved, count(&asked, b"GET")),
        (1, 3),
        "the second time it is asked for at once"
    );
}

#[test]
fn a_key_on_its_way_is_asked_for_where_it_goes() {
    let asking = Mutex::new(false);
    let (addresses, asked) = nodes(2, move |node, addresses, words, _before| {
        let mut asking = asking.lock().expect("no panic");
        Some(match (node, &words[0][..]) {
            (_, b"CLUSTER") => map(&addresses[..1]),
            (0, _) => format!("-ASK 12182 {}\r\n", addresses[1]).into(),
            (_, b"ASKING") => {
                *asking = true;
                b"+OK\r\n".into()
            }
            _ if std::mem::take(&mut *asking) => bulk(b"value"),
            _ => format!("-MOVED 12182 {}\r\n", addresses[0]).into(),
        })
    });
    let mut cluster = over_tcp(&addresses[..1]);
    let mut buffer = cluster.buffer(5);
    for turn in 1..=2 {
        assert_eq!(cluster.get_into(b"foo", &mut buffer, 0..5).expect("got"), Some(5));
        assert_eq!((cluster.routing().asked, cluster.routing().moved), (turn, 0), "it has not moved yet");
    }
    assert_eq!(count(&asked, b"ASKING"), 2);
}

#[test]
fn circles_end() {
    for word in ["MOVED", "ASK"] {
        let (addresses, asked) = nodes(2, move |node, addresses, words, _before| {
            Some(match &words[0][..] {
                b"CLUSTER" => map(addresses),
                b"ASKING" => b"+OK\r\n".into(),
                _ => format!("-{word} 12182 {}\r\n", addresses[1 - node]).into(),
            })
        });
        let mut cluster = over_tcp(&addresses[..1]);
        let mut buffer = cluster.buffer(5);
        let refused = cluster.get_into(b"foo", &mut buffer, 0..5).expect_err("it is nowhere");
        assert!(matches!(&refused, Error::Refused(text) if text.starts_with(word)), "{refused}");
        let gets = count(&asked, b"GET");
        assert!(gets == if word == "MOVED" { 6 } else { 12 }, "{gets}");
        assert!(count(&asked, b"CLUSTER") <= 6);
    }
}

#[test]
fn what_passes_is_waited_for() {
    let (addresses, _) = nodes(1, |_node, addresses, words, before| match (&words[0][..], before) {
        (b"CLUSTER", _) => Some(map(addresses)),
        (_, 0) => Some(b"-CLUSTERDOWN The cluster is down\r\n".into()),
        (_, 1) => None,
        _ => Some(bulk(b"value")),
    });
    let mut cluster = over_tcp(&addresses);
    let mut buffer = cluster.buffer(5);
    assert_eq!(cluster.get_into(b"foo", &mut buffer, 0..5).expect("got"), Some(5));
    assert_eq!((cluster.routing().repeated, cluster.routing().connected), (2, 2));

    let (addresses, asked) =
        nodes(1, |_node, addresses, words, _before| (words[0] == b"CLUSTER").then(|| map(addresses)));
    let mut cluster = over_tcp(&addresses);
    let keys = [Part { key: b"foo", range: 0..2 }, Part { key: b"bar", range: 2..5 }];
    let got = cluster.mget_into(&keys, &mut buffer).expect("there is a map");
    assert!(matches!(got[..], [Err(Error::Io(_)), Err(Error::Lost)]), "{got:?}");
    assert!(count(&asked, b"GET") <= 2 * 6);
}

/// A node that has a command may carry it out, whatever happens to the connection.
#[test]
fn a_command_that_changes_keys_is_sent_again_only_if_it_may_be() {
    for repeats in [false, true] {
        let (addresses, asked) = nodes(1, |_node, addresses, words, before| match (&words[0][..], before) {
            (b"CLUSTER", _) => Some(map(addresses)),
            // The connection ends without a reply.
            (_, 0) => None,
            (b"SET", _) => Some(b"+OK\r\n".into()),
            (b"GET", _) => Some(bulk(b"value")),
            _ => Some(b":1\r\n".into()),
        });
        let mut cluster = over_tcp(&addresses);
        cluster.set_repeats(repeats);
        let mut buffer = cluster.buffer(5);
        // A read is sent again in either case.
        assert_eq!(cluster.get_into(b"foo", &mut buffer, 0..5).expect("got"), Some(5));
        assert_eq!(cluster.exists(&[b"foo"]).expect("answered"), 1);
        assert_eq!(cluster.strlen(b"foo").expect("answered"), 1);
        let set = cluster.set_from(b"foo", &mut buffer, 0..5);
        let deleted = cluster.del(&[b"foo"]);
        if repeats {
            set.expect("set");
            assert_eq!(deleted.expect("answered"), 1);
        } else {
            assert!(matches!(set, Err(Error::Io(_))) && matches!(deleted, Err(Error::Io(_))));
        }
        let counts = ["GET", "EXISTS", "STRLEN", "SET", "DEL"].map(|name| count(&asked, name.as_bytes()));
        let changes = 1 + usize::from(repeats);
        assert_eq!(counts, [2, 2, 2, changes, changes]);
        // The client goes on.
        cluster.set_from(b"foo", &mut buffer, 0..5).expect("set");
    }
}

/// A command that no node has, or that a node refused, was not carried out.
#[test]
fn a_command_that_was_not_carried_out_is_sent_again() {
    let (addresses, asked) = nodes(1, |_node, addresses, words, before| {
        Some(match (&words[0][..], before) {
            (b"CLUSTER", _) => map(addresses),
            (b"SET", 0) => b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n".into(),
            _ => b"+OK\r\n".into(),
        })
    });
    let mut dialled = 0;
    let mut cluster = Cluster::new(&addresses, |node: &str| {
        dialled += 1;
        // The first connection is for the map.
        if (2..4).contains(&dialled) {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        Ok(client(TcpStream::connect(node)?))
    });
    cluster.set_timeout(Some(LONG));
    cluster.connect().expect("a map");
    let mut buffer = cluster.buffer(5);
    cluster.del(&[b"foo"]).expect_err("the reply is none");
    cluster.set_from(b"foo", &mut buffer, 0..5).expect("set");
    assert_eq!((cluster.routing().connected, count(&asked, b"SET")), (4, 2));
}

#[test]
fn a_map_is_not_believed() {
    for reply in [
        b"$-1\r\n".to_vec(),
        b"+OK\r\n".into(),
        b"-ERR This instance has cluster support disabled\r\n".into(),
        bulk(b"hello"),
        bulk(b"id 127.0.0.1:1@1 master - 0 0 1 connected 0-99999\n"),
        bulk(&[0xff; 10]),
        b"$9223372036854775807\r\nsome".into(),
        format!("${}\r\n", (1 << 20) + 1).into(),
    ] {
        let (addresses, asked) = nodes(1, move |_node, _addresses, _words, _before| Some(reply.clone()));
        let mut cluster = over_tcp(&addresses);
        let refused = cluster.connect().expect_err("no map");
        assert!(matches!(refused, Error::Unexpected(_) | Error::Refused(_)), "{refused}");
        let mut buffer = cluster.buffer(5);
        cluster.get_into(b"foo", &mut buffer, 0..5).expect_err("no map");
        assert_eq!(count(&asked, b"GET"), 0);
    }
    let mut none = over_tcp(&[]);
    assert!(matches!(none.exists(&[b"foo"]), Err(Error::Lost)));
}

#[test]
fn a_slot_that_no_node_has_is_told() {
    let map = bulk(b"id 127.0.0.1:1@1 myself,master - 0 0 1 connected 1-2\n");
    let (addresses, asked) = nodes(1, move |_node, _addresses, _words, _before| Some(map.clone()));
    let mut cluster = over_tcp(&addresses);
    assert!(matches!(cluster.exists(&[b"foo"]), Err(Error::Unserved { slot: 12182 })));
    assert_eq!(count(&asked, b"EXISTS"), 0);
}

/// Over RDMA each connection has a domain of its own.
#[test]
fn memory_is_registered_with_each_connection() {
    let value = Mutex::new(Vec::new());
    let (host, address) = fabric(10, move |stream| {
        speak(stream, |words| {
            let mut value = value.lock().expect("no panic");
            match &words[0][..] {
                b"CLUSTER" => Some(map(&["192.0.2.1:6379".into()])),
                b"SET" => {
                    value.clone_from(&words[2]);
                    Some(b"+OK\r\n".into())
                }
                b"GET" => Some(bulk(&value)),
                _ => None,
            }
        });
    });
    let mut cluster = Cluster::new([address.to_string()], |node: &str| {
        Ok(client(Stream::connect_with(&host, node, &how()).map_err(io::Error::from)?))
    });
    cluster.set_timeout(Some(LONG));
    let len = 5 * WINDOW;
    let mut buffer = cluster.register(pattern(2 * len, 1));
    for turn in 0..2 {
        cluster.set_from(b"foo", &mut buffer, 0..len).expect("set");
        assert!(buffer.write(len, &vec![0; len]), "nothing uses it");
        assert_eq!(cluster.get_into(b"foo", &mut buffer, len..2 * len).expect("got"), Some(len));
        assert!(bytes_of(&buffer, len..2 * len) == pattern(2 * len, 1)[..len]);
        let counts = cluster.counts();
        assert_eq!(counts.bytes_lent, (turn + 1) * len as u64);
        assert!(counts.bytes_landed > (turn + 1) * 3 * WINDOW as u64, "{counts:?}");
        if turn == 0 {
            // The node ends a connection at an unknown command.
            cluster.del(&[b"foo"]).expect_err("it leaves");
        }
    }
}
