//! Instead of the timeline, which a mutant does not need.

use rdma_softsim::trace::Entry;

/// Nothing.
#[must_use]
pub const fn render(_trace: &[Entry], _most: usize) -> String {
    String::new()
}
