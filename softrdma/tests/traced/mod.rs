//! A program that is killed at one of its system calls, whose number is given (`ptrace(2)`).
#![allow(unsafe_code, reason = "ptrace(2), waitpid(2) and kill(2) have no safe wrapper for this")]

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use libc::{c_int, c_uint, c_void, pid_t};

use crate::common::Lines;

/// Returns whether this process may trace its children. Some containers forbid it.
pub(crate) fn is_allowed() -> bool {
    let child = spawn(&mut Command::new("true"));
    child.is_ok_and(|mut child| child.kill().and_then(|()| child.wait()).is_ok())
}

/// Starts a program that this thread traces.
fn spawn(command: &mut Command) -> io::Result<Child> {
    // SAFETY: pre_exec: `ptrace` is a system call alone, and allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    command.spawn()
}

/// A running program.
pub(crate) struct Traced {
    lines: Lines,
    /// The thread that traces it, and returns how often it stopped at system calls. Only this
    /// thread may trace it.
    tracer: JoinHandle<u64>,
}

impl Traced {
    /// Starts `softrdma run`, whose program is killed when it enters or leaves system calls for the
    /// `at`th time.
    pub(crate) fn start(mut command: Command, at: u64) -> Self {
        let (tell, told) = channel();
        let tracer = std::thread::spawn(move || {
            let mut child = spawn(command.stderr(Stdio::inherit())).expect("starts");
            tell.send(child.stdout.take().expect("is piped")).expect("waits for it");
            let stops = trace(child.id().cast_signed(), at);
            // The tracer has waited for it.
            let _no_child = child.wait();
            stops
        });
        Self { lines: Lines::new(told.recv().expect("starts")), tracer }
    }

    /// Returns the rest of the next line with this prefix, unless the program ends before.
    pub(crate) fn line(&mut self, prefix: &str) -> Option<String> {
        self.lines.after(prefix)
    }

    /// Waits for its end. Returns how often it stopped at system calls.
    pub(crate) fn ended(mut self) -> u64 {
        self.lines.rest();
        self.tracer.join().expect("it was traced")
    }
}

/// Lets a tracee go on to its next stop. One that was killed is gone.
fn resume(request: c_uint, thread: pid_t, signal: c_int) {
    // SAFETY: ptrace(2): the two requests for which this is called take a signal, and no memory.
    unsafe { libc::ptrace(request, thread, 0, signal) };
}

fn trace(program: pid_t, at: u64) -> u64 {
    const OPTIONS: c_int = libc::PTRACE_O_EXITKILL
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC
        | libc::PTRACE_O_TRACESYSGOOD;
    let (mut execs, mut count) = (0, 0);
    loop {
        let mut status = 0;
        // SAFETY: waitpid(2): a place for the status. It waits for children of this thread alone.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            return count;
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        if execs == 0 {
            // The first stop is that of `softrdma run` itself.
            let options = OPTIONS as usize as *mut c_void;
            // SAFETY: ptrace(2): options, and no memory.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, program, 0, options) };
        }
        if execs == 0 || event == libc::PTRACE_EVENT_EXEC {
            execs += 1;
        }
        // From the second one on, it is the program.
        let request = if execs > 1 { libc::PTRACE_SYSCALL } else { libc::PTRACE_CONT };
        match signal {
            _ if event != 0 || execs < 2 => resume(request, thread, 0),
            signal if signal == libc::SIGTRAP | 0x80 => {
                count += 1;
                if count == at {
                    // SAFETY: kill(2): a process that was not waited for yet.
                    unsafe { libc::kill(program, libc::SIGKILL) };
                }
                resume(request, thread, 0);
            }
            // How a new thread begins.
            libc::SIGSTOP => resume(request, thread, 0),
            signal => resume(request, thread, signal),
        }
    }
}
