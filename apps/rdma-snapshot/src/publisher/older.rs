//! Snapshots that a newer one has replaced, for the readers that have begun them (VS-TABLE-007).
//!
//! Both are followed by the same history, so later writes are chunks of all tables, in one memory.
//! An older snapshot is given to readers that name it. Its own memory is released once all of them
//! have read it, and the rest once no reader has been there for a lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::Region;
use rdma_backend::time::Instant;
use rdma_conn::Descriptors;

use super::Publisher;
use super::session::{Log, Terms};
use super::store::Store;
use crate::error::Error;
use crate::reader::Offer;

/// A table that a newer one has replaced.
pub(super) struct Older<B: Descriptors> {
    pub(super) terms: Terms,
    pub(super) log: Log,
    /// First its own, then those that it shares with newer tables.
    regions: Vec<Arc<B::Region>>,
    /// Its own regions that it still keeps, and the chunks in them.
    own: usize,
    chunks: u64,
    /// Since when it has no reader.
    unread: Option<Instant>,
}

impl<B: Descriptors> Older<B> {
    pub(super) fn new(terms: Terms, store: Store<B>) -> Self {
        let (log, regions) = store.into_table();
        let (own, chunks) = (regions.len(), log.entries.len() as u64);
        Self { terms, log, regions, own, chunks, unread: None }
    }

    /// Appends the last chunk of the newest table.
    pub(super) fn follow(&mut self, newest: &Store<B>) {
        let (Some(entry), Some(region)) = (newest.log.entries.last(), newest.regions().last()) else {
            return;
        };
        let mut entry = *entry;
        entry.index = (self.log.entries.len() as u64).into();
        self.log.entries.push(entry);
        if self.regions.last().is_none_or(|last| !Arc::ptr_eq(last, region)) {
            self.regions.push(Arc::clone(region));
        }
    }

    /// Releases memory that no reader needs. `slowest` is the number of chunks that each of its
    /// readers has; `None` without readers. Returns false once it is to be removed.
    pub(super) fn sweep(&mut self, slowest: Option<u64>, lease: Duration, now: Instant) -> bool {
        let Some(slowest) = slowest else {
            return now.since(*self.unread.get_or_insert(now)) < lease;
        };
        self.unread = None;
        if slowest >= self.chunks {
            self.regions.drain(..std::mem::take(&mut self.own));
            self.log.released = self.chunks;
        }
        true
    }
}

impl<B: Descriptors> Publisher<B> {
    /// Returns the memory for another snapshot, which no reader sees before [`Publisher::renew`].
    pub(crate) fn prepare(&mut self) -> Store<B> {
        let mut next = Store::new(Arc::clone(self.store.domain()), self.config.memory);
        next.beside(self.kept());
        next
    }

    /// Returns the bytes of the newest snapshot, once it is complete.
    pub(crate) fn snapshot_bytes(&self) -> Option<u64> {
        self.store.log.mark.map(|mark| mark.bytes.get())
    }

    /// Returns the bytes of later writes in the newest table.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.store.bytes().saturating_sub(self.snapshot_bytes().unwrap_or(u64::MAX))
    }

    /// Returns the bytes of memory of all snapshots.
    pub(crate) fn kept(&self) -> u64 {
        kept(&self.older, &self.store).saturating_add(self.store.bytes())
    }

    /// Offers a complete snapshot to new readers, in place of the current one. Readers of that one
    /// continue with the later writes of the new one, from its byte `shared_from` on. A chunk must
    /// begin there, at the offset of the history at which the current table ends.
    ///
    /// # Errors
    /// There is no entropy, or no port for READs.
    pub(crate) fn renew(&mut self, next: Store<B>, offer: Offer, shared_from: u64) -> Result<(), Error> {
        let terms = self.terms(None, offer)?;
        let store = std::mem::replace(&mut self.store, next);
        if let Some(before) = self.terms.replace(terms) {
            self.older.push(Older::new(before, store));
        }
        self.shared_from = shared_from;
        self.account();
        Ok(())
    }

    fn account(&mut self) {
        let others = kept(&self.older, &self.store);
        self.store.beside(others);
    }

    /// Releases memory of older snapshots that no reader needs.
    pub(super) fn sweep(&mut self) {
        if self.older.is_empty() {
            return;
        }
        let (members, now, lease) = (&self.members, self.backend.now(), self.config.lease);
        self.older.retain_mut(|older| {
            let of_it = members.iter().filter(|one| one.session.snapshot == Some(older.terms.snapshot));
            older.sweep(of_it.map(|one| one.session.has).min(), lease, now)
        });
        self.account();
    }
}

/// Returns the bytes of memory that older tables keep besides the newest one.
fn kept<B: Descriptors>(older: &[Older<B>], newest: &Store<B>) -> u64 {
    let mut regions: BTreeMap<u64, u64> = BTreeMap::new();
    for region in older.iter().flat_map(|older| &older.regions) {
        regions.insert(region.address(), region.len() as u64);
    }
    for region in newest.regions() {
        regions.remove(&region.address());
    }
    regions.values().sum()
}
