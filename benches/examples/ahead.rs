//! A value that fills several windows, stored and read back over a connection whose windows are registered ahead (`spec/multi-buffer.md`): for a
//! Valkey with `docs/upstream/multi-buffer.patch`, or any server.
//!
//! ```text
//! ahead ADDRESS    says how many windows came, and whether the value came back whole
//! ```

use std::error::Error;
use std::io::{Read, Write};

use rdma_conn::{Connect, Options, Stream};
use rdma_proto::wire::FeatureSet;
use rdma_verbs::Verbs;

/// Bytes of the value: five windows of the default length and a part.
const LEN: usize = (5 << 20) + 12345;
const TIMES: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: ahead ADDRESS")?;
    let mut options = Options::client();
    options.protocol = options.protocol.features(FeatureSet::MULTI_BUFFER).negotiate(true);
    let mut stream = Stream::connect_with(&Verbs::load()?, address, &Connect::default().options(options))?;
    let mut expect = |request: &[u8], reply: &[u8]| -> Result<(), Box<dyn Error>> {
        stream.write_all(request)?;
        let mut got = vec![0; reply.len()];
        stream.read_exact(&mut got)?;
        if got == reply { Ok(()) } else { Err("another reply than expected".into()) }
    };
    for round in 0..TIMES {
        let value: Vec<u8> = (0..LEN).map(|at| (at.wrapping_mul(31) >> 7) as u8 ^ round as u8).collect();
        let mut set = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${LEN}\r\n").into_bytes();
        set.extend_from_slice(&value);
        set.extend_from_slice(b"\r\n");
        expect(&set, b"+OK\r\n")?;
        let mut reply = format!("${LEN}\r\n").into_bytes();
        reply.extend_from_slice(&value);
        reply.extend_from_slice(b"\r\n");
        expect(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", &reply)?;
    }
    let counters = stream.counters();
    println!(
        "{TIMES} values of {LEN} bytes came back whole; {} windows came, {} control messages were sent",
        counters.windows_received, counters.messages_sent
    );
    Ok(())
}
