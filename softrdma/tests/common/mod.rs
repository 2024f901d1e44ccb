//! Runs programs on a fabric of the test's own.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal};

/// How long any step may take on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The addresses of two machines.
pub(crate) const SERVER: &str = "192.0.2.1";
pub(crate) const CLIENT: &str = "192.0.2.2";

/// A directory for a fabric, removed with it.
pub(crate) struct Home {
    path: PathBuf,
}

impl Home {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("softrdma-test-{name}-{}", std::process::id()));
        let _old = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join("softrdma/default/socket")
    }

    /// Returns the command `softrdma` with these arguments.
    pub(crate) fn softrdma(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_softrdma"));
        command.args(arguments).env("XDG_RUNTIME_DIR", &self.path).stdin(Stdio::null());
        command
    }

    /// Returns the command for a program at `address`.
    pub(crate) fn run(&self, address: &str, program: &[&str]) -> Command {
        let mut command = self.softrdma(&["run", "--address", address, "--"]);
        command.args(program).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Waits until the fabric has ended, as it does with its last program.
    pub(crate) fn is_left(&self) {
        await_some("the fabric's end", || (!self.socket().exists()).then_some(()));
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

/// Runs a client until it succeeds with a server, and returns what it printed.
///
/// `done` decides by the client's success and output. The client is run again while the server does
/// not listen yet. Then the server and the fabric end.
pub(crate) fn served(
    home: &Home,
    mut server: Running,
    mut client: impl FnMut() -> Command,
    done: impl Fn(bool, &str) -> bool,
) -> String {
    let text = await_some("the client's success", || {
        let (succeeded, said) = Running::start(&mut client()).finish();
        let done = done(succeeded, &said);
        if !done {
            assert!(server.runs(), "the server has served it, and the client failed: {said}");
            println!("again: {said}");
        }
        done.then_some(said)
    });
    let (done, said) = server.finish();
    assert!(done, "{said}");
    home.is_left();
    text
}

/// Runs a server and a client, which is run again until the server listens. `None` if one is not
/// installed.
pub(crate) fn pair(
    name: &str,
    server: &[&str],
    client: &[&str],
    done: impl Fn(bool, &str) -> bool,
) -> Option<String> {
    for program in [server, client] {
        installed(program.first()?)?;
    }
    let home = Home::new(name);
    let server = Running::start(&mut home.run(SERVER, server));
    Some(served(&home, server, || home.run(CLIENT, client), done))
}

/// For [`served`]: the client succeeded.
pub(crate) fn success(succeeded: bool, _said: &str) -> bool {
    succeeded
}

/// For [`served`], of `rping -C count -v`: the client made all its pings.
///
/// Its exit status does not show that. At the end it closes its event channel, on which its own
/// thread may be about to wait, and that thread gets an error (`rdma_get_cm_event(3)`).
pub(crate) fn pinged(count: usize) -> impl Fn(bool, &str) -> bool {
    move |_, said| said.contains(&format!("rdma-ping-{}:", count - 1))
}

/// Returns the command that runs a test of this binary as a program ([`role`]).
pub(crate) fn program(home: &Home, address: &str, role: &str, argument: &str) -> Command {
    let own = std::env::current_exe().expect("this test");
    let own = own.to_str().expect("a path in UTF-8");
    let mut command = home.run(address, &[own, "--exact", role, "--nocapture"]);
    command.env("SOFTRDMA_TEST_ROLE", role).env("SOFTRDMA_TEST_ARGUMENT", argument);
    command
}

/// Returns the argument of a test that [`program`] runs.
pub(crate) fn role(name: &str) -> Option<String> {
    let [role, argument] =
        ["SOFTRDMA_TEST_ROLE", "SOFTRDMA_TEST_ARGUMENT"].map(|name| std::env::var(name).ok());
    if role.as_deref() != Some(name) {
        println!("skipped: not a test but a program that others run");
        return None;
    }
    Some(argument.unwrap_or_default())
}

/// What a program prints. Each wait for it has an end.
pub(crate) struct Lines(BufReader<ChildStdout>);

impl Lines {
    pub(crate) fn new(output: ChildStdout) -> Self {
        Self(BufReader::new(output))
    }

    /// Waits for bytes. There are none if the program has ended.
    fn fill(&mut self, what: &str, deadline: Instant) -> &[u8] {
        if self.0.buffer().is_empty() {
            let mut fds = [PollFd::new(self.0.get_ref(), PollFlags::IN)];
            let ready = retry_on_intr(|| {
                let left = deadline.saturating_duration_since(Instant::now());
                poll(&mut fds, Some(&left.try_into().expect("a limit")))
            });
            assert_eq!(ready, Ok(1), "{what} did not come");
        }
        self.0.fill_buf().expect("bytes")
    }

    /// Returns the next line, unless the program ends before.
    pub(crate) fn next(&mut self, what: &str, deadline: Instant) -> Option<String> {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let bytes = self.fill(what, deadline);
            let len = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1);
            if len == 0 {
                break;
            }
            line.extend(&bytes[..len]);
            self.0.consume(len);
        }
        (!line.is_empty()).then(|| String::from_utf8_lossy(&line).into_owned())
    }

    /// Returns the rest of the next line with this prefix, unless the program ends before.
    pub(crate) fn after(&mut self, prefix: &str) -> Option<String> {
        let (what, deadline) = (format!("a line {prefix:?}"), Instant::now() + PATIENCE);
        loop {
            if let Some((_, rest)) = self.next(&what, deadline)?.split_once(prefix) {
                return Some(rest.trim().into());
            }
        }
    }

    /// Returns what is left, up to the end of the program, or of its last child with this output.
    pub(crate) fn rest(&mut self) -> String {
        let (mut text, deadline) = (String::new(), Instant::now() + PATIENCE);
        while let Some(line) = self.next("the end of its output", deadline) {
            text += &line;
        }
        text
    }
}

