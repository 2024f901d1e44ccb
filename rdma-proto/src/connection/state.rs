//! What a connection is in, and what it has counted.

use crate::error::Error;
use crate::wire::FeatureSet;

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

/// [`State`] without the error: cheaper to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    Connecting,
    /// Closed before it was established, with bytes to deliver.
    Leaving,
    Open,
    Closing,
    Ended,
}

/// What may be due: unchanged state is not checked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Due {
    /// Something has happened: check everything.
    Anything,
    /// One WRITE of everything taken, within `Machine::budget`, and nothing else.
    Write,
    /// Something waits, and nothing can be done until an event.
    Blocked,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Negotiation {
    None,
    Offered,
    Due,
    Asked,
    Answered(FeatureSet),
    Done(FeatureSet),
}
