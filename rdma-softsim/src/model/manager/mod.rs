//! The connection manager: identifiers, and the channels of their events.

pub(super) mod addresses;
pub(super) mod event_channel;
pub(super) mod handshake;
pub(super) mod identifier;
pub(super) mod packet;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use rdma_backend::IdentifierKey;

use super::base::arena::{Objects, visit};
use super::base::environment::Environment;
use super::base::event::Wake;
use super::base::ids::{ChannelId, HostId, IdentifierId, PairId, kind};
use super::base::target::Party;
use super::hosts::Hosts;
use super::pairs::Pairs;
use crate::error::Error;
use crate::trace::EntryKind;
use event_channel::{EventChannel, Notice, NoticeKind, Taken};
use identifier::{Identifier, Phase, ack_timeout};

pub(super) struct Manager {
    channels: Objects<kind::Channel, EventChannel>,
    all: Objects<kind::Identifier, Identifier>,
    /// The identifiers that await a host with an address.
    awaited: BTreeSet<(IpAddr, IdentifierId)>,
    /// Identifiers ever created: the next key.
    keys: u64,
}

impl Manager {
    pub(super) const fn new() -> Self {
        Self { channels: Objects::new(), all: Objects::new(), awaited: BTreeSet::new(), keys: 0 }
    }

    /// Returns how many resolutions await a host.
    #[cfg(test)]
    pub(in crate::model) fn awaiting(&self) -> usize {
        self.awaited.len()
    }

    pub(super) fn get(&self, id: IdentifierId) -> Option<&Identifier> {
        self.all.get(id)
    }

    pub(super) fn get_mut(&mut self, id: IdentifierId) -> Option<&mut Identifier> {
        self.all.get_mut(id)
    }

    pub(super) fn find(&self, id: IdentifierId) -> Result<&Identifier, Error> {
        self.all.find(id)
    }

    pub(super) fn find_mut(&mut self, id: IdentifierId) -> Result<&mut Identifier, Error> {
        self.all.find_mut(id)
    }

    pub(super) fn insert(&mut self, identifier: Identifier) -> IdentifierId {
        self.all.insert(identifier)
    }

    pub(super) fn remove(&mut self, id: IdentifierId) -> Option<Identifier> {
        self.all.remove(id)
    }

    pub(super) const fn identifiers(&self) -> &Objects<kind::Identifier, Identifier> {
        &self.all
    }

    pub(super) const fn channels(&self) -> &Objects<kind::Channel, EventChannel> {
        &self.channels
    }

    pub(super) fn channel_host(&self, id: ChannelId) -> Result<HostId, Error> {
        Ok(self.channels.find(id)?.host)
    }

    pub(super) fn create_channel(&mut self, host: HostId) -> ChannelId {
        self.channels.insert(EventChannel { host, notices: BTreeMap::new(), next: 0, raised: false })
    }

    pub(super) fn remove_channel(&mut self, id: ChannelId) {
        self.channels.remove(id);
    }

    /// Returns the identifiers of the unread connect requests on a channel.
    pub(super) fn children(&self, id: ChannelId) -> BTreeSet<IdentifierId> {
        let unread = self.channels.get(id).into_iter().flat_map(|channel| channel.notices.values());
        unread.filter_map(|notice| notice.kind.child()).collect()
    }

    pub(super) fn next_key(&mut self) -> IdentifierKey {
        self.keys += 1;
        IdentifierKey(self.keys)
    }

    /// Moves an identifier to the device of its address. A wildcard stays where it is.
    pub(super) fn take_device(&mut self, id: IdentifierId, devices: &[HostId]) {
        if let &[device] = devices {
            self.all.relocate(id, |identifier| identifier.host = device);
        }
    }

    pub(super) fn set_phase(&mut self, id: IdentifierId, phase: Phase) {
        if let Some(identifier) = self.all.get_mut(id) {
            identifier.phase = phase;
        }
    }

    pub(super) fn in_phase(&self, id: IdentifierId, phases: &[Phase]) -> bool {
        self.all.get(id).is_some_and(|identifier| phases.contains(&identifier.phase))
    }

    pub(super) fn create_identifier(
        &mut self,
        channel: ChannelId,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        let host = self.channel_host(channel)?;
        let key = self.next_key();
        Ok((self.all.insert(Identifier::new(host, channel, key, Phase::Idle)), key))
    }

    pub(super) fn notify(&mut self, env: &mut Environment, identifier: IdentifierId, kind: NoticeKind) {
        self.notify_with(env, identifier, kind, Box::default());
    }

    /// Raises an event like [`Manager::notify`], with private data.
    pub(super) fn notify_with(
        &mut self,
        env: &mut Environment,
        identifier: IdentifierId,
        kind: NoticeKind,
        data: Box<[u8]>,
    ) {
        // Without an owner there is no reader, nor of an identifier whose request is unread.
        let Some(owner) = self.all.get(identifier).filter(|owner| owner.channel != ChannelId::NONE) else {
            return;
        };
        let (key, channel, host) = (owner.key, owner.channel, owner.host.index());
        env.note(|| EntryKind::Told { host, identifier: key.0, what: kind.name() });
        self.append(env, channel, Notice { identifier, key, kind, data });
    }

