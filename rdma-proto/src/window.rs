//! The two offset machines of a direction: [`RxWindow`] where bytes arrive, [`TxWindow`] where they are sent to.
//!
//! A window is filled once, from its first byte to its last, without wrapping. Immediates say by how much. When it is full
//! its owner registers it, or another of the same length, anew. Nothing else moves the offsets (VR-FLOW-001), so the bytes of
//! all windows are one stream, each byte once and in order (VR-XFER-001).

use crate::backend::RemoteAddress;
use crate::error::{ApiMisuse, Error, PeerIncompatible, PeerMisbehaved};
use crate::wire::Window;

#[cfg(test)]
mod tests;

/// Where the peer's bytes arrive: one region, or two in turn.
///
/// With two, the other region is announced the moment one is full, while its bytes are still being read: from then on no
/// correct peer writes to the full one, because its immediates have used it up (VR-MEM-003). Announcing before a window is
/// full is not possible in this protocol: nothing would tell which window an immediate is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RxWindow {
    length: u32,
    windows: u8,
    /// The region being filled: all of `read <= received <= length`.
    current: u8,
    received: u32,
    read: u32,
    /// Where the unread bytes of the other region begin; they go to its end.
    previous: Option<u32>,
    announced: bool,
}

/// Bytes that can be read, contiguous in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Readable {
    /// The region's index, 0 or 1.
    pub region: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
}

impl RxWindow {
    /// Returns a receiving side of `windows` regions (1 or 2) of `length` bytes each, not yet announced.
    pub(crate) const fn new(length: u32, windows: u8) -> Self {
        Self { length, windows, current: 0, received: 0, read: 0, previous: None, announced: false }
    }

    /// Returns the region to announce to the peer now, if one is due.
    #[inline]
    pub(crate) const fn unannounced(&self) -> Option<u8> {
        if self.announced { None } else { Some(self.current) }
    }

    /// Notes that the region of [`RxWindow::unannounced`] was announced.
    pub(crate) fn announce(&mut self) {
        self.announced = true;
    }

    /// The peer says that `immediate` more bytes are there. How it wrote them does not matter (VR-XFER-006), nor in how many
    /// notifications (VR-FLOW-014). The sum is checked like every number of a peer's (VR-SEC-003).
    ///
    /// # Errors
    /// The peer used more than it was given (VR-FLOW-002), or anything before it was given a window (VR-FLOW-003).
    /// Zero is always allowed and means nothing (VR-XFER-005).
    #[inline]
    pub(crate) fn receive(&mut self, immediate: u32) -> Result<(), PeerMisbehaved> {
        let room = self.length.saturating_sub(self.received);
        if immediate > room || !self.announced && immediate != 0 {
            return Err(self.refuse(immediate));
        }
        // No more than `room`.
        self.received = self.received.wrapping_add(immediate);
        self.rotate();
        Ok(())
    }

    #[cold]
    const fn refuse(&self, immediate: u32) -> PeerMisbehaved {
        if !self.announced {
            return PeerMisbehaved::NoWindow { immediate };
        }
        PeerMisbehaved::WindowOverrun { immediate, received: self.received, length: self.length }
    }

    /// Returns the next bytes to read, in order, and none that no immediate has covered (VR-XFER-008), also not after the end
    /// (VR-XFER-012); more may follow in the other region once these are consumed.
    #[inline]
    pub(crate) const fn readable(&self) -> Option<Readable> {
        let (region, offset, end) = match self.previous {
            Some(offset) => (self.other(), offset, self.length),
            None => (self.current, self.read, self.received),
        };
        if offset == end { None } else { Some(Readable { region, offset, len: end.saturating_sub(offset) }) }
    }

    /// Returns all bytes that can be read, in order.
    pub(crate) const fn all_readable(&self) -> [Option<Readable>; 2] {
        match self.previous {
            Some(_) if self.read < self.received => {
                let len = self.received.saturating_sub(self.read);
                [self.readable(), Some(Readable { region: self.current, offset: self.read, len })]
            }
            _ => [self.readable(), None],
        }
    }

    /// Returns the number of unread bytes.
    #[inline]
    pub(crate) const fn unread(&self) -> u64 {
        let previous = match self.previous {
            Some(offset) => self.length.saturating_sub(offset),
            None => 0,
        };
        (previous as u64).saturating_add(self.received.saturating_sub(self.read) as u64)
    }

