//! The registered memory of one connection.
//!
//! The README says when each region is registered and released.

use std::fmt;
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

/// The length of the small send buffer, which stays registered. A refusal fits, and so do the
/// replies of a connection that sends little.
const SMALL: u32 = 4096;

/// The window of a peer that is only told why it is refused. It may send a request before it reads
/// that.
const BRIEF: u32 = 4096;

pub(crate) fn receive_slot(id: u64) -> Option<u16> {
    // This sets the mark in the id of a send, which is then no slot.
    u16::try_from(id ^ RECEIVE).ok()
}

/// The regions of one connection, each with the fewest rights (VR-SEC-001). The peer can write only
/// to memory registered to receive into, and can read nothing (VR-SEC-009). Memory is deregistered,
/// which revokes its key, before anything else can use it (VR-SEC-010).
pub(crate) struct Memory<B: Backend> {
    windows: [Option<CountedRegion<B::Region>>; 2],
    /// The send buffer in use: the small one, or the full one of
    /// [`Config::send_buffer`](rdma_proto::Config::send_buffer) bytes.
    send: CountedRegion<B::Region>,
    /// The small send buffer while the full one is in use.
    small: Option<CountedRegion<B::Region>>,
    /// Slots of [`MESSAGE_LEN`] bytes (VR-CTRL-007): one per send request, then one per receive.
    messages: CountedRegion<B::Region>,
    pub(crate) lendings: Lendings<B>,
    pub(crate) landing: Option<Landing<B>>,
    send_slots: usize,
    /// The length of a window, and of the region that it may grow in.
    window: u32,
    region: u32,
    send_buffer: u32,
    /// Whether there is a longer send buffer than the one in use.
    grows: bool,
    registrar: Registrar<B>,
}

/// Registers memory of a connection, without a borrow of its endpoint.
///
/// Registering takes long, and runs code of the program when it fails. So a program whose threads
/// share an endpoint behind a lock gets this by [`Connection::registrar`](crate::Connection),
/// releases the lock, and registers. The connection may end meanwhile.
pub struct Registrar<B: Backend> {
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

    fn buffer(&self, len: usize, access: Access) -> Result<RegisteredBuffer<B>, Error> {
        let memory = self.register(len, access)?;
        Ok(RegisteredBuffer::new(memory, access, self.domain.clone(), &self.buffers))
    }

    /// Registers memory for zero-copy sending. See
    /// [`Connection::register_buffer`](crate::Connection::register_buffer).
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_buffer(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.buffer(len, Access::NONE)
    }

    /// Registers memory for zero-copy receiving. See
    /// [`Connection::register_landing`](crate::Connection::register_landing).
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_landing(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.buffer(len, Access::REMOTE_WRITE)
    }

    /// Registers memory that the application already has. See
    /// [`Connection::register_memory`](crate::Connection::register_memory).
    ///
    /// # Errors
    /// Returns an error, and drops `memory`, if it is empty or cannot be registered.
    pub fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        let memory = register_memory(&self.domain, &self.budget, memory, self.ordered(access))?;
        Ok(RegisteredBuffer::new(memory, access, self.domain.clone(), &self.buffers))
    }
}

impl<B: Backend> Clone for Registrar<B> {
    fn clone(&self) -> Self {
        Self {
            domain: self.domain.clone(),
            budget: Arc::clone(&self.budget),
            relaxed: self.relaxed,
            huge: self.huge,
            buffers: self.buffers.clone(),
        }
    }
}

