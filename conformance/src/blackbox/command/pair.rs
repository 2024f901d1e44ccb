//! A client and a server with each other, and a relay between them that watches both.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use clap::Args;
use rdma_verbs::Verbs;

use super::{BROKEN, DONE, FAILED, Trouble, no_environment};
use crate::adversary::{Adversary, Breach, Incoming, Lurker, Shape};
use crate::blackbox::process::{ExecClients, ExecServer};
use crate::blackbox::target::{Clients as _, Exit, Server as _};
use crate::client::Failure;

/// A client and a server.
#[derive(Args, Clone, Debug)]
pub struct Pair {
    /// Shell command that starts the server, with {host} and {port}.
    #[arg(long)]
    server: String,
    /// Shell command that runs the client against {host} and {port}.
    #[arg(long)]
    client: String,
    /// Where the relay waits for the client; the server listens two ports on.
    #[arg(long)]
    listen: SocketAddr,
    /// Seconds for the whole.
    #[arg(long, default_value_t = 60)]
    within: u64,
}

pub(super) fn run(options: &Pair) -> Result<u8, Trouble> {
    let verbs = Verbs::load().map_err(no_environment)?;
    let port =
        options.listen.port().checked_add(2).ok_or((BROKEN, "no port is left for the server".to_string()))?;
    let server = ExecServer::start(options.server.clone(), options.listen.ip(), port)
        .map_err(|reason| (BROKEN, reason))?;
    let lurker = Lurker::new(&verbs, options.listen).map_err(no_environment)?;
    let mut client = ExecClients { command: options.client.clone(), first: 0 }
        .start("pair", options.listen)
        .map_err(|reason| (BROKEN, reason))?;
    let deadline = Instant::now() + Duration::from_secs(options.within);
    let mut breaches = Vec::new();
    let mut connections = 0;
    let exit = loop {
        match client.ended(Duration::ZERO) {
            Some(exit) => break Some(exit),
            None if Instant::now() >= deadline => break None,
            None => {}
        }
        let Some((id, _)) = lurker.request_within(Duration::from_millis(100)).map_err(no_environment)? else {
            continue;
        };
        let shape = Shape::default().window(1 << 20);
        let relayed = dial(&verbs, server.address(), shape, deadline)
            .and_then(|ahead| Ok((ahead, lurker.answer(id, shape)?)))
            .and_then(|(ahead, behind)| relay(ahead, behind, deadline, &mut breaches));
        if let Err(failure) = relayed {
            println!("connection {connections}: {failure}");
        }
        connections += 1;
    };
    for (who, Breach { requirement, what }) in &breaches {
        println!("{who}: {requirement}: {what}");
    }
    let well = exit == Some(Exit::Success) && breaches.is_empty() && server.death().is_none();
    let told = exit.map_or_else(|| "it did not end in time".into(), |exit| exit.to_string());
    println!("the client, after {connections} connections: {told}");
    Ok(if well { DONE } else { FAILED })
}

/// Connects to the server, which may still be starting.
fn dial(verbs: &Verbs, to: SocketAddr, shape: Shape, deadline: Instant) -> Result<Adversary<Verbs>, Failure> {
    loop {
        match Adversary::dial(verbs, to, shape) {
            Err(Failure::Unreached(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(100));
            }
            outcome => return outcome,
        }
    }
}

/// Passes on what either says, until one leaves.
fn relay(
    mut ahead: Adversary<Verbs>,
    mut behind: Adversary<Verbs>,
    deadline: Instant,
    breaches: &mut Vec<(&'static str, Breach)>,
) -> Result<(), Failure> {
    behind.serves = true;
    behind.await_established()?;
    ahead.handshake()?;
    behind.handshake()?;
    let mut gone = false;
    while !gone && Instant::now() < deadline {
        gone |= pass_on(&mut ahead, &mut behind)?;
        gone |= pass_on(&mut behind, &mut ahead)?;
    }
    for (who, peer) in [("server", &ahead), ("client", &behind)] {
        breaches.extend(peer.seen.breaches.iter().map(|breach| (who, breach.clone())));
        // One of them has left already.
        let _left = peer.disconnect();
    }
    Ok(())
}

/// True when it has left.
fn pass_on(from: &mut Adversary<Verbs>, to: &mut Adversary<Verbs>) -> Result<bool, Failure> {
    let mut gone = false;
    while let Some(incoming) = from.receive_within(Duration::from_millis(1))? {
        match incoming {
            Incoming::Gone(_) => gone = true,
            incoming => from.absorb(incoming)?,
        }
        if gone {
            break;
        }
    }
    let heard = from.take_heard();
    to.say(&heard)?;
    Ok(gone)
}
