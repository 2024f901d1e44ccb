//! Accesses the memory of programs.
//!
//! Like `pages`, this is unsafe: two system calls copy between this process and another.

#![allow(unsafe_code, reason = "process_vm_readv(2) and process_vm_writev(2) have no safe wrapper")]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::movers::{Job, Lane, Movers};
use super::offered::OfferedMemory;
use super::seats::Seat;
use libc::{c_ulong, iovec, pid_t, ssize_t};
use rdma_softsim::{ForeignMemory, Load};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How long a process that was alive is taken to be alive.
const FRESH: Duration = Duration::from_millis(1);
/// How long a program may take to provide a byte of memory that it registers.
const PATIENCE: Duration = Duration::from_secs(20);

/// A program's process, for as long as a session with it lasts or a thread is in its memory.
pub(super) struct Process {
    pid: pid_t,
    /// Readable when the process has ended. Its number may then mean another process.
    alive: OwnedFd,
    /// When this was made, and how many microseconds later the process was last found alive.
    opened: Instant,
    seen: AtomicU64,
    /// The memory that the program copies itself, if the kernel forbids the fabric to access it.
    offered: OnceLock<OfferedMemory>,
    /// The jobs in its memory.
    pub(super) lane: Lane,
    /// The threads that do them.
    movers: Arc<Movers>,
    /// Counts the process while this exists.
    _place: Arc<()>,
}

impl Process {
    /// Opens a process, which a reference to `place` counts.
    pub(super) fn open(pid: u32, movers: &Arc<Movers>, place: &Arc<()>) -> Result<Self, Errno> {
        let number = pid_t::try_from(pid).map_err(|_| Errno::SRCH)?;
        let alive = pidfd_open(Pid::from_raw(number).ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
        let (movers, place) = (Arc::clone(movers), Arc::clone(place));
        Ok(Self {
            pid: number,
            alive,
            opened: Instant::now(),
            seen: AtomicU64::new(0),
            offered: OnceLock::new(),
            lane: Lane::default(),
            movers,
            _place: place,
        })
    }

    pub(super) const fn number(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    pub(super) const fn descriptor(&self) -> &OwnedFd {
        &self.alive
    }

    pub(super) fn kill(&self) {
        // It may have ended before.
        let _ended = pidfd_send_signal(&self.alive, Signal::KILL);
    }

    /// Returns whether the process has ended, at the latest [`FRESH`] ago.
    pub(super) fn has_ended(&self) -> bool {
        let now = self.opened.elapsed().as_micros() as u64;
        if u128::from(now.saturating_sub(self.seen.load(Relaxed))) < FRESH.as_micros() {
            return false;
        }
        let mut fds = [PollFd::new(&self.alive, PollFlags::IN)];
        let ended = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0);
        if !ended {
            self.seen.store(now, Relaxed);
        }
        ended
    }

    /// Accepts a program's offer to copy its memory itself. `EEXIST` if the fabric can access the
    /// memory.
    pub(super) fn take_offer(self: &Arc<Self>, probe: u64, socket: OwnedFd) -> Result<(), Errno> {
        match self.probe([probe; 2]) {
            Err(Errno::PERM | Errno::NOSYS) => {
                self.offered.set(OfferedMemory::new(socket)).map_err(|_second| Errno::EXIST)
            }
            _ => Err(Errno::EXIST),
        }
    }

    /// Checks that these bytes are accessible. `EFAULT` if they do not come in time.
    pub(super) fn probe(self: &Arc<Self>, places: [u64; 2]) -> Result<(), Errno> {
        let (tell, told) = channel();
        let look = move |process: &Self| {
            let reached = places.into_iter().try_for_each(|place| process.read(place, &mut [0]));
            // The caller may have stopped waiting.
            let _told = tell.send(reached);
        };
        self.movers.submit(self, Job::Call(Box::new(look)));
        told.recv_timeout(PATIENCE).unwrap_or(Err(Errno::FAULT))
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        if let Some(offered) = self.offered.get() {
            return offered.read(&self.alive, at, into);
        }
        let local = iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        self.reach(at, local, libc::process_vm_readv)
    }

    fn write(&self, at: u64, from: &[u8]) -> Result<(), Errno> {
        if let Some(offered) = self.offered.get() {
            return offered.write(&self.alive, at, from);
        }
        let local = iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        self.reach(at, local, libc::process_vm_writev)
    }

    fn reach(&self, at: u64, local: iovec, copy: Copy) -> Result<(), Errno> {
        let at = usize::try_from(at).map_err(|_| Errno::FAULT)?;
        // The kernel reuses a process number only after it has given out all others, so a check
        // not long before the call suffices.
        if self.has_ended() {
            return Err(Errno::SRCH);
        }
        let remote = iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: local.iov_len };
        // SAFETY: process_vm_readv(2): `local` describes memory of this process that `read` borrows
        // mutably, and which the call writes; process_vm_writev(2): memory that `write` borrows,
        // and which the call reads. `remote` is an address in the other process, which the kernel
        // checks there and which is never used as a pointer here. The session's program asked for
        // these bytes to be accessed, and the kernel checks that this process may.
        let copied = unsafe { copy(self.pid, &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied == local.iov_len => Ok(()),
            Ok(_) => Err(Errno::FAULT),
            Err(_) => Err(last_error()),
        }
    }
}

type Copy = unsafe extern "C" fn(pid_t, *const iovec, c_ulong, *const iovec, c_ulong, c_ulong) -> ssize_t;

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
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

    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.place(offset).is_some_and(|at| self.process.read(at, into).is_ok())
    }

    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.place(offset).is_some_and(|at| self.process.write(at, from).is_ok())
    }
}
