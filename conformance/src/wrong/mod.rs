//! Wrong implementations: this library's server and client on a backend that makes one mistake for them, to show what a failure
//! looks like and to see whether the suite notices.
//!
//! A mistake ([`Mistake`]) is in what leaves a side (messages, writes, immediates, parameters), in what it is told of what
//! came, or in its settings.

mod mistake;
mod mistaken;
mod tamper;

use rdma_backend::Backend as _;
use rdma_softsim::SoftSim;

pub use mistake::Mistake;
pub use mistaken::{Mistaken, Wrong};

/// Returns a host of the embedded fabric whose side makes `mistake`, or none. The mistake may also be in its options:
/// [`Mistake::disturb`].
#[must_use]
pub fn host(backend: SoftSim, mistake: Option<Mistake>) -> Wrong {
    let made = backend.now();
    Wrong::by(backend, Mistaken::new(mistake, made))
}
