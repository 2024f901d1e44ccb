//! Memory of others, lent in the middle of a stream: which bytes may be reported as written.

use std::ffi::c_void;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ptr;

use any_backend::either;
use libc::iovec;
use parking_lot::Mutex;

use crate::bytes::{put, with_pieces};
use crate::device::release;
use crate::ending::abort;
use crate::endpoint::{Endpoint, on_connection, place};
use crate::error::{Code, Failed, Failure, Told, call, coded, guarded, tell};
use crate::memory::{Memory, Registered, Release, lend_framed, register};

/// Loans of one connection. Their memory has an owner, which keeps it until the bytes are reported
/// as written. The rule: a byte that is lent is not reported before the memory is released, and an
/// owner that goes ends the loans before its memory goes.
///
/// Created by `vkrdma_loans_new`. It counts all bytes that are written from then on, by
/// `vkrdma_loans_write`; positions are such numbers. It has a lock of its own.
pub struct Loans(Mutex<rdma_conn::Loans<Registered>>);

/// How far a stream with loans is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LoansState {
    /// The position up to which the connection has taken bytes.
    pub accepted: u64,
    /// The position up to which `vkrdma_loans_report` has reported them.
    pub reported: u64,
    /// The positions of the part that is open, which means that some of its bytes are not taken:
    /// its first byte,
    pub start: u64,
    /// and the one behind its last. Both are 0 if no part is open.
    pub end: u64,
    /// The address of its first byte that is not taken; NULL if no part is open.
    pub next: *const c_void,
    /// How many parts are not released, or not behind `reported`.
    pub in_flight: usize,
}

/// Creates loans, at position 0.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_loans_new(
    loans: Option<&mut MaybeUninit<*mut Loans>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    call(error, || {
        place(loans)?.write(Box::into_raw(Box::new(Loans(Mutex::default()))));
        Ok(())
    })
}

/// Frees loans. Call `vkrdma_loans_end` first, unless no part is in flight. NULL is ignored. In a
/// forked child it has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_loans_free(loans: Option<Box<Loans>>) {
    release(loans);
}

/// Registers `len` bytes of the program as the part that begins at the position `start`, and opens
/// it. As for `vkrdma_register_memory` with VKRDMA_LEND, they must stay readable until the library
/// calls `release`, which may be NULL, with `context`.
///
/// VKRDMA_MISUSE: a part is open, bytes at `start` were taken, or the loans have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_loans_register(
    loans: Option<&Loans>,
    endpoint: Option<&Endpoint>,
    connection: u64,
    start: u64,
    base: *mut c_void,
    len: usize,
    release: Release,
    context: *mut c_void,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    locked(loans, error, |loans, told| {
        let memory = Memory::new(base, len, release, context);
        let end = start.checked_add(len as u64).ok_or(Failure::argument("the part wraps around"));
        let lent = memory.and_then(|memory| {
            loans.lend(start..end?, |loan| {
                register(endpoint, connection, memory.lent(loan), rdma_conn::Access::NONE)
            })
        });
        coded(told, lent.and_then(|lent| if lent { Ok(()) } else { Err(misuse("no part can begin there")) }))
    })
}

/// Writes the `before_count` pieces of `before`, then the rest of the open part without a copy,
/// then the `after_count` pieces of `after`, as `vkrdma_lend_framed` does, and counts the bytes
/// taken, whose number is `taken`. If no part is open, writes the pieces of `before`.
///
/// VKRDMA_MISUSE: `before` is not what lies before the open part, or there are pieces behind a part
/// although none is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vkrdma_loans_write(
    loans: Option<&Loans>,
    endpoint: Option<&Endpoint>,
    connection: u64,
    before: *const iovec,
    before_count: usize,
    after: *const iovec,
    after_count: usize,
    taken: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    locked(loans, error, |loans, told| {
        let mut bytes = 0;
        let code = on_connection(endpoint, connection, told.as_deref_mut(), |state, id| {
            let taken = place(taken)?;
            let mut write = |before: &[IoSlice<'_>], after: &[IoSlice<'_>]| {
                let Some((registered, at)) = loans.open() else {
                    if !after.is_empty() {
                        return Err(misuse("no part is open"));
                    }
                    return put(state, id, before);
                };
                let copied: usize = before.iter().map(|piece| piece.len()).sum();
                if copied as u64 != at.start.saturating_sub(loans.accepted()) {
                    return Err(misuse("these are not the bytes before the part"));
                }
                // Within the memory, whose length is a usize.
                let part = |position: u64| position.saturating_sub(at.start) as usize;
                lend_framed(state, id, before, registered, part(loans.accepted())..part(at.end), after)
            };
            // SAFETY: the caller has the structures there, each with its bytes, and none of them
            // changes during the call.
            bytes = unsafe {
                with_pieces(before, before_count, |before| {
                    with_pieces(after, after_count, |after| write(before, after))
                })
            }?;
            taken.write(bytes);
            Ok(())
        });
        // Without the endpoint's lock: this may deregister memory that the peer has already.
        loans.accept(bytes as u64);
        code
    })
}

