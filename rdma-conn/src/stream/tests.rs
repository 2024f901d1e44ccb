use std::io::{Read, Write};
use std::thread;

use rdma_softsim::Fabric;

use super::*;
use crate::listener::Listener;

/// A panic while driving a stream may lose completions, for which a read would wait for ever.
#[test]
fn after_a_panic_calls_fail() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let listener = Listener::bind(&server, address).expect("a free port");
    let (mut stream, mut accepted) = thread::scope(|scope| {
        let connecting = scope.spawn(|| Stream::connect(&client, address));
        let (mut accepted, _) = listener.accept().expect("a request");
        accepted.flush().expect("a client");
        (connecting.join().expect("no panic").expect("somebody listens"), accepted)
    });
    let driving = thread::scope(|scope| {
        scope.spawn(|| stream.shared.call::<(), Error>(|_| panic!("as it was told"))).join()
    });
    driving.expect_err("it panics");
    let told = |result: io::Result<usize>| result.expect_err("its state is unknown").to_string();
    for error in [told(stream.read(&mut [0])), told(stream.write(b"x"))] {
        assert!(error.contains("has panicked"), "{error}");
    }
    assert_eq!(stream.shared.drive(), Schedule::Never);
    assert!(stream.local_addr().is_some(), "what cannot fail does not");
    drop(stream);
    assert_eq!(accepted.read(&mut [0]).expect("an end in order"), 0);
}

/// A panic of a call is noted, so that code which caught it may go on with the stream.
#[test]
fn a_stream_goes_anywhere() {
    use std::panic::{RefUnwindSafe, UnwindSafe};
    const fn goes<T: Send + Sync + Unpin + UnwindSafe + RefUnwindSafe>() {}
    goes::<Stream<rdma_softsim::SoftSim>>();
}
