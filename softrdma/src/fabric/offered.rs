//! Memory of programs that copy it themselves, because the kernel forbids to reach into them: Yama's `ptrace_scope` 2 and 3, or a
//! seccomp profile without `process_vm_readv(2)`.
//!
//! The copies are made under the model's lock, and all programs wait for them: a program that does not make a copy within [`PATIENCE`],
//! however many packets it takes, has no memory any more, as one that is gone.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use softrdma_wire::Copy;

/// How long a copy may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// The socket to whoever copies; none after it failed to answer.
#[derive(Debug)]
pub(super) struct OfferedMemory {
    socket: Mutex<Option<OwnedFd>>,
    /// [`PATIENCE`], but in tests.
    patience: Duration,
}

impl OfferedMemory {
    pub(super) const fn new(socket: OwnedFd) -> Self {
        Self { socket: Mutex::new(Some(socket)), patience: PATIENCE }
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.each(at, into.chunks_mut(Copy::MOST), |waiting, at, chunk| {
            waiting.send(&Copy { write: false, at, len: chunk.len() as u64 }.encode())?;
            waiting.receive(chunk)
        })
    }

    pub(super) fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.each(at, from.chunks(Copy::MOST), |waiting, at, chunk| {
            waiting.send(&Copy { write: true, at, len: chunk.len() as u64 }.encode())?;
            waiting.send(chunk)?;
            waiting.receive(&mut [])
        })
    }

    /// Copies chunk by chunk. `EFAULT` is the program's word; whatever else goes wrong ends it.
    fn each<T: AsRef<[u8]>>(
        &self,
        mut at: u64,
        chunks: impl Iterator<Item = T>,
        mut copy: impl FnMut(&Waiting<'_>, u64, T) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut kept = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + self.patience;
        for chunk in chunks {
            let len = chunk.as_ref().len() as u64;
            let waiting = Waiting { socket: kept.as_ref().ok_or(Errno::FAULT)?, deadline };
            let copied = copy(&waiting, at, chunk);
            if copied.is_err_and(|errno| errno != Errno::FAULT) {
                *kept = None;
            }
            copied?;
            at = at.checked_add(len).ok_or(Errno::FAULT)?;
        }
        Ok(())
    }
}

/// A copy under way. The socket's flags are the program's too, so that only calls that do not block can be made.
struct Waiting<'a> {
    socket: &'a OwnedFd,
    deadline: Instant,
}

impl Waiting<'_> {
    fn until_ready(&self, flags: PollFlags) -> Result<(), Errno> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match poll(&mut [PollFd::new(self.socket, flags)], Some(&left)) {
                Ok(0) => return Err(Errno::TIMEDOUT),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn send(&self, packet: &[u8]) -> Result<(), Errno> {
        self.until_ready(PollFlags::OUT)?;
        rustix::net::send(self.socket, packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)
    }

    /// An answer, with as many bytes as `into` has.
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

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A program that answers each packet in time, and takes longer than that for all of them.
    #[test]
    fn a_copy_has_one_deadline_for_all_its_packets() {
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
        let patience = Duration::from_millis(200);
        let slow = std::thread::spawn(move || {
            let mut request = [0; Copy::LEN];
            while rustix::net::recv(&theirs, &mut request, RecvFlags::empty()).is_ok_and(|(_, len)| len > 0) {
                std::thread::sleep(patience / 2);
                let _gone = rustix::net::send(&theirs, &[Copy::DONE; Copy::MOST + 1], SendFlags::NOSIGNAL);
            }
        });
        let memory = OfferedMemory { patience, ..OfferedMemory::new(ours) };
        assert_eq!(memory.read(0, &mut vec![0; 4 * Copy::MOST]), Err(Errno::TIMEDOUT));
        // Its socket is closed, which ends the program.
        assert_eq!(memory.read(0, &mut [0]), Err(Errno::FAULT));
        slow.join().expect("ends");
    }
}
