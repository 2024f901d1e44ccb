//! The registered memory of one connection.
//!
//! The README says when each region is registered and released.

use std::sync::Arc;

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{Access, Backend, Pages, RecvRequest, Region, SendOp, SendRequest, Slice};
use rdma_proto::wire::MESSAGE_LEN;
use rdma_proto::{Action, Readable, RegionAddress, Source};

use crate::arrived::Arrived;
use crate::budget::{Budget, CountedRegion, register, register_memory};
use crate::domain::ProtectionDomain;
use crate::error::Error;
use crate::lend::{Buffers, Landing, Lendings, RegisteredBuffer};
use crate::options::Options;

/// Marks the work request ids of receives. The machine's ids of sends leave this bit free.
const RECEIVE: u64 = 1 << 63;

pub(crate) fn receive_slot(id: u64) -> Option<u16> {
    u16::try_from(id ^ RECEIVE).ok()
}

/// The regions of one connection, each with the fewest rights (VR-SEC-001). The peer can write only
/// to memory registered to receive into, and can read nothing (VR-SEC-009). Memory is deregistered,
/// which revokes its key, before anything else can use it (VR-SEC-010).
pub(crate) struct Memory<B: Backend> {
    windows: [Option<CountedRegion<B::Region>>; 2],
    send: Option<CountedRegion<B::Region>>,
    /// Slots of [`MESSAGE_LEN`] bytes (VR-CTRL-007): one per send request, then one per receive.
    messages: CountedRegion<B::Region>,
    pub(crate) lendings: Lendings<B>,
    pub(crate) landing: Option<Landing<B>>,
    send_slots: usize,
    window: usize,
    send_buffer: usize,
    registrar: Registrar<B>,
}

/// Registers memory. Callers clone it to hold no lock: this is slow, and runs code of the program.
#[derive(Clone)]
pub(crate) struct Registrar<B: Backend> {
    domain: ProtectionDomain<B>,
    budget: Arc<Budget>,
    relaxed: bool,
    huge: bool,
    buffers: Buffers,
}

impl<B: Backend> Registrar<B> {
    fn register(&self, len: usize, access: Access) -> Result<CountedRegion<B::Region>, Error> {
        register(&self.domain, &self.budget, (len, self.huge), self.ordered(access))
    }

    const fn ordered(&self, access: Access) -> Access {
        if self.relaxed && access.allows(Access::REMOTE_WRITE) {
            access.and(Access::RELAXED_ORDERING)
        } else {
            access
        }
    }

    pub(crate) fn buffer(&self, len: usize, access: Access) -> Result<RegisteredBuffer<B>, Error> {
        let memory = self.register(len, access)?;
        Ok(RegisteredBuffer::new(memory, access, self.domain.clone(), &self.buffers))
    }

    pub(crate) fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        let memory = register_memory(&self.domain, &self.budget, memory, self.ordered(access))?;
        Ok(RegisteredBuffer::new(memory, access, self.domain.clone(), &self.buffers))
    }
}

impl<B: Backend> Memory<B> {
    pub(crate) fn idle(options: &Options) -> u64 {
        let slots = u64::from(options.protocol.send_depth) + u64::from(options.receives);
        let send = if options.eager_send_buffer { options.protocol.send_buffer } else { 0 };
        u64::from(options.protocol.window) + u64::from(send) + slots * MESSAGE_LEN as u64
    }

    pub(crate) fn register(
        domain: ProtectionDomain<B>,
        options: &Options,
        budget: Arc<Budget>,
    ) -> Result<Self, Error> {
        let config = &options.protocol;
        let send_slots = usize::from(config.send_depth);
        let slots = send_slots + usize::from(options.receives);
        let window = config.window as usize;
        let (relaxed, huge) = (options.relaxed_ordering, options.huge_pages);
        let registrar = Registrar { domain, budget, relaxed, huge, buffers: Buffers::default() };
        Ok(Self {
            windows: [Some(registrar.register(window, Access::REMOTE_WRITE)?), None],
            send: None,
            messages: registrar.register(slots * MESSAGE_LEN, Access::LOCAL_WRITE)?,
            lendings: Lendings::new(),
            landing: None,
            send_slots,
            window,
            send_buffer: config.send_buffer as usize,
            registrar,
        })
    }

    /// Registers the window with this index, which must not exist yet.
    pub(crate) fn add_window(&mut self, index: u8) -> Result<RegionAddress, Error> {
        let window = self.registrar.register(self.window, Access::REMOTE_WRITE)?;
        let address = address(&window.region);
        if let Some(place) = self.windows.get_mut(usize::from(index)) {
            *place = Some(window);
        }
        Ok(address)
    }

    pub(crate) fn drop_window(&mut self, index: u8) {
        if let Some(place) = self.windows.get_mut(usize::from(index)) {
            *place = None;
        }
    }

    pub(crate) fn first_window(&self) -> RegionAddress {
        let [first, _] = &self.windows;
        first.as_ref().map(|window| address(&window.region)).unwrap_or_default()
    }

    pub(crate) fn pages(&self) -> Pages {
        let [first, _] = &self.windows;
        first.as_ref().map_or(Pages::Usual, |window| window.region.pages())
    }

    #[inline]
    pub(crate) fn send_buffer(&self) -> Option<&B::Region> {
        self.send.as_ref().map(|send| &send.region)
    }

    #[cold]
    pub(crate) fn add_send_buffer(&mut self) -> Result<(), Error> {
        self.send = Some(self.registrar.register(self.send_buffer, Access::NONE)?);
        Ok(())
    }

