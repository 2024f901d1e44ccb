//! Targets that are processes: started here, or running elsewhere.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use intercept::Frozen;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::keep::IDLE;
use super::target::{Exit, Running, TargetClients, TargetServer};
use crate::resources::ProcessResources;

/// The exit status of a client that cannot do what a case needs, as in BoringSSL's runner.
const UNSUPPORTED: i32 = 89;
/// The most bytes kept of a process's output.
const LAST_BYTES: usize = 300;
/// How long a signal may take to stop a process.
const STOPPING: Duration = Duration::from_secs(10);

struct Process {
    child: Child,
    ended: Option<ExitStatus>,
    /// The end of its output so far, on stdout and stderr.
    lines: Arc<Mutex<Vec<u8>>>,
    /// Reads the output until its end, so that the process is never blocked.
    listener: JoinHandle<()>,
}

impl Process {
    /// Runs a command in which `{host}` and `{port}` stand for an address.
    fn start(command: &str, address: SocketAddr, case: &str) -> Result<Self, String> {
        let command = command
            .replace("{host}", &address.ip().to_string())
            .replace("{port}", &address.port().to_string());
        let told = |error| format!("`{command}` does not start: {error}");
        let (printed, out) = std::io::pipe().map_err(told)?;
        let error = out.try_clone().map_err(told)?;
        let child = Command::new("sh")
            // Without a shell in between, whose end would hide how the program ended.
            .args(["-c", &format!("exec {command}")])
            .env("CONFORMANCE_CASE", case)
            // An idle client waits for the end of its stdin.
            .stdin(if case == IDLE { Stdio::piped() } else { Stdio::null() })
            .stdout(out)
            .stderr(error)
            .spawn()
            .map_err(told)?;
        let lines = Arc::default();
        let listener = {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || listen(printed, &lines))
        };
        Ok(Self { child, ended: None, lines, listener })
    }

    fn ended(&mut self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        while self.ended.is_none() {
            // The only error would be a missing process, which is impossible.
            self.ended = self.child.try_wait().ok().flatten();
            if self.ended.is_none() {
                if Instant::now() >= deadline {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.ended
    }

    /// Stops the process and its descendants, which may be what the command is about, until the
    /// result is dropped. `None` if they do not stand still in time.
    fn freeze(&self) -> Option<Frozen> {
        let mut frozen = Vec::new();
        let mut found = vec![self.child.id()];
        let deadline = Instant::now() + STOPPING;
        // Each stands still before its children are looked for: it starts no other.
        while let Some(id) = found.pop() {
            let pid = Pid::from_raw(id.try_into().ok()?)?;
            match kill_process(pid, Signal::STOP) {
                Ok(()) => {}
                // A descendant has ended.
                Err(Errno::SRCH) => continue,
                Err(_) => return None,
            }
            frozen.push(Frozen::new(move || {
                let _going = kill_process(pid, Signal::CONT);
            }));
            while !has_stopped(id) {
                if Instant::now() >= deadline {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            found.extend(children(id));
        }
        Some(Frozen::new(move || frozen.clear()))
    }

    fn told(&self, status: ExitStatus) -> String {
        let deadline = Instant::now() + Duration::from_millis(200);
        // A child process may hold the pipe open forever.
        while !self.listener.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let lines = self.last_lines();
        if lines.is_empty() { status.to_string() } else { format!("{status}: {lines}") }
    }

    fn last_lines(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&lines).trim().to_string()
    }
}

/// Returns the processes that a process has started, and that run (`proc_pid_task(5)`).
fn children(id: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten() {
        let ids = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        all.extend(ids.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
    }
    all
}

/// Returns whether every thread of a process has stopped, or the process has ended.
fn has_stopped(id: u32) -> bool {
    let state = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).ok()?;
        // Behind the name, which may contain anything.
        stat.rsplit(')').next()?.split_whitespace().next().map(str::to_string)
    };
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    threads.filter_map(state).all(|state| ["T", "Z", "X"].contains(&&*state))
}

fn listen(mut output: impl Read, lines: &Mutex<Vec<u8>>) {
    let mut chunk = [0; 4096];
    while let Ok(read @ 1..) = output.read(&mut chunk) {
        let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.extend_from_slice(&chunk[..read]);
        let excess = lines.len().saturating_sub(LAST_BYTES);
        lines.drain(..excess);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended(Duration::ZERO).is_none() {
            // It may be ending by itself.
            let _ended = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}

/// A client under test, started for each case.
pub struct ExecClients {
    /// The shell command.
    pub command: String,
    /// The number of connections that it makes before the tested one.
    pub first: u32,
}

impl TargetClients for ExecClients {
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        Ok(Box::new(ExecClient { process: Process::start(&self.command, address, case)?, exit: None }))
    }

    fn first(&self) -> u32 {
        self.first
    }
}

struct ExecClient {
    process: Process,
    exit: Option<Exit>,
}

impl Running for ExecClient {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        if self.exit.is_none() {
            let status = self.process.ended(patience)?;
            let told = self.process.told(status);
            self.exit = Some(match (status.code(), status.signal()) {
                (Some(0), _) => Exit::Success,
                (Some(UNSUPPORTED), _) => Exit::Unsupported,
                // A shell reports a signal like this.
                (Some(code), _) if code > 128 => Exit::Crashed(told),
                (Some(_), _) => Exit::Failure(told),
                (None, _) => Exit::Crashed(told),
            });
        }
        self.exit.clone()
    }

    fn go_on(&mut self) {
        drop(self.process.child.stdin.take());
    }

    fn freeze(&self) -> Option<Frozen> {
        self.process.freeze()
    }

    fn last_lines(&self) -> String {
        self.process.last_lines()
    }
}

/// A client under test that another program starts repeatedly.
pub struct AwaitedClients;

impl TargetClients for AwaitedClients {
    fn start(&self, _: &str, _: SocketAddr) -> Result<Box<dyn Running>, String> {
        Ok(Box::new(AwaitedClient))
    }
}

struct AwaitedClient;

impl Running for AwaitedClient {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        // Time for its work before it comes again.
        std::thread::sleep(patience.min(Duration::from_millis(50)));
        None
    }

    fn is_observed(&self) -> bool {
        false
    }
}

/// A running server under test.
pub struct RunningServer {
    /// Where it listens.
    pub address: SocketAddr,
}

impl TargetServer for RunningServer {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn death(&self, _: Duration) -> Option<String> {
        None
    }

    fn restart(&self) -> Result<bool, String> {
        Ok(false)
    }

    fn held(&self) -> Option<ProcessResources> {
        None
    }

    fn processor_time(&self) -> Option<Duration> {
        None
    }
}

/// A server under test that is started here, and restarted when it has ended.
pub struct ExecServer {
    command: String,
    ip: IpAddr,
    /// A port that was just in use may not be free yet.
    port: Cell<u16>,
    process: RefCell<Process>,
}

impl ExecServer {
    /// Starts it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(command: String, ip: IpAddr, port: u16) -> Result<Self, String> {
        let process = Process::start(&command, SocketAddr::new(ip, port), "")?;
        Ok(Self { command, ip, port: Cell::new(port), process: RefCell::new(process) })
    }

    fn pid(&self) -> u32 {
        self.process.borrow().child.id()
    }
}

impl TargetServer for ExecServer {
    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.get())
    }

    fn death(&self, patience: Duration) -> Option<String> {
        let mut process = self.process.borrow_mut();
        let status = process.ended(patience)?;
        Some(process.told(status))
    }

    fn last_lines(&self) -> String {
        self.process.borrow().last_lines()
    }

    fn freeze(&self) -> Option<Frozen> {
        self.process.borrow().freeze()
    }

    fn restart(&self) -> Result<bool, String> {
        // Two numbers further: a server may use the next port, too.
        self.port.set(self.port.get().checked_add(2).ok_or("no ports are left to start it on")?);
        self.process.replace(Process::start(&self.command, self.address(), "")?);
        Ok(true)
    }

    fn held(&self) -> Option<ProcessResources> {
        ProcessResources::of_process(self.pid())
    }

    fn processor_time(&self) -> Option<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?;
        // Behind the name, which may contain anything, state is the third field, utime and stime
        // the 14th and 15th, in ticks, of which Linux always counts 100 a second.
        let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
        let ticks = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let ticks = ticks(14)?.checked_add(ticks(15)?)?;
        Some(Duration::from_millis(10 * ticks))
    }
}
