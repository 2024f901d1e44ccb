//! All schedules of two connection machines of `rdma-proto`, explored completely.
//!
//! The world around them is small: windows of a few bytes, a send buffer of one to three, queues
//! and receives for two or three. Deadlocks of flow control need no more. For each [`Scenario`],
//! [`search`] takes every interleaving of two applications, two drivers and the devices between
//! them. It checks each state: no byte was lost, doubled, reordered or written outside the window,
//! no notification met a missing receive where that is fatal, no buffer was handed out twice; and
//! each final state: everything has arrived.
//!
//! A search proves little unless it finds known mistakes: each [`Defect`] must be found.

pub mod search;
#[cfg(test)]
mod tests;
mod world;

use std::time::Duration;

use rdma_proto::wire::FeatureSet;
use rdma_proto::{Config, Keepalive, Role};

pub use search::{SearchEnd, Seen, Violation, explore};
pub use world::Scenario;

/// Mistakes of a driver or a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The second registration of a side is lost.
    RegistrationLost,
    /// A window is registered a second time, before it is full.
    RegistrationTwice,
    /// Receives are not posted again.
    ReceivesDwindle,
    /// One receive fewer is posted than the peer counts on.
    ReceiveForgotten,
    /// Completions do not arrive.
    CompletionLost,
    /// Completions are polled and not reported.
    CompletionUnreported,
    /// The application changes a byte that was handed over.
    BufferReused,
    /// A notification of more bytes than were written.
    NoticeTooLong,
    /// Memory that the application takes back is deregistered at once.
    MemoryLetGo,
}

impl Defect {
    const fn name(self) -> &'static str {
        match self {
            Self::RegistrationLost => "a registration gets lost",
            Self::RegistrationTwice => "a registration comes too early",
            Self::ReceivesDwindle => "receives are not posted again",
            Self::ReceiveForgotten => "a receive too few",
            Self::CompletionLost => "no completion arrives",
            Self::CompletionUnreported => "completions are not reported",
            Self::BufferReused => "a buffer is used again too early",
            Self::NoticeTooLong => "a notice of too many bytes",
            Self::MemoryLetGo => "memory is let go too early",
        }
    }

    /// A part of the message of the search that finds it.
    pub const fn shows_as(self) -> &'static str {
        match self {
            Self::RegistrationLost
            | Self::ReceivesDwindle
            | Self::CompletionLost
            | Self::CompletionUnreported => "deadlock",
            Self::RegistrationTwice => "it registered a new window",
            Self::ReceiveForgotten => "a notification without a receive",
            Self::BufferReused => "the send buffer changed",
            Self::NoticeTooLong => "it notified",
            Self::MemoryLetGo => "a WRITE into memory that was let go",
        }
    }
}

/// All defects.
pub const DEFECTS: [Defect; 9] = [
    Defect::RegistrationLost,
    Defect::RegistrationTwice,
    Defect::ReceivesDwindle,
    Defect::ReceiveForgotten,
    Defect::CompletionLost,
    Defect::CompletionUnreported,
    Defect::BufferReused,
    Defect::NoticeTooLong,
    Defect::MemoryLetGo,
];

/// The sizes of one side.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    window: u32,
    windows: u8,
    send_buffer: u32,
    send_depth: u16,
    peer_receives: u16,
}

const fn sizes(window: u32, windows: u8, send_buffer: u32, send_depth: u16, peer_receives: u16) -> Sizes {
    Sizes { window, windows, send_buffer, send_depth, peer_receives }
}

fn config(base: Config, sizes: Sizes) -> Config {
    let Sizes { window, windows, send_buffer, send_depth, peer_receives } = sizes;
    base.window(window)
        .windows(windows)
        .send_buffer(send_buffer)
        .send_depth(send_depth)
        .peer_receives(peer_receives)
        .keepalive(Some(Keepalive::NONE))
}

fn scenario(name: &'static str, client: Sizes, server: Sizes, bytes: [u8; 2], fatal: bool) -> Scenario {
    Scenario {
        name,
        client: config(Config::client(), client),
        server: config(Config::server(), server),
        bytes,
        lands: 0,
        fatal,
        closes: None,
        defect: None,
    }
}

/// Returns `scenario` with windows that are registered ahead (VM-002).
fn ahead(scenario: Scenario) -> Scenario {
    let with = |config: Config| config.features(FeatureSet::MULTI_BUFFER).negotiate(true);
    Scenario { client: with(scenario.client), server: with(scenario.server), ..scenario }
}

