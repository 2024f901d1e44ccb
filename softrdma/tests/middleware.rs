//! Layers above verbs, as Debian has them: UCX and libfabric; and what they look for beside verbs:
//! device files, sysfs and interfaces. What is not installed is skipped.

mod common;

use std::process::Stdio;

use common::{CLIENT, Home, SERVER, await_some, compiled, installed, pair, succeeded, success};

/// Beside verbs, a program sees its devices where a kernel would show them.
#[test]
fn device_files_sysfs_and_interfaces() {
    let home = Home::new("seen");
    let Some(program) = compiled(&home, "seen") else { return };
    let addresses = ["run", "--address", "192.0.2.1,2001:db8::1", "--address", "198.51.100.1", "--"];
    // A program of another machine keeps the fabric. The second run finds the folder of the first.
    let mut keeper = home.run(CLIENT, &["cat"]).stdin(Stdio::piped()).spawn().expect("starts");
    await_some("the first folder", || (folders(&home) == 1).then_some(()));
    for _ in 0..2 {
        let mut command = home.softrdma(&addresses);
        let output = command.arg(&program).stderr(Stdio::piped()).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(succeeded(&output), "done\n", "{said}");
        assert_eq!(folders(&home), 2);
    }
    drop(keeper.stdin.take());
    assert!(keeper.wait().expect("a child").success());
    home.is_left();
    assert_eq!(folders(&home), 0, "they go with the fabric");
}

/// Counts the folders in which programs see their devices.
fn folders(home: &Home) -> usize {
    let directory = home.socket().with_file_name("");
    let names = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.as_encoded_bytes().starts_with(b"view-")).count()
}

/// Those of a fabric that was killed go when the next one starts.
#[test]
fn folders_of_a_killed_fabric_go() {
    let home = Home::new("folders");
    let old = home.socket().with_file_name("view-0");
    common::succeeded(&home.run(SERVER, &["true"]).output().expect("runs"));
    home.is_left();
    std::fs::create_dir(&old).expect("a folder");
    common::succeeded(
        &home.run(SERVER, &["test", "!", "-e", old.to_str().expect("a path")]).output().expect("runs"),
    );
    home.is_left();
}

/// The library finds the C library's functions before the program begins: later `dlsym(3)` would
/// take a lock in signal handlers.
#[test]
fn functions_are_found_when_the_library_is_loaded() {
    let home = Home::new("found");
    let file = "/sys/class/infiniband/softrdma0/node_guid";
    let program = ["env", "LD_DEBUG=files,symbols", "LD_BIND_NOW=1", "cat", file];
    let output = home.run(SERVER, &program).output().expect("runs");
    assert_eq!(succeeded(&output), "0200:0000:c000:0201\n");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let (loading, running) = told.split_once("transferring control: cat").expect("what ld.so(8) says");
    for name in ["open", "open64", "openat", "fopen", "stat", "readlink"] {
        let looked_up = format!("symbol={name};");
        assert!(loading.contains(&looked_up) && !running.contains(&looked_up), "{name}");
    }
    home.is_left();
}

#[test]
fn ucx_finds_the_device() {
    if installed("ucx_info").is_none() {
        return;
    }
    let home = Home::new("ucx-info");
    let text = succeeded(&home.run(SERVER, &["ucx_info", "-d"]).output().expect("runs"));
    let (_, device) = text.split_once("Memory domain: softrdma0").expect("it is there");
    assert!(device.contains("Transport: rc_verbs") && device.contains("Device: softrdma0:1"), "{text}");
    assert!(device.contains("Connection manager: rdmacm"), "{text}");
    home.is_left();
}

/// Puts, gets and active messages of `rc_verbs`: inline, copied and zero-copy.
#[test]
fn ucx_moves_bytes_by_rc_verbs() {
    for (test, layout, port) in [
        ("put_lat", "short", "18631"),
        ("put_bw", "zcopy", "18632"),
        ("get", "bcopy", "18633"),
        ("am_lat", "bcopy", "18634"),
    ] {
        let size = if layout == "short" { "32" } else { "4096" };
        let server = [
            &["ucx_perftest", "-d", "softrdma0:1", "-x", "rc_verbs", "-p", port][..],
            &["-t", test, "-D", layout, "-s", size, "-n", "100", "-w", "10"],
        ]
        .concat();
        let client = [&server[..], &["127.0.0.1"]].concat();
        if let Some(text) = pair(&format!("ucx-{test}"), &server, &client, success) {
            assert!(text.contains("Final:                   100"), "{text}");
        }
    }
}

/// UCX's protocols: `rc_verbs`, which is connected by datagrams of `ud_verbs`, and these alone.
#[test]
fn ucx_protocols() {
    for (transport, test, size, port) in [
        ("rc_v", "tag_lat", "8", "18635"),
        ("rc_v", "tag_bw", "100000", "18636"),
        ("rc_v", "stream_lat", "20000", "18637"),
        ("ud_v", "tag_lat", "20000", "18638"),
    ] {
        let transport_only = format!("UCX_TLS={transport}");
        let server = [
            &["env", &transport_only, "ucx_perftest", "-p", port][..],
            &["-t", test, "-s", size, "-n", "100", "-w", "10"],
        ]
        .concat();
        let client = [&server[..], &["127.0.0.1"]].concat();
        if installed("ucx_perftest").is_some()
            && let Some(text) = pair(&format!("ucx-{transport}-{test}"), &server, &client, success)
        {
            assert!(text.contains("Final:                   100"), "{text}");
        }
    }
}

#[test]
fn libfabric_finds_the_device() {
    if installed("fi_info").is_none() {
        return;
    }
    let home = Home::new("fi-info");
    let text = succeeded(&home.run(SERVER, &["fi_info", "-p", "verbs"]).output().expect("runs"));
    assert!(text.contains("domain: softrdma0") && text.contains("type: FI_EP_MSG"), "{text}");
    assert!(text.contains("provider: verbs;ofi_rxm"), "{text}");
    home.is_left();
}

/// Messages of connected endpoints, and of reliable datagrams on top of them.
///
/// The latter with a shared receive queue: libfabric 1.17 may post receives to an endpoint that it
/// has closed, if a peer disconnects right after a message (docs/softrdma-programs.md).
#[test]
fn libfabric_by_verbs() {
    if installed("fi_pingpong").is_none() {
        return;
    }
    for (provider, endpoint, port) in [("verbs", "msg", "18641"), ("verbs;ofi_rxm", "rdm", "18642")] {
        let program = ["env", "FI_OFI_RXM_USE_SRX=1", "fi_pingpong"];
        let common =
            [&program[..], &["-p", provider, "-e", endpoint, "-I", "20", "-S", "4096", "-c"]].concat();
        let server = [&common[..], &["-B", port]].concat();
        let client = [&common[..], &["-P", port, "127.0.0.1"]].concat();
        if let Some(text) = pair(&format!("fi-pingpong-{endpoint}"), &server, &client, success) {
            let line = text.lines().find(|line| line.starts_with("4k")).expect("a line of the size");
            assert!(line.contains("=20"), "{text}");
        }
    }
}

/// A process of another machine is not local: an address that it binds to loopback belongs to its
/// machine.
#[test]
fn loopback_is_the_machines_own() {
    if installed("rping").is_none() {
        return;
    }
    let server = ["rping", "-s", "-a", "127.0.0.1", "-C", "5", "-V"];
    let client = ["rping", "-c", "-a", SERVER, "-C", "5", "-V", "-v"];
    assert!(pair("loopback", &server, &client, common::pinged(5)).is_some(), "from {CLIENT}");
}
