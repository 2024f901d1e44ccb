//! Endpoints.

use std::io::IoSlice;
use std::net::SocketAddr;

use rdma_conn::{ConnectionId, Endpoint, Error, Limits};
use rdma_verbs::Verbs;

use super::{Deed, Shared, forked, in_a_call, parsed, run};
use crate::echo::{LONG, patient, verbs};
use crate::fabric::{CLIENT, role};

/// An endpoint and a connection of it.
struct Loop {
    endpoint: Endpoint<Verbs>,
    id: ConnectionId,
}

impl Loop {
    fn connect(address: SocketAddr) -> Self {
        let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
        let id = endpoint.connect(address, None, LONG, patient().options).expect("connects");
        let mut one = Self { endpoint, id };
        while !one.endpoint.is_open(id) {
            one.wait();
        }
        one
    }

    fn wait(&mut self) {
        self.endpoint.wait(None).expect("waits");
        while self.endpoint.next_event().is_some() {}
        self.endpoint.check(self.id).expect("a server");
    }

    fn write(&mut self, message: &[u8; 5]) {
        assert_eq!(self.endpoint.write(self.id, &[IoSlice::new(message)]).expect("written"), Some(5));
    }

    fn read(&mut self) -> [u8; 5] {
        let mut back = [0; 5];
        loop {
            match self.endpoint.read(self.id, &mut back).expect("read") {
                Some(5) => return back,
                None => self.wait(),
                Some(other) => panic!("{other}"),
            }
        }
    }
}

impl Deed for Shared<Loop> {
    fn close(&mut self) -> Result<(), Error> {
        let Loop { endpoint, id } = self.get();
        endpoint.close(*id, LONG)
    }

    fn refuses(&mut self) {
        let Loop { endpoint, id } = self.get();
        assert!(matches!(endpoint.write(*id, &[IoSlice::new(b"child")]), Err(Error::Forked)));
        assert!(matches!(endpoint.read(*id, &mut [0]), Err(Error::Forked)));
        assert!(matches!(endpoint.flush(*id), Err(Error::Forked)));
        assert!(matches!(endpoint.progress(), Err(Error::Forked)));
        assert!(matches!(endpoint.wait(None), Err(Error::Forked)));
        assert!(matches!(endpoint.abandon(*id, LONG), Err(Error::Forked)));
        let address = SocketAddr::new(CLIENT.parse().expect("an address"), 0);
        assert!(matches!(endpoint.listen(address, patient().options), Err(Error::Forked)));
        assert!(matches!(Endpoint::new(&verbs(), Limits::default()), Err(Error::Forked)));
        endpoint.waker().expect("a descriptor").wake();
        endpoint.abort(*id);
        // SAFETY: from `Shared::new`, and not used any more in this child.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// A program with an endpoint, which sleeps in `wait` if it is busy.
#[test]
fn endpoint() {
    let Some(argument) = role("children::endpoints::endpoint") else { return };
    let (deed, busy, address) = parsed(&argument);
    let (mut other, one) = (Loop::connect(address), Shared::new(Loop::connect(address)));
    one.get().write(b"wait!");
    let wait = move || assert_eq!(&one.get().read(), b"freed");
    let call = busy.then(|| in_a_call(wait));
    if forked(deed, one).is_none() {
        return;
    }
    other.write(b"free!");
    assert_eq!(&other.read(), b"free!");
    match call {
        Some(call) => call.join().expect("the call ends"),
        None => wait(),
    }
    one.get().write(b"later");
    assert_eq!(&one.get().read(), b"later");
    println!("done");
}

#[test]
fn children_leave_endpoints_alone() {
    run("children::endpoints::endpoint");
}
