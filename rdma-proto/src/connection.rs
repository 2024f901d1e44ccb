//! The connection machine, for both roles.

mod answers;
mod input;
mod output;
mod receiving;
mod timers;

use core::ops::Range;
use core::time::Duration;

use crate::config::{Config, Role};
use crate::credit::Credits;
use crate::error::{ApiMisuse, Effect, Error, TransportError};
use crate::send::{SendState, Span};
use crate::window::{Readable, RxWindow, TxWindow};
use crate::wire::FeatureSet;
use rdma_types::time::Instant;

use answers::Answers;
use output::{Budget, Flush};
use timers::Timers;

pub use output::Action;

/// A receive region's address and key, as announced to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RegionAddress {
    /// The address of its first byte.
    pub address: u64,
    /// The key that gives the peer access.
    pub rkey: u32,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Not established yet. Bytes written before a close are delivered once it is.
    Connecting,
    /// Bytes can flow.
    Open,
    /// Closed by this side; written bytes are still being delivered.
    Closing,
    /// Ended in order, by either side. Received bytes can still be read.
    Closed,
    /// Ended by an error. Received bytes can still be read.
    Failed(Error),
}

/// Counts of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Bytes posted towards the peer.
    pub bytes_sent: u64,
    /// Bytes the peer notified.
    pub bytes_received: u64,
    /// WRITEs with immediate posted.
    pub data_notifications_sent: u64,
    /// Plain WRITEs posted.
    pub plain_writes_sent: u64,
    /// Immediates received.
    pub data_notifications_received: u64,
    /// Control messages posted.
    pub messages_sent: u64,
    /// Control messages received.
    pub messages_received: u64,
    /// Keepalives received.
    pub keepalives_received: u64,
    /// Windows the peer registered.
    pub windows_received: u64,
    /// The most notifications ever in flight.
    pub most_in_flight: u64,
}

/// One connection, for a client or a server: wire rules, windows, credits, keepalive and end. Call
/// [`Machine::poll_action`] until `None` after any method that is not a getter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    config: Config,
    regions: [RegionAddress; 2],
    /// Memory passed to [`Machine::land`].
    landing: RegionAddress,
    stage: Stage,
    failure: Option<Error>,
    /// Whether [`Action::Disconnect`] is due and was not returned yet.
    disconnect: bool,
    /// Whether the last bytes are to be confirmed though nothing follows them.
    confirm: bool,
    rx: RxWindow,
    tx: TxWindow,
    send: SendState,
    credits: Credits,
    /// Whether acknowledgements return credits: the peer makes us wait for receives (VR-FLOW-015).
    patient: bool,
    /// Send queue slots that data leaves to control messages (VR-FLOW-009).
    slots_kept_back: u64,
    /// The rest of a flush whose first part was posted without an immediate.
    flush: Option<Flush>,
    due: Due,
    budget: Budget,
    answers: Answers,
    negotiation: Negotiation,
    timers: Timers,
    counters: Counters,
}

/// [`State`] without the error: cheaper to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Connecting,
    /// Closed before it was established, with bytes to deliver.
    Leaving,
    Open,
    Closing,
    Ended,
}

/// What may be due: unchanged state is not checked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Due {
    /// Something has happened: check everything.
    Anything,
    /// One WRITE of everything taken, within [`Machine::budget`], and nothing else.
    Write,
    /// Something waits, and nothing can be done until an event.
    Blocked,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Negotiation {
    None,
    Offered,
    Due,
    Asked,
    Answered(FeatureSet),
    Done(FeatureSet),
}

