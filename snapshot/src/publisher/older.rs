//! Snapshots that a newer one has replaced, for the readers that have begun them (VS-TABLE-007).
//!
//! All are followed by the same history, so later writes are chunks of all tables, in one memory.
//! An older snapshot is given to readers that name it. What it keeps besides the newest one is
//! released once all of them have read it, or when memory runs short. All of it is gone once no
//! reader has been there for a lease.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdma_backend::Region;
use rdma_backend::time::Instant;
use rdma_conn::Descriptors;

use super::Publisher;
use super::filler::{ENTRY, cost};
use super::session::{Log, Terms};
use super::store::Store;
use crate::error::Error;
use crate::reader::Offer;
use crate::wire::Reason;

/// A table that a newer one has replaced.
pub(super) struct Older<B: Descriptors> {
    pub(super) terms: Terms,
    pub(super) log: Log,
    /// First those that the newest table does not have, then those that it shares with it.
    regions: Vec<Arc<B::Region>>,
    /// The regions that the newest table does not have, and the chunks up to their end.
    own: usize,
    chunks: u64,
    /// Since when it has no reader.
    unread: Option<Instant>,
}

impl<B: Descriptors> Older<B> {
    fn new(terms: Terms, store: Store<B>) -> Self {
        let (log, regions) = store.into_table();
        Self { terms, log, regions, own: 0, chunks: 0, unread: None }
    }

    /// Appends the last chunk of the newest table.
    fn follow(&mut self, newest: &Store<B>) {
        let (Some(entry), Some(region)) = (newest.log.entries.last(), newest.regions().back()) else {
            return;
        };
        let mut entry = *entry;
        entry.index = self.log.chunks().into();
        self.log.entries.push(entry);
        if self.regions.last().is_none_or(|last| !Arc::ptr_eq(last, region)) {
            self.regions.push(Arc::clone(region));
        }
    }

    /// A newer table replaces the newest one, so it shares nothing so far.
    fn part_from_newest(&mut self) {
        self.own = self.regions.len();
        self.chunks = self.log.chunks();
    }

    /// Releases its own memory if every reader has its chunks. `slowest` is the number of chunks
    /// that each of its readers has; `None` without readers. Returns whether there was any.
    fn release(&mut self, slowest: Option<u64>, now: Instant) -> bool {
        let Some(slowest) = slowest else {
            self.unread.get_or_insert(now);
            return false;
        };
        self.unread = None;
        if self.own == 0 || slowest < self.chunks {
            return false;
        }
        self.regions.drain(..std::mem::take(&mut self.own));
        let gone = usize::try_from(self.chunks.saturating_sub(self.log.released)).unwrap_or(usize::MAX);
        self.log.entries.drain(..gone.min(self.log.entries.len()));
        self.log.released = self.chunks;
        true
    }
}

impl<B: Descriptors> Publisher<B> {
    /// Returns the memory for another snapshot, which no reader sees before [`Publisher::renew`].
    pub(crate) fn prepare(&self) -> Store<B> {
        Store::new(Arc::clone(self.store.domain()), self.config.memory)
    }

    /// Returns the bytes of the newest snapshot, once it is complete.
    pub(crate) fn snapshot_bytes(&self) -> Option<u64> {
        self.store.log.mark.map(|mark| mark.bytes.get())
    }

    /// Returns what the later writes in the newest table take: their bytes, and entries of their
    /// chunks, which may be more.
    pub(crate) fn log_bytes(&self) -> u64 {
        let Some(mark) = self.store.log.mark else { return 0 };
        let chunks = self.store.log.chunks().saturating_sub(mark.chunks.get());
        let bytes = self.store.bytes().saturating_sub(mark.bytes.get());
        bytes.saturating_add(chunks.saturating_mul(ENTRY))
    }

    /// Returns what the memory of all snapshots takes of the limit.
    pub(crate) fn kept(&self) -> u64 {
        self.store.taken().saturating_add(self.beside)
    }

    /// Counts what older snapshots take of the limit besides the newest one.
    fn account(&mut self) {
        let own = self.older.iter().flat_map(|older| older.regions.iter().take(older.own));
        // Older snapshots may share them.
        let own: BTreeMap<_, _> = own.map(|region| (region.address(), cost(region.len()))).collect();
        let entries = self.older.iter().map(|older| older.log.entries.len() as u64 * ENTRY);
        self.beside = own.values().sum::<u64>().saturating_add(entries.sum());
    }

    /// Adds the last chunk of the newest table to the older ones, which share its history.
    pub(super) fn share(&mut self) {
        self.older.iter_mut().for_each(|older| older.follow(&self.store));
        self.beside = self.beside.saturating_add(self.older.len() as u64 * ENTRY);
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
        self.older.iter_mut().for_each(Older::part_from_newest);
        self.account();
        self.shared_from = shared_from;
        Ok(())
    }

    /// Keeps the memory of all snapshots, and `more` bytes, within the limit. If it is more, the
    /// oldest snapshots that keep memory of their own are removed, so that no reader can hold up
    /// the newest one.
    ///
    /// # Errors
    /// It is more, and no older snapshot keeps any.
    pub(crate) fn fit(&mut self, more: u64) -> Result<(), Error> {
        let limit = self.config.memory;
        while self.kept().saturating_add(more) > limit {
            if !self.shed() {
                return Err(Error::TooMuch { what: "the memory for the snapshot", limit });
            }
        }
        Ok(())
    }

    /// Removes the oldest snapshot that keeps memory of its own, or else the oldest, for its
    /// entries. Returns whether there was one.
    pub(crate) fn shed(&mut self) -> bool {
        let own = self.older.iter().position(|older| older.own > 0);
        let Some(at) = own.or((!self.older.is_empty()).then_some(0)) else { return false };
        tracing::warn!("there is no memory for an older snapshot, so its readers must begin again");
        self.remove(at);
        true
    }

    /// Checks that another snapshot of `total` bytes fits beside the newest one, if no older one
    /// keeps any memory. Otherwise its making would remove them all, and then fail.
    ///
    /// # Errors
    /// It does not.
    pub(crate) fn check_room(&self, total: u64) -> Result<(), Error> {
        let limit = self.config.memory;
        let least = cost(usize::try_from(total).unwrap_or(usize::MAX)).saturating_add(ENTRY);
        if self.store.taken().saturating_add(least) > limit {
            return Err(Error::TooMuch { what: "the memory for another snapshot", limit });
        }
        Ok(())
    }

    /// Releases memory of older snapshots that no reader needs.
    pub(super) fn sweep(&mut self) {
        let now = self.backend.now();
        let mut any = false;
        for older in &mut self.older {
            let sessions = self.members.iter().map(|member| &member.session);
            let snapshot = Some(older.terms.snapshot);
            // One that has not proven the secret releases nothing, and keeps nothing.
            let readers = sessions.filter(|session| session.snapshot == snapshot && session.is_proven());
            any |= older.release(readers.map(|session| session.has).min(), now);
        }
        if any {
            self.account();
        }
        let lease = self.config.lease;
        let is_over = |older: &Older<B>| older.unread.is_some_and(|since| now.since(since) >= lease);
        while let Some(at) = self.older.iter().position(is_over) {
            self.remove(at);
        }
    }

    /// Removes an older snapshot. Its sessions end before its memory is released.
    fn remove(&mut self, at: usize) {
        let older = self.older.remove(at);
        self.refuse(Reason::Snapshot, |session| session.snapshot == Some(older.terms.snapshot));
        self.account();
    }
}
