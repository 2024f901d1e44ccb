//! The offsets of a direction: [`RxWindow`] for arriving bytes, [`TxWindow`] for bytes to send.
//!
//! A window is filled once, from its first byte to its last, as immediates say. When it is full,
//! its owner registers it, or another, again. Nothing else moves the offsets (VR-FLOW-001): all
//! windows form one stream, in order, each byte once (VR-XFER-001).

use core::ops::Range;

use crate::error::{ApiMisuse, Error, PeerIncompatible, PeerMisbehaved};
use crate::wire::Window;
use rdma_types::RemoteAddress;

#[cfg(test)]
mod tests;

/// Where the peer's bytes arrive: one or two own regions, and for a time memory of the application.
///
/// With two regions, the other is announced when one is full. A correct peer no longer writes to
/// the full one: its immediates have used it up (VR-MEM-003). Nothing tells which window an
/// immediate means, so no window is announced before the last is full. With
/// [`FeatureSet::MULTI_BUFFER`](crate::wire::FeatureSet::MULTI_BUFFER) ([`RxWindow::go_ahead`]) the
/// free region is announced behind the one being filled (VM-005).
///
/// Unread bytes lie in at most three places, in this order: the previously full region, the
/// application's memory, and the region being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RxWindow {
    length: u32,
    /// Up to what length the only region's windows grow; 0 if they keep theirs.
    longest: u32,
    windows: u8,
    own: u8,
    /// Whether the window being filled lies in [`RxWindow::landing`]; otherwise it is `own`.
    lands: bool,
    received: u32,
    /// Bytes read from `own` while it is being filled.
    read: u32,
    /// Where the unread bytes of a full own region begin; they extend to its end.
    previous: Option<u32>,
    announced: bool,
    ahead: bool,
    next_announced: bool,
    landing: Landing,
    /// Fast path: whether all unread bytes lie in `own`, and `own` is being filled.
    plain: bool,
}

/// The application's memory, for consecutive windows. `read <= received <= next`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Landing {
    length: u32,
    /// Where the next window would begin.
    next: u32,
    received: u32,
    read: u32,
}

impl Landing {
    const NONE: Self = Self { length: 0, next: 0, received: 0, read: 0 };

    const fn takes(&self, window: u32) -> bool {
        self.length.saturating_sub(self.next) >= window
    }

    const fn is_read(&self) -> bool {
        self.read == self.received
    }
}

/// Readable bytes, contiguous in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Readable {
    /// The region's index: 0 or 1, or [`Readable::LANDED`].
    pub region: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// The number of bytes.
    pub len: u32,
}

impl Readable {
    /// The index of the memory passed to [`Machine::land`](crate::Machine::land).
    pub const LANDED: u8 = 2;
}

impl RxWindow {
    pub(crate) const fn new(length: u32, windows: u8, longest: u32) -> Self {
        let (received, read, previous, landing) = (0, 0, None, Landing::NONE);
        let (announced, ahead, next_announced, plain) = (false, false, false, true);
        Self {
            length,
            longest,
            windows,
            own: 0,
            lands: false,
            received,
            read,
            previous,
            announced,
            ahead,
            next_announced,
            landing,
            plain,
        }
    }

    /// Returns the length of the window to announce.
    pub(crate) const fn length(&self) -> u32 {
        self.length
    }

    pub(crate) fn go_ahead(&mut self, ahead: bool) {
        self.ahead = ahead;
    }

    /// Whether to announce the other region ahead. The application's memory never is.
    const fn goes_ahead(&self) -> bool {
        // A region is registered again only when all of it was read (VM-005).
        self.ahead
            && self.windows == 2
            && self.previous.is_none()
            && !self.next_announced
            && !self.is_landing()
    }