const fn landing(lands: u32, scenario: Scenario) -> Scenario {
    Scenario { lands, ..scenario }
}

/// Returns the scenarios that take seconds.
pub fn small() -> Vec<Scenario> {
    let tiny = sizes(1, 1, 1, 1, 2);
    let pair = sizes(2, 2, 2, 2, 2);
    let odd = sizes(2, 1, 3, 2, 3);
    let small = sizes(1, 2, 2, 2, 2);
    let closing = |scenario: Scenario, role| Scenario { closes: Some(role), ..scenario };
    vec![
        scenario("one of everything, retries", tiny, tiny, [2, 2], false),
        scenario("one of everything, no retries", tiny, tiny, [2, 2], true),
        scenario("two windows, retries", pair, pair, [3, 1], false),
        scenario("two windows, no retries", pair, pair, [3, 0], true),
        ahead(scenario("windows ahead, retries", small, small, [4, 0], false)),
        ahead(scenario("windows ahead, no retries", small, small, [3, 0], true)),
        landing(3, scenario("landing, one window", small, tiny, [4, 0], true)),
        landing(3, scenario("landing, two windows", small, small, [4, 0], false)),
        landing(2, ahead(scenario("landing, windows ahead", small, small, [3, 0], true))),
        scenario("a buffer that wraps", odd, tiny, [3, 1], true),
        closing(scenario("the client closes", tiny, tiny, [1, 1], true), Role::Client),
        closing(scenario("the server closes", tiny, tiny, [1, 1], true), Role::Server),
    ]
}

/// Returns the scenarios that take minutes.
pub fn large() -> Vec<Scenario> {
    let tiny = sizes(1, 1, 1, 1, 2);
    let pair = sizes(2, 2, 2, 2, 2);
    let wide = sizes(3, 2, 3, 3, 4);
    let single = sizes(4, 1, 3, 3, 3);
    let closing = |scenario: Scenario, role| Scenario { closes: Some(role), ..scenario };
    vec![
        scenario("one of everything, retries", tiny, tiny, [4, 4], false),
        scenario("one of everything, no retries", tiny, tiny, [4, 4], true),
        scenario("two windows, retries", pair, pair, [4, 3], false),
        scenario("two windows, no retries", pair, pair, [4, 3], true),
        scenario("two windows, no retries, more bytes", pair, pair, [4, 4], true),
        scenario("wide to one, no retries", wide, tiny, [5, 2], true),
        ahead(scenario("windows ahead, retries", pair, pair, [4, 1], false)),
        ahead(scenario("windows ahead, no retries", pair, pair, [4, 1], true)),
        landing(4, scenario("landing, two windows", pair, pair, [5, 1], true)),
        landing(4, ahead(scenario("landing, windows ahead", pair, pair, [5, 0], true))),
        scenario("one window, no retries", single, single, [5, 2], true),
        closing(scenario("the client closes", pair, pair, [3, 2], true), Role::Client),
        closing(scenario("the server closes", pair, pair, [3, 2], true), Role::Server),
    ]
}

/// Returns a scenario in which `defect` must show.
pub fn with_defect(defect: Defect) -> Scenario {
    let pair = sizes(2, 1, 2, 2, 2);
    let base = scenario(defect.name(), pair, pair, [5, 1], defect != Defect::ReceivesDwindle);
    let lands = if defect == Defect::MemoryLetGo { 4 } else { 0 };
    Scenario { defect: Some(defect), lands, ..base }
}

/// Returns a line about a search.
pub fn line(scenario: &Scenario, seen: &Seen, end: &SearchEnd) -> String {
    let Seen { states, steps, goals, depth, widest, took } = *seen;
    let ended = match end {
        SearchEnd::Complete => "complete".into(),
        SearchEnd::Truncated => "TRUNCATED".into(),
        SearchEnd::Violated(Violation { what, path }) => {
            format!("VIOLATED after {} steps: {what}", path.len())
        }
    };
    let took = Duration::as_secs_f64(&took);
    format!(
        "{:36} {:?}: {states} states, {steps} steps, {goals} ends, depth {depth}, widest {widest}, {took:.1} s: {ended}",
        scenario.name, scenario.bytes
    )
}