/// A running program, killed with the test.
pub(crate) struct Running {
    child: Child,
    lines: Option<Lines>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::inherit()).spawn().expect("starts");
        let lines = child.stdout.take().map(Lines::new);
        Self { child, lines }
    }

    /// Returns the program's standard input.
    pub(crate) fn input(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("is piped")
    }

    /// Returns the rest of the next line with this prefix.
    pub(crate) fn line(&mut self, prefix: &str) -> String {
        self.lines().after(prefix).unwrap_or_else(|| panic!("it ended without a line {prefix:?}"))
    }

    /// Returns the next line, unless the program ends before.
    pub(crate) fn next_line(&mut self) -> Option<String> {
        Some(self.lines().next("a line", Instant::now() + PATIENCE)?.trim_end().into())
    }

    fn lines(&mut self) -> &mut Lines {
        self.lines.as_mut().expect("is piped")
    }

    pub(crate) fn skip(&mut self, bytes: usize) -> Result<(), String> {
        let mut text = Vec::new();
        while text.len() < bytes {
            let some = self.lines().fill("more output", Instant::now() + PATIENCE);
            if some.is_empty() {
                let status = await_some("a program's end", || self.status());
                let (read, end) =
                    (text.len(), String::from_utf8_lossy(&text[text.len().saturating_sub(200)..]));
                return Err(format!("{status} after {read} bytes of {bytes}: {end:?}"));
            }
            let some = &some[..some.len().min(bytes - text.len())];
            let len = some.len();
            text.extend(some);
            self.lines().0.consume(len);
        }
        Ok(())
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.status().is_none()
    }

    /// How it has ended, if it has.
    pub(crate) fn status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child")
    }

    /// Sends it SIGTERM, if it still runs, and waits for its end.
    pub(crate) fn asked_to_end(mut self) -> ExitStatus {
        if self.runs() {
            let pid = Pid::from_child(&self.child);
            rustix::process::kill_process(pid, Signal::TERM).expect("is not waited for yet");
        }
        self.ended().0
    }

    /// Waits for its end. Returns whether it succeeded, and its output.
    pub(crate) fn finish(self) -> (bool, String) {
        let (status, text) = self.ended();
        (status.success(), text)
    }

    /// Waits for its end. Returns its exit status, and its output.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        // First, as the output may be more than a pipe holds.
        let text = self.lines().rest();
        (await_some("a program's end", || self.status()), text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Returns where a program is installed, or prints a reason and returns `None`.
pub(crate) fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|directory| directory.join(program)).find(|path| is_file(path));
    if found.is_none() {
        println!("skipped: {program} is not installed");
    }
    found
}

fn is_file(path: &Path) -> bool {
    path.is_file()
}

/// Returns one of Valkey's programs, or prints a reason and returns `None`.
pub(crate) fn valkey(program: &str) -> Option<String> {
    let cache = || {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        let lab = std::env::var_os("LAB_CACHE").map_or_else(|| cache.join("valkey-rdma-lab"), PathBuf::from);
        Some(lab.join("valkey/bin"))
    };
    let directory = std::env::var_os("VALKEY_BIN").map(PathBuf::from).or_else(cache)?;
    let path = directory.join(program);
    if !path.is_file() {
        println!("skipped: no Valkey with RDMA (VALKEY_BIN, or lab/run setup)");
        return None;
    }
    path.into_os_string().into_string().ok()
}

/// Compiles a C program, or prints a reason and returns `None`.
pub(crate) fn compiled(home: &Home, name: &str) -> Option<String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs");
    let program = home.path().join(name).into_os_string().into_string().expect("a path in UTF-8");
    let compile = |arguments: &[&str]| Command::new("cc").args(arguments).output();
    match compile(&["-fsyntax-only", "-include", "rdma/rdma_cma.h", "-x", "c", "/dev/null"]) {
        Ok(output) if output.status.success() => {}
        _ => {
            println!("skipped: no C compiler, or no rdma-core headers");
            return None;
        }
    }
    let source = format!("{source}/{name}.c");
    let output = compile(&["-Wall", "-o", &program, &source, "-libverbs", "-lrdmacm"]).expect("runs");
    succeeded(&output);
    Some(program)
}

/// Returns the output of a program, which must have succeeded.
pub(crate) fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{:?}: {text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}
