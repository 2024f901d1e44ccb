//! The two offset machines of a direction: [`RxWindow`] where bytes arrive, [`TxWindow`] where they are sent to.
//!
//! A window is filled once, from its first byte to its last, without wrapping. Immediates say by how much. When it is full
//! its owner registers it, or another of the same length, anew. Nothing else moves the offsets (VR-FLOW-001), so the bytes of
//! all windows are one stream, each byte once and in order (VR-XFER-001).

use core::ops::Range;

use crate::error::{ApiMisuse, Error, PeerIncompatible, PeerMisbehaved};
use crate::wire::Window;
use rdma_types::RemoteAddress;

#[cfg(test)]
mod tests;

/// Where the peer's bytes arrive: one region of our own, or two in turn, and for a while memory of the application.
///
/// With two, the other region is announced the moment one is full, while its bytes are still being read: from then on no
/// correct peer writes to the full one, because its immediates have used it up (VR-MEM-003). Announcing before a window is
/// full is not possible without [`FeatureSet::MULTI_BUFFER`](crate::wire::FeatureSet::MULTI_BUFFER): nothing would tell which
/// window an immediate is about. With it ([`RxWindow::go_ahead`]) the free region is announced behind the one that is being filled
/// (VM-005).
///
/// Unread bytes lie in at most three places, in this order: the region that was full before, the memory of the application, and
/// the region that is being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RxWindow {
    length: u32,
    /// Regions of our own, 1 or 2.
    windows: u8,
    /// The region of our own that was announced last.
    own: u8,
    /// Whether the window that is being filled lies in [`RxWindow::landing`]; otherwise it is `own`.
    lands: bool,
    /// Bytes of the window that is being filled.
    received: u32,
    /// Bytes of `own` that were read, while it is being filled.
    read: u32,
    /// Where the unread bytes of a full region of our own begin; they go to its end.
    previous: Option<u32>,
    announced: bool,
    /// Whether windows may be announced before they are needed, ...
    ahead: bool,
    /// ... and the other region was.
    next_announced: bool,
    landing: Landing,
    /// Whether all unread bytes lie in `own`, and it is `own` that is being filled, as nearly always.
    plain: bool,
}

/// Memory of the application in which windows lie one behind the other, each wholly inside. Offsets count from its beginning; all
/// of `read <= received <= next`, and the bytes before `read` are read.
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

    /// Returns whether another window of `window` bytes lies inside.
    const fn takes(&self, window: u32) -> bool {
        self.length.saturating_sub(self.next) >= window
    }

    const fn is_read(&self) -> bool {
        self.read == self.received
    }
}

/// Bytes that can be read, contiguous in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Readable {
    /// The region's index: 0 or 1, or [`Readable::LANDED`].
    pub region: u8,
    /// Offset of the first byte.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
}

impl Readable {
    /// The index of the memory that was given to [`Machine::land`](crate::Machine::land).
    pub const LANDED: u8 = 2;
}

