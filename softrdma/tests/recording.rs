//! Opens recordings of a fabric in tshark. What is not installed is skipped.

mod common;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Home, Running, await_some, installed, pinged, served, succeeded, valkey};

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";

/// Returns the command for a program at the server's address, on a fabric that records.
fn recorded(home: &Home, file: &Path, options: &[&str], program: &[&str]) -> Command {
    let file = file.to_str().expect("a path in UTF-8");
    let mut command = home.softrdma(&["run", "--address", SERVER, "--record", file]);
    command.args(options).arg("--").args(program).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// Returns tshark's output for a recording, a line for each packet, with Valkey's dissector; `None`
/// if tshark is not installed.
fn tshark(file: &Path, arguments: &[&str]) -> Option<String> {
    installed("tshark")?;
    let dissector = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../spec/wireshark/valkey-rdma.lua"));
    let output = Command::new("tshark")
        .arg("-r")
        .arg(file)
        .args(["-X", &format!("lua_script:{}", dissector.display())])
        .args(arguments)
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("Lua"), "{said}");
    Some(succeeded(&output))
}

const INFO: [&str; 4] = ["-T", "fields", "-e", "_ws.col.Info"];
const WRONG: [&str; 2] = ["-Y", "_ws.malformed || valkey_rdma.outside"];

/// Records Valkey's own programs, with a key that is longer than a packet and than a window's rest,
/// there and back.
#[test]
fn valkey_is_recorded() {
    let (Some(server), Some(client)) = (valkey("valkey-server"), valkey("valkey-cli")) else { return };
    let home = Home::new("recording-valkey");
    let file = home.path().join("run.pcapng");
    let options = ["--rdma-bind", SERVER, "--rdma-port", "6379", "--port", "0", "--save", ""];
    let arguments = [&[server.as_str()], &options[..], &["--protected-mode", "no"]].concat();
    let mut serving = Running::start(&mut recorded(&home, &file, &[], &arguments));
    serving.line("Ready to accept connections rdma");
    let talk = |command: &[&str]| {
        let to = [client.as_str(), "--rdma", "-h", SERVER, "-p", "6379"];
        succeeded(&home.run(CLIENT, &[&to, command].concat()).output().expect("runs"))
    };
    assert_eq!(talk(&["SETRANGE", "key", "9999", "x"]).trim(), "10000");
    assert_eq!(talk(&["GET", "key"]).len(), 10_001);
    // A fabric makes one recording.
    let second = home.path().join("second.pcapng");
    let refused = recorded(&home, &second, &[], &["true"]).stderr(Stdio::piped()).output().expect("runs");
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("second.pcapng") && said.contains("busy"), "{said}");
    drop(serving);
    home.is_left();
    let Some(page) = tshark(&file, &INFO) else { return };
    let lines = |what: &str| page.lines().filter(|line| line.contains(what)).count();
    // Each connection has a registration by either side. The server's window has 1 MiB, and so has
    // libvalkey's.
    assert_eq!(lines("RegisterXferMemory 1048576 bytes at 0x"), 4, "{page}");
    // The reply has its length in front and a line's end behind it, in packets of 4096.
    assert_eq!(lines("imm 10010"), 1, "{page}");
    assert!(lines("Acknowledge") > 0, "{page}");
    assert_eq!(tshark(&file, &WRONG).as_deref(), Some(""));
}

/// Records READs, with which `rping` reads its peer's memory, and their answers; on devices of
/// another kind, with a latency.
#[test]
fn rping_is_recorded() {
    if installed("rping").is_none() {
        return;
    }
    let home = Home::new("recording-rping");
    let file = home.path().join("run.pcapng");
    let options = ["--latency", "200", "--device-kind", "mlx5"];
    let serving =
        Running::start(&mut recorded(&home, &file, &options, &["rping", "-s", "-a", SERVER, "-C", "3"]));
    let client = ["rping", "-c", "-a", SERVER, "-C", "3", "-V", "-v"];
    served(&home, serving, || home.run(CLIENT, &client), pinged(3));
    let Some(page) = tshark(&file, &INFO) else { return };
    let lines = |what: &str| page.lines().filter(|line| line.contains(what)).count();
    assert_eq!(lines("RDMA Read Request"), 3, "{page}");
    assert_eq!(lines("RDMA Read Response Only"), 3, "{page}");
    assert_eq!(lines("RDMA Write Only"), 3, "{page}");
    // SENDs of rping are not control messages of Valkey.
    let wrong = ["-Y", "_ws.malformed && !valkey_rdma.length_wrong"];
    assert_eq!(tshark(&file, &wrong).as_deref(), Some(""));
    // Sequence numbers of each queue pair continue from 0, and an answer has its message's number.
    let fields = ["-T", "fields", "-e", "infiniband.bth.destqp", "-e", "infiniband.bth.opcode"];
    let numbers = tshark(&file, &[&fields[..], &["-e", "infiniband.bth.psn", "-Y", "infiniband"]].concat());
    let mut next = std::collections::BTreeMap::new();
    for line in numbers.expect("tshark is there").lines() {
        let mut fields = line.split('\t');
        let (pair, opcode, number) = (fields.next(), fields.next(), fields.next());
        let (opcode, number): (u8, u32) = match (opcode, number) {
            (Some(opcode), Some(number)) => (opcode.parse().expect(line), number.parse().expect(line)),
            _ => panic!("{line}"),
        };
        if opcode < 13 {
            let expected = next.entry(pair.map(str::to_owned)).or_insert(0);
            assert_eq!(number, *expected, "{line}");
            *expected += 1;
        }
    }
    assert_eq!(next.len(), 2);
}

/// The class that a client sets applies to both directions, and to no other connection.
#[test]
fn a_traffic_class_is_on_every_packet() {
    if installed("ucmatose").is_none() {
        return;
    }
    for (name, set, class) in [("classed", &["-t", "104"][..], 104), ("unclassed", &[], 0)] {
        let home = Home::new(&format!("recording-{name}"));
        let file = home.path().join("run.pcapng");
        let serving = Running::start(&mut recorded(&home, &file, &[], &["ucmatose"]));
        let client = [&["ucmatose", "-s", SERVER][..], set].concat();
        served(&home, serving, || home.run(CLIENT, &client), |succeeded, _| succeeded);
        let recording = std::fs::read(&file).expect("a recording");
        // Ethernet's type of IPv4, its version and length, and the class.
        let classes: Vec<u8> = recording
            .windows(4)
            .filter_map(|bytes| if let [8, 0, 0x45, class] = bytes { Some(*class) } else { None })
            .collect();
        assert!(classes.len() >= 40, "{} packets", classes.len());
        assert!(classes.iter().all(|found| *found == class), "{classes:?}");
    }
}

/// A refused recording leaves its file unchanged, as it may be the one that is being written.
#[test]
fn a_recording_that_is_refused_leaves_its_file_as_it_is() {
    let home = Home::new("recording-refused");
    let file = home.path().join("run.pcapng");
    let mut recorded_program = recorded(&home, &file, &[], &["cat"]);
    let _serving = Running::start(recorded_program.stdin(Stdio::piped()));
    let content = || std::fs::read(&file).ok().filter(|content| !content.is_empty());
    await_some("the file's head", content);
    // These bytes stand for frames, which a program with a connection would have caused.
    let append = std::fs::OpenOptions::new().append(true).open(&file);
    append.and_then(|mut end| end.write_all(b"frames")).expect("a file");
    let before = content();
    let refused = recorded(&home, &file, &[], &["true"]).stderr(Stdio::piped()).output().expect("runs");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("busy"), "{said}");
    assert_eq!(content(), before);
}
