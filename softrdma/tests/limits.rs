//! What a program and `softrdma status` say of a bound that is in the way.

mod common;

use std::io::Write as _;
use std::process::Stdio;

use common::{Home, SERVER, compiled, succeeded};
use softrdma::fabric::Bounds;
use softrdma_wire::{Exceeded, Resource};

#[test]
fn a_refusal_says_which_bound_it_is() {
    let home = Home::new("limits");
    let Some(program) = compiled(&home, "limits") else { return };
    let mut running = home.run(SERVER, &[&program]).stdin(Stdio::piped()).spawn().expect("starts");
    let mut first = [0; 5];
    let output = running.stdout.as_mut().expect("is piped");
    std::io::Read::read_exact(output, &mut first).expect("a line");
    assert_eq!(&first, b"full\n");
    let status = succeeded(&home.softrdma(&["status"]).output().expect("runs"));
    let most = Bounds::of_this_process().each.memory;
    let bound = Exceeded { resource: Resource::Memory, each: true, most }.to_string();
    assert!(status.contains(&format!("refused 2 times: {bound}")), "{status}");
    running.stdin.take().expect("is piped").write_all(b"\n").expect("it listens");
    let output = running.wait_with_output().expect("ends");
    assert_eq!(succeeded(&output), "done\n");
    // Once, however often it happens.
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.matches(&bound).count(), 1, "{said}");
    home.is_left();
}
