//! Bytes per second of one stream over a real device. `lab/run bench` adds `ib_write_bw`.
//!
//! ```text
//! throughput ADDRESS copied|lent MEGABYTES [WINDOW]    MiB per second, both ends in this process, a thread each
//! ```
//!
//! WINDOW is the length of the receiver's windows, in bytes; 1 MiB by default.
//!
//! *Copied* is `write` and `read`; *lent* sends from registered memory and receives into registered
//! memory, without a copy.

use std::error::Error;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rdma_conn::{Listener, Options, Stream};
use rdma_verbs::Verbs;

/// Bytes of a write, and of memory that is lent or received into.
const PART: usize = 1 << 20;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn receive(stream: &mut Stream<Verbs>, parts: usize, lent: bool) -> Outcome<()> {
    let mut bytes = vec![0; PART];
    let memory = Arc::new(stream.register_landing(PART)?);
    // The first part starts the clock of the other side, once all memory is registered.
    stream.write_all(b"!")?;
    for _ in 0..parts {
        if lent {
            stream.receive(&memory, 0..PART)?;
        } else {
            stream.read_exact(&mut bytes)?;
        }
    }
    stream.write_all(b".")?;
    Ok(stream.flush()?)
}

fn send(stream: &mut Stream<Verbs>, parts: usize, lent: bool) -> Outcome<f64> {
    let bytes = vec![0x5a; PART];
    let memory = [Arc::new(stream.register_buffer(PART)?), Arc::new(stream.register_buffer(PART)?)];
    let mut sign = [0];
    stream.read_exact(&mut sign)?;
    let begun = Instant::now();
    for part in 0..parts {
        if lent {
            let memory = &memory[part % 2];
            stream.returned(memory)?;
            let mut at = 0;
            while at < PART {
                at += stream.lend(memory, at..PART)?;
            }
        } else {
            stream.write_all(&bytes)?;
        }
    }
    stream.read_exact(&mut sign)?;
    Ok(parts as f64 * PART as f64 / f64::from(1 << 20) / begun.elapsed().as_secs_f64())
}

fn run(address: SocketAddr, lent: bool, parts: usize, window: u32) -> Outcome<f64> {
    let verbs = Verbs::load()?;
    let mut options = Options::default();
    options.protocol.window = window;
    let listener = Listener::bind_with(&verbs, address, options, rdma_conn::Limits::default())?;
    let receiver = thread::spawn(move || receive(&mut listener.accept()?.0, parts, lent));
    let mut stream = Stream::connect(&verbs, address)?;
    let rate = send(&mut stream, parts, lent)?;
    match receiver.join() {
        Ok(received) => received.map(|()| rate),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match arguments.as_slice() {
        [address, how, parts, window @ ..] if window.len() < 2 && (how == "copied" || how == "lent") => {
            let window = window.first().map_or(Ok(1 << 20), |window| window.parse());
            let numbers = address.parse().ok().zip(parts.parse().ok()).zip(window.ok());
            numbers.map(|((address, parts), window)| (address, how == "lent", parts, window))
        }
        _ => None,
    };
    let Some((address, lent, parts, window)) = parsed else {
        eprintln!("usage: throughput ADDRESS copied|lent MEGABYTES [WINDOW]");
        return ExitCode::from(64);
    };
    match run(address, lent, parts, window) {
        Ok(rate) => {
            println!("{rate:.2}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("throughput: {error}");
            ExitCode::FAILURE
        }
    }
}
