//! Memory of programs that copy it themselves, because the kernel forbids the fabric to access it:
//! with Yama's `ptrace_scope` 2 and 3, another security module, or without `/proc`.
//!
//! A program that does not answer is like one whose page does not come: only the thread that
//! accesses its memory waits for it.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use softrdma_wire::Copy;

/// The socket to the thread that copies; `None` after a wrong answer.
#[derive(Debug)]
pub(super) struct OfferedMemory {
    copier: Mutex<Option<OwnedFd>>,
}

impl OfferedMemory {
    pub(super) const fn new(socket: OwnedFd) -> Self {
        Self { copier: Mutex::new(Some(socket)) }
    }

    pub(super) fn read(&self, alive: &OwnedFd, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.each(alive, at, into.chunks_mut(Copy::MOST), |waiting, at, chunk| {
            waiting.send(&Copy { write: false, at, len: chunk.len() as u64 }.encode())?;
            waiting.receive(chunk)
        })
    }

    pub(super) fn write(&self, alive: &OwnedFd, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.each(alive, at, from.chunks(Copy::MOST), |waiting, at, chunk| {
            waiting.send(&Copy { write: true, at, len: chunk.len() as u64 }.encode())?;
            waiting.send(chunk)?;
            waiting.receive(&mut [])
        })
    }

    /// Copies chunk by chunk. `EFAULT` is the program's answer; after any other error the socket is
    /// dropped.
    fn each<T: AsRef<[u8]>>(
        &self,
        alive: &OwnedFd,
        mut at: u64,
        chunks: impl Iterator<Item = T>,
        mut copy: impl FnMut(&Waiting<'_>, u64, T) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut kept = self.copier.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in chunks {
            let len = chunk.as_ref().len() as u64;
            let socket = kept.as_ref().ok_or(Errno::FAULT)?;
            let copied = copy(&Waiting { socket, alive }, at, chunk);
            if copied.is_err_and(|errno| errno != Errno::FAULT) {
                *kept = None;
            }
            copied?;
            at = at.checked_add(len).ok_or(Errno::FAULT)?;
        }
        Ok(())
    }
}

/// A pending copy. The program can set the socket's flags, so only non-blocking calls are made.
struct Waiting<'a> {
    socket: &'a OwnedFd,
    /// Readable when the program has ended.
    alive: &'a OwnedFd,
}

impl Waiting<'_> {
    fn until_ready(&self, flags: PollFlags) -> Result<(), Errno> {
        loop {
            let mut fds = [PollFd::new(self.socket, flags), PollFd::new(self.alive, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            let [ready, ended] = fds.map(|fd| !fd.revents().is_empty());
            if ready {
                return Ok(());
            }
            if ended {
                return Err(Errno::SRCH);
            }
        }
    }

    fn send(&self, packet: &[u8]) -> Result<(), Errno> {
        self.until_ready(PollFlags::OUT)?;
        rustix::net::send(self.socket, packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)
    }

    fn receive(&self, into: &mut [u8]) -> Result<(), Errno> {
        self.until_ready(PollFlags::IN)?;
        let (mut status, most) = ([0; 1], into.len() + 1);
        let mut parts = [IoSliceMut::new(&mut status), IoSliceMut::new(into)];
        let mut nothing = RecvAncillaryBuffer::default();
        let received =
            rustix::net::recvmsg(self.socket, &mut parts, &mut nothing, RecvFlags::DONTWAIT)?.bytes;
        match status {
            [Copy::DONE] if received == most => Ok(()),
            [Copy::DONE] => Err(Errno::PROTO),
            _ => Err(Errno::FAULT),
        }
    }
}
