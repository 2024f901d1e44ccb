//! Machines with several devices, with installed programs and one of our own. Programs that are not
//! installed are skipped.

mod common;

use std::process::{Command, Stdio};

use common::{Home, Running, await_some, compiled, installed, pinged, served, succeeded, success};

/// The addresses of a machine's devices, and of a peer on the network of the second.
const FIRST: &str = "192.0.2.1";
const SECOND: &str = "198.51.100.1";
const PEER: &str = "198.51.100.2";

/// Returns the command for a program on the machine with both devices.
fn run(home: &Home, program: &[&str]) -> Command {
    let devices = ["run", "--address", FIRST, "--address", SECOND, "--"];
    let mut command = home.softrdma(&[&devices[..], program].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn both_are_listed_and_shown() {
    if installed("ibv_devices").is_none() {
        return;
    }
    let home = Home::new("devices-listed");
    let text = succeeded(&run(&home, &["ibv_devices"]).output().expect("runs"));
    assert!(text.contains("softrdma0") && text.contains("softrdma1"), "{text}");
    let text = succeeded(&run(&home, &["ibv_devinfo", "-d", "softrdma1", "-v"]).output().expect("runs"));
    assert!(text.contains("softrdma1") && text.contains(&format!("::ffff:{SECOND}")), "{text}");
    assert!(!text.contains("softrdma0") && !text.contains(FIRST), "{text}");
    home.is_left();
}

/// `rping` listens on all devices, and a client connects to each. `softrdma status` shows the
/// device of its queue pair.
#[test]
fn rping_is_reached_at_each_device() {
    if installed("rping").is_none() {
        return;
    }
    for address in [FIRST, SECOND] {
        let home = Home::new(&format!("devices-rping-{address}"));
        let server = Running::start(&mut run(&home, &["rping", "-s", "-a", "0.0.0.0", "-C", "50", "-V"]));
        await_some("the server's session", || {
            // The fabric may still be starting.
            let status = home.softrdma(&["status"]).output().expect("runs");
            let text = String::from_utf8_lossy(&status.stdout);
            let both = ["softrdma0: 192.0.2.1 ", "softrdma1: 198.51.100.1 "];
            both.into_iter().all(|device| text.contains(device)).then_some(())
        });
        let client = ["rping", "-c", "-a", address, "-C", "50", "-V", "-v"];
        served(&home, server, || home.run(PEER, &client), pinged(50));
    }
}

/// A program connects from the device on its peer's network, or from the one that it names.
#[test]
fn rping_begins_at_either_device() {
    if installed("rping").is_none() {
        return;
    }
    for source in [&[][..], &["-I", FIRST]] {
        let home = Home::new(&format!("devices-source-{}", source.len()));
        let server = Running::start(&mut home.run(PEER, &["rping", "-s", "-a", PEER, "-C", "5", "-V"]));
        let client = [&["rping", "-c", "-a", PEER, "-C", "5", "-V", "-v"], source].concat();
        served(&home, server, || run(&home, &client), pinged(5));
    }
}

/// Two devices of one machine exchange messages.
#[test]
fn ibv_rc_pingpong_between_devices() {
    if installed("ibv_rc_pingpong").is_none() {
        return;
    }
    let home = Home::new("devices-pingpong");
    let pingpong = |device| ["ibv_rc_pingpong", "-d", device, "-e", "-c", "-g", "0", "-p", "18641"];
    let server = Running::start(&mut run(&home, &pingpong("softrdma0")));
    let client = [&pingpong("softrdma1")[..], &["127.0.0.1"]].concat();
    let text = served(&home, server, || run(&home, &client), success);
    // The client's own address is the second device's, its peer's the first one's.
    let ends = [(SECOND, "local address:"), (FIRST, "remote address:")];
    for (address, what) in ends {
        let line = text.lines().find(|line| line.contains(what)).unwrap_or_default();
        assert!(line.ends_with(&format!("::ffff:{address}")), "{text}");
    }
    assert!(text.contains("1000 iters"), "{text}");
}

/// Names, contexts, tables, objects of one device, and the device that the connection manager
/// chooses.
#[test]
fn a_program_of_both() {
    let home = Home::new("devices-program");
    let Some(program) = compiled(&home, "devices") else { return };
    if installed("rping").is_none() {
        return;
    }
    // Only its machine is needed.
    let peer = Running::start(&mut home.run(PEER, &["rping", "-s", "-a", PEER, "-C", "1"]));
    await_some("the peer's session", || {
        // The fabric may still be starting.
        let status = home.softrdma(&["status"]).output().expect("runs");
        String::from_utf8_lossy(&status.stdout).contains(PEER).then_some(())
    });
    let output = run(&home, &[&program, FIRST, SECOND, PEER]).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(succeeded(&output), "done\n", "{said}");
    drop(peer);
    home.is_left();
}
