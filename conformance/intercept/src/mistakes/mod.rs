//! Wrong implementations: this library's server and client on a backend that makes one mistake for
//! them. They show what a failure looks like, and test whether the suite notices.
//!
//! A mistake ([`Mistake`]) changes a side's output (messages, writes, immediates, parameters), its
//! view of its input, or its settings. A [`Variant`] is made in the same way, but is no mistake:
//! the suite must not report it.

mod mistake;
mod mistaken;
mod tamper;
mod variant;

use rdma_backend::Backend as _;
use rdma_softsim::SoftSim;

pub use mistake::Mistake;
pub use mistaken::{Mistaken, Wrong};
pub use variant::Variant;

/// Returns a host of the embedded fabric whose side makes `mistake`, or none. The mistake may also
/// be in its options: [`Mistake::disturb`].
#[must_use]
pub fn host(backend: SoftSim, mistake: Option<Mistake>) -> Wrong {
    conducting(backend, Conduct { mistake, variant: None })
}

/// Returns a host of the embedded fabric whose side is correct in another way than ours, or in
/// ours.
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
