//! How long a server takes to notice a client that vanished, by the retries that the client had asked for: its request's count governs both
//! sides, and soft-RoCE takes 7 for endless.

use std::net::SocketAddr;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;
use conformance::adversary::{Adversary, Shape};
use conformance::client::Failure;
use conformance::ledger::Ledger;
use rdma_verbs::Verbs;

/// What is measured.
#[derive(Args, Clone, Debug)]
pub(super) struct Arguments {
    /// The server (ADDRESS:PORT); this is its only client.
    #[arg(long)]
    target: SocketAddr,
    /// The server's process.
    #[arg(long)]
    server_pid: u32,
    /// Retries that the client asks for, of what is not acknowledged.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=7))]
    retries: u8,
    /// Shell command that cuts the connection without a word to either side.
    #[arg(long)]
    outage: String,
    /// Seconds after which the server is held not to notice.
    #[arg(long, default_value_t = 90)]
    within: u64,
}

/// Measures; fails if the server still holds the connection's memory at the end.
pub(super) fn run(arguments: &Arguments) -> ExitCode {
    let measured = Verbs::load()
        .map_err(|error| Failure::Environment(error.to_string()))
        .and_then(|verbs| measure(&verbs, arguments));
    match measured {
        Ok(Some(after)) => {
            println!("retries {}: the server noticed after {:.1} s", arguments.retries, after.as_secs_f64());
            ExitCode::SUCCESS
        }
        Ok(None) => {
            println!(
                "retries {}: the server noticed nothing within {} s",
                arguments.retries, arguments.within
            );
            ExitCode::FAILURE
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn measure(verbs: &Verbs, arguments: &Arguments) -> Result<Option<Duration>, Failure> {
    let mut shape = Shape::default();
    shape.params.retry_count = arguments.retries;
    let before = Ledger::of_process(arguments.server_pid);
    let mut client = Adversary::dial(verbs, arguments.target, shape)?;
    client.handshake()?;
    client.say(b"PING\r\n")?;
    let reply = client.hear(7)?;
    if reply != b"+PONG\r\n" {
        return Err(Failure::wrong(format!("PING was answered with {reply:?}")));
    }
    if !Ledger::of_process(arguments.server_pid).exceeds(before) {
        return Err(Failure::wrong("a connection of the server holds nothing that could be seen to go"));
    }
    let done = Command::new("sh").args(["-c", &arguments.outage]).status()?;
    if !done.success() {
        return Err(Failure::wrong(format!("`{}`: {done}", arguments.outage)));
    }
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(arguments.within) {
        if !Ledger::of_process(arguments.server_pid).exceeds(before) {
            return Ok(Some(begun.elapsed()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(None)
}
