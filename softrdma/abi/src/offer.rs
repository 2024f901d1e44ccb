//! Opens this process's memory to the fabric.
//!
//! If the kernel forbids the fabric to access it, a thread of this process copies it. The thread
//! passes addresses to the kernel and reads no byte itself, so an unmapped address is an error of
//! the call and does not end the program.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use softrdma_wire::{Copy, Request};

use crate::link::{ask, ask_with, last_errno};
use crate::process::{COPIER, PerProcess};

/// A number that no other memory has at its address, such as that of a program which this process
/// executes later.
pub(crate) static NUMBER: PerProcess<u64> = PerProcess::new();

/// Opens this process's memory to the fabric, if it is not open yet.
pub(crate) fn open_memory() -> Result<(), c_int> {
    let mut drawn = [0_u8; size_of::<u64>()];
    // SAFETY: getrandom(2): as many bytes as there is room for.
    if unsafe { libc::getrandom(drawn.as_mut_ptr().cast(), drawn.len(), 0) } != drawn.len().cast_signed() {
        return Err(libc::EAGAIN);
    }
    let number = NUMBER.get(|| u64::from_ne_bytes(drawn));
    let at = ptr::from_ref(number).expose_provenance() as u64;
    match ask(&Request::ShowMemory { at, number: *number }) {
        Err(libc::EPERM) => offer_memory(),
        shown => shown,
    }
}

/// Offers the fabric to copy this process's memory.
fn offer_memory() -> Result<(), c_int> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: socketpair(2): a place for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } == -1 {
        return Err(last_errno());
    }
    // SAFETY: socketpair(2): both are new, and have no other owner.
    let [ours, theirs] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    serve(ours)?;
    match ask_with(&Request::OfferMemory, Some(theirs.as_fd())) {
        // Another thread was faster.
        Err(libc::EEXIST) => Ok(()),
        offered => offered,
    }
}

/// Starts the thread, whose end of the socket a child does not keep. It ends when the fabric closes
/// its end, and blocks all signals, which are the program's.
fn serve(socket: OwnedFd) -> Result<(), c_int> {
    COPIER.keep_from_children(socket.as_fd());
    // SAFETY: sigset_t consists of integers, which sigfillset(3) writes.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { core::mem::zeroed() };
    // SAFETY: sigfillset(3), pthread_sigmask(3): sets that are read and written; a new thread
    // inherits the mask of its creator.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let started = std::thread::Builder::new().name("softrdma".into()).spawn(move || while step(&socket) {});
    // SAFETY: as above: restores the previous mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop).map_err(|_| libc::EAGAIN)
}

/// Serves the fabric's next request. Returns false at the end.
fn step(socket: &OwnedFd) -> bool {
    let descriptor = socket.as_raw_fd();
    let mut packet = [0; Copy::LEN];
    // SAFETY: recv(2): as many bytes as the packet has.
    let received = unsafe { libc::recv(descriptor, packet.as_mut_ptr().cast(), Copy::LEN, 0) };
    if received != Copy::LEN as isize {
        return received == -1 && last_errno() == libc::EINTR;
    }
    let Copy { write, at, len } = Copy::decode(&packet);
    let (Ok(at), Ok(len)) = (usize::try_from(at), usize::try_from(len)) else { return false };
    let place: *mut c_void = core::ptr::with_exposed_provenance_mut(at);
    let mut status = [Copy::DONE];
    if write {
        // SAFETY: recv(2): the kernel checks the address, and returns EFAULT for unmapped memory.
        // The program asked for these bytes to be written when it registered them (ibv_reg_mr(3)):
        // the fabric writes to no others.
        if unsafe { libc::recv(descriptor, place, len, 0) } != len.cast_signed() {
            status = [!Copy::DONE];
        }
    }
    let answer = |status: &mut [u8; 1], len: usize| {
        let mut parts = [
            libc::iovec { iov_base: status.as_mut_ptr().cast(), iov_len: 1 },
            libc::iovec { iov_base: place, iov_len: len },
        ];
        // SAFETY: a structure of integers and pointers, which may be null.
        let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len() as _);
        // SAFETY: sendmsg(2): the kernel only reads the parts; it checks the address of the second,
        // and returns EFAULT for unmapped memory. The fabric may read registered memory.
        unsafe { libc::sendmsg(descriptor, &raw const message, libc::MSG_NOSIGNAL) != -1 }
    };
    if answer(&mut status, if write { 0 } else { len }) {
        return true;
    }
    // Some of the memory is not mapped.
    answer(&mut [!Copy::DONE], 0)
}