impl Machine {
    /// Returns a connection that is being established. The peer writes to `regions`, each of
    /// [`Config::region`] bytes. The second counts only if [`Config::windows`] is 2.
    ///
    /// # Errors
    /// Returns an error if a value of `config` is out of bounds.
    pub fn new(config: Config, regions: [RegionAddress; 2]) -> Result<Self, ApiMisuse> {
        config.check()?;
        // A server sends this opcode only as an answer (VR-FEAT-005).
        let asks = matches!(config.role, Role::Client) && config.negotiate;
        let longest = config.longest().unwrap_or_default();
        Ok(Self {
            config,
            regions,
            landing: RegionAddress::default(),
            stage: Stage::Connecting,
            failure: None,
            disconnect: false,
            confirm: false,
            rx: RxWindow::new(config.window, config.windows, longest),
            tx: TxWindow::new(),
            send: SendState::new(config.send_depth, config.peer_receives, config.send_buffer),
            credits: Credits::new(config.peer_receives),
            // Known once established. Nothing is posted before (VR-CONN-018).
            patient: false,
            // At most half of a short queue: data must be able to leave, too.
            slots_kept_back: u64::from(config.send_depth / 2).min(4),
            flush: None,
            due: Due::Anything,
            budget: Budget::default(),
            answers: Answers::new(),
            negotiation: if asks { Negotiation::Due } else { Negotiation::None },
            timers: Timers::new(&config),
            counters: Counters::default(),
        })
    }

    /// Returns the state.
    #[inline]
    pub const fn state(&self) -> State {
        match (self.stage, self.failure) {
            (Stage::Connecting | Stage::Leaving, _) => State::Connecting,
            (Stage::Open, _) => State::Open,
            (Stage::Closing, _) => State::Closing,
            (Stage::Ended, None) => State::Closed,
            (Stage::Ended, Some(error)) => State::Failed(error),
        }
    }

