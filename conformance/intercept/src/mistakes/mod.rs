//! Wrong implementations: our server and client on a backend that makes one mistake for them. They
//! test whether the suite notices.
//!
//! A [`Mistake`] changes a side's output, its view of its input, or its settings. A [`Variant`] is
//! made in the same way, but is correct: the suite must not report it.

mod mistake;
mod mistaken;
mod tamper;
mod variant;

use rdma_backend::Backend as _;
use rdma_softsim::SoftSim;

pub use mistake::Mistake;
pub use mistaken::{Mistaken, Wrong};
pub use variant::Variant;

/// Returns a host whose side makes `mistake`, or none. Its options need [`Mistake::disturb`] too.
#[must_use]
pub fn host(backend: SoftSim, mistake: Option<Mistake>) -> Wrong {
    conducting(backend, Conduct { mistake, variant: None })
}

/// Returns a host whose side is correct in another way than ours, or in ours.
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