    pub(super) fn append(&mut self, env: &mut Environment, id: ChannelId, notice: Notice) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        let number = channel.next;
        channel.next += 1;
        if let Some(owner) = self.all.get_mut(notice.identifier) {
            owner.unread.push_back(number);
            owner.requests += u32::from(notice.kind.child().is_some());
        }
        channel.notices.insert(number, notice);
        if !core::mem::replace(&mut channel.raised, true) {
            env.wake(Wake::Events(id));
        }
    }

    /// Takes the next event of a channel. Returns it and whether the channel became empty.
    pub(super) fn take(&mut self, id: ChannelId) -> Result<Taken, Error> {
        let channel = self.channels.find_mut(id)?;
        let notice = channel.notices.pop_first().map(|(_, notice)| notice);
        // Also if the last event was withdrawn, and there is none to take.
        let emptied = channel.notices.is_empty() && core::mem::take(&mut channel.raised);
        if let Some(&Notice { identifier, kind, .. }) = notice.as_ref()
            && let Some(owner) = self.all.get_mut(identifier)
        {
            // Its first event: channels and identifiers keep the same order.
            owner.unread.pop_front();
            owner.requests -= u32::from(kind.child().is_some());
            // On the channel that it was read from, where librdmacm puts it too.
            if let Some(child) = kind.child().and_then(|child| self.all.get_mut(child)) {
                child.channel = id;
            }
        }
        Ok(Taken { notice, emptied })
    }

    pub(super) fn has_notices(&self, id: ChannelId) -> bool {
        // A destroyed channel has an error to report.
        self.channels.get(id).is_none_or(|channel| channel.raised)
    }

    pub(super) fn unread_requests(&self, listener: IdentifierId) -> u32 {
        self.all.get(listener).map_or(0, |listener| listener.requests)
    }

    /// Removes the unread events of `identifier` that satisfy `wanted`.
    pub(super) fn withdraw(
        &mut self,
        identifier: IdentifierId,
        wanted: impl Fn(&NoticeKind) -> bool,
    ) -> Vec<Notice> {
        let Some(owner) = self.all.get_mut(identifier) else { return Vec::new() };
        let Some(channel) = self.channels.get_mut(owner.channel) else { return Vec::new() };
        let mut taken = Vec::new();
        owner.unread.retain(|number| {
            visit();
            if !channel.notices.get(number).is_some_and(|notice| wanted(&notice.kind)) {
                return true;
            }
            taken.extend(channel.notices.remove(number));
            false
        });
        owner.requests -= taken.iter().filter(|notice| notice.kind.child().is_some()).count() as u32;
        taken
    }

    /// `rdma_migrate_id(3)`: unread events move along.
    pub(super) fn migrate(
        &mut self,
        env: &mut Environment,
        hosts: &Hosts,
        identifier: IdentifierId,
        to: ChannelId,
    ) -> Result<(), Error> {
        let of = self.find(identifier)?.host;
        let channel = self.channels.find(to)?;
        // Channels belong to the machine, whatever device an identifier is on.
        if hosts.machine(channel.host) != hosts.machine(of) {
            return Err(Error::Argument("the event channel is of another host"));
        }
        let moving = self.withdraw(identifier, |_| true);
        if let Some(owner) = self.all.get_mut(identifier) {
            owner.channel = to;
        }
        // Numbered anew, behind what waits there: a channel and its identifiers keep one order.
        for notice in moving {
            self.append(env, to, notice);
        }
        Ok(())
    }

    pub(super) fn party(&self, pairs: &Pairs, id: PairId) -> Option<Party> {
        let pair = pairs.get(id)?;
        let managed = pair.identifier.and_then(|id| self.all.get(id)?.remote);
        // The connection manager knows the port, a path only the address.
        let peer = managed
            .map(|remote| (remote.ip(), Some(remote.port())))
            .or_else(|| pair.path.map(|path| (path.remote, None)));
        Some(Party { host: pair.host.index(), pair: Some(pair.number), peer })
    }

    pub(super) fn managed_party(&self, pairs: &Pairs, id: IdentifierId) -> Option<Party> {
        let identifier = self.all.get(id)?;
        let pair = identifier.pair.and_then(|pair| pairs.get(pair)).map(|pair| pair.number);
        let peer = identifier.remote.map(|remote| (remote.ip(), Some(remote.port())));
        Some(Party { host: identifier.host.index(), pair, peer })
    }

    /// Returns the traffic class of what this queue pair sends.
    pub(super) fn traffic_class(&self, pairs: &Pairs, pair: PairId) -> u8 {
        let identifier = pairs.get(pair).and_then(|pair| self.all.get(pair.identifier?));
        identifier.map_or(0, |identifier| identifier.traffic_class)
    }

    pub(super) fn local_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.all.get(id)?.local
    }

    pub(super) fn peer_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.all.get(id)?.remote
    }

    /// Returns the addresses between which this identifier's messages travel.
    pub(super) fn ends(&self, id: IdentifierId) -> Option<(IpAddr, SocketAddr)> {
        let identifier = self.all.get(id)?;
        Some((identifier.local?.ip(), identifier.remote?))
    }

    pub(super) fn note_call(&mut self, env: &mut Environment, id: IdentifierId, what: &'static str) {
        if env.is_observed()
            && let Some(identifier) = self.all.get(id)
        {
            let (host, identifier) = (identifier.host.index(), identifier.key.0);
            env.note(|| EntryKind::Called { host, identifier, what });
        }
    }

    /// Returns whether the queue pair's owner may not know yet that it is connected.
    pub(super) fn is_half_open(&self, pairs: &Pairs, pair: PairId) -> bool {
        let identifier = pairs.get(pair).and_then(|pair| pair.identifier);
        identifier.is_some_and(|id| self.in_phase(id, &[Phase::Accepted]))
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_TOS`.
    pub(super) fn set_traffic_class(&mut self, id: IdentifierId, class: u8) -> Result<(), Error> {
        self.find_mut(id)?.traffic_class = class;
        Ok(())
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(super) fn set_identifier_timeout(&mut self, id: IdentifierId, code: u8) -> Result<(), Error> {
        let timeout = ack_timeout(code)?;
        self.find_mut(id)?.ack_timeout = Some(timeout);
        Ok(())
    }
}