    /// No byte in it may be in flight.
    pub(crate) fn drop_send_buffer(&mut self) {
        self.send = None;
    }

    pub(crate) fn has_both_windows(&self) -> bool {
        self.windows.iter().all(Option::is_some)
    }

    pub(crate) fn registered_bytes(&self) -> usize {
        let all = self.windows.iter().flatten().chain(&self.send).chain([&self.messages]);
        all.map(|booked| booked.region.len()).sum::<usize>() + self.registrar.buffers.bytes()
    }

    /// Returns false, and copies nothing, if `from` lies in no region.
    #[inline]
    pub(crate) fn read_window(&self, from: Readable, into: &mut [u8]) -> bool {
        match self.windows.get(usize::from(from.region)) {
            Some(Some(window)) => window.region.read(from.offset as usize, into),
            Some(None) => false,
            None => self.landing.as_ref().is_some_and(|landing| landing.read(from.offset, into)),
        }
    }

    /// Copies the first `len` received bytes to `at` in `into`. Returns false if one is too short.
    pub(crate) fn copy(&self, from: Readable, len: usize, into: &RegisteredBuffer<B>, at: usize) -> bool {
        let Some((memory, offset)) = self.place(from).filter(|_| len <= from.len as usize) else {
            return false;
        };
        let to = into.memory();
        let [source, target] = [memory.address().wrapping_add(offset), to.address().wrapping_add(at)];
        if source.abs_diff(target) >= len {
            return memory.copy_to(offset, to, at, len);
        }
        // They overlap: a reader gave up on landed bytes, and another receives them elsewhere.
        let mut bytes = vec![0; len];
        memory.read(offset, &mut bytes) && to.write(at, &bytes)
    }

    #[inline]
    pub(crate) fn arrived(&self, at: Readable) -> Option<Arrived<'_>> {
        let (memory, offset) = self.place(at)?;
        Some(Arrived::new(memory, offset, at.len as usize))
    }

    #[inline]
    fn place(&self, at: Readable) -> Option<(SharedMemory<'_>, usize)> {
        match self.windows.get(usize::from(at.region)) {
            Some(window) => Some((window.as_ref()?.region.memory(), at.offset as usize)),
            None => Some(self.landing.as_ref()?.arrived(at.offset)),
        }
    }

    #[inline]
    fn outgoing(&self, source: Source) -> Slice<'_, B::Region> {
        let place = match source {
            Source::Buffer(span) => self.send.as_ref().map(|send| Slice {
                region: &send.region,
                offset: span.offset as usize,
                len: span.len as usize,
            }),
            Source::Lent(span) => self.lendings.latest(span),
        };
        place.unwrap_or_else(|| self.nothing())
    }

    /// Returns an empty slice: without a send buffer, the only WRITE is the empty one.
    #[cold]
    fn nothing(&self) -> Slice<'_, B::Region> {
        Slice { region: &self.messages.region, offset: 0, len: 0 }
    }

    #[inline]
    pub(crate) fn request(&self, max_inline: usize, action: Action) -> Option<SendRequest<'_, B::Region>> {
        let (id, signaled, op, local) = match action {
            Action::Send { id, signaled, slot, ref message } => {
                (id, signaled, SendOp::Send, self.outgoing_message(slot, message))
            }
            Action::Write { id, signaled, from, to, immediate } => {
                let op = match immediate {
                    Some(immediate) => SendOp::WriteImmediate(to, immediate),
                    None => SendOp::Write(to),
                };
                (id, signaled, op, self.outgoing(from))
            }
            Action::Disconnect => return None,
        };
        Some(SendRequest { id, op, local, signaled, inline: local.len <= max_inline })
    }

    /// Releases the application's memory once no window lies in it.
    #[inline]
    pub(crate) fn keep_landing(&mut self, lies: impl FnOnce() -> bool) {
        if self.landing.is_some() && !lies() {
            self.landing = None;
        }
    }

    pub(crate) const fn domain(&self) -> &ProtectionDomain<B> {
        &self.registrar.domain
    }

    pub(crate) const fn registrar(&self) -> &Registrar<B> {
        &self.registrar
    }

    fn outgoing_message(&self, slot: u16, message: &[u8; MESSAGE_LEN]) -> Slice<'_, B::Region> {
        let offset = usize::from(slot) * MESSAGE_LEN;
        let _inside_by_construction = self.messages.region.write(offset, message);
        Slice { region: &self.messages.region, offset, len: MESSAGE_LEN }
    }

    #[inline]
    pub(crate) fn receive(&self, slot: u16) -> RecvRequest<'_, B::Region> {
        let offset = (self.send_slots + usize::from(slot)) * MESSAGE_LEN;
        RecvRequest {
            id: RECEIVE | u64::from(slot),
            local: Slice { region: &self.messages.region, offset, len: MESSAGE_LEN },
        }
    }

    pub(crate) fn incoming_message(&self, slot: u16, len: u32) -> ([u8; MESSAGE_LEN], usize) {
        let mut bytes = [0; MESSAGE_LEN];
        let len = MESSAGE_LEN.min(len as usize);
        let _inside_by_construction = self.messages.region.read(self.receive(slot).local.offset, &mut bytes);
        (bytes, len)
    }
}

fn address<R: Region>(region: &R) -> RegionAddress {
    RegionAddress { address: region.address(), rkey: region.rkey() }
}
