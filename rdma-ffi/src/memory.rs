//! Registered memory: lent to send from, and received into, without a copy.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use rdma_conn::{CallerMemory, Error, Receiving, RegisteredBuffer, SharedMemory};
use rdma_softsim::SoftSim;
use rdma_verbs::Verbs;

use crate::device::release;
use crate::endpoint::{Endpoint, Kind, Part, either, on_connection, place};
use crate::error::{Code, Failed, Failure};

/// Registered memory of one connection, or of those that share its protection domain. Made by `vkrdma_register` or
/// `vkrdma_register_memory`.
pub struct Buffer(Registered);

enum Registered {
    Verbs(Arc<RegisteredBuffer<Verbs>>),
    SoftSim(Arc<RegisteredBuffer<SoftSim>>),
}

/// What a buffer is for.
#[repr(u32)]
#[allow(non_camel_case_types, reason = "the header's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To send from.
    VKRDMA_LEND = 0,
    /// To send from, and to receive into: the peer can write to all of it, by its key, from the first `vkrdma_receive` on until it
    /// is deregistered.
    VKRDMA_LEND_AND_RECEIVE = 1,
}

/// How the bytes came that were received into a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Received {
    /// Bytes that the peer wrote where they belong.
    pub landed: u64,
    /// Bytes that were copied from an ordinary window.
    pub copied: u64,
}

/// Called with what was given to `vkrdma_register_memory` when the library uses the memory no more. It is called once, in any thread, out
/// of any call of this library, at the latest that which frees the last of the buffer, the connections that use it and their endpoints;
/// never if the device refuses to deregister the memory. It may not call this library, nor leave by longjmp or an exception.
pub type Release = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Memory of the program, until it is dropped.
struct Memory {
    base: NonNull<AtomicU8>,
    len: usize,
    release: Release,
    context: *mut c_void,
    /// Whether it was registered: otherwise it is the program's still.
    registered: Arc<AtomicBool>,
}

// SAFETY: the bytes are reached through atomics only; the release may be called in any thread, as the header says, and its context is only
// handed to it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl CallerMemory for Memory {
    fn shared(&self) -> SharedMemory<'_> {
        // SAFETY: by the contract of `vkrdma_register_memory` as many bytes are there until the release is called, which dropping does.
        // They are initialised as far as C is concerned, and other threads and devices may change what atomics refer to.
        SharedMemory::new(unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(release) = self.release.filter(|_| self.registered.load(Ordering::Relaxed)) {
            // SAFETY: a function of the program's for just this, called once. A foreign exception is against its contract.
            unsafe { release(self.context) };
        }
    }
}

fn rights(access: u32) -> Result<rdma_conn::Access, Failure> {
    match access {
        0 => Ok(rdma_conn::Access::NONE),
        1 => Ok(rdma_conn::Access::REMOTE_WRITE),
        _ => Err(Failure::argument("the access is neither VKRDMA_LEND nor VKRDMA_LEND_AND_RECEIVE")),
    }
}

fn keep(buffer: Registered) -> *mut Buffer {
    Box::into_raw(Box::new(Buffer(buffer)))
}

/// Registers `len` bytes for a connection, which the library allocates, all zero; `access` is one of vkrdma_access. It takes much longer
/// than to copy a few kilobytes, while other calls on the endpoint wait: so keep the buffer and use it again.
///
/// VKRDMA_MEMORY, VKRDMA_REGISTERED_MEMORY: no memory can be registered.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_register(
    endpoint: Option<&Endpoint>,
    connection: u64,
    len: usize,
    access: u32,
    buffer: Option<&mut MaybeUninit<*mut Buffer>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (buffer, access) = (place(buffer)?, rights(access)?);
        let lands = access.allows(rdma_conn::Access::REMOTE_WRITE);
        macro_rules! register {
            ($side:expr) => {{
                let connection = $side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
                let made =
                    if lands { connection.register_landing(len) } else { connection.register_buffer(len) };
                Arc::new(made?)
            }};
        }
        buffer.write(keep(match &state.kind {
            Kind::Verbs(side) => Registered::Verbs(register!(side)),
            Kind::SoftSim(side) => Registered::SoftSim(register!(side)),
        }));
        Ok(())
    })
}

/// Registers `len` bytes of the program for a connection, as `vkrdma_register` does. They stay where they are, readable and writable, until
/// `release`, unless it is NULL, is called with `context`. If the call fails, it is not called: the memory is the program's as before.
///
/// Do not register memory twice at a time, nor memory that overlaps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_register_memory(
    endpoint: Option<&Endpoint>,
    connection: u64,
    base: *mut c_void,
    len: usize,
    access: u32,
    release: Release,
    context: *mut c_void,
    buffer: Option<&mut MaybeUninit<*mut Buffer>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (buffer, access) = (place(buffer)?, rights(access)?);
        let base = NonNull::new(base.cast()).ok_or(Failure::argument("the memory is null"))?;
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Failure::argument("the memory has no bytes, or more than there are"));
        }
        let registered = Arc::new(AtomicBool::new(false));
        let memory = Memory { base, len, release, context, registered: Arc::clone(&registered) };
        macro_rules! register {
            ($side:expr) => {{
                let connection = $side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
                let made = connection.register_memory(memory, access)?;
                registered.store(true, Ordering::Relaxed);
                Arc::new(made)
            }};
        }
        buffer.write(keep(match &state.kind {
            Kind::Verbs(side) => Registered::Verbs(register!(side)),
            Kind::SoftSim(side) => Registered::SoftSim(register!(side)),
        }));
        Ok(())
    })
}

