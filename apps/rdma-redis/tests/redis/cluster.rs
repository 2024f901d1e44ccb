//! A cluster over the embedded fabric: two nodes, each with half of the slots.

use std::collections::HashSet;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex};

use bytes::{Bytes, BytesMut};
use kv_store::{FrameReader, Store};
use rdma_conn::{Listener, Stream};
use rdma_redis::{Endpoints, Nodes, Settings, cluster_connection};
use rdma_softsim::{Fabric, SoftSim};
use redis::{AsyncCommands, Cmd, ErrorKind, RedisResult};
use resp_rs::resp2::{Frame, frame_to_bytes};

use crate::support::{Answer, URL, address, polite, serve};

const NODES: [[u8; 4]; 2] = [[192, 0, 2, 1], [192, 0, 2, 2]];
const HALF: u16 = 8192;

static CLIENT: LazyLock<(Fabric, Endpoints<SoftSim>)> = LazyLock::new(|| {
    let fabric = Fabric::new();
    let host = fabric.host(&[[192, 0, 2, 9].into()]);
    (fabric, host.into())
});

struct OverSoftSim;

impl Nodes for OverSoftSim {
    type Backend = SoftSim;

    fn reach() -> RedisResult<(Endpoints<SoftSim>, Settings)> {
        Ok((CLIENT.1.clone(), Settings::default()))
    }
}

#[derive(Default)]
struct Node {
    store: Store,
    keys: Mutex<HashSet<Bytes>>,
}

impl Node {
    fn serve(&self, index: usize, stream: Stream<SoftSim>) -> std::io::Result<()> {
        let mut reader = FrameReader::new(stream);
        loop {
            while let Some(command) = reader.buffered()? {
                let mut reply = BytesMut::new();
                match self.elsewhere(index, &command) {
                    Some(answer) => reply.extend_from_slice(&frame_to_bytes(&answer)),
                    None => drop(self.store.answer(command, &mut reply)),
                }
                reader.stream().write_all(&reply)?;
            }
            if !reader.fill()? {
                return Ok(());
            }
        }
    }

    fn elsewhere(&self, index: usize, command: &Frame) -> Option<Frame> {
        let words = command.clone().into_array().ok()?;
        let mut words = words.into_iter().filter_map(|word| word.into_bulk_string().ok());
        match words.next()?.to_ascii_uppercase().as_slice() {
            b"CLUSTER" => Some(slots()),
            b"GET" | b"SET" => {
                let key = words.next()?;
                let slot = slot(&key);
                let owner = usize::from(slot >= HALF);
                self.keys.lock().expect("no panic").insert(key);
                let [a, b, c, d] = NODES[owner];
                (owner != index).then(|| Frame::Error(format!("MOVED {slot} {a}.{b}.{c}.{d}:6379").into()))
            }
            _ => None,
        }
    }
}

/// CRC-16/XMODEM modulo 16384, from the cluster specification.
fn slot(key: &[u8]) -> u16 {
    let step = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
    key.iter().fold(0, |crc, byte| (0..8).fold(crc ^ u16::from(*byte) << 8, step)) % (2 * HALF)
}

fn slots() -> Frame {
    let range = |from: u16, to: u16, [a, b, c, d]: [u8; 4]| {
        let host = Frame::BulkString(Some(format!("{a}.{b}.{c}.{d}").into()));
        let node = Frame::Array(Some(vec![host, Frame::Integer(6379)]));
        Frame::Array(Some(vec![Frame::Integer(from.into()), Frame::Integer(to.into()), node]))
    };
    Frame::Array(Some(vec![range(0, HALF - 1, NODES[0]), range(HALF, 2 * HALF - 1, NODES[1])]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_go_to_the_node_that_has_their_slot() {
    let nodes = [0, 1].map(|index| {
        let node = Arc::new(Node::default());
        let address = SocketAddr::new(IpAddr::from(NODES[index]), 6379);
        let host = CLIENT.0.host(&[address.ip()]);
        let listener = Listener::bind(&host, address).expect("a free address");
        let served = Arc::clone(&node);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let node = Arc::clone(&served);
                std::thread::spawn(move || node.serve(index, stream));
            }
        });
        node
    });
    let mut cluster =
        cluster_connection::<OverSoftSim>(["valkey+rdma://192.0.2.1:6379"]).await.expect("connects");
    for number in 0..100_usize {
        let () = cluster.set(format!("key:{number}"), number).await.expect("SET");
    }
    for number in 0..100_usize {
        assert_eq!(cluster.get::<_, usize>(format!("key:{number}")).await.expect("GET"), number);
    }
    let [first, second] = nodes.map(|node| node.keys.lock().expect("no panic").len());
    assert!(first > 30 && second > 30 && first + second == 100, "{first} and {second} keys");
}

static SCRIPTED: LazyLock<(Fabric, Endpoints<SoftSim>)> = LazyLock::new(|| {
    let fabric = Fabric::new();
    let host = fabric.host(&[[192, 0, 2, 9].into()]);
    (fabric, host.into())
});

struct MayRepeatGet;

impl Nodes for MayRepeatGet {
    type Backend = SoftSim;

    fn reach() -> RedisResult<(Endpoints<SoftSim>, Settings)> {
        Ok((SCRIPTED.1.clone(), Settings::default()))
    }

    fn may_repeat(command: &Cmd) -> bool {
        command.args_iter().next() == Some(redis::Arg::Simple(b"GET"))
    }
}

/// The node ends the connection at the first command of each kind, which it may have carried out.
#[tokio::test]
async fn a_command_is_sent_again_only_if_it_may_be() {
    const ALL: &str = "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n192.0.2.1\r\n:6379\r\n";
    let begun = Mutex::new(HashSet::new());
    let mut seen = serve(&SCRIPTED.0.host(&[address().ip()]), move |_connection, command| {
        let first = begun.lock().expect("no panic").insert(command.to_string());
        match command {
            "CLUSTER SLOTS" => Answer::Say(ALL),
            "INCRBY KEY 1" | "GET KEY" | "APPEND KEY X" if first => Answer::Leave,
            "INCRBY KEY 1" | "GET KEY" | "APPEND KEY X" => Answer::Say(":1\r\n"),
            other => polite(other),
        }
    });
    let mut cluster = cluster_connection::<MayRepeatGet>([URL]).await.expect("connects");
    let refused = cluster.incr::<_, _, usize>("key", 1).await.expect_err("it is unknown");
    assert!(refused.kind() == ErrorKind::Client && refused.to_string().contains("may have"), "{refused}");
    // The next one gets a new connection.
    assert_eq!(cluster.incr::<_, _, usize>("key", 1).await.expect("answered"), 1);
    assert_eq!(cluster.get::<_, usize>("key").await.expect("answered"), 1);
    let mut pipeline = redis::pipe();
    pipeline.get("key").append("key", "x");
    pipeline.query_async::<(usize, usize)>(&mut cluster).await.expect_err("it is unknown");
    let mut counts = [0; 3];
    while let Ok(seen) = seen.try_recv() {
        for (count, name) in counts.iter_mut().zip(["INCR", "GET", "APPEND"]) {
            *count += usize::from(seen.command.starts_with(name));
        }
    }
    assert_eq!(counts, [2, 3, 1]);
}
