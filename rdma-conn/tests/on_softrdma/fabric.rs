//! Runs programs on a fabric of the test's own.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

/// How long any step may take on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The addresses of two machines.
pub(crate) const SERVER: &str = "192.0.2.1";
pub(crate) const CLIENT: &str = "192.0.2.2";

/// A directory for a fabric, removed with it.
pub(crate) struct Home {
    path: PathBuf,
    softrdma: PathBuf,
}

impl Home {
    /// Prints a reason and returns `None` if there is no softrdma beside this test.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let own = std::env::current_exe().expect("this test");
        let softrdma = own.ancestors().nth(2).expect("a folder of Cargo's").join("softrdma");
        if !softrdma.is_file() {
            println!("skipped: there is no softrdma; `cargo build -p softrdma` makes one");
            return None;
        }
        let path = std::env::temp_dir().join(format!("rdma-conn-test-{name}-{}", std::process::id()));
        let _old = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Some(Self { path, softrdma })
    }

    /// Starts a test of this binary as a program on a machine of the fabric ([`role`]).
    pub(crate) fn program(&self, address: &str, role: &str, argument: &str) -> Running {
        let mut command = Command::new(&self.softrdma);
        command.args(["run", "--address", address, "--"]).arg(std::env::current_exe().expect("this test"));
        command.args(["--exact", role, "--nocapture"]).env("XDG_RUNTIME_DIR", &self.path);
        command.env("TEST_ROLE", role).env("TEST_ARGUMENT", argument);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("starts");
        let lines = child.stdout.take().map(BufReader::new).expect("is piped");
        Running { child, lines }
    }

    /// Waits until the fabric has ended, as it does with its last program.
    pub(crate) fn is_left(&self) {
        let socket = self.path.join("softrdma/default/socket");
        await_some("the fabric's end", || (!socket.exists()).then_some(()));
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.path);
    }
}

/// Repeats `attempt` until it has a result.
pub(crate) fn await_some<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the argument of a test that [`Home::program`] runs.
pub(crate) fn role(name: &str) -> Option<String> {
    if std::env::var("TEST_ROLE").ok().as_deref() != Some(name) {
        println!("skipped: not a test but a program that others run");
        return None;
    }
    Some(std::env::var("TEST_ARGUMENT").unwrap_or_default())
}

/// A running program, killed with the test.
pub(crate) struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    /// Returns the rest of the next line with this prefix.
    pub(crate) fn line(&mut self, prefix: &str) -> String {
        let (what, deadline) = (format!("a line {prefix:?}"), Instant::now() + PATIENCE);
        loop {
            let line = self.next(&what, deadline);
            let line = line.unwrap_or_else(|| panic!("it ended without {what}"));
            if let Some((_, rest)) = line.split_once(prefix) {
                return rest.trim().into();
            }
        }
    }

    /// Returns the next line, unless the program ends before.
    fn next(&mut self, what: &str, deadline: Instant) -> Option<String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            if self.lines.buffer().is_empty() {
                let mut fds = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
                let ready = retry_on_intr(|| {
                    let left = deadline.saturating_duration_since(Instant::now());
                    poll(&mut fds, Some(&left.try_into().expect("a limit")))
                });
                assert_eq!(ready, Ok(1), "{what} did not come");
            }
            let bytes = self.lines.fill_buf().expect("bytes");
            let len = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
            if len == 0 {
                break;
            }
            line.extend(&bytes[..len]);
            self.lines.consume(len);
        }
        (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned())
    }

    /// Waits for its end. Returns whether it succeeded, and its output.
    pub(crate) fn finish(mut self) -> (bool, String) {
        let (mut text, deadline) = (String::new(), Instant::now() + PATIENCE);
        // First, as the output may be more than a pipe holds.
        while let Some(line) = self.next("the end of its output", deadline) {
            text += &line;
        }
        let status = await_some("a program's end", || self.child.try_wait().expect("a child"));
        (status.success(), text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}
