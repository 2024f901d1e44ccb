//! Counts of what a connection costs.

/// What a connection has asked of the device, and how often it had to wait.
///
/// What it has said to its peer is in [`Counters`](crate::Counters).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Work {
    /// Chains of send requests posted: each costs one write to the device, however long it is.
    pub doorbells: u64,
    /// Send requests in them.
    pub requests: u64,
    /// Chains of receives posted.
    pub receive_doorbells: u64,
    /// Completions taken, of sends and of receives.
    pub completions: u64,
    /// Writes that found no room at all, and buffers that could not be lent.
    pub stalls: u64,
    /// Bytes sent from where the application had them.
    pub lent: u64,
    /// Times that a lent part of a buffer came back.
    pub returned: u64,
}
