//! Injects faults into the machines of a fabric.

use std::net::IpAddr;
use std::sync::atomic::Ordering::Relaxed;

use rdma_softsim::{Chance, Connections, Fault, When};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Reply};

use super::{Fabric, State};
use crate::faults;

/// How many faults may be pending: those that have not struck, and those that may strike
/// repeatedly.
const MOST_AHEAD: usize = 1024;

/// A fault for a machine that has no program yet.
pub(super) struct Awaited {
    address: IpAddr,
    connections: Connections,
    fault: Fault,
    when: Result<When, Chance>,
}

fn understood(written: &wire::Fault) -> Option<Awaited> {
    let fault = faults::parse(&written.what).ok()?;
    let when = match &written.when {
        wire::When::Event(event) => Ok(When::Event(*event)),
        wire::When::Pass(site, pass) => Ok(When::Pass(faults::site(site)?, *pass)),
        wire::When::Chance(times) => Err(Chance { times: *times }),
    };
    // A fault that strikes by itself strikes once, not by chance. A machine is killed at once, from
    // outside the model.
    let sensible = when.is_ok() || !fault.strikes_by_itself();
    let at_once = fault != Fault::Kill || when == Ok(When::Event(0));
    let connections = match written.connections {
        wire::Connections::All => Connections::All,
        wire::Connections::Pair(number) => Connections::Pair(number),
        wire::Connections::Peer(ip) => Connections::Peer(ip),
        wire::Connections::PeerAt(address) => Connections::PeerAt(address),
    };
    let named = connections == Connections::All || fault.strikes_connections();
    (sensible && at_once && named).then_some(Awaited { address: written.address, connections, fault, when })
}

impl Fabric {
    pub(super) fn inject(&self, seed: Option<u64>, written: &[wire::Fault]) -> Reply {
        let understood: Option<Vec<_>> = written.iter().map(understood).collect();
        let Some(understood) = understood.filter(|faults| faults.len() <= wire::MAX_BATCH) else {
            return Reply::Refused(Errno::INVAL.raw_os_error());
        };
        let mut state = self.lock();
        // A machine is killed at once, so that fault is never pending.
        let ahead = understood.iter().filter(|fault| fault.fault != Fault::Kill).count();
        if self.model.faults_ahead() + state.awaited.len() + ahead > MOST_AHEAD {
            return Reply::Refused(Errno::NOMEM.raw_os_error());
        }
        if let Some(seed) = seed {
            self.model.seed_faults(seed);
        }
        self.faulty.store(true, Relaxed);
        // Before the faults, so that a post that one refuses is answered.
        state.sessions.values().flatten().for_each(|info| info.demand_answers());
        for fault in understood {
            if fault.fault == Fault::Kill {
                kill(&state, fault.address);
            } else if !self.strike(&fault) {
                state.awaited.push(fault);
            }
        }
        Reply::Done
    }

    fn strike(&self, fault: &Awaited) -> bool {
        self.model.inject(fault.address, fault.connections, fault.fault, fault.when)
    }

    /// Injects the pending faults for a machine that has just appeared.
    pub(super) fn befall(&self, state: &mut State, addresses: &[IpAddr]) {
        state.awaited.retain(|fault| !addresses.contains(&fault.address) || !self.strike(fault));
    }

    /// Delays the request of a program on a machine with these devices for as long as a stall fault
    /// says.
    pub(super) fn stall(&self, devices: &[Vec<IpAddr>]) {
        if !self.faulty.load(Relaxed) {
            return;
        }
        for address in devices.iter().filter_map(|addresses| addresses.first()) {
            while let Some(left) = self.model.stalled_for(*address) {
                std::thread::sleep(left);
            }
        }
    }
}

fn kill(state: &State, address: IpAddr) {
    for info in state.sessions.values().flatten() {
        if info.devices.iter().flatten().any(|ip| *ip == address) {
            info.process.kill();
        }
    }
}
