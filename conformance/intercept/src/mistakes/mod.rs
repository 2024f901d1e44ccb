//! Wrong implementations: this library's server and client on a backend that makes one mistake for them, to show what a failure
//! looks like and to see whether the suite notices.
//!
//! A mistake ([`Mistake`]) is in what leaves a side (messages, writes, immediates, parameters), in what it is told of what
//! came, or in its settings. A [`Variant`] is made in the same way, and is no mistake: the suite must not take it for one.

mod mistake;
mod mistaken;
mod tamper;
mod variant;

use rdma_backend::Backend as _;
use rdma_softsim::SoftSim;

pub use mistake::Mistake;
pub use mistaken::{Mistaken, Wrong};
pub use variant::Variant;

/// Returns a host of the embedded fabric whose side makes `mistake`, or none. The mistake may also be in its options:
/// [`Mistake::disturb`].
#[must_use]
pub fn host(backend: SoftSim, mistake: Option<Mistake>) -> Wrong {
    conducting(backend, Conduct { mistake, variant: None })
}

/// Returns a host of the embedded fabric whose side is right in another way than ours, or in ours.
#[must_use]
pub fn variant(backend: SoftSim, variant: Option<Variant>) -> Wrong {
    conducting(backend, Conduct { mistake: None, variant })
}

fn conducting(backend: SoftSim, conduct: Conduct) -> Wrong {
    let made = backend.now();
    Wrong::by(backend, Mistaken::new(conduct, made))
}

/// How a side differs from ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conduct {
    mistake: Option<Mistake>,
    variant: Option<Variant>,
}
