//! Memory of programs that copy it themselves, because the kernel forbids to reach into them: Yama's `ptrace_scope` 2 and 3, or a
//! seccomp profile without `process_vm_readv(2)`.
//!
//! The copies are made under the model's lock, and all programs wait for them: a program that does not answer within [`PATIENCE`] has no
//! memory any more, as one that is gone.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use softrdma_wire::Copy;

/// How long an answer may take.
const PATIENCE: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// The socket to whoever copies; none after it failed to answer.
#[derive(Debug)]
pub(super) struct OfferedMemory {
    socket: Mutex<Option<OwnedFd>>,
}

impl OfferedMemory {
    pub(super) const fn new(socket: OwnedFd) -> Self {
        Self { socket: Mutex::new(Some(socket)) }
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.each(at, into.chunks_mut(Copy::MOST), |socket, at, chunk| {
            send(socket, &Copy { write: false, at, len: chunk.len() as u64 }.encode())?;
            receive(socket, chunk)
        })
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.each(at, from.chunks(Copy::MOST), |socket, at, chunk| {
            send(socket, &Copy { write: true, at, len: chunk.len() as u64 }.encode())?;
            send(socket, chunk)?;
            receive(socket, &mut [])
        })
    }

    /// Copies chunk by chunk. `EFAULT` is the program's word; whatever else goes wrong ends it.
    fn each<T: AsRef<[u8]>>(
        &self,
        mut at: u64,
        chunks: impl Iterator<Item = T>,
        mut copy: impl FnMut(&OwnedFd, u64, T) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut kept = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in chunks {
            let len = chunk.as_ref().len() as u64;
            let copied = copy(kept.as_ref().ok_or(Errno::FAULT)?, at, chunk);
            if copied.is_err_and(|errno| errno != Errno::FAULT) {
                *kept = None;
            }
            copied?;
            at = at.checked_add(len).ok_or(Errno::FAULT)?;
        }
        Ok(())
    }
}

/// The socket's flags are the program's too, so that only calls that do not block can be made.
fn await_ready(socket: &OwnedFd, flags: PollFlags) -> Result<(), Errno> {
    loop {
        match poll(&mut [PollFd::new(socket, flags)], Some(&PATIENCE)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn send(socket: &OwnedFd, packet: &[u8]) -> Result<(), Errno> {
    await_ready(socket, PollFlags::OUT)?;
    rustix::net::send(socket, packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)
}

/// An answer, with as many bytes as `into` has.
fn receive(socket: &OwnedFd, into: &mut [u8]) -> Result<(), Errno> {
    await_ready(socket, PollFlags::IN)?;
    let (mut status, most) = ([0; 1], into.len() + 1);
    let mut parts = [IoSliceMut::new(&mut status), IoSliceMut::new(into)];
    let mut nothing = RecvAncillaryBuffer::default();
    let received = rustix::net::recvmsg(socket, &mut parts, &mut nothing, RecvFlags::DONTWAIT)?.bytes;
    match status {
        [Copy::DONE] if received == most => Ok(()),
        [Copy::DONE] => Err(Errno::PROTO),
        _ => Err(Errno::FAULT),
    }
}
