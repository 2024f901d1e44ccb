//! Bytes of connections: read, used where they lie, written.

use std::ffi::c_void;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::{ptr, slice};

use libc::iovec;
use rdma_conn::{ConnectionId, Error};

use crate::endpoint::{Endpoint, State, either, on_connection, place};
use crate::error::{Code, Failed, Failure};

/// Bytes that have arrived, where the peer has put them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Piece {
    /// The first of them.
    pub base: *const c_void,
    /// How many.
    pub len: usize,
}

/// The most pieces that what has arrived can lie in.
pub const VKRDMA_PIECES: usize = 3;

/// Bytes that have arrived and were not read, in order.
#[repr(C)]
pub struct Pieces {
    /// How many of `pieces` there are.
    pub count: usize,
    /// Bytes in all of them.
    pub bytes: usize,
    /// Each.
    pub pieces: [Piece; VKRDMA_PIECES],
}

/// Reads what has arrived, up to `len` bytes, and tells how many. `*read` 0, where `len` is not, is the end of the stream: the peer has
/// closed. VKRDMA_AGAIN: there is nothing now, and VKRDMA_EVENT_READABLE or VKRDMA_EVENT_ENDED follows.
///
/// An error is what ended the connection, and comes after all that had arrived before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_read(
    endpoint: Option<&Endpoint>,
    connection: u64,
    into: *mut c_void,
    len: usize,
    read: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let into: &mut [u8] = if len == 0 {
            &mut []
        } else {
            check(into.cast::<u8>(), len)?;
            // SAFETY: `len` bytes of the caller's that nobody else uses during the call. They are only written to, and what lies on the
            // other side of a call from C counts as initialised.
            unsafe { slice::from_raw_parts_mut(into.cast(), len) }
        };
        let read = place(read)?;
        let now = either!(&mut state.kind, side => side.endpoint.read(id, into))?;
        read.write(now.ok_or(Failure::Again)?);
        Ok(())
    })
}

/// Tells where the bytes lie that have arrived and were not read: a read without a copy. `count` 0 is none now, or the end: `vkrdma_read`
/// tells which. Give them back with `vkrdma_consume`.
///
/// The pieces stay where they are until they are consumed or read, or the connection is aborted or abandoned, or the endpoint is
/// freed. Do not write to them. The peer can write to them at any time, though one that obeys the protocol does not: so copy what you
/// decide on, and decide on the copy.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_arrived(
    endpoint: Option<&Endpoint>,
    connection: u64,
    arrived: Option<&mut MaybeUninit<Pieces>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let arrived = place(arrived)?;
        let none = Piece { base: ptr::null(), len: 0 };
        let mut pieces = Pieces { count: 0, bytes: 0, pieces: [none; VKRDMA_PIECES] };
        either!(&state.kind, side => {
            let connection = side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
            for (piece, arrived) in pieces.pieces.iter_mut().zip(connection.arrived()) {
                let memory = arrived.memory();
                *piece = Piece {
                    base: ptr::with_exposed_provenance(memory.address()),
                    len: memory.len(),
                };
                pieces.count += 1;
                pieces.bytes += memory.len();
            }
        });
        arrived.write(pieces);
        Ok(())
    })
}

/// Gives the first `bytes` of `vkrdma_arrived` back to the peer. VKRDMA_MISUSE: so many have not arrived; none is given back then.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_consume(
    endpoint: Option<&Endpoint>,
    connection: u64,
    bytes: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&mut state.kind, side => side.endpoint.consume(id, bytes))?)
    })
}

/// Takes as many bytes of `from` as there is room for, sends them as one notification, and tells how many. If that is not all, or
/// VKRDMA_AGAIN because there is no room, VKRDMA_EVENT_WRITABLE follows. The bytes are copied: they are the caller's again when the call
/// returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_write(
    endpoint: Option<&Endpoint>,
    connection: u64,
    from: *const c_void,
    len: usize,
    written: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        let from: &[u8] = if len == 0 {
            &[]
        } else {
            check(from.cast::<u8>(), len)?;
            // SAFETY: `len` bytes of the caller's, which nobody changes during the call.
            unsafe { slice::from_raw_parts(from.cast(), len) }
        };
        put(state, id, &[IoSlice::new(from)], written)
    })
}

/// As `vkrdma_write`, of `count` pieces one behind the other: what of them there is room for is one notification, so that the peer wakes
/// up once. Pieces may be empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_writev(
    endpoint: Option<&Endpoint>,
    connection: u64,
    pieces: *const iovec,
    count: usize,
    written: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        if count > 0 {
            check(pieces, count)?;
        }
        let pieces: &[iovec] = match count {
            0 => &[],
            // SAFETY: as many structures of the caller's, which nobody changes during the call.
            _ => unsafe { slice::from_raw_parts(pieces, count) },
        };
        let mut empty = false;
        for piece in pieces {
            if piece.iov_len > 0 {
                check(piece.iov_base.cast::<u8>(), piece.iov_len)?;
            } else {
                empty = true;
            }
        }
        if empty {
            // Where there are no bytes C allows any address, and a slice does not.
            let some: Vec<iovec> = pieces.iter().filter(|piece| piece.iov_len > 0).copied().collect();
            // SAFETY: each has an address and bytes, as is checked above.
            put(state, id, unsafe { io_slices(&some) }, written)
        } else {
            // SAFETY: as above.
            put(state, id, unsafe { io_slices(pieces) }, written)
        }
    })
}

/// Writes pieces, and tells how much of them.
#[inline(always)]
fn put(
    state: &mut State,
    id: ConnectionId,
    pieces: &[IoSlice<'_>],
    written: Option<&mut MaybeUninit<usize>>,
) -> Result<(), Failure> {
    let written = place(written)?;
    let now = either!(&mut state.kind, side => side.endpoint.write(id, pieces))?;
    written.write(now.ok_or(Failure::Again)?);
    Ok(())
}

/// Returns the same pieces as Rust has them.
///
/// # Safety
/// The bytes of each can be read for as long as the result is used, and nobody changes them; none is at null, none longer than
/// `isize::MAX`.
unsafe fn io_slices(pieces: &[iovec]) -> &[IoSlice<'_>] {
    // SAFETY: "IoSlice ... is guaranteed to be ABI compatible with the iovec type on Unix platforms", std::io::IoSlice; the rest is the
    // caller's promise.
    unsafe { slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
}

/// Checks what can be checked of an address and a number of objects there.
fn check<T>(base: *const T, count: usize) -> Result<(), Failure> {
    if base.is_null() {
        return Err(Failure::argument("an address is null that has a length"));
    }
    if !base.is_aligned() {
        return Err(Failure::argument("an address is not aligned"));
    }
    let bytes = count.checked_mul(size_of::<T>().max(1)).and_then(|bytes| isize::try_from(bytes).ok());
    match bytes {
        Some(_) => Ok(()),
        None => Err(Failure::argument("a length is more than there is memory")),
    }
}

/// Tells whether everything that was written was handed to the device. VKRDMA_AGAIN: some of it waits for the peer's window, and
/// VKRDMA_EVENT_WRITABLE or VKRDMA_EVENT_ENDED follows.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_flush(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, side => side.endpoint.flush(id))?.ok_or(Failure::Again)
    })
}
