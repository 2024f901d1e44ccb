//! Programs in C, both sides of their connections on the simulated device, linked with the static
//! library. `rdma-ffi/test` also runs them on real libraries, and checks their use of memory.

use std::path::{Path, PathBuf};
use std::process::Command;

fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let folder = test.parent().expect("a folder");
    folder.join("libvkrdma.a")
}

fn run(name: &str) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compiler = Command::new("cc");
    compiler
        .args(["-g", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .arg("-I")
        .arg(package.join("include"))
        .arg(package.join("tests/c").join(name).with_extension("c"))
        .arg(library())
        .args(["-lpthread", "-ldl", "-lm", "-o"])
        .arg(&program);
    // Release builds have nothing to panic with.
    if cfg!(debug_assertions) {
        compiler.arg("-DPANICS");
    }
    assert!(compiler.status().expect("a C compiler, which links Rust, too").success(), "{compiler:?}");
    let ended = Command::new(&program).arg("softsim").output().expect("it runs");
    print!("{}", String::from_utf8_lossy(&ended.stdout));
    assert!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn bytes_come_back_as_they_were() {
    run("echo");
}

#[test]
fn errors_say_what_is_wrong_and_harm_nothing_else() {
    run("errors");
}

#[test]
fn events_come_in_an_array_and_none_is_lost() {
    run("events");
}

#[test]
fn limits_refuse_newcomers_and_end_no_client() {
    run("limits");
}

#[test]
fn lent_bytes_are_not_reported_before_they_are_released() {
    run("loans");
}

#[test]
fn children_change_nothing_for_their_parent() {
    run("forks");
}

#[test]
fn any_thread_makes_any_call() {
    run("threads");
}

#[test]
fn endpoints_share_a_channel_of_events() {
    run("shared");
}

/// The header is for C++, too.
#[test]
fn the_header_is_all_that_a_program_needs() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/vkrdma.h");
    for language in [["-x", "c", "-std=c99"], ["-x", "c++", "-std=c++11"]] {
        let mut compiler = Command::new("cc");
        compiler.args(language).args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]).arg(&header);
        let ended = compiler.output().expect("a C compiler, which links Rust, too");
        let said = String::from_utf8_lossy(&ended.stderr);
        if said.contains("cc1plus") {
            println!("skipped: no C++ compiler");
            continue;
        }
        assert!(ended.status.success(), "{said}");
    }
}
