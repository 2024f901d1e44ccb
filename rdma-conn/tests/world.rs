//! A server's and a client's host on a simulated fabric.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Listener, Options};
use rdma_softsim::{DeviceKind, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};

pub(crate) type End = (Endpoint<SoftSim>, ConnectionId);

pub(crate) fn simulation() -> Simulation {
    Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new())
}

/// Returns the hosts of a server and a client, and where the server listens.
pub(crate) fn hosts(sim: &Simulation) -> (SoftSim, SoftSim, SocketAddr) {
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    (server, client, SocketAddr::from(([192, 0, 2, 1], 6379)))
}

pub(crate) fn pass(sim: &Simulation, time: Duration) {
    sim.advance(sim.now().after(time));
}

pub(crate) fn asking(client: &SoftSim, address: SocketAddr, options: Options) -> End {
    let mut endpoint = Endpoint::new(client, rdma_conn::Limits::default()).expect("a device");
    let id = endpoint.connect(address, None, Duration::from_secs(10), options).expect("begins");
    (endpoint, id)
}

/// Drives an accepted connection, or accepts it.
pub(crate) fn serve(listener: &Listener<SoftSim>, accepted: &mut Option<End>) {
    match accepted {
        Some((server, _)) => server.progress().expect("the fabric stays"),
        None => *accepted = listener.try_accept().expect("accepts"),
    }
}

/// Bytes in which neighbouring kilobytes differ.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect()
}
