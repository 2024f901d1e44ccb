//! Settings of a fabric and its devices: times, limits, and counts of objects.

use core::time::Duration;

use rdma_backend::Capabilities;

/// Times of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// One-way latency of a message. Zero by default: in real time the machine's own speed is the
    /// latency.
    pub latency: Duration,
    /// How long a requester waits for an acknowledgement before it retransmits. It does so
    /// `retry_count` times, so a request on a dead link fails after `(retry_count + 1)` times this.
    /// The default is the 67 ms of the usual device setting (4.096 µs · 2¹⁴).
    pub ack_timeout: Duration,
    /// How long the connection manager repeats an unanswered message before it gives up.
    pub cm_timeout: Duration,
    /// How long a message waits for the memory of another process
    /// ([`ForeignMemory`](crate::ForeignMemory)) while no access to that memory ends. The process
    /// then counts as unresponsive, at most a quarter of this time later. A message that waits for
    /// others there is not late, nor is a long one.
    pub reach: Duration,
    /// Time from the end of a connection to
    /// [`TimewaitExit`](rdma_backend::CmEventKind::TimewaitExit).
    pub timewait: Duration,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            latency: Duration::ZERO,
            ack_timeout: Duration::from_nanos(4096 << 14),
            cm_timeout: Duration::from_secs(2),
            reach: Duration::from_secs(20),
            timewait: Duration::from_millis(10),
        }
    }
}

/// Limits of a host's device. The defaults are generous; lower them to test a small device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Work requests in one queue.
    pub max_queue_depth: u32,
    /// Completions in one completion queue.
    pub max_completions: u32,
    /// Bytes of inline data in one work request.
    pub max_inline: u32,
    /// Bytes in one region.
    pub max_region: u64,
    /// Regions.
    pub max_regions: u32,
    /// Bytes in all regions together; `RLIMIT_MEMLOCK` on a real host.
    pub locked_memory: u64,
    /// RDMA READs outstanding on a queue pair.
    pub max_read_depth: u8,
    /// Queue pairs.
    pub max_queue_pairs: u32,
    /// Completion queues.
    pub max_completion_queues: u32,
    /// Completion vectors. They have no effect here.
    pub completion_vectors: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_queue_depth: 1 << 14,
            max_completions: 1 << 20,
            max_inline: 256,
            max_region: 1 << 32,
            max_regions: 1 << 20,
            locked_memory: 1 << 33,
            max_read_depth: 16,
            max_queue_pairs: 1 << 17,
            max_completion_queues: 1 << 16,
            completion_vectors: 2,
        }
    }
}

impl Limits {
    pub(crate) const fn capabilities(&self) -> Capabilities {
        Capabilities::new(
            self.max_queue_depth,
            self.max_completions,
            self.max_region,
            self.max_read_depth,
            self.completion_vectors,
        )
    }
}

/// The resources of a host: all zero when every handle is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Event channels.
    pub event_channels: usize,
    /// Connection-manager identifiers, including those in unread connect requests.
    pub identifiers: usize,
    /// Protection domains.
    pub domains: usize,
    /// Memory regions.
    pub regions: usize,
    /// Bytes in them.
    pub registered_bytes: u64,
    /// Completion queues.
    pub completion_queues: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
}

/// The state of the link behind an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Messages pass.
    Up,
    /// Nothing passes, either way, and there is no notification.
    Down,
}