    /// Returns the window to announce now, as the region's index and an offset in it.
    #[inline]
    pub(crate) const fn unannounced(&self) -> Option<(u8, u32)> {
        match (self.announced, self.lands) {
            (true, _) if self.goes_ahead() => Some((self.other(), 0)),
            (true, _) => None,
            (false, true) => Some((Readable::LANDED, self.landing.next.saturating_sub(self.length))),
            (false, false) => Some((self.own, 0)),
        }
    }

    pub(crate) fn announce(&mut self) {
        self.next_announced = self.announced;
        self.announced = true;
    }

    /// Records that the peer has written `bytes` more. Returns whether the window is full. `None`,
    /// unchanged: it exceeded the window (VR-FLOW-002), or has none (VR-FLOW-003).
    ///
    /// How, and in how many notifications, does not matter (VR-XFER-006, VR-FLOW-014). The sum is
    /// checked (VR-SEC-003). Zero has no meaning (VR-XFER-005).
    #[inline]
    pub(crate) fn receive(&mut self, bytes: u64) -> Option<bool> {
        let room = self.length.saturating_sub(self.received);
        if bytes > room.into() || !self.announced && bytes != 0 {
            return None;
        }
        // At most `room`, a u32.
        self.received = self.received.wrapping_add(bytes as u32);
        if self.lands {
            self.landing.received = self.landing.received.saturating_add(bytes as u32);
        }
        Some(self.rotate())
    }

    #[cold]
    pub(crate) const fn refusal(&self, immediate: u32) -> PeerMisbehaved {
        if !self.announced || self.is_withheld() {
            return PeerMisbehaved::NoWindow { immediate };
        }
        PeerMisbehaved::WindowOverrun { immediate, received: self.received, length: self.length }
    }

    /// Returns the next bytes to read, of those that an immediate has covered (VR-XFER-008), also
    /// after the end (VR-XFER-012). Another region may then have more.
    #[inline]
    pub(crate) const fn readable(&self) -> Option<Readable> {
        debug_assert!(self.plain == self.is_plain(), "where the unread bytes lie was not noted");
        if self.plain { self.current_part() } else { self.first_part() }
    }

    #[cold]
    const fn first_part(&self) -> Option<Readable> {
        if let Some(part) = self.previous_part() {
            return Some(part);
        }
        if let Some(part) = self.landed_part() {
            return Some(part);
        }
        self.current_part()
    }

    #[inline]
    pub(crate) const fn all_readable(&self) -> [Option<Readable>; 3] {
        [self.previous_part(), self.landed_part(), self.current_part()]
    }

    #[inline]
    const fn previous_part(&self) -> Option<Readable> {
        match self.previous {
            Some(offset) => {
                // `own` changes only when the next window lies in a region of our own.
                let region = if self.lands { self.own } else { self.other() };
                Some(Readable { region, offset, len: self.length.saturating_sub(offset) })
            }
            None => None,
        }
    }

    #[inline]
    const fn landed_part(&self) -> Option<Readable> {
        let Landing { read, received, .. } = self.landing;
        if read == received {
            return None;
        }
        Some(Readable { region: Readable::LANDED, offset: read, len: received.saturating_sub(read) })
    }

    #[inline]
    const fn current_part(&self) -> Option<Readable> {
        if self.lands || self.read == self.received {
            return None;
        }
        Some(Readable { region: self.own, offset: self.read, len: self.received.saturating_sub(self.read) })
    }

    #[inline]
    pub(crate) const fn unread(&self) -> u64 {
        debug_assert!(self.plain == self.is_plain(), "where the unread bytes lie was not noted");
        if self.plain { self.received.saturating_sub(self.read) as u64 } else { self.unread_in_parts() }
    }

    #[cold]
    const fn unread_in_parts(&self) -> u64 {
        let previous = match self.previous {
            Some(offset) => self.length.saturating_sub(offset),
            None => 0,
        };
        let landed = self.landing.received.saturating_sub(self.landing.read);
        let current = if self.lands { 0 } else { self.received.saturating_sub(self.read) };
        (previous as u64).saturating_add(landed as u64).saturating_add(current as u64)
    }

