//! The order of events.

use super::super::base::event_queue::EventQueue;
use super::millis;
use proptest::prelude::*;
use rdma_backend::time::Instant;

fn at(count: u64) -> Instant {
    Instant::from_start(millis(count))
}

#[test]
fn by_time_then_by_the_order_of_scheduling() {
    let mut event_queue = EventQueue::new();
    event_queue.schedule(millis(2), 'd');
    event_queue.schedule(millis(1), 'b');
    event_queue.schedule(millis(1), 'c');
    event_queue.schedule(millis(0), 'a');
    assert_eq!(event_queue.deadline(), Some(at(0)));
    assert_eq!(event_queue.next(at(0)), Some('a'));
    assert_eq!((event_queue.next(at(0)), event_queue.deadline()), (None, Some(at(1))));
    assert_eq!(event_queue.next(at(9)), Some('b'));
    // Decided at 1 ms, for at once: after earlier decisions for the same time.
    event_queue.schedule(millis(0), 'x');
    assert_eq!((event_queue.now(), event_queue.next(at(9))), (at(1), Some('c')));
    assert_eq!(event_queue.next(at(9)), Some('x'));
    assert_eq!((event_queue.next(at(9)), event_queue.now()), (Some('d'), at(2)));
    assert_eq!((event_queue.next(at(9)), event_queue.now()), (None, at(9)));
    // Time does not go back.
    assert_eq!((event_queue.next(at(3)), event_queue.now()), (None, at(9)));
}

#[test]
fn for_ever_does_not_wrap() {
    let mut event_queue = EventQueue::new();
    assert_eq!(event_queue.next(at(5)), None);
    event_queue.schedule(core::time::Duration::MAX, ());
    assert_eq!(event_queue.deadline(), Some(Instant::from_start(core::time::Duration::MAX)));
}

proptest! {
    /// Events come out as from a stable sort by time.
    #[test]
    fn is_a_stable_sort(steps in proptest::collection::vec((0u64..4, 0u64..4), 0..60)) {
        let mut event_queue = EventQueue::new();
        let (mut expected, mut seen, mut clock) = (Vec::new(), Vec::new(), 0);
        for (number, (delay, pass)) in steps.iter().enumerate() {
            event_queue.schedule(millis(*delay), number);
            expected.push((clock + delay, number));
            clock += pass;
            while let Some(event) = event_queue.next(at(clock)) {
                seen.push((event_queue.now(), event));
            }
        }
        while let Some(event) = event_queue.next(at(clock + 10)) {
            seen.push((event_queue.now(), event));
        }
        expected.sort_by_key(|(time, _)| *time);
        let expected: Vec<_> = expected.into_iter().map(|(time, number)| (at(time), number)).collect();
        prop_assert_eq!(seen, expected);
    }
}
