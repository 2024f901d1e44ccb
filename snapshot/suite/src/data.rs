//! The connection for READs, from either side, by raw verbs.

use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::{Candidate, Connecting, Incoming, Progress, Session, Shape, Step};
use rdma_backend::{Access, CompletionStatus, ConnectParams, Region as _, RemoteAddress, SendOp};
use rdma_conn::Descriptors;

use conformance::client::Failure;
use conformance::tester::{Deadline, way, wrong};

pub(super) struct Data<B: Descriptors> {
    session: Session<B>,
    patience: Duration,
}

const fn shape(outbox: usize, window: usize) -> Shape {
    Shape { sends: 16, receives: 1, window, access: Access::REMOTE_READ, outbox }
}

pub(super) struct Way<B: Descriptors> {
    data: Data<B>,
    pub(super) local: SocketAddr,
}

impl<B: Descriptors> Way<B> {
    /// Resolves the route to `to`, for READs of at most `most` bytes.
    pub(super) fn find(
        backend: &B,
        to: SocketAddr,
        most: usize,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let candidate = way(backend, to, patience)?;
        let mut session = candidate.session(shape(most, 1)).map_err(wrong("making what READs need"))?;
        session.create_queue_pair().map_err(wrong("creating a queue pair"))?;
        let local =
            session.local_addr().ok_or_else(|| Failure::Environment("the way has no address".into()))?;
        Ok(Self { data: Data { session, patience }, local })
    }

    /// Connects, for `depth` READs at a time. Returns the reason if the publisher does not accept.
    pub(super) fn connect(self, depth: u8) -> Result<Result<Data<B>, &'static str>, Failure> {
        let mut data = self.data;
        let params = ConnectParams {
            responder_resources: 0,
            initiator_depth: depth,
            retry_count: 6,
            rnr_retry_count: 6,
        };
        data.session.connect(&params, &[]).map_err(wrong("connecting"))?;
        Ok(match data.next()? {
            // An answer's two depths are reported from its receiver's point of view.
            Some(Incoming::Established(granted)) if granted.params.initiator_depth == 0 => {
                return Err(Failure::wrong("VS-READ-001: it grants no READs"));
            }
            Some(Incoming::Established(_)) => Ok(data),
            Some(Incoming::Gone(why)) => Err(why),
            Some(other) => return Err(Failure::wrong(format!("{other} came before the connection"))),
            None => Err("no answer in time"),
        })
    }
}

impl<B: Descriptors> Data<B> {
    fn next(&mut self) -> Result<Option<Incoming>, Failure> {
        let deadline = Deadline::after(self.patience);
        loop {
            if let Some(incoming) = self.session.poll().map_err(wrong("polling"))? {
                return Ok(Some(incoming));
            }
            self.session.arm().map_err(wrong("arming"))?;
            if let Some(incoming) = self.session.poll().map_err(wrong("polling"))? {
                return Ok(Some(incoming));
            }
            if !deadline.wait(self.session.completions(), self.session.events())? {
                return Ok(None);
            }
        }
    }

    pub(super) fn read(
        &mut self,
        from: RemoteAddress,
        length: usize,
    ) -> Result<Result<Vec<u8>, CompletionStatus>, Failure> {
        let mut bytes = vec![0; length];
        Ok(self.answered(SendOp::Read(from), &bytes)?.map(|()| {
            // As long as the posted request.
            let _inside = self.session.outbox().read(0, &mut bytes);
            bytes
        }))
    }

    /// Returns how a READ fails from a queue pair that is gone: by its completion, or by silence if
    /// this side's device retries for longer than the suite waits.
    pub(super) fn read_fails(&mut self, from: RemoteAddress) -> Result<String, Failure> {
        match self.request(SendOp::Read(from), &[0])? {
            Some(Ok(())) => Err(Failure::wrong("its memory can still be read")),
            Some(Err(status)) => Ok(format!("{status:?}")),
            None => Ok("no answer".to_owned()),
        }
    }

    /// Writes, which no peer may.
    pub(super) fn write(
        &mut self,
        to: RemoteAddress,
        bytes: &[u8],
    ) -> Result<Result<(), CompletionStatus>, Failure> {
        self.answered(SendOp::Write(to), bytes)
    }

    fn answered(&mut self, op: SendOp, bytes: &[u8]) -> Result<Result<(), CompletionStatus>, Failure> {
        self.request(op, bytes)?.ok_or_else(|| Failure::wrong("a request was not answered in time"))
    }

