//! Frames on a connection of an [`Endpoint`].

use std::io::IoSlice;

use rdma_conn::{ConnectionId, Descriptors, Endpoint, Limits, Options};

use crate::error::Error;
use crate::wire::{Frame, HEADER, MOST_PAYLOAD};

/// Pending bytes, beyond which a side adds no more to send.
const ENOUGH: usize = 64 << 10;

/// One end of a control stream. It holds at most one received frame.
pub(crate) struct Channel {
    id: ConnectionId,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl Channel {
    pub(crate) const fn new(id: ConnectionId) -> Self {
        Self { id, inbox: Vec::new(), outbox: Vec::new() }
    }

    pub(crate) const fn id(&self) -> ConnectionId {
        self.id
    }

    /// Returns whether it takes another frame. Frames that end a session are always taken.
    pub(crate) fn has_room(&self) -> bool {
        self.outbox.len() < ENOUGH
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        frame.encode(&mut self.outbox);
    }

    /// Sends what can be sent now. Returns true if anything was sent.
    pub(crate) fn flush<B: Descriptors>(&mut self, endpoint: &mut Endpoint<B>) -> Result<bool, Error> {
        if self.outbox.is_empty() || !endpoint.is_open(self.id) {
            return Ok(false);
        }
        let taken = endpoint.write(self.id, &[IoSlice::new(&self.outbox)])?.unwrap_or(0);
        self.outbox.drain(..taken.min(self.outbox.len()));
        Ok(taken > 0)
    }

    /// Returns the next frame, if it is complete.
    ///
    /// # Errors
    /// The connection has ended, or the received bytes are no frame.
    pub(crate) fn receive<B: Descriptors>(
        &mut self,
        endpoint: &mut Endpoint<B>,
    ) -> Result<Option<Frame>, Error> {
        if !endpoint.is_open(self.id) {
            return Ok(None);
        }
        loop {
            if let Some((frame, taken)) = Frame::decode(&self.inbox).map_err(Error::Foreign)? {
                self.inbox.drain(..taken);
                return Ok(Some(frame));
            }
            // Less than a frame is stored, so there is room (VS-WIRE-002).
            let mut bytes = [0; 4096];
            let room = (HEADER + MOST_PAYLOAD).saturating_sub(self.inbox.len()).min(bytes.len());
            let Some(into) = bytes.get_mut(..room) else { return Ok(None) };
            match endpoint.read(self.id, into)? {
                None => return Ok(None),
                Some(0) => return Err(Error::Ended),
                Some(count) => self.inbox.extend_from_slice(into.get(..count).unwrap_or_default()),
            }
        }
    }
}

/// Returns the limits of all control streams together. Each has a window and a send buffer, of
/// [`options`].
pub(crate) fn limits(connections: usize) -> Limits {
    Limits::default().connections(connections).registered_bytes((connections as u64).saturating_mul(1 << 20))
}

/// Returns the settings of a control stream: its frames are few and small.
pub(crate) fn options() -> Options {
    let mut options = Options::default();
    options.protocol.window = 64 << 10;
    options.protocol.send_buffer = 64 << 10;
    options
}