    #[inline]
    pub(crate) fn take(&mut self, most: usize) -> Option<Readable> {
        let part = self.readable()?;
        let len = u32::try_from(most).map_or(part.len, |most| most.min(part.len));
        if len == 0 {
            return None;
        }
        // At most the part, so it is not refused.
        self.consume(len).ok()?;
        Some(Readable { len, ..part })
    }

    /// Fast path of [`RxWindow::take`]. `None` if the window is full or bytes lie elsewhere.
    #[inline]
    pub(crate) fn take_at_once(&mut self, most: usize) -> Option<Readable> {
        debug_assert!(self.plain == self.is_plain(), "where the unread bytes lie was not noted");
        let unread = self.received.saturating_sub(self.read);
        let len = if most < unread as usize { most as u32 } else { unread };
        // Reading a full window to its end moves on to the next, which this path does not.
        if len == 0 || !self.plain || self.is_full() {
            return None;
        }
        let offset = self.read;
        self.read = offset.wrapping_add(len);
        Some(Readable { region: self.own, offset, len })
    }

    /// Records that `bytes` of [`RxWindow::readable`] were read. Their memory may be overwritten.
    ///
    /// # Errors
    /// Returns an error if fewer are readable.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: u32) -> Result<(), ApiMisuse> {
        if self.plain && bytes <= self.received.saturating_sub(self.read) {
            self.read = self.read.wrapping_add(bytes);
            self.rotate();
            return Ok(());
        }
        self.consume_part(bytes)
    }

    #[cold]
    fn consume_part(&mut self, bytes: u32) -> Result<(), ApiMisuse> {
        let part = match self.readable() {
            Some(part) if bytes <= part.len => part,
            None if bytes == 0 => return Ok(()),
            readable => return Err(refuse_to_consume(bytes, readable)),
        };
        // At most the end of the part.
        let offset = part.offset.wrapping_add(bytes);
        if self.previous.is_some() {
            self.previous = if bytes == part.len { None } else { Some(offset) };
        } else if part.region == Readable::LANDED {
            self.landing.read = offset;
        } else {
            self.read = offset;
        }
        self.rotate();
        self.look_whether_plain();
        Ok(())
    }

    fn look_whether_plain(&mut self) {
        self.plain = self.is_plain();
    }

    const fn is_plain(&self) -> bool {
        !self.lands && self.previous.is_none() && self.landing.is_read()
    }

    /// See [`Machine::land`](crate::Machine::land).
    ///
    /// # Errors
    /// Returns an error if previous memory is still in use.
    pub(crate) fn land(&mut self, length: u32) -> Result<Option<Readable>, ApiMisuse> {
        // The length of windows is not known yet.
        if self.is_withheld() {
            return Ok(None);
        }
        if self.is_landing() {
            return Err(ApiMisuse::LandingUnderWay);
        }
        // The window being filled stays where it is, and so does one announced behind it.
        let announced = if self.next_announced { self.length } else { 0 };
        let filling = self.length.saturating_sub(self.received).saturating_add(announced);
        let next = self.unread().saturating_add(filling.into());
        let windows = u64::from(length).saturating_sub(next).checked_div(self.length.into()).unwrap_or(0);
        // At most `length`, a u32.
        let (next, landed) =
            (next.min(length.into()) as u32, windows.saturating_mul(self.length.into()) as u32);
        if landed == 0 {
            return Ok(None);
        }
        self.landing = Landing { length, next, received: next, read: next };
        self.rotate();
        Ok(Some(Readable { region: Readable::LANDED, offset: next, len: landed }))
    }

    /// See [`Machine::stop_landing`](crate::Machine::stop_landing).
    pub(crate) fn stop_landing(&mut self) {
        self.landing.length = self.landing.next;
    }

    pub(crate) const fn is_landing(&self) -> bool {
        self.may_land() || !self.landing.is_read()
    }

    pub(crate) const fn landing_in_use(&self) -> Range<u32> {
        let Landing { length, next, received, read } = self.landing;
        // The peer may write to all further windows, else to the announced one, else to none.
        let end = if self.landing.takes(self.length) {
            length
        } else if self.lands {
            next
        } else {
            received
        };
        read..end
    }

    pub(crate) const fn may_land(&self) -> bool {
        self.lands || self.landing.takes(self.length)
    }

    pub(crate) const fn announces_ahead(&self) -> bool {
        self.ahead || self.next_announced
    }

    /// See [`Machine::lacks_region`](crate::Machine::lacks_region); also for announcing ahead.
    #[inline]
    pub(crate) const fn lacks_region(&self) -> Option<u8> {
        // A full window that needs no region was left already. Landed bytes are read first.
        let waits = self.lands || self.landing.is_read();
        // Only at a window's beginning, so that missing memory is requested once per window.
        let lacks = self.windows == 1 && self.longest == 0;
        if (self.is_full() && waits || self.ahead && self.received == 0) && lacks {
            Some(self.other())
        } else {
            None
        }
    }

    pub(crate) fn add_region(&mut self) {
        self.windows = 2;
        self.rotate();
    }

    /// See [`Machine::withhold_window`](crate::Machine::withhold_window). A window that has no room
    /// and needs no announcement stands for none: the usual paths need not ask.
    pub(crate) fn withhold(&mut self) {
        if !self.announced {
            (self.windows, self.length, self.announced) = (0, 0, true);
        }
    }

    const fn is_withheld(&self) -> bool {
        self.windows == 0
    }

    /// Has its first region from now on, with a window of `length` bytes that grows up to
    /// `longest`. Returns false, unchanged, if it has one.
    pub(crate) fn open(&mut self, length: u32, longest: u32) -> bool {
        let withheld = self.is_withheld();
        if withheld {
            (self.windows, self.length, self.announced) = (1, length, false);
            self.longest = longest;
        }
        withheld
    }

    /// See [`Machine::drop_region`](crate::Machine::drop_region).
    pub(crate) fn drop_region(&mut self) -> Option<u8> {
        if self.windows != 2 || self.previous.is_some() || self.announces_ahead() {
            return None;
        }
        self.windows = 1;
        Some(self.other())
    }

    const fn other(&self) -> u8 {
        self.own ^ 1
    }

    const fn is_full(&self) -> bool {
        self.received == self.length
    }

    /// Moves on to the next window once this one is full and the next one's memory is free
    /// (VR-MEM-010): until then that is the peer's (VR-MEM-015). Returns whether this one was full.
    #[inline]
    fn rotate(&mut self) -> bool {
        let full = self.is_full();
        if full {
            self.leave_full();
        }
        full
    }

    #[cold]
    fn leave_full(&mut self) {
        // It has length 0, so that it always looks full.
        if self.is_withheld() {
            return;
        }
        // Unread bytes of a full region become `previous`: one place, which is read before landed
        // bytes. So neither of the two may have any left.
        let unread = !self.lands && self.read != self.length;
        if unread && (self.previous.is_some() || !self.landing.is_read()) {
            return;
        }
        let lands = !self.next_announced && self.landing.takes(self.length);
        // Next is memory of the application, the other region, or the same one if it is read to the
        // end (VR-MEM-010).
        if lands {
            self.landing.next = self.landing.next.saturating_add(self.length);
        } else if self.windows == 2 {
            self.own = self.other();
        } else if unread || self.previous.is_some() {
            return;
        } else {
            // Within the region, all of which is free (VR-MEM-020).
            self.length = self.length.saturating_mul(2).min(self.longest).max(self.length);
        }
        if unread {
            self.previous = Some(self.read);
        }
        self.lands = lands;
        self.received = 0;
        self.read = 0;
        self.announced = core::mem::take(&mut self.next_announced);
        self.look_whether_plain();
    }
}

