//! Reaching for memory with RDMA WRITE and READ. The device refuses; our side has to say why the connection is gone.

use rdma_conn::Descriptors;
use rdma_conn::Error::Protocol;
use rdma_proto::Error::{PeerMisbehaved, Transport};
use rdma_proto::PeerMisbehaved::ReachedOutside;
use rdma_proto::TransportError::Completion;
use rdma_proto::backend::{CompletionError, CompletionStatus, RemoteAddress};
use rdma_proto::wire::Window;

use super::Setting;
use super::scene::{Attack, Scene, Side, usual};
use crate::{Case, Outcome};
use conformance::client::Failure;
use conformance::peer::Incoming;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        both "write-outside-window", "a WRITE over the window's end", ["VR-SEC-011"], usual() => outside;
        both "write-immediate-outside-window", "the same, with an immediate", ["VR-SEC-011"], usual()
            => immediate_outside;
        both "write-with-foreign-key", "a WRITE to the window of another connection", ["VR-SEC-002"], usual()
            => foreign_key;
        both "write-with-stale-key", "a WRITE to the window of a connection that has ended",
            ["VR-SEC-002", "VR-SEC-010"], usual() => stale_key;
        both "read-of-window", "a READ of the window", ["VR-SEC-001", "VR-SEC-009"], usual() => read;
    }
}

const fn start(window: Window) -> RemoteAddress {
    RemoteAddress { address: window.address, rkey: window.rkey }
}

const fn end(window: Window) -> RemoteAddress {
    RemoteAddress { address: window.address + window.length as u64 - 4, rkey: window.rkey }
}

/// The adversary's device must have been told that this is not allowed, and our side must say what it knows: what its device
/// tells unasked, or, where that tells nothing (soft-RoCE), that it stopped the connection.
fn is_stopped<B: Descriptors>(attack: &mut Attack<'_, B>) -> Outcome {
    is_refused(attack)?;
    attack.fails(
        is!(Protocol(
            PeerMisbehaved(ReachedOutside)
                | Transport(Completion(CompletionError { status: CompletionStatus::WR_FLUSH_ERR, .. }))
        )),
        "for memory that it was not given",
    )
}

fn is_refused<B: Descriptors>(attack: &mut Attack<'_, B>) -> Result<(), Failure> {
    match attack.peer.receive()? {
        Incoming::Failed(CompletionStatus::REM_ACCESS_ERR) => Ok(()),
        other => Err(Failure::wrong(format!("the adversary's request was not refused: {other:?}"))),
    }
}

fn outside<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let window = attack.peer.await_window()?;
    attack.peer.write(end(window), b"too long")?;
    is_stopped(&mut attack)
}

fn immediate_outside<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let window = attack.peer.await_window()?;
    attack.peer.write_immediate(end(window), b"too long", 8)?;
    is_refused(&mut attack)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(ReachedOutside))),
        "the peer broke the protocol: it reached for memory that it was not given",
    )
}

fn foreign_key<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut other = scene.greet(side)?;
    let window = other.peer.await_window()?;
    let mut attack = scene.greet(side)?;
    attack.peer.write(start(window), b"not here")?;
    let told = is_stopped(&mut attack)?;
    other.is_harmless()?;
    Ok(told)
}

fn stale_key<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut other = scene.greet(side)?;
    let window = other.peer.await_window()?;
    other.is_harmless()?;
    let mut attack = scene.greet(side)?;
    attack.peer.write(start(window), b"no more")?;
    is_stopped(&mut attack)
}

fn read<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let window = attack.peer.await_window()?;
    attack.peer.read(start(window), 64)?;
    is_stopped(&mut attack)
}
