//! Event channels: connection manager events, in order.

use std::collections::VecDeque;

use rdma_backend::{AsyncEvent, ConnectParams, IdentifierKey};

use super::context::About;
use super::queue_pair::Owner;
use super::{ChannelId, HostId, IdentifierId, Model, PairId, Wake};
use crate::Error;
use crate::failure_class::FailureClass;
use crate::trace::EntryKind;

pub(crate) struct EventChannel {
    pub(super) host: HostId,
    notices: VecDeque<Notice>,
    /// Whether a wake was raised and not cleared.
    raised: bool,
}

pub(crate) struct Taken {
    pub(crate) notice: Option<Notice>,
    /// Whether the channel became empty, so that the wake must be cleared.
    pub(crate) emptied: bool,
}

/// An event and its identifier.
pub(crate) struct Notice {
    identifier: IdentifierId,
    pub(crate) key: IdentifierKey,
    pub(crate) kind: NoticeKind,
    /// The private data of a request, a reply or a reject.
    pub(crate) data: Box<[u8]>,
}

/// The part of [`CmEventKind`](rdma_backend::CmEventKind) that this fabric raises, with ids for
/// handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoticeKind {
    AddressResolved,
    AddressError(i32),
    RouteResolved,
    RouteError(i32),
    ConnectRequest {
        id: IdentifierId,
        key: IdentifierKey,
        peer: ConnectParams,
    },
    Established(ConnectParams),
    /// The peer has accepted, and the queue pair's owner must make it ready.
    ConnectResponse,
    Unreachable(i32),
    ConnectError(i32),
    Rejected(i32),
    Disconnected,
    TimewaitExit,
    DeviceRemoval,
    AddressChange,
    Async(AsyncEvent),
}

impl NoticeKind {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::AddressResolved => "address resolved",
            Self::AddressError(_) => "address error",
            Self::RouteResolved => "route resolved",
            Self::RouteError(_) => "route error",
            Self::ConnectRequest { .. } => "connect request",
            Self::Established(_) => "established",
            Self::ConnectResponse => "connect response",
            Self::Unreachable(_) => "unreachable",
            Self::ConnectError(_) => "connect error",
            Self::Rejected(_) => "rejected",
            Self::Disconnected => "disconnected",
            Self::TimewaitExit => "timewait exit",
            Self::DeviceRemoval => "device removal",
            Self::AddressChange => "address change",
            Self::Async(event) => event.describe(),
        }
    }

    /// The failure class that reading it shows.
    const fn class(&self) -> Option<FailureClass> {
        match self {
            Self::AddressError(_)
            | Self::RouteError(_)
            | Self::Unreachable(_)
            | Self::ConnectError(_)
            | Self::Rejected(_) => Some(FailureClass::ConnectionSetup),
            Self::TimewaitExit | Self::DeviceRemoval | Self::AddressChange | Self::Async(_) => {
                Some(FailureClass::AbruptEvent)
            }
            _ => None,
        }
    }

    const fn child(&self) -> Option<IdentifierId> {
        match self {
            Self::ConnectRequest { id, .. } => Some(*id),
            _ => None,
        }
    }
}

impl Model {
    pub(crate) fn create_channel(&mut self, host: HostId) -> Result<ChannelId, Error> {
        self.alive(host)?;
        if self.strikes_creation(host) {
            return Err(Error::Descriptor(rustix::io::Errno::MFILE));
        }
        Ok(self.channels.insert(EventChannel { host, notices: VecDeque::new(), raised: false }))
    }

    /// Destroys a channel and the unread connect requests on it.
    pub(crate) fn destroy_channel(&mut self, id: ChannelId) {
        for identifier in self.identifiers.select(|identifier| identifier.channel == id) {
            self.destroy_identifier(identifier);
        }
        self.channels.remove(id);
    }

    pub(super) fn notify(&mut self, identifier: IdentifierId, kind: NoticeKind) {
        self.notify_with(identifier, kind, Box::default());
    }

    /// Raises an event like [`Model::notify`], with private data.
    pub(super) fn notify_with(&mut self, identifier: IdentifierId, kind: NoticeKind, data: Box<[u8]>) {
        let Some(owner) = self.identifiers.get(identifier) else { return };
        let (key, channel, host) = (owner.key, owner.channel, owner.host.index());
        self.note(|| EntryKind::Told { host, identifier: key.0, what: kind.name() });
        self.append(channel, Notice { identifier, key, kind, data });
    }

