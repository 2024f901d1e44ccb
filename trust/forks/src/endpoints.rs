//! Endpoints.

use std::io::IoSlice;
use std::net::SocketAddr;

use rdma_conn::{ConnectionId, Endpoint, Error, Limits};
use rdma_verbs::Verbs;

use crate::{Face, LONG, MESSAGE, PING, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, patient, verbs};

/// An endpoint and a connection of it.
pub(crate) struct Loop {
    endpoint: Endpoint<Verbs>,
    id: ConnectionId,
}

impl Loop {
    fn turn(&mut self) {
        self.endpoint.wait(None).expect("waits");
        while self.endpoint.next_event().is_some() {}
        self.endpoint.check(self.id).expect("a server");
    }

    fn asks(&mut self, (request, end): (&[u8], &[u8])) {
        let written = self.endpoint.write(self.id, &[IoSlice::new(request)]).expect("written");
        assert_eq!(written, Some(request.len()));
        self.hears(end);
    }

    fn hears(&mut self, end: &[u8]) {
        let (mut heard, mut some) = (Vec::new(), [0; 64]);
        while !heard.ends_with(end) {
            match self.endpoint.read(self.id, &mut some).expect("read") {
                Some(count @ 1..) => heard.extend_from_slice(&some[..count]),
                Some(_) => panic!("the server has left"),
                None => self.turn(),
            }
        }
    }
}

impl Face for Loop {
    fn new(server: SocketAddr) -> Self {
        let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
        let id = endpoint.connect(server, None, LONG, patient().options).expect("connects");
        let mut one = Self { endpoint, id };
        while !one.endpoint.is_open(id) {
            one.turn();
        }
        one
    }

    fn exchange(&mut self) {
        self.asks(PING);
    }

    fn prepare(&mut self) {
        self.asks(SUBSCRIBE);
    }

    fn wait(&mut self) {
        self.hears(MESSAGE);
        self.asks(UNSUBSCRIBE);
    }

    fn free(&mut self) {
        self.asks(PUBLISH);
    }

    fn close(&mut self) -> Result<(), Error> {
        self.endpoint.close(self.id, LONG)
    }

    fn refuses(&mut self) {
        let Self { endpoint, id } = self;
        assert!(matches!(endpoint.write(*id, &[IoSlice::new(b"child")]), Err(Error::Forked)));
        assert!(matches!(endpoint.read(*id, &mut [0]), Err(Error::Forked)));
        assert!(matches!(endpoint.flush(*id), Err(Error::Forked)));
        assert!(matches!(endpoint.progress(), Err(Error::Forked)));
        assert!(matches!(endpoint.wait(None), Err(Error::Forked)));
        assert!(matches!(endpoint.abandon(*id, LONG), Err(Error::Forked)));
        let anywhere = "[::]:0".parse().expect("an address");
        assert!(matches!(endpoint.listen(anywhere, patient().options), Err(Error::Forked)));
        assert!(matches!(endpoint.connect(anywhere, None, LONG, patient().options), Err(Error::Forked)));
        assert!(matches!(Endpoint::new(&verbs(), Limits::default()), Err(Error::Forked)));
        endpoint.waker().expect("a descriptor").wake();
        endpoint.abort(*id);
    }
}
