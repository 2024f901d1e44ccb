//! Programs of others, as they are installed. What is not installed is skipped.

mod common;

use std::process::Command;

use common::{Home, Running, installed, succeeded};

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";

/// Both sides of a pair of programs; the client tries again until the server listens.
fn pair(name: &str, server: &[&str], client: &[&str]) -> Option<String> {
    for program in [server, client] {
        installed(program.first()?)?;
    }
    let home = Home::new(name);
    let mut serving = Running::start(&mut home.run(SERVER, server));
    let text = common::await_some("the client's success", || {
        let output = home.run(CLIENT, client).output().expect("runs");
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(serving.runs(), "the server has served it, and the client failed: {said}");
            println!("again: {said}");
            return None;
        }
        Some(succeeded(&output))
    });
    let (done, served) = serving.finish();
    assert!(done, "{served}");
    home.is_left();
    Some(text)
}

#[test]
fn rdma_client_and_server() {
    if let Some(text) = pair("rdma-client", &["rdma_server"], &["rdma_client", "-s", SERVER]) {
        assert!(text.contains("end 0"), "{text}");
    }
}

#[test]
fn rping() {
    let server = ["rping", "-s", "-a", SERVER, "-C", "20", "-V"];
    let client = ["rping", "-c", "-a", SERVER, "-C", "20", "-V", "-v"];
    if let Some(text) = pair("rping", &server, &client) {
        assert!(text.contains("rdma-ping-19"), "{text}");
    }
}

#[test]
fn ibv_rc_pingpong_with_events() {
    let server = ["ibv_rc_pingpong", "-e", "-c", "-g", "0", "-p", "18611"];
    let client = ["ibv_rc_pingpong", "-e", "-c", "-g", "0", "-p", "18611", "127.0.0.1"];
    if let Some(text) = pair("pingpong", &server, &client) {
        assert!(text.contains("1000 iters"), "{text}");
    }
}

#[test]
fn perftest_write_and_read() {
    for (program, port) in [
        ("ib_write_bw", "18612"),
        ("ib_read_bw", "18613"),
        ("ib_send_bw", "18614"),
        ("ib_write_lat", "18615"),
    ] {
        // The newer way to post, and the older one.
        for old in [&[][..], &["--use_old_post_send"]] {
            let common = ["-x", "0", "-n", "100", "-s", "4096", "-F", "-p", port];
            let server: Vec<&str> = [program].into_iter().chain(common).chain(old.iter().copied()).collect();
            let client: Vec<&str> = server.iter().copied().chain(["127.0.0.1"]).collect();
            if let Some(text) = pair(program, &server, &client) {
                assert!(text.contains("4096"), "{text}");
            }
        }
    }
}

/// A program of C that was compiled here, or `None` and a reason, printed.
fn compiled(home: &Home, name: &str) -> Option<String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs");
    let program = home.path().join(name).into_os_string().into_string().expect("a path in UTF-8");
    let compile = |arguments: &[&str]| Command::new("cc").args(arguments).output();
    match compile(&["-fsyntax-only", "-include", "infiniband/verbs.h", "-x", "c", "/dev/null"]) {
        Ok(output) if output.status.success() => {}
        _ => {
            println!("skipped: no C compiler, or no rdma-core headers");
            return None;
        }
    }
    let output =
        compile(&["-Wall", "-o", &program, &format!("{source}/{name}.c"), "-libverbs"]).expect("runs");
    succeeded(&output);
    Some(program)
}

/// Scatter-gather lists through the C ABI and the headers' inline functions.
#[test]
fn elements_of_a_work_request() {
    let home = Home::new("elements");
    let Some(program) = compiled(&home, "elements") else { return };
    let output = home.run(SERVER, &[&program]).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(succeeded(&output), "done\n", "{said}");
    home.is_left();
}

/// Completion queues and queue pairs with functions, shared receives, solicited events, SQD, a child, acknowledgements.
#[test]
fn the_newer_calls() {
    let home = Home::new("extended");
    let Some(program) = compiled(&home, "extended") else { return };
    let output = home.run(SERVER, &[&program]).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(succeeded(&output), "done\n", "{said}");
    home.is_left();
}

#[test]
fn ibv_devinfo() {
    if installed("ibv_devinfo").is_none() {
        return;
    }
    let home = Home::new("devinfo");
    let text = succeeded(&home.run(SERVER, &["ibv_devinfo", "-v"]).output().expect("runs"));
    assert!(text.contains("softrdma0") && text.contains("PORT_ACTIVE"), "{text}");
    home.is_left();
}

/// Without `softrdma run` a program that loads the library has no device, and is told why.
#[test]
fn without_a_fabric_there_is_no_device() {
    let Some(program) = installed("ibv_devices") else { return };
    let output = Command::new(program)
        .env("LD_PRELOAD", env!("CARGO_BIN_EXE_librdmacm-softrdma"))
        .env_remove("SOFTRDMA_SOCKET")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("not started by `softrdma run`"), "{said}");
    assert!(!succeeded(&output).contains("softrdma0"));
}
