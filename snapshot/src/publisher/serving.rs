//! One session of a publisher, on the table that its reader has chosen.

use rdma_conn::{Descriptors, Endpoint};

use super::Member;
use super::older::Older;
use super::session::{Log, Session, Terms};
use crate::error::Error;
use crate::wire::{Frame, Reason};

/// An unorderly end of a session.
pub(super) enum End {
    /// The reader is told.
    Told(Reason),
    /// The reader cannot be told.
    Gone(Error),
}

/// The tables of a publisher.
pub(super) struct Tables<'a, B: Descriptors> {
    pub(super) newest: (&'a Terms, &'a Log),
    pub(super) older: &'a [Older<B>],
}

impl<B: Descriptors> Tables<'_, B> {
    /// Returns the table of the snapshot that a session has chosen, or that its first frame names;
    /// or else the newest.
    fn of(&self, session: &Session, frame: Option<&Frame>) -> (&Terms, &Log) {
        let named = if let Some(Frame::Hello(hello)) = frame { Some(hello.snapshot) } else { None };
        let wanted = session.snapshot.or(named);
        let older = self.older.iter().find(|older| Some(older.terms.snapshot) == wanted);
        older.map_or(self.newest, |older| (&older.terms, &older.log))
    }
}

/// Handles a reader's frames, and sends it news. Returns true if anything moved.
pub(super) fn serve_one<B: Descriptors>(
    member: &mut Member<B>,
    endpoint: &mut Endpoint<B>,
    tables: &Tables<'_, B>,
    backend: &B,
) -> Result<bool, End> {
    let Member { data, session, channel } = member;
    let now = backend.now();
    let mut any = false;
    // Stops reading from a reader that does not read itself.
    while channel.has_room() && !session.is_done() {
        let frame = match channel.receive(endpoint) {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(Error::Foreign(_)) => return Err(End::Told(Reason::Misbehaved)),
            Err(error) => return Err(End::Gone(error)),
        };
        any = true;
        let nonce = crate::random().map_err(End::Gone)?;
        let (terms, log) = tables.of(session, Some(&frame));
        if let Some(answer) = session.handle_frame(&frame, terms, log, nonce, now).map_err(End::Told)? {
            channel.send(&answer);
        }
    }
    if session.is_done() {
        return Ok(true);
    }
    session.handle_timeout(now).map_err(End::Told)?;
    let (terms, log) = tables.of(session, None);
    while channel.has_room()
        && let Some(frame) = session.announce(log, terms.lease, now)
    {
        any = true;
        channel.send(&frame);
    }
    if session.is_serving() && data.is_none() {
        return Err(End::Gone(Error::DataEnded("the reader ended it")));
    }
    any |= channel.flush(endpoint).map_err(End::Gone)?;
    Ok(any)
}
