//! Registered memory, to send from and to receive into without a copy.

use std::ffi::c_void;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use any_backend::{either, one_of};
use libc::iovec;
use rdma_conn::{
    CallerMemory, ConnectionId, Error, Loan, Receiving, RegisteredBuffer, Registrar, SharedMemory,
};

use crate::bytes::with_pieces;
use crate::device::release;
use crate::endpoint::{Endpoint, Kind, Part, State, ask, connection, on_connection, place};
use crate::error::{Code, Failed, Failure, call};

/// Registered memory of one connection, and of all in its protection domain. Created by
/// `vkrdma_register` or `vkrdma_register_memory`.
pub struct Buffer(Registered);

type Shared<B> = Arc<RegisteredBuffer<B>>;

one_of!(pub(crate) enum Registered(Shared));
one_of!(enum Registers(Registrar));

/// What a buffer may be used for.
#[repr(u32)]
#[allow(non_camel_case_types, reason = "the header's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To send from.
    VKRDMA_LEND = 0,
    /// To send from, and to receive into. From the first `vkrdma_receive` until it is deregistered,
    /// the peer can write to all of it.
    VKRDMA_LEND_AND_RECEIVE = 1,
}

/// How received bytes came into a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Received {
    /// Bytes that the peer wrote to their destination directly.
    pub landed: u64,
    /// Bytes copied from an ordinary window.
    pub copied: u64,
}

/// Called once, with the `context` of `vkrdma_register_memory`, when the library no longer uses the
/// memory, by any call of this library in any thread: at the latest by the one that frees the last
/// of the buffer, the connections that use it and their endpoints. Never called if the device
/// refuses to deregister the memory. It must not call this library, nor leave by longjmp or an
/// exception.
pub type Release = Option<unsafe extern "C" fn(context: *mut c_void)>;

pub(crate) struct Memory {
    base: NonNull<AtomicU8>,
    len: usize,
    release: Release,
    context: *mut c_void,
    /// If not, the program still owns it.
    registered: Arc<AtomicBool>,
    /// Dropped behind the release.
    _loan: Option<Loan>,
}

impl Memory {
    pub(crate) fn new(
        base: *mut c_void,
        len: usize,
        release: Release,
        context: *mut c_void,
    ) -> Result<Self, Failure> {
        let base = NonNull::new(base.cast()).ok_or(Failure::argument("the memory is null"))?;
        if len == 0 || isize::try_from(len).is_err() {
            return Err(Failure::argument("the memory has no bytes, or more than there are"));
        }
        Ok(Self { base, len, release, context, registered: Arc::default(), _loan: None })
    }

    pub(crate) fn lent(mut self, loan: Loan) -> Self {
        self._loan = Some(loan);
        self
    }
}

// SAFETY: the bytes are accessed through atomics only. The context is only passed to the release,
// which may be called in any thread.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl CallerMemory for Memory {
    fn shared(&self) -> SharedMemory<'_> {
        // SAFETY: by the contract of `vkrdma_register_memory` the bytes exist until the release is
        // called, when this is dropped. C's memory counts as initialised, and atomics may change.
        SharedMemory::new(unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(release) = self.release.filter(|_| self.registered.load(Ordering::Relaxed)) {
            // SAFETY: the program's function, called once; by contract it raises no exception.
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

/// Returns what registers memory of a connection, for use without the endpoint's lock.
fn registers(endpoint: Option<&Endpoint>, number: u64) -> Result<Registers, Failure> {
    ask(endpoint, |state| {
        let id = connection(number)?;
        Ok(either!(&state.kind, Kind(side) -> Registers => {
            side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?.registrar()
        }))
    })
}

fn keep(buffer: Registered) -> *mut Buffer {
    Box::into_raw(Box::new(Buffer(buffer)))
}

/// Allocates `len` zero bytes and registers them for a connection; `access` is one of
/// vkrdma_access. Registration takes much longer than copying a few kilobytes: keep the buffer and
/// use it again. Other calls on the endpoint do not wait for it.
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
    call(error, || {
        let (buffer, access) = (place(buffer)?, rights(access)?);
        let lands = access.allows(rdma_conn::Access::REMOTE_WRITE);
        buffer.write(keep(either!(registers(endpoint, connection)?, Registers(registrar) -> Registered => {
            let made = if lands { registrar.register_landing(len) } else { registrar.register_buffer(len) };
            Arc::new(made?)
        })));
        Ok(())
    })
}

/// Registers `len` bytes of the program for a connection, like `vkrdma_register`. They must stay
/// readable and writable until the library calls `release`, which may be NULL, with `context`. If
/// the call fails, it is not called, and the program owns the memory as before.
///
/// Memory that is registered to send from may overlap other such memory: several connections may
/// send from the same bytes. Memory that is received into must overlap no registered memory.
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
    call(error, || {
        let (buffer, access) = (place(buffer)?, rights(access)?);
        let memory = Memory::new(base, len, release, context)?;
        buffer.write(keep(register(endpoint, connection, memory, access)?));
        Ok(())
    })
}

