//! Completions of one queue pair in a row.

use rdma_backend::{Completed, Completion};

/// Consecutive completions of one queue pair, summed up while they are taken.
pub(crate) struct Run<I> {
    pub(crate) queue_pair: u32,
    pub(crate) count: usize,
    /// Whether all of them announce bytes in the window, as nearly all completions do.
    pub(crate) announces: bool,
    /// How many bytes they announce.
    pub(crate) bytes: u64,
    begin: I,
}

impl<I: Iterator<Item = Completion> + Clone> Run<I> {
    /// Takes the next run out of `polled`.
    #[inline(always)]
    pub(crate) fn next(polled: &mut I) -> Option<Self> {
        // Kept to take the completions one by one, if they cannot be handled as a sum.
        let begin = polled.clone();
        let first = polled.next()?;
        let mut run = Self { queue_pair: first.queue_pair, count: 0, announces: true, bytes: 0, begin };
        run.add(&first);
        loop {
            let mut ahead = polled.clone();
            match ahead.next() {
                Some(next) if next.queue_pair == run.queue_pair => run.add(&next),
                _ => return Some(run),
            }
            *polled = ahead;
        }
    }

    #[inline(always)]
    fn add(&mut self, completion: &Completion) {
        self.count += 1;
        match completion.result {
            // At most a batch of u32, which a u64 holds.
            Ok(Completed::RecvWrite { immediate }) => self.bytes += u64::from(immediate.0),
            _ => self.announces = false,
        }
    }

    pub(crate) fn completions(self) -> impl Iterator<Item = Completion> {
        self.begin.take(self.count)
    }
}