impl<B: Backend> fmt::Debug for Registrar<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrar").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl<B: Backend> Memory<B> {
    /// What a connection registers before it has exchanged a byte.
    pub(crate) fn idle(options: &Options) -> u64 {
        let small = Self::small(options);
        let full = options.protocol.send_buffer;
        let send = if options.eager_send_buffer && full > small { full } else { 0 };
        let buffers = [options.protocol.region(), small, send].map(u64::from);
        buffers.iter().sum::<u64>() + Self::messages(options) as u64
    }

    /// Returns the length of the small send buffer.
    pub(crate) fn small(options: &Options) -> u32 {
        options.protocol.send_buffer.min(SMALL)
    }

    fn messages(options: &Options) -> usize {
        (usize::from(options.protocol.send_depth) + usize::from(options.receives)) * MESSAGE_LEN
    }

    /// Registers what a connection cannot be made without. The first window follows.
    pub(crate) fn register(
        domain: ProtectionDomain<B>,
        options: &Options,
        budget: Arc<Budget>,
    ) -> Result<Self, Error> {
        let config = &options.protocol;
        let (relaxed, huge) = (options.relaxed_ordering, options.huge_pages);
        let registrar = Registrar { domain, budget, relaxed, huge, buffers: Buffers::default() };
        Ok(Self {
            windows: [None, None],
            // The peer reaches neither region: our device reads this one, and also writes to that
            // of the messages (VR-SEC-001).
            send: registrar.register(Self::small(options) as usize, Access::NONE)?,
            small: None,
            messages: registrar.register(Self::messages(options), Access::LOCAL_WRITE)?,
            lendings: Lendings::new(),
            landing: None,
            send_slots: config.send_depth.into(),
            window: config.window,
            region: config.region(),
            send_buffer: config.send_buffer,
            grows: config.send_buffer > SMALL,
            registrar,
        })
    }

    /// Makes the window of a connection that is only told why it is refused at most a page long,
    /// and its region as long (VR-SEC-007).
    pub(crate) fn be_brief(&mut self) {
        self.window = self.window.min(BRIEF);
        // Its window does not grow.
        self.region = self.window;
    }

    /// Returns the length of its first window, and of the region that it is in.
    pub(crate) const fn window(&self) -> (u32, u32) {
        (self.window, self.region)
    }

    /// Registers the window with this index, which must not exist yet.
    pub(crate) fn add_window(&mut self, index: u8) -> Result<RegionAddress, Error> {
        let window = self.registrar.register(self.region as usize, Access::REMOTE_WRITE)?;
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

    pub(crate) fn pages(&self) -> Pages {
        let mut windows = self.windows.iter().flatten();
        windows.next().map_or(Pages::Usual, |window| window.region.pages())
    }

    #[inline]
    pub(crate) const fn send_buffer(&self) -> &B::Region {
        &self.send.region
    }

    /// Returns whether the send buffer is the full one, which an idle connection gives back.
    pub(crate) const fn has_full_send_buffer(&self) -> bool {
        self.small.is_some()
    }

    /// Returns whether there is a longer send buffer than the one in use.
    #[inline]
    pub(crate) const fn can_grow(&self) -> bool {
        self.grows
    }

    /// Registers the full send buffer, and returns its length.
    #[cold]
    pub(crate) fn add_send_buffer(&mut self) -> Result<u32, Error> {
        if self.grows {
            let full = self.registrar.register(self.send_buffer as usize, Access::NONE)?;
            self.small = Some(std::mem::replace(&mut self.send, full));
            self.grows = false;
        }
        Ok(self.send_buffer)
    }

    /// Continues with the small send buffer, and returns its length. No byte in the full one may be
    /// in flight.
    pub(crate) fn drop_send_buffer(&mut self) -> u32 {
        if let Some(small) = self.small.take() {
            self.send = small;
            self.grows = true;
        }
        self.send_buffer.min(SMALL)
    }

    pub(crate) fn has_window(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    pub(crate) fn has_both_windows(&self) -> bool {
        self.windows.iter().all(Option::is_some)
    }

    pub(crate) fn registered_bytes(&self) -> usize {
        let all = self.windows.iter().flatten().chain(&self.small).chain([&self.send, &self.messages]);
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
            // Behind the windows, [`Readable::LANDED`] is the application's memory.
            Some(window) => Some((window.as_ref()?.region.memory(), at.offset as usize)),
            None => Some(self.landing.as_ref()?.arrived(at.offset)),
        }
    }

    #[inline]
    fn outgoing(&self, source: Source) -> Slice<'_, B::Region> {
        let place = match source {
            Source::Buffer(span) => Some(Slice {
                region: &self.send.region,
                offset: span.offset as usize,
                len: span.len as usize,
            }),
            Source::Lent(span) => self.lendings.latest(span),
        };
        // The machine posts no lent part that is not here.
        place.unwrap_or(Slice { region: &self.send.region, offset: 0, len: 0 })
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
        // Free: the slot's last message has completed, so that no device reads it (VR-XFER-011).
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
        // A copy: there are no references into registered memory (docs/decisions.md, 3). Nothing is
        // cut off: a longer message fails in the device (VR-CTRL-008).
        let mut bytes = [0; MESSAGE_LEN];
        let len = MESSAGE_LEN.min(len as usize);
        let _inside_by_construction = self.messages.region.read(self.receive(slot).local.offset, &mut bytes);
        (bytes, len)
    }
}

fn address<R: Region>(region: &R) -> RegionAddress {
    RegionAddress { address: region.address(), rkey: region.rkey() }
}
