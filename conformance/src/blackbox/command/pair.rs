//! A client and a server with each other, and a relay between them that watches both.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use rdma_verbs::Verbs;

use super::options::one_command;
use super::{CommandError, device, no_environment};
use crate::blackbox::process::{ExecClients, ExecServer};
use crate::blackbox::run::STARTING;
use crate::blackbox::target::{Clients as _, Exit, Server as _};
use crate::client::Failure;
use crate::exit::{BROKEN, DONE, FAILED, LOST, UNDECIDED};
use crate::peer::{Breach, Incoming, Listener, Peer, Shape};

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

pub(super) fn run(options: &Pair) -> Result<u8, CommandError> {
    one_command(&options.server)?;
    one_command(&options.client)?;
    let verbs = device()?;
    let port =
        options.listen.port().checked_add(2).ok_or((BROKEN, "no port is left for the server".to_string()))?;
    let server = ExecServer::start(options.server.clone(), options.listen.ip(), port)
        .map_err(|reason| (BROKEN, reason))?;
    let listener = Listener::new(&verbs, options.listen).map_err(no_environment)?;
    let mut client = ExecClients { command: options.client.clone(), first: 0 }
        .start("pair", options.listen)
        .map_err(|reason| (BROKEN, reason))?;
    let deadline = Instant::now() + Duration::from_secs(options.within);
    let breaches = Mutex::new(Vec::new());
    let mut connections = 0;
    let exit = std::thread::scope(|scope| -> Result<_, CommandError> {
        loop {
            match client.ended(Duration::ZERO) {
                Some(exit) => break Ok(Some(exit)),
                None if Instant::now() >= deadline => break Ok(None),
                None => {}
            }
            let asked = listener.request_within(Duration::from_millis(100)).map_err(no_environment)?;
            let Some((id, _)) = asked else { continue };
            connections += 1;
            let (listener, verbs, server, breaches) = (&listener, &verbs, server.address(), &breaches);
            scope.spawn(move || {
                let shape = Shape::default().window(1 << 20);
                let relayed = dial(verbs, server, shape, deadline)
                    .and_then(|ahead| Ok((ahead, listener.answer(id, shape)?)))
                    .and_then(|(ahead, behind)| relay(ahead, behind, deadline, breaches));
                if let Err(failure) = relayed {
                    println!("connection {connections}: {failure}");
                }
            });
        }
    })?;
    let breaches = breaches.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (who, Breach { requirement, what }) in &breaches {
        println!("{who}: {requirement}: {what}");
    }
    let told = exit.as_ref().map_or_else(|| "it did not end in time".into(), ToString::to_string);
    println!("the client, after {connections} connections: {told}");
    let death = server.death(Duration::from_millis(100));
    if let Some(death) = &death {
        println!("the server ended: {death}");
    }
    Ok(match exit {
        _ if death.is_some() => LOST,
        None | Some(Exit::Crashed(_)) => LOST,
        Some(Exit::Success) if breaches.is_empty() => DONE,
        Some(Exit::Success | Exit::Failure(_)) => FAILED,
        Some(Exit::Unsupported) => UNDECIDED,
    })
}

/// Connects to the server, which may still be starting.
fn dial(verbs: &Verbs, to: SocketAddr, shape: Shape, deadline: Instant) -> Result<Peer<Verbs>, Failure> {
    let starting = deadline.min(Instant::now() + STARTING);
    loop {
        match Peer::dial(verbs, to, shape) {
            Err(Failure::Unreached(_)) if Instant::now() < starting => {
                std::thread::sleep(Duration::from_millis(100));
            }
            outcome => return outcome,
        }
    }
}

/// Passes on what either says, until one leaves.
fn relay(
    mut ahead: Peer<Verbs>,
    mut behind: Peer<Verbs>,
    deadline: Instant,
    breaches: &Mutex<Vec<(&'static str, Breach)>>,
) -> Result<(), Failure> {
    behind.serves = true;
    ahead.relays();
    behind.relays();
    behind.await_established()?;
    let relayed = between(&mut ahead, &mut behind, deadline);
    // Also of a connection that failed: the breach may be why.
    for (who, peer) in [("server", &ahead), ("client", &behind)] {
        let seen = peer.seen.breaches.iter().map(|breach| (who, breach.clone()));
        breaches.lock().unwrap_or_else(PoisonError::into_inner).extend(seen);
        // One of them has left already.
        let _left = peer.disconnect();
    }
    relayed
}

fn between(ahead: &mut Peer<Verbs>, behind: &mut Peer<Verbs>, deadline: Instant) -> Result<(), Failure> {
    ahead.handshake()?;
    behind.handshake()?;
    let mut gone = false;
    while !gone && Instant::now() < deadline {
        gone |= pass_on(ahead, behind)?;
        gone |= pass_on(behind, ahead)?;
    }
    Ok(())
}

/// True when it has left.
fn pass_on(from: &mut Peer<Verbs>, to: &mut Peer<Verbs>) -> Result<bool, Failure> {
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
    let heard = from.take_received();
    to.send_bytes(&heard)?;
    Ok(gone)
}
