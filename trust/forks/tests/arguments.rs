//! The program is for `trust/forks/run`.

use std::process::Command;

#[test]
fn what_it_takes_is_told_if_it_is_given_nothing() {
    let program = Command::new(env!("CARGO_BIN_EXE_forks")).output().expect("it runs");
    assert!(!program.status.success());
    let told = String::from_utf8_lossy(&program.stderr);
    assert!(told.contains("forks ADDRESS PORT WAY idle|busy FACE"), "{told}");
}