/// Returns in `*bytes` how many further bytes may be reported as written, at most `most`, and
/// counts them as reported. 0: call again after VKRDMA_EVENT_RETURNED, or when more bytes were
/// taken.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_loans_report(
    loans: Option<&Loans>,
    most: usize,
    bytes: Option<&mut MaybeUninit<usize>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    locked(loans, error, |loans, told| {
        // At most `most`.
        coded(told, place(bytes).map(|bytes| _ = bytes.write(loans.report(most as u64) as usize)))
    })
}

/// Returns how far the stream is.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_loans_state_of(
    loans: Option<&Loans>,
    state: Option<&mut MaybeUninit<LoansState>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    locked(loans, error, |loans, told| {
        coded(told, place(state).map(|state| _ = state.write(LoansState::of(loans))))
    })
}

/// Ends all loans, before their memory goes: if a part is in flight, aborts the connection as
/// `vkrdma_abort` does, and the device reads no byte of it when this returns. Nothing is lent or
/// reported from now on. Returns in `*kept` how many bytes the device keeps registered, because it
/// refuses to deregister them; their release is not called.
///
/// `endpoint` may be NULL if it was freed. If the call fails, the memory must stay: free the
/// endpoint, and call again.
#[unsafe(no_mangle)]
pub extern "C" fn vkrdma_loans_end(
    loans: Option<&Loans>,
    endpoint: Option<&Endpoint>,
    connection: u64,
    kept: Option<&mut MaybeUninit<u64>>,
    error: Option<&mut MaybeUninit<Failed>>,
) -> Code {
    locked(loans, error, |loans, told| {
        let Some(kept) = kept else {
            return tell(told, Failure::argument("the place for the result is null"));
        };
        let ended = loans.end(|| match endpoint {
            None => Ok(()),
            Some(_) => match on_connection(endpoint, connection, told.as_deref_mut(), abort) {
                Code::VKRDMA_OK => Ok(()),
                code => Err(code),
            },
        });
        ended.map_or_else(
            |code| code,
            |bytes| {
                kept.write(bytes);
                Code::VKRDMA_OK
            },
        )
    })
}

impl LoansState {
    fn of(loans: &rdma_conn::Loans<Registered>) -> Self {
        let (start, end, next) = loans.open().map_or((0, 0, ptr::null()), |(registered, at)| {
            let skip = loans.accepted().saturating_sub(at.start) as usize;
            let base = either!(registered, Registered(buffer) => buffer.memory().address());
            (at.start, at.end, ptr::with_exposed_provenance(base.wrapping_add(skip)))
        });
        let (accepted, reported) = (loans.accepted(), loans.reported());
        Self { accepted, reported, start, end, next, in_flight: loans.in_flight() }
    }
}

fn locked(
    loans: Option<&Loans>,
    told: Told<'_>,
    does: impl FnOnce(&mut rdma_conn::Loans<Registered>, &mut Told<'_>) -> Code,
) -> Code {
    guarded(told, |told| match loans {
        Some(loans) => does(&mut loans.0.lock(), told),
        None => tell(told, Failure::argument("the loans are null")),
    })
}

fn misuse(text: &'static str) -> Failure {
    Failure::Here(Code::VKRDMA_MISUSE, text.into())
}
