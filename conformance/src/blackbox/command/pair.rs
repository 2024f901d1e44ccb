//! Connects a client and a server through a relay that watches both.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use rdma_verbs::Verbs;

use super::options::one_command;
use super::{CommandError, device, no_environment};
use crate::blackbox::process::{ExecClients, ExecServer};
use crate::blackbox::run::STARTING;
use crate::blackbox::target::{Exit, TargetClients as _, TargetServer as _};
use crate::client::Failure;
use crate::exit::{BROKEN, DONE, FAILED, LOST, NOTHING, UNDECIDED};
use crate::tester::{Breach, Incoming, Listener, Peer, Shape};
use suite::terminal;

/// A client and a server.
#[derive(Args, Clone, Debug)]
pub struct PairRun {
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

pub(super) fn run(options: &PairRun) -> Result<u8, CommandError> {
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
    let relayed = AtomicUsize::new(0);
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
            let (listener, verbs, server) = (&listener, &verbs, server.address());
            let watched = Watched { breaches: &breaches, relayed: &relayed };
            scope.spawn(move || {
                let shape = Shape::default().window(1 << 20);
                let done = dial(verbs, server, shape, deadline)
                    .and_then(|ahead| Ok((ahead, listener.answer(id, shape)?)))
                    .and_then(|(ahead, behind)| relay(ahead, behind, deadline, watched));
                if let Err(failure) = done {
                    terminal::tell(&format!("connection {connections}: {failure}"), 4);
                }
            });
        }
    })?;
    let breaches = breaches.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (who, Breach { requirement, what }) in &breaches {
        terminal::tell(&format!("the {who} erred: {requirement}: {what}"), 4);
    }
    let told = exit.as_ref().map_or_else(|| "it did not end in time".into(), ToString::to_string);
    terminal::tell(&format!("the client, after {connections} connections: {told}"), 4);
    let death = server.death(Duration::from_millis(100));
    if let Some(death) = &death {
        terminal::tell(&format!("the server ended: {death}"), 4);
    }
    let code = code(exit.as_ref(), death.is_some(), breaches.len(), relayed.into_inner());
    if code == NOTHING {
        terminal::tell("nothing was seen of the two: no connection went through the relay", 4);
    }
    Ok(code)
}

const fn code(client: Option<&Exit>, server_ended: bool, breaches: usize, relayed: usize) -> u8 {
    match client {
        _ if server_ended => LOST,
        None | Some(Exit::Crashed(_)) => LOST,
        Some(Exit::Failure(_)) => FAILED,
        Some(Exit::Success) if breaches > 0 => FAILED,
        // It reports success, but did nothing that could be watched.
        Some(Exit::Success) if relayed == 0 => NOTHING,
        Some(Exit::Success) => DONE,
        Some(Exit::Unsupported) => UNDECIDED,
    }
}

#[derive(Clone, Copy)]
struct Watched<'a> {
    breaches: &'a Mutex<Vec<(&'static str, Breach)>>,
    /// Connections on which the relay forwarded something.
    relayed: &'a AtomicUsize,
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

fn relay(
    mut ahead: Peer<Verbs>,
    mut behind: Peer<Verbs>,
    deadline: Instant,
    watched: Watched<'_>,
) -> Result<(), Failure> {
    behind.serves = true;
    ahead.relays();
    behind.relays();
    behind.await_established()?;
    let relayed = between(&mut ahead, &mut behind, deadline, watched.relayed);
    // Also after a failure: the breach may be its cause.
    for (who, peer) in [("server", &ahead), ("client", &behind)] {
        let seen = peer.seen.breaches.iter().map(|breach| (who, breach.clone()));
        watched.breaches.lock().unwrap_or_else(PoisonError::into_inner).extend(seen);
        // One of them has disconnected already.
        let _left = peer.disconnect();
    }
    relayed
}

fn between(
    ahead: &mut Peer<Verbs>,
    behind: &mut Peer<Verbs>,
    deadline: Instant,
    relayed: &AtomicUsize,
) -> Result<(), Failure> {
    ahead.handshake().map_err(by("server"))?;
    behind.handshake().map_err(by("client"))?;
    let mut gone = false;
    let mut passed = 0;
    while !gone && Instant::now() < deadline {
        let before = passed;
        gone |= pass_on(("server", &mut *ahead), ("client", &mut *behind), &mut passed)?;
        gone |= pass_on(("client", &mut *behind), ("server", &mut *ahead), &mut passed)?;
        if before == 0 && passed > 0 {
            relayed.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}

fn by(side: &'static str) -> impl Fn(Failure) -> Failure {
    move |failure| match failure {
        // The relay's own device is no side's fault.
        Failure::Environment(_) => failure,
        failure => Failure::wrong(format!("the {side} erred: {failure}")),
    }
}

/// Forwards one item. Returns true when the side has disconnected.
fn pass_on(
    (side, from): (&'static str, &mut Peer<Verbs>),
    (other, to): (&'static str, &mut Peer<Verbs>),
    passed: &mut usize,
) -> Result<bool, Failure> {
    let mut gone = false;
    while let Some(incoming) = from.receive_within(Duration::from_millis(1))? {
        match incoming {
            Incoming::Gone(_) => gone = true,
            incoming => from.absorb(incoming).map_err(by(side))?,
        }
        if gone {
            break;
        }
    }
    let heard = from.take_received();
    to.send_bytes(&heard).map_err(by(other))?;
    *passed += heard.len();
    Ok(gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_well_that_was_not_seen() {
        let failed = Exit::Failure("1".into());
        let crashed = Exit::Crashed("signal 11".into());
        for (client, server_ended, breaches, relayed, expected) in [
            (Some(&Exit::Success), false, 0, 1, DONE),
            (Some(&Exit::Success), false, 0, 0, NOTHING),
            (Some(&Exit::Success), false, 1, 0, FAILED),
            (Some(&Exit::Success), true, 0, 0, LOST),
            (Some(&failed), false, 0, 0, FAILED),
            (Some(&crashed), false, 0, 1, LOST),
            (None, false, 0, 1, LOST),
            (Some(&Exit::Unsupported), false, 0, 0, UNDECIDED),
        ] {
            assert_eq!(code(client, server_ended, breaches, relayed), expected, "{client:?}, {relayed}");
        }
    }
}
