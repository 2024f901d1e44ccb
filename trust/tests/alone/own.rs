//! Our own side under the suite, judged by the errors that it reports, on the embedded fabric.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use conformance::blackbox::builtin::small;
use conformance::tester::{Listener, Shape};
use rdma_conn::{Connect, Options, Stream};
use rdma_softsim::{Fabric, SoftSim};
use suite::Role;
use trust::own;
use trust::own::table::TABLE;

use crate::programs;

#[test]
fn our_server_and_client() {
    let cases = own::cases::<SoftSim>();
    assert!(cases.len() > 215, "{}", cases.len());
    // `conn.` of `conn.plain`.
    let area = |id: &'static str| id.split_inclusive('.').next().unwrap_or(id);
    let areas: BTreeSet<_> =
        cases.iter().filter_map(|case| Some((area(case.id), case.role?.name()))).collect();
    let all = areas.iter().map(|(area, role)| vec!["own", "--select", area, "--role", role]);
    let told = programs(&all.collect::<Vec<_>>());
    let passed = told.iter().filter_map(|told| {
        let (_, count) =
            told.split_once(" passed, 0 failed").and_then(|(before, _)| before.rsplit_once(' '))?;
        count.parse::<usize>().ok()
    });
    assert_eq!(passed.sum::<usize>(), cases.len(), "{told:#?}");
}

/// VR-CLOSE-002: our client reads data that arrived right before the disconnect, and then the end.
#[test]
fn last_words_are_read() {
    let fabric = Fabric::new();
    let [ours, theirs] = [1, 66].map(|number| fabric.host(&[[192, 0, 2, number].into()]));
    let listener = Listener::new(&theirs, ([192, 0, 2, 66], 0).into()).unwrap();
    let address = listener.address().unwrap();
    let client = std::thread::spawn(move || {
        let how = Connect::default().options(small(Options::default()));
        let mut stream = Stream::connect_with(&ours, address, &how).unwrap();
        let mut read = Vec::new();
        stream.read_to_end(&mut read).map(|_| read)
    });
    let mut peer = listener.accept(Shape::default()).unwrap();
    peer.serves = true;
    peer.await_established().unwrap();
    peer.handshake().unwrap();
    peer.relays();
    peer.send_bytes(b"all of this must arrive").unwrap();
    peer.settle().unwrap();
    peer.disconnect().unwrap();
    assert_eq!(client.join().unwrap().unwrap(), b"all of this must arrive");
}

#[test]
fn rows_are_about_cases_that_exist() {
    let cases = own::suite_cases::<SoftSim>();
    for row in TABLE {
        for role in [Role::Server, Role::Client].into_iter().filter(|role| row.role.includes(*role)) {
            let exists = cases.iter().any(|case| case.id == row.case && case.role == Some(role));
            assert!(exists, "{} {role}", row.case);
        }
    }
}

#[test]
fn nothing_of_the_hostile_suite_was_lost() {
    let cases = own::suite_cases::<SoftSim>();
    let page = include_str!("../../../docs/hostile.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 68);
    for row in rows {
        let [name, server, client] = row[..] else { panic!("{row:?}") };
        assert!(server != "–" || client != "–", "{name}");
        for (role, places) in [(Role::Server, server), (Role::Client, client)] {
            for place in places.split(", ").filter(|place| *place != "–") {
                let id = place.trim_matches('`');
                let is_file = Path::new("..").join(id).is_file();
                assert!(
                    is_file || cases.iter().any(|case| case.id == id && case.role == Some(role)),
                    "{name}, {role}: there is no case {id}"
                );
            }
        }
    }
}

#[test]
fn what_is_piped_is_not_wide() {
    for arguments in [
        &["own", "--select", "conn.plain"][..],
        &["own", "--select", "no.such-case"],
        &["verdicts", "--select", "conn.plain"],
        &["explore", "--small", "--select", "no such scenario"],
        &["crowd", "--connections", "4", "--mute", "1", "--requests", "2", "--seconds", "0"],
        &["reqs", "coverage"],
        &["sim", "--seeds", "0..2"],
        &["--help"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-trust")).args(arguments).output().unwrap();
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            let wide = |line: &&str| line.chars().count() > 120 && line.trim().contains(' ');
            assert_eq!(text.lines().find(wide), None, "{arguments:?}");
        }
    }
}
