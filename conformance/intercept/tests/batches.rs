//! Polls of an interceptor that drops completions.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use intercept::{Intercepted, Interceptor, LowerQueuePair, Origin};
use rdma_backend::{Backend, Completed, Completion, QueuePairLimits};
use rdma_conn::{ConnectionId, Descriptors, Endpoint, Event, Limits, Options};
use rdma_softsim::{DeviceKind, FaultPlan, Simulation, SimulationSettings, SoftSim};

/// Drops the first notification.
struct DropsOne(AtomicBool);

impl Interceptor<SoftSim> for DropsOne {
    type Identifier = ();
    type QueuePair = ();

    fn identifier(&self, _inner: &Arc<<SoftSim as Backend>::Identifier>, _origin: Origin) {}

    fn queue_pair(
        &self,
        _id: &(),
        _inner: &Arc<<SoftSim as Backend>::QueuePair>,
        _domain: &<SoftSim as Backend>::Domain,
        _limits: QueuePairLimits,
    ) -> Result<(), <SoftSim as Backend>::Error> {
        Ok(())
    }

    fn polled(&self, _pair: &(), _below: LowerQueuePair<'_, SoftSim>, completion: &mut Completion) -> bool {
        !matches!(completion.result, Ok(Completed::RecvWrite { .. })) || self.0.swap(true, Ordering::Relaxed)
    }
}

fn turn<B: Descriptors>(endpoint: &mut Endpoint<B>, opened: &mut Option<ConnectionId>) {
    endpoint.progress().expect("goes on");
    while let Some(event) = endpoint.next_event() {
        if let Event::Opened { id, .. } = event {
            *opened = Some(id);
        }
    }
}

fn settle(sim: &Simulation) {
    let until = sim.now().after(Duration::from_millis(1));
    while sim.deadline().is_some_and(|at| at <= until) {
        sim.step();
    }
}

/// Fewer completions than there is room for say that the queue is empty.
#[test]
fn a_dropped_completion_hides_none_behind_it() {
    const SENT: usize = 40;
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Default::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = Intercepted::by(server, DropsOne(AtomicBool::new(false)));
    let mut server = Endpoint::new(&server, Limits::default()).expect("a device");
    let mut client = Endpoint::new(&client, Limits::default()).expect("a device");
    server.listen(address, Options::default()).expect("a free address");
    client.connect(address, None, Duration::from_secs(5), Options::default()).expect("begins");
    let (mut at_server, mut at_client) = (None, None);
    while at_server.is_none() || at_client.is_none() {
        turn(&mut server, &mut at_server);
        turn(&mut client, &mut at_client);
        settle(&sim);
    }
    let (Some(at_server), Some(at_client)) = (at_server, at_client) else { unreachable!("both are open") };
    for _ in 0..SENT {
        assert_eq!(client.write(at_client, &[IoSlice::new(b"x")]).expect("open"), Some(1));
    }
    settle(&sim);
    for _ in 0..SENT {
        turn(&mut server, &mut None);
    }
    let mut bytes = [0; SENT];
    assert_eq!(server.read(at_server, &mut bytes).expect("open"), Some(SENT - 1));
}
