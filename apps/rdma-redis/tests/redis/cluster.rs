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
use redis::{AsyncCommands, RedisResult};
use resp_rs::resp2::{Frame, frame_to_bytes};

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
