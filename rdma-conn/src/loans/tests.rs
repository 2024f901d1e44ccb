//! Loans alone, and under shuttle with a thread that writes, two of the device, and one that frees
//! the client, in all orders that shuttle tries: `.ci/run interleavings`.

use super::*;

#[cfg(shuttle)]
mod walked;

#[cfg(not(shuttle))]
mod alone {
    use super::*;

    type Held = Arc<Loan>;

    fn hold(loan: Loan) -> Result<Held, ()> {
        Ok(Arc::new(loan))
    }

    /// Lends 10..20 of 30 bytes, and returns what a connection holds.
    fn lent() -> (Loans<Held>, Held) {
        let mut loans = Loans::new();
        assert_eq!(loans.lend(10..20, hold), Ok(true));
        let held = Arc::clone(loans.open().expect("a part").0);
        (loans, held)
    }

    #[test]
    fn bytes_are_reported_up_to_the_oldest_part_that_is_not_released() {
        let (mut loans, held) = lent();
        loans.accept(5);
        assert_eq!(loans.report(u64::MAX), 5);
        loans.accept(25);
        assert!(loans.open().is_none());
        assert_eq!(loans.lend(30..40, hold), Ok(true));
        loans.accept(10);
        // The second one is released at once: no connection has a clone.
        assert_eq!((loans.report(u64::MAX), loans.report(u64::MAX)), (5, 0));
        drop(held);
        assert_eq!((loans.report(7), loans.report(u64::MAX)), (7, 23));
        assert_eq!((loans.accepted(), loans.reported(), loans.in_flight()), (40, 40, 0));
    }

    #[test]
    fn a_part_of_which_bytes_are_not_accepted_is_not_reported() {
        let mut loans = Loans::new();
        let lose = |loan| {
            drop(loan);
            Ok::<_, ()>(())
        };
        assert_eq!(loans.lend(10..20, lose), Ok(true));
        loans.accept(15);
        assert_eq!(loans.report(u64::MAX), 10);
        loans.accept(5);
        assert_eq!(loans.report(u64::MAX), 10);
    }

    #[test]
    fn a_part_that_is_refused_is_copied() {
        let mut loans = Loans::<Held>::new();
        assert_eq!(loans.lend(0..10, |_| Err("no memory")), Err("no memory"));
        loans.accept(10);
        assert_eq!((loans.report(u64::MAX), loans.in_flight()), (10, 0));
    }

    #[test]
    fn parts_follow_each_other() {
        let (mut loans, _held) = lent();
        assert_eq!(loans.lend(20..30, hold), Ok(false));
        loans.accept(25);
        assert_eq!(loans.lend(24..30, hold), Ok(false));
        assert_eq!(loans.lend(25..25, hold), Ok(false));
        assert_eq!(loans.lend(25..30, hold), Ok(true));
    }

    #[test]
    fn the_end_lets_go_of_what_is_in_flight_and_of_nothing_else() {
        let mut none = Loans::<Held>::new();
        none.accept(5);
        assert_eq!(none.end(|| Err("a connection without loans ends")), Ok(0));
        let (mut loans, held) = lent();
        loans.accept(30);
        // A connection that cannot end keeps the memory.
        assert_eq!(loans.end(|| Err("not now")), Err("not now"));
        assert_eq!((loans.in_flight(), loans.report(u64::MAX)), (1, 0));
        let mut held = Some(held);
        let let_go = || {
            held = None;
            Ok::<_, ()>(())
        };
        assert_eq!(loans.end(let_go), Ok(0));
        assert_eq!((loans.in_flight(), loans.report(u64::MAX)), (0, 0));
        assert_eq!(loans.lend(30..40, hold), Ok(false));
    }

    #[test]
    fn memory_that_the_device_keeps_is_told() {
        let (mut loans, held) = lent();
        loans.accept(12);
        assert_eq!(loans.end(|| Ok::<_, ()>(())), Ok(10));
        drop(held);
    }

    /// Under Miri, whose threads see stores of others late unless an order forbids it.
    #[test]
    fn what_a_device_did_with_a_part_is_before_its_report() {
        use std::sync::atomic::AtomicU32;

        let reads = Arc::new(AtomicU32::new(0));
        let (mut loans, held) = lent();
        loans.accept(20);
        let device = std::thread::spawn({
            let reads = Arc::clone(&reads);
            move || {
                reads.store(1, Ordering::Relaxed);
                drop(held);
            }
        });
        let mut reported = 0;
        while reported < 20 {
            reported += loans.report(u64::MAX);
            std::thread::yield_now();
        }
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        device.join().expect("no panic");
    }
}