    /// Notes that `bytes` of [`RxWindow::readable`] were read and their memory may be written again.
    ///
    /// # Errors
    /// More than was readable.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: u32) -> Result<(), ApiMisuse> {
        let offset = match self.readable() {
            Some(readable) if bytes <= readable.len => readable.offset.wrapping_add(bytes),
            None if bytes == 0 => return Ok(()),
            readable => return Err(refuse_to_consume(bytes, readable)),
        };
        match self.previous {
            Some(_) => self.previous = if offset == self.length { None } else { Some(offset) },
            None => self.read = offset,
        }
        self.rotate();
        Ok(())
    }

    /// Returns the index of a second region that would let the peer go on at once: there is only one, it is full, and its bytes
    /// are not all read.
    #[inline]
    pub(crate) const fn lacks_region(&self) -> Option<u8> {
        if self.windows == 1 && self.is_full() && self.read != self.length {
            Some(self.other())
        } else {
            None
        }
    }

    /// Goes on with two regions; the second is that of [`RxWindow::lacks_region`].
    pub(crate) fn add_region(&mut self) {
        self.windows = 2;
        self.rotate();
    }

    /// Goes on with one region. The index of the one that is no longer used, unless it still holds unread bytes or there is
    /// only one anyway.
    pub(crate) fn drop_region(&mut self) -> Option<u8> {
        if self.windows != 2 || self.previous.is_some() {
            return None;
        }
        self.windows = 1;
        Some(self.other())
    }

    const fn other(&self) -> u8 {
        self.current ^ 1
    }

    const fn is_full(&self) -> bool {
        self.received == self.length
    }

    /// Moves on to the next region once this one is full and the next one is free (VR-MEM-010); until then its memory is the
    /// peer's (VR-MEM-015).
    #[inline]
    fn rotate(&mut self) {
        if self.is_full() {
            self.leave_full();
        }
    }

    #[cold]
    fn leave_full(&mut self) {
        let unread = self.read != self.length;
        match (self.windows, self.previous) {
            (2, None) => {
                self.previous = if unread { Some(self.read) } else { None };
                self.current = self.other();
            }
            (1, _) if !unread => {}
            _ => return,
        }
        self.received = 0;
        self.read = 0;
        self.announced = false;
    }
}

#[cold]
fn refuse_to_consume(bytes: u32, readable: Option<Readable>) -> ApiMisuse {
    let readable = readable.map_or(0, |readable| readable.len as usize);
    ApiMisuse::ConsumeBeyondReadable { bytes: bytes as usize, readable }
}

/// The peer's window, where our bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct TxWindow {
    /// What the peer registered last.
    window: Option<Window>,
    /// Where the next byte goes.
    next: RemoteAddress,
    /// Bytes that still fit behind it.
    room: u32,
}

impl TxWindow {
    /// No window yet: nothing may be sent (VR-FLOW-004).
    pub(crate) const fn new() -> Self {
        Self { window: None, next: RemoteAddress { address: 0, rkey: 0 }, room: 0 }
    }

    /// The peer registered `window`; sending goes on at its first byte (VR-MEM-002), whatever its address, key and length
    /// are (VR-MEM-011 to 013).
    ///
    /// # Errors
    /// It is empty, wraps around the address space, is longer than `limit`, or comes before the old one was full. In the
    /// last case bytes already written cannot be attributed to either window, so the stream is lost (VR-MEM-004).
    pub(crate) fn register(&mut self, window: Window, limit: u32) -> Result<(), Error> {
        if let Some(old) = self.window
            && self.room > 0
        {
            let used = old.length.saturating_sub(self.room);
            let early = PeerMisbehaved::EarlyRegistration { used, length: old.length };
            return Err(Error::PeerMisbehaved(early));
        }
        let Window { address, length, rkey } = window;
        if length == 0 {
            return Err(Error::PeerMisbehaved(PeerMisbehaved::EmptyWindow));
        }
        if length > limit {
            return Err(Error::PeerIncompatible(PeerIncompatible::WindowTooLarge { length, limit }));
        }
        if address.checked_add(length as u64).is_none() {
            return Err(Error::PeerMisbehaved(PeerMisbehaved::WindowWraps { address, length }));
        }
        *self = Self { window: Some(window), next: RemoteAddress { address, rkey }, room: length };
        Ok(())
    }

    /// Returns whether the peer ever registered a window.
    pub(crate) const fn is_registered(&self) -> bool {
        self.window.is_some()
    }

    /// Returns how many bytes still fit.
    #[inline]
    pub(crate) const fn room(&self) -> u32 {
        self.room
    }

    /// Takes the next `bytes` of the window, of which it is known that they fit, and says where they are.
    #[inline]
    pub(crate) fn take_easily(&mut self, bytes: u32) -> RemoteAddress {
        let at = self.next;
        self.room = self.room.wrapping_sub(bytes);
        self.next.address = at.address.wrapping_add(bytes as u64);
        at
    }

    /// Takes the next `bytes` of the window and says where they are; `None` if they do not fit (VR-FLOW-007). No byte is
    /// taken twice (VR-XFER-009).
    #[inline]
    pub(crate) fn take(&mut self, bytes: u32) -> Option<RemoteAddress> {
        let room = self.room.checked_sub(bytes)?;
        let at = self.next;
        self.room = room;
        // Within a window that does not wrap.
        self.next.address = at.address.saturating_add(bytes as u64);
        Some(at)
    }
}
