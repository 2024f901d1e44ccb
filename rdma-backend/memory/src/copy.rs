//! Copies byte by byte: where there is no assembly for the processor, and for Miri, which cannot look into any.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Copies the bytes of `from` to `into`, as far as both go.
pub(crate) fn out(from: &[AtomicU8], into: &mut [u8]) {
    for (from, to) in from.iter().zip(into) {
        *to = from.load(Relaxed);
    }
}

/// Copies the bytes of `from` to `to`, as far as both go.
pub(crate) fn into(from: &[u8], to: &[AtomicU8]) {
    for (from, to) in from.iter().zip(to) {
        to.store(*from, Relaxed);
    }
}

/// Copies the bytes of `from` to `to`, as far as both go.
pub(crate) fn across(from: &[AtomicU8], to: &[AtomicU8]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Relaxed), Relaxed);
    }
}
