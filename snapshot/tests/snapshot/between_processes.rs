//! `valkey-rdma-sync` between processes: three Valkeys, each with a program of its own. The third
//! pulls from the second.
//!
//! The programs share the RDMA device whose address `LAB_IP4` names (a step of `lab/run test`).
//! Without it, `softrdma run` gives each a device, and so a machine, of its own. Skipped, with a
//! message, without `softrdma` or `valkey-server`; with `REQUIRE_RDMA=1` that is a failure.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::compression::{NEVER, Scene, moment, stops};
use crate::history;
use crate::keys::{assert_equal, fill};
use crate::server::Valkey;
use redis::cmd;
use rustix::process::{Pid, Signal, kill_process};

/// The source of RDMA.
enum Device {
    /// An existing device, at this address.
    Here(IpAddr),
    /// This program creates one for each process.
    Softrdma(PathBuf),
}

impl Device {
    /// Returns the device at `LAB_IP4`, or else the program that `SOFTRDMA` names or that was built
    /// beside this crate's.
    fn find() -> Option<Self> {
        if let Ok(address) = std::env::var("LAB_IP4") {
            return Some(Self::Here(address.parse().expect("an address")));
        }
        let named = std::env::var_os("SOFTRDMA").map(PathBuf::from);
        let beside = Path::new(env!("CARGO_BIN_EXE_valkey-rdma-sync")).with_file_name("softrdma");
        let found = named.into_iter().chain([beside]).find(|path| path.is_file());
        if found.is_none() {
            skipped("there is no softrdma; `cargo build -p softrdma` makes one, or SOFTRDMA may name it");
        }
        found.map(Self::Softrdma)
    }
}

fn skipped(why: &str) {
    assert!(std::env::var_os("REQUIRE_RDMA").is_none_or(|value| value != "1"), "{why}");
    println!("skipped: {why}");
}

/// The source and two targets.
fn valkeys() -> Option<[Valkey; 3]> {
    let three = [(); 3].map(|()| Valkey::start());
    if three.iter().any(Option::is_none) {
        skipped("there is no valkey-server");
    }
    let [source, first, second] = three;
    Some([source?, first?, second?])
}

/// Programs that reach each other, and their secret.
struct Fabric {
    device: Device,
    folder: PathBuf,
    /// The folder of the programs' state, if not the default.
    state: Option<PathBuf>,
}

/// A program on it.
struct Program {
    name: &'static str,
    child: Child,
    said: BufReader<std::process::ChildStderr>,
    told: PathBuf,
}

