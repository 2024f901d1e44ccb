//! Access to memory by RDMA WRITE and READ.

use std::time::Duration;

use rdma_backend::{CompletionStatus, RemoteAddress};
use rdma_conn::Descriptors;
use rdma_proto::wire::Window;

use super::case::Case;
use super::context::Context;
use super::results::Teardown;
use super::session::Session;
use crate::tester::Incoming;
use suite::verdict::pass;
use suite::{Cause, Judged, Stop};

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "sec.write-outside", "a WRITE over the end of the target's window"
            => "The target's device refuses it; it ends this connection at most.", ["VR-SEC-011"], outside;
        both "sec.write-immediate-outside", "a WRITE with immediate over the end of the target's window"
            => "The target's device refuses it; it ends this connection at most.", ["VR-SEC-011"], immediate_outside;
        both "sec.write-before", "a WRITE that begins before the target's window"
            => "The target's device refuses it; it ends this connection at most.", ["VR-SEC-011"], before;
        both "sec.read", "a READ of the target's window" => "The target's device refuses it.",
            ["VR-SEC-009", "VR-SEC-001"], |context| {
                refuses(context, |session, window| Ok(session.peer.read(at(window, 0), 64)?))
            };
        both "sec.wrong-key", "a WRITE with another key" => "The target's device refuses it.",
            ["VR-SEC-011", "VR-SEC-002"], wrong_key;
        server "sec.foreign-key", "a WRITE to the window of another connection" => "The server's device refuses it.",
            ["VR-SEC-002"], foreign_key;
        server "sec.stale-key", "a WRITE to the window of a connection that has ended"
            => "The server's device refuses it.", ["VR-SEC-010", "VR-SEC-002"], stale_key;
        server "sec.neighbour", "a connection with forbidden WRITEs, beside one without"
            => "The other is served.", ["VR-SEC-004"], neighbour;
    }
}

const fn at(window: Window, offset: i64) -> RemoteAddress {
    RemoteAddress { address: window.address.wrapping_add_signed(offset), rkey: window.rkey }
}

fn is_refused<B: Descriptors>(context: &Context<'_, B>, session: &mut Session<'_, B>) -> Judged {
    loop {
        let Some(incoming) = session.peer.receive_within(Duration::ZERO)? else {
            return Err(Stop::unmet("the device let it pass"));
        };
        match incoming {
            // For the memory, and for the operation.
            Incoming::Failed(
                status @ (CompletionStatus::REM_ACCESS_ERR | CompletionStatus::REM_INV_REQ_ERR),
            ) => {
                context.note(Teardown::Unclean);
                return Ok(pass(format!("refused: {status:?}")));
            }
            // Some devices report it like a dead peer (mlx5). This one is not dead.
            Incoming::Failed(CompletionStatus::RETRY_EXC_ERR) => {
                context.note(Teardown::Unclean);
                context.open()?.unharmed()?;
                return Ok(pass("refused: RETRY_EXC_ERR, and the target goes on with others"));
            }
            Incoming::Failed(status) => {
                context.note(Teardown::Unclean);
                return Err(Stop::undecided(format!("the request failed, and was not refused: {status:?}")));
            }
            Incoming::Read => return Err(Stop::unmet("the device answered the READ")),
            Incoming::Gone(_) if session.peer.all_succeeded() => {
                return Err(Stop::unmet("the device let it pass"));
            }
            Incoming::Gone(_) => {
                return Err(Stop::undecided("the connection ended before the device had answered"));
            }
            // A client sends commands meanwhile.
            Incoming::Notified(_) => {}
            other => session.peer.absorb(other)?,
        }
    }
}

fn refuses<B: Descriptors>(
    context: &Context<'_, B>,
    reach: impl FnOnce(&mut Session<'_, B>, Window) -> Result<(), Stop>,
) -> Judged {
    let mut session = context.open()?;
    // A device also refuses for a target that does nothing.
    if !session.exchange()? {
        return Err(Stop::undecided("the client left before it could be shown; it should do more"));
    }
    let window = session.peer.await_window()?;
    reach(&mut session, window)?;
    session.peer.settle()?;
    is_refused(context, &mut session)
}

fn outside<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    refuses(context, |session, window| {
        Ok(session.peer.write(at(window, i64::from(window.length) - 4), b"too long")?)
    })
}

fn immediate_outside<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    refuses(context, |session, window| {
        let end = at(window, i64::from(window.length) - 4);
        Ok(session.peer.write_immediate(end, b"too long", 8)?)
    })
}

fn before<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    refuses(context, |session, window| Ok(session.peer.write(at(window, -4), b"too soon")?))
}

fn wrong_key<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    refuses(context, |session, window| {
        let to = RemoteAddress { rkey: window.rkey ^ 0x55, ..at(window, 0) };
        Ok(session.peer.write(to, b"no")?)
    })
}

fn foreign_key<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut other = context.open()?;
    let window = other.peer.await_window()?;
    let judged = refuses(context, |session, _| Ok(session.peer.write(at(window, 0), b"not here")?))?;
    other.unharmed()?;
    Ok(judged)
}

fn stale_key<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut other = context.open()?;
    let window = other.peer.await_window()?;
    other.unharmed()?;
    refuses(context, |session, _| Ok(session.peer.write(at(window, 0), b"no more")?))
}

fn neighbour<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut other = context.open()?;
    for body in [outside, immediate_outside, before, wrong_key] {
        // Other cases check whether it was refused; here it must have been tried.
        if let Err(stop) = body(context)
            && stop.cause != Cause::Requirement
        {
            return Err(stop);
        }
        other.exchange()?;
    }
    other.unharmed()
}
