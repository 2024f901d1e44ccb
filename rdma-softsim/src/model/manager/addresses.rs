//! Addresses of identifiers: binding, listening, and resolution.
//!
//! A program may begin resolutions faster than they end, and destroy what they are for. So a
//! scheduled end goes with its identifier, except in simulations, which count all events.

use core::time::Duration;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use rdma_backend::IdentifierKey;

use super::Manager;
use super::event_channel::NoticeKind;
use super::identifier::{MOST_UNREAD, NET_UNREACHABLE, Phase, TIMED_OUT, listen_backlog};
use crate::error::Error;
use crate::faults::{Fault, Site};
use crate::model::PIECE;
use crate::model::base::arena::visit;
use crate::model::base::environment::Environment;
use crate::model::base::event::Event;
use crate::model::base::ids::{ChannelId, HostId, IdentifierId};
use crate::model::base::target::Target;
use crate::model::hosts::Hosts;
use crate::model::pairs::Pairs;

impl Manager {
    /// `rdma_bind_addr(3)`.
    pub(in crate::model) fn bind(
        &mut self,
        hosts: &mut Hosts,
        id: IdentifierId,
        address: SocketAddr,
    ) -> Result<(), Error> {
        let identifier = self.find(id)?;
        if identifier.phase != Phase::Idle || identifier.bound.is_some() {
            return Err(Error::State("an identifier is bound once, before anything else"));
        }
        let devices = hosts.devices_at(identifier.host, address.ip())?;
        let address = hosts.claim(&devices, address)?;
        // An address binds an identifier to its device, too (`rdma_bind_addr(3)`).
        self.take_device(id, &devices);
        if let Some(identifier) = self.get_mut(id) {
            // Apart from `local`, which a resolution replaces, also one that fails.
            identifier.bound = Some(address);
            identifier.local = Some(address);
        }
        Ok(())
    }

    pub(in crate::model) fn listen(
        &mut self,
        hosts: &mut Hosts,
        channel: ChannelId,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        let host = self.channel_host(channel)?;
        let devices = hosts.devices_at(host, address.ip())?;
        // Before the identifier is made: a taken address leaves none behind.
        let address = hosts.claim(&devices, address)?;
        let (id, key) = self.create_identifier(channel)?;
        self.begin_listening(hosts, id, address, backlog)?;
        Ok((id, key))
    }

    /// `rdma_listen(3)` on a bound identifier.
    pub(in crate::model) fn listen_on(
        &mut self,
        hosts: &mut Hosts,
        id: IdentifierId,
        backlog: u32,
    ) -> Result<(), Error> {
        let identifier = self.find(id)?;
        let (Phase::Idle, Some(local)) = (identifier.phase, identifier.local) else {
            return Err(Error::State("an identifier listens once it is bound"));
        };
        self.begin_listening(hosts, id, local, backlog)
    }

