//! Memory of programs that copy it themselves, because the kernel forbids to reach into them: Yama's `ptrace_scope` 2 and 3, or a
//! seccomp profile without `process_vm_readv(2)`.
//!
//! The copies are made under the model's lock, and all programs wait for them, so that patience with a program is limited to [`PATIENCE`]:
//! waiting for it uses patience up; each of its answers earns [`ANSWER`] back, and a time in which nobody waits for it a quarter of that time.
//! Whoever has used it up has no memory any more, as a program that is gone. So a message of 2 GiB, in packets of 64 KiB, keeps others
//! waiting for at most 35 seconds if the program at one end is slow, and 93 if both are.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags};
use softrdma_wire::Copy;

/// The most patience that a program can have to its credit.
const PATIENCE: Duration = Duration::from_secs(2);
/// What an answer earns: 16 ns for each byte of a full packet.
const ANSWER: Duration = Duration::from_millis(1);

/// The socket to the thread that copies; none after it failed to answer.
#[derive(Debug)]
pub(super) struct OfferedMemory {
    copier: Mutex<Option<Copier>>,
}

#[derive(Debug)]
struct Copier {
    socket: OwnedFd,
    patience: Patience,
    /// When the last answer came.
    answered: Instant,
}

/// How long a program may be waited for, now and at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience {
    left: Duration,
    most: Duration,
}

impl Patience {
    const fn new(most: Duration) -> Self {
        Self { left: most, most }
    }

    fn earn(&mut self, earned: Duration) {
        self.left = self.left.saturating_add(earned).min(self.most);
    }

    /// Nobody has waited for the program for as long.
    fn rest(&mut self, time: Duration) {
        self.earn(time / 4);
    }

    /// An answer was waited for, for as long.
    fn answered(&mut self, waited: Duration) {
        self.left = self.left.saturating_sub(waited);
        self.earn(ANSWER);
    }
}

impl OfferedMemory {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self::with_patience(socket, PATIENCE)
    }

    fn with_patience(socket: OwnedFd, most: Duration) -> Self {
        let patience = Patience::new(most);
        Self { copier: Mutex::new(Some(Copier { socket, patience, answered: Instant::now() })) }
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

    /// Copies chunk by chunk. `EFAULT` is the program's word; any other error ends it.
    fn each<T: AsRef<[u8]>>(
        &self,
        mut at: u64,
        chunks: impl Iterator<Item = T>,
        mut copy: impl FnMut(&Waiting<'_>, u64, T) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut kept = self.copier.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in chunks {
            let len = chunk.as_ref().len() as u64;
            let copier = kept.as_mut().ok_or(Errno::FAULT)?;
            let begun = Instant::now();
            copier.patience.rest(begun.saturating_duration_since(copier.answered));
            let deadline = begun + copier.patience.left;
            let copied = copy(&Waiting { socket: &copier.socket, deadline }, at, chunk);
            copier.answered = Instant::now();
            copier.patience.answered(copier.answered.saturating_duration_since(begun));
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

    /// A program that answers each packet in time, and one that answers each call in time, but not all of them.
    #[test]
    fn slow_answers_use_patience_up() {
        let patience = Duration::from_millis(200);
        for pause in [patience / 2, patience / 10] {
            let kind = SocketType::SEQPACKET;
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
            let slow = std::thread::spawn(move || {
                let mut request = [0; Copy::LEN];
                while rustix::net::recv(&theirs, &mut request, RecvFlags::empty())
                    .is_ok_and(|(_, len)| len > 0)
                {
                    std::thread::sleep(pause);
                    let _gone =
                        rustix::net::send(&theirs, &[Copy::DONE; Copy::MOST + 1], SendFlags::NOSIGNAL);
                }
            });
            let memory = OfferedMemory::with_patience(ours, patience);
            let failed = (0..16).find_map(|_| memory.read(0, &mut vec![0; 4 * Copy::MOST]).err());
            assert_eq!(failed, Some(Errno::TIMEDOUT));
            // Its socket is closed, which ends the program.
            assert_eq!(memory.read(0, &mut [0]), Err(Errno::FAULT));
            slow.join().expect("ends");
        }
    }

    #[test]
    fn prompt_answers_and_rest_earn_patience_back() {
        let new = Patience::new(PATIENCE);
        let mut patience = new;
        for _ in 0..1_000_000 {
            patience.answered(Duration::from_micros(50));
        }
        assert_eq!(patience, new);
        patience.answered(Duration::from_secs(1));
        assert_eq!(patience.left, Duration::from_millis(1001));
        patience.rest(Duration::from_secs(1));
        assert_eq!(patience.left, Duration::from_millis(1251));
        patience.rest(Duration::MAX);
        assert_eq!(patience, new);
        patience.answered(Duration::MAX);
        assert_eq!(patience.left, ANSWER);
    }
}
