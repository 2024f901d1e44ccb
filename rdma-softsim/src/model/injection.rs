//! Faults: their injection, and those that strike by themselves.

use core::time::Duration;

use rdma_backend::AsyncEvent;

use super::base::target::Target;
use super::{Event, HostId, Model, NoticeKind, PairId, SimulationState, Wake};
use crate::device_kind::DeviceKind;
use crate::failure_class::FailureClass;
use crate::faults::{Chance, Connections, Fault, When};
use crate::settings::Link;

impl Model {
    pub(crate) fn simulation(&self) -> Option<&SimulationState> {
        self.env.simulation()
    }

    pub(crate) fn simulation_mut(&mut self) -> Option<&mut SimulationState> {
        self.env.simulation_mut()
    }

    pub(crate) fn seed_faults(&mut self, seed: u64) {
        self.env.faults().seed(seed);
    }

    /// Adds a fault for these connections of `host`, once or by chance.
    pub(crate) fn inject(
        &mut self,
        host: HostId,
        connections: Connections,
        fault: Fault,
        when: Result<When, Chance>,
    ) {
        self.env.faults().inject(Target { host: host.index(), connections }, fault, when);
    }

    /// Sets the kind of devices from now on, in real time.
    pub(crate) fn set_device_kind(&mut self, kind: DeviceKind) {
        self.env.faults().set_device_kind(kind);
    }

    /// Sets the one-way latency of later messages.
    pub(crate) const fn set_latency(&mut self, latency: Duration) {
        self.env.set_latency(latency);
    }

    pub(crate) fn faults_struck(&self) -> u64 {
        self.env.simulation().map_or(0, |simulation| simulation.struck)
    }

    pub(crate) fn faults_ahead(&self) -> usize {
        self.env.simulation().map_or(0, SimulationState::ahead)
    }

    pub(super) fn befall(&mut self, target: Target, fault: Fault) {
        let host = target.host;
        // A plan may name a host that was never made.
        let Some(id) = self.hosts.numbered(host) else { return };
        match fault {
            Fault::LinkDown { micros } if target.connections != Connections::All => {
                let lasts = Duration::from_micros(micros.into());
                for pair in self.targets(&target) {
                    if let Some(pair) = self.pairs.get_mut(pair) {
                        pair.cut = true;
                        pair.cut_until = pair.cut_until.max(self.env.now().after(lasts));
                    }
                    self.env.schedule(lasts, Event::PairUp(pair));
                }
            }
            Fault::LinkDown { micros } => {
                let lasts = Duration::from_micros(micros.into());
                self.hosts.down_until(id, self.env.now().after(lasts));
                for address in self.hosts.addresses(id) {
                    self.set_link(address, Link::Down);
                }
                self.tell_all(id, NoticeKind::Async(AsyncEvent::PortErr));
                self.env.schedule(lasts, Event::LinkUp(id));
            }
            Fault::Spurious => {
                for queue in self.queues.on(id) {
                    if let Some(queue) = self.queues.get_mut(queue) {
                        queue.raise();
                    }
                    self.env.wake(Wake::Completions(queue));
                }
            }
            Fault::DeviceRemoval | Fault::DeviceFatal => {
                for pair in self.pairs.all().on(id) {
                    self.enter_error(pair);
                }
                self.tell_all(id, NoticeKind::Async(AsyncEvent::DeviceFatal));
                // Only a removal is reported by the connection manager as well.
                if fault == Fault::DeviceRemoval {
                    self.tell_all(id, NoticeKind::DeviceRemoval);
                }
            }
            Fault::AddressChange => self.tell_all(id, NoticeKind::AddressChange),
            Fault::PairFatal => {
                let ready = |id: &PairId| self.pairs.get(*id).is_some_and(|pair| pair.is_ready());
                let pairs: Vec<_> = self.targets(&target).into_iter().filter(ready).collect();
                if !pairs.is_empty() {
                    let place = self.env.below(pairs.len() as u64) as usize;
                    self.enter_error(pairs[place]);
                    self.tell_pair(pairs[place], AsyncEvent::QpFatal);
                }
            }
            Fault::Kill => {
                self.kill_host(id);
                self.env.count_observed(FailureClass::DisconnectMidWrite);
            }
            Fault::Stall { micros } => {
                self.env.stall(host, Duration::from_micros(micros.into()));
            }
            // The others strike at an action of the host (`Fault::strikes_by_itself`).
            _ => {}
        }
    }

    /// Returns the queue pairs that a fault may strike.
    fn targets(&self, target: &Target) -> Vec<PairId> {
        let is_one = |id: &PairId| self.manager.party(&self.pairs, *id).is_some_and(|party| party.is(target));
        // By its number, without a look at the others: a call costs the same beside many objects.
        if let Connections::Pair(number) = target.connections {
            return self.pairs.with_number(number).filter(is_one).into_iter().collect();
        }
        let host = self.hosts.numbered(target.host);
        let pairs = host.into_iter().flat_map(|host| self.pairs.all().on(host));
        pairs.filter(is_one).collect()
    }
}