impl Fabric {
    fn new(device: Device, name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("rdma-snapshot-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("secret"), "a secret\n").expect("a file");
        Self { device, folder, state: None }
    }

    /// Returns the address that a program of this number listens on.
    fn address(&self, number: u8) -> SocketAddr {
        match &self.device {
            Device::Here(address) => SocketAddr::new(*address, 7400 + u16::from(number)),
            Device::Softrdma(_) => SocketAddr::from(([192, 0, 2, number], 7400)),
        }
    }

    /// Runs `valkey-rdma-sync` as the program of this number.
    fn sync(&self, name: &'static str, number: u8, arguments: &[&str]) -> Program {
        let sync = env!("CARGO_BIN_EXE_valkey-rdma-sync");
        let mut command = match &self.device {
            Device::Here(_) => Command::new(sync),
            Device::Softrdma(softrdma) => {
                let mut command = Command::new(softrdma);
                let address = self.address(number).ip().to_string();
                command.args(["run", "--address", &address, "--", sync]);
                command.env("XDG_RUNTIME_DIR", &self.folder);
                command
            }
        };
        let told = self.folder.join(format!("{name}.json"));
        let mut child = command
            .env("XDG_STATE_HOME", self.state.as_deref().unwrap_or(&self.folder))
            .args(arguments)
            .arg("--secret-file")
            .arg(self.folder.join("secret"))
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(File::create(&told).expect("a file"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let said = BufReader::new(child.stderr.take().expect("is piped"));
        Program { name, child, said, told }
    }

    /// Publishes `source` until one replica has everything.
    fn publish(&self, source: &Valkey, follow: bool) -> Program {
        let (bind, from) = (self.address(1).to_string(), source.url());
        let mut publish = vec!["publish", "--bind", &bind, "--readers", "1", "--from", &from];
        publish.extend(follow.then_some("--follow"));
        let mut publisher = self.sync("publisher", 1, &publish);
        publisher.says("publishing on");
        publisher
    }

    /// Publishes `source` for one replica, which hands it on to another. Returns the publisher's
    /// program and both others.
    fn chain(&self, [source, first, second]: &[Valkey; 3], follow: bool) -> (Program, [Program; 2]) {
        let [origin, between] = [1, 2].map(|number| self.address(number).to_string());
        let publisher = self.publish(source, follow);
        let into = first.url();
        let middle = ["pull", &origin, "--into", &into, "--republish", &between];
        let mut middle = self.sync("middle", 2, &middle);
        // It listens before it reports. A reader that comes earlier finds no listener, and goes to
        // the source's publisher, which ends after serving one.
        middle.tells("running");
        let into = second.url();
        let last = ["pull", &between, &origin, "--into", &into, "--attempts", "100"];
        (publisher, [middle, self.sync("last", 3, &last)])
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.folder);
    }
}

impl Program {
    /// Waits until it prints `what`.
    fn says(&mut self, what: &str) {
        let mut all = String::new();
        while !all.contains(what) {
            let count = self.said.read_line(&mut all).expect("text");
            assert!(count > 0, "{} ended without {what:?}: {all}", self.name);
        }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits until it reports `what` in JSON.
    fn tells(&mut self, what: &str) {
        while !std::fs::read_to_string(&self.told).expect("text").contains(what) {
            assert!(self.is_running(), "{} ended without {what}", self.name);
            std::thread::yield_now();
        }
    }

    /// Waits at most ten minutes for its end. Returns whether it succeeded, and its output, which
    /// is less than a pipe holds.
    fn ended(&mut self) -> (bool, String) {
        let by = Instant::now() + Duration::from_secs(600);
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            assert!(Instant::now() < by, "{} does not end", self.name);
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut said = String::new();
        self.said.read_to_string(&mut said).expect("text");
        let told = std::fs::read_to_string(&self.told).expect("text");
        println!("{}: {}", self.name, told.lines().last().unwrap_or_default());
        (status.success(), format!("{}: {status}: {told}{said}", self.name))
    }

    /// Waits for its successful end.
    fn ends(mut self) {
        let (is_right, said) = self.ended();
        assert!(is_right, "{said}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// A live Valkey into a second one, and from there into a third: equal by `DEBUG DIGEST` and by
/// every key's `DUMP`.
#[test]
fn a_chain_of_valkeys_is_built_between_processes() {
    let Some(device) = Device::find() else { return };
    let Some(valkeys) = valkeys() else { return };
    let [source, first, second] = &valkeys;
    fill(&mut source.connect(), 64 << 20);
    let fabric = Fabric::new(device, "processes");
    let (publisher, replicas) = fabric.chain(&valkeys, false);
    replicas.into_iter().for_each(Program::ends);
    publisher.ends();
    for replica in [first, second] {
        assert_equal(&mut source.connect(), &mut replica.connect());
        let answer: i64 =
            cmd("FCALL").arg("answer").arg(0).query(&mut replica.connect()).expect("a function");
        assert_eq!(answer, 42);
    }
}

/// During 100,000 writes, both replicas of a chain are at every moment prefixes of the source's
/// history. At the end, which the operator requests by SIGINT, they are equal to the source.
#[test]
fn a_chain_catches_up_with_a_source_that_is_written_to() {
    let Some(device) = Device::find() else { return };
    let Some(valkeys) = valkeys() else { return };
    let [source, first, second] = &valkeys;
    fill(&mut source.connect(), 1 << 20);
    let fabric = Fabric::new(device, "history");
    let (publisher, mut replicas) = fabric.chain(&valkeys, true);
    let operator = Pid::from_child(&publisher.child);
    history::unfold(
        source.connect(),
        [first, second].map(Valkey::connect),
        || replicas.iter_mut().any(Program::is_running),
        move || kill_process(operator, Signal::INT).expect("it runs until it is told to end"),
    );
    replicas.into_iter().for_each(Program::ends);
    publisher.ends();
    for replica in [first, second] {
        assert_equal(&mut source.connect(), &mut replica.connect());
    }
}

/// VS-READ-003: a replica whose publisher, another replica, is killed continues at the first
/// publisher, where it was.
#[test]
fn a_replica_goes_on_when_the_one_before_it_is_killed() {
    let Some(device) = Device::find() else { return };
    let Some(valkeys) = valkeys() else { return };
    let [source, _, second] = &valkeys;
    fill(&mut source.connect(), 1 << 20);
    let fabric = Fabric::new(device, "killed");
    let (publisher, [mut middle, mut last]) = fabric.chain(&valkeys, true);
    last.tells("\"snapshot_complete\":true");
    middle.child.kill().expect("it runs");
    middle.child.wait().expect("a child");
    cmd("SET").arg("written").arg("meanwhile").exec(&mut source.connect()).expect("written");
    kill_process(Pid::from_child(&publisher.child), Signal::INT).expect("it runs");
    last.ends();
    publisher.ends();
    assert_equal(&mut source.connect(), &mut second.connect());
}

/// A signal at any moment, and the next publication after SIGKILL, leave the source's
/// `rdbcompression` as it was.
#[test]
fn a_publisher_that_ends_leaves_the_source_as_it_was() {
    let Some(device) = Device::find() else { return };
    let Some(scene) = Scene::new() else { return skipped("there is no valkey-server") };
    let mut fabric = Fabric::new(device, "compression");
    fabric.state = Some(scene.valkey.folder.clone());
    let (bind, from) = (fabric.address(1).to_string(), scene.valkey.url());
    let publish = |also: &[&str]| {
        let publish = ["publish", "--bind", &bind, "--from", &from];
        fabric.sync("publisher", 1, &[&publish[..], also].concat())
    };
    scene.set("repl-diskless-sync-delay", NEVER);
    for also in [&[][..], &["--follow"]] {
        let mut publisher = publish(also);
        scene.until_replicas_wait(1);
        kill_process(Pid::from_child(&publisher.child), Signal::INT).expect("it waits");
        let (is_right, said) = publisher.ended();
        assert!(!is_right && said.contains("stopped before it was complete"), "{said}");
        scene.is_as_it_was();
    }
    for also in [&[][..], &["--keep-compression"]] {
        let mut publisher = publish(&[]);
        scene.until_replicas_wait(1);
        publisher.child.kill().expect("it waits");
        publisher.child.wait().expect("dead");
        assert!(!scene.is_on() && scene.notes() == 1);
        scene.set("repl-diskless-sync-delay", "0");
        publish(also).says("publishing on");
        scene.is_as_it_was();
        scene.set("repl-diskless-sync-delay", NEVER);
    }
    scene.set("repl-diskless-sync-delay", "0");
    for _ in 0..stops() {
        let mut publisher = publish(&[]);
        std::thread::sleep(moment() * 4);
        // Not SIGINT: a shell's background job ignores it until the program asks for it.
        kill_process(Pid::from_child(&publisher.child), Signal::TERM).expect("it runs");
        // It may not have begun, or may already be ending.
        let _ended = publisher.ended();
        scene.is_as_it_was();
    }
}
