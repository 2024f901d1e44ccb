//! The application's part of receiving: bytes that it takes, and memory for them.

#[cfg(doc)]
use crate::config::Config;
use crate::error::ApiMisuse;
use crate::window::Readable;

use super::{Machine, RegionAddress};

impl Machine {
    /// Returns and consumes at most `most` received bytes: [`Machine::readable`] and
    /// [`Machine::consume`] in one. Copy them before the next action: the peer may overwrite them.
    #[inline]
    pub fn take(&mut self, most: usize) -> Option<Readable> {
        let part = self.rx.take(most)?;
        self.look_for_announcement();
        Some(part)
    }

    /// Fast path of [`Machine::take`]. `None`, unchanged, if there are no bytes or work may follow.
    #[inline]
    pub fn take_at_once(&mut self, most: usize) -> Option<Readable> {
        self.rx.take_at_once(most)
    }

    /// Gives `bytes` of [`Machine::readable`] back to the peer.
    ///
    /// # Errors
    /// Returns an error if fewer are readable.
    #[inline]
    pub fn consume(&mut self, bytes: u32) -> Result<(), ApiMisuse> {
        self.rx.consume(bytes)?;
        self.look_for_announcement();
        Ok(())
    }

    /// Withholds the first window, for a server that decides about a connection before it registers
    /// memory: [`Machine::open_window`] follows. Call it before anything else.
    pub fn withhold_window(&mut self) {
        self.rx.withhold();
    }

    /// Has the first window, of `length` bytes in a region of `region` bytes. Without effect unless
    /// it was withheld. From now on `length` is [`Config::window`] (VR-MEM-008). A window that may
    /// grow does so within the region.
    pub fn open_window(&mut self, memory: RegionAddress, length: u32, region: u32) {
        let longest = self.config.longest().map(|longest| longest.min(region));
        if self.rx.open(length, longest.unwrap_or_default()) {
            let [first, _] = &mut self.regions;
            *first = memory;
            self.config.window = length;
            self.config.grow_to = longest;
            self.look_for_announcement();
        }
    }

    /// Adds the region for [`Machine::lacks_region`], of [`Config::window`] bytes (VR-MEM-008).
    pub fn add_region(&mut self, address: RegionAddress) {
        let Some(index) = self.rx.lacks_region() else { return };
        // The other region stays: it is being filled, or holds unread bytes.
        let [first, second] = &mut self.regions;
        *(if index == 0 { first } else { second }) = address;
        self.rx.add_region();
        self.look_for_announcement();
    }

    /// Continues with one receive region. Returns the index of the other, to be deregistered.
    /// `None` if there is only one, both hold unread bytes, or windows are announced ahead.
    pub fn drop_region(&mut self) -> Option<u8> {
        self.rx.drop_region()
    }

    /// Receives the next `length` unread bytes into application memory, from `memory` on.
    ///
    /// Windows that lie wholly in that part of the stream are announced there (VR-MEM-018,
    /// VR-MEM-008); other bytes arrive in the connection's own regions. Returns the bytes that will
    /// land, as [`Machine::readable`] will, with the index [`Readable::LANDED`], or `None` if no
    /// whole window fits.
    ///
    /// The memory must stay registered until [`Machine::is_landing`] is false or the connection has
    /// ended. After that only a faulty peer writes to it, until it is deregistered (VR-SEC-005).
    ///
    /// # Errors
    /// Returns an error if earlier memory is in use, or this wraps around the address space.
    pub fn land(&mut self, memory: RegionAddress, length: u32) -> Result<Option<Readable>, ApiMisuse> {
        let RegionAddress { address, .. } = memory;
        // Checked once here, so that no address of a window inside can wrap.
        if address.checked_add(length.into()).is_none() {
            return Err(ApiMisuse::LandingWraps { address, length });
        }
        if self.has_ended() {
            // No window is announced any more (VR-CLOSE-006).
            return Ok(None);
        }
        let landed = self.rx.land(length)?;
        if landed.is_some() {
            self.landing = memory;
            self.look_for_announcement();
        }
        Ok(landed)
    }

    /// Announces no more windows in memory of [`Machine::land`]. Announced ones stay (VR-MEM-019).
    pub fn stop_landing(&mut self) {
        self.rx.stop_landing();
        // The other region, held back while bytes land, may now be announced ahead (VM-002).
        self.look_for_announcement();
    }
}