    /// Returns the result of a request; `None` if it does not complete in time.
    fn request(&mut self, op: SendOp, bytes: &[u8]) -> Result<Option<Result<(), CompletionStatus>>, Failure> {
        if let Err(error) = self.session.take(Step::Post(op, bytes.to_vec())) {
            return Err(Failure::Environment(format!("posting: {error}")));
        }
        loop {
            match self.next()? {
                Some(Incoming::Read | Incoming::Sent) => return Ok(Some(Ok(()))),
                Some(Incoming::Failed(status)) => return Ok(Some(Err(status))),
                Some(Incoming::Gone(_)) => {}
                Some(other) => return Err(Failure::wrong(format!("{other} came instead of an answer"))),
                None => return Ok(None),
            }
        }
    }

    /// Writes into this side's own memory, which the peer can read.
    pub(super) fn fill(&self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        let inside = self.session.window().is_some_and(|window| window.write(offset, bytes));
        if inside { Ok(()) } else { Err(Failure::Environment("the suite's memory is too short".into())) }
    }

    pub(super) fn memory(&self) -> Option<RemoteAddress> {
        let window = self.session.window()?;
        Some(RemoteAddress { address: window.address(), rkey: window.rkey() })
    }
}

pub(super) struct Door<B: Descriptors> {
    connecting: Connecting<B>,
    pub(super) port: u16,
}

impl<B: Descriptors> Door<B> {
    pub(super) fn open(backend: &B, address: SocketAddr) -> Result<Self, Failure> {
        let any = SocketAddr::new(address.ip(), 0);
        let connecting = Connecting::listen(backend, any).map_err(wrong("listening for READs"))?;
        let port = connecting.local_addr().map_or(0, |address| address.port());
        Ok(Self { connecting, port })
    }

    /// Accepts any request within `patience`, and ends that connection. Returns the door if there
    /// was no request.
    pub(super) fn admit(self, patience: Duration) -> Option<Self> {
        match self.request(patience) {
            Ok(Err(door)) => Some(door),
            Ok(Ok(candidate)) => {
                // It exists long enough to be reported.
                let _ended = accept(candidate, 1, 1, patience);
                None
            }
            Err(_) => None,
        }
    }

    pub(super) fn has_request(self) -> Result<bool, Failure> {
        Ok(self.request(Duration::ZERO)?.is_ok())
    }

    /// Waits for the connect request, and accepts it for `depth` READs at a time from `memory`
    /// bytes. Also returns the requested depth; none without a request.
    pub(super) fn accept(
        self,
        depth: u8,
        memory: usize,
        patience: Duration,
    ) -> Result<Option<(Data<B>, u8)>, Failure> {
        match self.request(patience)? {
            Ok(candidate) => accept(candidate, depth, memory, patience).map(Some),
            Err(_no_request) => Ok(None),
        }
    }

    fn request(self, patience: Duration) -> Result<Result<Candidate<B>, Self>, Failure> {
        let deadline = Deadline::after(patience);
        let Self { mut connecting, port } = self;
        loop {
            match connecting.poll().map_err(wrong("taking requests"))? {
                Progress::Ready(candidate) => return Ok(Ok(candidate)),
                Progress::NoWay(event) => return Err(Failure::Environment(event)),
                Progress::Waits(waits) => connecting = waits,
            }
            if !deadline.wait(connecting.events(), connecting.events())? {
                return Ok(Err(Self { connecting, port }));
            }
        }
    }
}

fn accept<B: Descriptors>(
    candidate: Candidate<B>,
    depth: u8,
    memory: usize,
    patience: Duration,
) -> Result<(Data<B>, u8), Failure> {
    // A request's two depths are reported from its receiver's point of view.
    let asked = candidate.asked.map_or(0, |asked| asked.responder_resources);
    let mut session = candidate.session(shape(8, memory)).map_err(wrong("making memory"))?;
    session.create_queue_pair().map_err(wrong("creating a queue pair"))?;
    let params = ConnectParams {
        responder_resources: depth.min(asked),
        initiator_depth: 0,
        retry_count: 0,
        rnr_retry_count: 0,
    };
    session.accept(&params, &[]).map_err(wrong("accepting"))?;
    let mut data = Data { session, patience };
    match data.next()? {
        Some(Incoming::Established(_)) => Ok((data, asked)),
        Some(other) => Err(Failure::wrong(format!("the connection for READs was not made: {other}"))),
        None => Err(Failure::wrong("the connection for READs was not made in time")),
    }
}
