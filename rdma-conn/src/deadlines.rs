use std::collections::BTreeSet;

/// An ordered set of deadlines, at most one per key.
///
/// An event loop can keep deadlines of its own in it, such as one per connection. It then sleeps
/// until the nearest of these or [`Endpoint::next_timeout`](crate::Endpoint::next_timeout).
///
/// Keep each key's current deadline and pass it to [`Deadlines::set`], which then need not search.
#[derive(Clone, Debug)]
pub struct Deadlines<T, K> {
    all: BTreeSet<(T, K)>,
    nearest: Option<T>,
}

impl<T: Copy + Ord, K: Copy + Ord> Deadlines<T, K> {
    /// Returns an empty set.
    pub const fn new() -> Self {
        Self { all: BTreeSet::new(), nearest: None }
    }

    /// Returns the nearest deadline.
    #[inline]
    pub fn nearest(&self) -> Option<T> {
        self.nearest
    }

    /// Changes the deadline of `key` from `*kept` to `new`, and updates `*kept`.
    pub fn set(&mut self, key: K, kept: &mut Option<T>, new: Option<T>) {
        if *kept == new {
            return;
        }
        if let Some(old) = kept.take() {
            self.all.remove(&(old, key));
        }
        if let Some(new) = new {
            self.all.insert((new, key));
        }
        *kept = new;
        // Stored, because every turn of an event loop asks for it.
        self.nearest = self.all.first().map(|(at, _)| *at);
    }

    /// Removes the nearest deadline if it has passed by `now`, and returns its key. Then set the
    /// value that you keep for this key to `None`.
    pub fn take(&mut self, now: T) -> Option<K> {
        if self.nearest? > now {
            return None;
        }
        let taken = self.all.pop_first();
        self.nearest = self.all.first().map(|(at, _)| *at);
        taken.map(|(_, key)| key)
    }
}

impl<T: Copy + Ord, K: Copy + Ord> Default for Deadlines<T, K> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It behaves like a list of all keys that is searched each time.
    #[test]
    fn each_key_has_one_deadline_and_the_nearest_comes_first() {
        let mut random = rdma_softsim::Random::new(1);
        let mut deadlines = Deadlines::new();
        let mut kept = [None::<u64>; 8];
        let mut taken = 0;
        for now in 0..2000_u64 {
            let key = random.within(0..=7) as usize;
            let new = (random.within(0..=3) > 0).then(|| now + random.within(0..=20));
            deadlines.set(key, &mut kept[key], new);
            assert_eq!(deadlines.nearest(), kept.iter().copied().flatten().min());
            while let Some(key) = deadlines.take(now) {
                assert!(kept.iter().flatten().all(|at| *at >= kept[key].expect("has one")), "{now}");
                assert!(kept[key].take().expect("has one") <= now);
                taken += 1;
            }
            assert!(kept.iter().flatten().all(|at| *at > now), "one is left that has come");
        }
        assert!(taken > 100);
        for (key, kept) in kept.iter_mut().enumerate() {
            deadlines.set(key, kept, None);
        }
        assert!(deadlines.all.is_empty() && deadlines.nearest().is_none());
    }
}
