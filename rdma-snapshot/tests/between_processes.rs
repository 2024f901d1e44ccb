//! `valkey-rdma-sync` between processes: three Valkeys, each with a program of its own that has a device by `softrdma run`, the third
//! behind the second. Skipped, and said so, where there is no `softrdma` or no `valkey-server`.

#[path = "support/keys.rs"]
mod keys;
#[path = "support/server.rs"]
mod server;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use keys::{assert_equal, fill};
use redis::cmd;
use server::Valkey;

/// The program that `SOFTRDMA` names, or that was built beside this crate's.
fn softrdma() -> Option<PathBuf> {
    let named = std::env::var_os("SOFTRDMA").map(PathBuf::from);
    let beside = Path::new(env!("CARGO_BIN_EXE_valkey-rdma-sync")).with_file_name("softrdma");
    let found = named.into_iter().chain([beside]).find(|path| path.is_file());
    if found.is_none() {
        println!(
            "skipped: there is no softrdma; `cargo build -p softrdma` makes one, or SOFTRDMA may name it"
        );
    }
    found
}

/// A fabric of the test's own, and a secret for those on it.
struct Fabric {
    softrdma: PathBuf,
    folder: PathBuf,
}

/// A program on it.
struct Program {
    child: Child,
    said: BufReader<std::process::ChildStderr>,
}

impl Fabric {
    fn new(softrdma: PathBuf, name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("rdma-snapshot-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("secret"), "a secret\n").expect("a file");
        Self { softrdma, folder }
    }

    /// `valkey-rdma-sync` on the machine with this address.
    fn sync(&self, address: &str, arguments: &[&str]) -> Program {
        let mut child = Command::new(&self.softrdma)
            .args(["run", "--address", address, "--", env!("CARGO_BIN_EXE_valkey-rdma-sync")])
            .args(arguments)
            .arg("--secret-file")
            .arg(self.folder.join("secret"))
            .arg("--json")
            .env("XDG_RUNTIME_DIR", &self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("softrdma runs");
        let said = BufReader::new(child.stderr.take().expect("is piped"));
        Program { child, said }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.folder);
    }
}

impl Program {
    /// Waits until it says so.
    fn says(&mut self, what: &str) {
        let mut all = String::new();
        while !all.contains(what) {
            let count = self.said.read_line(&mut all).expect("text");
            assert!(count > 0, "it ended without {what:?}: {all}");
        }
    }

    /// Waits for its end, which is a right one.
    fn ends(mut self) {
        let (mut told, mut said) = (String::new(), String::new());
        self.child.stdout.take().expect("is piped").read_to_string(&mut told).expect("text");
        self.said.read_to_string(&mut said).expect("text");
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "{status}: {told}{said}");
        println!("{}", told.lines().last().unwrap_or_default());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// A live Valkey into a second one, and from there into a third: equal by `DEBUG DIGEST` and by every key's `DUMP`.
#[test]
fn a_chain_of_valkeys_is_built_between_processes() {
    let Some(softrdma) = softrdma() else { return };
    let (Some(source), Some(first), Some(second)) = (Valkey::start(), Valkey::start(), Valkey::start())
    else {
        return;
    };
    fill(&mut source.connect());
    let fabric = Fabric::new(softrdma, "processes");
    let mut publisher = fabric.sync(
        "192.0.2.1",
        &["publish", "--bind", "192.0.2.1:7400", "--from", &source.url(), "--readers", "1"],
    );
    publisher.says("publishing on");
    let middle =
        ["pull", "192.0.2.1:7400", "--into", &first.url(), "--verify", "--republish", "192.0.2.2:7400"];
    let middle = fabric.sync("192.0.2.2", &middle);
    let last = ["pull", "192.0.2.2:7400", "--into", &second.url(), "--verify", "--attempts", "100"];
    let last = fabric.sync("192.0.2.3", &last);
    last.ends();
    middle.ends();
    publisher.ends();
    for replica in [&first, &second] {
        assert_equal(&mut source.connect(), &mut replica.connect());
        let answer: i64 =
            cmd("FCALL").arg("answer").arg(0).query(&mut replica.connect()).expect("a function");
        assert_eq!(answer, 42);
    }
}