    pub(in crate::model) fn begin_listening(
        &mut self,
        hosts: &mut Hosts,
        id: IdentifierId,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<(), Error> {
        let devices = hosts.devices_at(self.find(id)?.host, address.ip())?;
        // The port may have been taken since it was bound.
        let address = hosts.claim(&devices, address)?;
        let backlog = listen_backlog(backlog);
        let identifier = self.find_mut(id)?;
        identifier.phase = Phase::Listening { backlog };
        identifier.local = Some(address);
        self.take_device(id, &devices);
        // On all of them, if the address is a wildcard.
        hosts.listen(&devices, address, id);
        Ok(())
    }

    pub(in crate::model) fn resolve_address(
        &mut self,
        env: &mut Environment,
        hosts: &mut Hosts,
        pairs: &Pairs,
        id: IdentifierId,
        (local, remote): (Option<SocketAddr>, SocketAddr),
        timeout: Duration,
    ) -> Result<(), Error> {
        let identifier = self.find(id)?;
        if identifier.phase != Phase::Idle {
            return Err(Error::State("the address of an identifier is resolved once"));
        }
        if identifier.unread.len() >= MOST_UNREAD {
            return Err(Error::State("the identifier has too many unread events"));
        }
        let known = hosts.at(remote.ip()).is_some();
        let host = identifier.host;
        // `rdma_bind_addr(3)` may have come before.
        let local = local.or(identifier.bound);
        let source = match local {
            Some(local) if !local.ip().is_unspecified() => Some((hosts.devices_at(host, local.ip())?, local)),
            other => {
                // A wildcard names a port only: the route to the peer decides the device.
                let port = other.map_or(0, |local| local.port());
                let source = hosts.source_for(host, remote.ip());
                source.map(|(device, ip)| (vec![device], SocketAddr::new(ip, port)))
            }
        };
        let source = match source {
            Some((devices, local)) => {
                let local = hosts.claim(&devices, local)?;
                self.take_device(id, &devices);
                Some(local)
            }
            None => None,
        };
        let latency = env.parameters().latency;
        if let Some(identifier) = self.get_mut(id) {
            // Before faults are looked for, which may name this peer.
            identifier.remote = Some(remote);
        }
        let unresolved = self.strikes_resolution(env, pairs, id, Fault::AddressError);
        let resolving = Phase::ResolvingAddress;
        let (phase, delay, how) = match source {
            // As where no host answers for an address: only the time-out ends it.
            Some(_) if unresolved => (resolving, timeout, NoticeKind::AddressError(TIMED_OUT)),
            // No device of this machine has an address of that family.
            None => (resolving, latency, NoticeKind::AddressError(NET_UNREACHABLE)),
            Some(_) if !known => (Phase::AwaitingHost, timeout, NoticeKind::AddressError(TIMED_OUT)),
            Some(_) => (resolving, latency, NoticeKind::AddressResolved),
        };
        if let Some(identifier) = self.get_mut(id) {
            identifier.phase = phase;
            identifier.local = source;
        }
        if phase == Phase::AwaitingHost {
            self.awaited.insert((remote.ip(), id));
        }
        self.end_resolution(env, id, delay, how);
        Ok(())
    }

    /// Resolves identifiers that await a host with one of these addresses, the first of them.
    /// Returns whether there are no more.
    pub(in crate::model) fn found(&mut self, env: &mut Environment, addresses: &[IpAddr]) -> bool {
        // By place, whichever address each of them awaits.
        let mut found = BTreeSet::new();
        for ip in addresses {
            let awaiting = (*ip, IdentifierId::FIRST)..=(*ip, IdentifierId::NONE);
            found
                .extend(self.awaited.range(awaiting).inspect(|_| visit()).map(|(_, id)| *id).take(PIECE + 1));
        }
        let all = found.len() <= PIECE;
        for id in found.into_iter().take(PIECE) {
            self.await_no_more(id);
            self.set_phase(id, Phase::ResolvingAddress);
            // Beside its time-out: the first of the two ends it.
            self.end_resolution(env, id, env.parameters().latency, NoticeKind::AddressResolved);
        }
        all
    }

    pub(in crate::model) fn await_no_more(&mut self, id: IdentifierId) {
        if let Some(remote) = self.get(id).and_then(|identifier| identifier.remote) {
            self.awaited.remove(&(remote.ip(), id));
        }
    }

    pub(in crate::model) fn resolve_route(
        &mut self,
        env: &mut Environment,
        pairs: &Pairs,
        id: IdentifierId,
    ) -> Result<(), Error> {
        if self.find(id)?.phase != Phase::AddressResolved {
            return Err(Error::State("a route is resolved after the address"));
        }
        let how = match self.strikes_resolution(env, pairs, id, Fault::RouteError) {
            true => NoticeKind::RouteError(TIMED_OUT),
            false => NoticeKind::RouteResolved,
        };
        self.set_phase(id, Phase::ResolvingRoute);
        self.end_resolution(env, id, env.parameters().latency, how);
        Ok(())
    }

    /// Returns whether a fault makes the resolution of the identifier's address or route fail.
    pub(in crate::model) fn strikes_resolution(
        &mut self,
        env: &mut Environment,
        pairs: &Pairs,
        id: IdentifierId,
        which: Fault,
    ) -> bool {
        let party = self.managed_party(pairs, id);
        let strikes = |fault: &Fault, on: &Target| *fault == which && party.is_some_and(|party| party.is(on));
        env.strike(Site::Resolve, strikes).is_some()
    }

    /// Ends a resolution. Only its first end counts: its host, or its time-out.
    pub(in crate::model) fn resolved(
        &mut self,
        env: &mut Environment,
        id: IdentifierId,
        resolution: u64,
        how: NoticeKind,
    ) {
        let current = self.get(id).map(|identifier| identifier.resolutions);
        if current != Some(resolution) {
            return;
        }
        self.await_no_more(id);
        self.forget_ends(env, id);
        let Some(identifier) = self.get_mut(id) else { return };
        identifier.resolutions += 1;
        identifier.phase = match how {
            NoticeKind::AddressResolved => Phase::AddressResolved,
            NoticeKind::RouteResolved => Phase::RouteResolved,
            // As with rdma_cm, the owner may try again.
            _ => Phase::Idle,
        };
        self.notify(env, id, how);
    }

    pub(in crate::model) fn device(&self, id: IdentifierId) -> Result<HostId, Error> {
        let identifier = self.find(id)?;
        // A wildcard has no device: case `verbs.connect.wildcard`.
        let bound = identifier.local.is_some_and(|local| !local.ip().is_unspecified());
        if matches!(identifier.phase, Phase::Idle | Phase::ResolvingAddress | Phase::AwaitingHost) || !bound {
            return Err(Error::State("the identifier has no device before its address is resolved"));
        }
        Ok(identifier.host)
    }

    /// Ends the present resolution of an identifier after `delay`, unless it has ended before.
    pub(in crate::model) fn end_resolution(
        &mut self,
        env: &mut Environment,
        id: IdentifierId,
        delay: Duration,
        how: NoticeKind,
    ) {
        if let Some(identifier) = self.get_mut(id) {
            let resolved = Event::Resolved { id, resolution: identifier.resolutions, how };
            identifier.ends.extend(env.schedule(delay, resolved));
        }
    }

    /// Handles that the scheduled ends of a resolution have no meaning any more.
    pub(in crate::model) fn forget_ends(&mut self, env: &mut Environment, id: IdentifierId) {
        let observed = env.is_observed();
        let Some(identifier) = self.get_mut(id) else { return };
        // Simulations count all events, void ones too.
        for end in identifier.ends.drain(..).filter(|_| !observed) {
            env.cancel(end);
        }
    }
}
