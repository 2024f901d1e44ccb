//! Stores and reads values that fill several windows, over a connection that asks for windows
//! registered ahead (`spec/multi-buffer.md`): for a Valkey with `lab/multi-buffer.patch`, or any
//! server. The count of windows registered ahead needs the server's windows of 1 MiB, as Valkey's.
//!
//! ```text
//! ahead ADDRESS              fails unless every value comes back whole, and prints after how many of them a window was registered ahead
//! ahead ADDRESS --without    asks for no feature
//! ```

use std::error::Error;
use std::io::{Read, Write};

use rdma_conn::{Connect, Options, Stream};
use rdma_proto::wire::FeatureSet;
use rdma_verbs::Verbs;

/// The default length of Valkey's windows.
const WINDOW: u64 = 1 << 20;
const LEN: usize = (5 << 20) + 12345;
const TIMES: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: ahead ADDRESS [--without]")?;
    let mut options = Options::default();
    if arguments.next().is_none() {
        options.protocol = options.protocol.features(FeatureSet::MULTI_BUFFER).negotiate(true);
    }
    let mut stream = Stream::connect_with(&Verbs::load()?, address, &Connect::default().options(options))?;
    let mut ahead = 0;
    for round in 0..TIMES {
        let value: Vec<u8> = (0..LEN).map(|at| (at.wrapping_mul(31) >> 7) as u8 ^ round as u8).collect();
        let mut set = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${LEN}\r\n").into_bytes();
        set.extend_from_slice(&value);
        set.extend_from_slice(b"\r\n");
        expect(&mut stream, &set, b"+OK\r\n")?;
        // The server registers again what it has read before it replies. With another window ahead,
        // there is more than one to fill.
        let counters = stream.counters();
        let announced = counters.windows_received.saturating_mul(WINDOW);
        ahead += usize::from(announced.saturating_sub(counters.bytes_sent) > WINDOW);
        let mut reply = format!("${LEN}\r\n").into_bytes();
        reply.extend_from_slice(&value);
        reply.extend_from_slice(b"\r\n");
        expect(&mut stream, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n", &reply)?;
    }
    let counters = stream.counters();
    println!(
        "{TIMES} values of {LEN} bytes came back whole; {} windows came, one ahead after {ahead} of {TIMES} values, if the server's are of 1 MiB",
        counters.windows_received
    );
    Ok(())
}

fn expect(stream: &mut Stream<Verbs>, request: &[u8], reply: &[u8]) -> Result<(), Box<dyn Error>> {
    stream.write_all(request)?;
    let mut got = vec![0; reply.len()];
    stream.read_exact(&mut got)?;
    if got == reply { Ok(()) } else { Err("another reply than expected".into()) }
}
