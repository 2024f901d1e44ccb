//! Trials that look at the whole process, its descriptors and its processor time. Each has a
//! process of its own. Most of their time is spent waiting, so they run at the same time.

mod own;
mod semantics;
mod wrong;

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use conformance::blackbox;
use rdma_softsim::SoftSim;
use suite::Tag;

/// Runs the program with each of these arguments at once. Each must succeed. Returns the outputs.
fn programs(all: &[Vec<&str>]) -> Vec<String> {
    let started = all.iter().map(|arguments| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-trust"));
        program.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    });
    let started: Vec<_> = started.collect();
    // No child waits for room in its pipe while another is awaited.
    let reading = started.into_iter().map(|child| std::thread::spawn(|| child.wait_with_output().unwrap()));
    let ended: Vec<_> = reading.collect();
    let outputs = all.iter().zip(ended).map(|(arguments, ended)| {
        let output = ended.join().unwrap();
        let [told, said] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status, format!("{arguments:?}: {}\n{told}{said}", output.status))
    });
    let (ended_well, failed): (Vec<_>, Vec<_>) = outputs.partition(|(status, _)| status.success());
    let failed: Vec<_> = failed.into_iter().map(|(_, told)| told).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    ended_well.into_iter().map(|(_, told)| told).collect()
}

/// The cases of the suite, as `--select` takes them, in two rounds. The first runs the cases that
/// no other disturbs, in one process. The second runs those that look at their process, in one
/// each: they have narrower time limits, and need a processor that the first does not use.
fn rounds() -> [Vec<String>; 2] {
    let (looking, together): (Vec<_>, Vec<_>) =
        blackbox::cases::<SoftSim>().into_iter().partition(|case| case.is(Tag::Local));
    let together: BTreeSet<_> = together.iter().map(|case| case.id).collect();
    let looking = looking.iter().map(|case| case.id.to_string());
    [vec![together.into_iter().collect::<Vec<_>>().join(",")], looking.collect()]
}