    pub(super) fn tell_pair(&mut self, pair: PairId, event: AsyncEvent) {
        match (self.pairs.get(pair).map(|pair| pair.owner), event) {
            (Some(Owner::Identifier(identifier)), _) => self.notify(identifier, NoticeKind::Async(event)),
            // It was told that the queue is lost.
            (Some(Owner::Context(..)), AsyncEvent::CqErr) | (None, _) => {}
            (Some(Owner::Context(context, name)), _) => self.tell(context, event, About::Pair(name)),
        }
    }

    /// Raises an event for every identifier of a host. One of the device also goes to everyone who
    /// opened it.
    pub(super) fn tell_all(&mut self, host: HostId, kind: NoticeKind) {
        if let NoticeKind::Async(event) = kind {
            for context in self.contexts.select(|context| context.host == host) {
                self.tell(context, event, About::Device);
            }
        }
        for identifier in self.identifiers.select(|identifier| identifier.host == host) {
            self.notify(identifier, kind);
        }
    }

    fn append(&mut self, id: ChannelId, notice: Notice) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        channel.notices.push_back(notice);
        if !core::mem::replace(&mut channel.raised, true) {
            self.wakes.push(Wake::Events(id));
        }
    }

    pub(crate) fn take_notice(&mut self, id: ChannelId) -> Result<Taken, Error> {
        let channel = self.channels.get_mut(id).ok_or(Error::Gone("event channel"))?;
        let notice = channel.notices.pop_front();
        let emptied = channel.notices.is_empty() && core::mem::take(&mut channel.raised);
        if let Some(&Notice { identifier, kind, .. }) = notice.as_ref() {
            if let Some(class) = kind.class() {
                self.count_observed(class);
            }
            match kind {
                NoticeKind::Established(_) => self.establish(identifier),
                NoticeKind::Disconnected if self.simulation.is_some() => {
                    let pair = self.identifiers.get(identifier).and_then(|owner| owner.pair);
                    if pair.is_some_and(|pair| self.ends_in_the_middle(pair)) {
                        self.count_observed(FailureClass::DisconnectMidWrite);
                    }
                }
                _ => {}
            }
        }
        Ok(Taken { notice, emptied })
    }

    pub(crate) fn has_notices(&self, id: ChannelId) -> bool {
        // A destroyed channel has an error to report.
        self.channels.get(id).is_none_or(|channel| channel.raised)
    }

    pub(super) fn unread_requests(&self, listener: IdentifierId) -> usize {
        let channel = self.identifiers.get(listener).and_then(|owner| self.channels.get(owner.channel));
        let requests = |notice: &&Notice| notice.identifier == listener && notice.kind.child().is_some();
        channel.map_or(0, |channel| channel.notices.iter().filter(requests).count())
    }

    /// Removes the unread events of `identifier` that satisfy `wanted`.
    pub(super) fn withdraw(
        &mut self,
        identifier: IdentifierId,
        wanted: impl Fn(&NoticeKind) -> bool,
    ) -> Vec<Notice> {
        let owner = self.identifiers.get(identifier);
        let Some(channel) = owner.and_then(|owner| self.channels.get_mut(owner.channel)) else {
            return Vec::new();
        };
        let mut taken = Vec::new();
        let mut kept = VecDeque::with_capacity(channel.notices.len());
        for notice in channel.notices.drain(..) {
            if notice.identifier == identifier && wanted(&notice.kind) {
                taken.push(notice);
            } else {
                kept.push_back(notice);
            }
        }
        channel.notices = kept;
        taken
    }

    /// Drops all unread events of an identifier, and the identifiers of connect requests among
    /// them.
    pub(super) fn forget_notices(&mut self, identifier: IdentifierId) {
        for notice in self.withdraw(identifier, |_| true) {
            if let Some(child) = notice.kind.child() {
                self.destroy_identifier(child);
            }
        }
    }

    /// `rdma_migrate_id(3)`: unread events move along.
    pub(crate) fn migrate(&mut self, identifier: IdentifierId, to: ChannelId) -> Result<(), Error> {
        let of = self.identifiers.get(identifier).ok_or(Error::Gone("identifier"))?.host;
        let channel = self.channels.get(to).ok_or(Error::Gone("event channel"))?;
        if self.machine(channel.host) != self.machine(of) {
            return Err(Error::Argument("the event channel is of another host"));
        }
        let moving = self.withdraw(identifier, |_| true);
        if let Some(owner) = self.identifiers.get_mut(identifier) {
            owner.channel = to;
        }
        for notice in moving {
            if let Some(child) = notice.kind.child().and_then(|child| self.identifiers.get_mut(child)) {
                child.channel = to;
            }
            self.append(to, notice);
        }
        Ok(())
    }
}
