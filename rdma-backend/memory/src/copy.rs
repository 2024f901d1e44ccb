//! Copies byte by byte, for processors without assembly here and for Miri, which cannot run it.

use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

pub(crate) fn out(from: &[AtomicU8], into: &mut [u8]) {
    for (from, to) in from.iter().zip(into) {
        *to = from.load(Relaxed);
    }
}

pub(crate) fn into(from: &[u8], to: &[AtomicU8]) {
    for (from, to) in from.iter().zip(to) {
        to.store(*from, Relaxed);
    }
}

pub(crate) fn across(from: &[AtomicU8], to: &[AtomicU8]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Relaxed), Relaxed);
    }
}
