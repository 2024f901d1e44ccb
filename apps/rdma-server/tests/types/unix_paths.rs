use std::io::ErrorKind;
use std::path::PathBuf;

use rdma_server::{Address, Unix};

use crate::harness::{accept, new_loop, on_connected, run};
use crate::test_beds::{TestBed, UnixBed};

fn path(address: &Address) -> PathBuf {
    let Address::Unix(path) = address else { panic!("{address} is not a path") };
    path.clone()
}

#[test]
fn what_is_not_a_socket_is_not_removed() {
    let test_bed = UnixBed::new().expect("needs no device");
    let address = test_bed.address();
    std::fs::write(path(&address), "precious").expect("a file");
    let error = new_loop().listen(&Unix::new(), &address, accept).expect_err("the name is taken");
    assert_eq!(error.kind(), ErrorKind::AddrInUse, "{error}");
    assert_eq!(std::fs::read(path(&address)).expect("it is still there"), b"precious");
    // Nor the target of a link, or the link.
    let link = test_bed.address();
    std::os::unix::fs::symlink(path(&address), path(&link)).expect("a link");
    new_loop().listen(&Unix::new(), &link, accept).expect_err("the name is taken");
    assert_eq!(std::fs::read(path(&link)).expect("it is still there"), b"precious");
}

#[test]
fn the_socket_of_a_server_that_died_is_replaced() {
    let test_bed = UnixBed::new().expect("needs no device");
    let address = test_bed.address();
    drop(std::os::unix::net::UnixListener::bind(path(&address)).expect("a socket"));
    assert!(path(&address).exists(), "a closed socket leaves its file");
    new_loop().listen(&Unix::new(), &address, accept).expect("nothing listens there any more");
}

#[test]
fn a_dropped_listener_removes_its_own_file_only() {
    let test_bed = UnixBed::new().expect("needs no device");
    let address = test_bed.address();
    let mut events = new_loop();
    let old = events.listen(&Unix::new(), &address, accept).expect("a free name");
    std::fs::remove_file(path(&address)).expect("its file");
    events.listen(&Unix::new(), &address, accept).expect("a free name");
    events.close_listener(old);
    events.connect(&Unix::new(), &address, None, on_connected).expect("the successor is found");
    run(&mut events, |events| events.state.accepted.len() == 1);
}
