//! Lets the target in: it connects to this machine, and proves that it is the target.
//!
//! Other programs may connect from its address, first and as often as they like. They are served
//! beside it, and get nothing but `+PONG` and `+OK`.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::AsFd;

use sha2::{Digest as _, Sha256};

use super::link::Link;
use crate::wait::{Limit, Stop};

/// The most connections at the same time, and the most accepted in one round. One more closes the
/// oldest.
const MOST_GUESTS: usize = 64;

/// The most commands of a handshake.
const MOST_COMMANDS: usize = 32;

/// A proof that only the target can give.
pub(super) enum Proof {
    /// The password for its primaries, drawn for this pull.
    Password(String),
    /// The name of its own history, which a primary that becomes a replica sends.
    History(String),
}

/// A connection that may be the target's.
struct Guest {
    link: Link,
    commands: usize,
    is_target: bool,
}

/// Waits for the connection over which `target` asks for the snapshot.
pub(super) fn wait(
    listener: &TcpListener,
    proof: &Proof,
    target: IpAddr,
    stop: &Stop,
    limit: &Limit,
) -> io::Result<Link> {
    let mut guests = VecDeque::new();
    let mut refused = 0_u64;
    loop {
        accept(listener, target, &mut guests)?;
        for _ in 0..guests.len() {
            let Some(mut guest) = guests.pop_front() else { break };
            match guest.hear(proof, stop, limit) {
                Ok(true) => return Ok(guest.link),
                Ok(false) => guests.push_back(guest),
                Err(error) if crate::wait::is_stop(&error) => return Err(error),
                Err(error) => {
                    refused += 1;
                    tracing::warn!(%error, "a connection from the target's address was turned away");
                }
            }
        }
        if guests.iter().any(|guest| guest.is_target) {
            guests.retain(|guest| guest.is_target);
        }
        let sources: Vec<_> =
            guests.iter().map(|guest| guest.link.as_fd()).chain([listener.as_fd()]).collect();
        limit.until_readable(&sources).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => late(refused, !guests.is_empty()),
            _ => error,
        })?;
    }
}

fn late(refused: u64, is_heard: bool) -> io::Error {
    let what = match (is_heard, refused) {
        (true, _) => "the target does not ask for the snapshot".into(),
        (false, 0) => {
            "the target does not connect: it must reach this machine by TCP (--serve-on names the address)"
                .into()
        }
        (false, _) => {
            format!("{refused} connections came from the target's address, and none was shown to be its")
        }
    };
    io::Error::new(io::ErrorKind::TimedOut, what)
}

/// Takes connections from the target's address.
fn accept(listener: &TcpListener, target: IpAddr, guests: &mut VecDeque<Guest>) -> io::Result<()> {
    for _ in 0..MOST_GUESTS {
        match listener.accept() {
            Ok((stream, peer)) if peer.ip().to_canonical() == target.to_canonical() => {
                if guests.len() >= MOST_GUESTS {
                    guests.pop_front();
                }
                guests.push_back(Guest { link: Link::new(stream)?, commands: 0, is_target: false });
            }
            Ok((_, peer)) => tracing::warn!(%peer, "a connection that is not the target's was turned away"),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            // The connection ended before it was accepted.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Guest {
    /// Answers commands. Returns true once the target has asked for the snapshot.
    fn hear(&mut self, proof: &Proof, stop: &Stop, limit: &Limit) -> io::Result<bool> {
        while let Some(words) = self.link.command_now(stop)? {
            self.commands += 1;
            let words: Vec<_> = words.iter().map(Vec::as_slice).collect();
            let verb = words.first().map(|verb| verb.to_ascii_uppercase()).unwrap_or_default();
            let answer: &[u8] = match (verb.as_slice(), words.as_slice(), proof) {
                _ if self.commands > MOST_COMMANDS => return Err(io::Error::other("it goes on and on")),
                (b"PING", ..) => b"+PONG\r\n",
                (b"AUTH", [_, .., password], Proof::Password(expected)) => {
                    self.is_target = Sha256::digest(password) == Sha256::digest(expected);
                    if !self.is_target {
                        return Err(io::Error::other(
                            "it does not have the password that the target was told",
                        ));
                    }
                    b"+OK\r\n"
                }
                // It need not prove here what it has to prove to its primaries.
                (b"AUTH", _, Proof::History(_)) => b"+OK\r\n",
                _ if matches!(proof, Proof::Password(_)) && !self.is_target => {
                    return Err(io::Error::other("it has not said the password that the target was told"));
                }
                (b"REPLCONF", ..) => b"+OK\r\n",
                (b"PSYNC", [_, history, ..], Proof::History(expected)) if *history != expected.as_bytes() => {
                    return Err(io::Error::other("it does not name the target's history"));
                }
                (b"PSYNC", [_, _, ..], _) => return Ok(true),
                _ => return Err(io::Error::other("it asks for something that a primary of ours has not")),
            };
            self.link.write_all(answer, limit)?;
        }
        Ok(false)
    }
}
