//! The places of a peer's bytes. Only completions report its messages, so the recorder knows their
//! places from the posted receives and the announced windows. It holds regions weakly, so that
//! recording keeps nothing registered.

use std::collections::HashMap;
use std::sync::Weak;

use rdma_backend::Region;
use rdma_proto::wire::Window;

use super::recording::Remote;

pub(super) struct Inbound<R> {
    receives: HashMap<u64, Place<R>>,
    /// The last announced window, and how much of it was notified.
    window: Option<(Window, Weak<R>, u32)>,
    /// The window after that one: a peer may get it early.
    next: Option<(Window, Weak<R>)>,
}

pub(super) struct Place<R> {
    pub(super) region: Weak<R>,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// Returns bytes of a region; none if they are not inside.
pub(super) fn bytes(region: &impl Region, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if region.memory().read(offset, &mut bytes) { bytes } else { Vec::new() }
}

impl<R> Default for Inbound<R> {
    fn default() -> Self {
        Self { receives: HashMap::new(), window: None, next: None }
    }
}

impl<R: Region> Inbound<R> {
    pub(super) fn receive(&mut self, id: u64, place: Place<R>) {
        self.receives.insert(id, place);
    }

    pub(super) fn is_received(&mut self, id: u64) -> bool {
        self.receives.remove(&id).is_some()
    }

    pub(super) fn received(&mut self, id: u64, len: u32, most: usize) -> Vec<u8> {
        let Some(place) = self.receives.remove(&id) else { return Vec::new() };
        let len = (len as usize).min(place.len).min(most);
        place.region.upgrade().map(|region| bytes(&*region, place.offset, len)).unwrap_or_default()
    }

    pub(super) fn announce(&mut self, window: Window, region: Weak<R>) {
        match self.window {
            Some((current, _, filled)) if filled < current.length => self.next = Some((window, region)),
            _ => self.window = Some((window, region, 0)),
        }
    }

    /// Returns the place of the peer's next `count` bytes, and at most `most` of them.
    pub(super) fn notified(&mut self, count: u32, most: usize) -> (Option<Remote>, Vec<u8>) {
        let Some((window, region, filled)) = &mut self.window else { return (None, Vec::new()) };
        let address = window.address.wrapping_add((*filled).into());
        let at = Remote { address, rkey: window.rkey };
        let inside = count.min(window.length.saturating_sub(*filled));
        let bytes = region.upgrade().and_then(|region| {
            let offset = usize::try_from(address.checked_sub(region.address())?).ok()?;
            Some(bytes(&*region, offset, most.min(inside as usize)))
        });
        *filled = filled.saturating_add(inside);
        if *filled == window.length
            && let Some((window, region)) = self.next.take()
        {
            self.window = Some((window, region, 0));
        }
        (Some(at), bytes.unwrap_or_default())
    }
}
