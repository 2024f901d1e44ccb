//! Bytes of connections: read, used where they lie, written.

use std::ffi::c_void;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::{ptr, slice};

use any_backend::either;
use libc::iovec;
use rdma_conn::{ConnectionId, Error};

use crate::endpoint::{Endpoint, Kind, State, on_connection, place};
use crate::error::{Code, Failed, Failure};

/// Bytes that have arrived, where the peer has written them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Piece {
    /// The first of them.
    pub base: *const c_void,
    /// How many.
    pub len: usize,
}

/// The largest number of pieces that arrived bytes can lie in.
pub const VKRDMA_PIECES: usize = 3;

/// Unread bytes, in order.
#[repr(C)]
pub struct Pieces {
    /// How many of `pieces` are set.
    pub count: usize,
    /// Bytes in all pieces together.
    pub bytes: usize,
    /// Each.
    pub pieces: [Piece; VKRDMA_PIECES],
}

/// Reads up to `len` bytes that have arrived, and returns their number in `*read`. If `*read` is 0
/// and `len` is not, the stream has ended: the peer has closed. VKRDMA_AGAIN: nothing has arrived;
/// VKRDMA_EVENT_READABLE or VKRDMA_EVENT_ENDED follows.
///
/// An error is the one that ended the connection, returned after all bytes that arrived before.
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
            // SAFETY: the caller has `len` bytes there, which no other thread uses during the call.
            // They are only written to, and memory that C passes counts as initialised.
            unsafe { slice::from_raw_parts_mut(into.cast(), len) }
        };
        let read = place(read)?;
        let now = either!(&mut state.kind, Kind(side) => side.endpoint.read(id, into))?;
        read.write(now.ok_or(Failure::Again)?);
        Ok(())
    })
}

/// Returns the places of all unread bytes: a read without a copy. If `count` is 0, nothing has
/// arrived or the stream has ended; `vkrdma_read` tells which. Return the bytes to the peer with
/// `vkrdma_consume`.
///
/// The pieces are valid until they are consumed or read, the connection is aborted or abandoned, or
/// the endpoint is freed. Do not write to them. A hostile peer can, at any time: copy what you base
/// a decision on, and decide on the copy.
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
        either!(&state.kind, Kind(side) => {
            let connection = side.endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
            let pieces = arrived.write(Pieces { count: 0, bytes: 0, pieces: [none; VKRDMA_PIECES] });
            // Iterated inside, which compiles to far less than a loop over this iterator.
            connection.arrived().for_each(|arrived| {
                let memory = arrived.memory();
                if let Some(piece) = pieces.pieces.get_mut(pieces.count) {
                    *piece = Piece {
                        base: ptr::with_exposed_provenance(memory.address()),
                        len: memory.len(),
                    };
                    pieces.count += 1;
                    pieces.bytes += memory.len();
                }
            });
        });
        Ok(())
    })
}

/// Returns the first `bytes` bytes of `vkrdma_arrived` to the peer. VKRDMA_MISUSE: fewer bytes have
/// arrived, and none is returned.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_consume(
    endpoint: Option<&Endpoint>,
    connection: u64,
    bytes: usize,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        Ok(either!(&mut state.kind, Kind(side) => side.endpoint.consume(id, bytes))?)
    })
}

/// Copies as many bytes of `from` as there is room for, sends them as one notification, and returns
/// their number. VKRDMA_AGAIN: there is no room. After that, or if not all bytes were taken,
/// VKRDMA_EVENT_WRITABLE follows. The caller may reuse `from` when the call returns.
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
            // SAFETY: the caller has `len` bytes there, and no thread changes them during the call.
            unsafe { slice::from_raw_parts(from.cast(), len) }
        };
        let written = place(written)?;
        written.write(put(state, id, &[IoSlice::new(from)])?);
        Ok(())
    })
}

/// Writes `count` pieces in order, like one `vkrdma_write`: one notification for all bytes that
/// have room, so the peer wakes up once. Pieces may be empty.
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
        let written = place(written)?;
        // SAFETY: the caller has as many structures there, each with its bytes, and none of them
        // changes during the call.
        written.write(unsafe { with_pieces(pieces, count, |pieces| put(state, id, pieces)) }?);
        Ok(())
    })
}

/// Calls `does` with the pieces that are not empty.
///
/// # Safety
/// There are `count` structures at `pieces`, and as many bytes as each says at its address. None of
/// them changes during the call.
pub(crate) unsafe fn with_pieces<R>(
    pieces: *const iovec,
    count: usize,
    does: impl FnOnce(&[IoSlice<'_>]) -> Result<R, Failure>,
) -> Result<R, Failure> {
    if count > 0 {
        check(pieces, count)?;
    }
    let pieces: &[iovec] = match count {
        0 => &[],
        // SAFETY: as the caller promises.
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
    // C allows any address for an empty piece; a slice does not.
    let some: Vec<iovec>;
    let pieces = if empty {
        some = pieces.iter().filter(|piece| piece.iov_len > 0).copied().collect();
        &some
    } else {
        pieces
    };
    // SAFETY: each has an address and bytes, as is checked above.
    does(unsafe { io_slices(pieces) })
}

#[inline(always)]
pub(crate) fn put(state: &mut State, id: ConnectionId, pieces: &[IoSlice<'_>]) -> Result<usize, Failure> {
    either!(&mut state.kind, Kind(side) => side.endpoint.write(id, pieces))?.ok_or(Failure::Again)
}

/// # Safety
/// Each piece stays readable and unchanged, and is neither null nor longer than `isize::MAX`.
unsafe fn io_slices(pieces: &[iovec]) -> &[IoSlice<'_>] {
    // SAFETY: "IoSlice ... is guaranteed to be ABI compatible with the iovec type on Unix
    // platforms", std::io::IoSlice; the rest is the caller's promise.
    unsafe { slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
}

/// As far as that is possible.
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

/// Returns VKRDMA_OK if the device has been given all written bytes. VKRDMA_AGAIN: some of them
/// wait for the peer's window; VKRDMA_EVENT_WRITABLE or VKRDMA_EVENT_ENDED follows.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_flush(
    endpoint: Option<&Endpoint>,
    connection: u64,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    on_connection(endpoint, connection, error, |state, id| {
        either!(&mut state.kind, Kind(side) => side.endpoint.flush(id))?.ok_or(Failure::Again)
    })
}
