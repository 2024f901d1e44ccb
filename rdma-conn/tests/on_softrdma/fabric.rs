//! Runs programs on a fabric of the test's own.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

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
        Running { child, lines: Some(lines) }
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
    /// Its output; taken when its end is awaited.
    lines: Option<BufReader<ChildStdout>>,
}

impl Running {
    /// Returns the rest of the next line with this prefix.
    pub(crate) fn line(&mut self, prefix: &str) -> String {
        let lines = self.lines.as_mut().expect("is there until the end");
        loop {
            let mut line = String::new();
            assert_ne!(lines.read_line(&mut line).expect("a line"), 0, "no line {prefix:?}");
            if let Some((_, rest)) = line.split_once(prefix) {
                return rest.trim().into();
            }
        }
    }

    /// Waits for its end. Returns whether it succeeded, and its output.
    pub(crate) fn finish(mut self) -> (bool, String) {
        let mut lines = self.lines.take().expect("is there until the end");
        // Read by another thread, as the output may be more than a pipe holds.
        let reading = std::thread::spawn(move || {
            let mut text = Vec::new();
            lines.read_to_end(&mut text).expect("text");
            String::from_utf8_lossy(&text).into_owned()
        });
        let status = await_some("a program's end", || self.child.try_wait().expect("a child"));
        (status.success(), reading.join().expect("text"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}
