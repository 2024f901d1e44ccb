//! Requests of 64 B between two threads that sleep until data arrives: over the embedded fabric, or
//! over a Unix socket. `benches/asleep` counts their system calls.
//!
//! ```text
//! asleep softsim|unix ROUNDS
//! ```

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::thread;

use rdma_conn::{Listener, Stream};
use rdma_softsim::{Fabric, SoftSim};

const LEN: usize = 64;

fn echo(mut stream: impl Read + Write) {
    let mut bytes = [0; LEN];
    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
}

fn softsim() -> Stream<SoftSim> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("listens");
    thread::spawn(move || echo(listener.accept().expect("accepts").0));
    Stream::connect(&fabric.host(&[[192, 0, 2, 2].into()]), address).expect("connects")
}

fn requests(mut stream: impl Read + Write, rounds: u64) {
    let mut bytes = [0x5a; LEN];
    for _ in 0..rounds {
        stream.write_all(&bytes).expect("written");
        stream.read_exact(&mut bytes).expect("read");
    }
    println!("{}", slept());
}

/// Returns how often threads of this process have gone to sleep, proc_pid_status(5).
fn slept() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a list of threads");
    let status = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    let times = |text: String| {
        let line = text.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"))?;
        line.split_whitespace().next_back()?.parse::<u64>().ok()
    };
    status.filter_map(times).sum()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let over = arguments.next().unwrap_or_default();
    let rounds = arguments.next().and_then(|rounds| rounds.parse().ok()).expect("asleep softsim|unix ROUNDS");
    match over.as_str() {
        "softsim" => requests(softsim(), rounds),
        "unix" => {
            let (client, server) = UnixStream::pair().expect("sockets");
            thread::spawn(move || echo(server));
            requests(client, rounds);
        }
        _ => panic!("asleep softsim|unix ROUNDS"),
    }
}
