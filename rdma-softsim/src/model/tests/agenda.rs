//! The order of events.

use super::super::agenda::Agenda;
use super::millis;
use proptest::prelude::*;
use rdma_proto::time::Instant;

fn at(count: u64) -> Instant {
    Instant::from_start(millis(count))
}

#[test]
fn by_time_then_by_the_order_of_scheduling() {
    let mut agenda = Agenda::new();
    agenda.schedule(millis(2), 'd');
    agenda.schedule(millis(1), 'b');
    agenda.schedule(millis(1), 'c');
    agenda.schedule(millis(0), 'a');
    assert_eq!(agenda.deadline(), Some(at(0)));
    assert_eq!(agenda.next(at(0)), Some('a'));
    assert_eq!((agenda.next(at(0)), agenda.deadline()), (None, Some(at(1))));
    assert_eq!(agenda.next(at(9)), Some('b'));
    // Decided at 1 ms, for at once: behind what was decided before for the same moment.
    agenda.schedule(millis(0), 'x');
    assert_eq!((agenda.now(), agenda.next(at(9))), (at(1), Some('c')));
    assert_eq!(agenda.next(at(9)), Some('x'));
    assert_eq!((agenda.next(at(9)), agenda.now()), (Some('d'), at(2)));
    assert_eq!((agenda.next(at(9)), agenda.now()), (None, at(9)));
    // Time does not go back.
    assert_eq!((agenda.next(at(3)), agenda.now()), (None, at(9)));
}

#[test]
fn for_ever_does_not_wrap() {
    let mut agenda = Agenda::new();
    assert_eq!(agenda.next(at(5)), None);
    agenda.schedule(core::time::Duration::MAX, ());
    assert_eq!(agenda.deadline(), Some(Instant::from_start(core::time::Duration::MAX)));
}

proptest! {
    /// Whatever is scheduled when, it comes out as a stable sort by time would have it.
    #[test]
    fn is_a_stable_sort(steps in proptest::collection::vec((0u64..4, 0u64..4), 0..60)) {
        let mut agenda = Agenda::new();
        let (mut expected, mut seen, mut clock) = (Vec::new(), Vec::new(), 0);
        for (number, (delay, pass)) in steps.iter().enumerate() {
            agenda.schedule(millis(*delay), number);
            expected.push((clock + delay, number));
            clock += pass;
            while let Some(event) = agenda.next(at(clock)) {
                seen.push((agenda.now(), event));
            }
        }
        while let Some(event) = agenda.next(at(clock + 10)) {
            seen.push((agenda.now(), event));
        }
        expected.sort_by_key(|(time, _)| *time);
        let expected: Vec<_> = expected.into_iter().map(|(time, number)| (at(time), number)).collect();
        prop_assert_eq!(seen, expected);
    }
}