    /// Returns the error that ended the connection, if any.
    #[inline]
    pub const fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        let posted = self.send.posted();
        Counters {
            bytes_sent: posted.bytes,
            // Messages are notices too, and the send state does not tell them apart.
            data_notifications_sent: posted.notices.saturating_sub(self.counters.messages_sent),
            most_in_flight: self.most_in_flight(),
            ..self.counters
        }
    }

    /// Only handled notifications reduce the number, so this is checked before they do.
    fn most_in_flight(&self) -> u64 {
        self.counters.most_in_flight.max(self.credits.in_flight(self.send.posted().notices))
    }

    /// Returns the number of work requests returned by `poll_action`, of every kind.
    pub const fn requests(&self) -> u64 {
        self.send.posted().slots
    }

    /// Returns the number of bytes that the peer has notified, like [`Counters::bytes_received`].
    #[inline]
    pub const fn bytes_received(&self) -> u64 {
        self.counters.bytes_received
    }

    /// Returns the features of both sides, once negotiated.
    pub const fn features(&self) -> FeatureSet {
        match self.negotiation {
            Negotiation::Done(features) => features,
            _ => FeatureSet::NONE,
        }
    }

    /// Whether windows may be registered before they are needed (VM-001).
    const fn queues_windows(&self) -> bool {
        self.features().contains(FeatureSet::MULTI_BUFFER)
    }

    // The peer handles the choice before anything sent later.
    fn agree(&mut self, features: FeatureSet) {
        self.negotiation = Negotiation::Done(features);
        self.rx.go_ahead(self.queues_windows());
    }

    /// Returns whether the peer has registered a window, so that bytes can leave.
    #[inline]
    pub const fn has_peer_window(&self) -> bool {
        self.tx.is_registered()
    }

    /// Returns the next received bytes. Another region may hold more, so ask again after consuming.
    #[inline]
    pub const fn readable(&self) -> Option<Readable> {
        self.rx.readable()
    }

    /// Returns all received bytes, in order, from at most three regions.
    #[inline]
    pub const fn all_readable(&self) -> [Option<Readable>; 3] {
        self.rx.all_readable()
    }

    /// Returns the number of unconsumed received bytes.
    #[inline]
    pub const fn unread(&self) -> u64 {
        self.rx.unread()
    }

    /// Returns whether the memory of [`Machine::land`] is in use, now or for a coming window.
    pub const fn is_landing(&self) -> bool {
        self.rx.is_landing()
    }

    /// Returns the part of that memory with unread bytes, or that the peer may still write.
    pub const fn landing_in_use(&self) -> Range<u32> {
        self.rx.landing_in_use()
    }

    /// Returns whether the peer may still write to that memory.
    pub const fn may_land(&self) -> bool {
        self.rx.may_land()
    }

    /// Returns whether windows are announced ahead ([`FeatureSet::MULTI_BUFFER`]), so that
    /// [`Machine::drop_region`] drops none.
    pub const fn announces_ahead(&self) -> bool {
        self.rx.announces_ahead()
    }

    /// Returns the index of a second receive region, to be added: the only one is full and unread.
    #[inline]
    pub const fn lacks_region(&self) -> Option<u8> {
        self.rx.lacks_region()
    }

    /// Returns the contiguous free space of the send buffer. There may be more at its beginning.
    #[inline]
    pub const fn space(&self) -> Span {
        self.send.space()
    }

    /// Returns whether [`Machine::space`] has room for a byte.
    #[inline]
    pub const fn has_space(&self) -> bool {
        self.send.has_space()
    }

    /// Returns how many bytes [`Machine::lend`] takes now: none while a loan is not posted.
    pub const fn lendable(&self) -> u32 {
        self.send.lendable()
    }

    /// Returns the number of accepted bytes that are not posted: they wait for window or credit.
    #[inline]
    pub const fn unposted(&self) -> u64 {
        self.send.unposted()
    }

    /// Returns the number of accepted bytes that are not known to have arrived.
    pub const fn unconfirmed(&self) -> u64 {
        self.send.unconfirmed()
    }

    /// Has [`Machine::unconfirmed`] become 0 soon, also if nothing follows the last bytes and none
    /// of their requests has a signal: an empty WRITE leaves, which costs the peer nothing. Ignored
    /// while the send queue is full.
    pub fn confirm(&mut self) {
        if matches!(self.stage, Stage::Open) && self.send.has_unsignaled() {
            self.confirm = true;
            self.due = Due::Anything;
        }
    }

    /// Returns the number of bytes known to have arrived.
    pub const fn confirmed(&self) -> u64 {
        self.send.done().bytes
    }

    /// Returns the latest time for the next call of [`Machine::handle_timeout`].
    pub fn next_timeout(&self) -> Option<Instant> {
        match self.stage {
            Stage::Open | Stage::Closing => self.timers.next(),
            // The driver bounds the handshake (VR-CONN-008), and a close has its own bound.
            Stage::Leaving => self.timers.close_at(),
            Stage::Connecting | Stage::Ended => None,
        }
    }

    /// Returns whether [`Machine::next_timeout`] may have come nearer since the last call.
    #[inline]
    pub fn take_sooner(&mut self) -> bool {
        self.timers.take_sooner()
    }

    /// Takes `bytes` that were put at the beginning of [`Machine::space`].
    ///
    /// # Errors
    /// Returns an error if there is less space, or if the connection is not open for writing.
    #[inline]
    pub fn commit(&mut self, bytes: usize) -> Result<(), Error> {
        self.writable()?;
        if bytes > 0 {
            self.send.commit(bytes)?;
            self.due = Due::Anything;
        }
        Ok(())
    }

    /// Takes at most `most` bytes and returns where to put them before the next action:
    /// [`Machine::space`] and [`Machine::commit`] in one. There may be more room at the buffer's
    /// beginning. Returns `None` if there is no room, or the connection takes no bytes.
    #[inline]
    pub fn put(&mut self, most: usize) -> Option<Span> {
        if self.due == Due::Nothing && most > 0 && self.budget.covers(self.send.posted(), most) {
            // With `Due::Nothing`, all earlier bytes are posted: these alone are the next WRITE.
            // They are fewer than the contiguous space, a u32.
            self.due = Due::Write;
            let place = self.send.next_span(most as u32);
            self.send.write(most as u64);
            return Some(place);
        }
        self.put_what_fits(most)
    }

    #[inline(never)]
    fn put_what_fits(&mut self, most: usize) -> Option<Span> {
        let Span { offset, len } = self.space();
        // At most the space, a u32.
        let len = if most < len as usize { most as u32 } else { len };
        if len == 0 || !self.takes_bytes() {
            return None;
        }
        self.due = Due::Anything;
        self.send.write(len.into());
        Some(Span { offset, len })
    }

    /// Returns whether [`Machine::replace_send_buffer`] has an effect: no byte of the send buffer
    /// waits to be posted, and none is in flight if the other is shorter.
    pub const fn can_replace_send_buffer(&self, length: u32) -> bool {
        self.send.can_replace_buffer(length)
    }

    /// Continues with another send buffer of `length` bytes, from its beginning. Without effect
    /// unless [`Machine::can_replace_send_buffer`].
    ///
    /// Keep the present one until [`Machine::unconfirmed`] shows that all bytes have arrived. Until
    /// then they also count as used room of the new one.
    pub fn replace_send_buffer(&mut self, length: u32) {
        if self.can_replace_send_buffer(length) {
            self.send.replace_buffer(length);
            // It was computed for the old one.
            self.budget = Budget::default();
        }
    }

    /// Takes `bytes` of other memory, behind everything taken before. It must stay unchanged until
    /// [`Machine::unconfirmed`] shows that all of them have arrived.
    ///
    /// # Errors
    /// Returns an error beyond [`Machine::lendable`], or if the connection is not open for writing.
    pub fn lend(&mut self, bytes: usize) -> Result<(), Error> {
        self.writable()?;
        self.send.lend(bytes)?;
        if bytes > 0 {
            self.due = Due::Anything;
        }
        Ok(())
    }

    #[inline]
    const fn writable(&self) -> Result<(), Error> {
        if self.takes_bytes() { Ok(()) } else { self.refuse_bytes() }
    }

    /// Returns whether the connection accepts bytes, now or once it is established.
    #[inline]
    pub const fn takes_bytes(&self) -> bool {
        matches!(self.stage, Stage::Connecting | Stage::Open)
    }

    #[cold]
    const fn refuse_bytes(&self) -> Result<(), Error> {
        match (self.stage, self.failure) {
            (Stage::Connecting | Stage::Open, _) => Ok(()),
            (Stage::Leaving | Stage::Closing, _) => Err(Error::ApiMisuse(ApiMisuse::WriteAfterClose)),
            (Stage::Ended, None) => Err(Error::Transport(TransportError::Disconnected)),
            (Stage::Ended, Some(error)) => Err(error),
        }
    }

    /// Ends the connection once everything written has arrived, or after `linger` (VR-CLOSE-004).
    /// May be called again. With written bytes, a connection is established first (VR-CLOSE-001);
    /// without, it ends at once.
    pub fn close(&mut self, now: Instant, linger: Duration) {
        match self.stage {
            Stage::Connecting if self.send.unconfirmed() == 0 => self.end(),
            Stage::Connecting => self.close_by(Stage::Leaving, now.after(linger)),
            Stage::Open => self.close_by(Stage::Closing, now.after(linger)),
            // A task that polls its close calls this each time. The first deadline holds
            // (VR-CLOSE-004).
            Stage::Leaving | Stage::Closing | Stage::Ended => {}
        }
    }

    fn close_by(&mut self, stage: Stage, deadline: Instant) {
        self.stage = stage;
        self.due = Due::Anything;
        self.timers.close_by(deadline);
    }

    /// Returns whether the connection has ended, in order or by an error.
    #[inline]
    pub const fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    #[inline]
    const fn is_established(&self) -> bool {
        matches!(self.stage, Stage::Open | Stage::Closing)
    }

    #[inline]
    fn look_for_announcement(&mut self) {
        if self.rx.unannounced().is_some() {
            self.due = Due::Anything;
        }
    }

    fn end(&mut self) {
        self.stage = Stage::Ended;
        self.disconnect = true;
        self.due = Due::Anything;
    }

    /// Ends the connection. Only the first error counts (VR-CLOSE-006, VR-CLOSE-007).
    #[cold]
    fn fail(&mut self, error: Error) {
        if !self.has_ended() && matches!(error.effect(), Effect::Disconnect) {
            self.stage = Stage::Ended;
            self.failure = Some(error);
            self.disconnect = true;
            self.due = Due::Anything;
        }
    }
}