impl RxWindow {
    /// Returns a receiving side of `windows` regions (1 or 2) of `length` bytes each, not yet announced.
    pub(crate) const fn new(length: u32, windows: u8) -> Self {
        let (received, read, previous, landing) = (0, 0, None, Landing::NONE);
        let (announced, ahead, next_announced, plain) = (false, false, false, true);
        Self {
            length,
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

    /// Windows may be announced from now on before they are needed, or no longer.
    pub(crate) fn go_ahead(&mut self, ahead: bool) {
        self.ahead = ahead;
    }

    /// Returns whether the other region is free, and to be announced behind the one that is being filled. Memory of the application
    /// comes in its turn only.
    const fn goes_ahead(&self) -> bool {
        // Nearly always false by the first.
        self.ahead
            && self.windows == 2
            && self.previous.is_none()
            && !self.next_announced
            && !self.is_landing()
    }

    /// Returns where the window lies that is to be announced to the peer now, if one is: the region's index, and the window's
    /// offset in it.
    #[inline]
    pub(crate) const fn unannounced(&self) -> Option<(u8, u32)> {
        match (self.announced, self.lands) {
            (true, _) if self.goes_ahead() => Some((self.other(), 0)),
            (true, _) => None,
            (false, true) => Some((Readable::LANDED, self.landing.next.saturating_sub(self.length))),
            (false, false) => Some((self.own, 0)),
        }
    }

    /// Notes that the window of [`RxWindow::unannounced`] was announced.
    pub(crate) fn announce(&mut self) {
        self.next_announced = self.announced;
        self.announced = true;
    }

    /// The peer says that `bytes` more are there. How it wrote them does not matter (VR-XFER-006), nor in how many notifications
    /// (VR-FLOW-014). The sum is checked like every number of a peer's (VR-SEC-003). Returns whether the window is full.
    ///
    /// `None`, and nothing is noted: the peer used more than it was given (VR-FLOW-002), or anything before it was given a window
    /// (VR-FLOW-003); [`RxWindow::refusal`] says which. Zero is always allowed and means nothing (VR-XFER-005).
    #[inline]
    pub(crate) fn receive(&mut self, bytes: u64) -> Option<bool> {
        let room = self.length.saturating_sub(self.received);
        if bytes > room.into() || !self.announced && bytes != 0 {
            return None;
        }
        // No more than `room`.
        self.received = self.received.wrapping_add(bytes as u32);
        if self.lands {
            self.landing.received = self.landing.received.saturating_add(bytes as u32);
        }
        Some(self.rotate())
    }

    /// Returns what is wrong with an immediate that was not received.
    #[cold]
    pub(crate) const fn refusal(&self, immediate: u32) -> PeerMisbehaved {
        if !self.announced {
            return PeerMisbehaved::NoWindow { immediate };
        }
        PeerMisbehaved::WindowOverrun { immediate, received: self.received, length: self.length }
    }

    /// Returns the next bytes to read, in order, and none that no immediate has covered (VR-XFER-008), also not after the end
    /// (VR-XFER-012); more may follow in another region once these are consumed.
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

    /// Returns all bytes that can be read, in order.
    pub(crate) const fn all_readable(&self) -> [Option<Readable>; 3] {
        [self.previous_part(), self.landed_part(), self.current_part()]
    }

    const fn previous_part(&self) -> Option<Readable> {
        match self.previous {
            Some(offset) => {
                let region = if self.lands { self.own } else { self.other() };
                Some(Readable { region, offset, len: self.length.saturating_sub(offset) })
            }
            None => None,
        }
    }

    const fn landed_part(&self) -> Option<Readable> {
        let Landing { read, received, .. } = self.landing;
        if read == received {
            return None;
        }
        Some(Readable { region: Readable::LANDED, offset: read, len: received.saturating_sub(read) })
    }

    const fn current_part(&self) -> Option<Readable> {
        if self.lands || self.read == self.received {
            return None;
        }
        Some(Readable { region: self.own, offset: self.read, len: self.received.saturating_sub(self.read) })
    }

    /// Returns the number of unread bytes.
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

    /// Returns the next bytes to read, at most `most`, and notes that they are read; `None` if there are none.
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

    /// As [`RxWindow::take`], of a window that is not full; `None` also if bytes lie elsewhere. Nothing follows from reading these.
    #[inline]
    pub(crate) fn take_at_once(&mut self, most: usize) -> Option<Readable> {
        debug_assert!(self.plain == self.is_plain(), "where the unread bytes lie was not noted");
        let unread = self.received.saturating_sub(self.read);
        let len = if most < unread as usize { most as u32 } else { unread };
        if len == 0 || !self.plain || self.is_full() {
            return None;
        }
        let offset = self.read;
        // At most what was received.
        self.read = offset.wrapping_add(len);
        Some(Readable { region: self.own, offset, len })
    }

    /// Notes that `bytes` of [`RxWindow::readable`] were read and their memory may be written again.
    ///
    /// # Errors
    /// More than was readable.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: u32) -> Result<(), ApiMisuse> {
        if self.plain && bytes <= self.received.saturating_sub(self.read) {
            // At most what was received.
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

    /// The next `length` unread bytes belong into memory of the application: windows that lie wholly in that part of the stream will
    /// lie there. Returns how many bytes that are, from which offset on; none if no window does.
    ///
    /// # Errors
    /// Memory that was given before is still in use.
    pub(crate) fn land(&mut self, length: u32) -> Result<Option<Readable>, ApiMisuse> {
        if self.is_landing() {
            return Err(ApiMisuse::LandingUnderWay);
        }
        // The window that the peer fills now lies where it lies, and so does one that is announced behind it.
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

    /// No further window will lie in the memory of the application. One that was announced does, until it is full.
    pub(crate) fn stop_landing(&mut self) {
        self.landing.length = self.landing.next;
    }

    /// Returns whether a window lies in memory of the application, or will, or unread bytes do.
    pub(crate) const fn is_landing(&self) -> bool {
        self.may_land() || !self.landing.is_read()
    }

    /// Returns the part of the memory of the application that holds unread bytes, or that the peer may still write.
    pub(crate) const fn landing_in_use(&self) -> Range<u32> {
        let Landing { length, next, received, read } = self.landing;
        let end = if self.landing.takes(self.length) {
            length
        } else if self.lands {
            next
        } else {
            received
        };
        read..end
    }

    /// Returns whether the peer may still write to the memory of the application.
    pub(crate) const fn may_land(&self) -> bool {
        self.lands || self.landing.takes(self.length)
    }

    /// Returns whether the window behind the one that is being filled is announced, or to be.
    pub(crate) const fn announces_ahead(&self) -> bool {
        self.ahead || self.next_announced
    }

    /// Returns the index of a second region that would let the peer go on at once: there is only one, it is full, and its bytes
    /// are not all read; or it may be announced before that.
    #[inline]
    pub(crate) const fn lacks_region(&self) -> Option<u8> {
        // What is full and needs no region has gone on already; what landed must be read first, whatever there is.
        let waits = self.lands || self.landing.is_read();
        // Ahead at a window's beginning only, so that memory which is lacking is asked for once for each window.
        if (self.is_full() && waits || self.ahead && self.received == 0) && self.windows == 1 {
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

    /// Goes on with one region. The index of the one that is no longer used, unless it still holds unread bytes, is or may be announced
    /// already, or there is only one anyway.
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

    /// Moves on to the next window once this one is full and the memory of the next one is free (VR-MEM-010); until then its memory
    /// is the peer's (VR-MEM-015). Returns whether this one was full.
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
        // A full region of our own that is not read becomes the previous one, of which there is one at most.
        let unread = !self.lands && self.read != self.length;
        if unread && (self.previous.is_some() || !self.landing.is_read()) {
            return;
        }
        let lands = !self.next_announced && self.landing.takes(self.length);
        if lands {
            self.landing.next = self.landing.next.saturating_add(self.length);
        } else if self.windows == 2 {
            self.own = self.other();
        } else if unread || self.previous.is_some() {
            return;
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

/// Windows that a peer may have registered behind the one that is being filled (VM-003).
const QUEUED: usize = 3;

/// The peer's windows, where our bytes go: the one that is being filled, and with
/// [`FeatureSet::MULTI_BUFFER`](crate::wire::FeatureSet::MULTI_BUFFER) those behind it, in the order of their registrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct TxWindow {
    /// The window that the peer registered last.
    window: Option<Window>,
    /// Where the next byte goes.
    next: RemoteAddress,
    /// Bytes that still fit behind it.
    room: u32,
    /// The windows behind it. The first that is `None` ends the queue.
    queued: [Option<Window>; QUEUED],
}

impl TxWindow {
    /// No window yet: nothing may be sent (VR-FLOW-004).
    pub(crate) const fn new() -> Self {
        Self { window: None, next: RemoteAddress { address: 0, rkey: 0 }, room: 0, queued: [None; QUEUED] }
    }

    /// The peer registered `window`; sending goes on at its first byte (VR-MEM-002), whatever its address, key and length
    /// are (VR-MEM-011 to 013). If windows queue (`queues`), it may come before the old one is full, and waits behind it
    /// (VM-002).
    ///
    /// # Errors
    /// It is empty, wraps around the address space, is longer than `limit`, or comes before the old one was full and finds no place
    /// in a queue. In the last case bytes already written cannot be attributed to either window, so the stream is lost (VR-MEM-004,
    /// VM-003).
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
        match place {
            Some(place) if self.room > 0 => *place = Some(window),
            _ => self.begin(window),
        }
        Ok(())
    }

    /// Goes on at the first byte of `window`.
    fn begin(&mut self, window: Window) {
        let Window { address, length, rkey } = window;
        (self.window, self.next, self.room) = (Some(window), RemoteAddress { address, rkey }, length);
    }

    /// Goes on in the next window that queues, if there is one, when that which is being filled is
    /// full. Returns whether it was.
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

    /// Returns whether the peer ever registered a window.
    pub(crate) const fn is_registered(&self) -> bool {
        self.window.is_some()
    }

    /// Returns how many bytes still fit.
    #[inline]
    pub(crate) const fn room(&self) -> u32 {
        self.room
    }

    /// Takes the next `bytes` of the window and says where they are; `None` if they do not fit (VR-FLOW-007). No byte is
    /// taken twice (VR-XFER-009). [`TxWindow::leave_full`] follows where they may be the last.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u32) -> Option<RemoteAddress> {
        let room = self.room.checked_sub(bytes)?;
        let at = self.next;
        self.room = room;
        // Within a window that does not wrap.
        self.next.address = at.address.wrapping_add(bytes as u64);
        Some(at)
    }
}
