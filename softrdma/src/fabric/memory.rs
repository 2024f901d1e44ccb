//! Accesses the memory of programs.
//!
//! A session is with an address space, not with whatever a process number means: a program may
//! execute another one, whose addresses mean other memory. So a program shows its memory once, by a
//! number that it has drawn and keeps at an address.
//!
//! - A read asks for that number, too. One call is in one address space (`process_vm_readv(2)`), so
//!   bytes that come without the number are another program's, and are not used.
//! - A write goes to `/proc/PID/mem` (`proc_pid_mem(5)`), which was opened when the program showed
//!   its memory. The descriptor stays with the address space of that time, and reaches nothing when
//!   that is gone.
//!
//! Reads go the other way because they take half the time so, if they are long.
//!
//! Like `pages`, this is unsafe: one system call copies from another process to this one.

#![allow(unsafe_code, reason = "process_vm_readv(2) has no safe wrapper")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::budget::{Program, Taken};
use super::movers::{Job, Lane, Movers};
use super::offered::OfferedMemory;
use super::seats::Seat;
use libc::iovec;
use rdma_softsim::{ForeignMemory, Load};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};

/// How long a program may take to provide a byte of memory that it shows or registers, while no
/// other access to its memory ends.
const PATIENCE: Duration = Duration::from_secs(20);

/// How the fabric accesses a program's memory.
enum Memory {
    /// By system calls.
    Shown(Shown),
    /// The program copies it itself, as the kernel forbids the fabric to access it.
    Offered(OfferedMemory),
}

/// An address space, and how it is known again.
struct Shown {
    pid: Pid,
    /// `/proc/PID/mem`.
    file: OwnedFd,
    /// Where it has the number that its program has drawn.
    at: u64,
    number: u64,
}

/// A session's process, for as long as the session with it lasts or a thread is in its memory.
pub(super) struct Process {
    /// Its memory, once it has shown or offered it.
    memory: OnceLock<Memory>,
    /// The jobs in its memory.
    pub(super) lane: Lane,
    /// The threads that do them.
    movers: Arc<Movers>,
    /// What the session takes. Threads may be in the memory after it has ended.
    taken: Taken,
}

impl Process {
    /// Makes the process of a session, for which its program has taken so much.
    pub(super) fn new(taken: Taken, movers: &Arc<Movers>) -> Self {
        Self { memory: OnceLock::new(), lane: Lane::default(), movers: Arc::clone(movers), taken }
    }

    pub(super) const fn program(&self) -> &Arc<Program> {
        &self.taken.program
    }

