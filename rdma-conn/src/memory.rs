//! The registered memory of one connection.

use rdma_proto::backend::{Access, Backend, Domain, RecvRequest, Region, Slice};
use rdma_proto::window::Readable;
use rdma_proto::wire::MESSAGE_LEN;
use rdma_proto::{Config, RegionAddress, Span};

use crate::error::Error;

/// Marks the work request ids of receives. Those of sends are the machine's, which leaves this bit free.
const RECEIVE: u64 = 1 << 63;

/// The slot of the receive with this work request id; `None` for a send.
pub(crate) fn receive_slot(id: u64) -> Option<u16> {
    u16::try_from(id ^ RECEIVE).ok()
}

/// Regions of one connection, each with no more rights than it needs (VR-SEC-001): only the receive windows can be
/// written by the peer, and nothing can be read by it.
#[derive(Debug)]
pub(crate) struct Memory<R> {
    windows: Vec<R>,
    /// A ring of bytes on their way out.
    send: R,
    /// Slots of [`MESSAGE_LEN`] bytes: first one for each send work request, then one for each receive.
    messages: R,
    send_slots: usize,
}

impl<R: Region> Memory<R> {
    pub(crate) fn register<B: Backend<Region = R>>(
        domain: &B::Domain,
        config: &Config,
        receives: u16,
    ) -> Result<Self, Error> {
        let register =
            |len: usize, access| domain.register(len, access).map_err(Error::backend("registering memory"));
        let send_slots = usize::from(config.send_depth);
        let slots = send_slots + usize::from(receives);
        Ok(Self {
            windows: (0..config.windows)
                .map(|_| register(config.window as usize, Access::REMOTE_WRITE))
                .collect::<Result<_, _>>()?,
            send: register(config.send_buffer as usize, Access::NONE)?,
            messages: register(slots * MESSAGE_LEN, Access::LOCAL_WRITE)?,
            send_slots,
        })
    }

    /// What the machine needs to announce the windows.
    pub(crate) fn addresses(&self) -> [RegionAddress; 2] {
        let mut addresses = [RegionAddress::default(); 2];
        for (address, region) in addresses.iter_mut().zip(&self.windows) {
            *address = RegionAddress { address: region.address(), rkey: region.rkey() };
        }
        addresses
    }

    pub(crate) fn registered_bytes(&self) -> usize {
        self.windows.iter().chain([&self.send, &self.messages]).map(Region::len).sum()
    }

    /// Copies received bytes out; as many as fit. How many.
    pub(crate) fn read_window(&self, from: Readable, into: &mut [u8]) -> u32 {
        let len = into.len().min(from.len as usize);
        let copied = match (self.windows.get(usize::from(from.region)), into.get_mut(..len)) {
            (Some(region), Some(into)) => region.memory().read(from.offset as usize, into),
            _ => false,
        };
        // `len` is at most `from.len`, a u32.
        if copied { len as u32 } else { 0 }
    }

    /// Copies bytes into the send buffer; as many as fit into `space`. How many.
    pub(crate) fn fill(&self, space: Span, from: &[u8]) -> usize {
        let len = from.len().min(space.len as usize);
        let copied =
            from.get(..len).is_some_and(|from| self.send.memory().write(space.offset as usize, from));
        if copied { len } else { 0 }
    }

    pub(crate) fn outgoing(&self, span: Span) -> Slice<'_, R> {
        Slice { region: &self.send, offset: span.offset as usize, len: span.len as usize }
    }

    /// Puts a message into a send slot.
    pub(crate) fn outgoing_message(&self, slot: u16, message: &[u8; MESSAGE_LEN]) -> Slice<'_, R> {
        let offset = usize::from(slot) * MESSAGE_LEN;
        let _inside_by_construction = self.messages.memory().write(offset, message);
        Slice { region: &self.messages, offset, len: MESSAGE_LEN }
    }

    /// The receive request of a slot.
    pub(crate) fn receive(&self, slot: u16) -> RecvRequest<'_, R> {
        let offset = (self.send_slots + usize::from(slot)) * MESSAGE_LEN;
        RecvRequest {
            id: RECEIVE | u64::from(slot),
            local: Slice { region: &self.messages, offset, len: MESSAGE_LEN },
        }
    }

    /// What a receive slot holds after a SEND of `len` bytes.
    pub(crate) fn incoming_message(&self, slot: u16, len: u32) -> ([u8; MESSAGE_LEN], usize) {
        let mut bytes = [0; MESSAGE_LEN];
        let len = MESSAGE_LEN.min(len as usize);
        let _inside_by_construction =
            self.messages.memory().read(self.receive(slot).local.offset, &mut bytes);
        (bytes, len)
    }
}