/// Returns the first byte of a buffer; NULL for NULL. It is there until the buffer is freed, also for as long as a connection uses it.
///
/// What is lent may be read, and what is written to it meanwhile may reach the peer or not. What is received into can change at any time,
/// see vkrdma_access: copy what you decide on, and decide on the copy.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_buffer_base(buffer: Option<&Buffer>) -> *mut c_void {
    let address = buffer.map_or(0, |buffer| buffer.memory().address());
    ptr::with_exposed_provenance_mut(address)
}

/// Returns the length of a buffer in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_buffer_len(buffer: Option<&Buffer>) -> usize {
    buffer.map_or(0, |buffer| buffer.memory().len())
}

/// Frees a buffer. Its memory is deregistered, and given back, when no connection uses it any more: then, or later. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_buffer_free(buffer: Option<Box<Buffer>>) {
    release(buffer);
}

impl Buffer {
    fn memory(&self) -> SharedMemory<'_> {
        match &self.0 {
            Registered::Verbs(buffer) => buffer.memory(),
            Registered::SoftSim(buffer) => buffer.memory(),
        }
    }
}

fn range(offset: usize, len: usize) -> Result<std::ops::Range<usize>, Failure> {
    let end = offset.checked_add(len).ok_or(Failure::argument("the range wraps around"))?;
    Ok(offset..end)
}

/// Runs the same for the endpoint and the buffer of one backend.
macro_rules! with_buffer {
    ($state:expr, $buffer:expr, $side:ident, $registered:ident => $does:expr) => {{
        let buffer: Option<&Buffer> = $buffer;
        let buffer = buffer.ok_or(Failure::argument("the buffer is null"))?;
        match (&mut $state.kind, &buffer.0) {
            (Kind::Verbs($side), Registered::Verbs($registered)) => $does,
            (Kind::SoftSim($side), Registered::SoftSim($registered)) => $does,
            _ => Err(Error::ForeignBuffer.into()),
        }
    }};
}

/// Sends up to `len` bytes from `offset` of a buffer, from where they are, and tells how many. They come behind all that was written
/// before. If that is not all, or VKRDMA_AGAIN because nothing can be lent now, VKRDMA_EVENT_WRITABLE follows; VKRDMA_EVENT_RETURNED when
/// memory has come back. The same bytes may be lent several times.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_lend(
    endpoint: Option<&Endpoint>,
    connection: u64,
    buffer: Option<&Buffer>,
    offset: usize,
    len: usize,
    lent: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (lent, range) = (place(lent)?, range(offset, len)?);
        with_buffer!(state, buffer, side, registered => {
            lent.write(side.endpoint.lend(id, registered, range)?.ok_or(Failure::Again)?);
            Ok(())
        })
    })
}

/// Tells whether the peer has all that was lent of a buffer. VKRDMA_AGAIN: some of it is on its way, and VKRDMA_EVENT_RETURNED or
/// VKRDMA_EVENT_ENDED follows.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_returned(
    endpoint: Option<&Endpoint>,
    connection: u64,
    buffer: Option<&Buffer>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        with_buffer!(state, buffer, side, registered => {
            side.endpoint.returned(id, registered)?.ok_or(Failure::Again)
        })
    })
}

/// Receives the next `len` unread bytes of the stream at `offset` of a buffer. VKRDMA_AGAIN: not all of them have arrived; call it again,
/// with the same arguments, after VKRDMA_EVENT_READABLE. Whole windows are written there by the peer, the rest is copied.
///
/// Between the first call and the one that returns VKRDMA_OK read nothing otherwise; `vkrdma_stop_landing` gives it up, and leaves the
/// bytes that have not arrived to what reads next. A buffer of VKRDMA_LEND takes copies only. VKRDMA_MISUSE: the range is not in the
/// buffer, or is where bytes of an earlier part still land.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_receive(
    endpoint: Option<&Endpoint>,
    connection: u64,
    buffer: Option<&Buffer>,
    offset: usize,
    len: usize,
    received: Option<&mut MaybeUninit<Received>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (received, range) = (place(received)?, range(offset, len)?);
        with_buffer!(state, buffer, side, registered => {
            let what = (Arc::as_ptr(registered).addr(), offset, len);
            let part = side.receiving.entry(id).or_insert_with(|| {
                Part { what, receiving: Receiving::new(Arc::clone(registered), range) }
            });
            if part.what != what {
                let text = "another part of the stream is being received: call it with the same arguments again";
                return Err(Failure::Here(Code::VKRDMA_MISUSE, text.into()));
            }
            let now = match side.endpoint.receive(id, &mut part.receiving) {
                Ok(None) => return Err(Failure::Again),
                now => now,
            };
            side.receiving.remove(&id);
            if let Some(now) = now? {
                received.write(Received { landed: now.landed, copied: now.copied });
            }
            Ok(())
        })
    })
}

/// Gives up what `vkrdma_receive` has begun, and has no further window lie in registered memory. One that was announced there stays until
/// it is full, and its bytes are read as any others.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_stop_landing(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, side => {
            side.receiving.remove(&id);
            side.endpoint.stop_landing(id)?;
        });
        Ok(())
    })
}
