//! A client that vanishes: it asks for a connection with so many retries, is served once, and then something is done to the network behind
//! its back. `lab/vanish` measures when its server notices.

use std::net::SocketAddr;
use std::process::{Command, ExitCode};

use clap::Args;
use conformance::client::Failure;
use conformance::tester::{Peer, Shape};
use rdma_verbs::Verbs;

/// Arguments of `vanish`.
#[derive(Args, Clone, Debug)]
pub(super) struct Arguments {
    /// The server (ADDRESS:PORT).
    #[arg(long)]
    target: SocketAddr,
    /// Retries that it asks for, of what is not acknowledged. The request's count governs both sides, and soft-RoCE takes 7 for endless.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=7))]
    retries: u8,
    /// Shell command that cuts the connection; the client holds it until the command ends.
    #[arg(long)]
    command: String,
}

/// Does it.
pub(super) fn run(arguments: &Arguments) -> ExitCode {
    let done = Verbs::load()
        .map_err(|error| Failure::Environment(error.to_string()))
        .and_then(|verbs| vanish(&verbs, arguments));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            suite::terminal::complain(&failure.to_string(), 4);
            ExitCode::FAILURE
        }
    }
}

fn vanish(verbs: &Verbs, arguments: &Arguments) -> Result<(), Failure> {
    let mut shape = Shape::default();
    shape.params.retry_count = arguments.retries;
    let mut client = Peer::dial(verbs, arguments.target, shape)?;
    client.handshake()?;
    client.send_bytes(b"PING\r\n")?;
    let reply = client.receive_bytes(7)?;
    if reply != b"+PONG\r\n" {
        return Err(Failure::wrong(format!("PING was answered with {reply:?}")));
    }
    let done = Command::new("sh").args(["-c", &arguments.command]).status()?;
    done.success().then_some(()).ok_or_else(|| Failure::wrong(format!("`{}`: {done}", arguments.command)))
}