pub(crate) fn register(
    endpoint: Option<&Endpoint>,
    connection: u64,
    memory: Memory,
    access: rdma_conn::Access,
) -> Result<Registered, Failure> {
    let registered = Arc::clone(&memory.registered);
    Ok(either!(registers(endpoint, connection)?, Registers(registrar) -> Registered => {
        let made = registrar.register_memory(memory, access)?;
        registered.store(true, Ordering::Relaxed);
        Arc::new(made)
    }))
}

/// Returns the address of a buffer; NULL for NULL. It is valid until the buffer is freed and no
/// connection uses it.
///
/// Lent memory may be read; the peer may or may not see a write to it. Memory that is received into
/// can change at any time, see vkrdma_access: copy it, then decide on the copy.
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

/// Frees a buffer: deregisters and releases it once no connection uses it. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_buffer_free(buffer: Option<Box<Buffer>>) {
    release(buffer);
}

impl Buffer {
    fn memory(&self) -> SharedMemory<'_> {
        either!(&self.0, Registered(buffer) => buffer.memory())
    }
}

fn range(offset: usize, len: usize) -> Result<Range<usize>, Failure> {
    let end = offset.checked_add(len).ok_or(Failure::argument("the range wraps around"))?;
    Ok(offset..end)
}

const NO_BUFFER: Failure = Failure::argument("the buffer is null");

macro_rules! with_buffer {
    ($state:expr, $buffer:expr, $side:ident, $registered:ident => $does:expr) => {{
        let buffer: &Buffer = $buffer.ok_or(NO_BUFFER)?;
        either!(
            (&mut $state.kind, &buffer.0),
            (Kind($side), Registered($registered)) => $does,
            _ => Err(Error::ForeignBuffer.into())
        )
    }};
}

/// Sends up to `len` bytes from `offset` of a buffer without a copy, after all bytes written
/// before, and returns their number. VKRDMA_AGAIN: nothing can be lent now. After that, or if not
/// all bytes were taken, VKRDMA_EVENT_WRITABLE follows. VKRDMA_EVENT_RETURNED reports returned
/// memory. The same bytes may be lent several times.
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

/// Sends the `before_count` pieces of `before`, then `len` bytes from `offset` of a buffer without
/// a copy, then the `after_count` pieces of `after`. It does what vkrdma_writev, vkrdma_lend and
/// vkrdma_writev do, but by one doorbell, and with one notification if the peer's window has room
/// for all. `taken` is the number of bytes taken, from the start of `before`. VKRDMA_AGAIN: no byte
/// can be taken now. After that, or if not all bytes were taken, VKRDMA_EVENT_WRITABLE follows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_lend_framed(
    endpoint: Option<&Endpoint>,
    connection: u64,
    before: *const iovec,
    before_count: usize,
    buffer: Option<&Buffer>,
    offset: usize,
    len: usize,
    after: *const iovec,
    after_count: usize,
    taken: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let (taken, range) = (place(taken)?, range(offset, len)?);
        let Buffer(registered) = buffer.ok_or(NO_BUFFER)?;
        // SAFETY: the caller has the structures there, each with its bytes, and none of them
        // changes during the call.
        taken.write(unsafe {
            with_pieces(before, before_count, |before| {
                with_pieces(after, after_count, |after| {
                    lend_framed(state, id, before, registered, range, after)
                })
            })
        }?);
        Ok(())
    })
}

/// Returns how many bytes were taken.
pub(crate) fn lend_framed(
    state: &mut State,
    id: ConnectionId,
    before: &[IoSlice<'_>],
    registered: &Registered,
    range: Range<usize>,
    after: &[IoSlice<'_>],
) -> Result<usize, Failure> {
    either!(
        (&mut state.kind, registered),
        (Kind(side), Registered(registered)) => {
            side.endpoint.lend_framed(id, before, registered, range, after)?.ok_or(Failure::Again)
        },
        _ => Err(Error::ForeignBuffer.into())
    )
}

/// Returns VKRDMA_OK if the peer has all lent bytes of a buffer. VKRDMA_AGAIN: some of them are in
/// flight; VKRDMA_EVENT_RETURNED or VKRDMA_EVENT_ENDED follows.
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

/// Receives the next `len` unread bytes of the stream at `offset` of a buffer. The peer writes
/// whole windows there; the rest is copied, and all bytes for a buffer of VKRDMA_LEND.
/// VKRDMA_AGAIN: not all bytes have arrived; call again, with the same arguments, after
/// VKRDMA_EVENT_READABLE.
///
/// Do not read by other calls between the first call and the one that returns VKRDMA_OK.
/// `vkrdma_stop_landing` gives up; other calls then read the bytes that have not arrived.
/// VKRDMA_MISUSE: the range is outside the buffer, or bytes of an earlier part still land there.
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

/// Gives up what `vkrdma_receive` has begun, and announces no further window in registered memory.
/// An announced one stays until it is full, and its bytes are read like any others.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_stop_landing(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, Kind(side) => {
            side.receiving.remove(&id);
            side.endpoint.stop_landing(id)?;
        });
        Ok(())
    })
}
