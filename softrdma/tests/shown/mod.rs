//! Shows a fabric the memory of this process.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::OnceLock;

use softrdma_wire::Request;

pub(crate) fn shown() -> Request<'static> {
    static NUMBER: OnceLock<&u64> = OnceLock::new();
    // Seeded at random.
    let drawn = || &*Box::leak(Box::new(RandomState::new().build_hasher().finish()));
    let number = NUMBER.get_or_init(drawn);
    Request::ShowMemory { at: std::ptr::from_ref(*number).expose_provenance() as u64, number: **number }
}