#[cold]
fn refuse_to_consume(bytes: u32, readable: Option<Readable>) -> ApiMisuse {
    let readable = readable.map_or(0, |readable| readable.len as usize);
    ApiMisuse::ConsumeBeyondReadable { bytes: bytes as usize, readable }
}

/// Windows that a peer may register behind the one being filled (VM-003).
const QUEUED: usize = 3;

/// The peer's windows: the one being filled, and those behind it in registration order, with
/// [`FeatureSet::MULTI_BUFFER`](crate::wire::FeatureSet::MULTI_BUFFER).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct TxWindow {
    window: Option<Window>,
    next: RemoteAddress,
    room: u32,
    /// The windows behind it. The first `None` ends the queue.
    queued: [Option<Window>; QUEUED],
}

impl TxWindow {
    /// Starts without a window: nothing may be sent (VR-FLOW-004).
    pub(crate) const fn new() -> Self {
        Self { window: None, next: RemoteAddress { address: 0, rkey: 0 }, room: 0, queued: [None; QUEUED] }
    }

    /// Records a registration. Sending continues at its first byte (VR-MEM-002), whatever its
    /// address, key and length (VR-MEM-011 to 013, VR-MEM-021). With `queues`, it may wait behind a
    /// window that is not full (VM-002).
    ///
    /// # Errors
    /// Returns an error if the window is empty, wraps around the address space, exceeds `limit`, or
    /// comes early and finds no place: where written bytes lie is unknown (VR-MEM-004, VM-003).
    pub(crate) fn register(&mut self, window: Window, limit: u32, queues: bool) -> Result<(), Error> {
        let place = if queues { self.queued.iter_mut().find(|place| place.is_none()) } else { None };
        if let Some(old) = self.window
            && self.room > 0
            && place.is_none()
        {
            let used = old.length.saturating_sub(self.room);
            let early = PeerMisbehaved::EarlyRegistration { used, length: old.length };
            return Err(Error::PeerMisbehaved(early));
        }
        let Window { address, length, .. } = window;
        if length == 0 {
            return Err(Error::PeerMisbehaved(PeerMisbehaved::EmptyWindow));
        }
        if length > limit {
            return Err(Error::PeerIncompatible(PeerIncompatible::WindowTooLarge { length, limit }));
        }
        if address.checked_add(length as u64).is_none() {
            return Err(Error::PeerMisbehaved(PeerMisbehaved::WindowWraps { address, length }));
        }
        // A full window is followed at once. Otherwise the new one waits (VM-002).
        match place {
            Some(place) if self.room > 0 => *place = Some(window),
            _ => self.begin(window),
        }
        Ok(())
    }

    fn begin(&mut self, window: Window) {
        let Window { address, length, rkey } = window;
        (self.window, self.next, self.room) = (Some(window), RemoteAddress { address, rkey }, length);
    }

    /// Returns whether it was full. The next queued window, if any, follows.
    pub(crate) fn leave_full(&mut self) -> bool {
        if self.room > 0 {
            return false;
        }
        let [first, ..] = self.queued;
        if let Some(window) = first {
            self.queued.rotate_left(1);
            if let Some(last) = self.queued.last_mut() {
                *last = None;
            }
            self.begin(window);
        }
        true
    }

    pub(crate) const fn is_registered(&self) -> bool {
        self.window.is_some()
    }

    #[inline]
    pub(crate) const fn room(&self) -> u32 {
        self.room
    }

    /// Takes the next `bytes` of the window, `None` if they do not fit (VR-FLOW-007). No byte is
    /// taken twice (VR-XFER-009). Call `leave_full` after the last.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u32) -> Option<RemoteAddress> {
        let room = self.room.checked_sub(bytes)?;
        let at = self.next;
        self.room = room;
        // Inside a window that does not wrap.
        self.next.address = at.address.wrapping_add(bytes as u64);
        Some(at)
    }
}