    pub(super) fn number(&self) -> u32 {
        self.program().pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn descriptor(&self) -> &OwnedFd {
        &self.program().alive
    }

    pub(super) fn kill(&self) {
        // It may have ended before.
        let _ended = pidfd_send_signal(self.descriptor(), Signal::KILL);
    }

    /// Accepts a program's offer to copy its memory itself. `EEXIST` if the fabric can access the
    /// memory already.
    pub(super) fn take_offer(&self, socket: OwnedFd) -> Result<(), Errno> {
        self.memory.set(Memory::Offered(OfferedMemory::new(socket))).map_err(|_second| Errno::EXIST)
    }

    /// Opens the memory of a program that has `number` at this address. `EPERM` if the kernel
    /// forbids that, or if the process has executed another program meanwhile.
    pub(super) fn show(self: &Arc<Self>, at: u64, number: u64) -> Result<(), Errno> {
        self.within(move |process| {
            let shown = Shown::open(process.program().pid, at, number).map_err(|_forbidden| Errno::PERM)?;
            // It may have been shown before, or offered.
            let _before = process.memory.set(Memory::Shown(shown));
            Ok(())
        })
    }

    /// Checks that these bytes are accessible. `EFAULT` if they do not come in time.
    pub(super) fn probe(self: &Arc<Self>, places: [u64; 2]) -> Result<(), Errno> {
        self.within(move |process| places.into_iter().try_for_each(|place| process.read(place, &mut [0])))
    }

    /// Calls a function that accesses the memory. `EFAULT` if that takes too long.
    fn within(
        self: &Arc<Self>,
        access: impl FnOnce(&Self) -> Result<(), Errno> + Send + 'static,
    ) -> Result<(), Errno> {
        let (tell, told) = channel();
        let call = move |process: &Self| {
            // The caller may have stopped waiting.
            let _told = tell.send(access(process));
        };
        self.movers.submit(self, Job::Call(Box::new(call)));
        self.lane.answer(|| told.recv_timeout(PATIENCE)).unwrap_or(Err(Errno::FAULT))
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        match self.memory.get().ok_or(Errno::PERM)? {
            Memory::Shown(shown) => shown.read(at, into),
            Memory::Offered(offered) => offered.read(self.descriptor(), at, into),
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        match self.memory.get().ok_or(Errno::PERM)? {
            Memory::Shown(shown) => shown.write(at, from),
            Memory::Offered(offered) => offered.write(self.descriptor(), at, from),
        }
    }
}

impl Shown {
    fn open(pid: Pid, at: u64, number: u64) -> Result<Self, Errno> {
        let path = format!("/proc/{}/mem", pid.as_raw_nonzero());
        let file = File::options().read(true).write(true).open(path).map_err(|_| Errno::ACCESS)?;
        let shown = Self { pid, file: file.into(), at, number };
        // Either way reaches the same memory, as far as is known.
        let mut found = [0; size_of::<u64>()];
        let read = rustix::io::pread(&shown.file, &mut found, at)?;
        if read != found.len() || u64::from_ne_bytes(found) != number {
            return Err(Errno::SRCH);
        }
        shown.read(at, &mut found)?;
        Ok(shown)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        let mut found = [0; size_of::<u64>()];
        let len = into.len() + found.len();
        let local = [into, &mut found];
        let local = local.map(|bytes| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
        let place = |at: u64| usize::try_from(at).map_err(|_| Errno::FAULT);
        let remote = [place(at)?, place(self.at)?].map(std::ptr::without_provenance_mut);
        let remote = [(remote[0], local[0].iov_len), (remote[1], local[1].iov_len)];
        let remote = remote.map(|(iov_base, iov_len)| iovec { iov_base, iov_len });
        let pid = self.pid.as_raw_nonzero().get();
        // SAFETY: process_vm_readv(2): `local` describes memory of this process that is borrowed
        // mutably, and which the call writes. `remote` has addresses in the other process, which
        // the kernel checks there and which are never used as pointers here. The session's program
        // asked for these bytes to be accessed, and the kernel checks that this process may.
        let copied = unsafe { libc::process_vm_readv(pid, local.as_ptr(), 2, remote.as_ptr(), 2, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied == len && u64::from_ne_bytes(found) == self.number => Ok(()),
            _ => Err(Errno::FAULT),
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        // The byte whose page was waited for.
        let (mut done, mut awaited) = (0, None);
        while let Some(rest) = from.get(done..).filter(|rest| !rest.is_empty()) {
            let place = at.checked_add(done as u64).ok_or(Errno::FAULT)?;
            match rustix::io::pwrite(&self.file, rest, place) {
                // The address space is gone.
                Ok(0) => return Err(Errno::SRCH),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                // A page that the program provides itself (userfaultfd(2)) comes to readers only.
                Err(Errno::IO) if awaited != Some(place) => {
                    self.read(place, &mut [0])?;
                    awaited = Some(place);
                }
                Err(_) => return Err(Errno::FAULT),
            }
        }
        Ok(())
    }
}

/// Registered memory of a program.
pub(super) struct ProgramMemory {
    pub(super) process: Arc<Process>,
    /// The address at which it begins in the program.
    pub(super) at: u64,
}

impl ProgramMemory {
    fn place(&self, offset: usize) -> Option<u64> {
        self.at.checked_add(offset as u64)
    }
}

impl ForeignMemory for ProgramMemory {
    fn carry(&self, load: Load) -> Option<Load> {
        if let Some(load) = Seat::take(&self.process, load) {
            self.process.movers.submit(&self.process, Job::Step(load));
        }
        None
    }

    fn progress(&self) -> u64 {
        self.process.lane.progress()
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.place(offset).is_some_and(|at| self.process.read(at, into).is_ok())
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.place(offset).is_some_and(|at| self.process.write(at, from).is_ok())
    }
}
